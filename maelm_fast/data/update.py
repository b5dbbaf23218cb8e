"""An update between the loader and the trainer: all its tensors in one row of int32.

Each tensor that changes process holds a file descriptor on both sides, and nine for every micro-batch are soon more
than a process may have. To pin one is also less work than to pin hundreds. In a loader process the row lies in shared
memory from the start, so that it is written once and not copied on its way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from maelm_fast.batch import PackedBatch, RaggedBatch

ALIGNMENT = 16  # int32 elements: each tensor starts on a cache line, as one of its own would
TENSORS = tuple(field.name for field in fields(PackedBatch) if not field.name.endswith("lengths"))
_LENGTHS = ("lengths", "decoder_lengths", "masked_lengths")


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
    sizes: list[list[int]]
    """Elements of each tensor of each micro-batch, in the order of TENSORS; each begins at a multiple of ALIGNMENT."""
    lengths: list[tuple[tuple[int, ...], ...]]
    """Of each micro-batch: of the sequences in the encoder's row, in the decoder's, of their masked tokens."""

    @classmethod
    def of(cls, micro_batches: Sequence[PackedBatch]) -> PackedUpdate:
        tensors = [[getattr(batch, name) for name in TENSORS] for batch in micro_batches]
        sizes = [[tensor.numel() for tensor in parts] for parts in tensors]
        row = new_row(sum(_aligned(size) for size in itertools.chain(*sizes)))
        for part, tensor in zip(_parts(row, itertools.chain(*sizes)), itertools.chain(*tensors), strict=True):
            part.copy_(tensor)
        return cls(row, sizes, [tuple(getattr(batch, name) for name in _LENGTHS) for batch in micro_batches])

    def pin_memory(self) -> PackedUpdate:
        return PackedUpdate(self.row.pin_memory(), self.sizes, self.lengths)

    def to(self, device: torch.device) -> PackedUpdate:
        """There, without waiting for it."""
        return PackedUpdate(self.row.to(device, non_blocking=True), self.sizes, self.lengths)

    def micro_batches(self) -> list[PackedBatch]:
        parts = iter(_parts(self.row, itertools.chain(*self.sizes)))
        batches = []
        for lengths in self.lengths:
            values: dict[str, Any] = {name: next(parts) for name in TENSORS}
            values.update(zip(_LENGTHS, lengths, strict=True))
            batches.append(PackedBatch(**values))
        return batches


@dataclass(frozen=True)
class RaggedUpdate:
    """The micro-batches of an update, one after another, whose masks are drawn on the device."""

    row: Tensor
    """(N,) all tokens."""
    batches: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
    """Lengths, samples and epochs of each micro-batch."""

    @classmethod
    def of(
        cls,
        ids: NDArray[np.generic],
        lengths: NDArray[np.int64],
        samples: NDArray[np.int64],
        epochs: NDArray[np.int64],
        counts: Sequence[int],
    ) -> RaggedUpdate:
        """ids: (N,) S sequences end to end; lengths, samples, epochs: (S,). counts: sequences of each micro-batch."""
        row = new_row(len(ids))
        np.copyto(row.numpy(), ids, casting="unsafe")
        ends = list(itertools.accumulate(counts))
        keys = [values.tolist() for values in (lengths, samples, epochs)]
        batches = [
            tuple(tuple(values[end - count : end]) for values in keys) for count, end in zip(counts, ends, strict=True)
        ]
        return cls(row, batches)  # type: ignore[arg-type]

    def pin_memory(self) -> RaggedUpdate:
        return RaggedUpdate(self.row.pin_memory(), self.batches)

    def to(self, device: torch.device) -> RaggedUpdate:
        """There, without waiting for it."""
        return RaggedUpdate(self.row.to(device, non_blocking=True), self.batches)

    def micro_batches(self) -> list[RaggedBatch]:
        parts = self.row.split([sum(lengths) for lengths, _, _ in self.batches])
        return [RaggedBatch(ids, *batch) for ids, batch in zip(parts, self.batches, strict=True)]


Update = PackedUpdate | RaggedUpdate


def _parts(row: Tensor, sizes: Iterable[int]) -> Sequence[Tensor]:
    """Views of `row`, of these many elements each; one call makes them all, the gaps between them too."""
    parts: Sequence[Tensor] = row.split([n for size in sizes for n in (size, -size % ALIGNMENT)])
    return parts[::2]


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT
