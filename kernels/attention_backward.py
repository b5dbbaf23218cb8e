"""The backward kernels of attention.py, which launches them and says what is unusual: one for queries and the line's
gradient, one for keys and values. Each also sums what it writes over its tile's rows: that is a bias's gradient in the
projection behind, but for the tiles to be added.

Shapes: as in attention.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maelm_fast.kernels.attention_parts import (
    LN2,
    LOG2E,
    add_to,
    bias_tile,
    dot,
    line_of,
    load_rows,
    near_tiles,
    positions_of,
    sequence_of,
    store_rows,
    store_sums,
)
from maelm_fast.kernels.common import keep_weights


@triton.jit(
    do_not_specialize=["q_tokens", "tile_count", "place", "threshold", "positions"],
    do_not_specialize_on_alignment=["seed"],
)
def _attention_dq_kernel(
    grad_out,  # (Tq, H, D), contiguous
    grad_lse,  # (H, Tq) fp32, or None
    q,  # (Tq, H, D)
    k,  # (Tk, H, D)
    v,  # (Tk, H, D)
    out,  # (Tq, H, D), contiguous
    lse,  # (H, Tq) fp32
    grad_q,  # (Tq, H, D)
    delta,  # (H, Tq) fp32: row sums of grad_out * out, less grad_lse, for the other kernel
    q_sums,  # (tiles, H, D) fp32: of grad_q over each tile's rows; or None
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
    grad_row,  # of grad_q: elements from row to row; from head to head D
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
    BOUNDED: tl.constexpr,
    LINE_GRADIENT: tl.constexpr,
    RED: tl.constexpr,  # how the band is added to
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
    if REACH:
        origin, left, right = line_of(line, head, positions, REACH)
    left_sum = tl.zeros((BLOCK_M,), tl.float32)  # of the scores' gradients at -REACH and beyond
    all_sum = tl.zeros((BLOCK_M,), tl.float32)
    if LINE_GRADIENT:
        band += (head * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * BLOCK_M * (2 * REACH + 1)
        row_band = band + (tl.arange(0, BLOCK_M) * (2 * REACH + 1) + REACH)  # at distance 0
    # For wide heads what each tile can compute again is no longer kept for all: Triton 3.6 spilt it on sm_90.
    for tile in tl.range(tl.program_id(0), tile_count, tl.num_programs(0), disable_licm=DIM > 64):
        first, q_start, q_length, k_start, k_length = sequence_of(tiles, tile, q_starts, k_starts)
        row = first + tl.arange(0, BLOCK_M)
        at = (q_start.to(tl.int64) * heads + head) * DIM
        q_tile = load_rows(q + q_start.to(tl.int64) * q_row, row, q_row, q_length, DIM, BLOCK_D)
        grad_tile = load_rows(grad_out + at, row, heads * DIM, q_length, DIM, BLOCK_D)
        out_tile = load_rows(out + at, row, heads * DIM, q_length, DIM, BLOCK_D)
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
        if REACH:
            k_places, q_places = k_positions + k_start, q_positions + q_start
            query_position = tl.load(q_places + tl.minimum(row, q_length - 1))
            row_line = origin - query_position
            begin, end = near_tiles(q_places, first, q_length, k_places, k_length, REACH, BLOCK_M, BLOCK_N)
        for start in range(begin if BOUNDED else 0, end if BOUNDED else k_length, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            there = tl.arange(0, BLOCK_N) < k_length - start
            k_tile = load_rows(k_tiles, key, k_row, k_length, DIM, BLOCK_D)
            v_tile = load_rows(v_tiles, key, v_row, k_length, DIM, BLOCK_D)
            zero = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            product = dot(q_tile, tl.trans(k_tile), zero, INTERPRETED)
            if REACH:
                near = True if BOUNDED else (start >= begin) & (start < end)
                plain: tl.constexpr = INTERPRETED or DIM < 64  # in assembly ptxas spills there, for a third block
                key_position = positions_of(k_places + start, k_length - start, 2 * positions, BLOCK_N, plain)
                edge = tl.where(there, tl.where(start < begin, left, right), float("-inf"))
                score = product * scale + bias_tile(near, row_line, key_position, edge[None, :], 1, INTERPRETED)
            else:
                score = product * scale + tl.where(there, 0.0, float("-inf"))[None, :]
            weight = tl.exp2(score - row_lse[:, None])
            weight_gradient = dot(grad_tile, tl.trans(v_tile), zero, INTERPRETED)
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
                    add_to(row_band - query_position, key_position, gradient, cell, 2 * REACH - 1, RED, INTERPRETED)
                    left_sum += tl.sum(tl.where(cell < 0, gradient, 0.0), axis=1)
                else:
                    left_sum += tl.where(start < begin, side, 0.0)
            acc = dot(gradient.to(k_tile.dtype), k_tile, acc, INTERPRETED)
        grad_tiles = grad_q + q_start.to(tl.int64) * grad_row + head * DIM
        grad = (acc * (scale * LN2)).to(q_tile.dtype)
        store_rows(grad_tiles, grad, row, grad_row, q_length, DIM, BLOCK_D)
        if q_sums is not None:
            store_sums(q_sums + (tile * heads + head) * DIM, grad, DIM, BLOCK_D, INTERPRETED)
        if LINE_GRADIENT:
            tl.debug_barrier()  # the next tile adds to cells that other threads wrote
    if LINE_GRADIENT:  # the right end's gradient is what is missing from the sum: attention_bwd adds it
        tl.store(row_band - REACH, left_sum)
        tl.store(row_band + REACH, all_sum)


@triton.jit(do_not_specialize=["q_tokens", "place", "threshold", "positions"], do_not_specialize_on_alignment=["seed"])
def _attention_dkv_kernel(
    grad_out,  # (Tq, H, D), contiguous
    q,
    k,
    v,
    lse,  # (H, Tq) fp32
    delta,  # (H, Tq) fp32
    grad_k,  # (Tk, H, D)
    grad_v,  # (Tk, H, D)
    v_sums,  # (tiles, H, D) fp32: of grad_v over each tile's rows; or None
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
    grad_row,  # of grad_k and grad_v: elements from row to row; from head to head D
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
    BOUNDED: tl.constexpr,
    DROPOUT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    first, q_start, q_length, k_start, k_length = sequence_of(tiles, tl.program_id(0), q_starts, k_starts)
    key = first + tl.arange(0, BLOCK_N)
    q += q_start.to(tl.int64) * q_row + head * q_head
    grad_out += (q_start.to(tl.int64) * heads + head) * DIM
    lse += head.to(tl.int64) * q_tokens + q_start
    delta += head.to(tl.int64) * q_tokens + q_start
    k_tile = load_rows(k + k_start.to(tl.int64) * k_row + head * k_head, key, k_row, k_length, DIM, BLOCK_D)
    v_tile = load_rows(v + k_start.to(tl.int64) * v_row + head * v_head, key, v_row, k_length, DIM, BLOCK_D)
    k_acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    v_acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    seed_value = tl.load(seed) if DROPOUT else 0
    there = key < k_length
    if REACH:
        origin, left, right = line_of(line, head, positions, REACH)
        q_positions += q_start
        k_positions += k_start
        row_line = origin + tl.load(k_positions + key, mask=there, other=2 * positions)
        begin, end = near_tiles(k_positions, first, k_length, q_positions, q_length, REACH, BLOCK_N, BLOCK_M)
    for start in range(begin if BOUNDED else 0, end if BOUNDED else q_length, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        inside = row < q_length
        q_tile = load_rows(q, row, q_row, q_length, DIM, BLOCK_D)
        grad_tile = load_rows(grad_out, row, heads * DIM, q_length, DIM, BLOCK_D)
        row_lse = tl.load(lse + row, mask=inside, other=float("inf")) * LOG2E
        row_delta = tl.load(delta + row, mask=inside, other=0.0)
        zero = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        # keys by queries, so that no product transposes the weights
        product = dot(k_tile, tl.trans(q_tile), zero, INTERPRETED)
        if REACH:
            query_position = tl.load(q_positions + row, mask=inside, other=0)
            edge = tl.where(there, tl.where(start < begin, right, left), float("-inf"))  # keys right of earlier queries
            near = True if BOUNDED else (start >= begin) & (start < end)
            score = product * scale + bias_tile(near, row_line, query_position, edge[:, None], -1, INTERPRETED)
        else:
            score = product * scale + tl.where(there, 0.0, float("-inf"))[:, None]
        weight = tl.exp2(score - row_lse[None, :])
        weight_gradient = dot(v_tile, tl.trans(grad_tile), zero, INTERPRETED)
        kept = weight
        if DROPOUT:
            keep = tl.trans(keep_weights(seed_value, place, head, q_start + row, first, BLOCK_N, threshold))
            kept = tl.where(keep, weight, 0.0)
            weight_gradient = tl.where(keep, weight_gradient * keep_scale, 0.0)
        v_acc = dot(kept.to(grad_tile.dtype), grad_tile, v_acc, INTERPRETED)
        gradient = weight * (weight_gradient - row_delta[None, :])
        k_acc = dot(gradient.to(q_tile.dtype), q_tile, k_acc, INTERPRETED)
    at = k_start.to(tl.int64) * grad_row + head * DIM
    grad = (v_acc * (keep_scale if DROPOUT else 1.0)).to(v_tile.dtype)
    store_rows(grad_v + at, grad, key, grad_row, k_length, DIM, BLOCK_D)
    if v_sums is not None:
        store_sums(v_sums + (tl.program_id(0) * heads + head) * DIM, grad, DIM, BLOCK_D, INTERPRETED)
    store_rows(grad_k + at, k_acc * (scale * LN2), key, grad_row, k_length, DIM, BLOCK_D)
