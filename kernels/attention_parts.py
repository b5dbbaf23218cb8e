"""What the three attention kernels share: where a tile's sequence and its line lie, which tiles are near, products,
loads and stores, and the assembly that looks a bias up and adds a gradient to a band.

Shapes: as in attention.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def dot(a, b, acc, INTERPRETED: tl.constexpr):
    """acc + a @ b, summed in fp32. The interpreter has no bf16 products."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def gather(row, column, SIGN: tl.constexpr, INTERPRETED: tl.constexpr):
    """tl.load(row[:, None] + SIGN * column[None, :]), row (R,) pointers to fp32 that nothing writes, column (C,) int32.

    In assembly so that values arrive in the layout in which they are used, from addresses that are a row's plus a
    column's: for a tile of this size tl.load would choose a layout of its own and carry the values over through shared
    memory."""
    if INTERPRETED:
        return tl.load(row[:, None] + SIGN * column[None, :])
    base = row.to(tl.int64)[:, None]
    bytes_apart: tl.constexpr = "4" if SIGN > 0 else "-4"
    load: tl.constexpr = "{ .reg .b64 a; mad.wide.s32 a, $2, " + bytes_apart + ", $1; ld.global.nc.f32 $0, [a]; }"
    return tl.inline_asm_elementwise(load, "=f,l,r", [base, column[None, :]], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def positions_of(base, length, absent, ROWS: tl.constexpr, INTERPRETED: tl.constexpr):
    """(ROWS,) int32 from `base` on, which nothing writes; `absent` from `length` on.

    In assembly as gather is: Triton 3.6 would have every thread copy each of the positions that it uses into shared
    memory by itself, 16 copies a tile with a predicate each."""
    row = tl.arange(0, ROWS)
    if INTERPRETED:
        return tl.load(base + row, mask=row < length, other=absent)
    load: tl.constexpr = "{ .reg .pred p; setp.lt.s32 p, $2, $3; mov.b32 $0, $4; @p ld.global.nc.b32 $0, [$1]; }"
    operands = [(base + row).to(tl.int64), row, row * 0 + length, row * 0 + absent]
    return tl.inline_asm_elementwise(load, "=&r,l,r,r,r", operands, dtype=tl.int32, is_pure=True, pack=1)


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
def add_to(row, column, values, cell, limit, INTERPRETED: tl.constexpr):
    """(row[:, None] + column[None, :])[...] += values where 0 <= cell < limit; no address twice, so that a thread may
    load eight before it stores them. row: (R,) pointers to fp32. In assembly as gather is."""
    if INTERPRETED:
        at, inside = row[:, None] + column[None, :], (cell >= 0) & (cell < limit)
        tl.store(at, tl.load(at, mask=inside, other=0.0) + values, mask=inside)
    else:
        operands = [row.to(tl.int64)[:, None], column[None, :], cell, cell * 0 + limit, values]
        tl.inline_asm_elementwise(ADD_ASSEMBLY, ADD_CONSTRAINTS, operands, tl.int32, is_pure=False, pack=ADD_COUNT)


@triton.jit
def load_rows(x, row, stride, length, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """(rows, BLOCK_D) of one head of one sequence; zeros where there is no row or no column."""
    column = tl.arange(0, BLOCK_D)
    there = row[:, None] < length
    if DIM != BLOCK_D:
        there = there & (column < DIM)[None, :]
    return tl.load(x + row[:, None] * stride + column[None, :], mask=there, other=0.0)


@triton.jit
def store_rows(x, values, row, stride, length, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    column = tl.arange(0, BLOCK_D)
    there = row[:, None] < length
    if DIM != BLOCK_D:
        there = there & (column < DIM)[None, :]
    tl.store(x + row[:, None] * stride + column[None, :], values, mask=there)


@triton.jit
def store_sums(sums, values, DIM: tl.constexpr, BLOCK_D: tl.constexpr, INTERPRETED: tl.constexpr):
    """sums: (D,) fp32 of one head. values: (rows, BLOCK_D), zeros where there is no row.

    By a product with ones: tl.sum over rows, which lie in all lanes and warps, takes two and a half times the
    instructions."""
    ones = tl.full((16, values.shape[0]), 1.0, values.dtype)
    total = dot(ones, values, tl.zeros((16, BLOCK_D), tl.float32), INTERPRETED)
    same, column = tl.arange(0, 16)[:, None], tl.arange(0, BLOCK_D)[None, :]
    tl.store(sums + column + 0 * same, total, mask=(same == 0) & (column < DIM))


@triton.jit
def sequence_of(tiles, tile, q_starts, k_starts):
    """Of a tile: its first row within its sequence; that sequence's first query, queries, first key, keys."""
    sequence = tl.load(tiles + 2 * tile)
    first = tl.load(tiles + 2 * tile + 1)
    q_start = tl.load(q_starts + sequence)
    k_start = tl.load(k_starts + sequence)
    q_length = tl.load(q_starts + sequence + 1) - q_start
    return first, q_start, q_length, k_start, tl.load(k_starts + sequence + 1) - k_start


@triton.jit
def line_of(line, head, positions, REACH: tl.constexpr):
    """Of a head: where distance 0 lies in its line, and what stands at -REACH and at REACH."""
    origin = line + head * 3 * positions + (positions - 1)
    return origin, tl.load(origin - REACH), tl.load(origin + REACH)


@triton.jit
def near_tiles(
    own, own_first, own_length, positions, length, REACH: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr
):
    """(first, end): rows of a sequence, BLOCK to a tile, whose tiles hold a distance below REACH from the tile of OWN
    rows from `own_first` on; all earlier tiles lie at least REACH before it, all later ones at least REACH after it.
    own, positions: of the tile's sequence and of the other."""
    low = tl.load(own + own_first)
    high = tl.load(own + tl.minimum(own_first + OWN, own_length) - 1)
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
def bias_tile(near, row, column, edge, SIGN: tl.constexpr, INTERPRETED: tl.constexpr):
    """(R, C), what is added to a tile's scores, -inf where there is no key. row: (R,) pointers into the line for a
    column position of 0. column: (C,) positions. edge: what it is in a tile that is not near, (1, C) or (R, 1)."""
    bias = tl.broadcast_to(edge, (row.shape[0], column.shape[0]))
    if near:
        bias = gather(row, column, SIGN, INTERPRETED)
    return bias
