"""What the kernels share: dropout bits, and rows of any width.

A kernel file holds `_x_fwd_kernel`, `_x_bwd_kernel` and launchers that take and return tensors; no autograd, no config,
no registration. Loads are widened to fp32 at once: what is computed is fp32, what is stored has the tensor's dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

FUSED = {"enable_fp_fusion": True}
"""Launch option of every kernel: multiply and add in one instruction. The default up to Triton 3.9, but not of 3.10."""
DROPOUT_ROUNDS = tl.constexpr(7)


@triton.jit
def keep_tile(seed, place, rows, GROUPS: tl.constexpr, threshold):
    """(R, GROUPS * 8) bools: which columns of each of the R rows in `rows` dropout keeps. The bits are those of
    ops/reference/dropout.py."""
    R: tl.constexpr = rows.shape[0]
    zero = tl.zeros((R, GROUPS), tl.int32)
    group = zero + tl.arange(0, GROUPS)[None, :]
    a, b, c, d = tl.philox(
        seed, group, zero + rows.to(tl.int32)[:, None], (zero + place).to(tl.int32), zero, DROPOUT_ROUNDS
    )
    even = tl.join(tl.join(a & 0xFFFF, c & 0xFFFF), tl.join(b & 0xFFFF, d & 0xFFFF))  # (R, GROUPS, 2, 2): a, b, c, d
    odd = tl.join(tl.join(a >> 16, c >> 16), tl.join(b >> 16, d >> 16))
    halves = tl.join(tl.reshape(even, (R, GROUPS, 4)), tl.reshape(odd, (R, GROUPS, 4)))  # low, high of each word
    return tl.reshape(halves, (R, GROUPS * 8)).to(tl.int32) >= threshold


@triton.jit
def keep_weights(seed, place, head, rows, start, COLUMNS: tl.constexpr, threshold):
    """(R, COLUMNS) bools: which weights dropout keeps, of packed query rows `rows` (R,) to the keys from `start` on,
    a multiple of 32. The bits are those of ops/reference/dropout.py: a block's columns are those that one thread
    holds of a product's 32, so that no bit has to change threads."""
    R: tl.constexpr = rows.shape[0]
    SPANS: tl.constexpr = COLUMNS // 32
    zero = tl.zeros((R, SPANS * 4), tl.int32)
    group = zero + (start // 8 + tl.arange(0, SPANS * 4))[None, :]
    a, b, c, d = tl.philox(
        seed, group, zero + rows.to(tl.int32)[:, None], (zero + place).to(tl.int32), zero + head, DROPOUT_ROUNDS
    )
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (R, SPANS, 4, 4))  # a, b, c, d
    halves = tl.join(words & 0xFFFF, words >> 16)  # (R, SPANS, lane pair, word, half)
    return tl.reshape(tl.permute(halves, (0, 1, 3, 2, 4)), (R, COLUMNS)).to(tl.int32) >= threshold


@triton.jit
def row_statistics(x, shift, inside, WIDTH: tl.constexpr, eps):
    """x - mean, mean and 1 / sqrt(variance + eps) of the rows of x (R, BLOCK), fp32; the variance in a second pass over
    the registers. shift: (R,) a value near the row's own; a constant row then has a variance of exactly zero.
    inside: (1, BLOCK), which columns exist."""
    moved = tl.where(inside, x - shift[:, None], 0.0)
    offset = tl.sum(moved, axis=1) / WIDTH
    centred = tl.where(inside, moved - offset[:, None], 0.0)
    variance = tl.sum(centred * centred, axis=1) / WIDTH
    return centred, shift + offset, tl.rsqrt(variance + eps)


@triton.jit
def norm_gradient(scaled, normal, rstd, WIDTH: tl.constexpr):
    """Gradient of a LayerNorm's input (R, BLOCK). scaled: the output's gradient times the norm's weight, 0 outside the
    row. normal: the normalised input. rstd: (R,)."""
    along = tl.sum(scaled * normal, axis=1) / WIDTH
    mean = tl.sum(scaled, axis=1) / WIDTH
    return (scaled - mean[:, None] - normal * along[:, None]) * rstd[:, None]


@triton.jit(do_not_specialize=["count"])
def _sum_partials_kernel(
    partials,  # (2 or 3, count, WIDTH) fp32
    first,  # (WIDTH,) sum of partials[0]
    second,  # (WIDTH,) sum of partials[1]
    third,  # (WIDTH,) sum of partials[2], or None
    count,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column[None, :] < WIDTH
    source = partials + tl.program_id(1).to(tl.int64) * count * WIDTH
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(source + row * WIDTH + column[None, :], mask=(row < count) & inside, other=0.0)
    out = tl.sum(total, axis=0)
    if tl.program_id(1) == 0:
        tl.store(first + column, out, mask=column < WIDTH)
    elif tl.program_id(1) == 1:
        tl.store(second + column, out, mask=column < WIDTH)
    elif third is not None:
        tl.store(third + column, out, mask=column < WIDTH)


def sum_partials(partials: Tensor, *dtypes: torch.dtype) -> list[Tensor]:
    """partials.sum(1) of (2 or 3, count, width) fp32, always added in the same order, as tensors of these dtypes."""
    vectors, count, width = partials.shape
    sums = [torch.empty(width, dtype=dtype, device=partials.device) for dtype in dtypes]
    sizes = {"WIDTH": width, "COLUMNS": 32, "ROWS": 32}
    grid = (triton.cdiv(width, sizes["COLUMNS"]), vectors)
    _sum_partials_kernel[grid](partials, *sums, *[None] * (3 - vectors), count, **sizes, **FUSED)
    return sums


def persistent_options(width: int, warps: int, dtype: torch.dtype) -> dict[str, int]:
    """Launch options of a kernel whose programs loop over rows. The cap on registers is one that spills nothing;
    persistent_programs counts on it."""
    few = row_block(width) >= 256 * dtype.itemsize
    return {"num_warps": warps, "maxnreg": 80 if few else 88 + 4 * dtype.itemsize}


def row_launch(direction: str, width: int, dropout: bool, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, int]]:
    """The constexpr arguments and the launch options of a kernel on whole rows of `dtype`; "bwd" loops over tiles of
    them."""
    rows, block, warps = row_tile(width, 2048 if direction == "fwd" else 1024)
    constants = {"WIDTH": width, "BLOCK": block, "ROWS": rows, "DROPOUT": dropout}
    return constants, {"num_warps": warps} if direction == "fwd" else persistent_options(width, warps, dtype)


def persistent_programs(device: torch.device, tiles: int, num_warps: int, maxnreg: int) -> int:
    """How many programs loop over `tiles` tiles: as many as run at once, so that all end together; at least one."""
    if device.type != "cuda":
        return max(1, min(tiles, 3))  # several, so that interpreted tests add partial sums
    each = 65536 // (32 * num_warps * maxnreg)  # of the registers of a multiprocessor
    return max(1, min(tiles, torch.cuda.get_device_properties(device).multi_processor_count * max(1, each)))


def dropout_numbers(p: float) -> tuple[int, float]:
    """(threshold, scale): a 16-bit half below the first drops its element; what is kept is multiplied by the second."""
    return round(p * 65536), 1.0 / (1.0 - p)


def by_rows(x: Tensor) -> Tensor:
    """x, or a copy of it in which neighbouring columns are neighbours in memory, as kernels take their rows."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def row_tile(width: int, columns: int) -> tuple[int, int, int]:
    """(rows, block, warps) of a program's tile: whole rows of `block` columns, about `columns` elements, eight to
    sixteen a thread."""
    block = row_block(width)
    rows = max(1, columns // block)
    return rows, block, row_warps(block) if rows == 1 else 4


def row_block(width: int) -> int:
    """Columns of a program that holds a whole row: the next power of two, at least one Philox block."""
    return max(8, 1 << (width - 1).bit_length())


def row_warps(block: int) -> int:
    """Warps for a row of `block` columns: eight columns a thread."""
    return min(16, max(1, block // 256))
