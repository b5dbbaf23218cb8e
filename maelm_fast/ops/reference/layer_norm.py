"""LayerNorm as every op that ends in one computes it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """F.layer_norm over the last axis, in fp32 or x's own dtype if wider; the result has x's dtype.

    weight, bias: (d,), of any floating-point dtype."""
    total = wide(x)
    return F.layer_norm(total, (x.shape[-1],), weight.to(total.dtype), bias.to(total.dtype), eps).to(x.dtype)


def wide(x: Tensor) -> Tensor:
    """x in fp32, or as it is if it is fp32 or wider."""
    return x if x.element_size() >= 4 else x.float()
