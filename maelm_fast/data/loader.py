"""The updates of a run as a function of their place: update k is the same whoever builds it, whenever.

An update takes `batch_size` consecutive places of the run's endless sample order, packed into micro-batches. The state
of the data is therefore one integer, the number of updates done; resuming needs no replay.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from maelm_fast.batch import PackedBatch, RaggedBatch
from maelm_fast.config import MaskingConfig
from maelm_fast.data.masking import VALIDATION_EPOCH, Vocabulary, check_ids, pack
from maelm_fast.data.order import permutation, samples_at
from maelm_fast.data.packing import best_fit
from maelm_fast.data.token_store import TokenStore


class TrainingBatches(Dataset["list[PackedBatch] | RaggedUpdate"]):
    """Item i is update i: its samples in micro-batches of at most micro_batch_size full samples' worth of tokens, each
    masked and packed; or, with mask_on_device, left to ops.mask_and_pack.

    Samples shorter than the store's longest are packed by best fit, so that micro-batches are few and full, and none
    needs more memory than full samples do; full samples make micro-batches of micro_batch_size in a row. Within a
    micro-batch the samples keep their order."""

    def __init__(
        self,
        store: TokenStore,
        vocabulary: Vocabulary,
        masking: MaskingConfig,
        seed: int,
        batch_size: int,
        micro_batch_size: int,
        encoder_sees_mask: bool,
        mask_on_device: bool = False,
    ) -> None:
        self.store, self.vocabulary, self.masking, self.seed = store, vocabulary, masking, seed
        self.batch_size = batch_size
        self.micro_batch_tokens = min(micro_batch_size, batch_size) * store.manifest.seq_len
        self.encoder_sees_mask, self.mask_on_device = encoder_sees_mask, mask_on_device

    def __getitem__(self, update: int) -> list[PackedBatch] | RaggedUpdate:
        samples, epochs = self.samples(update)
        sequences = [self.store[i] for i in samples.tolist()]
        bins, count = best_fit(np.array([len(sequence) for sequence in sequences]), self.micro_batch_tokens)
        places = np.split(np.argsort(bins, kind="stable"), np.cumsum(np.bincount(bins, minlength=count))[:-1])
        if self.mask_on_device:
            ragged = RaggedUpdate.of(sequences, samples, epochs, [here.tolist() for here in places])
            check_ids(ragged.ids.numpy(), self.vocabulary)
            return ragged
        return [
            pack([sequences[i] for i in here.tolist()], samples[here], epochs[here], self.masking, self.vocabulary,
                 self.seed, self.encoder_sees_mask)
            for here in places
        ]  # fmt: skip

    def samples(self, update: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(sample ids, epochs), each (batch_size,), of an update, in the run's order."""
        return samples_at(update * self.batch_size, self.batch_size, len(self.store), self.seed)


def training_updates(
    batches: TrainingBatches, first: int, last: int, workers: int, pin_memory: bool
) -> Iterator[list[PackedBatch] | list[RaggedBatch]]:
    """The micro-batches of updates first .. last-1, one list an update."""
    loader = DataLoader(
        batches,
        sampler=range(first, last),
        batch_size=None,
        collate_fn=_for_travel,
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        multiprocessing_context="spawn" if workers else None,
        worker_init_fn=_leave_signals_to_the_trainer,
        pin_memory=pin_memory,
    )
    for update in loader:
        yield update.micro_batches()


def _for_travel(item: list[PackedBatch] | RaggedUpdate) -> _Update | RaggedUpdate:
    return item if isinstance(item, RaggedUpdate) else _Update.of(item)


@dataclass(frozen=True)
class RaggedUpdate:
    """An update whose masks are drawn on the device: all tokens in one tensor, micro-batch after micro-batch."""

    ids: Tensor
    batches: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
    """Lengths, samples and epochs of each micro-batch."""

    @classmethod
    def of(
        cls,
        sequences: Sequence[NDArray[np.generic]],
        samples: NDArray[np.int64],
        epochs: NDArray[np.int64],
        places: list[list[int]],
    ) -> RaggedUpdate:
        """places: for each micro-batch, which of the sequences it holds."""
        ids = np.concatenate([sequences[i] for here in places for i in here], dtype=np.int32, casting="unsafe")
        batches = [
            (tuple(len(sequences[i]) for i in here), tuple(samples[here].tolist()), tuple(epochs[here].tolist()))
            for here in places
        ]
        return cls(torch.from_numpy(ids), batches)

    def pin_memory(self) -> RaggedUpdate:
        return RaggedUpdate(self.ids.pin_memory(), self.batches)

    def micro_batches(self) -> list[RaggedBatch]:
        parts = self.ids.split([sum(lengths) for lengths, _, _ in self.batches])
        return [RaggedBatch(ids, *batch) for ids, batch in zip(parts, self.batches, strict=True)]


_TENSORS = tuple(field.name for field in fields(PackedBatch) if not field.name.endswith("lengths"))
_LENGTHS = ("lengths", "decoder_lengths", "masked_lengths")
_ALIGNMENT = 16  # int32 elements: each tensor starts on a cache line, as one of its own would


@dataclass(frozen=True)
class _Update:
    """An update on its way from a loader process: all tensors in one. Each tensor that changes process holds a file
    descriptor on both sides, and nine for every micro-batch are soon more than a process may have. To pin one is also
    less work than to pin hundreds."""

    row: Tensor
    sizes: list[list[int]]
    """Elements of each tensor of each micro-batch, in the order of _TENSORS."""
    lengths: list[tuple[tuple[int, ...], ...]]

    @classmethod
    def of(cls, micro_batches: list[PackedBatch]) -> _Update:
        tensors = [[getattr(batch, name) for name in _TENSORS] for batch in micro_batches]
        sizes = [[tensor.numel() for tensor in parts] for parts in tensors]
        row = torch.empty(sum(map(_aligned, itertools.chain(*sizes))), dtype=torch.int32)
        for part, tensor in zip(_parts(row, itertools.chain(*sizes)), itertools.chain(*tensors), strict=True):
            part.copy_(tensor)
        return cls(row, sizes, [tuple(getattr(batch, name) for name in _LENGTHS) for batch in micro_batches])

    def pin_memory(self) -> _Update:
        return _Update(self.row.pin_memory(), self.sizes, self.lengths)

    def micro_batches(self) -> list[PackedBatch]:
        parts = _parts(self.row, itertools.chain(*self.sizes))
        batches = []
        for lengths in self.lengths:
            values: dict[str, Any] = {name: next(parts) for name in _TENSORS}
            values.update(zip(_LENGTHS, lengths, strict=True))
            batches.append(PackedBatch(**values))
        return batches


def _parts(row: Tensor, sizes: Iterator[int]) -> Iterator[Tensor]:
    """Views of `row`, of these many elements each."""
    start = 0
    for size in sizes:
        yield row[start : start + size]
        start += _aligned(size)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _leave_signals_to_the_trainer(_: int) -> None:
    """A stop signal often goes to the whole process group. The trainer still needs batches to end the update in hand
    and save; a worker ends when the trainer does."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def validation_batches(
    store: TokenStore,
    vocabulary: Vocabulary,
    masking: MaskingConfig,
    seed: int,
    micro_batch_size: int,
    encoder_sees_mask: bool,
    max_samples: int,
) -> Iterator[PackedBatch]:
    """max_samples samples of a split, drawn from all of it, with masks: the same at every evaluation of a seed."""
    total = min(len(store), max_samples)
    order = permutation(np.arange(total), len(store), seed, VALIDATION_EPOCH)
    for start in range(0, total, micro_batch_size):
        samples = order[start : start + micro_batch_size]
        epochs = np.full_like(samples, VALIDATION_EPOCH)
        yield pack([store[int(i)] for i in samples], samples, epochs, masking, vocabulary, seed, encoder_sees_mask)
