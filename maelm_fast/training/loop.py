"""The one training loop, of pretraining and of fine-tuning: updates whose numbers are read back one step later, skipped
ones counted, evaluations, saves, and the end by a signal.

It knows neither models nor data: what an update is, when and how to evaluate and save, is a Training. With several
processes all of it must come out alike on each: an update's numbers are reduced before they are returned, and `stop`
answers the same everywhere.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from maelm_fast import native
from maelm_fast.config import RuntimeConfig
from maelm_fast.errors import UserError
from maelm_fast.stop import Stop, Stopped
from maelm_fast.training.hardware import is_out_of_memory
from maelm_fast.training.step import Numbers, Readback

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Progress:
    """Where a run stands after `step` updates; saved with it."""

    step: int = 0
    skipped: int = 0
    """Updates skipped for a non-finite gradient, in all and in a row."""
    skipped_in_a_row: int = 0
    finished: str | None = None
    """Why the run is over: "max_steps" or "early_stop"."""


I = TypeVar("I")  # noqa: E741  an update's inputs
K = TypeVar("K")  # what the host keeps of an update until its numbers are read back


class Training(ABC, Generic[I, K]):
    """What is trained. The loop calls the methods in the order in which they stand here."""

    device: torch.device
    progress: Progress
    steps: int
    """Updates in all."""
    max_nonfinite: int = RuntimeConfig.max_nonfinite
    """Updates in a row with a NaN or infinite gradient (each is skipped and counted) that end the run."""

    @abstractmethod
    def updates(self) -> Iterator[I]:
        """The inputs of every update after progress.step."""

    @abstractmethod
    def update(self, inputs: I) -> tuple[K, Tensor]:
        """Queues one optimiser update. Returns what `read` wants to know of it, and step.Numbers as (4,) float64 on the
        device."""

    @abstractmethod
    def due(self) -> Sequence[Callable[[], None]]:
        """What is to be done after progress.step updates, in order: measurements, an evaluation. They may set
        progress.finished. Before they are called every number has been read back."""

    @abstractmethod
    def saves(self) -> bool:
        """Whether to save after progress.step updates; at the end, and when stopped, it is done anyway."""

    @abstractmethod
    def read(self, known: K, numbers: Numbers) -> None:
        """The numbers of an update, each update's once and in order; a skipped one is counted by then."""

    def updated(self) -> None:
        """Called after every update, when what is finished has been read."""

    @abstractmethod
    def save(self) -> None:
        """Writes what a later call resumes from, whole or not at all. Raises OSError."""

    def saved(self) -> None:
        """Waits for what `save` began and left to a thread. Raises its OSError."""

    @abstractmethod
    def nonfinite(self, step: int) -> str:
        """The end of the error that ends the run at such an update: where to look, what to try."""

    @abstractmethod
    def memory(self, inputs: I | None) -> str:
        """What follows "out of memory": in this update, or in what is `due` if there is none; what to lower."""


def run(training: Training[I, K], stop: Stop) -> None:
    """Runs to the last update, or until progress.finished says why it is over.

    Raises Stopped, with the step that is on the disk, when asked to; UserError for want of memory, for too many updates
    without a finite gradient, and if the end cannot be saved."""
    progress, under_way, on_disk = training.progress, Readback(), training.progress.step
    if training.device.type == "cpu" and (host := native.host()) is not None:
        host.keep_freed_memory()  # a step's large buffers are the next step's: their pages need not be given back
    for inputs in training.updates():
        with _advice(training, inputs):
            known, numbers = training.update(inputs)
        under_way.put((progress.step, known), numbers)
        progress.step += 1
        last = progress.step == training.steps
        received, due, saves = stop(), training.due(), training.saves()
        for (step, its), read in under_way.take(everything=bool(received or due or saves or last)):
            _count(training, step, skipped=bool(read.skipped))
            training.read(its, read)
        training.updated()
        for action in due:
            with _advice(training, None):
                action()
        if last and progress.finished is None:
            progress.finished = "max_steps"
        ends = bool(received or progress.finished)
        if (saves or ends) and _saved(training, ends):
            on_disk = progress.step
        if progress.finished:
            return
        if received:
            raise Stopped(on_disk, received)


def _count(training: Training[I, K], step: int, skipped: bool) -> None:
    progress = training.progress
    if not skipped:
        progress.skipped_in_a_row = 0
        return
    progress.skipped += 1
    progress.skipped_in_a_row += 1
    log.warning("update %d skipped: its gradient is not finite (%d in a row)", step, progress.skipped_in_a_row)
    if progress.skipped_in_a_row >= training.max_nonfinite:
        raise UserError(
            f"{progress.skipped_in_a_row} updates in a row had a gradient that is not finite, the last at step "
            f"{step:,}{training.nonfinite(step)}"
        )


def _saved(training: Training[I, K], ends: bool) -> bool:
    """A save that fails, on a full disk say, costs only itself: earlier ones stay and training goes on. At the end it
    must succeed."""
    try:
        training.save()
        if ends:
            training.saved()
    except OSError as error:
        if training.progress.finished:
            raise UserError(f"{error}; earlier ones are whole; free some space and run again") from None
        log.error("%s; earlier ones stay, and the next save tries again", error)
        return False
    return True


@contextlib.contextmanager
def _advice(training: Training[I, K], inputs: I | None) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise UserError(f"out of memory {training.memory(inputs)}") from None
        raise
