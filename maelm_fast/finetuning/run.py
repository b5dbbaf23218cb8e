"""The fine-tuning loop: a problem, an encoder and a configuration in, a result, a model and an evaluation out.

Everything it computes is a function of the configuration and the number of updates done: order, dropout, learning rate.
A run killed anywhere and started again therefore goes on bit for bit (on a CPU). The files around it are job.py's.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from maelm_fast import native
from maelm_fast.config import OptimConfig, RuntimeConfig, require, to_dict
from maelm_fast.errors import UserError
from maelm_fast.finetuning.batches import update_order
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.encoders import TextEncoder
from maelm_fast.finetuning.fingerprint import deciding
from maelm_fast.finetuning.problem import Evaluation, Problem, autocast
from maelm_fast.philox import fold_seed
from maelm_fast.stop import Stop, Stopped
from maelm_fast.training.checkpoint import load_optimizer, optimizer_tensors
from maelm_fast.training.files import damage, write_directory, write_json
from maelm_fast.training.hardware import choose_device, choose_precision, is_out_of_memory
from maelm_fast.training.optim import build_optimizer, learning_rate
from maelm_fast.training.step import Readback, apply_gradients

log = logging.getLogger(__name__)

SAVE_SECONDS = 180.0
"""Between two saves of the state of a run that can be gone on with."""
MAX_NONFINITE = 10
"""Updates in a row with a NaN or infinite gradient (each is left out and counted) before a run stops."""
_WATCH_SECONDS = 1.0

Watch = Callable[[dict[str, Any]], None]
"""Called about once a second with {"kind": "train", step, steps, epoch, loss, lr, examples_per_s, tokens_per_s}, and
with {"kind": "evaluation", ...} and a row of Result.curve."""


@dataclass(frozen=True)
class Result:
    """One run. Metrics are of the validation splits, in percent."""

    task: str
    metric: str
    """The task's own, of its first validation split: `best` and `last` are its values."""
    best: float
    """At the best evaluation, which is what the paper reports."""
    last: float
    """After the last update."""
    metrics: dict[str, dict[str, float]]
    """At the best evaluation: split to metric to value."""
    best_step: int
    curve: list[dict[str, Any]]
    """A row per evaluation: step, epoch, loss (mean over the updates since the one before), metrics (by split), value
    (of the task's own metric), seconds since the start."""
    steps: int
    skipped: int
    """Updates left out because their gradient was not finite."""
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


@dataclass
class _Progress:
    """Where a run stands after `step` updates."""

    step: int = 0
    loss: float = 0.0
    losses: int = 0
    """Sum and number of the updates' losses since the last evaluation."""
    skipped: int = 0
    skipped_in_a_row: int = 0
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
    """After which updates is evaluated: evaluations_per_epoch times in each epoch, or after every update of an epoch
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
    host's memory. stop: asked after every update. Nothing else is written.

    Returns the result, the model with the best weights (without keep_best: the last) on its device in evaluation mode,
    and the best evaluation. Raises Stopped if asked to stop; UserError if there is no GPU, no memory, or no finite
    gradient."""
    return _Loop(problem, encoder, config, watch, resume, keep_best, stop).run()


class _Loop:
    def __init__(
        self,
        problem: Problem,
        encoder: TextEncoder,
        config: FinetuneConfig,
        watch: Watch | None,
        resume: Path | None,
        keep_best: bool,
        stop: Stop,
    ) -> None:
        require(problem.train_size > 0, f"{problem.data.task.name}: there is nothing to train on")
        self.problem, self.config, self.watch, self.stop = problem, config, watch or (lambda row: None), stop
        self.resume, self.keep_best = resume, keep_best
        self.device, self.precision = device_of(config)
        if self.device.type == "cpu" and (host := native.host()) is not None:
            host.keep_freed_memory()  # a step's large buffers are the next step's
        own = copy.deepcopy(encoder, {id(encoder.tokenizer): encoder.tokenizer})  # a tokenizer is not trained
        self.model = problem.model(own, config).to(self.device)
        self.encoder = encoder
        self.parameters = list(self.model.parameters())
        self.steps = total_updates(problem.train_size, config)
        self.optim = OptimConfig(
            lr=config.lr, batch_size=config.batch_size, max_steps=self.steps,
            warmup_steps=int(config.warmup * self.steps), betas=config.betas, eps=config.eps,
            weight_decay=config.weight_decay, clip_norm=config.clip_norm,
        )  # fmt: skip
        self.optimizer = build_optimizer(self.model, self.optim)
        self.lengths = np.asarray(problem.lengths, dtype=np.int64)
        self.progress = _Progress()
        self.on_disk = 0  # the step of the saved state
        self.best_weights: dict[str, Tensor] | None = None
        self.evaluation: Evaluation | None = None

    def run(self) -> tuple[Result, nn.Module, Evaluation]:
        self._load()
        progress, evaluations = self.progress, set(evaluation_steps(self.problem.train_size, self.config))
        under_way = Readback()
        seen = progress.examples, progress.tokens, progress.train_seconds
        begun = saved = watched = time.perf_counter()
        before = progress.seconds
        self.model.train()
        for indices in self._updates(progress.step):
            started = time.perf_counter()
            under_way.put(progress.step, self._update(indices))
            progress.step += 1
            progress.examples += len(indices)
            progress.tokens += int(self.lengths[indices].sum())
            evaluates, now = progress.step in evaluations, time.perf_counter()
            stopping, saves = self.stop(), self.resume is not None and now - saved >= SAVE_SECONDS
            for step, numbers in under_way.take(everything=bool(evaluates or stopping or saves)):
                self._count(step, numbers.loss, bool(numbers.skipped))
            now = time.perf_counter()
            progress.train_seconds += now - started
            progress.seconds = before + now - begun
            if now - watched >= _WATCH_SECONDS or progress.step == self.steps:
                watched = now
                self._watch_training(seen)
                seen = progress.examples, progress.tokens, progress.train_seconds
            if evaluates:
                self._evaluate()
                progress.seconds = before + time.perf_counter() - begun
                progress.curve[-1]["seconds"] = progress.seconds
                self.watch({"kind": "evaluation", **progress.curve[-1]})
                self.model.train()
            if progress.step == self.steps:
                stopping = None
            if saves or stopping:
                self._save()
                saved = time.perf_counter()
            if stopping:
                raise Stopped(progress.step if self.resume is None else self.on_disk, stopping)
        return self._result()

    def _updates(self, done: int) -> Iterator[NDArray[np.int64]]:
        """The examples of every update that is left."""
        size, per_epoch = self.problem.train_size, self.steps // self.config.epochs
        for epoch in range(done // per_epoch, self.config.epochs):
            skip = max(done - epoch * per_epoch, 0)
            for i, indices in enumerate(update_order(size, self.config.batch_size, self.config.seed, epoch)):
                if i >= skip:
                    yield indices

    def _update(self, indices: NDArray[np.int64]) -> Tensor:
        """Queues one optimiser update. Returns training.step.Numbers as (4,) float64 on the device."""
        step, parts = self.progress.step, self._micro_batches(indices)
        loss = torch.zeros((), device=self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.optim, step)
        try:
            for i, part in enumerate(parts):
                with autocast(self.device, self.precision):
                    part_loss = self.problem.loss(self.model, part, self.device, fold_seed(self.config.seed, step, i))
                part_loss = part_loss * (len(part) / len(indices))
                part_loss.backward()
                loss += part_loss.detach()
            norm, skipped = apply_gradients(self.optimizer, self.parameters, self.config.clip_norm)
        except RuntimeError as error:
            raise _out_of_memory(error, max(int(self.lengths[part].sum()) for part in parts)) from None
        return torch.stack([value.double() for value in (loss, torch.zeros_like(loss), norm, skipped)])

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

    def _count(self, step: int, loss: float, skipped: bool) -> None:
        progress = self.progress
        if not skipped:
            progress.skipped_in_a_row = 0
            progress.loss += loss
            progress.losses += 1
            return
        progress.skipped += 1
        progress.skipped_in_a_row += 1
        log.warning("update %d left out: its gradient is not finite (%d in a row)", step, progress.skipped_in_a_row)
        if progress.skipped_in_a_row >= MAX_NONFINITE:
            raise UserError(
                f"{progress.skipped_in_a_row} updates in a row had a gradient that is not finite, the last at step "
                f"{step:,}: try a lower --lr, or --precision fp32"
            )

    def _watch_training(self, before: tuple[int, int, float]) -> None:
        progress = self.progress
        seconds = max(progress.train_seconds - before[2], 1e-9)
        row = {
            "kind": "train", "step": progress.step, "steps": self.steps, "epoch": self._epoch(),
            "loss": progress.loss / progress.losses if progress.losses else None,
            "lr": learning_rate(self.optim, progress.step - 1),
            "examples_per_s": (progress.examples - before[0]) / seconds,
            "tokens_per_s": (progress.tokens - before[1]) / seconds,
        }  # fmt: skip
        self.watch(row)

    def _epoch(self) -> float:
        return self.progress.step * self.config.epochs / self.steps

    def _evaluate(self) -> None:
        """Adds a row to the curve, and keeps evaluation and weights if it is the best so far; of equals the first."""
        progress, task = self.progress, self.problem.data.task
        evaluation = self.problem.evaluate(self.model, self.device, self.precision)
        first = next(iter(self.problem.data.validation))
        value = evaluation.metrics[first][task.metric]
        loss = progress.loss / progress.losses if progress.losses else None
        progress.loss, progress.losses = 0.0, 0
        progress.curve.append(
            {"step": progress.step, "epoch": self._epoch(), "loss": loss, "metrics": evaluation.metrics, "value": value}
        )
        if progress.best is None or value > progress.curve[progress.best]["value"]:
            progress.best = len(progress.curve) - 1
            self.evaluation = evaluation
            if self.keep_best:
                self.best_weights = on_host(self.model)

    def _result(self) -> tuple[Result, nn.Module, Evaluation]:
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
            examples_per_s=progress.examples / max(progress.train_seconds, 1e-9),
            tokens_per_s=progress.tokens / max(progress.train_seconds, 1e-9),
            truncation=self.problem.truncation,
            seed=self.config.seed,
            config=to_dict(self.config),
            encoder=self.encoder.name,
            engine=self.encoder.engine,
            device=self.device.type,
            precision=self.precision,
        )
        return result, self.model.eval(), self.evaluation

    def _identity(self) -> dict[str, Any]:
        """What the run is a function of, as far as the loop can tell; compared when a state is read."""
        return {**deciding(self.config), "precision": self.precision, "items": self.problem.train_size}

    def _save(self) -> None:
        """The state, whole or not at all; the one before is removed afterwards. A save that fails, on a full disk say,
        costs only itself."""
        if self.resume is None:
            return

        def fill(aside: Path) -> None:
            save_file(on_host(self.model), aside / "model.safetensors")
            save_file(optimizer_tensors(self.model, self.optimizer), aside / "optimizer.safetensors")
            if self.best_weights is not None:
                save_file(self.best_weights, aside / "best.safetensors")
            evaluation = None if self.evaluation is None else dataclasses.asdict(self.evaluation)
            state = {
                "identity": self._identity(),
                "progress": dataclasses.asdict(self.progress),
                "evaluation": evaluation,
            }
            write_json(aside / "state.json", state)

        path = self.resume / f"step_{self.progress.step}"
        shutil.rmtree(path, ignore_errors=True)  # damaged, or of a run that was further
        try:
            write_directory(path, fill)
        except OSError as error:
            log.error("cannot save the state in %s: %s; the one before stays", self.resume, error)
            return
        self.on_disk = self.progress.step
        for _, other in _states(self.resume):
            if other != path:
                shutil.rmtree(other, ignore_errors=True)

    def _load(self) -> None:
        for _, path in _states(self.resume) if self.resume is not None else []:
            if (fault := damage(path)) is not None:
                log.warning("state %s is damaged: %s; it is not used", path, fault)
                continue
            state = json.loads((path / "state.json").read_text(encoding="utf-8"))
            before, now = state["identity"], json.loads(json.dumps(self._identity()))
            require(
                before == now | {"precision": before["precision"]},
                f"{path} is the state of another configuration or other data: remove it, or use the same",
            )
            precision = before["precision"]
            require(
                precision == self.precision,
                f"{path} was computed in {precision}: go on with --precision {precision}, or remove {self.resume} to "
                f"start again in {self.precision}",
            )
            self.progress = _Progress(**state["progress"])
            self.on_disk = self.progress.step
            self.model.load_state_dict(load_file(path / "model.safetensors"))
            load_optimizer(load_file(path / "optimizer.safetensors"), self.model, self.optimizer)
            if (path / "best.safetensors").exists():
                self.best_weights = load_file(path / "best.safetensors")
            self.evaluation = Evaluation(**state["evaluation"]) if state["evaluation"] else None
            return


def saved_step(resume: Path) -> int:
    """How many updates the state in a directory given to `train` has behind it; 0 without one."""
    return max((step for step, path in _states(resume) if damage(path) is None), default=0)


def _states(directory: Path) -> list[tuple[int, Path]]:
    """Saved states, the newest first."""
    found = [(int(path.name[5:]), path) for path in directory.glob("step_*") if path.name[5:].isdigit()]
    return sorted(found, reverse=True)


def on_host(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the weights."""
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in model.state_dict().items()}


def _out_of_memory(error: Exception, tokens: int) -> Exception:
    if is_out_of_memory(error):
        return UserError(
            f"out of memory with {tokens:,} tokens in a forward pass: lower --micro-batch-tokens (an update keeps its "
            f"examples)"
        )
    return error
