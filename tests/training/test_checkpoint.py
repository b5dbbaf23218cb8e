"""Checkpoints: one process and several write and read them, whole or not at all, aside or beside the training."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from maelm_fast.cli.main import main
from maelm_fast.config import ParallelConfig, RunConfig
from maelm_fast.errors import UserError
from maelm_fast.finetuning.fingerprint import model_fingerprint
from maelm_fast.training import checkpoint, files
from maelm_fast.training.job import pretrain
from maelm_fast.training.rundir import RunDir, load_run
from tests.processes import together
from tests.training.runs import config, rows


def asked(strategy: str = "auto", **runtime: Any) -> RunConfig:
    changes = {"parallel": ParallelConfig(strategy=strategy), "keep_checkpoints": 9, **runtime}
    return config(runtime=changes, metrics={"rank_every": 0})


@pytest.fixture(scope="module")
def whole(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, with checkpoints after 2, 4, 6 and 8 updates."""
    out = tmp_path_factory.mktemp("whole") / "run"
    pretrain(asked(), store, out)
    return out


@pytest.fixture(scope="module")
def shared(store: Path, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run begun by one process, gone on with by two in DDP from step 2 and by three in FSDP2 from step 4."""
    out = tmp_path_factory.mktemp("shared") / "run"
    shutil.copytree(whole, out)
    for world, strategy, step in ((2, "ddp", 2), (3, "fsdp", 4)):
        cut(out, step)
        together(world, lambda: pretrain(asked(strategy), store, out, several=True))  # noqa: B023  at once
    return out


@pytest.fixture
def run(shared: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(shared, tmp_path / "run"))


def cut(run: Path, step: int) -> None:
    for later in range(step + 1, 9):
        shutil.rmtree(run / "checkpoints" / f"step_{later}", ignore_errors=True)


def names(run: Path, step: int) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints" / f"step_{step}").iterdir())


def shares(world: int) -> list[str]:
    return [f"shard-{rank:05d}-model-00001-of-00001.safetensors" for rank in range(1, world + 1)]


def assert_near(run: Path, whole: Path) -> None:
    for mine, theirs in zip(rows(run), rows(whole), strict=True):
        for key, value in theirs.items():
            near = key in ("loss", "grad_norm", "val_loss", "val_perplexity")
            assert mine[key] == (pytest.approx(value, rel=1e-5) if near else value), key


def test_one_then_ddp_then_fsdp_then_one(store: Path, whole: Path, run: Path) -> None:
    assert names(run, 2) == ["checksums.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert names(run, 4) == ["checksums.json", *shares(2), "state.json"]
    assert names(run, 8) == ["checksums.json", *shares(3), "state.json"]
    cut(run, 6)
    pretrain(asked(), store, run)
    assert names(run, 8) == names(run, 2)
    assert_near(run, whole)


def test_every_reader_reads_the_shares(whole: Path, run: Path) -> None:
    for step in (4, 6, 8):
        mine, theirs = (load_run(path, step).model.state_dict() for path in (run, whole))
        for name, tensor in theirs.items():
            torch.testing.assert_close(mine[name], tensor, rtol=1e-4, atol=1e-6)
    prints = {model_fingerprint(run, step) for step in (2, 4, 6, 8)}
    assert len(prints) == 4


@pytest.mark.parametrize("damage", ["flip", "lost", "lost and not named", "nothing named", "one too many", "torn"])
def test_damaged_shares_go_back_to_the_checkpoint_before(
    damage: str, run: Path, store: Path, whole: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cut(run, 6)
    newest = run / "checkpoints" / "step_6"
    share, sums = newest / shares(3)[1], newest / "checksums.json"
    if damage == "flip":
        content = bytearray(share.read_bytes())
        content[-50] ^= 1
        share.write_bytes(content)
    elif damage.startswith("lost"):
        share.unlink()
    elif damage == "nothing named":
        sums.write_text("{}")
    elif damage == "one too many":
        shutil.copy(run / "checkpoints" / "step_4" / shares(2)[0], newest / "shard-00004-of-another.safetensors")
    else:
        os.truncate(share, 100)
    if damage == "lost and not named":
        sums.write_text(json.dumps({n: s for n, s in json.loads(sums.read_text()).items() if n != share.name}))
        with pytest.raises(UserError, match=r"step_6: .* is missing, in part, or of another shape"):
            load_run(run)
        return
    assert RunDir(run).last_whole_checkpoint() == run / "checkpoints" / "step_4"
    assert "going back to the one before" in caplog.text


def test_a_checkpoint_of_another_model_is_not_read(whole: Path, make_run: Callable[..., RunDir]) -> None:
    other = make_run(step=8)
    with pytest.raises(UserError, match=r"is missing, in part, or of another shape; it is of another model"):
        checkpoint.load(other.checkpoint(8), load_run(whole).model)


def test_a_full_disk_at_one_process_costs_the_save_of_all(store: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    sums_of = files.sums_of

    def full(paths: list[Path]) -> dict[str, str]:
        if os.environ["RANK"] == "1" and "step_4" in str(paths[0]):
            raise OSError(errno.ENOSPC, "No space left on device")
        return sums_of(paths)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "sums_of", full)
        together(2, lambda: pretrain(asked(), store, out, several=True))
    assert RunDir(out).steps() == [2, 6, 8]
    assert not list((out / "checkpoints").glob(".*"))
    assert_near(out, whole)


def same_bits(run: Path, whole: Path) -> None:
    assert rows(run) == rows(whole)
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        assert (run / "checkpoints/step_8" / name).read_bytes() == (whole / "checkpoints/step_8" / name).read_bytes()


class Held:
    """A disk that does not answer from the save at step 4 on, until it is let go."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked, self.answer = threading.Event(), threading.Event()
        patch.setattr(checkpoint, "save_file", self)

    def __call__(self, tensors: dict[str, torch.Tensor], path: Path) -> None:
        if "step_4" in str(path):
            self.asked.set()
            assert self.answer.wait(60)
        save_file(tensors, path)


def test_training_goes_on_while_a_thread_saves(
    store: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two more updates; then the next save waits for this one. And the state is that of the step it was asked at."""
    held, update = Held(monkeypatch), checkpoint.Checkpoints.save
    out = tmp_path / "run"

    def save(self: Any, step: int, *rest: Any, **named: Any) -> None:
        if step == 6:
            assert held.asked.wait(60)
            assert RunDir(out).steps() == [2]
            held.answer.set()
        update(self, step, *rest, **named)

    monkeypatch.setattr(checkpoint.Checkpoints, "save", save)
    pretrain(asked(async_save=True), store, out)
    assert RunDir(out).steps() == [2, 4, 6, 8]
    same_bits(out, whole)
    for name in ("model.safetensors", "optimizer.safetensors"):
        mine, theirs = (load_file(path / "checkpoints/step_4" / name) for path in (out, whole))
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("world", [1, 2])
def test_killed_while_a_thread_saves(world: int, store: Path, whole: Path, tmp_path: Path) -> None:
    """The last whole one is left, and the run ends as if nothing had been."""
    out = tmp_path / "run"

    def killed() -> None:
        with pytest.MonkeyPatch.context() as patch:
            writer = "save_file" if world == 1 else "_write_share"
            write = getattr(checkpoint, writer)

            def dies(*arguments: Any) -> None:
                write(*arguments)
                if any("step_4" in str(argument) for argument in arguments):
                    os.kill(os.getpid(), signal.SIGKILL)

            patch.setattr(checkpoint, writer, dies)
            pretrain(asked(async_save=True), store, out, several=True)

    together(world, killed, codes=(-signal.SIGKILL,) * world)
    assert RunDir(out).steps() == [2]
    assert list((out / "checkpoints").glob(".step_4.tmp"))
    if world == 1:
        pretrain(asked(async_save=True), store, out)
        same_bits(out, whole)
        assert not list((out / "checkpoints").glob(".*"))


def test_a_save_that_failed_in_a_thread_is_said_and_costs_only_itself(
    store: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if f"step_{full.at}" in str(path):  # type: ignore[attr-defined]
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    full.at = 4  # type: ignore[attr-defined]
    pretrain(asked(async_save=True), store, tmp_path / "run")
    assert "cannot save a checkpoint in" in caplog.text
    assert RunDir(tmp_path / "run").steps() == [2, 6, 8]
    same_bits(tmp_path / "run", whole)
    full.at = 8  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="No space left on device; earlier ones are whole"):
        pretrain(asked(async_save=True), store, tmp_path / "last")


def test_the_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def says(command: str, code: int = 0) -> str:
        assert main(["checkpoint", *command.format(run=run, tmp=tmp_path).split()]) == code
        return "".join(capsys.readouterr())

    assert [line.split()[0] for line in says("list {run}").splitlines()] == ["step", "2", "4", "6", "8"]
    assert says("list {run}").count("3 processes") == 2
    assert says("verify {run}").count(": whole") == 4

    consolidated = says("consolidate {run}").split()[-1]
    assert consolidated == f"{run}/consolidated/step_8"
    assert files.damage(Path(consolidated)) is None
    one = load_run(run).model.state_dict()
    for name, tensor in load_file(Path(consolidated) / "model.safetensors").items():
        assert torch.equal(tensor, one[name])
    shutil.rmtree(run / "checkpoints" / "step_8")
    shutil.copytree(consolidated, run / "checkpoints" / "step_8")
    assert torch.equal(load_run(run).model.state_dict()["encoder.token_table"], one["encoder.token_table"])
    assert "it was written by one process" in says("consolidate {run} --step 2", 2)
    assert "exists already" in says("consolidate {run} --step 4 --out {run}", 2)

    (run / "checkpoints" / "step_8" / "state.json").write_text("{}")
    (run / "checkpoints" / ".step_7.tmp").mkdir()
    assert "1 of 4 checkpoints are damaged" in says("verify {run}", 2)
    assert "kept: step 4, step 6" in says("prune {run} --keep 2")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_4", "step_6"]
    for path in (run / "checkpoints").glob("*/state.json"):
        path.unlink()
    assert "nothing was removed" in says("prune {run}", 2)
    assert "at least 1" in says("prune {run} --keep 0", 2)
    assert "not a run directory" in says("list {tmp}", 2)
