"""Attention over packed sequences whose positions have gaps, with a bias that depends on distance alone.

What no other kernel does: the bias of a pair is looked up by the distance of the *original* positions, in a line of one
head that stays in the first-level cache; key tiles that lie wholly beyond the line's reach get a constant instead. And
the line's gradient needs no atomics: a program owns the query tiles it walks through, and a row of scores has every
distance at most once, so it adds scores' gradients into a band (row, distance) of its own with plain loads and stores.

Positions ascend within a sequence. Hence the key tiles of a query tile come in three runs: beyond the reach to the
left, near, beyond it to the right. In the near run an absent key has a position so large that its lookup gives minus
infinity.

Softmax works in base 2: scale and line are multiplied by log2(e) beforehand. LSE is kept in natural units.

Shapes: M query rows and N key rows of a tile, D head dim (padded to BLOCK_D), R reach, P positions.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from maelm_fast.kernels.common import Variant, dropout_numbers, keep_weights

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _dot(a, b, acc, INTERPRETED: tl.constexpr):
    """acc + a @ b, summed in fp32. The interpreter has no bf16 products."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def _gather(row, column, SIGN: tl.constexpr, INTERPRETED: tl.constexpr):
    """tl.load(row[:, None] + SIGN * column[None, :]), row (R,) pointers to fp32 that nothing writes, column (C,) int32.

    In assembly so that values arrive in the layout in which they are used, from addresses that are a row's plus a
    column's: for a tile of this size tl.load would choose a layout of its own and carry the values over through shared
    memory."""
    if INTERPRETED:
        return tl.load(row[:, None] + SIGN * column[None, :])
    base = row.to(tl.int64)[:, None]
    if SIGN > 0:
        return tl.inline_asm_elementwise(
            "{ .reg .b64 a; mad.wide.s32 a, $2, 4, $1; ld.global.nc.f32 $0, [a]; }", "=f,l,r",
            [base, column[None, :]], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        "{ .reg .b64 a; mad.wide.s32 a, $2, -4, $1; ld.global.nc.f32 $0, [a]; }", "=f,l,r",
        [base, column[None, :]], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


def _add_assembly(count: int) -> str:
    """For `count` elements: operands 0.. are unused results, then base addresses, columns, cells, limits and values."""
    base, column, cell, limit, value = (count * i for i in range(1, 6))
    lines = [f".reg .pred p<{count}>; .reg .b64 a<{count}>; .reg .f32 f<{count}>;"]
    for i in range(count):
        lines.append(f"setp.lt.u32 p{i}, ${cell + i}, ${limit + i}; mad.wide.s32 a{i}, ${column + i}, 4, ${base + i};")
        lines.append(f"@p{i} ld.global.f32 f{i}, [a{i}];")
    for i in range(count):
        lines.append(f"add.f32 f{i}, f{i}, ${value + i}; @p{i} st.global.f32 [a{i}], f{i}; mov.b32 ${i}, 0;")
    return "{ " + " ".join(lines) + " }"


ADD_COUNT = tl.constexpr(8)
ADD_ASSEMBLY = tl.constexpr(_add_assembly(8))
ADD_CONSTRAINTS = tl.constexpr(",".join(["=r"] * 8 + ["l"] * 8 + ["r"] * 24 + ["f"] * 8))


@triton.jit
def _add_to(row, column, values, cell, limit, INTERPRETED: tl.constexpr):
    """(row[:, None] + column[None, :])[...] += values where 0 <= cell < limit; no address twice, so that a thread may
    load eight before it stores them. row: (R,) pointers to fp32. In assembly as _gather is."""
    if INTERPRETED:
        at, inside = row[:, None] + column[None, :], (cell >= 0) & (cell < limit)
        tl.store(at, tl.load(at, mask=inside, other=0.0) + values, mask=inside)
    else:
        tl.inline_asm_elementwise(
            ADD_ASSEMBLY, ADD_CONSTRAINTS,
            [row.to(tl.int64)[:, None], column[None, :], cell, cell * 0 + limit, values],
            dtype=tl.int32, is_pure=False, pack=ADD_COUNT,
        )  # fmt: skip


@triton.jit
def _load_rows(x, row, stride, length, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """(rows, BLOCK_D) of one head of one sequence; zeros where there is no row or no column."""
    column = tl.arange(0, BLOCK_D)
    there = row[:, None] < length
    if DIM != BLOCK_D:
        there = there & (column < DIM)[None, :]
    return tl.load(x + row[:, None] * stride + column[None, :], mask=there, other=0.0)


@triton.jit
def _store_rows(x, values, row, stride, length, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    column = tl.arange(0, BLOCK_D)
    there = row[:, None] < length
    if DIM != BLOCK_D:
        there = there & (column < DIM)[None, :]
    tl.store(x + row[:, None] * stride + column[None, :], values, mask=there)


@triton.jit
def _extent(positions, start, length, BLOCK: tl.constexpr):
    """(smallest, largest) position of the rows [start, start + BLOCK) of a sequence."""
    return tl.load(positions + start), tl.load(positions + tl.minimum(start + BLOCK, length) - 1)


@triton.jit
def _near(positions, length, low, high, REACH: tl.constexpr, BLOCK: tl.constexpr):
    """(first, end): rows of a sequence whose tiles hold a distance below REACH from positions low..high; all earlier
    tiles lie at least REACH before `low`, all later ones at least REACH after `high`."""
    before = 0
    until = 0
    for start in range(0, length, 16 * BLOCK):
        first = start + tl.arange(0, 16) * BLOCK
        there = first < length
        smallest = tl.load(positions + first, mask=there, other=0)
        largest = tl.load(positions + tl.minimum(first + BLOCK, length) - 1, mask=there, other=0)
        before += tl.sum((there & (largest <= low - REACH)).to(tl.int32), axis=0)
        until += tl.sum((there & (smallest < high + REACH)).to(tl.int32), axis=0)
    return before * BLOCK, until * BLOCK


@triton.jit
def _bias_tile(near, row, column, edge, SIGN: tl.constexpr, INTERPRETED: tl.constexpr):
    """(R, C), what is added to a tile's scores, -inf where there is no key. row: (R,) pointers into the line for a
    column position of 0. column: (C,) positions. edge: what it is in a tile that is not near, (1, C) or (R, 1)."""
    bias = tl.broadcast_to(edge, (row.shape[0], column.shape[0]))
    if near:
        bias = _gather(row, column, SIGN, INTERPRETED)
    return bias


@triton.jit(do_not_specialize=["q_tokens", "place", "threshold", "positions"])
def _attention_fwd_kernel(
    q,  # (Tq, H, D)
    k,  # (Tk, H, D)
    v,  # (Tk, H, D)
    out,  # (Tq, H, D), contiguous
    lse,  # (H, Tq) fp32
    tiles,  # (tiles, 2) int32: sequence, first query row within it
    q_starts,  # (S+1,) int32
    k_starts,  # (S+1,) int32
    q_positions,  # (Tq,) int32
    k_positions,  # (Tk,) int32
    line,  # (H, 3P) fp32, or None: bias times log2(e) of each distance from 1-P, then -inf
    seed,  # one int64, or None without dropout
    q_tokens,
    q_row,  # elements from row to row, and from head to head
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    scale,  # of the scores, times log2(e)
    place,
    threshold,  # a 16-bit half below this drops its weight
    keep_scale,  # 1 / (1 - p)
    positions,  # P
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REACH: tl.constexpr,  # 0: no bias
    DROPOUT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    head = tl.program_id(1)
    sequence = tl.load(tiles + 2 * tl.program_id(0))
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    q_start = tl.load(q_starts + sequence)
    q_length = tl.load(q_starts + sequence + 1) - q_start
    k_start = tl.load(k_starts + sequence)
    k_length = tl.load(k_starts + sequence + 1) - k_start
    row = first + tl.arange(0, BLOCK_M)
    q += q_start.to(tl.int64) * q_row + head * q_head
    k += k_start.to(tl.int64) * k_row + head * k_head
    v += k_start.to(tl.int64) * v_row + head * v_head
    q_tile = _load_rows(q, row, q_row, q_length, DIM, BLOCK_D)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), -1e30, tl.float32)  # finite: a line may hold -inf for all of a row's first keys
    seed_value = tl.load(seed) if DROPOUT else 0
    origin = positions - 1
    begin = 0
    end = 0
    left = 0.0
    right = 0.0
    if REACH:
        line += head * 3 * positions
        row_line = line + (origin - tl.load(q_positions + q_start + tl.minimum(row, q_length - 1)))
        low, high = _extent(q_positions + q_start, first, q_length, BLOCK_M)
        k_positions += k_start
        begin, end = _near(k_positions, k_length, low, high, REACH, BLOCK_N)
        left = tl.load(line + origin - REACH)
        right = tl.load(line + origin + REACH)
    for start in range(0, k_length, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        there = key < k_length
        k_tile = _load_rows(k, key, k_row, k_length, DIM, BLOCK_D)
        product = _dot(q_tile, tl.trans(k_tile), tl.zeros((BLOCK_M, BLOCK_N), tl.float32), INTERPRETED)
        if REACH:
            key_position = tl.load(k_positions + key, mask=there, other=2 * positions)
            edge = tl.where(there, tl.where(start < begin, left, right), float("-inf"))
            near = (start >= begin) & (start < end)
            score = product * scale + _bias_tile(near, row_line, key_position, edge[None, :], 1, INTERPRETED)
        else:
            score = product * scale + tl.where(there, 0.0, float("-inf"))[None, :]
        new_top = tl.maximum(top, tl.max(score, axis=1))
        weight = tl.exp2(score - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight, axis=1)
        top = new_top
        if DROPOUT:
            keep = keep_weights(seed_value, place, head, q_start + row, start, BLOCK_N, threshold)
            weight = tl.where(keep, weight, 0.0)
        v_tile = _load_rows(v, key, v_row, k_length, DIM, BLOCK_D)
        acc = _dot(weight.to(v_tile.dtype), v_tile, acc * shrink[:, None], INTERPRETED)
    some = total > 0.0  # a query without keys gives 0
    factor = tl.where(some, (keep_scale if DROPOUT else 1.0) / tl.where(some, total, 1.0), 0.0)
    heads = tl.num_programs(1)
    out += (q_start.to(tl.int64) * heads + head) * DIM
    _store_rows(out, acc * factor[:, None], row, heads * DIM, q_length, DIM, BLOCK_D)
    log_sum = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * LN2, float("-inf"))
    tl.store(lse + head.to(tl.int64) * q_tokens + q_start + row, log_sum, mask=row < q_length)


@triton.jit(do_not_specialize=["q_tokens", "tile_count", "place", "threshold", "positions"])
def _attention_dq_kernel(
    grad_out,  # (Tq, H, D), contiguous
    grad_lse,  # (H, Tq) fp32, or None
    q,  # (Tq, H, D)
    k,  # (Tk, H, D)
    v,  # (Tk, H, D)
    out,  # (Tq, H, D), contiguous
    lse,  # (H, Tq) fp32
    grad_q,  # (Tq, H, D), contiguous
    delta,  # (H, Tq) fp32: row sums of grad_out * out, less grad_lse, for the other kernel
    band,  # (H, programs, M, 2R+1) fp32, zeros; None without the line's gradient
    tiles,  # (tiles, 2) int32: sequence, first query row within it
    q_starts,
    k_starts,
    q_positions,
    k_positions,
    line,  # (H, 3P) fp32, or None
    seed,
    q_tokens,
    tile_count,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    scale,  # of the scores, times log2(e)
    place,
    threshold,
    keep_scale,
    positions,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REACH: tl.constexpr,  # 0: no bias
    LINE_GRADIENT: tl.constexpr,
    DROPOUT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    q += head * q_head
    k += head * k_head
    v += head * v_head
    lse += head.to(tl.int64) * q_tokens
    delta += head.to(tl.int64) * q_tokens
    seed_value = tl.load(seed) if DROPOUT else 0
    origin = positions - 1
    left = 0.0
    right = 0.0
    if REACH:
        line += head * 3 * positions
        left = tl.load(line + origin - REACH)
        right = tl.load(line + origin + REACH)
    left_sum = tl.zeros((BLOCK_M,), tl.float32)  # of the scores' gradients at -REACH and beyond
    all_sum = tl.zeros((BLOCK_M,), tl.float32)
    if LINE_GRADIENT:
        band += (head * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * BLOCK_M * (2 * REACH + 1)
        row_band = band + (tl.arange(0, BLOCK_M) * (2 * REACH + 1) + REACH)  # at distance 0
    for tile in range(tl.program_id(0), tile_count, tl.num_programs(0)):
        sequence = tl.load(tiles + 2 * tile)
        first = tl.load(tiles + 2 * tile + 1)
        q_start = tl.load(q_starts + sequence)
        q_length = tl.load(q_starts + sequence + 1) - q_start
        k_start = tl.load(k_starts + sequence)
        k_length = tl.load(k_starts + sequence + 1) - k_start
        row = first + tl.arange(0, BLOCK_M)
        at = (q_start.to(tl.int64) * heads + head) * DIM
        q_tile = _load_rows(q + q_start.to(tl.int64) * q_row, row, q_row, q_length, DIM, BLOCK_D)
        grad_tile = _load_rows(grad_out + at, row, heads * DIM, q_length, DIM, BLOCK_D)
        out_tile = _load_rows(out + at, row, heads * DIM, q_length, DIM, BLOCK_D)
        row_delta = tl.sum(grad_tile.to(tl.float32) * out_tile.to(tl.float32), axis=1)
        if grad_lse is not None:
            row_delta -= tl.load(
                grad_lse + head.to(tl.int64) * q_tokens + q_start + row, mask=row < q_length, other=0.0
            )
        tl.store(delta + q_start + row, row_delta, mask=row < q_length)
        row_lse = tl.load(lse + q_start + row, mask=row < q_length, other=float("inf")) * LOG2E
        k_tiles = k + k_start.to(tl.int64) * k_row
        v_tiles = v + k_start.to(tl.int64) * v_row
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        begin = 0
        end = 0
        k_places = k_positions + k_start
        if REACH:
            query_position = tl.load(q_positions + q_start + tl.minimum(row, q_length - 1))
            row_line = line + (origin - query_position)
            low, high = _extent(q_positions + q_start, first, q_length, BLOCK_M)
            begin, end = _near(k_places, k_length, low, high, REACH, BLOCK_N)
        for start in range(0, k_length, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            there = key < k_length
            k_tile = _load_rows(k_tiles, key, k_row, k_length, DIM, BLOCK_D)
            v_tile = _load_rows(v_tiles, key, v_row, k_length, DIM, BLOCK_D)
            zero = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            product = _dot(q_tile, tl.trans(k_tile), zero, INTERPRETED)
            near = (start >= begin) & (start < end)
            if REACH:
                key_position = tl.load(k_places + key, mask=there, other=2 * positions)
                edge = tl.where(there, tl.where(start < begin, left, right), float("-inf"))
                score = product * scale + _bias_tile(near, row_line, key_position, edge[None, :], 1, INTERPRETED)
            else:
                score = product * scale + tl.where(there, 0.0, float("-inf"))[None, :]
            weight = tl.exp2(score - row_lse[:, None])
            weight_gradient = _dot(grad_tile, tl.trans(v_tile), zero, INTERPRETED)
            if DROPOUT:
                keep = keep_weights(seed_value, place, head, q_start + row, start, BLOCK_N, threshold)
                weight_gradient = tl.where(keep, weight_gradient * keep_scale, 0.0)
            gradient = weight * (weight_gradient - row_delta[:, None])
            if LINE_GRADIENT:
                side = tl.sum(gradient, axis=1)
                all_sum += side
                if near:
                    key_position = tl.load(k_places + key, mask=there, other=2 * positions)  # again: to free registers
                    cell = key_position[None, :] - (query_position - (REACH - 1))[:, None]  # 0: the first of the inner
                    _add_to(row_band - query_position, key_position, gradient, cell, 2 * REACH - 1, INTERPRETED)
                    left_sum += tl.sum(tl.where(cell < 0, gradient, 0.0), axis=1)
                else:
                    left_sum += tl.where(start < begin, side, 0.0)
            acc = _dot(gradient.to(k_tile.dtype), k_tile, acc, INTERPRETED)
        _store_rows(grad_q + at, acc * (scale * LN2), row, heads * DIM, q_length, DIM, BLOCK_D)
        if LINE_GRADIENT:
            tl.debug_barrier()  # the next tile adds to cells that other threads wrote
    if LINE_GRADIENT:  # the right end's gradient is what is missing from the sum: attention_bwd adds it
        tl.store(row_band - REACH, left_sum)
        tl.store(row_band + REACH, all_sum)


@triton.jit(do_not_specialize=["q_tokens", "place", "threshold", "positions"])
def _attention_dkv_kernel(
    grad_out,  # (Tq, H, D), contiguous
    q,
    k,
    v,
    lse,  # (H, Tq) fp32
    delta,  # (H, Tq) fp32
    grad_k,  # (Tk, H, D), contiguous
    grad_v,  # (Tk, H, D), contiguous
    tiles,  # (tiles, 2) int32: sequence, first key row within it
    q_starts,
    k_starts,
    q_positions,
    k_positions,
    line,  # (H, 3P) fp32, or None
    seed,
    q_tokens,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    scale,
    place,
    threshold,
    keep_scale,
    positions,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REACH: tl.constexpr,  # 0: no bias
    DROPOUT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    sequence = tl.load(tiles + 2 * tl.program_id(0))
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    q_start = tl.load(q_starts + sequence)
    q_length = tl.load(q_starts + sequence + 1) - q_start
    k_start = tl.load(k_starts + sequence)
    k_length = tl.load(k_starts + sequence + 1) - k_start
    key = first + tl.arange(0, BLOCK_N)
    q += q_start.to(tl.int64) * q_row + head * q_head
    grad_out += (q_start.to(tl.int64) * heads + head) * DIM
    lse += head.to(tl.int64) * q_tokens + q_start
    delta += head.to(tl.int64) * q_tokens + q_start
    k_tile = _load_rows(k + k_start.to(tl.int64) * k_row + head * k_head, key, k_row, k_length, DIM, BLOCK_D)
    v_tile = _load_rows(v + k_start.to(tl.int64) * v_row + head * v_head, key, v_row, k_length, DIM, BLOCK_D)
    k_acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    v_acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    seed_value = tl.load(seed) if DROPOUT else 0
    origin = positions - 1
    begin = 0
    end = 0
    left = 0.0
    right = 0.0
    there = key < k_length
    if REACH:
        line += head * 3 * positions
        q_positions += q_start
        k_positions += k_start
        row_line = line + (origin + tl.load(k_positions + key, mask=there, other=2 * positions))
        low, high = _extent(k_positions, first, k_length, BLOCK_N)
        begin, end = _near(q_positions, q_length, low, high, REACH, BLOCK_M)
        left = tl.load(line + origin - REACH)
        right = tl.load(line + origin + REACH)
    for start in range(0, q_length, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        inside = row < q_length
        q_tile = _load_rows(q, row, q_row, q_length, DIM, BLOCK_D)
        grad_tile = _load_rows(grad_out, row, heads * DIM, q_length, DIM, BLOCK_D)
        row_lse = tl.load(lse + row, mask=inside, other=float("inf")) * LOG2E
        row_delta = tl.load(delta + row, mask=inside, other=0.0)
        zero = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        # keys by queries, so that no product transposes the weights
        product = _dot(k_tile, tl.trans(q_tile), zero, INTERPRETED)
        if REACH:
            query_position = tl.load(q_positions + row, mask=inside, other=0)
            edge = tl.where(there, tl.where(start < begin, right, left), float("-inf"))  # keys right of earlier queries
            near = (start >= begin) & (start < end)
            score = product * scale + _bias_tile(near, row_line, query_position, edge[:, None], -1, INTERPRETED)
        else:
            score = product * scale + tl.where(there, 0.0, float("-inf"))[:, None]
        weight = tl.exp2(score - row_lse[None, :])
        weight_gradient = _dot(v_tile, tl.trans(grad_tile), zero, INTERPRETED)
        kept = weight
        if DROPOUT:
            keep = tl.trans(keep_weights(seed_value, place, head, q_start + row, first, BLOCK_N, threshold))
            kept = tl.where(keep, weight, 0.0)
            weight_gradient = tl.where(keep, weight_gradient * keep_scale, 0.0)
        v_acc = _dot(kept.to(grad_tile.dtype), grad_tile, v_acc, INTERPRETED)
        gradient = weight * (weight_gradient - row_delta[None, :])
        k_acc = _dot(gradient.to(q_tile.dtype), q_tile, k_acc, INTERPRETED)
    at = (k_start.to(tl.int64) * heads + head) * DIM
    _store_rows(grad_k + at, k_acc * (scale * LN2), key, heads * DIM, k_length, DIM, BLOCK_D)
    _store_rows(grad_v + at, v_acc * (keep_scale if DROPOUT else 1.0), key, heads * DIM, k_length, DIM, BLOCK_D)


@dataclass(frozen=True)
class Tile:
    """How one kernel covers the scores: (rows of its own, rows a step of its loop), warps, pipeline stages."""

    own: int
    step: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """fwd and dq own query rows, dkv owns key rows. resident: programs of dq on one multiprocessor."""

    fwd: Tile
    dq: Tile
    dkv: Tile
    resident: int


TILES = {
    (80, 32): Tiles(Tile(128, 64, 8, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), 2),
    (80, 64): Tiles(Tile(128, 64, 8, 3), Tile(64, 32, 4, 1), Tile(64, 32, 4, 1), 2),
    (80, 128): Tiles(Tile(128, 32, 8, 2), Tile(32, 32, 4, 1), Tile(64, 32, 8, 1), 2),
    (90, 32): Tiles(Tile(128, 64, 8, 3), Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), 2),
    (90, 64): Tiles(Tile(128, 64, 8, 3), Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), 2),
    (90, 128): Tiles(Tile(128, 64, 8, 2), Tile(64, 32, 4, 1), Tile(64, 32, 8, 2), 2),
}
"""By (architecture, padded head dim): large ones that spill nothing in any variant. Not yet timed on a GPU. dq's warps
must not outnumber what its tile is cut into: some would hold the same scores, and both add them (_add_to)."""
SMALL = Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), 1)
"""What the interpreter runs."""
HEAD_DIMS = (32, 64, 96, 128)
"""For which variants are compiled ahead of time; others up to 128 are padded to the next power of two."""
MAX_HEAD_DIM = 128


def tiles_for(device: torch.device, head_dim: int) -> Tiles:
    if device.type != "cuda":
        return SMALL
    major, _ = torch.cuda.get_device_capability(device)
    return TILES[(90 if major >= 9 else 80, _padded(head_dim))]


def _padded(head_dim: int) -> int:
    return max(32, 1 << (head_dim - 1).bit_length())


@functools.lru_cache(maxsize=128)
def tile_list(lengths: tuple[int, ...], others: tuple[int, ...], own: int, device: torch.device) -> Tensor:
    """(tiles, 2) int32: sequence and first row of each tile of `own` rows. Sequences with the most rows to walk through
    (`others`) come first, so that the last programs to start are short. Kept by lengths: training on full sequences has
    one list."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("attention: run sequences of these lengths once before a CUDA graph records them")
    order = sorted(range(len(lengths)), key=lambda s: -others[s])
    pairs = [(s, first) for s in order for first in range(0, lengths[s], own)]
    listed = torch.tensor(pairs, dtype=torch.int32).view(-1, 2)
    return listed.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else listed


@torch.compiler.assume_constant_result  # the lengths are constants of a traced graph, and so is what follows from them
def tile_lists(
    queries: tuple[int, ...], keys: tuple[int, ...], head_dim: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The query tiles of the forward kernel and of dq, the key tiles of dkv."""
    sizes = tiles_for(device, head_dim)
    fwd = (queries, keys, sizes.fwd.own, device)
    dq = (queries, keys, sizes.dq.own, device)
    dkv = (keys, queries, sizes.dkv.own, device)
    lists = {asked: tile_list(*asked) for asked in (fwd, dq, dkv)}
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _recorded.update(lists)
    return lists[fwd], lists[dq], lists[dkv]


_recorded: dict[Any, Tensor] = {}
"""Lists that a CUDA graph reads at every replay, one for equal lengths: tile_list may drop its own, and nothing tells
when the last graph is gone."""


@dataclass(frozen=True)
class Packed:
    """What the kernels read of a layout: boundaries (S+1,), positions (T,), and each kernel's tiles."""

    q_starts: Tensor
    k_starts: Tensor
    q_positions: Tensor
    k_positions: Tensor
    fwd_tiles: Tensor
    dq_tiles: Tensor
    dkv_tiles: Tensor


def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, line: Tensor | None, reach: int, packed: Packed, scale: float, dropout_p: float,
    seed: Tensor | None, place: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse): out (Tq, H, D) in q's dtype, lse (H, Tq) fp32, -inf for a query without keys. line: (H, 3P) fp32."""
    q, k, v = (_by_columns(t) for t in (q, k, v))
    tokens, heads, dim = q.shape
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, tokens), dtype=torch.float32, device=q.device)
    if packed.fwd_tiles.shape[0] == 0:
        return out, lse
    tile = tiles_for(q.device, dim).fwd
    threshold, keep_scale = dropout_numbers(dropout_p)
    constants, options = _launch("fwd", tile, dim, reach, dropout_p > 0, q.device.type != "cuda")
    with torch.cuda.device_of(q):
        _attention_fwd_kernel[(packed.fwd_tiles.shape[0], heads)](
            q, k, v, out, lse, packed.fwd_tiles, packed.q_starts, packed.k_starts, packed.q_positions,
            packed.k_positions, line, seed if dropout_p > 0 else None, tokens, q.stride(0), q.stride(1), k.stride(0),
            k.stride(1), v.stride(0), v.stride(1), scale * LOG2E.value, place, threshold, keep_scale,
            _positions(line), **constants, **options,
        )  # fmt: skip
    return out, lse


def attention_bwd(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    line: Tensor | None, reach: int, line_gradient: bool, packed: Packed, scale: float, dropout_p: float,
    seed: Tensor | None, place: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(grad_q, grad_k, grad_v, grad_line): the last (H, 2R+1) fp32 by distance from -R to R, whose ends hold all that
    lies beyond too; None unless asked for. The same in every run on a device of the same size."""
    q, k, v = (_by_columns(t) for t in (q, k, v))
    grad_out, out = grad_out.contiguous(), out.contiguous()
    grad_lse = grad_lse.contiguous() if grad_lse is not None else None
    tokens, heads, dim = q.shape
    grad_q, grad_k, grad_v = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    delta = torch.empty((heads, tokens), dtype=torch.float32, device=q.device)
    tiles, dropout, on_cpu = tiles_for(q.device, dim), dropout_p > 0, q.device.type != "cuda"
    threshold, keep_scale = dropout_numbers(dropout_p)
    q_tiles, k_tiles = packed.dq_tiles.shape[0], packed.dkv_tiles.shape[0]
    layout = (packed.q_starts, packed.k_starts, packed.q_positions, packed.k_positions, line, seed if dropout else None)
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1))
    numbers = (scale * LOG2E.value, place, threshold, keep_scale, _positions(line))
    programs = _programs(q.device, q_tiles, heads, tiles) if line_gradient else q_tiles
    band = None
    if line_gradient:
        band = torch.zeros((heads, programs, tiles.dq.own, 2 * reach + 1), dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        if q_tiles:
            constants, options = _launch("dq", tiles.dq, dim, reach, dropout, on_cpu, line_gradient)
            _attention_dq_kernel[(programs, heads)](
                grad_out, grad_lse, q, k, v, out, lse, grad_q, delta, band, packed.dq_tiles, *layout, tokens, q_tiles,
                *strides, *numbers, **constants, **options,
            )  # fmt: skip
        if k_tiles:
            constants, options = _launch("dkv", tiles.dkv, dim, reach, dropout, on_cpu)
            _attention_dkv_kernel[(k_tiles, heads)](
                grad_out, q, k, v, lse, delta, grad_k, grad_v, packed.dkv_tiles, *layout, tokens,
                *strides, *numbers, **constants, **options,
            )  # fmt: skip
    return grad_q, grad_k, grad_v, _line_gradient(band) if band is not None else None


def _line_gradient(band: Tensor) -> Tensor:
    """(H, 2R+1) from the programs' bands (H, programs, M, 2R+1), whose last column holds the sum over all distances."""
    line = band.sum((1, 2))
    line[:, -1] -= line[:, :-1].sum(1)
    return line


def _by_columns(x: Tensor) -> Tensor:
    """x, or a copy of it in which the elements of a head's row are neighbours in memory."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _positions(line: Tensor | None) -> int:
    return line.shape[1] // 3 if line is not None else 1


def _programs(device: torch.device, tiles: int, heads: int, sizes: Tiles) -> int:
    """Programs per head that walk through the query tiles: all of them resident at once."""
    if device.type != "cuda":
        return max(1, min(tiles, 2))  # several, so that interpreted tests walk and add
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(tiles, multiprocessors * sizes.resident // heads))


def _launch(
    kernel: str, tile: Tile, dim: int, reach: int, dropout: bool, interpreted: bool, line_gradient: bool = False
) -> tuple[dict[str, Any], dict[str, int]]:
    """The constexpr arguments and the launch options."""
    own, step = ("BLOCK_N", "BLOCK_M") if kernel == "dkv" else ("BLOCK_M", "BLOCK_N")
    constants: dict[str, Any] = {
        "DIM": dim, "BLOCK_D": _padded(dim), own: tile.own, step: tile.step, "REACH": reach, "DROPOUT": dropout,
        "INTERPRETED": interpreted,
    }  # fmt: skip
    if kernel == "dq":
        constants["LINE_GRADIENT"] = line_gradient
    return constants, {"num_warps": tile.warps, "num_stages": tile.stages}


T5_REACH = 91
"""Of the paper's 32 buckets up to distance 128."""


def variants() -> list[Variant]:
    """Every head dim and dtype, with and without bias and dropout, a backward pass with the bias's gradient; rows of a
    fused projection of queries, keys and values."""
    made = []
    for (arch, block), tiles in TILES.items():
        for dim in (d for d in HEAD_DIMS if _padded(d) == block):
            for dtype in ("bf16", "fp16"):
                for reach in (0, T5_REACH):
                    for dropout in (False, True):
                        for name in ("fwd", "dq", "dkv"):
                            made.append(_variant(name, arch, tiles, dim, dtype, reach, dropout))
    return made


def _variant(name: str, arch: int, tiles: Tiles, dim: int, dtype: str, reach: int, dropout: bool) -> Variant:
    kernel = {"fwd": _attention_fwd_kernel, "dq": _attention_dq_kernel, "dkv": _attention_dkv_kernel}[name]
    constants, options = _launch(name, getattr(tiles, name), dim, reach, dropout, False, reach > 0)
    activations = {"q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v"}
    singles = {"lse", "delta", "band", "line"}
    integers = {"tiles", "q_starts", "k_starts", "q_positions", "k_positions"}
    absent = {"grad_lse"} | ({"line", "band"} if reach == 0 else set()) | (set() if dropout else {"seed"})
    signature, divisible = {}, []
    for argument in kernel.arg_names:
        if argument in constants:
            continue
        if argument in absent:
            constants[argument] = None
        elif argument in activations | singles | integers | {"seed"}:
            kind = dtype if argument in activations else "fp32" if argument in singles else "i32"
            signature[argument] = "*i64" if argument == "seed" else f"*{kind}"
            divisible.append(argument)
        else:
            signature[argument] = "fp32" if argument in ("scale", "keep_scale") else "i32"
            if argument.endswith(("_row", "_head")):
                divisible.append(argument)
    label = f"attention_{name} {dim} {dtype}" + (" bias" if reach else "") + (" dropout" if dropout else "")
    warps, stages = options["num_warps"], options["num_stages"]
    return Variant(label, kernel, signature, constants, warps, stages, tuple(divisible), arch=arch)
