"""The pretraining loop. Everything it computes is a function of the configuration and the number of updates done:
order, masks, dropout and learning rate. A run killed anywhere and started again therefore goes on bit for bit.

A run is `Trainer(...).train()`; the parts come from outside, so that a test or another program can replace them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from maelm_fast import ops
from maelm_fast.batch import PackedBatch, RaggedBatch
from maelm_fast.config import RunConfig
from maelm_fast.data.loader import TrainingBatches, training_updates, validation_batches
from maelm_fast.data.masking import Vocabulary
from maelm_fast.data.token_store import TokenStore
from maelm_fast.errors import UserError
from maelm_fast.model.flops import peak_flops, training_flops
from maelm_fast.model.maelm import MaeLm
from maelm_fast.philox import fold_seed
from maelm_fast.training import checkpoint
from maelm_fast.training.checkpoint import Progress
from maelm_fast.training.files import write_json
from maelm_fast.training.hardware import device_name
from maelm_fast.training.optim import build_optimizer, learning_rate
from maelm_fast.training.rundir import RunDir
from maelm_fast.training.runlog import Display, Metrics

log = logging.getLogger(__name__)

_INIT, _DROPOUT = 0, 1  # places of the seed: initialisation, dropout


def build_model(config: RunConfig, vocabulary: Vocabulary) -> MaeLm:
    """A freshly initialised model; the same for the same seed, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold_seed(config.seed, _INIT))
        return MaeLm(config.model, mask_id=vocabulary.mask_id)


class Trainer:
    """One run on one device. Construct, then `resume()` if there is something to resume, then `train()`."""

    def __init__(
        self,
        run: RunDir,
        config: RunConfig,
        model: MaeLm,
        train: TokenStore,
        validation: TokenStore,
        vocabulary: Vocabulary,
        device: torch.device,
        precision: str,
    ) -> None:
        self.run, self.config, self.device, self.precision = run, config, device, precision
        self.model = model.to(device)
        self.vocabulary, self.validation = vocabulary, validation
        self.optimizer = build_optimizer(self.model, config.optim)
        self.batches = TrainingBatches(
            train, vocabulary, config.masking, config.seed, config.optim.batch_size, config.runtime.micro_batch_size,
            self.model.encoder_sees_mask, mask_on_device=config.runtime.backend.mask_and_pack not in ("auto", "host"),
        )  # fmt: skip
        self.progress = Progress()
        self._stop_signal: signal.Signals | None = None

    def resume(self) -> bool:
        """Goes on from the newest whole checkpoint; False if there is none."""
        path = self.run.last_whole_checkpoint()
        if path is None:
            return False
        self.progress = checkpoint.load(path, self.model, self.optimizer)
        return True

    def train(self) -> Progress:
        """Runs to max_steps, an early stop, or a signal (SIGTERM, SIGINT: saves first). Returns where it ended."""
        progress, runtime = self.progress, self.config.runtime
        updates = training_updates(
            self.batches, progress.step, self.config.optim.max_steps, runtime.workers, self.device.type == "cuda"
        )
        metrics = Metrics(self.run, progress.step)
        meter = _Meter(self.config, device_name(self.device) if self.device.type == "cuda" else "")
        with (
            contextlib.closing(metrics),
            Display(progress.step, self.config.optim.max_steps) as display,
            self._signals(),
            ops.backends(runtime.backend),
        ):
            for micro_batches in updates:
                row = self._update(micro_batches, meter)
                step, last = progress.step, progress.step == self.config.optim.max_steps
                if step == 1 or step % runtime.log_every == 0 or last:
                    row = meter.finish(row)
                    metrics.write(row)
                    display.update(row)
                if step % runtime.eval_every == 0 or last:
                    self._evaluate(metrics, display)
                    meter.restart()
                if last and progress.finished is None:
                    progress.finished = "max_steps"
                if progress.finished or self._stop_signal or step % runtime.save_every == 0:
                    metrics.sync()
                    self._save(must=bool(progress.finished or self._stop_signal))
                    meter.restart()
                if progress.finished or self._stop_signal:
                    break
            if self._stop_signal:
                display.say(
                    f"{self._stop_signal.name}: saved at step {progress.step:,}; the same command goes on from there"
                )
        return progress

    def _on_device(self, batch: PackedBatch | RaggedBatch) -> PackedBatch:
        if isinstance(batch, PackedBatch):
            return batch.to(self.device, non_blocking=True)
        return ops.mask_and_pack(
            batch.ids.to(self.device, non_blocking=True), batch.lengths, batch.samples, batch.epochs,
            self.config.masking, self.vocabulary, self.config.seed, self.model.encoder_sees_mask,
        )  # fmt: skip

    def _update(self, loaded: list[PackedBatch] | list[RaggedBatch], meter: _Meter) -> dict[str, Any]:
        """One optimiser update; the metrics row of it, its tensors not yet read back from the device."""
        micro_batches = [self._on_device(batch) for batch in loaded]
        progress, optim = self.progress, self.config.optim
        self.model.train()
        masked = sum(batch.counts.masked for batch in micro_batches)
        loss = torch.zeros((), device=self.device)
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        try:
            for i, batch in enumerate(micro_batches):
                seed = fold_seed(self.config.seed, _DROPOUT, progress.step, i)
                with self._autocast():
                    micro_loss, micro_correct = self.model(batch, dropout_seed=seed)
                (micro_loss / max(masked, 1)).backward()
                loss += micro_loss.detach()
                correct += micro_correct
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise _out_of_memory(error, len(micro_batches[0].lengths)) from None
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), optim.clip_norm or math.inf)
        lr = learning_rate(optim, progress.step)
        if math.isfinite(norm_value := float(norm)):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            progress.skipped_in_a_row = 0
        else:
            self._skip()
        self.optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.tokens += sum(batch.counts.original for batch in micro_batches)
        meter.add(micro_batches)
        return {"kind": "train", "step": progress.step, "tokens": progress.tokens, "loss": loss / max(masked, 1),
                "accuracy": correct / max(masked, 1), "lr": lr, "grad_norm": norm_value, "masked": masked,
                "skipped": progress.skipped}  # fmt: skip

    def _skip(self) -> None:
        """Counts an update with a non-finite gradient; too many in a row end the run and name the samples."""
        progress = self.progress
        progress.skipped += 1
        progress.skipped_in_a_row += 1
        log.warning(
            "update %d skipped: its gradient is not finite (%d in a row)", progress.step, progress.skipped_in_a_row
        )
        if progress.skipped_in_a_row >= self.config.runtime.max_nonfinite:
            ids = self.batches.samples(progress.step)[0].tolist()
            file = self.run.path / "nonfinite.json"
            write_json(file, {"step": progress.step, "samples": ids})
            raise UserError(
                f"{progress.skipped_in_a_row} updates in a row had a gradient that is not finite, the last at step "
                f"{progress.step}; its samples are listed in {file}; try a lower optim.lr or look at those samples"
            )

    def _evaluate(self, metrics: Metrics, display: Display) -> None:
        progress, runtime = self.progress, self.config.runtime
        result = evaluate(self.model, self._validation_batches(), self.device, self._autocast)
        unigram = self.validation.manifest.unigram_nats
        row = {
            "kind": "validation",
            "step": progress.step,
            "tokens": progress.tokens,
            **result,
            "unigram_nats": unigram,
        }
        metrics.write(row)
        gap = unigram - result["val_loss"]
        display.say(
            f"step {progress.step:,}: validation loss {result['val_loss']:.4f} nats ({abs(gap):.3f} "
            f"{'below' if gap > 0 else 'above'} unigram), perplexity {result['val_perplexity']:,.1f}, "
            f"accuracy {result['val_accuracy']:.1%}"
        )
        if progress.best_val_loss is None or result["val_loss"] < progress.best_val_loss:
            progress.best_val_loss, progress.evaluations_without_gain = result["val_loss"], 0
        else:
            progress.evaluations_without_gain += 1
        if runtime.early_stop and progress.evaluations_without_gain >= runtime.early_stop:
            progress.finished = "early_stop"
            display.say(f"early stop: no better validation loss in {runtime.early_stop} evaluations")

    def _validation_batches(self) -> Iterator[PackedBatch]:
        return validation_batches(
            self.validation, self.vocabulary, self.config.masking, self.config.seed,
            self.config.runtime.micro_batch_size, self.model.encoder_sees_mask, self.config.runtime.eval_samples,
        )  # fmt: skip

    def _save(self, must: bool) -> None:
        """A save that fails, on a full disk say, costs only itself: earlier checkpoints stay and training goes on."""
        try:
            checkpoint.save(self.run, self.model, self.optimizer, self.progress, self.config.runtime.keep_checkpoints)
        except OSError as error:
            message = f"cannot save a checkpoint in {self.run.checkpoints}: {error.strerror or error}"
            if must:
                raise UserError(f"{message}; earlier ones are whole; free some space and run again") from None
            log.error("%s; training goes on, the next save tries again", message)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT ask for a stop after the update in hand; a second SIGINT interrupts at once."""

        def ask(number: int, _: object) -> None:
            if self._stop_signal == signal.SIGINT == number:
                raise KeyboardInterrupt
            self._stop_signal = signal.Signals(number)

        try:
            previous = {s: signal.signal(s, ask) for s in (signal.SIGTERM, signal.SIGINT)}
        except ValueError:  # not the main thread: signals stay the host program's business
            yield
            return
        try:
            yield
        finally:
            for s, handler in previous.items():
                signal.signal(s, handler)


@torch.no_grad()
def evaluate(model: MaeLm, batches: Iterator[PackedBatch], device: torch.device, autocast: Any) -> dict[str, float]:
    """Masked-token loss in nats, its exponential, and accuracy, over all batches."""
    model.eval()
    loss = torch.zeros((), dtype=torch.float64, device=device)
    correct = torch.zeros((), dtype=torch.int64, device=device)
    masked = 0
    for batch in batches:
        with autocast():
            batch_loss, batch_correct = model(batch.to(device, non_blocking=True))
        loss += batch_loss
        correct += batch_correct
        masked += batch.counts.masked
    mean = float(loss) / max(masked, 1)
    return {
        "val_loss": mean,
        "val_perplexity": math.exp(min(mean, 700.0)),
        "val_accuracy": float(correct) / max(masked, 1),
    }


class _Meter:
    """Original tokens per second, and MFU where the device's peak is known, since the last row.

    Original tokens are visible and masked ones, never padding. MFU is model FLOPs (model/flops.py) over the bf16 peak.
    Time spent in evaluation and saving does not count."""

    def __init__(self, config: RunConfig, device: str) -> None:
        self.model, self.peak = config.model, peak_flops(device)
        self.restart()

    def restart(self) -> None:
        self.start, self.tokens, self.flops = time.perf_counter(), 0, 0

    def add(self, micro_batches: list[PackedBatch]) -> None:
        self.tokens += sum(batch.counts.original for batch in micro_batches)
        if self.peak:
            self.flops += sum(
                training_flops(self.model, b.lengths, b.decoder_lengths, b.masked_lengths) for b in micro_batches
            )

    def finish(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row with its tensors read back and the rates since the last row added."""
        row = {key: value.item() if isinstance(value, Tensor) else value for key, value in row.items()}
        seconds = time.perf_counter() - self.start
        row["tokens_per_s"] = self.tokens / seconds
        row["mfu"] = self.flops / seconds / self.peak if self.peak else None
        self.restart()
        return row


def _out_of_memory(error: Exception, sequences: int) -> Exception:
    if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
        return UserError(
            f"out of memory with micro-batches of {sequences} sequences: lower runtime.micro_batch_size "
            f"(the update's batch stays the same)"
        )
    return error
