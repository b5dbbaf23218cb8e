"""Plain PyTorch reference of the decoder's input."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from maelm_fast.ops.reference.layer_norm import layer_norm, wide


def scatter_to_decoder(
    encoder_out: Tensor,
    source: Tensor,
    mask_embedding: Tensor,
    positions: Tensor,
    position_table: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
) -> Tensor:
    """layer_norm(where(source >= 0, encoder_out[source], mask_embedding) + position_table[positions]).

    encoder_out: (T, d). source: (N,) int32 or int64, an encoder row or -1, each row at most once. positions: (N,), the
    dtype of source. mask_embedding: (d,). position_table: (P, d). Returns (N, d) in encoder_out's dtype."""
    mask = wide(mask_embedding)
    if encoder_out.shape[0] == 0:  # every token is masked: no row to gather, not even to discard
        x = mask.expand(source.shape[0], -1) + wide(encoder_out).sum()  # 0, so that its gradient is not None
    else:
        gathered = wide(encoder_out.index_select(0, source.clamp(min=0)))
        x = gathered.where((source >= 0)[:, None], mask)
    x = x + wide(F.embedding(positions, position_table))
    return layer_norm(x, weight, bias, eps).to(encoder_out.dtype)
