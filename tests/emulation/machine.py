"""Runs a kernel: some blocks of its grid at a time, all their threads in lockstep, a NumPy array a register.

Threads that branch apart become groups, each with a place in the code; the group that is furthest behind runs, and
groups that meet go on as one. A barrier lets a block through when all its threads have come. Lockstep hides what two
lanes of one warp could do to each other: of threads' order only what warps and blocks do is checked.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.emulation import instructions, traffic, warps
from tests.emulation.memory import BARRIER, BLOCK, NOBODY, WARP, Array, Fault, Memory
from tests.emulation.ptx import TYPES, Address, Instruction, Operand, Program, Register

THREADS = 2048  # that run at once, about: enough for NumPy, few enough for a processor's cache
Mask = Array | None  # (threads,) bools; None: all
Step = Callable[["Blocks", Mask], None]
CONTROL = {"bra", "ret", "exit", "bar", "barrier"}


@dataclass
class Counts:
    """What one kernel's launches executed. issued: warp instructions by their first part and, of memory's, space."""

    issued: collections.Counter[str] = field(default_factory=collections.Counter)
    traffic: collections.Counter[str] = field(default_factory=collections.Counter)


class Kernel:
    """A program made ready to run. granules: the fewest bytes that an access to shared and to global memory moves."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.steps = [None if i.parts[0] in CONTROL else step(i) for i in program.code]
        self.granules = {space: traffic.smallest_access(program, space) for space in ("shared", "global")}

    def launch(
        self, arguments: list[bytes], grid: tuple[int, int, int], block: tuple[int, int, int], shared: int,
        memory: Memory, counts: Counts | None = None,
    ) -> None:  # fmt: skip
        """arguments: in the order of the parameters. shared: bytes that the launch asks for. counts: added to."""
        given = b"".join(argument.ljust(-(-len(argument) // 16) * 16, b"\0") for argument in arguments)
        each, total = int(np.prod(block)), int(np.prod(grid))
        at_once = max(1, THREADS // each)
        for first in range(0, total, at_once):
            some = np.arange(first, min(total, first + at_once))
            with np.errstate(all="ignore"):
                Blocks(self, given, grid, block, some, shared, memory, counts).run()


class Blocks:
    def __init__(
        self, kernel: Kernel, arguments: bytes, grid: tuple[int, int, int], block: tuple[int, int, int],
        numbers: Array, shared: int, memory: Memory, counts: Counts | None,
    ) -> None:  # fmt: skip
        program = kernel.program
        self.kernel, self.arguments, self.memory, self.counts = kernel, arguments, memory, counts
        self.size, self.blocks = int(np.prod(block)), len(numbers)
        self.padded = -(-self.size // 32) * 32  # the last warp's missing threads are there and never alive
        self.threads = self.padded * self.blocks
        thread, number = np.tile(np.arange(self.padded), self.blocks), np.repeat(numbers, self.padded)
        self.alive = thread < self.size
        self.tag = number * BLOCK + thread // 32 * WARP
        self.number, self.thread = number, thread
        self.registers: list[Array | None] = [None] * len(program.registers)
        where = {
            "tid": np.unravel_index(thread % self.size, block[::-1])[::-1],
            "ctaid": np.unravel_index(number, grid[::-1])[::-1], "ntid": block, "nctaid": grid,
        }  # fmt: skip
        self.special = {f"%{n}.{axis}": v for n, values in where.items() for axis, v in zip("xyz", values, strict=True)}
        self.special["%laneid"] = thread % 32
        places = np.cumsum([0, *(-(-size // 16) * 16 for size in program.parameters.values())])
        places_by_name = dict(zip(program.parameters, places, strict=False)) | program.shared
        self.special |= {name: np.int64(at) for name, at in places_by_name.items()}
        self.shared_size = program.static + shared
        self.shared_stride = -(-(self.shared_size + 1) // 16) * 16
        self.shared_base = np.repeat(np.arange(self.blocks), self.padded) * self.shared_stride
        self.shared = Memory(self.shared_stride * self.blocks, kernel.granules["shared"], same_is_fine=True)
        self.shared.bytes[:] = 0xFF  # NaN, wherever nothing was written
        cells = self.shared.writer.reshape(self.blocks, -1)
        cells[:, : -(-self.shared_size // self.shared.granule)] = NOBODY
        self.asking: Array = np.arange(0)  # the threads of the last access to memory
        self.copies: list[tuple[Array, Array, Array, Array]] = []  # threads, their groups, where to, and what
        self.groups = np.zeros(self.threads, np.int64)  # of copies that each thread has closed

    # registers

    def get(self, operand: Operand, kind: str) -> Any:
        """The operand as NumPy numbers of a PTX type: one a thread, or one for all."""
        dtype = TYPES[kind]
        if isinstance(operand, Register):
            value = self.registers[operand.number]
            if value is None:  # never written
                value = self.registers[operand.number] = np.zeros(self.threads, TYPES[operand.kind])
            if value.dtype == dtype:
                return value
            return value.view(dtype) if value.itemsize == np.dtype(dtype).itemsize else value.astype(dtype)
        assert isinstance(operand, str)
        if operand in self.special:
            return np.asarray(self.special[operand]).astype(dtype)
        return constant(operand, kind)

    def put(self, operand: Operand, value: Any, mask: Mask) -> None:
        if operand == "_":
            return
        assert isinstance(operand, Register), operand
        dtype = np.dtype(TYPES[operand.kind])
        value = np.asarray(value)
        if value.dtype != dtype:
            if value.itemsize == dtype.itemsize:
                value = value.view(dtype)
            else:  # into a wider register: by its sign, or with zeros
                wide = np.int64 if value.dtype.kind == "i" else np.uint64
                value = value.astype(wide).astype(dtype)
        if value.ndim == 0:
            value = np.full(self.threads, value)
        if mask is not None:
            value = np.where(mask, value, self.get(operand, operand.kind))
        self.registers[operand.number] = value

    def lanes(self, mask: Mask) -> Array:
        return np.flatnonzero(self.alive if mask is None else mask)

    def address(self, operand: Operand, space: str, lanes: Array) -> Array:
        assert isinstance(operand, Address), operand
        self.asking = lanes
        base: Any = 0 if operand.base is None else self.get(operand.base, "b64")
        at = np.broadcast_to(np.asarray(base).astype(np.int64) + operand.offset, (self.threads,))[lanes]
        if space != "shared":
            return at
        if (wrong := (at < 0) | (at >= self.shared_size)).any():
            raise Fault(f"address {at[wrong][0]:#x} is outside of the block's shared memory", wrong)
        inside: Array = at + self.shared_base[lanes]
        return inside

    # the order of execution

    def run(self) -> None:
        code, end = self.kernel.program.code, len(self.kernel.program.code)
        ready: dict[int, Array] = {0: self.alive}  # groups of threads, by their place in the code
        parked: dict[int, Array] = {}  # at barriers
        while ready or parked:
            if not ready:
                raise Fault(
                    "a barrier that not all threads of the block reach", np.logical_or.reduce([*parked.values()])
                )
            at = min(ready)
            mask = ready.pop(at)
            until = min(ready, default=end)
            group = None if mask.all() else mask
            warps = int(mask.reshape(-1, 32).any(1).sum())
            while at < until or at == end:
                if at == end:
                    self._exit(mask, parked, ready)
                    break
                now = code[at]
                runs = group
                if now.guard is not None:
                    runs = self.get(now.guard, "pred") ^ now.negated
                    runs = runs if group is None else runs & group
                if self.counts is not None:
                    self._count(now, warps)
                work = self.kernel.steps[at]
                at += 1
                if work is None:
                    self._control(now, at, mask, mask if runs is None else runs, ready, parked)
                    break
                if runs is None or now.guard is None or runs.any():
                    try:
                        work(self, runs)
                    except Fault as fault:
                        raise self._explained(fault, now) from None
            else:
                _join(ready, at, mask)
        if self.copies:
            raise Fault("the kernel ends with an asynchronous copy on the way", self.copies[0][0])

    def _control(
        self, now: Instruction, after: int, mask: Array, runs: Array, ready: dict[int, Array], parked: dict[int, Array]
    ) -> None:
        name = now.parts[0]
        if name == "bra":
            _join(ready, self.kernel.program.labels[str(now.operands[-1])], runs)
            _join(ready, after, mask & ~runs)
        elif name in ("ret", "exit"):
            _join(ready, after, mask & ~runs)
            self._exit(runs, parked, ready)
        elif now.parts[1] == "warp":  # lanes never part company here
            _join(ready, after, mask)
        elif len(now.operands) > 1:
            raise NotImplementedError(f"{now.text}: a barrier for some warps")
        else:
            _join(ready, after, mask & ~runs)
            _join(parked, after, runs)
            self._open(parked, ready)

    def _exit(self, mask: Array, parked: dict[int, Array], ready: dict[int, Array]) -> None:
        self.alive = self.alive & ~mask
        self._open(parked, ready)

    def _open(self, parked: dict[int, Array], ready: dict[int, Array]) -> None:
        """Barriers that all threads of a block have reached, or left the kernel, let them through."""
        for at, mask in list(parked.items()):
            through = (mask | ~self.alive).reshape(self.blocks, -1).all(1).repeat(self.padded) & mask
            if through.any():
                self.tag = self.tag + through * BARRIER
                _join(ready, at, through)
                parked[at] = mask & ~through
                if not parked[at].any():
                    del parked[at]

    def _count(self, now: Instruction, warps: int) -> None:
        assert self.counts is not None
        space = [part for part in now.parts[1:] if part in ("shared", "global", "param", "local", "async")]
        self.counts.issued[".".join([now.parts[0], *space[:1]])] += warps

    def _explained(self, fault: Fault, now: Instruction) -> Fault:
        whole = len(fault.threads) == self.threads
        threads = np.flatnonzero(fault.threads) if whole else self.asking[fault.threads]
        first = threads[0]
        block = ", ".join(str(np.broadcast_to(self.special[f"%ctaid.{axis}"], self.threads)[first]) for axis in "xyz")
        return Fault(
            f"{self.kernel.program.name}, {now.line}: {fault}\n    {now.text}\n    block ({block}), thread "
            f"{self.thread[first]}; {len(threads)} threads", fault.threads,
        )  # fmt: skip


def _join(groups: dict[int, Array], at: int, mask: Array) -> None:
    if mask.any():
        groups[at] = groups[at] | mask if at in groups else mask


@functools.cache
def constant(text: str, kind: str) -> Any:
    if text[:2] in ("0f", "0d"):
        return np.array(int(text[2:], 16), "u4" if text[1] == "f" else "u8").view(TYPES[kind])[()]
    dtype = np.dtype(TYPES[kind])
    value = int(text.rstrip("U"), 0)
    if dtype.kind == "f":
        return dtype.type(value)
    return np.array(value & (1 << 8 * dtype.itemsize) - 1, f"u{dtype.itemsize}").view(dtype)[()]


def step(now: Instruction) -> Step:
    """What runs an instruction that is not one of CONTROL."""
    name = now.parts[0]
    if name in traffic.TABLE:
        return traffic.TABLE[name](now)
    if name in warps.TABLE:
        return warps.TABLE[name](now)
    if name == "mov" and any(isinstance(operand, tuple) for operand in now.operands):
        return _pack_or_unpack(now)
    if name not in instructions.TABLE:
        raise NotImplementedError(f"{now.text}: the emulator does not know it")
    operation = instructions.TABLE[name](now.parts)
    to, *sources = now.operands
    if len(sources) != len(operation.sources):
        raise NotImplementedError(f"{now.text}: the emulator does not know this form of it")
    function, kinds = operation.function, list(zip(sources, operation.sources, strict=True))

    def run(blocks: Blocks, mask: Mask) -> None:
        blocks.put(to, function(*[blocks.get(source, kind) for source, kind in kinds]), mask)

    return run


def _pack_or_unpack(now: Instruction) -> Step:
    to, source = now.operands
    whole = np.dtype(TYPES[now.parts[-1]])
    pieces = to if isinstance(to, tuple) else source
    assert isinstance(pieces, tuple)
    kind = f"b{8 * whole.itemsize // len(pieces)}"

    def pack(blocks: Blocks, mask: Mask) -> None:
        values = [np.broadcast_to(blocks.get(piece, kind), blocks.threads) for piece in pieces]
        blocks.put(to, np.stack(values, axis=1).view(whole)[:, 0], mask)

    def unpack(blocks: Blocks, mask: Mask) -> None:
        values = np.broadcast_to(blocks.get(source, now.parts[-1]), blocks.threads).copy().view(TYPES[kind])
        for piece, value in zip(pieces, values.reshape(-1, len(pieces)).T, strict=True):
            blocks.put(piece, value, mask)

    return unpack if isinstance(to, tuple) else pack
