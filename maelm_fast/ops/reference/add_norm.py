"""Plain PyTorch reference of the end of a post-LN sublayer."""

from __future__ import annotations

from torch import Tensor

from maelm_fast.ops.reference.dropout import dropout
from maelm_fast.ops.reference.layer_norm import layer_norm, wide


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    place: int = 0,
) -> Tensor:
    """layer_norm(residual + dropout(x)), a post-LN sublayer's end; the sum is not rounded before the norm.

    x, residual: (T, d). weight, bias: (d,). Returns (T, d) in x's dtype."""
    total = wide(residual) + dropout(wide(x), dropout_p, seed, place)
    return layer_norm(total, weight, bias, eps).to(x.dtype)
