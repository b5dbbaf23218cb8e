"""Runs refuse what does not fit, and mend what a crash or a full disk left."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from maelm_fast.errors import UserError
from maelm_fast.training import checkpoint, trainer
from maelm_fast.training.job import pretrain
from maelm_fast.training.rundir import RunDir
from maelm_fast.training.trainer import Trainer
from tests.training.runs import SEED, assert_same, config, final_weights, rows


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
