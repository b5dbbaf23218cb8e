"""Runs: they resume bit for bit wherever they were cut, and are what a plain loop computes."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from maelm_fast.config import BackendConfig, RunConfig
from maelm_fast.data.masking import pack
from maelm_fast.data.order import permutation, samples_at
from maelm_fast.data.token_store import TokenStore
from maelm_fast.errors import UserError
from maelm_fast.masking import VALIDATION_EPOCH, Masker
from maelm_fast.training import trainer
from maelm_fast.training.job import pretrain
from maelm_fast.training.rundir import RunDir, load_run
from maelm_fast.training.trainer import Trainer
from tests.devices import DEVICES
from tests.training.runs import SEED, assert_same, config, pretrain_until, rows
from tests.waiting import HANG, wait_until


def test_a_deterministic_run_is_one_from_the_first_update_to_the_last(
    store: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, update = [], Trainer.update

    def watched(*arguments: Any) -> Any:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return update(*arguments)

    monkeypatch.setattr(Trainer, "update", watched)
    pretrain(config(runtime={"deterministic": True}), store, tmp_path / "run")
    assert seen == [True] * 8
    assert not torch.are_deterministic_algorithms_enabled()
    assert_same(tmp_path / "run", whole)


def test_metrics_have_what_was_promised(whole: Path) -> None:
    train = [r for r in rows(whole) if r["kind"] == "train"]
    validation = [r for r in rows(whole) if r["kind"] == "validation"]
    assert [r["step"] for r in train] == list(range(1, 9))
    assert [r["step"] for r in validation] == [3, 6, 8]
    assert train[-1]["tokens"] == 8 * 12 * 32
    assert {"step", "tokens", "val_loss", "val_accuracy", "val_perplexity", "unigram_nats"} <= set(validation[0])
    assert train[0]["lr"] == 0.0
    assert train[0]["masked"] == 12 * 5  # round(0.15 * 32) of each


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_validation_loss_is_the_mean_over_samples_drawn_from_the_whole_split(
    precision: str, store: Path, tmp_path: Path
) -> None:
    """Without dropout: the weights are large, so that it would show, and so would another precision."""
    out = tmp_path / "run"
    asked = config(model={"init_std": 0.5}, optim={"max_steps": 1, "warmup_steps": 0}, runtime={"precision": precision})
    pretrain(asked, store, out)
    opened, run = TokenStore.open(store, "validation"), load_run(out)
    assert len(opened) > 20
    masker, loss, correct, masked = Masker(asked.masking, run.vocabulary, SEED, False), 0.0, 0, 0
    for ids in np.split(permutation(np.arange(20), len(opened), SEED, VALIDATION_EPOCH), 4):
        epochs = np.full(5, VALIDATION_EPOCH)
        batch = pack([opened[i] for i in ids.tolist()], ids, epochs, masker)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            part, right = run.model(batch)
        loss, correct, masked = loss + float(part), correct + int(right), masked + batch.counts.masked
    last = [row for row in rows(out) if row["kind"] == "validation"][-1]
    assert last["val_loss"] == pytest.approx(loss / masked, rel=1e-6)
    assert last["val_perplexity"] == pytest.approx(math.exp(last["val_loss"]))
    assert last["val_accuracy"] == correct / masked


def test_the_metrics_of_a_causal_decoder_are_over_every_token(store: Path, tmp_path: Path) -> None:
    asked = config(model={"decoder": "causal_cross", "dropout": 0.0}, optim={"lr": 1e-2}, runtime={"eval_samples": 20})
    pretrain(asked, str(store), str(tmp_path / "run"))
    opened, run = TokenStore.open(store, "validation"), load_run(tmp_path / "run")
    ids = permutation(np.arange(20), len(opened), SEED, VALIDATION_EPOCH)
    masker = Masker(asked.masking, run.vocabulary, SEED, False)
    loss, correct = run.model(pack([opened[i] for i in ids.tolist()], ids, np.full_like(ids, VALIDATION_EPOCH), masker))
    last = [r for r in rows(tmp_path / "run") if r["kind"] == "validation"][-1]
    assert correct > 0
    assert (last["val_loss"], last["val_accuracy"]) == pytest.approx(
        (loss.item() / 640, correct.item() / 640), rel=1e-5
    )
    hits = [r["accuracy"] * 12 * 32 for r in rows(tmp_path / "run") if r["kind"] == "train"]
    assert hits == pytest.approx([round(hit) for hit in hits])
    assert any(round(hit) % 5 for hit in hits)  # else they are whole over the 60 masked ones too


def test_tokens_per_second_leave_out_what_is_not_training(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def taking(seconds: float, function: Any) -> Any:
        def timed(*arguments: Any, **named: Any) -> Any:
            clock[0] += seconds
            return function(*arguments, **named)

        return timed

    saving = trainer.checkpoint.Checkpoints
    monkeypatch.setattr(trainer, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(Trainer, "update", taking(2.0, Trainer.update))
    monkeypatch.setattr(trainer, "evaluate", taking(1e3, trainer.evaluate))
    monkeypatch.setattr(trainer, "live_ranks", taking(1e3, trainer.live_ranks))
    monkeypatch.setattr(saving, "save", taking(1e3, saving.save))
    pretrain(config(metrics={"rank_every": 2}), str(store), str(tmp_path / "run"))
    rates = [row["tokens_per_s"] for row in RunDir(tmp_path / "run").metrics() if row["kind"] == "train"]
    assert rates == [12 * 32 / 2.0] * 8


def test_a_run_is_a_plain_loop(store: Path, tmp_path: Path) -> None:
    """Samples, masks and their order, schedule, clipping and decay are the configuration's."""
    asked = config(
        model={"dropout": 0.0},
        optim={"max_steps": 4, "warmup_steps": 1, "lr": 1e-2, "clip_norm": 0.1, "weight_decay": 0.3},
    )
    pretrain(asked, store, tmp_path / "run")
    samples, run, optim = TokenStore.open(store, "train"), load_run(tmp_path / "run"), asked.optim
    model = trainer.build_model(run.config, run.vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), betas=optim.betas, eps=optim.eps, weight_decay=0.3)
    masker, losses, accuracies = Masker(asked.masking, run.vocabulary, SEED, False), [], []
    for step, share in enumerate((0, 1, 2 / 3, 1 / 3)):
        ids, epochs = samples_at(12 * step, 12, len(samples), SEED)
        batch = pack([samples[i] for i in ids.tolist()], ids, epochs, masker)
        optimizer.param_groups[0]["lr"] = 1e-2 * share
        optimizer.zero_grad()
        total, correct = model(batch)
        loss = total / batch.counts.masked
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.2
        optimizer.step()
        losses.append(loss.item())
        accuracies.append(correct.item() / batch.counts.masked)
    train = [row for row in rows(tmp_path / "run") if row["kind"] == "train"]
    assert [row["loss"] for row in train] == pytest.approx(losses, rel=1e-5)
    assert [row["accuracy"] for row in train] == pytest.approx(accuracies, abs=0.02)
    assert accuracies[-1] > 0.05
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], expected, rtol=1e-3, atol=2e-5, msg=name)


def test_every_micro_batch_has_dropout_of_its_own(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Always the same micro-batch and weights, the latter so large that dropout shows: the losses differ over updates
    and within one."""
    forward = trainer.MaeLm.forward
    drawn: list[tuple[int, float]] = []

    def of_the_first(self: Any, batch: Any, dropout_seed: torch.Tensor) -> Any:
        if not drawn:
            of_the_first.batch = batch  # type: ignore[attr-defined]
        loss, correct = forward(self, of_the_first.batch, dropout_seed)  # type: ignore[attr-defined]
        drawn.append((int(dropout_seed), float(loss.detach())))
        return loss, correct

    monkeypatch.setattr(trainer.MaeLm, "forward", of_the_first)
    monkeypatch.setattr(trainer, "evaluate", lambda *_: {"val_loss": 1.0, "val_perplexity": 1.0, "val_accuracy": 0.0})

    def run(seed: int, name: str) -> list[tuple[int, float]]:
        drawn.clear()
        asked = config(model={"init_std": 0.5}, optim={"lr": 1e-30, "max_steps": 4})
        pretrain(replace(asked, seed=seed), store, tmp_path / name)
        return drawn.copy()

    first = run(0, "first")
    seeds, losses = ({pair[i] for pair in first} for i in (0, 1))
    assert len(seeds) == len(losses) == len(first) == 4 * 3
    assert run(0, "again") == first
    assert not {seed for seed, _ in run(1, "other")} & seeds


@pytest.mark.parametrize(("cut", "workers"), [(1, 0), (2, 0), (3, 0), (5, 0), (7, 0), (3, 1)])
def test_resume_is_bitwise(
    cut: int, workers: int, store: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A crash after any update, between checkpoints or on one, with accumulation over three micro-batches; gone on with
    without loader processes, since runtime settings may change."""
    out = tmp_path / "run"
    pretrain_until(cut, config(runtime={"workers": workers}), str(store), str(out))
    capsys.readouterr()
    pretrain(config(), store, out)
    printed = capsys.readouterr().out
    assert (f"resuming from step {cut - cut % 2}\n" in printed) == (cut > 1)  # else there is no checkpoint yet
    assert_same(out, whole)


def fast_config(**runtime: Any) -> RunConfig:
    """Muon, and masks that fall from 40% to 15% of 32 tokens."""
    return config(optim={"name": "muon"}, masking={"rate": 0.4, "rate_end": 0.15}, runtime=runtime)


@pytest.mark.parametrize("cut", [1, 4, 7])
def test_resume_is_bitwise_with_muon_and_falling_masks(cut: int, store: Path, tmp_path: Path) -> None:
    """And the masks are the schedule's, also of an update that is done again, and where they are drawn on the
    device; validation masks at the last rate."""
    pretrain(fast_config(), store, tmp_path / "whole")
    train = [row for row in rows(tmp_path / "whole") if row["kind"] == "train"]
    falling = [round(rate * 32) for rate in (0.4, 0.4, 0.35, 0.3, 0.25, 0.25, 0.2, 0.15)]
    assert [row["masked"] for row in train] == [12 * count for count in falling]
    pretrain_until(cut, fast_config(workers=1), str(store), str(tmp_path / "run"))
    pretrain(fast_config(backend=BackendConfig(mask_and_pack="reference")), store, tmp_path / "run")
    assert_same(tmp_path / "run", tmp_path / "whole")
    optimizers = [
        load_file(tmp_path / run / "checkpoints" / "step_8" / "optimizer.safetensors") for run in ("run", "whole")
    ]
    assert optimizers[0].keys() == optimizers[1].keys()
    assert all(torch.equal(optimizers[0][name], optimizers[1][name]) for name in optimizers[0])
    assert "momentum.head.dense.weight" in optimizers[0]


def test_a_falling_rate_cannot_be_recorded(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "check_recordable", lambda *_: None)  # which would miss a GPU first
    with pytest.raises(UserError, match=r"cuda_graph needs updates of one shape, and masking\.rate_end changes"):
        pretrain(fast_config(cuda_graph=True), store, tmp_path / "run")


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_masks_drawn_on_the_device_make_the_same_run(backend: str, store: Path, whole: Path, tmp_path: Path) -> None:
    pretrain(config(runtime={"backend": BackendConfig(mask_and_pack=backend)}), store, tmp_path / "r")
    assert_same(tmp_path / "r", whole)


def test_a_backend_that_cannot_run_ends_the_run_with_its_reason(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    asked = config(runtime={"backend": BackendConfig(add_norm="triton")})
    with pytest.raises(UserError, match="add_norm: backend 'triton' cannot run: the tensors are on the CPU"):
        pretrain(asked, store, tmp_path / "run")


def test_micro_batch_size_changes_only_rounding(store: Path, tmp_path: Path) -> None:
    """Gradients are weighted by masked tokens over the whole update, so how it is cut does not matter (no dropout)."""
    losses = []
    for micro in (12, 5):
        out = tmp_path / str(micro)
        pretrain(config(model={"dropout": 0.0}, runtime={"micro_batch_size": micro}), store, out)
        losses.append([r["loss"] for r in rows(out) if r["kind"] == "train"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_accumulation_weights_by_masked_tokens(document_store: Path, tmp_path: Path) -> None:
    """Samples of many lengths: a mean of micro-batch means would differ."""
    losses = []
    for micro in (12, 1):
        out = tmp_path / str(micro)
        asked = config(model={"dropout": 0.0}, runtime={"micro_batch_size": micro}, masking={"count": "stochastic"})
        pretrain(asked, document_store, out)
        losses.append([r["loss"] for r in rows(out) if r["kind"] == "train"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


CHILD = """
import sys
import time
from pathlib import Path
if __name__ == "__main__":  # loader processes read this file too
    sys.path.insert(0, {tests!r})
    from tests.training.test_run import config
    from maelm_fast.model.maelm import MaeLm
    from maelm_fast.training.job import pretrain
    forward, calls = MaeLm.forward, []
    def held(self, *arguments, **named):
        calls.extend([None] * self.training)
        if self.training and len(calls) == {after} * 3 + 1:
            Path({out!r} + ".held").touch()
            while not Path({out!r} + ".go").exists():
                time.sleep(0.01)
        return forward(self, *arguments, **named)
    MaeLm.forward = held
    pretrain(config(runtime={{"workers": {workers}, "device": {device!r}}}), {store!r}, {out!r})
"""


def start(store: Path, out: Path, after: int, workers: int = 0, device: str = "cpu") -> subprocess.Popen[str]:
    """A run in a process of its own, which is held in the middle of an update, `after` updates of its own behind it,
    until `release`."""
    values = {"store": str(store), "out": str(out), "after": after, "workers": workers, "device": device}
    code = CHILD.format(tests=str(Path(__file__).parents[2]), **values)
    script = out.with_suffix(".py")  # a file, since spawned workers import the main module
    script.write_text(code)
    held = out.with_suffix(".held")
    held.unlink(missing_ok=True)
    child = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    wait_until(held.exists, child)
    return child


def release(child: subprocess.Popen[str], out: Path, code: int = 0) -> str:
    """What it printed when it has ended, with that exit status."""
    out.with_suffix(".go").touch()
    output, _ = child.communicate(timeout=HANG)
    assert child.returncode == code, output
    return output


@pytest.mark.parametrize("device", DEVICES)
def test_sigkill_and_sigterm_leave_a_run_that_goes_on(
    device: str, store: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU bit for bit, on a GPU near the CPU's run. And while it lives no other process may write the run."""
    cut = tmp_path / "cut"
    killed = start(store, cut, after=5, device=device)
    try:
        with pytest.raises(UserError, match="in use by another process"):
            pretrain(config(), store, cut)
    finally:
        killed.kill()
        killed.communicate()
    asked = start(store, cut, after=2, device=device)
    asked.send_signal(signal.SIGTERM)
    output = release(asked, cut, code=143)
    assert "resuming from step 4\n" in output
    assert "SIGTERM: saved at step 7;" in output
    pretrain(config(runtime={"device": device}), store, cut)
    assert "resuming from step 7\n" in capsys.readouterr().out
    if device == "cpu":
        assert_same(cut, whole)
    losses = [[row["loss"] for row in rows(run) if row["kind"] == "train"] for run in (cut, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_loader_processes_leave_signals_to_the_trainer(store: Path, whole: Path, tmp_path: Path) -> None:
    """A terminal's Ctrl-C or a scheduler's SIGTERM goes to the whole group: the trainer still gets the updates it asks
    for, here more than were under way."""
    out = tmp_path / "run"
    child = start(store, out, after=1, workers=1)
    for process in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split():
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(int(process), number)
    release(child, out)
    assert_same(out, whole)


def test_live_ranks_are_in_the_metrics_and_change_nothing_else(store: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    pretrain(config(metrics={"rank_every": 3}), store, out)
    pretrain(config(metrics={"rank_every": 0}), store, tmp_path / "never")
    found = rows(out)
    ranks = [row for row in found if row["kind"] == "rank"]
    assert [row["step"] for row in ranks] == [3, 6, 8]
    assert all(1 <= row["rank_last"] <= 32 for row in ranks)
    assert ranks[-1:] == [row for row in rows(whole) if row["kind"] == "rank"]  # by default the last too
    assert [row for row in found if row["kind"] != "rank"] == rows(tmp_path / "never")


def test_early_stop(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    asked = config(optim={"lr": 1e-12, "max_steps": 50}, runtime={"early_stop": 2, "eval_every": 1})
    pretrain(asked, store, out)
    before = rows(out)
    assert before[-1]["step"] == 3  # the first evaluation, and two that are no better
    pretrain(asked, store, out)  # finished: nothing more happens
    assert rows(out) == before
    cut = tmp_path / "cut"
    pretrain_until(2, asked, str(store), str(cut))
    pretrain(asked, store, cut)  # the evaluation without gain before the crash counts
    assert rows(cut) == before
