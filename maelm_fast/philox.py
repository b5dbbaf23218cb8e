"""Philox4x32, the counter-based generator behind masks, sample order and dropout: random words are a function, not a
state.

A word is named by what it is for (stream), the epoch, the sample and the place in it, so that any worker, in any batch,
at any time draws the same bits. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011); the test vectors
are those of its Random123 library.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = TypeVar("Words", Tensor, NDArray[np.int64])

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF
ROUNDS = 10


class Stream(IntEnum):
    """What a word is drawn for; the last word of the counter."""

    MASK = 0  # which positions are masked
    ROUNDING = 1  # how many, with stochastic rounding
    POLICY = 2  # what stands in their place, with the BERT policy
    REPLACEMENT = 3  # the random token that does, for the random policy too
    ORDER = 4  # sample order


def philox(counter: Sequence[Words | int], seed: Words | int, rounds: int = ROUNDS) -> list[Words]:
    """Four arrays of 32-bit words, which broadcast to the shape of the counter's.

    counter: four 32-bit words, int64 tensors on any device or NumPy arrays (one array at least) or numbers. seed: 64
    bits. A product of two words may wrap the sign; its halves are masked out of it."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & LOW, (seed >> 32) & LOW
    for _ in range(rounds):
        high, low = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (low >> 32) & LOW ^ c1 ^ k0, low & LOW, (high >> 32) & LOW ^ c3 ^ k1, high & LOW
        k0, k1 = (k0 + _WEYL[0]) & LOW, (k1 + _WEYL[1]) & LOW
    return [c0, c1, c2, c3]  # type: ignore[list-item]


def stacked(words: Sequence[Tensor]) -> Tensor:
    """(..., 4)"""
    return torch.stack(torch.broadcast_tensors(*words), dim=-1)


def position_words(length: int, samples: Tensor, epochs: Tensor | int, stream: Stream, seed: int) -> Tensor:
    """(S, length) int64, a 32-bit word per position: word p is word p % 4 of block p // 4. samples, epochs: (S, 1)."""
    blocks = torch.arange(-(-length // 4), device=samples.device)
    return stacked(philox((blocks, samples, epochs, int(stream)), seed)).flatten(1)[:, :length]


def fold_seed(seed: int, *path: int) -> int:
    """A 63-bit seed for one place in a computation: splitmix64 over the seed and the place's coordinates."""
    state = seed & 0xFFFFFFFFFFFFFFFF
    for coordinate in path:
        state = (state + (coordinate + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1
