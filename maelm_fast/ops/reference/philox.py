"""Philox4x32 on tensors: counter-based random words, any device (maelm_fast/philox.py is the same in NumPy)."""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor | int, rounds: int) -> Tensor:
    """(..., 4) int64, four 32-bit words. counter: int64 tensors of 32-bit words, broadcast together. seed: 64 bits.

    A product of two words may wrap the sign; its halves are masked out of it."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & LOW, (seed >> 32) & LOW
    for _ in range(rounds):
        high, low = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (low >> 32) & LOW ^ c1 ^ k0, low & LOW, (high >> 32) & LOW ^ c3 ^ k1, high & LOW
        k0, k1 = (k0 + WEYL[0]) & LOW, (k1 + WEYL[1]) & LOW
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), dim=-1)
