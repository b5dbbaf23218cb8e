"""dropout(layer_norm(token_table[ids] + position_table[positions])), and the gradients of both tables.

The backward pass gathers the rows again. By default it adds each row's gradient to the zeroed fp32 tables with atomics,
whose order differs between runs. The deterministic way stores the rows' gradients, sorts the rows by id, and adds runs
of equal ids in order: `_run_pieces_kernel` adds the pieces of runs that lie in chunks of CHUNK sorted rows, so that a
frequent token is spread over many programs, and `_joined_runs_kernel` adds the pieces of runs that cross chunks and
writes zeros where an id does not occur.

R rows and BLOCK columns make a program's tile; BLOCK is the next power of two above the width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maelm_fast.kernels.common import (
    FUSED,
    by_rows,
    dropout_numbers,
    keep_tile,
    norm_gradient,
    persistent_programs,
    row_block,
    row_launch,
    row_statistics,
    row_warps,
    sum_partials,
)

CHUNK = 32  # sorted rows that one program adds


@triton.jit(do_not_specialize=["rows", "place", "threshold"], do_not_specialize_on_alignment=["seed"])
def _embed_packed_fwd_kernel(
    ids,  # (rows,) int32 or int64
    positions,  # (rows,) int32 or int64
    token_table,  # (V, WIDTH)
    position_table,  # (P, WIDTH)
    weight,  # (WIDTH,)
    bias,  # (WIDTH,)
    seed,  # one int64, or None without dropout
    out,  # (rows, WIDTH), contiguous
    mean,  # (rows,) fp32
    rstd,  # (rows,) fp32
    rows,
    token_stride,  # elements from row to row of the table
    position_stride,
    place,
    threshold,  # a 16-bit half below this drops its element
    scale,  # 1 / (1 - p)
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    there = (row < rows)[:, None] & inside[None, :]
    token = token_table + tl.load(ids + row, mask=row < rows, other=0).to(tl.int64) * token_stride
    spot = position_table + tl.load(positions + row, mask=row < rows, other=0).to(tl.int64) * position_stride
    total = tl.load(token[:, None] + column[None, :], mask=there, other=0.0).to(tl.float32)
    total += tl.load(spot[:, None] + column[None, :], mask=there, other=0.0).to(tl.float32)
    shift = tl.load(token, mask=row < rows, other=0.0).to(tl.float32)
    shift += tl.load(spot, mask=row < rows, other=0.0).to(tl.float32)
    centred, row_mean, row_rstd = row_statistics(total, shift, inside[None, :], WIDTH, eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    y = centred * row_rstd[:, None] * w[None, :] + b[None, :]
    if DROPOUT:
        y = tl.where(keep_tile(tl.load(seed), place, row, BLOCK // 8, threshold), y * scale, 0.0)
    tl.store(out + row.to(tl.int64)[:, None] * WIDTH + column[None, :], y, mask=there)
    tl.store(mean + row, row_mean, mask=row < rows)
    tl.store(rstd + row, row_rstd, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "place", "threshold"], do_not_specialize_on_alignment=["seed"])
def _embed_packed_bwd_kernel(
    grad_out,  # (rows, WIDTH)
    ids,  # (rows,) int32 or int64
    positions,  # (rows,) int32 or int64
    token_table,  # (V, WIDTH)
    position_table,  # (P, WIDTH)
    weight,  # (WIDTH,)
    mean,  # (rows,) fp32
    rstd,  # (rows,) fp32
    seed,  # one int64, or None without dropout
    grad_tokens,  # (V, WIDTH) fp32 zeros to add to; None if STORE
    grad_positions,  # (P, WIDTH) fp32 zeros to add to; None if STORE
    grad_rows,  # (rows, WIDTH) fp32, the gradient of the sum of the two embeddings; None unless STORE
    partials,  # (2, programs, WIDTH) fp32: weight and bias gradients
    rows,
    grad_stride,  # elements from row to row
    token_stride,
    position_stride,
    place,
    threshold,  # a 16-bit half below this drops its element
    scale,  # 1 / (1 - p)
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DROPOUT: tl.constexpr,
    STORE: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    grad_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    grad_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None]
        there = (row < rows)[:, None] & inside[None, :]
        token = tl.load(ids + row, mask=row < rows, other=0).to(tl.int64)[:, None]
        spot = tl.load(positions + row, mask=row < rows, other=0).to(tl.int64)[:, None]
        g = tl.load(grad_out + at * grad_stride + column[None, :], mask=there, other=0.0).to(tl.float32)
        total = tl.load(token_table + token * token_stride + column[None, :], mask=there, other=0.0).to(tl.float32)
        total += tl.load(position_table + spot * position_stride + column[None, :], mask=there, other=0.0).to(
            tl.float32
        )
        row_mean = tl.load(mean + row, mask=row < rows, other=0.0)
        row_rstd = tl.load(rstd + row, mask=row < rows, other=0.0)
        if DROPOUT:
            g = tl.where(keep_tile(tl.load(seed), place, row, BLOCK // 8, threshold), g * scale, 0.0)
        normal = (total - row_mean[:, None]) * row_rstd[:, None]
        grad_weight += g * normal
        grad_bias += g
        grad = norm_gradient(g * w[None, :], normal, row_rstd, WIDTH)
        if STORE:
            tl.store(grad_rows + at * WIDTH + column[None, :], grad, mask=there)
        else:
            tl.atomic_add(grad_tokens + token * WIDTH + column[None, :], grad, mask=there, sem="relaxed")
            tl.atomic_add(grad_positions + spot * WIDTH + column[None, :], grad, mask=there, sem="relaxed")
    partial = partials + tl.program_id(0) * WIDTH + column
    tl.store(partial, tl.sum(grad_weight, axis=0), mask=inside)
    tl.store(partial + tl.num_programs(0) * WIDTH, tl.sum(grad_bias, axis=0), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _run_pieces_kernel(
    grad_rows,  # (rows, WIDTH) fp32
    sorted_ids,  # (rows,) ids in ascending order
    order,  # (rows,) int64, the row of grad_rows that each belongs to
    grad_table,  # (V, WIDTH): gets the runs that lie in one chunk
    pieces,  # (chunks, 2, WIDTH) fp32: of runs that cross, [0] what goes on from the chunk before, [1] what starts here
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    first = tl.program_id(0) * CHUNK
    last = tl.minimum(first + CHUNK, rows) - 1
    run = tl.load(sorted_ids + first)
    crosses = (first > 0) & (tl.load(sorted_ids + tl.maximum(first - 1, 0)) == run)  # from the chunk before
    slot = tl.program_id(0) * 2
    total = tl.zeros((BLOCK,), tl.float32)
    for at in range(first, last + 1):
        total += tl.load(grad_rows + tl.load(order + at) * WIDTH + column, mask=inside, other=0.0)
        following = tl.load(sorted_ids + tl.minimum(at + 1, rows - 1))
        goes_on = (at + 1 < rows) & (following == run)
        if (at == last) | (following != run):
            if crosses:
                tl.store(pieces + slot.to(tl.int64) * WIDTH + column, total, mask=inside)
            elif goes_on:
                tl.store(pieces + (slot.to(tl.int64) + 1) * WIDTH + column, total, mask=inside)
            else:
                tl.store(grad_table + run.to(tl.int64) * WIDTH + column, total, mask=inside)
            total = tl.zeros((BLOCK,), tl.float32)
            crosses = following < 0  # false: only a chunk's first run comes from the chunk before
            run = following


@triton.jit
def _joined_runs_kernel(
    starts,  # (V + 1,) int32, where each id's run starts among the sorted rows
    pieces,  # (chunks, 2, WIDTH) fp32
    grad_table,  # (V, WIDTH)
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    start = tl.load(starts + tl.program_id(0))
    end = tl.load(starts + tl.program_id(0) + 1)
    first = start // CHUNK
    last = (end - 1) // CHUNK
    out = grad_table + tl.program_id(0).to(tl.int64) * WIDTH + column
    if start == end:
        tl.store(out, tl.zeros((BLOCK,), tl.float32), mask=inside)
    elif first < last:
        total = tl.load(pieces + (first.to(tl.int64) * 2 + 1) * WIDTH + column, mask=inside, other=0.0)
        several = tl.arange(0, 4)[:, None]
        more = tl.zeros((4, BLOCK), tl.float32)
        for chunk in range(first + 1, last + 1, 4):
            piece = pieces + (chunk + several).to(tl.int64) * 2 * WIDTH
            more += tl.load(piece + column[None, :], mask=(chunk + several <= last) & inside[None, :], other=0.0)
        tl.store(out, total + tl.sum(more, axis=0), mask=inside)


def embed_packed_fwd(
    ids: Tensor,
    positions: Tensor,
    token_table: Tensor,
    position_table: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
    place: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, mean, rstd): out (T, d) of `dtype`, the row statistics (T,) fp32."""
    ids, positions, weight, bias = (t.contiguous() for t in (ids, positions, weight, bias))
    token_table, position_table = by_rows(token_table), by_rows(position_table)
    rows, width = ids.shape[0], token_table.shape[1]
    out = torch.empty((rows, width), dtype=dtype, device=ids.device)
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=ids.device) for _ in range(2))
    if rows == 0:
        return out, mean, rstd
    constants, options = row_launch("fwd", width, dropout_p > 0, out.dtype)
    threshold, scale = dropout_numbers(dropout_p)
    with torch.cuda.device_of(ids):
        _embed_packed_fwd_kernel[(triton.cdiv(rows, constants["ROWS"]),)](
            ids,
            positions,
            token_table,
            position_table,
            weight,
            bias,
            seed if dropout_p > 0 else None,
            out,
            mean,
            rstd,
            rows,
            token_table.stride(0),
            position_table.stride(0),
            place,
            threshold,
            scale,
            eps,
            **constants,
            **options,
            **FUSED,
        )
    return out, mean, rstd


def embed_packed_bwd(
    grad_out: Tensor,
    ids: Tensor,
    positions: Tensor,
    token_table: Tensor,
    position_table: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dropout_p: float,
    seed: Tensor | None,
    place: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(grad_token_table, grad_position_table, grad_weight, grad_bias), of the dtypes of the tables and of weight."""
    ids, positions, weight = ids.contiguous(), positions.contiguous(), weight.contiguous()
    grad_out, token_table, position_table = by_rows(grad_out), by_rows(token_table), by_rows(position_table)
    rows, width = grad_out.shape
    tables = (token_table, position_table)
    constants, options = row_launch("bwd", width, dropout_p > 0, grad_out.dtype)
    programs = persistent_programs(ids.device, triton.cdiv(rows, constants["ROWS"]), **options)
    partials = torch.empty((2, programs, width), dtype=torch.float32, device=ids.device)
    grad_rows = torch.empty((rows, width), dtype=torch.float32, device=ids.device) if deterministic else None
    zeros = [] if deterministic else [torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in tables]
    threshold, scale = dropout_numbers(dropout_p)
    with torch.cuda.device_of(ids):
        _embed_packed_bwd_kernel[(programs,)](
            grad_out,
            ids,
            positions,
            token_table,
            position_table,
            weight,
            mean,
            rstd,
            seed if dropout_p > 0 else None,
            *(zeros or (None, None)),
            grad_rows,
            partials,
            rows,
            grad_out.stride(0),
            token_table.stride(0),
            position_table.stride(0),
            place,
            threshold,
            scale,
            STORE=deterministic,
            **constants,
            **options,
            **FUSED,
        )
        grad_weight, grad_bias = sum_partials(partials, weight.dtype, weight.dtype)
        if grad_rows is None:
            grad_tokens, grad_positions = (z.to(table.dtype) for z, table in zip(zeros, tables, strict=True))
        else:
            grad_tokens = _sum_by_id(grad_rows, ids, token_table)
            grad_positions = _sum_by_id(grad_rows, positions, position_table)
    return grad_tokens, grad_positions, grad_weight, grad_bias


def _sum_by_id(grad_rows: Tensor, ids: Tensor, table: Tensor) -> Tensor:
    """The gradient of `table`: row v is the sum of the grad_rows whose id is v, added in ascending order."""
    (rows, width), entries = grad_rows.shape, table.shape[0]
    grad = torch.empty((entries, width), dtype=table.dtype, device=table.device)
    block = row_block(width)
    launch = {"WIDTH": width, "BLOCK": block, "CHUNK": CHUNK, "num_warps": row_warps(block), **FUSED}
    chunks = triton.cdiv(rows, CHUNK)
    pieces = torch.empty((chunks, 2, width), dtype=torch.float32, device=table.device)
    sorted_ids, order = torch.sort(ids, stable=True)
    starts = torch.searchsorted(
        sorted_ids, torch.arange(entries + 1, dtype=ids.dtype, device=ids.device), out_int32=True
    )
    if chunks:
        _run_pieces_kernel[(chunks,)](grad_rows, sorted_ids, order, grad, pieces, rows, **launch)
    _joined_runs_kernel[(entries,)](starts, pieces, grad, **launch)
    return grad
