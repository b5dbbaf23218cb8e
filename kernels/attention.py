"""Attention over packed sequences whose positions have gaps, with a bias that depends on distance alone.

What no other kernel does: the bias of a pair is looked up by the distance of the *original* positions, in a line of one
head that stays in the first-level cache; key tiles that lie wholly beyond the line's reach get a constant instead. And
the line's gradient needs no atomics: a program owns the query tiles it walks through, and a row of scores has every
distance at most once, so it adds scores' gradients into a band (row, distance) of its own with plain loads and stores.

Positions ascend within a sequence. Hence the key tiles of a query tile come in three runs: beyond the reach to the
left, near, beyond it to the right. In the near run an absent key has a position so large that its lookup gives minus
infinity. Of a bounded line, whose ends are minus infinity, only the near run is walked through: a sliding window.

Softmax works in base 2: scale and line are multiplied by log2(e) beforehand. LSE is kept in natural units.

Shapes: M query rows and N key rows of a tile, D head dim (padded to BLOCK_D), R reach, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from maelm_fast.kernels import attention_tiles
from maelm_fast.kernels.attention_backward import _attention_dkv_kernel, _attention_dq_kernel
from maelm_fast.kernels.attention_parts import (
    LN2,
    LOG2E,
    bias_tile,
    dot,
    line_of,
    load_rows,
    near_tiles,
    positions_of,
    sequence_of,
    store_rows,
)
from maelm_fast.kernels.attention_tiles import Tile, Tiles
from maelm_fast.kernels.common import FUSED, by_rows, dropout_numbers, keep_weights


@triton.jit(do_not_specialize=["q_tokens", "place", "threshold", "positions"], do_not_specialize_on_alignment=["seed"])
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
    BOUNDED: tl.constexpr,  # the line's ends are -inf
    DROPOUT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    head = tl.program_id(1)
    first, q_start, q_length, k_start, k_length = sequence_of(tiles, tl.program_id(0), q_starts, k_starts)
    row = first + tl.arange(0, BLOCK_M)
    q += q_start.to(tl.int64) * q_row + head * q_head
    k += k_start.to(tl.int64) * k_row + head * k_head
    v += k_start.to(tl.int64) * v_row + head * v_head
    q_tile = load_rows(q, row, q_row, q_length, DIM, BLOCK_D)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), -1e30, tl.float32)  # finite: a line may hold -inf for all of a row's first keys
    seed_value = tl.load(seed) if DROPOUT else 0
    if REACH:
        origin, left, right = line_of(line, head, positions, REACH)
        q_positions += q_start
        k_positions += k_start
        row_line = origin - tl.load(q_positions + tl.minimum(row, q_length - 1))
        begin, end = near_tiles(q_positions, first, q_length, k_positions, k_length, REACH, BLOCK_M, BLOCK_N)
    for start in range(begin if BOUNDED else 0, end if BOUNDED else k_length, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        there = tl.arange(0, BLOCK_N) < k_length - start  # as positions_of compares
        k_tile = load_rows(k, key, k_row, k_length, DIM, BLOCK_D)
        product = dot(q_tile, tl.trans(k_tile), tl.zeros((BLOCK_M, BLOCK_N), tl.float32), INTERPRETED)
        if REACH:
            key_position = positions_of(k_positions + start, k_length - start, 2 * positions, BLOCK_N, INTERPRETED)
            edge = tl.where(there, tl.where(start < begin, left, right), float("-inf"))
            near = True if BOUNDED else (start >= begin) & (start < end)
            score = product * scale + bias_tile(near, row_line, key_position, edge[None, :], 1, INTERPRETED)
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
        v_tile = load_rows(v, key, v_row, k_length, DIM, BLOCK_D)
        acc = dot(weight.to(v_tile.dtype), v_tile, acc * shrink[:, None], INTERPRETED)
    some = total > 0.0  # a query without keys, or with none but those that a line's -inf excludes, gives 0
    factor = tl.where(some, (keep_scale if DROPOUT else 1.0) / tl.where(some, total, 1.0), 0.0)
    heads = tl.num_programs(1)
    out += (q_start.to(tl.int64) * heads + head) * DIM
    store_rows(out, acc * factor[:, None], row, heads * DIM, q_length, DIM, BLOCK_D)
    log_sum = (top + tl.log2(tl.where(some, total, 1.0))) * LN2  # finite: then their weights are 0 in the backward pass
    tl.store(lse + head.to(tl.int64) * q_tokens + q_start + row, log_sum, mask=row < q_length)


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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    line: Tensor | None,
    reach: int,
    packed: Packed,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    place: int,
    bounded: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out, lse): out (Tq, H, D) in q's dtype, lse (H, Tq) fp32, below -1e29 for a query without keys or with none that
    the line does not exclude. line: (H, 3P) fp32. bounded: it is -inf at a distance of `reach` and beyond."""
    q, k, v = (by_rows(t) for t in (q, k, v))
    tokens, heads, dim = q.shape
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, tokens), dtype=torch.float32, device=q.device)
    if packed.fwd_tiles.shape[0] == 0:
        return out, lse
    tile = attention_tiles.tiles_for(q.device, dim).fwd
    dropout = dropout_p > 0
    layout = (packed.q_starts, packed.k_starts, packed.q_positions, packed.k_positions, line, seed if dropout else None)
    numbers = (*_strides(q, k, v), scale * LOG2E.value, place, *dropout_numbers(dropout_p), _positions(line))
    launch = _launch("fwd", tile, dim, reach, bounded, dropout, q.device.type != "cuda")
    with torch.cuda.device_of(q):
        _attention_fwd_kernel[(packed.fwd_tiles.shape[0], heads)](
            q, k, v, out, lse, packed.fwd_tiles, *layout, tokens, *numbers, **launch
        )
    return out, lse


def attention_bwd(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    line: Tensor | None,
    reach: int,
    line_gradient: bool,
    packed: Packed,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    place: int,
    bounded: bool = False,
    *,
    gradients: Sequence[Tensor],
    summed: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Writes gradients of q, k and v into `gradients`, whose heads lie side by side; k's and v's with equal strides.
    Returns the line's, (H, 2R+1) fp32 by distance from -R to R, whose ends hold all that lies beyond too, None unless
    asked for; and, if `summed`, without grad_lse, the sums over the rows of q's, k's and v's, (3, H, D) fp32, of which
    k's are zeros: what is added to every key changes no weight. The same in every run on a device of the same size."""
    q, k, v = (by_rows(t) for t in (q, k, v))
    grad_out, out = grad_out.contiguous(), out.contiguous()
    grad_lse = grad_lse.contiguous() if grad_lse is not None else None
    tokens, heads, dim = q.shape
    grad_q, grad_k, grad_v = gradients
    delta = torch.empty((heads, tokens), dtype=torch.float32, device=q.device)
    tiles, dropout, on_cpu = attention_tiles.tiles_for(q.device, dim), dropout_p > 0, q.device.type != "cuda"
    q_tiles, k_tiles = packed.dq_tiles.shape[0], packed.dkv_tiles.shape[0]
    layout = (packed.q_starts, packed.k_starts, packed.q_positions, packed.k_positions, line, seed if dropout else None)
    strides, numbers = _strides(q, k, v), (scale * LOG2E.value, place, *dropout_numbers(dropout_p), _positions(line))
    programs = _programs(q.device, q_tiles, heads, tiles) if line_gradient else q_tiles
    q_sums = v_sums = None
    if summed:
        q_sums, v_sums = (
            torch.empty((count, heads, dim), dtype=torch.float32, device=q.device) for count in (q_tiles, k_tiles)
        )
    band = None
    if line_gradient:
        band = torch.zeros((heads, programs, tiles.dq.own, 2 * reach + 1), dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        if q_tiles:
            launch = _launch("dq", tiles.dq, dim, reach, bounded, dropout, on_cpu) | {"LINE_GRADIENT": line_gradient}
            inputs, results = (grad_out, grad_lse, q, k, v, out, lse), (grad_q, delta, q_sums, band)
            _attention_dq_kernel[(programs, heads)](
                *inputs,
                *results,
                packed.dq_tiles,
                *layout,
                tokens,
                q_tiles,
                *strides,
                grad_q.stride(0),
                *numbers,
                **launch,
            )
        if k_tiles:
            launch = _launch("dkv", tiles.dkv, dim, reach, bounded, dropout, on_cpu)
            _attention_dkv_kernel[(k_tiles, heads)](
                *(grad_out, q, k, v, lse, delta, grad_k, grad_v, v_sums, packed.dkv_tiles, *layout),
                *(tokens, *strides, grad_k.stride(0), *numbers),
                **launch,
            )
    return _line_gradient(band) if band is not None else None, _sums(q_sums, v_sums)


def _line_gradient(band: Tensor) -> Tensor:
    """(H, 2R+1) from the programs' bands (H, programs, M, 2R+1), whose last column holds the sum over all distances."""
    line = band.sum((1, 2))
    others, last = line.split([line.shape[1] - 1, 1], dim=1)
    last.sub_(others.sum(1, keepdim=True))
    return line


def _sums(q_sums: Tensor | None, v_sums: Tensor | None) -> Tensor | None:
    """(3, H, D) from the tiles' sums of q's gradient and of v's, (tiles, H, D) each."""
    if q_sums is None or v_sums is None:
        return None
    sums = q_sums.new_zeros((3, *q_sums.shape[1:]))
    of_q, _, of_v = sums.unbind()
    torch.sum(q_sums, 0, out=of_q)
    torch.sum(v_sums, 0, out=of_v)
    return sums


def _strides(*tensors: Tensor) -> list[int]:
    """Elements from row to row and from head to head of each."""
    return [x.stride(axis) for x in tensors for axis in (0, 1)]


def _positions(line: Tensor | None) -> int:
    return line.shape[1] // 3 if line is not None else 1


def _programs(device: torch.device, tiles: int, heads: int, sizes: Tiles) -> int:
    """Programs per head that walk through the query tiles: all of them resident at once."""
    if device.type != "cuda":
        return max(1, min(tiles, 2))  # several, so that interpreted tests walk and add
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(tiles, multiprocessors * sizes.resident // heads))


def _launch(
    kernel: str, tile: Tile, dim: int, reach: int, bounded: bool, dropout: bool, interpreted: bool
) -> dict[str, Any]:
    """The constexpr arguments that the kernels share, and the launch options."""
    own, step = ("BLOCK_N", "BLOCK_M") if kernel == "dkv" else ("BLOCK_M", "BLOCK_N")
    return {
        "DIM": dim,
        "BLOCK_D": attention_tiles.padded(dim),
        own: tile.own,
        step: tile.step,
        "REACH": reach,
        "BOUNDED": bounded,
        "DROPOUT": dropout,
        "INTERPRETED": interpreted,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **FUSED,
    }
