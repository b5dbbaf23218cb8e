"""Examples, one after another in a packed row, and which of them go together.

Which examples make a step depends on the number of examples, the seed and the epoch, on nothing else: two encoders
that are compared learn from the same examples in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from maelm_fast.batch import layout_of
from maelm_fast.data.order import permutation
from maelm_fast.encoders import TokenBatch
from maelm_fast.text import Inputs


def token_batch(inputs: Inputs, indices: Sequence[int] | NDArray[Any]) -> TokenBatch:
    """The inputs at `indices`, in that order, on the CPU."""
    chosen = [inputs.ids[i] for i in indices]
    ids = np.concatenate(chosen) if chosen else np.empty(0, dtype=np.int32)
    types = None
    if inputs.token_types is not None:
        types = torch.from_numpy(np.concatenate([inputs.token_types[i] for i in indices]))
    return TokenBatch(torch.from_numpy(ids), layout_of([len(part) for part in chosen]), types)


def update_order(n: int, batch_size: int, seed: int, epoch: int) -> Iterator[NDArray[np.int64]]:
    """Indices of the examples of each step of an epoch: every example once, the last step possibly a smaller one
    (released code)."""
    for start in range(0, n, batch_size):
        yield permutation(np.arange(start, min(start + batch_size, n)), n, seed, epoch)


def evaluation_batches(lengths: Sequence[int], tokens: int) -> list[NDArray[np.int64]]:
    """Indices of inputs that are evaluated together, int64: of like length, longest first, so that a batch that is too
    large for the memory is the first. Padded to their longest they have at most `tokens` tokens, and no fewer than one
    input."""
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    batches, start = [], 0
    while start < len(order):
        count = max(1, tokens // max(1, lengths[order[start]]))
        batches.append(order[start : start + count])
        start += count
    return batches
