"""The ledger survives what kills a process, and the locks keep processes out of each other's way."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from maelm_fast.errors import UserError
from maelm_fast.training.ledger import LEDGER_FILE, Ledger, lock

ROOT = Path(__file__).resolve().parents[2]
APPEND = """
import sys
from pathlib import Path
from maelm_fast.training.ledger import Ledger
for i in range(200):
    Ledger(Path(sys.argv[1])).append({"key": sys.argv[2], "stage": str(i), "config": "c", "result": {"i": i}})
"""


def row(key: str, config: str = "c", **outcome: object) -> dict[str, object]:
    return {"key": key, "stage": "pretraining", "config": config, **(outcome or {"result": {"loss": 1.0}})}


def test_the_last_word_counts_and_another_configuration_does_not(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert ledger.rows() == []
    ledger.append(row("a", error="out of memory"))
    assert ledger.result("a", "pretraining", "c") is None
    ledger.append(row("a"))
    assert ledger.result("a", "pretraining", "c") == {"loss": 1.0}
    for other in (("b", "pretraining", "c"), ("a", "rank at 1", "c"), ("a", "pretraining", "d")):
        assert ledger.result(*other) is None


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_torn_last_line_is_passed_over_and_cut_off(tmp_path: Path, kept: int) -> None:
    ledger = Ledger(tmp_path)
    ledger.append(row("a"))
    whole = ledger.path.read_bytes()
    ledger.path.write_bytes(whole + whole[:kept])
    assert [r["key"] for r in ledger.rows()] == ["a"]
    ledger.append(row("b"))
    assert [r["key"] for r in ledger.rows()] == ["a", "b"]
    assert ledger.path.read_bytes().startswith(whole)


@pytest.mark.parametrize("line", [b"{]", b"[]", b'{"key": "a"}'])
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes) -> None:
    ledger = Ledger(tmp_path)
    ledger.append(row("a"))
    ledger.path.write_bytes(ledger.path.read_bytes() + line + b"\n")
    with pytest.raises(UserError, match=f"{LEDGER_FILE}: line 2 is damaged"):
        ledger.rows()


def test_a_place_that_is_no_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot read .*choose another --out"):
        Ledger(tmp_path / "file").rows()
    with pytest.raises(UserError, match=r"cannot write .*choose another --out"), lock(tmp_path / "file" / "a.lock"):
        pass


def test_two_processes_write_one_ledger(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", APPEND, str(tmp_path), key], cwd=ROOT) for key in ("one", "other")
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    rows = Ledger(tmp_path).rows()
    for key in ("one", "other"):
        assert [r["stage"] for r in rows if r["key"] == key] == [str(i) for i in range(200)]


def test_a_lock_is_held_by_one_and_let_go(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "cell.lock"
    with lock(path) as first, lock(path) as second:
        assert (first, second) == (True, False)
    with lock(path, wait=True) as again:
        assert again


def test_a_disk_without_locks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(UserError, match=r"cannot lock .*on another disk"), lock(tmp_path / "cell.lock"):
        pass
