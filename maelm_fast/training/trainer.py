"""Pretraining, run by loop.py. Everything it computes is a function of the configuration and the number of updates
done: order, masks, dropout and learning rate. A run killed anywhere and started again therefore resumes bit for bit; on
a GPU only if runtime.deterministic, since some sums are else taken in the order in which blocks finish.

A run is `Trainer(...).train()`; the parts come from outside, so that a test or another program can replace them.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maelm_fast import ops
from maelm_fast.batch import PackedBatch, TokenCounts
from maelm_fast.config import RunConfig, require
from maelm_fast.data.loader import TrainingBatches, training_updates, validation_batches
from maelm_fast.data.token_store import TokenStore
from maelm_fast.data.update import PackedUpdate, Update
from maelm_fast.masking import Masker, Vocabulary
from maelm_fast.model.flops import peak_flops, training_flops
from maelm_fast.model.maelm import MaeLm
from maelm_fast.philox import fold_seed
from maelm_fast.stop import Stop, Stopped, StopSignals
from maelm_fast.training import checkpoint, loop
from maelm_fast.training.average import Average
from maelm_fast.training.files import write_json
from maelm_fast.training.hardware import device_name
from maelm_fast.training.live import live_batches, live_ranks
from maelm_fast.training.loop import Progress, Training
from maelm_fast.training.optim import build_optimizer, learning_rate
from maelm_fast.training.parallel import Processes
from maelm_fast.training.prefetch import on_device
from maelm_fast.training.rundir import RunDir
from maelm_fast.training.runlog import Display, Metrics
from maelm_fast.training.step import GraphedStep, Numbers, TrainStep, check_recordable

_INIT, _DROPOUT = 0, 1  # places of the seed: initialisation, dropout


def build_model(config: RunConfig, vocabulary: Vocabulary) -> MaeLm:
    """A freshly initialised model; the same for the same seed, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(fold_seed(config.seed, _INIT))  # torch.manual_seed sets the GPUs' too
        return MaeLm(config.model, mask_id=vocabulary.mask_id)


@dataclass(kw_only=True)
class PretrainingProgress(Progress):
    tokens: int = 0
    """Original tokens consumed."""
    best_val_loss: float | None = None
    evaluations_without_gain: int = 0


class Trainer(Training[list[PackedBatch], "_Update"]):
    """One run, or one process's part of it. Construct, then `resume()` if there is something to resume, then `train()`:
    all processes do the same, and what they decide follows from numbers that they have in common."""

    def __init__(
        self,
        run: RunDir,
        config: RunConfig,
        model: MaeLm,
        train: TokenStore,
        validation: TokenStore,
        vocabulary: Vocabulary,
        processes: Processes,
        precision: str,
    ) -> None:
        self.run, self.config, self.processes, self.precision = run, config, processes, precision
        self.device, self.validation = processes.device, validation
        self.model = model.to(self.device)
        forward = processes.wrap(self.model)
        self.masker = Masker(config.masking.final, vocabulary, config.seed, self.model.encoder_sees_mask)
        self.optimizer = build_optimizer(self.model, config.optim, precision)
        self.average = Average(self.model, self.optimizer, config.optim.average)
        self.batches = TrainingBatches(
            train,
            self.masker,
            config.optim.batch_size,
            config.runtime.sequences_at_once,
            mask_on_device=config.runtime.backend.mask_and_pack not in ("auto", "host"),
            rate=config.mask_rate,
            rank=processes.rank,
            world=processes.world,
        )
        step = TrainStep(self.model, self.optimizer, config.optim.clip_norm, precision, processes, forward)
        self.autocast = step.autocast
        self.step: TrainStep | GraphedStep = step
        if config.runtime.cuda_graph:
            check_recordable(self.device, self.masker, train.lengths, processes.world)
            require(
                config.masking.rate_end is None,
                "runtime.cuda_graph needs updates of one shape, and masking.rate_end changes the number of masked "
                "tokens: remove one of the two",
            )
            self.step = GraphedStep(step)
        self.rank_every, self.rank_batches = config.metrics.rank_every, list[PackedBatch]()
        if self.rank_every and processes.is_main:
            size = config.runtime.sequences_at_once
            self.rank_batches = live_batches(validation, self.masker, size, config.model.hidden_size)
        self.checkpoints = checkpoint.Checkpoints(
            run.checkpoints, config.runtime.keep_checkpoints, processes, config.runtime.async_save
        )
        self.progress: PretrainingProgress = PretrainingProgress()
        self.signals: Stop = lambda: None
        self._somebody_stops = False
        self.steps, self.max_nonfinite = config.optim.max_steps, config.runtime.max_nonfinite

    def resume(self) -> bool:
        """Resumes from the newest whole checkpoint; False if there is none."""
        path = self.processes.from_main(self.run.last_whole_checkpoint)
        if path is None:
            return False
        self.progress = PretrainingProgress(**checkpoint.read_state(path))
        if self.progress.finished == "max_steps" and self.progress.step < self.steps:
            self.progress.finished = None  # the run is prolonged
        checkpoint.load(path, self.model, self.optimizer)
        self.average.swap()
        return True

    def train(self) -> PretrainingProgress:
        """Runs to max_steps or an early stop. Returns where it ended; raises Stopped after SIGTERM or SIGINT to any of
        the processes."""
        is_main = self.processes.is_main
        self.metrics = Metrics(self.run, self.progress.step, on=is_main)
        name = device_name(self.device) if self.device.type == "cuda" else ""
        self.meter = _Meter(self.config, name, self.processes.world)
        with (
            contextlib.closing(self.metrics),
            Display(self.progress.step, self.steps, on=is_main) as self.display,
            StopSignals() as self.signals,
            ops.backends(self.config.runtime.backend),
        ):
            try:
                loop.run(self, self._stop)
                if received := self.signals():
                    raise Stopped(self.progress.step, received)
            except Stopped as stopped:
                place = f"{stopped.received.name}: saved at step {stopped.step:,}"
                self.display.say(f"{place}; the same command resumes from there")
                raise
        return self.progress

    def _stop(self) -> signal.Signals | bool | None:
        """The same in all processes: of several, the wish of one is known to all when they have read the numbers of the
        update in which it had it."""
        if self.processes.world == 1:
            return self.signals()
        return (self.signals() or True) if self._somebody_stops else None

    def updates(self) -> Iterator[list[PackedBatch]]:
        pin = self.device.type == "cuda"
        updates = training_updates(self.batches, self.progress.step, self.steps, self.config.runtime.workers, pin)
        batches = on_device(updates, _masked, self.device)
        while True:
            self.processes.at("waiting for data", self.progress.step + 1)
            micro_batches = next(batches, None)
            if micro_batches is None:
                return
            self.processes.at("computing")
            yield micro_batches

    def update(self, micro_batches: list[PackedBatch]) -> tuple[_Update, Tensor]:
        step, processes = self.progress.step, self.processes
        self.model.train()
        places = range(processes.rank, processes.rank + len(micro_batches) * processes.world, processes.world)
        seeds = self._sent([fold_seed(self.config.seed, _DROPOUT, step, place) for place in places], torch.int64)
        lr = learning_rate(self.config.optim, step)
        own = self.step(micro_batches, seeds, lr)
        self.average.add(step + 1)
        counts = [sum(count) for count in zip(*(batch.counts for batch in micro_batches), strict=True)]
        known = self._sent([*counts, self.meter.flops_of(micro_batches), bool(self.signals())], torch.float64)
        shared = processes.sum(torch.cat([own[:2], known]))
        return _Update(step + 1, lr), torch.cat([shared[:2], own[2:], shared[2:]])

    def _sent(self, values: list[int], dtype: torch.dtype) -> Tensor:
        """On the device, without waiting for it."""
        return torch.tensor(values, dtype=dtype, pin_memory=self.device.type == "cuda").to(
            self.device, non_blocking=True
        )

    def due(self) -> list[Callable[[], None]]:
        step, last = self.progress.step, self.progress.step == self.steps
        actions: list[Callable[[], None]] = []
        if self.rank_every and (step % self.rank_every == 0 or last):
            actions.append(self.measure)
        if step % self.config.runtime.eval_every == 0 or last:
            actions.append(self.evaluate)
        return actions

    def saves(self) -> bool:
        return self.progress.step % self.config.runtime.save_every == 0

    def read(self, update: _Update, numbers: Numbers) -> None:
        self.meter.add(numbers)
        counts = TokenCounts(int(numbers.original), int(numbers.visible), int(numbers.masked))
        self.progress.tokens += counts.original
        self._somebody_stops = self._somebody_stops or numbers.stop > 0
        if update.step == 1 or update.step % self.config.runtime.log_every == 0 or update.step == self.steps:
            row = {
                "kind": "train",
                "step": update.step,
                "tokens": self.progress.tokens,
                "loss": numbers.loss,
                "accuracy": numbers.correct / max(self.model.predicted_tokens(counts), 1),
                "lr": update.lr,
                "grad_norm": numbers.norm,
                "masked": counts.masked,
                "skipped": self.progress.skipped,
                **self.meter.rates(),
            }
            self.metrics.write(row)
            self.display.update(row)

    def measure(self) -> None:
        """The live effective ranks, into the metrics; by the main process alone."""
        self.processes.at("measuring ranks")
        with self.average.in_model():
            model = self.processes.whole_model(self.model)
            ranks = live_ranks(model, self.rank_batches, self.device, self.autocast) if self.processes.is_main else {}
        if self.processes.is_main:
            self.metrics.write({"kind": "rank", "step": self.progress.step, "tokens": self.progress.tokens, **ranks})
        self.meter.restart()

    def evaluate(self) -> None:
        """The validation loss, into the metrics; ends the run if it has not fallen for long enough."""
        progress, runtime, processes = self.progress, self.config.runtime, self.processes
        size, samples = runtime.sequences_at_once, runtime.eval_samples
        batches = validation_batches(self.validation, self.masker, size, samples, processes.rank, processes.world)
        with self.average.in_model():
            result = evaluate(self.model, batches, self.device, self.autocast, processes)
        unigram = self.validation.manifest.unigram_nats
        row = {
            "kind": "validation",
            "step": progress.step,
            "tokens": progress.tokens,
            **result,
            "unigram_nats": unigram,
        }
        self.metrics.write(row)
        gap, perplexity = unigram - result["val_loss"], result["val_perplexity"]
        shown = f"{perplexity:,.1f}" if perplexity < 1e6 else f"{perplexity:.1e}"
        self.display.say(
            f"step {progress.step:,}: validation loss {result['val_loss']:.4f} nats ({abs(gap):.3f} "
            f"{'below' if gap > 0 else 'above'} unigram), perplexity {shown}, "
            f"accuracy {result['val_accuracy']:.1%}"
        )
        if progress.best_val_loss is None or result["val_loss"] < progress.best_val_loss:
            progress.best_val_loss, progress.evaluations_without_gain = result["val_loss"], 0
        else:
            progress.evaluations_without_gain += 1
        if runtime.early_stop and progress.evaluations_without_gain >= runtime.early_stop:
            progress.finished = "early_stop"
            self.display.say(f"early stop: no better validation loss in {runtime.early_stop} evaluations")
        self.meter.restart()

    def save(self) -> None:
        self.processes.at("saving")
        step, state = self.progress.step, asdict(self.progress)
        with self.average.in_model():
            self.checkpoints.save(step, self.model, self.optimizer, state, before=self.metrics.sync)
        self.meter.restart()

    def saved(self) -> None:
        self.checkpoints.wait()

    def nonfinite(self, step: int) -> str:
        file = self.run.path / "nonfinite.json"
        if self.processes.is_main:
            write_json(file, {"step": step, "samples": self.batches.samples(step)[0].tolist()})
        return f"; its samples are listed in {file}; try a lower optim.lr or look at those samples"

    def memory(self, inputs: list[PackedBatch] | None) -> str:
        sequences = len(inputs[0].decoder.lengths) if inputs else self.config.runtime.sequences_at_once
        remedy = "lower runtime.micro_batch_size (the update's batch stays the same)"
        return f"with micro-batches of {sequences} sequences: {remedy}"


def _masked(update: Update) -> list[PackedBatch]:
    if isinstance(update, PackedUpdate):
        return update.micro_batches()
    return [
        ops.mask_and_pack(
            batch.ids,
            batch.lengths.tolist(),
            torch.from_numpy(batch.samples),
            torch.from_numpy(batch.epochs),
            update.masker,
        )
        for batch in update.micro_batches()
    ]


@torch.no_grad()
def evaluate(
    model: MaeLm, batches: Iterator[PackedBatch], device: torch.device, autocast: Any, processes: Processes
) -> dict[str, float]:
    """Loss of the predicted tokens in nats, its exponential, and accuracy, over all batches of all processes."""
    model = processes.whole_model(model).eval()
    loss, correct, predicted = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in batches:
        processes.at("evaluating")
        with autocast():
            batch_loss, batch_correct = model(batch.to(device, non_blocking=True))
        loss += batch_loss
        correct += batch_correct
        predicted += model.predicted_tokens(batch.counts)
    total, hits, tokens = processes.sum(torch.stack([loss, correct, predicted])).tolist()
    mean = total / max(tokens, 1)
    return {
        "val_loss": mean,
        "val_perplexity": math.exp(min(mean, 700.0)),
        "val_accuracy": hits / max(tokens, 1),
    }


class _Update(NamedTuple):
    """What the host knows of an update that the device may still be working at; not its tensors."""

    step: int
    lr: float


class _Meter:
    """Original tokens per second, and MFU where the device's peak is known, since the last row.

    Original tokens are visible and masked ones, never padding. MFU is model FLOPs (model/flops.py) over the bf16 peak
    of all devices. Time spent in evaluation and saving does not count."""

    def __init__(self, config: RunConfig, device: str, world: int) -> None:
        self.model, self.peak = config.model, (peak_flops(device) or 0.0) * world
        self.restart()

    def restart(self) -> None:
        self.start, self.tokens, self.flops = time.perf_counter(), 0.0, 0.0

    def flops_of(self, micro_batches: list[PackedBatch]) -> int:
        """0 where there is no peak to compare them with."""
        return sum(training_flops(self.model, *batch.lengths) for batch in micro_batches) if self.peak else 0

    def add(self, numbers: Numbers) -> None:
        self.tokens += numbers.original
        self.flops += numbers.flops

    def rates(self) -> dict[str, float | None]:
        """Rates since the last call, whose end was the end of an update on the device."""
        seconds = time.perf_counter() - self.start
        rates = {
            "tokens_per_s": self.tokens / seconds,
            "mfu": self.flops / seconds / self.peak if self.peak else None,
        }
        self.restart()
        return rates
