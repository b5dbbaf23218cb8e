"""Memory that knows who touched it: a kernel's tensors, or the shared memory of its blocks.

Each granule, the fewest bytes that any instruction of the program moves at once, keeps the tag of the warp that wrote
it last and of the one that read it last. A tag is (block, barriers passed, warp). Two tags clash if nothing orders what
they did: two blocks, or two warps of a block between the same barriers. A granule outside of every tensor, and one that
an asynchronous copy is on the way to, hold tags that clash with any.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
WARP, BARRIER, BLOCK = 1, 1 << 8, 1 << 40  # units of a tag's three parts
SEVERAL = BARRIER - WARP  # in the warp's place: more than one of the block's
NOBODY, ANYBODY, NOWHERE, ON_THE_WAY, ADDED_TO = -1, (1 << 62) - 1, 1 << 62, 5 << 60, 6 << 60
WHY = {NOWHERE: "outside of every tensor", ON_THE_WAY: "an asynchronous copy is on the way",
       ADDED_TO: "atomics add to it"}  # fmt: skip


class Fault(AssertionError):
    """Something that the machine would not do, or not do the same way twice. threads: which of those that ask."""

    def __init__(self, what: str, threads: Array) -> None:
        super().__init__(what)
        self.threads = threads


def clash(recorded: Array, tag: Array) -> Array:
    """Bools: no barrier lies between what left the tag `recorded` and what `tag` does now."""
    differ = recorded ^ tag
    return (differ > 0) & ((differ < BARRIER) | (differ >= BLOCK))


class Memory:
    """size: bytes. granule: as above. same_is_fine: in shared memory Triton lets threads that hold copies of an
    element all write it. Two warps may write the same value to one place, and of a warp's lanes one wins: their copies
    of a sum differ by a rounding where the last product was fused into it."""

    def __init__(self, size: int, granule: int, same_is_fine: bool = False) -> None:
        self.bytes = np.zeros(-(-size // 16) * 16, np.uint8)
        self.granule, self.same_is_fine = granule, same_is_fine
        self.writer = np.full(self.bytes.size // granule, NOWHERE)
        self.reader = np.full_like(self.writer, NOBODY)
        self.top = 4096  # no tensor lies at address 0

    def open(self, at: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        """Make the elements of a tensor, shape and strides in granules, ones that may be touched."""
        inside = self.writer[at // self.granule :]
        np.lib.stride_tricks.as_strided(inside, shape, tuple(8 * s for s in strides))[...] = NOBODY

    def read(self, address: Array, kind: Any, count: int, tag: Array) -> Array:
        """(threads, count) elements of dtype `kind`, neighbours in memory."""
        cells, tags = self._cells(address, np.dtype(kind).itemsize * count, tag)
        self._check(self.writer[cells], tags, "read", "wrote")
        self._note(cells, tags)
        return self.bytes.view(kind)[self._elements(address, kind, count)]

    def write(self, address: Array, values: Array, tag: Array) -> None:
        """values: (threads, count)."""
        kind, count = values.dtype, values.shape[1]
        cells, tags = self._cells(address, kind.itemsize * count, tag)
        elements, data = self._elements(address, kind, count), self.bytes.view(kind)
        written = self.writer[cells]
        if self.same_is_fine and (data[elements] == values).all():
            written = np.where(written < NOWHERE, NOBODY, written)
        self._check(written, tags, "write", "wrote")
        self._check(self.reader[cells], tags, "write", "read")
        data[elements] = values
        self.writer[cells] = tags
        differ = (data[elements].view(np.uint8) != values.view(np.uint8)).reshape(len(address), -1).any(1)
        others = (self.writer[cells] != tags).any(1)
        if (wrong := differ & others if self.same_is_fine else differ | others).any():
            raise Fault("two threads write to one place at once", wrong)

    def add(self, address: Array, values: Array, tag: Array) -> Array:
        """Atomically; values: (threads, count). Returns what was there before."""
        kind, count = values.dtype, values.shape[1]
        cells, tags = self._cells(address, kind.itemsize * count, tag)
        written = self.writer[cells]
        self._check(np.where(written == ADDED_TO, NOBODY, written), tags, "atomic", "wrote")
        self._check(self.reader[cells], tags, "atomic", "read")
        self.writer[cells] = ADDED_TO
        elements, data = self._elements(address, kind, count), self.bytes.view(kind)
        before = np.empty_like(values)
        for index in np.ndindex(values.shape):
            before[index] = data[elements[index]]
            data[elements[index]] += values[index]
        return before

    def send(self, address: Array, size: int, tag: Array) -> None:
        """An asynchronous copy of `size` bytes sets out for `address`."""
        cells, tags = self._cells(address, size, tag)
        self._check(self.writer[cells], tags, "copy", "wrote")
        self._check(self.reader[cells], tags, "copy", "read")
        self.writer[cells] = ON_THE_WAY

    def land(self, address: Array, values: Array, tag: Array) -> None:
        """It arrives: the thread that sent it has waited for it."""
        cells, tags = self._cells(address, values.dtype.itemsize * values.shape[1], tag)
        self.bytes.view(values.dtype)[self._elements(address, values.dtype, values.shape[1])] = values
        self.writer[cells] = tags

    def _cells(self, address: Array, size: int, tag: Array) -> tuple[Array, Array]:
        """Granules (threads, n) and the threads' tags likewise."""
        if (wrong := address % size != 0).any():
            raise Fault(f"address {address[wrong][0]:#x} is no multiple of {size}", wrong)
        if (wrong := (address < 0) | (address + size > self.bytes.size)).any():
            raise Fault(f"address {address[wrong][0]:#x} is {WHY[NOWHERE]}", wrong)
        cells = address[:, None] // self.granule + np.arange(max(1, size // self.granule))
        return cells, np.broadcast_to(tag[:, None], cells.shape)

    def _elements(self, address: Array, kind: Any, count: int) -> Array:
        elements: Array = address[:, None] // np.dtype(kind).itemsize + np.arange(count)
        return elements

    def _check(self, recorded: Array, tags: Array, does: str, did: str) -> None:
        wrong = clash(recorded, tags)
        if wrong.any():
            other, mine = int(recorded[wrong][0]), int(tags[wrong][0])
            whose = "another block" if (other ^ mine) >= BLOCK else "another warp"
            why = WHY.get(other, f"{whose} {did} it, with no barrier between")
            raise Fault(f"{does} of a place: {why}", wrong.any(1))

    def _note(self, cells: Array, tags: Array) -> None:
        """Remember readers: the last one, or that they were several."""
        mine = self._joined(self.reader[cells], tags)
        self.reader[cells] = mine
        while (lost := self.reader[cells] != mine).any():  # others of this instruction read the same
            places, now = cells[lost], self.reader[cells[lost]]
            both = self._joined(now, mine[lost])
            if (both == now).all():
                break
            np.maximum.at(self.reader, places, both)

    @staticmethod
    def _joined(recorded: Array, tags: Array) -> Array:
        differ = recorded ^ tags
        same_block = (recorded >= 0) & (differ < BLOCK)
        several = np.where(differ < BARRIER, np.where(differ == 0, tags, tags | SEVERAL), tags)
        return np.where(recorded < 0, tags, np.where(same_block, several, ANYBODY))
