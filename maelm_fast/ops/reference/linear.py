"""Plain PyTorch reference of a linear layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear(x, weight, bias). x: (..., in). weight: (out, in). Returns (..., out)."""
    return F.linear(x, weight, bias)
