"""Whole documents into token budgets: best-fit-decreasing bin packing, and its bins evened out.

The C++ of csrc/host/packing.cpp does it where it was built; `best_fit_numpy` and `spread_numpy` beside it are the
references, with the same results, and do it where it was not.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import ArrayLike, NDArray

from maelm_fast import native
from maelm_fast.config import require

_LARGEST_BUDGET = 2**31 - 1


def best_fit(lengths: ArrayLike, budget: int) -> tuple[NDArray[np.int32], int]:
    """Packs items of `lengths` tokens into bins of at most `budget` tokens: ((I,) int32 bin of each item, bins).

    The longest item goes first (ties: the lower index), each into the fullest bin it still fits in (ties: the lowest
    bin number), else into a new bin. Bins are numbered from 0 as they are opened. Items of one length therefore fill
    the bins one after another in their order.

    lengths: (I,) integers. Raises UserError if one of them is not positive or is over the budget."""
    lengths = _checked(lengths, budget)
    host = native.host()
    if host is None:
        return best_fit_numpy(lengths, budget)
    bins, opened = host.best_fit(lengths, budget)
    return bins, opened


def spread(lengths: ArrayLike, budget: int) -> tuple[NDArray[np.int32], int]:
    """Packs items into as many bins as `best_fit` needs, evenly full; takes, returns and raises what it does.

    The longest item goes first (ties: the lower index), each into the emptiest bin (ties: the lowest bin number). Where
    that would take a bin over the budget, which is where best fit fills them all anyway, its bins are returned."""
    lengths = _checked(lengths, budget)
    host = native.host()
    if host is None:
        return spread_numpy(lengths, budget)
    bins, opened = host.spread(lengths, budget)
    return bins, opened


def _checked(lengths: ArrayLike, budget: int) -> NDArray[np.int64]:
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or (lengths.size and lengths.dtype.kind not in "iu"):
        raise ValueError("lengths must be one row of integers")
    lengths = lengths.astype(np.int64, copy=False)
    require(0 < budget <= _LARGEST_BUDGET, f"a budget must lie between 1 and {_LARGEST_BUDGET} tokens, not {budget}")
    if lengths.size:
        shortest, longest = int(lengths.min()), int(lengths.max())
        require(shortest > 0, f"cannot pack a sample of {shortest} tokens: every sample must have at least one")
        require(longest <= budget, f"a sample of {longest} tokens is over the budget of {budget}: raise the budget")
    return lengths


def best_fit_numpy(lengths: NDArray[np.int64], budget: int) -> tuple[NDArray[np.int32], int]:
    """`best_fit` without its checks, by a search over all open bins for every item."""
    bins = np.empty(len(lengths), dtype=np.int32)
    left = np.empty(len(lengths), dtype=np.int64)
    opened = 0
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        rest = left[:opened] - length
        rest[rest < 0] = budget
        chosen = int(rest.argmin()) if opened else 0
        if not opened or rest[chosen] == budget:
            left[opened] = budget
            chosen, opened = opened, opened + 1
        left[chosen] -= length
        bins[item] = chosen
    return bins, opened


def spread_numpy(lengths: NDArray[np.int64], budget: int) -> tuple[NDArray[np.int32], int]:
    """`spread` without its checks."""
    best, opened = best_fit_numpy(lengths, budget)
    bins = np.empty_like(best)
    emptiest = [(0, bin_) for bin_ in range(opened)]  # a heap
    for item in np.argsort(-lengths, kind="stable").tolist():
        filled, bin_ = emptiest[0]
        filled += int(lengths[item])
        if filled > budget:
            return best, opened
        heapq.heapreplace(emptiest, (filled, bin_))
        bins[item] = bin_
    return bins, opened
