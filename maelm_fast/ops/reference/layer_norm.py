"""LayerNorm as every op that ends in one computes it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """F.layer_norm over the last axis, in fp32 or x's own dtype if wider; the result has x's dtype."""
    return F.layer_norm(wide(x), (x.shape[-1],), weight, bias, eps).to(x.dtype)


def wide(x: Tensor) -> Tensor:
    return x if x.element_size() >= 4 else x.float()
