"""The ledger survives what kills a process, the locks keep processes out of each other's way, and the queue does every
unit once. With several processes: tests/paper/test_sweep.py."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from maelm_fast import work as module
from maelm_fast.errors import UserError
from maelm_fast.stop import Stopped, StopSignals
from maelm_fast.work import LEDGER_FILE, Ledger, Unit, Worker, lock, work

ROOT = Path(__file__).resolve().parents[1]
APPEND = """
import sys
from pathlib import Path
from maelm_fast.work import Ledger
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


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_disk_without_locks_is_one_line(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock by the file's mere existence would outlive a process that was killed."""

    def none(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(UserError, match=r"cannot lock .*on another disk"), lock(tmp_path / "cell.lock"):
        pass


def test_a_lock_file_is_removed_if_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with lock(path, remove=True) as ours:
        assert ours
        assert path.exists()
        with lock(path, remove=True) as theirs:
            assert not theirs
        assert path.exists(), "it is the holder's to remove"
    assert not path.exists()


def unit(name: str, first: str | None = None) -> Unit[str]:
    needs = None if first is None else unit(first).identity
    return Unit((name, "sum", f"hash of {name}"), f"sum {name}", name, {"length": len(name)}, needs)


@dataclass
class Adder(Worker[str]):
    """Fails at some units; a signal comes during some, before or after the last moment to stop."""

    fails: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    begun: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def do(self, name: str, stop: StopSignals) -> dict[str, Any]:
        self.begun.append(name)
        if name in self.fails:
            raise RuntimeError("no\nmemory") if name == "b" else UserError("it is odd")
        if name in self.stops + self.late:
            signal.raise_signal(signal.SIGINT)
        if (received := stop()) and name in self.stops:
            raise Stopped(5, received)
        return {"sum": sum(map(ord, name))}

    def after(self, name: str, row: dict[str, Any]) -> str:
        self.rows.append(row)
        return str(row.get("result", {}).get("sum"))


UNITS = [unit("b1", "b"), unit("a"), unit("b"), unit("c"), unit("a1", "a")]


def outcomes(out: Path) -> list[tuple[str, Any]]:
    return [(row["key"], row.get("result", row.get("error"))) for row in Ledger(out).rows()]


def test_units_in_order_after_what_they_need_and_a_failure_costs_only_what_needs_it(tmp_path: Path) -> None:
    said: list[str] = []
    first = Adder(fails=("b", "c"))
    work(UNITS, first, tmp_path, say=said.append)
    assert first.begun == ["a", "b", "c", "a1"]
    assert outcomes(tmp_path) == [
        ("a", {"sum": 97}),
        ("b", "RuntimeError: no memory"),
        ("c", "it is odd"),
        ("a1", {"sum": 146}),
    ]
    row = Ledger(tmp_path).rows()[0]
    assert list(row) == ["key", "stage", "config", "length", "result", "time"]
    assert (row["stage"], row["config"], row["length"]) == ("sum", "hash of a", 1)
    assert said[:4] == ["[2/5] sum a", "[2/5] 97", "[3/5] sum b", "[3/5] failed: RuntimeError: no memory"]
    assert [row["key"] for row in first.rows] == first.begun

    again = Adder()
    work(UNITS, again, tmp_path, say=said.append)
    assert again.begun == ["b", "b1", "c"], "what failed is tried again, what is finished is not"
    work(UNITS, again, tmp_path, say=said.append)
    assert again.begun == ["b", "b1", "c"]


def test_what_another_process_ended_before_our_lock_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(path: Path, **options: bool) -> Any:
        if path.name == "hash of a.lock" and not Ledger(tmp_path).rows():
            Ledger(tmp_path).append(
                {**dict(zip(("key", "stage", "config"), unit("a").identity, strict=True)), "result": {"sum": 0}}
            )
        return lock(path, **options)

    monkeypatch.setattr(module, "lock", late)
    worker = Adder()
    work([unit("a"), unit("b")], worker, tmp_path)
    assert worker.begun == ["b"]
    assert outcomes(tmp_path) == [("a", {"sum": 0}), ("b", {"sum": 98})]


def test_a_failure_is_raised_where_nothing_else_is_worth_doing(tmp_path: Path) -> None:
    worker = Adder(fails=("b",))
    with pytest.raises(RuntimeError, match="memory"):
        work(UNITS, worker, tmp_path, keep_going=False)
    assert outcomes(tmp_path) == [("a", {"sum": 97})]


@pytest.mark.parametrize("late", [False, True])
def test_a_stop_ends_the_queue_and_a_unit_that_was_stopped_is_not_written_down(late: bool, tmp_path: Path) -> None:
    """late: the unit gets to its end all the same."""
    said: list[str] = []
    worker = Adder(late=("b",)) if late else Adder(stops=("b",))
    with pytest.raises(Stopped) as stopped:
        work(UNITS, worker, tmp_path, say=said.append)
    assert stopped.value.code == 130
    assert worker.begun == ["a", "b"]
    assert outcomes(tmp_path) == [("a", {"sum": 97}), ("b", {"sum": 98})][: 2 if late else 1]
    ending = "98" if late else "SIGINT: stopped at step 5; the same command resumes from there"
    assert said[-1] == f"[3/5] {ending}"
