"""Instructions that move data: loads, stores, atomics and asynchronous copies. Also how well they do it, for counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.emulation.memory import BLOCK, Array, Memory
from tests.emulation.ptx import TYPES, Address, Instruction, Program, several

if TYPE_CHECKING:
    from tests.emulation.machine import Blocks, Mask, Step


def smallest_access(program: Program, space: str) -> int:
    """Bytes; at most 16."""
    sizes = [16]
    for now in program.code:
        if now.parts[0] in ("ld", "st", "red", "atom") and space_of(now) == space:
            sizes.append(_element(now).itemsize * _count(now))
        elif now.parts[:2] == ("cp", "async") and len(now.operands) > 1:
            sizes.append(int(str(now.operands[2]), 0))
    return min(sizes)


def space_of(now: Instruction) -> str:
    return next((part for part in now.parts if part in ("param", "shared", "local")), "global")


def _element(now: Instruction) -> np.dtype[Any]:
    return np.dtype(TYPES[now.parts[-1]])


def _count(now: Instruction) -> int:
    address = next(i for i, operand in enumerate(now.operands) if isinstance(operand, Address))
    return len(list(several(now.operands[1 - address if now.parts[0] != "atom" else 2])))


def _place(blocks: Blocks, now: Instruction, operand: int, size: int, mask: Mask) -> tuple[Memory, Array, Array]:
    """(memory, threads, their addresses) of an access of `size` bytes; counts it."""
    lanes, space = blocks.lanes(mask), space_of(now)
    at = blocks.address(now.operands[operand], space, lanes)
    count(blocks, lanes, at, size, space)
    return blocks.shared if space == "shared" else blocks.memory, lanes, at


def _load(now: Instruction) -> Step:
    kind, names, space = _element(now), list(several(now.operands[0])), space_of(now)
    source = now.operands[1]

    def load(blocks: Blocks, mask: Mask) -> None:
        memory, lanes, at = _place(blocks, now, 1, kind.itemsize * len(names), mask)
        values = memory.read(at, kind, len(names), blocks.tag[lanes])
        for name, value in zip(names, values.T, strict=True):
            if len(lanes) == blocks.threads:
                blocks.put(name, value, None)
                continue
            spread = np.zeros(blocks.threads, kind)
            spread[lanes] = value
            blocks.put(name, spread, mask)

    def parameter(blocks: Blocks, mask: Mask) -> None:
        at = int(blocks.address(source, "param", blocks.lanes(mask)[:1])[0])  # of all threads the same
        values = np.frombuffer(blocks.arguments, kind, len(names), at)
        for name, value in zip(names, values, strict=True):
            blocks.put(name, value, mask)

    return parameter if space == "param" else load


def _store(now: Instruction) -> Step:
    kind, names = now.parts[-1], list(several(now.operands[1]))

    def store(blocks: Blocks, mask: Mask) -> None:
        memory, lanes, at = _place(blocks, now, 0, _element(now).itemsize * len(names), mask)
        values = [np.broadcast_to(blocks.get(name, kind), blocks.threads)[lanes] for name in names]
        memory.write(at, np.stack(values, axis=1), blocks.tag[lanes])

    return store


def _atomic(now: Instruction) -> Step:
    kind, returns = now.parts[-1], now.parts[0] == "atom"
    if "add" not in now.parts:
        raise NotImplementedError(now.text)
    names = list(several(now.operands[1 + returns]))

    def atomic(blocks: Blocks, mask: Mask) -> None:
        memory, lanes, at = _place(blocks, now, int(returns), _element(now).itemsize * len(names), mask)
        values = [np.broadcast_to(blocks.get(name, kind), blocks.threads)[lanes] for name in names]
        before = memory.add(at, np.stack(values, axis=1), blocks.tag[lanes])
        if returns:
            spread = np.zeros(blocks.threads, before.dtype)
            spread[lanes] = before[:, 0]
            blocks.put(now.operands[0], spread, blocks.alive if mask is None else mask)

    return atomic


def _copy(now: Instruction) -> Step:
    """cp.async to shared memory. It reads when it sets out, and is there for the thread that waits for its group; until
    then nobody may touch the place it goes to."""
    if now.parts[1] != "async":
        raise NotImplementedError(now.text)

    def close(blocks: Blocks, mask: Mask) -> None:
        blocks.groups = blocks.groups + (blocks.alive if mask is None else mask)

    def wait(blocks: Blocks, mask: Mask) -> None:
        may_be_under_way = int(str(now.operands[0]), 0) if now.operands else -1
        waits = blocks.alive if mask is None else mask
        left = []
        for lanes, groups, at, data in blocks.copies:
            done = waits[lanes] & (groups < blocks.groups[lanes] - may_be_under_way)
            blocks.shared.land(at[done], data[done], blocks.tag[lanes[done]])
            if not done.all():
                left.append((lanes[~done], groups[~done], at[~done], data[~done]))
        blocks.copies = left

    if now.parts[2] == "commit_group":
        return close
    if now.parts[2] in ("wait_group", "wait_all"):
        return wait
    size = int(str(now.operands[2]), 0)
    kind = np.dtype(f"u{min(size, 8)}")

    def send(blocks: Blocks, mask: Mask) -> None:
        lanes = blocks.lanes(mask)
        to = blocks.address(now.operands[0], "shared", lanes)
        source = blocks.address(now.operands[1], "global", lanes)
        wanted = np.full(blocks.threads, size)
        if len(now.operands) > 3:
            wanted = np.broadcast_to(blocks.get(now.operands[3], "u32"), blocks.threads)
        if not np.isin(wanted[lanes], (0, size)).all():
            raise NotImplementedError(f"{now.text}: copies a part of {size} bytes")
        reads = wanted[lanes] == size
        data = np.zeros((len(lanes), size // kind.itemsize), kind)
        if reads.any():
            blocks.asking = lanes[reads]
            count(blocks, lanes[reads], source[reads], size, "global")
            data[reads] = blocks.memory.read(source[reads], kind, data.shape[1], blocks.tag[lanes[reads]])
        blocks.asking = lanes
        count(blocks, lanes, to, size, "shared")
        blocks.shared.send(to, size, blocks.tag[lanes])
        blocks.copies.append((lanes, blocks.groups[lanes], to, data))

    return send


def _nothing(now: Instruction) -> Step:
    return lambda blocks, mask: None


def count(blocks: Blocks, lanes: Array, at: Array, size: int, space: str) -> None:
    """Global memory: requests, a warp's instruction each, and the sectors of 32 bytes that they touch. Shared memory:
    wavefronts, in each of which a bank gives one word, and how many there would be if no two words shared a bank."""
    if blocks.counts is None or not len(lanes):
        return
    traffic = blocks.counts.traffic
    if space == "global":
        warp = lanes // 32
        traffic["requests"] += len(np.unique(warp))
        traffic["sectors"] += len(np.unique(warp * BLOCK + at // 32))
        return
    words = at[:, None] // 4 + np.arange(max(1, size // 4))
    served = lanes // (128 // max(4, size))  # lanes whose bytes are moved together
    places = np.unique(served[:, None] * BLOCK + words)
    groups, number = np.unique(places // BLOCK, return_inverse=True)
    load = np.bincount(number * 32 + places % BLOCK % 32, minlength=32 * len(groups)).reshape(-1, 32)
    traffic["wavefronts"] += int(load.max(1).sum())
    traffic["ideal wavefronts"] += len(groups)


TABLE = {
    "ld": _load, "st": _store, "red": _atomic, "atom": _atomic, "cp": _copy, "membar": _nothing, "fence": _nothing,
}  # fmt: skip
