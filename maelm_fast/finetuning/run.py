"""Fine-tuning, run by training/loop.py: problem, encoder and configuration in; result, model and evaluation out.

Everything it computes is a function of the configuration and the number of steps done: order, dropout, learning rate.
A run killed anywhere and started again therefore resumes bit for bit (on a CPU). The files around it are job.py's.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn

from maelm_fast.config import OptimConfig, RuntimeConfig, require, to_dict
from maelm_fast.encoders import TextEncoder
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.fingerprint import deciding
from maelm_fast.finetuning.problem import Evaluation, Problem, autocast, update_order
from maelm_fast.philox import fold_seed
from maelm_fast.stop import Stop
from maelm_fast.training import checkpoint, loop
from maelm_fast.training.files import newest_whole
from maelm_fast.training.hardware import choose_device, choose_precision
from maelm_fast.training.optim import build_optimizer, learning_rate
from maelm_fast.training.step import Numbers, apply_gradients

SAVE_SECONDS = 180.0
"""Between two saves of the state of a run that can be gone on with."""
_WATCH_SECONDS = 1.0

Watch = Callable[[dict[str, Any]], None]
"""Called about once a second with {"kind": "train", step, loss, examples_per_s}, and with {"kind": "evaluation", ...}
and a row of Result.curve."""


@dataclass(frozen=True)
class Result:
    """One run. Metrics are of the validation splits, in percent."""

    task: str
    metric: str
    """The task's own, of its first validation split: `best` and `last` are its values."""
    best: float
    """At the best evaluation, which is what the paper reports."""
    last: float
    """After the last step."""
    metrics: dict[str, dict[str, float]]
    """At the best evaluation: split to metric to value."""
    best_step: int
    curve: list[dict[str, Any]]
    """A row per evaluation: step, epoch, loss (mean over the steps since the one before), metrics (by split), value
    (of the task's own metric), seconds since the start."""
    steps: int
    skipped: int
    """Steps skipped because their gradient was not finite."""
    seconds: float
    """In all, evaluations included."""
    examples_per_s: float
    """Of training alone; for SQuAD windows. tokens_per_s: real tokens, never padding."""
    tokens_per_s: float
    truncation: dict[str, Any]
    seed: int
    config: dict[str, Any]
    encoder: str
    engine: str
    device: str
    precision: str

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(kw_only=True)
class _Progress(loop.Progress):
    loss: float = 0.0
    losses: int = 0
    """Sum and number of the steps' losses since the last evaluation."""
    seconds: float = 0.0
    train_seconds: float = 0.0
    examples: int = 0
    tokens: int = 0
    curve: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    best: int | None = None
    """Index in the curve."""


def total_updates(train_size: int, config: FinetuneConfig) -> int:
    return config.epochs * -(-train_size // config.batch_size)


def evaluation_steps(train_size: int, config: FinetuneConfig) -> list[int]:
    """After which steps is evaluated: evaluations_per_epoch times in each epoch, or after every step of an epoch
    that has fewer."""
    per_epoch, parts = -(-train_size // config.batch_size), config.evaluations_per_epoch
    within = sorted({-(-per_epoch * part // parts) for part in range(1, parts + 1)})
    return [epoch * per_epoch + step for epoch in range(config.epochs) for step in within]


def device_of(config: FinetuneConfig) -> tuple[torch.device, str]:
    """Where a run runs, and in "bf16" or "fp32"."""
    require(
        config.device != "cuda" or torch.cuda.is_available(),
        "device is cuda but PyTorch sees no GPU: use --device cpu, or see 'maelm-fast doctor'",
    )
    runtime = RuntimeConfig(device=config.device, precision=config.precision)
    device = choose_device(runtime)
    return device, choose_precision(runtime, device)


def train(
    problem: Problem,
    encoder: TextEncoder,
    config: FinetuneConfig,
    *,
    watch: Watch | None = None,
    resume: Path | None = None,
    keep_best: bool = True,
    stop: Stop = lambda: None,
) -> tuple[Result, nn.Module, Evaluation]:
    """Fine-tune a copy of `encoder`, which itself is left as it is.

    resume: a directory for the run's state, written every few minutes and when stopped; if there is one, the run goes
    on from it. It is the caller's to remove. keep_best: keep the best evaluation's weights, which costs a copy in the
    host's memory. stop: asked after every step. Nothing else is written.

    Returns the result, the model with the best weights (without keep_best: the last) on its device in evaluation mode,
    and the best evaluation. Raises Stopped if asked to stop; UserError if there is no GPU, no memory, or no finite
    gradient."""
    training = FineTuning(problem, encoder, config, watch or (lambda row: None), resume, keep_best)
    training.load()
    loop.run(training, stop)
    return training.result()


class FineTuning(loop.Training[NDArray[np.int64], None]):
    def __init__(
        self,
        problem: Problem,
        encoder: TextEncoder,
        config: FinetuneConfig,
        watch: Watch,
        resume: Path | None,
        keep_best: bool,
    ) -> None:
        require(problem.train_size > 0, f"{problem.data.task.name}: there is nothing to train on")
        self.problem, self.encoder, self.config, self.watch = problem, encoder, config, watch
        self.resume, self.keep_best = resume, keep_best
        self.device, self.precision = device_of(config)
        own = copy.deepcopy(encoder, {id(encoder.tokenizer): encoder.tokenizer})  # a tokenizer is not trained
        self.model = problem.model(own, config).to(self.device)
        self.parameters = list(self.model.parameters())
        self.steps = total_updates(problem.train_size, config)
        self.evaluations = set(evaluation_steps(problem.train_size, config))
        self.optim = OptimConfig(
            lr=config.lr,
            batch_size=config.batch_size,
            max_steps=self.steps,
            warmup_steps=int(config.warmup * self.steps),
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            clip_norm=config.clip_norm,
        )
        self.optimizer = build_optimizer(self.model, self.optim)
        self.lengths = np.asarray(problem.lengths, dtype=np.int64)
        self.progress: _Progress = _Progress()
        self.best_weights: dict[str, Tensor] | None = None
        self.evaluation: Evaluation | None = None

    def updates(self) -> Iterator[NDArray[np.int64]]:
        """The examples of each."""
        progress, config = self.progress, self.config
        self._begun = self._saved = self._watched = time.perf_counter()
        self._before = progress.seconds
        self.model.train()
        done, per_epoch = progress.step, self.steps // config.epochs
        for epoch in range(done // per_epoch, config.epochs):
            skip = max(done - epoch * per_epoch, 0)
            yield from list(update_order(self.problem.train_size, config.batch_size, config.seed, epoch))[skip:]

    def update(self, indices: NDArray[np.int64]) -> tuple[None, Tensor]:
        self._started = time.perf_counter()
        progress, step = self.progress, self.progress.step
        loss = torch.zeros((), device=self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.optim, step)
        for i, part in enumerate(self._micro_batches(indices)):
            with autocast(self.device, self.precision):
                part_loss = self.problem.loss(self.model, part, self.device, fold_seed(self.config.seed, step, i))
            part_loss = part_loss * (len(part) / len(indices))
            part_loss.backward()
            loss += part_loss.detach()
        norm, skipped = apply_gradients(self.optimizer, self.parameters, self.config.clip_norm)
        progress.examples += len(indices)
        progress.tokens += int(self.lengths[indices].sum())
        return None, torch.stack([value.double() for value in (loss, torch.zeros_like(loss), norm, skipped)])

    def _micro_batches(self, indices: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """The update's examples in parts of at most micro_batch_tokens, and at least one example."""
        if (total := np.cumsum(self.lengths[indices]))[-1] <= self.config.micro_batch_tokens:
            return [indices]
        parts, start = [], 0
        while start < len(indices):
            used = total[start - 1] if start else 0
            end = int(np.searchsorted(total, used + self.config.micro_batch_tokens, side="right"))
            end = max(end, start + 1)
            parts.append(indices[start:end])
            start = end
        return parts

    def due(self) -> list[Callable[[], None]]:
        return [self.evaluate] if self.progress.step in self.evaluations else []

    def saves(self) -> bool:
        return self.resume is not None and time.perf_counter() - self._saved >= SAVE_SECONDS

    def read(self, _: None, numbers: Numbers) -> None:
        if not numbers.skipped:
            self.progress.loss += numbers.loss
            self.progress.losses += 1

    def updated(self) -> None:
        progress, now = self.progress, time.perf_counter()
        progress.train_seconds += now - self._started
        progress.seconds = self._before + now - self._begun
        if now - self._watched < _WATCH_SECONDS and progress.step < self.steps:
            return
        self._watched = now
        row = {
            "kind": "train",
            "step": progress.step,
            "loss": self._loss(),
            "examples_per_s": self._per_second("examples"),
        }
        self.watch(row)

    def _loss(self) -> float | None:
        return self.progress.loss / self.progress.losses if self.progress.losses else None

    def _per_second(self, items: str) -> float:
        return float(getattr(self.progress, items) / max(self.progress.train_seconds, 1e-9))

    def evaluate(self) -> None:
        """Adds a row to the curve, and keeps evaluation and weights if it is the best so far; of equals the first."""
        progress, task = self.progress, self.problem.data.task
        evaluation = self.problem.evaluate(self.model, self.device, self.precision)
        value = evaluation.metrics[next(iter(self.problem.data.validation))][task.metric]
        progress.seconds = self._before + time.perf_counter() - self._begun
        row = {
            "step": progress.step,
            "epoch": progress.step * self.config.epochs / self.steps,
            "loss": self._loss(),
            "metrics": evaluation.metrics,
            "value": value,
            "seconds": progress.seconds,
        }
        progress.loss, progress.losses = 0.0, 0
        progress.curve.append(row)
        if progress.best is None or value > progress.curve[progress.best]["value"]:
            progress.best = len(progress.curve) - 1
            self.evaluation = evaluation
            if self.keep_best:
                self.best_weights = on_host(self.model)
        self.watch({"kind": "evaluation", **row})
        self.model.train()

    def save(self) -> None:
        """Of a run that is not over: then its result is all that is wanted."""
        if self.resume is None or self.progress.finished:
            return
        evaluation = None if self.evaluation is None else dataclasses.asdict(self.evaluation)
        state = {"identity": self._identity(), "progress": dataclasses.asdict(self.progress), "evaluation": evaluation}
        saved = checkpoint.Checkpoints(self.resume, keep=1)
        saved.save(self.progress.step, self.model, self.optimizer, state, best=self.best_weights)
        self._saved = time.perf_counter()

    def _identity(self) -> dict[str, Any]:
        """What the run is a function of, as far as it can tell; compared when a state is read."""
        return {**deciding(self.config), "precision": self.precision, "items": self.problem.train_size}

    def load(self) -> None:
        """Goes on from the newest whole state, if there is one."""
        if self.resume is None or (path := newest_whole(self.resume)) is None:
            return
        state = checkpoint.read_state(path)
        before, now = state["identity"], json.loads(json.dumps(self._identity()))
        precision = before["precision"]
        require(
            before == now | {"precision": precision},
            f"{path} is the state of another configuration or other data: remove it, or use the same",
        )
        require(
            precision == self.precision,
            f"{path} was computed in {precision}: go on with --precision {precision}, or remove {self.resume} to "
            f"start again in {self.precision}",
        )
        self.progress = _Progress(**state["progress"])
        checkpoint.load(path, self.model, self.optimizer)
        if (path / "best.safetensors").exists():
            self.best_weights = load_file(path / "best.safetensors")
        self.evaluation = Evaluation(**state["evaluation"]) if state["evaluation"] else None

    def nonfinite(self, step: int) -> str:
        return ": try a lower --lr, or --precision fp32"

    def memory(self, indices: NDArray[np.int64] | None) -> str:
        if indices is None:
            return "in an evaluation: lower --max-length, or free memory of the device"
        tokens = max(int(self.lengths[part].sum()) for part in self._micro_batches(indices))
        remedy = "lower --micro-batch-tokens (a step keeps its examples)"
        return f"with {tokens:,} tokens in a forward pass: {remedy}"

    def result(self) -> tuple[Result, nn.Module, Evaluation]:
        progress = self.progress
        assert progress.best is not None
        assert self.evaluation is not None
        best = progress.curve[progress.best]
        if self.best_weights is not None:
            self.model.load_state_dict(self.best_weights)
        result = Result(
            task=self.problem.data.task.name,
            metric=self.problem.data.task.metric,
            best=best["value"],
            last=progress.curve[-1]["value"],
            metrics=best["metrics"],
            best_step=best["step"],
            curve=progress.curve,
            steps=self.steps,
            skipped=progress.skipped,
            seconds=progress.seconds,
            examples_per_s=self._per_second("examples"),
            tokens_per_s=self._per_second("tokens"),
            truncation=self.problem.truncation,
            seed=self.config.seed,
            config=to_dict(self.config),
            encoder=self.encoder.name,
            engine=self.encoder.engine,
            device=self.device.type,
            precision=self.precision,
        )
        return result, self.model.eval(), self.evaluation


def on_host(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the weights."""
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in model.state_dict().items()}
