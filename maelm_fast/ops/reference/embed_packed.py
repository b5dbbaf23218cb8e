"""Plain PyTorch reference of the encoder's input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from maelm_fast.ops.reference.dropout import dropout
from maelm_fast.ops.reference.layer_norm import layer_norm, wide


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
    seed: Tensor | None = None,
    place: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """dropout(layer_norm(token_table[ids] + position_table[positions])).

    ids, positions: (T,) int32. token_table: (V, d). position_table: (P, d). weight, bias: (d,). Returns (T, d) in
    `dtype` (the token table's if None)."""
    x = wide(F.embedding(ids, token_table)) + wide(F.embedding(positions, position_table))
    return dropout(layer_norm(x, weight, bias, eps).to(dtype or token_table.dtype), dropout_p, seed, place)
