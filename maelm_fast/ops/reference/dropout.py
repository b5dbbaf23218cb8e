"""Dropout whose mask is a function of (seed, place, row, column), so a backward pass draws it again, not stores it.

Every backend draws the same bits. Eight neighbouring columns share one Philox4x32-7 block:

    words = philox(counter=(column // 8, row, place, 0), key=seed)         # four 32-bit words, eight halves
    keep[row, column] = half(words, column % 8) >= round(p * 65536)        # low half of word 0, its high half, ...

Seven rounds pass the statistical batteries (Salmon et al. 2011); masks and sample order, drawn once, keep ten. The rate
is exact to 2**-16. Attention weights have an order of their own (keep_weights). The seed is a tensor, so that a
captured CUDA graph can be told another one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from maelm_fast.errors import UserError
from maelm_fast.philox import philox, stacked

ROUNDS = 7
_LANES = 8  # columns a block
_CHUNK = 1 << 14  # blocks at a time: the integer arithmetic stays in the cache


def keep_mask(shape: Sequence[int], p: float, seed: Tensor, place: int = 0, dtype: torch.dtype = torch.bool) -> Tensor:
    """Tensor of `shape` on seed's device, True (1 in another dtype) with probability 1 - p; rows are all axes but the
    last. seed: one int64. place: an int below 2**32, the dropout's site in the model."""
    rows = torch.arange(math.prod(shape[:-1]), device=seed.device)
    return _keep(rows, shape[-1], p, seed, place, 0, dtype).view(*shape)


def keep_weights(
    rows: Tensor, heads: int, columns: int, p: float, seed: Tensor, place: int = 0, dtype: torch.dtype = torch.bool
) -> Tensor:
    """(heads, *rows.shape, columns): which attention weights are kept. rows: packed rows of the queries. columns: how
    many keys; a key counts from its sequence's first.

    Of each 32 keys, a block's eight are those that one thread of a matrix product holds:

        words = philox(counter=(4 * (key // 32) + key % 8 // 2, row, place, head), key=seed)
        half = 2 * (key % 32 // 8) + key % 2
    """
    key = torch.arange(columns, device=seed.device)
    source = key // 32 * 32 + key % 8 // 2 * _LANES + key % 32 // 8 * 2 + key % 2
    drawn = -(-columns // 32) * 32
    parts = [_keep(rows.reshape(-1), drawn, p, seed, place, head, dtype)[:, source] for head in range(heads)]
    return torch.stack(parts).view(heads, *rows.shape, columns)


def _keep(rows: Tensor, columns: int, p: float, seed: Tensor, place: int, part: int, dtype: torch.dtype) -> Tensor:
    """(R, columns), the rows numbered `rows` (R,)."""
    blocks = -(-columns // _LANES)
    seed = seed.reshape(())
    out = torch.empty(len(rows), columns, dtype=dtype, device=seed.device)
    step = max(1, _CHUNK // max(1, blocks))
    column = torch.arange(blocks, device=seed.device)
    for start in range(0, len(rows), step):
        row = rows[start : start + step].long()[:, None]
        words = stacked(philox((column, row, place, part), seed, ROUNDS)).to(torch.uint32)  # (rows, blocks, 4)
        halves = words.view(torch.uint16).to(torch.int32).reshape(len(row), -1)[:, :columns]
        out[start : start + step] = halves >= threshold(p)
    return out


def threshold(p: float) -> int:
    """A 16-bit half below this drops its element."""
    return round(p * 65536)


def dropout(x: Tensor, p: float, seed: Tensor | None, place: int = 0) -> Tensor:
    """F.dropout(x, p), reproducible from seed and place.

    seed: one int64 on x's device. Raises UserError without a seed, or for p outside [0, 1)."""
    check_dropout(p, seed)
    if seed is None or p == 0.0:
        return x
    return x * keep_mask(x.shape, p, seed, place, x.dtype) * (1.0 / (1.0 - p))


def check_dropout(p: float, seed: Tensor | None) -> None:
    """Raises UserError unless p is in [0, 1) and there is a seed if p is not 0."""
    if not 0.0 <= p < 1.0:
        raise UserError(f"dropout: p must be at least 0 and below 1, not {p}")
    if p > 0.0 and seed is None:
        raise UserError("dropout: p > 0 needs a seed, one int64 on the tensors' device")
