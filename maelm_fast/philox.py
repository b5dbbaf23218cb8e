"""Philox4x32-10, the counter-based generator behind masks and sample order: random words are a function, not a state.

A word is named by what it is for (stream), the epoch, the sample and the place in it, so that any worker, in any batch,
at any time draws the same bits. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011); the test vectors
are those of its Random123 library.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
ROUNDS = 10


class Stream(IntEnum):
    """What a word is drawn for; the last word of the counter."""

    MASK = 0  # which positions are masked
    ROUNDING = 1  # how many, with stochastic rounding
    POLICY = 2  # what stands in their place, with the BERT policy
    REPLACEMENT = 3  # the random token that does, for the random policy too
    ORDER = 4  # sample order


def philox4x32(counter: tuple[NDArray[np.uint64] | int, ...], seed: int) -> list[NDArray[np.uint64]]:
    """Four arrays of 32-bit words (held in uint64) for a counter of four 32-bit words that broadcast together.

    seed: 64-bit key. Results have the counters' broadcast shape."""
    c0, c1, c2, c3 = np.broadcast_arrays(*[np.asarray(word, dtype=np.uint64) for word in counter])
    key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for _ in range(ROUNDS):
        high = c0 * _MULTIPLIERS[0]
        low = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (low >> _HALF) ^ c1 ^ np.uint64(key[0]),
            low & _LOW,
            (high >> _HALF) ^ c3 ^ np.uint64(key[1]),
            high & _LOW,
        )
        key = [(word + weyl) & 0xFFFFFFFF for word, weyl in zip(key, _WEYL, strict=True)]
    return [c0, c1, c2, c3]


def position_words(
    samples: NDArray[np.int64], length: int, epoch: int, stream: Stream, seed: int
) -> NDArray[np.uint64]:
    """One 32-bit word per position: (S, length) for samples (S,). Word p is word p % 4 of block p // 4."""
    blocks = np.arange(-(-length // 4), dtype=np.uint64)[None, :]
    words = philox4x32((blocks, samples.astype(np.uint64)[:, None], epoch, stream), seed)
    return np.stack(words, axis=-1).reshape(len(samples), -1)[:, :length]


def fold_seed(seed: int, *path: int) -> int:
    """A 63-bit seed for one place in a computation: splitmix64 over the seed and the place's coordinates."""
    state = seed & 0xFFFFFFFFFFFFFFFF
    for coordinate in path:
        state = (state + (coordinate + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1
