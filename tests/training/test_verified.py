"""A run's data are those that it began with, and a start that fails leaves nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from maelm_fast.config import BackendConfig
from maelm_fast.data.token_store import Shard, TokenStore, verify_shard
from maelm_fast.errors import UserError
from maelm_fast.training import verified
from maelm_fast.training.job import pretrain
from maelm_fast.training.parallel import Processes
from maelm_fast.training.verified import verify_data
from tests.training.runs import config

SHORT = config(optim={"max_steps": 1, "warmup_steps": 0}, runtime={"eval_samples": 5}, metrics={"rank_every": 0})

ALONE = Processes(SHORT.runtime)


@pytest.fixture
def data(store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(store, tmp_path / "data"))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards that were read for their checksum, as it goes on."""
    names = list[str]()

    def listed(directory: Path, shard: Shard) -> None:
        names.append(shard.name)
        verify_shard(directory, shard)

    monkeypatch.setattr(verified, "verify_shard", listed)
    return names


def flip(path: Path) -> None:
    """One bit in the middle, at the same time as before as far as the file's own time says."""
    stat, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    with open(path, "r+b") as file:
        file.write(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def edit(data: Path, **changes: object) -> None:
    path = data / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_shard_is_compared_once_and_again_when_it_was_touched(
    data: Path, tmp_path: Path, compared: list[str]
) -> None:
    record, both = tmp_path / "verified.json", ["train-00000.arrow", "validation-00000.arrow"]
    for touched, expected in [((), both), ((), []), ([both[1]], [both[1]]), (["record"], both)]:
        for name in touched:
            if name == "record":
                record.write_text('{"files": [')
            else:
                (data / name).touch()
        compared.clear()
        verify_data(record, TokenStore(data), ALONE)
        assert compared == expected
    shutil.copytree(data, tmp_path / "moved")
    compared.clear()
    verify_data(record, TokenStore(tmp_path / "moved"), ALONE)
    assert compared == both


@pytest.mark.parametrize("started", [False, True])
def test_a_flipped_bit_in_a_shard_is_noticed(started: bool, data: Path, tmp_path: Path) -> None:
    if started:
        pretrain(SHORT, data, tmp_path / "run")
    flip(data / "train-00000.arrow")
    with pytest.raises(UserError, match=r"train-00000\.arrow is damaged \(checksum\): copy the store again"):
        pretrain(SHORT, data, tmp_path / "run")
    assert (tmp_path / "run").exists() == started


def test_an_edited_manifest_is_noticed(data: Path, tmp_path: Path) -> None:
    edit(data, seq_len=31)
    with pytest.raises(UserError, match=r"manifest\.json was changed after it was written \(checksum\)"):
        pretrain(SHORT, data, tmp_path / "run")
    edit(data, seq_len=32)
    assert TokenStore(data)


def test_a_manifest_names_files_of_its_own_store_only(data: Path) -> None:
    manifest = json.loads((data / "manifest.json").read_text())
    shutil.move(data / "train-00000.arrow", data.parent)
    manifest["splits"]["train"]["shards"][0]["name"] = "../train-00000.arrow"
    edit(data, splits=manifest["splits"], sha256="")
    with pytest.raises(UserError, match="names a file outside the store"):
        TokenStore(data)


def test_a_manifest_of_before_is_recorded_and_compared_from_then_on(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Written at a time when a manifest had no checksum of its own."""
    edit(data, sha256="")
    record = tmp_path / "verified.json"
    for said in (1, 0):
        verify_data(record, TokenStore(data), ALONE)
        assert capsys.readouterr().out.count("from now on this run compares it") == said
    edit(data, cased=True)
    with pytest.raises(UserError, match=r"manifest\.json was changed since the run was started"):
        verify_data(record, TokenStore(data), ALONE)


def test_what_takes_long_is_said(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified, "TELL_BYTES", 1)
    monkeypatch.setattr(verified, "REPORT_SECONDS", -1.0)
    said: list[str] = []
    verify_data(tmp_path / "verified.json", TokenStore(data), ALONE, said.append)
    assert [line.split(": ")[1].split()[0] for line in said] == ["comparing", "compared", "compared"]
    verify_data(tmp_path / "verified.json", TokenStore(data), ALONE, said.append)
    assert len(said) == 3


def test_a_disk_that_is_full_at_the_start_leaves_nothing(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each file in turn, until they all could be written."""
    sync, free = os.fsync, 0

    def full(descriptor: int) -> None:
        full.left -= 1  # type: ignore[attr-defined]
        if full.left < 0:  # type: ignore[attr-defined]
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr("os.fsync", full)
    while True:
        full.left = free  # type: ignore[attr-defined]
        with pytest.raises(UserError, match="No space left on device") as refused:
            pretrain(SHORT, store, tmp_path / "not" / "yet")
        if "metrics.jsonl: No space left" in str(refused.value):  # it is a run by then
            break
        assert str(refused.value).endswith("free some space, or choose another --out")
        assert not list(tmp_path.iterdir())
        free += 1
    assert free == 4


@pytest.mark.parametrize("existed", [False, True])
def test_a_backend_that_cannot_run_leaves_nothing(
    existed: bool, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    out = tmp_path / "runs" / "one"
    if existed:
        out.mkdir(parents=True)
    asked = config(runtime={"backend": BackendConfig(add_norm="triton")})
    with pytest.raises(UserError, match="add_norm: backend 'triton' cannot run"):
        pretrain(asked, store, out)
    assert [path.name for path in tmp_path.rglob("*")] == (["runs", "one"] if existed else [])


def test_a_start_that_was_killed_before_it_was_a_run_is_started_again(store: Path, tmp_path: Path) -> None:
    (tmp_path / "verified.json.tmp").write_text("{")
    (tmp_path / ".lock").touch()
    pretrain(SHORT, store, tmp_path)
    with pytest.raises(UserError, match="is not a run"):
        pretrain(SHORT, store, tmp_path / "checkpoints")


def test_going_on_in_another_precision_is_said(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = config(optim={"max_steps": 2, "warmup_steps": 0}, runtime={"eval_samples": 5, "save_every": 1})
    pretrain(two, store, tmp_path)
    for precision, said in (("fp32", 0), ("bf16", 1), ("bf16", 0)):
        shutil.rmtree(tmp_path / "checkpoints" / "step_2")
        capsys.readouterr()
        asked = config(**{"optim": vars(two.optim), "runtime": {**vars(two.runtime), "precision": precision}})
        pretrain(asked, store, tmp_path)
        assert capsys.readouterr().out.count("in bf16 from here on, until now in fp32") == said


@pytest.mark.parametrize("text", ['{"x', "{}", "[1]", "\0"])
def test_a_damaged_list_of_starts_is_one_line(text: str, store: Path, tmp_path: Path) -> None:
    pretrain(SHORT, store, tmp_path)
    (tmp_path / "env.json").write_text(text)
    with pytest.raises(UserError, match=r"env\.json is damaged; it is only a record of the run's starts: remove it$"):
        pretrain(SHORT, store, tmp_path)
