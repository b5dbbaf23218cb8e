"""The updates of a run as a function of their place: update k is the same whoever builds it, whenever.

An update takes `batch_size` consecutive places of the run's endless sample order, packed into micro-batches. The state
of the data is therefore one integer, the number of updates done; resuming needs no replay. With several processes each
reads, masks and packs only its own micro-batches.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from maelm_fast.batch import PackedBatch, RaggedBatch
from maelm_fast.data.masking import check_ids, pack, pack_update
from maelm_fast.data.order import permutation, samples_at
from maelm_fast.data.packing import best_fit, spread
from maelm_fast.data.token_store import TokenStore
from maelm_fast.data.update import RaggedUpdate, Update
from maelm_fast.errors import UserError
from maelm_fast.masking import VALIDATION_EPOCH, Masker


class TrainingBatches(Dataset["list[PackedBatch] | list[RaggedBatch]"]):
    """Item i is update i: its samples in micro-batches of at most micro_batch_size full samples' worth of tokens, each
    masked and packed; or, with mask_on_device, left to ops.mask_and_pack.

    Full samples make micro-batches of micro_batch_size in a row. Documents are spread over as few micro-batches as best
    fit needs, all about equally full: rows are packed without padding, so nothing is gained by filling all but the last
    to the brim, and the last would keep a device less busy than the others do. None needs more memory than full samples
    do. Within a micro-batch the samples keep their order."""

    def __init__(
        self,
        store: TokenStore,
        masker: Masker,
        batch_size: int,
        micro_batch_size: int,
        mask_on_device: bool = False,
        rate: Callable[[int], float] | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """The masker's seed is also the order's. rate: of an update, the share of the tokens to mask; None: the
        masker's. Of each update, which is the same for all, the item holds the micro-batches rank, rank + world, ...;
        empty ones are added where other ranks have one more."""
        self.store, self.masker, self.batch_size, self.mask_on_device = store, masker, batch_size, mask_on_device
        self.rate, self.rank, self.world = rate, rank, world
        self.micro_batch_tokens = self.tokens_of(micro_batch_size)

    def tokens_of(self, micro_batch_size: int) -> int:
        """The most tokens in a micro-batch of that size."""
        return min(micro_batch_size, self.batch_size) * self.store.manifest.seq_len

    def __len__(self) -> int:
        """Updates that one pass over the store takes, the last of which may run on into the next pass. Item i is there
        for every i from 0 on: the order has no end."""
        return math.ceil(len(self.store) / self.batch_size)

    def __getitem__(self, update: int) -> list[PackedBatch] | list[RaggedBatch]:
        return self.update(update).micro_batches()

    def update(self, update: int) -> Update:
        samples, epochs = self.samples(update)
        lengths = self.store.sample_lengths(samples)
        order, counts = self.share(*self.placed(lengths))
        samples, epochs = samples[order], epochs[order]
        batch = RaggedBatch(torch.from_numpy(self.store.read(samples)), lengths[order], samples, epochs)
        masker = self.masker if self.rate is None else self.masker.at_rate(self.rate(update))
        if self.mask_on_device:
            check_ids(batch.ids, masker.vocabulary)
            return RaggedUpdate.of(batch, counts, masker)
        return pack_update(batch, counts, masker)

    def placed(
        self, lengths: NDArray[np.int64], micro_batch_tokens: int | None = None
    ) -> tuple[NDArray[np.int64], list[int]]:
        """The order in which the micro-batches hold samples of these lengths, and how many each holds."""
        into_bins = best_fit if self.store.manifest.sample_mode == "full" else spread
        bins, count = into_bins(lengths, micro_batch_tokens or self.micro_batch_tokens)
        return np.argsort(bins, kind="stable"), np.bincount(bins, minlength=count).tolist()

    def share(self, order: NDArray[np.int64], counts: list[int]) -> tuple[NDArray[np.int64], list[int]]:
        """This rank's part of what `placed` returned."""
        if self.world == 1:
            return order, counts
        parts = np.split(order, np.cumsum(counts))[self.rank : len(counts) : self.world]
        empty = -(-len(counts) // self.world) - len(parts)
        return np.concatenate([order[:0], *parts]), [len(part) for part in parts] + [0] * empty

    def idle(self, micro_batch_size: int, update: int = 0) -> float:
        """The share of their time for which the ranks would wait for the one with the most tokens of an update."""
        lengths = self.store.sample_lengths(self.samples(update)[0])
        order, counts = self.placed(lengths, self.tokens_of(micro_batch_size))
        tokens = [int(lengths[part].sum()) for part in np.split(order, np.cumsum(counts))[:-1]]
        most = max(sum(tokens[rank :: self.world]) for rank in range(self.world))
        return 1.0 - sum(tokens) / (most * self.world)

    def better_size(self, micro_batch_size: int) -> int:
        """The largest micro_batch_size up to this one with which the ranks wait least, within 1%."""
        rounds = -(-self.batch_size // (micro_batch_size * self.world))
        sizes = {-(-self.batch_size // (self.world * (rounds + more))) for more in range(8)}
        sizes = {size for size in sizes if size <= micro_batch_size} | {micro_batch_size}
        idle = {size: self.idle(size) for size in sizes}
        return max(size for size, share in idle.items() if share <= min(idle.values()) + 0.01)

    def samples(self, update: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(sample ids, epochs), each (batch_size,), of an update, in the run's order."""
        return samples_at(update * self.batch_size, self.batch_size, len(self.store), self.masker.seed)


def training_updates(
    batches: TrainingBatches, first: int, last: int, workers: int, pin_memory: bool
) -> Iterator[Update]:
    """Updates first .. last-1. Raises UserError on a damaged store, a token outside the vocabulary, or if a loader
    process dies."""
    context = multiprocessing.get_context("spawn")
    ended = context.RawValue(ctypes.c_bool, False)
    end = functools.partial(setattr, ended, "value", True)
    atexit.register(end)  # this may never be closed: an exception's traceback keeps it from that
    loader = DataLoader(
        _Travelling(batches),
        sampler=range(first, last),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        multiprocessing_context=context if workers else None,
        worker_init_fn=functools.partial(_leave_signals_to_the_trainer, ended),
        pin_memory=pin_memory,
    )
    try:
        for update in _from_processes(loader) if workers else loader:
            if isinstance(update, UserError):
                raise update
            yield update
    finally:
        end()
        atexit.unregister(end)


def _from_processes(loader: DataLoader[Update | UserError]) -> Iterator[Update | UserError]:
    """What the loader's processes send. When one dies, torch's handler of SIGCHLD raises an error wherever the main
    thread is, in a save say: here, only while an update is waited for."""
    others = set(multiprocessing.active_children())
    updates = iter(loader)
    processes = set(multiprocessing.active_children()) - others
    raises = signal.getsignal(signal.SIGCHLD)
    try:
        while True:
            try:
                with _handling_sigchld(raises):
                    _check_alive(processes)
                    update = next(updates, None)
            except (RuntimeError, OSError, EOFError):  # of the handler, or of a tensor that was on its way
                for process in processes:
                    process.join(1.0)  # its files are closed a moment before it has a status
                _check_alive(processes)
                raise
            if update is None:
                return
            yield update
    finally:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGCHLD, raises)


@contextlib.contextmanager
def _handling_sigchld(handler: Any) -> Iterator[None]:
    """Afterwards nobody does. Outside the main thread, where nobody can, it changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGCHLD, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _check_alive(processes: Iterable[BaseProcess]) -> None:
    for process in processes:
        if (code := process.exitcode) is not None:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"lost with status {code}"
            raise UserError(
                f"a loader process was {how}; the same command resumes from the last save; if memory or /dev/shm is "
                "short, lower runtime.workers"
            )


class _Travelling(Dataset["Update | UserError"]):
    """The updates as they leave a loader process; a UserError leaves it so too, since one that is raised there would
    arrive with a traceback in its message."""

    def __init__(self, batches: TrainingBatches) -> None:
        self.batches = batches

    def __getitem__(self, update: int) -> Update | UserError:
        try:
            return self.batches.update(update)
        except UserError as error:
            return error


def _leave_signals_to_the_trainer(ended: Any, _: int) -> None:
    """A stop signal often goes to the whole process group. The trainer still needs batches to end the update in hand
    and save; a worker ends when the trainer does, which then sends SIGTERM too and waits for it."""

    def stop(*_: object) -> None:
        if ended.value:
            os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def validation_batches(
    store: TokenStore, masker: Masker, micro_batch_size: int, max_samples: int, rank: int = 0, world: int = 1
) -> Iterator[PackedBatch]:
    """max_samples samples of a split, drawn from all of it, with masks: the same at every evaluation of a seed. Of
    these a rank's share: batches rank, rank + world, ..."""
    total = min(len(store), max_samples)
    order = permutation(np.arange(total), len(store), masker.seed, VALIDATION_EPOCH)
    for start in range(rank * micro_batch_size, total, world * micro_batch_size):
        samples = order[start : start + micro_batch_size]
        yield pack([store[int(i)] for i in samples], samples, np.full_like(samples, VALIDATION_EPOCH), masker)
