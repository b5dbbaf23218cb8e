"""Runs: they resume bit for bit wherever they were cut, refuse what does not fit, and mend what a crash left."""

from __future__ import annotations

import fcntl
import json
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
from safetensors import SafetensorError
from safetensors.torch import load_file

from maelm_fast import presets
from maelm_fast.config import BackendConfig, OptimConfig, RunConfig
from maelm_fast.data.masking import pack
from maelm_fast.data.order import permutation, samples_at
from maelm_fast.data.token_store import TokenStore
from maelm_fast.errors import UserError
from maelm_fast.masking import VALIDATION_EPOCH, Masker, Vocabulary
from maelm_fast.training import checkpoint, trainer
from maelm_fast.training.initial import adapt, from_run, load_initial
from maelm_fast.training.job import pretrain
from maelm_fast.training.optim import build_optimizer, learning_rate
from maelm_fast.training.rundir import RunDir, load_run
from maelm_fast.training.trainer import Trainer
from tests.devices import DEVICES
from tests.waiting import HANG, wait_until

SEED = 7  # not the default, which whatever forgets it would take


def config(**sections: dict[str, Any]) -> RunConfig:
    small = presets.change(
        presets.get("tiny"),
        model={"hidden_size": 32, "num_heads": 2, "ffn_size": 64, "num_layers": 2, "dropout": 0.1},
        optim={"batch_size": 12, "max_steps": 8, "warmup_steps": 2, "lr": 3e-3},
        runtime={
            "micro_batch_size": 5,
            "log_every": 1,
            "eval_every": 3,
            "eval_samples": 20,
            "save_every": 2,
            "device": "cpu",
            "precision": "fp32",
        },
    )
    return replace(presets.change(small, **sections), seed=SEED)


def rows(run: Path) -> list[dict[str, Any]]:
    """The metrics without what the clock decides."""
    return [{k: v for k, v in row.items() if k not in ("tokens_per_s", "mfu")} for row in RunDir(run).metrics()]


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    path = RunDir(run).last_whole_checkpoint()
    assert path is not None
    return load_file(path / "model.safetensors")


@pytest.fixture(scope="module")
def whole(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    pretrain(config(), store, out)
    return out


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


def assert_same(run: Path, whole: Path) -> None:
    assert rows(run) == rows(whole)
    mine, theirs = final_weights(run), final_weights(whole)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


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


class Killed(Exception):
    pass


def pretrain_until(cut: int, *arguments: Any) -> None:
    """A run that dies after `cut` updates."""
    update = Trainer.update

    def dies(self: Trainer, *args: Any) -> Any:
        if self.progress.step == cut:
            raise Killed
        return update(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "update", dies)
        with pytest.raises(Killed):
            pretrain(*arguments)


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


def test_validation_masks_at_the_last_rate(store: Path, tmp_path: Path) -> None:
    """Whatever the rates before it: without a step, a model has the same validation loss."""
    losses = []
    for name, masking in (("falling", {"rate": 0.4, "rate_end": 0.15}), ("plain", {}), ("other", {"rate": 0.4})):
        asked = config(optim={"max_steps": 1, "warmup_steps": 0, "lr": 1e-30}, masking=masking)
        pretrain(asked, store, tmp_path / name)
        losses.append([row["val_loss"] for row in rows(tmp_path / name) if row["kind"] == "validation"])
    assert losses[0] == losses[1] != losses[2]


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


def test_a_finished_run_is_left_alone(store: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = whole.joinpath("metrics.jsonl").read_bytes()
    pretrain(config(), store, whole)
    assert "already finished" in capsys.readouterr().out
    assert whole.joinpath("metrics.jsonl").read_bytes() == before


def damaged_copy(whole: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of the run without its last checkpoint, and the then newest one."""
    import shutil

    run = tmp_path / "copy"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints" / "step_8")
    return run, run / "checkpoints" / "step_6"


@pytest.mark.parametrize("damage", ["truncate", "flip", "missing", "no checksums"])
def test_a_damaged_checkpoint_is_passed_over(
    damage: str,
    store: Path,
    whole: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, newest = damaged_copy(whole, tmp_path)
    file = newest / "model.safetensors"
    if damage == "truncate":
        os.truncate(file, file.stat().st_size - 100)
    elif damage == "flip":
        content = bytearray(file.read_bytes())
        content[-50] ^= 1
        file.write_bytes(content)
    elif damage == "missing":
        file.unlink()
    else:
        (newest / "checksums.json").unlink()
    pretrain(config(), store, run)
    assert "going back to the one before" in caplog.text
    assert "resuming from step 4\n" in capsys.readouterr().out
    assert_same(run, whole)


def test_only_damaged_checkpoints_is_an_error(store: Path, whole: Path, tmp_path: Path) -> None:
    run, _ = damaged_copy(whole, tmp_path)
    for file in run.glob("checkpoints/*/state.json"):
        file.write_text("{}")
    with pytest.raises(UserError, match="every checkpoint is damaged"):
        pretrain(config(), store, run)


def test_a_damaged_checkpoint_further_on_does_not_crowd_out_what_is_saved(tmp_path: Path) -> None:
    model, run = torch.nn.Linear(2, 2), RunDir(tmp_path)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = checkpoint.Checkpoints(run.checkpoints, keep=1)
    checkpoints.save(30, model, optimizer, {})
    (run.checkpoint(30) / "model.safetensors").write_bytes(b"damaged")
    for step in (10, 20):
        checkpoints.save(step, model, optimizer, {})
    assert run.steps() == [20, 30]
    assert run.last_whole_checkpoint() == run.checkpoint(20)


@pytest.mark.parametrize("message", ["DefaultCPUAllocator: can't allocate memory", "CUDA error: out of memory"])
@pytest.mark.parametrize(("owner", "name"), [(trainer.TrainStep, "__call__"), (trainer, "evaluate")])
def test_out_of_memory_names_the_setting_to_lower(
    owner: Any, name: str, message: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(owner, name, full)
    with pytest.raises(UserError, match=r"micro-batches of 5 sequences: lower runtime\.micro_batch_size"):
        pretrain(config(), store, tmp_path / "run")


def test_an_unfinished_metrics_line_is_dropped(store: Path, whole: Path, tmp_path: Path) -> None:
    run, _ = damaged_copy(whole, tmp_path)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 9, "lo')
    pretrain(config(), store, run)
    assert_same(run, whole)


@pytest.mark.parametrize("line", [b"\0\0", b"\xff", b"[]", b"{}"])
def test_a_damaged_metrics_line_is_named(line: bytes, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.metrics_file.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl: line 2 is damaged"):
        list(run.metrics())


@pytest.mark.parametrize("change", [("hidden_size: 32", "hidden_size: wide"), ("rate: 0.15", "rate: null")])
def test_a_value_of_another_type_in_config_is_one_line(change: tuple[str, str], whole: Path, tmp_path: Path) -> None:
    text = (whole / "config.yaml").read_text()
    assert change[0] in text
    (tmp_path / "config.yaml").write_text(text.replace(*change, 1))
    with pytest.raises(UserError, match=r"config\.yaml: not a run's config\.yaml \([^\n]*\)$"):
        RunDir(tmp_path).read_config()


def test_a_failed_save_costs_only_itself(
    store: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that is full for the second save: the first stays, training goes on, nothing half-written is left."""
    save_file, calls = checkpoint.save_file, []

    def full(tensors: dict[str, torch.Tensor], path: Path) -> None:
        calls.append(path)
        if "step_4" in str(path):
            path.write_bytes(b"half")
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save_file(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    out = tmp_path / "run"
    pretrain(config(), store, out)
    assert "No space left on device" in caplog.text
    assert RunDir(out).steps() == [2, 6, 8]
    assert not list((out / "checkpoints").glob(".*"))
    assert_same(out, whole)


def test_the_last_save_must_succeed(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(UserError, match="No space left on device"):
        pretrain(config(), store, tmp_path / "run")


def test_nonfinite_updates_are_skipped_counted_and_end_the_run(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = trainer.MaeLm.forward
    bad = {2}

    def poisoned(self: Any, batch: Any, dropout_seed: int | None = None) -> Any:
        loss, correct = forward(self, batch, dropout_seed)
        return (loss * float("nan") if self.training and poisoned.update in bad else loss), correct

    update = Trainer.update

    def counted(self: Trainer, *args: Any) -> dict[str, Any]:
        poisoned.update = self.progress.step  # type: ignore[attr-defined]
        return update(self, *args)

    monkeypatch.setattr(trainer.MaeLm, "forward", poisoned)
    monkeypatch.setattr(Trainer, "update", counted)
    once = tmp_path / "once"
    pretrain(config(), store, once)
    train = [r for r in rows(once) if r["kind"] == "train"]
    assert [r["skipped"] for r in train] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert train[2]["loss"] is train[2]["grad_norm"] is None  # JSON has no NaN
    assert all(torch.isfinite(t).all() for t in final_weights(once).values())

    bad |= {2, 3, 4}
    with pytest.raises(UserError, match=r"3 updates in a row .* step 4"):
        pretrain(config(runtime={"max_nonfinite": 3}), store, tmp_path / "often")
    listed = json.loads((tmp_path / "often" / "nonfinite.json").read_text())
    assert listed["step"] == 4
    assert len(listed["samples"]) == 12


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optim": {"lr": 1e-3}}, r"started with optim\.lr=0\.003"),
        ({"masking": {"rate": 0.3}}, r"masking\.rate=0\.15"),
        ({"model": {"num_layers": 3}}, r"model\.num_layers=2"),
    ],
)
def test_a_run_goes_on_only_as_it_was_started(change: dict[str, Any], message: str, store: Path, whole: Path) -> None:
    with pytest.raises(UserError, match=message):
        pretrain(config(**change), store, whole)


def test_a_run_goes_on_only_with_its_seed(store: Path, whole: Path) -> None:
    with pytest.raises(UserError, match=rf"started with seed={SEED}"):
        pretrain(replace(config(), seed=1), store, whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"vocab_size": 299}}, r"model\.vocab_size is 299 but the store .* has \d+ tokens; leave"),
        ({"model": {"max_positions": 16}}, r"up to 32 tokens do not fit model\.max_positions 16"),
        ({"runtime": {"device": "cuda"}}, r"PyTorch sees no GPU; set runtime\.device=cpu"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    change: dict[str, Any], message: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=message):
        pretrain(config(**change), store, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_other_data_is_refused(document_store: Path, whole: Path) -> None:
    with pytest.raises(UserError, match="other data"):
        pretrain(config(), document_store, whole)


def test_a_lock_that_was_removed_before_it_was_taken_is_none(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder ended between this process's open() and flock(): a third process may hold a new file of that name."""
    flock, out = fcntl.flock, tmp_path / "run"

    def late(file: Any, how: int) -> None:
        (out / ".lock").unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(UserError, match="in use by another process"):
        pretrain(config(), store, out)


def test_loaded_run_has_its_step_and_vocabulary(whole: Path) -> None:
    run = load_run(whole)
    assert run.step == 8
    assert run.config.model.vocab_size == run.tokenizer.get_vocab_size()
    assert load_run(whole, step=4).step == 4
    with pytest.raises(UserError, match="there are: 4, 6, 8"):
        load_run(whole, step=5)


def test_init_from_a_run(store: Path, whole: Path, tmp_path: Path) -> None:
    initial = from_run(whole)
    out = tmp_path / "run"
    asked = config(optim={"max_steps": 1, "warmup_steps": 0, "lr": 1e-12}, runtime={"eval_samples": 20})
    pretrain(asked, store, out, initial)
    start_loss = next(r for r in rows(out) if r["kind"] == "validation")["val_loss"]
    end_loss = [r for r in rows(whole) if r["kind"] == "validation"][-1]["val_loss"]
    assert start_loss == pytest.approx(end_loss, rel=1e-5)
    other = tmp_path / "roberta"  # the encoder carries over to another objective, the decoder does not
    pretrain(
        replace(asked, model=replace(asked.model, decoder="none", decoder_relative_bias=False)),
        str(store),
        str(other),
        initial,
    )
    assert torch.allclose(final_weights(other)["encoder.token_table"], final_weights(whole)["encoder.token_table"])


def test_the_encoder_stays_what_it_was_in_the_run_it_comes_from(whole: Path) -> None:
    """Its sizes, its bias and its norms' epsilon; the decoder and dropout are as asked."""
    model = load_run(whole).config.model
    bias = {"relative_bias": "released", "relative_buckets": 16, "relative_max_distance": 64}
    asked = replace(
        model, num_layers=5, num_heads=2, ffn_size=8, max_positions=99, layer_norm_eps=1e-3, dropout=0.3, **bias
    )
    assert adapt(asked, from_run(whole)) == replace(model, dropout=0.3)


def test_initial_weights_must_hold_the_whole_encoder(whole: Path) -> None:
    initial = from_run(whole)
    partly = {name: tensor for name, tensor in initial.state.items() if name != "encoder.token_table"}
    with pytest.raises(UserError, match=r"no fitting weights for encoder\.token_table \(1 encoder tensors"):
        load_initial(load_run(whole).model, replace(initial, state=partly))


VOCABULARY = Vocabulary(300, 299, (0, 1, 2, 3, 299))


def test_the_mask_token_is_the_vocabulary_s() -> None:
    """BERT's is not the last."""
    assert trainer.build_model(config(), replace(VOCABULARY, mask_id=4)).mask_id == 4


def test_a_model_is_initialised_by_the_seed_alone() -> None:
    def weights(seed: int) -> torch.Tensor:
        return trainer.build_model(replace(config(), seed=seed), VOCABULARY).encoder.token_table.detach()

    first, state = weights(3), torch.get_rng_state()
    torch.rand(7)
    assert torch.equal(weights(3), first)
    assert not torch.equal(weights(4), first)
    torch.set_rng_state(state)
    weights(3)
    assert torch.equal(torch.get_rng_state(), state)


def test_schedule() -> None:
    optim = OptimConfig(lr=1.0, warmup_steps=10, max_steps=110)
    assert [learning_rate(optim, k) for k in (0, 5, 10, 60, 109)] == pytest.approx([0, 0.5, 1.0, 0.5, 0.01])


def test_a_trapezoid() -> None:
    optim = OptimConfig(lr=1.0, warmup_steps=10, max_steps=110, schedule="trapezoid", cooldown_steps=20)
    assert [learning_rate(optim, k) for k in (0, 5, 10, 60, 90, 100, 109)] == pytest.approx(
        [0, 0.5, 1, 1, 1, 0.5, 0.05]
    )
    assert OptimConfig(warmup_steps=0, max_steps=50, schedule="trapezoid").cooldown_steps == 25
    with pytest.raises(UserError, match=r"cooldown_steps is set but optim\.schedule is linear"):
        OptimConfig(cooldown_steps=5)
    for wrong in (0, 101, 2.5):
        with pytest.raises(UserError, match=r"optim\.cooldown_steps .* must be a whole number, at least 1 and at most"):
            OptimConfig(warmup_steps=10, max_steps=110, schedule="trapezoid", cooldown_steps=wrong)


def test_a_trapezoid_can_be_prolonged_and_cooled_down_early(store: Path, tmp_path: Path) -> None:
    """Ending as if it had been asked for from the start; but not once an update would have been another."""

    def run(out: str, max_steps: int, cut: int | None = None, cooldown: int = 3) -> None:
        asked = config(optim={"max_steps": max_steps, "schedule": "trapezoid", "cooldown_steps": cooldown})
        arguments = asked, str(store), str(tmp_path / out)
        pretrain(*arguments) if cut is None else pretrain_until(cut, *arguments)

    run("short", 7)
    run("resumed", 12, cut=5)  # the newest checkpoint is step 4's
    run("resumed", 7)
    assert_same(tmp_path / "resumed", tmp_path / "short")
    with pytest.raises(UserError, match=r"was started with optim\.max_steps=7; use the same"):
        run("resumed", 12)
    run("finished", 4, cooldown=1)  # all at the peak
    run("finished", 7)
    mine = final_weights(tmp_path / "finished")
    assert all(torch.equal(mine[name], value) for name, value in final_weights(tmp_path / "short").items())
    run("long", 12)
    run("prolonged", 7, cut=5)
    run("prolonged", 12)
    weights = final_weights(tmp_path / "prolonged")
    assert all(torch.equal(weights[name], value) for name, value in final_weights(tmp_path / "long").items())
    with pytest.raises(UserError, match=r"was started with optim\.max_steps=12; use the same"):
        run("long", 10)
    for step in (10, 12):
        (tmp_path / "long" / "checkpoints" / f"step_{step}").rename(tmp_path / str(step))
    run("long", 10)  # update 7, the last before step 8, has lr * 3 / 3
    assert RunDir(tmp_path / "long").read_config()[1].optim.max_steps == 10


def test_mask_rates_of_updates() -> None:
    """Equal steps of at most 0.05, as many updates each; the last of them at rate_end."""

    def rates(masking: dict[str, Any], steps: int) -> list[float]:
        run = config(masking=masking, optim={"max_steps": steps, "warmup_steps": 0})
        return [run.mask_rate(update) for update in range(steps)]

    assert rates({}, 3) == [0.15] * 3
    falling = rates({"rate": 0.4, "rate_end": 0.15}, 12)
    assert falling == [rate for rate in (0.4, 0.35, 0.3, 0.25, 0.2, 0.15) for _ in range(2)]
    assert rates({"rate": 0.15, "rate_end": 0.22}, 3) == [0.15, 0.185, 0.22]
    assert rates({"rate": 0.3, "rate_end": 0.3}, 2) == [0.3, 0.3]
    assert rates({"rate": 0.4, "rate_end": 0.15}, 2) == [0.4, 0.25]  # fewer updates than steps
    with pytest.raises(UserError, match=r"masking\.rate_end must lie between 0 and 1, not 1"):
        config(masking={"rate_end": 1.0})
    with pytest.raises(ValueError, match="a masker has one rate"):
        Masker(config(masking={"rate_end": 0.2}).masking, VOCABULARY, 0, False)


def test_decay_groups() -> None:
    model = trainer.build_model(config(), VOCABULARY)
    everything = build_optimizer(model, OptimConfig())
    assert [g["weight_decay"] for g in everything.param_groups] == [0.01]
    some = build_optimizer(model, OptimConfig(decay="matrices"))
    assert [g["weight_decay"] for g in some.param_groups] == [0.01, 0.0]
    plain = {id(p) for p in some.param_groups[1]["params"]}
    names = {n for n, p in model.named_parameters() if id(p) in plain}
    assert names == {n for n, p in model.named_parameters() if p.ndim < 2 or n.endswith("relative_bias.weight")}
