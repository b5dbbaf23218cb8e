"""Plain PyTorch reference of the feed-forward sublayer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def feed_forward(x: Tensor, weight_in: Tensor, bias_in: Tensor, weight_out: Tensor, bias_out: Tensor) -> Tensor:
    """F.linear(F.gelu(F.linear(x, weight_in, bias_in)), weight_out, bias_out), with the exact (erf) GELU.

    x: (T, d). weight_in: (f, d). weight_out: (d, f). Returns (T, d)."""
    return F.linear(F.gelu(F.linear(x, weight_in, bias_in)), weight_out, bias_out)
