"""Sample order as a function: `permutation(index, size, key)` is a bijection of [0, size), evaluated in O(1) memory.

A Feistel network shuffles a power of four at least as large as `size`; values that fall outside are sent
through it again until they fall inside (cycle walking; from 64 samples on, four passes at most on average). Nothing is
stored, so a run resumes anywhere and a corpus of a billion samples needs no index array. The C++ of csrc/host/order.cpp
does it where it was built; `permutation_numpy` is the reference, with the same result.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from maelm_fast import native
from maelm_fast.philox import Stream, philox

_FEISTEL_ROUNDS = 8  # with 4 the order of a few ten thousand samples is measurably uneven
_MIN_HALF_BITS = 4  # below this a network has too few distinct round functions to look random


def permutation(index: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Sample ids, int64, at places `index` (any shape, each in [0, size)) of epoch `epoch`'s order."""
    flat = np.ascontiguousarray(index).reshape(-1)
    if flat.size and not (flat.min() >= 0 and flat.max() < size):
        raise ValueError(f"index outside [0, {size})")
    host = native.host()
    if host is None:
        ids = permutation_numpy(flat, size, seed, epoch)
    else:
        ids = host.permute(flat, size, _half_bits(size), _FEISTEL_ROUNDS, seed & 0xFFFFFFFFFFFFFFFF, epoch)
    return ids.reshape(np.shape(index))


def subset(count: int, size: int) -> NDArray[np.int64]:
    """`count` of the ids [0, size), ascending: one pseudo-random choice for all, and a smaller one within a larger."""
    return np.sort(permutation(np.arange(count), size, seed=0, epoch=0))


def permutation_numpy(index: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """`permutation` of one row of places, without its check."""
    half = _half_bits(size)
    values = _feistel(index, half, seed, epoch)
    while (outside := np.flatnonzero(values >= size)).size:
        values[outside] = _feistel(values[outside], half, seed, epoch)
    return values


def _half_bits(size: int) -> int:
    return max(_MIN_HALF_BITS, -(-(size - 1).bit_length() // 2))


def _feistel(values: NDArray[np.int64], half: int, seed: int, epoch: int) -> NDArray[np.int64]:
    low = (1 << half) - 1
    left, right = values >> half, values & low
    for round_ in range(_FEISTEL_ROUNDS):
        word = philox((right, round_, epoch, int(Stream.ORDER)), seed)[0]
        left, right = right, left ^ (word & low)
    return (left << half) | right


def samples_at(start: int, count: int, size: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(sample ids, epochs), each (count,) int64, of places start .. start+count-1 of the endless order of a run."""
    places = np.arange(start, start + count, dtype=np.int64)
    epochs, within = places // size, places % size
    ids = np.empty_like(places)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        ids[here] = permutation(within[here], size, seed, int(epoch))
    return ids, epochs
