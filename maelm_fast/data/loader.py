"""Micro-batches of a run as a function of their place: batch k is the same whoever builds it, whenever.

An update takes `batch_size` consecutive places of the run's endless sample order, cut into micro-batches. The state of
the data is therefore one integer, the number of updates done; resuming needs no replay.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import numpy as np
from torch.utils.data import DataLoader, Dataset

from maelm_fast.batch import PackedBatch
from maelm_fast.config import MaskingConfig
from maelm_fast.data.masking import VALIDATION_EPOCH, Vocabulary, pack
from maelm_fast.data.order import permutation, samples_at
from maelm_fast.data.token_store import TokenStore


class TrainingBatches(Dataset[PackedBatch]):
    """Item i is micro-batch i % per_update of update i // per_update."""

    def __init__(
        self,
        store: TokenStore,
        vocabulary: Vocabulary,
        masking: MaskingConfig,
        seed: int,
        batch_size: int,
        micro_batch_size: int,
        encoder_sees_mask: bool,
    ) -> None:
        self.store, self.vocabulary, self.masking, self.seed = store, vocabulary, masking, seed
        self.batch_size, self.micro_batch_size = batch_size, min(micro_batch_size, batch_size)
        self.encoder_sees_mask = encoder_sees_mask
        self.per_update = -(-batch_size // self.micro_batch_size)

    def __getitem__(self, index: int) -> PackedBatch:
        samples, epochs = self.samples(index)
        return pack([self.store[int(i)] for i in samples], samples, epochs, self.masking, self.vocabulary, self.seed,
                    self.encoder_sees_mask)  # fmt: skip

    def samples(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(sample ids, epochs) of micro-batch `index`."""
        update, micro = divmod(index, self.per_update)
        start = micro * self.micro_batch_size
        count = min(self.micro_batch_size, self.batch_size - start)
        return samples_at(update * self.batch_size + start, count, len(self.store), self.seed)


def training_updates(
    batches: TrainingBatches, first: int, last: int, workers: int, pin_memory: bool
) -> Iterator[list[PackedBatch]]:
    """The micro-batches of updates first .. last-1, one list an update."""
    indices = range(first * batches.per_update, last * batches.per_update)
    loader = DataLoader(
        batches,
        sampler=indices,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=2 * batches.per_update if workers else None,
        multiprocessing_context="spawn" if workers else None,
        worker_init_fn=_leave_signals_to_the_trainer,
        pin_memory=pin_memory,
    )
    stream = iter(loader)
    for _ in range(first, last):
        yield [next(stream) for _ in range(batches.per_update)]


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
