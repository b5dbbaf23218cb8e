"""An update between the loader and the trainer: all its tensors in one row of int32.

Each tensor that changes process holds a file descriptor on both sides, and ten for every micro-batch are soon more
than a process may have. To pin one is also less work than to pin hundreds. In a loader process the row lies in shared
memory from the start, so that it is written once and not copied on its way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from maelm_fast.batch import TENSORS, Lengths, PackedBatch, RaggedBatch, tensor_sizes
from maelm_fast.masking import Masker

ALIGNMENT = 16  # int32 elements: each tensor starts on a cache line, as one of its own would


def new_row(elements: int) -> Tensor:
    """(elements,) int32, not initialised; in a loader process in shared memory."""
    if get_worker_info() is None:
        return torch.empty(elements, dtype=torch.int32)
    storage = torch.UntypedStorage._new_shared(4 * elements)
    return torch.empty(0, dtype=torch.int32).set_(storage)


@dataclass(frozen=True)
class PackedUpdate:
    """The micro-batches of an update, masked and packed."""

    row: Tensor
    """`tensors` of each micro-batch, each of them from a multiple of ALIGNMENT on."""
    lengths: list[Lengths]
    """`lengths` of each micro-batch, which say how long its tensors are."""

    @classmethod
    def of(cls, micro_batches: Sequence[PackedBatch]) -> PackedUpdate:
        lengths = [batch.lengths for batch in micro_batches]
        row = new_row(sum(size + -size % ALIGNMENT for size in itertools.chain(*map(tensor_sizes, lengths))))
        tensors = itertools.chain(*(batch.tensors for batch in micro_batches))
        for part, tensor in zip(_parts(row, lengths), tensors, strict=True):
            part.copy_(tensor)
        return cls(row, lengths)

    def pin_memory(self) -> PackedUpdate:
        return PackedUpdate(self.row.pin_memory(), self.lengths)

    def to(self, device: torch.device) -> PackedUpdate:
        """There, without waiting for it."""
        return PackedUpdate(self.row.to(device, non_blocking=True), self.lengths)

    def micro_batches(self) -> list[PackedBatch]:
        parts = iter(_parts(self.row, self.lengths))
        return [PackedBatch.of(itertools.islice(parts, TENSORS), lengths) for lengths in self.lengths]


@dataclass(frozen=True)
class RaggedUpdate:
    """The micro-batches of an update, of counts[b] sequences each, whose masks are drawn on the device."""

    batch: RaggedBatch
    counts: list[int]
    masker: Masker
    """Which draws them."""

    @classmethod
    def of(cls, batch: RaggedBatch, counts: list[int], masker: Masker) -> RaggedUpdate:
        """With the tokens as int32, where other processes can read them."""
        row = new_row(len(batch.ids))
        np.copyto(row.numpy(), batch.ids.numpy(), casting="unsafe")
        return cls(replace(batch, ids=row), counts, masker)

    def pin_memory(self) -> RaggedUpdate:
        return replace(self, batch=replace(self.batch, ids=self.batch.ids.pin_memory()))

    def to(self, device: torch.device) -> RaggedUpdate:
        """There, without waiting for it."""
        return replace(self, batch=replace(self.batch, ids=self.batch.ids.to(device, non_blocking=True)))

    def micro_batches(self) -> list[RaggedBatch]:
        return self.batch.split(self.counts)


Update = PackedUpdate | RaggedUpdate


def _parts(row: Tensor, lengths: Iterable[Lengths]) -> Sequence[Tensor]:
    """All tensors, views of `row`; one call makes them, and the gaps between them."""
    sizes = itertools.chain(*map(tensor_sizes, lengths))
    parts: Sequence[Tensor] = row.split([n for size in sizes for n in (size, -size % ALIGNMENT)])
    return parts[::2]
