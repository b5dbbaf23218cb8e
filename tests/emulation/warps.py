"""Instructions of a whole warp: shuffles, reductions, votes, and products of matrices. All its lanes must be there.

Where a matrix's elements lie: lane = 4 g + q, with g from 0 to 7 and q from 0 to 3. A register holds two neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.emulation import traffic
from tests.emulation.instructions import from_bf16
from tests.emulation.memory import Array, Fault
from tests.emulation.ptx import Instruction, Operand, several

if TYPE_CHECKING:
    from tests.emulation.machine import Blocks, Mask, Step

ALL_LANES = 0xFFFFFFFF


def _together(blocks: Blocks, members: Operand, mask: Mask) -> None:
    """Fails where some lanes of a warp, but not all, run the instruction. members: the lanes that it says are there."""
    if (np.broadcast_to(blocks.get(members, "u32"), blocks.threads)[blocks.lanes(mask)] != ALL_LANES).any():
        raise NotImplementedError("an instruction for a part of a warp")
    if mask is None:
        return
    present = (mask | ~blocks.alive).reshape(-1, 32)
    partly = present.any(1) & ~present.all(1) & mask.reshape(-1, 32).any(1)
    if partly.any():
        raise Fault("an instruction for whole warps runs without some of a warp's lanes", mask & partly.repeat(32))


def _shuffle(now: Instruction) -> Step:
    how, data = now.parts[2], len(now.operands) - 4

    def shuffle(blocks: Blocks, mask: Mask) -> None:
        _together(blocks, now.operands[-1], mask)
        values = np.broadcast_to(blocks.get(now.operands[data], "b32"), blocks.threads)
        offset, limits = (np.asarray(blocks.get(o, "u32")).astype(np.int64) for o in now.operands[data + 1 : data + 3])
        lane = np.arange(blocks.threads) % 32
        segment = limits >> 8 & 31
        last, first = lane & segment | limits & 31 & ~segment, lane & segment
        if how == "up":
            source, valid = lane - offset, lane - offset >= last
        elif how == "down":
            source, valid = lane + offset, lane + offset <= last
        elif how == "bfly":
            source, valid = lane ^ offset, (lane ^ offset) <= last
        else:
            source = first | offset & 31 & ~segment
            valid = source <= last
        source = np.where(valid, source, lane)
        blocks.put(now.operands[0], values[np.arange(blocks.threads) // 32 * 32 + source], mask)
        if data == 2:
            blocks.put(now.operands[1], valid, mask)

    return shuffle


def _reduce(now: Instruction) -> Step:
    function = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
                "xor": np.bitwise_xor}[now.parts[2]]  # fmt: skip

    def reduce(blocks: Blocks, mask: Mask) -> None:
        _together(blocks, now.operands[-1], mask)
        values = np.broadcast_to(blocks.get(now.operands[1], now.parts[-1]), blocks.threads).reshape(-1, 32)
        result = function.reduce(values, axis=1, dtype=values.dtype)
        blocks.put(now.operands[0], result.repeat(32), mask)

    return reduce


def _vote(now: Instruction) -> Step:
    if now.parts[2] != "ballot":
        raise NotImplementedError(now.text)

    def ballot(blocks: Blocks, mask: Mask) -> None:
        _together(blocks, now.operands[-1], mask)
        says = (np.broadcast_to(blocks.get(now.operands[1], "pred"), blocks.threads) & blocks.alive).reshape(-1, 32)
        bits = says.astype(np.uint32) << np.arange(32, dtype=np.uint32)
        blocks.put(now.operands[0], bits.sum(1, dtype=np.uint32).repeat(32), mask)

    return ballot


def _load_matrices(now: Instruction) -> Step:
    """Eight by eight elements of 16 bits each: lane 8 i + r gives the address of row r of matrix i."""
    names = list(several(now.operands[0]))

    def load(blocks: Blocks, mask: Mask) -> None:
        _together(blocks, "-1", mask)
        lanes = blocks.lanes(mask)
        lanes = lanes[lanes % 32 < 8 * len(names)]
        at = blocks.address(now.operands[1], "shared", lanes)
        traffic.count(blocks, lanes, at, 16, "shared")
        rows = blocks.shared.read(at, np.uint16, 8, blocks.tag[lanes]).reshape(-1, len(names), 8, 8)
        if "trans" in now.parts:
            rows = rows.transpose(0, 1, 3, 2)
        halves = np.ascontiguousarray(rows).view(np.uint32)  # (warps, matrices, g, q)
        warps = np.unique(lanes // 32)
        for i, name in enumerate(names):
            spread = np.zeros((blocks.threads // 32, 32), np.uint32)
            spread[warps] = halves[:, i].reshape(-1, 32)
            blocks.put(name, spread.reshape(-1), mask)

    return load


def _multiply(now: Instruction) -> Step:
    """C + A B, 16 x 8 of 16 x 16 and 16 x 8, summed in fp32."""
    shape, kind, sums = now.parts[3], now.parts[-2], now.parts[-4]
    if shape != "m16n8k16" or kind not in ("bf16", "f16") or sums != "f32":
        raise NotImplementedError(f"{now.text}: a product of this shape or type")
    result, *factors = (list(several(operand)) for operand in now.operands)

    def numbers(bits: Array) -> Array:
        return from_bf16(bits) if kind == "bf16" else bits.view(np.float16).astype(np.float32)

    def pairs(blocks: Blocks, names: list) -> Array:
        """(registers, warps, g, q, 2)"""
        words = np.stack([np.broadcast_to(blocks.get(name, "b32"), blocks.threads) for name in names])
        return numbers(words.view(np.uint16)).reshape(len(names), -1, 8, 4, 2)

    def multiply(blocks: Blocks, mask: Mask) -> None:
        _together(blocks, "-1", mask)
        a = pairs(blocks, factors[0]).reshape(2, 2, -1, 8, 4, 2)  # right half, lower half, warp, g, q, neighbour
        b = pairs(blocks, factors[1])  # lower half, warp, g, q, neighbour
        c = np.stack([np.broadcast_to(blocks.get(name, "f32"), blocks.threads) for name in factors[2]])
        c = c.reshape(2, 2, -1, 8, 4).transpose(2, 0, 3, 4, 1).reshape(-1, 16, 8)  # lower half, neighbour, warp, g, q
        a, b = a.transpose(2, 1, 3, 0, 4, 5).reshape(-1, 16, 16), b.transpose(1, 0, 3, 4, 2).reshape(-1, 16, 8)
        d = (c + a @ b).reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)
        for name, value in zip(result, d, strict=True):
            blocks.put(name, value, mask)

    return multiply


TABLE = {
    "shfl": _shuffle, "redux": _reduce, "vote": _vote, "ldmatrix": _load_matrices, "mma": _multiply,
}  # fmt: skip
