"""Plain PyTorch references of the ops that end in a LayerNorm."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from maelm_fast.ops.reference.dropout import dropout


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """F.layer_norm over the last axis, in fp32 or x's own dtype if wider; the result has x's dtype."""
    return F.layer_norm(_wide(x), (x.shape[-1],), weight, bias, eps).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.element_size() >= 4 else x.float()


def embed_packed(
    ids: Tensor,
    positions: Tensor,
    token_table: Tensor,
    position_table: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    dropout_p: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """dropout(layer_norm(token_table[ids] + position_table[positions])).

    ids, positions: (T,) int32. token_table: (V, d). position_table: (P, d). weight, bias: (d,). Returns (T, d)."""
    x = F.embedding(ids, token_table) + F.embedding(positions, position_table)
    return dropout(layer_norm(x, weight, bias, eps), dropout_p, seed)


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, *, eps: float, dropout_p: float = 0.0, seed: int = 0
) -> Tensor:
    """layer_norm(residual + dropout(x)), a post-LN sublayer's end; the sum is not rounded before the norm.

    x, residual: (T, d). weight, bias: (d,). Returns (T, d) in x's dtype."""
    total = _wide(residual) + _wide(dropout(x, dropout_p, seed))
    return layer_norm(total, weight, bias, eps).to(x.dtype)


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

    The decoder's input. encoder_out: (T, d). source, positions: (N,) int32; source is an encoder row or -1.
    mask_embedding: (d,). Returns (N, d) in encoder_out's dtype."""
    mask_embedding = mask_embedding.to(encoder_out.dtype)
    if encoder_out.shape[0] == 0:  # every token is masked: no row to gather, not even to discard
        x = mask_embedding.expand(source.shape[0], -1)
    else:
        gathered = encoder_out.index_select(0, source.clamp(min=0))
        x = gathered.where((source >= 0)[:, None], mask_embedding)
    x = x + F.embedding(positions, position_table).to(encoder_out.dtype)
    return layer_norm(x, weight, bias, eps)
