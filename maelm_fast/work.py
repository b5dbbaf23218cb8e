"""One queue of work: units that any number of processes on one directory share, each done once and written down.

    OUT/ledger.jsonl   a row for every unit that was finished or failed
    OUT/locks/         a lock per unit, held while it is worked on

All that is known of a unit's past is its row. The same command therefore resumes, started again or beside itself: what
is finished is skipped, what failed before it began is tried again, what another process holds is left to it.

A row is written by a single write under a lock and flushed to disk, so a process may be killed at any moment: at worst
the last line is torn, and is cut off before the next one is written. Locks end with the process that holds them.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from filelock import FileLock, Timeout

from maelm_fast.config import require
from maelm_fast.errors import UserError
from maelm_fast.stop import Stopped, StopSignals, end_with_parent

log = logging.getLogger(__name__)

LEDGER_FILE = "ledger.jsonl"
_POLL_SECONDS = 1.0  # while other processes work on all that is left
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

Identity = tuple[str, str, str]
"""Of a unit: (key, stage, config), the last the hash of all that decides its result."""


@contextlib.contextmanager
def lock(path: Path, wait: bool = False, remove: bool = False) -> Iterator[bool]:
    """Whether the lock is ours inside the block. Without `wait` it is not if another process holds it.

    remove: remove the file again, before the lock is let go; who waits for it then takes a new one."""
    held = FileLock(path, timeout=-1 if wait else 0, poll_interval=0.01, fallback_to_soft=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held.acquire()
    except Timeout:
        yield False
        return
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise UserError(f"cannot lock {path}: {error.strerror}; choose an --out on another disk") from None
        said = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise UserError(f"cannot write {path.parent}: {said}; choose another --out") from None
    try:
        yield True
    finally:
        if remove:
            path.unlink(missing_ok=True)
        held.release()


class Ledger:
    """Rows {"key", "stage", "config", ...} with either "result" or "error"; creating the object writes nothing.

    key names a run, stage a part of its work, config the hash of all that decides the result."""

    def __init__(self, out: Path) -> None:
        self.path = out / LEDGER_FILE

    def rows(self) -> list[dict[str, Any]]:
        """All whole rows. Raises UserError for a line that is damaged but not merely torn off at the end."""
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}; choose another --out") from None
        rows = []
        for number, line in enumerate(lines[:-1], start=1):  # what follows the last line end is torn, or nothing
            try:
                row = json.loads(line)
                if not {"key", "stage", "config"} <= row.keys() or not {"result", "error"} & row.keys():
                    raise KeyError
            except (ValueError, KeyError, AttributeError):
                raise UserError(f"{self.path}: line {number} is damaged: remove that line and run again") from None
            rows.append(row)
        return rows

    def ended(self, since: int = 0) -> tuple[dict[Identity, dict[str, Any]], dict[Identity, str]]:
        """(results of finished units, errors of those that only failed). since: errors of this many rows at the
        beginning do not count."""
        results: dict[Identity, dict[str, Any]] = {}
        errors: dict[Identity, str] = {}
        for number, row in enumerate(self.rows()):
            identity = row["key"], row["stage"], row["config"]
            if "result" in row:
                results[identity] = row["result"]
            elif number >= since:
                errors[identity] = row["error"]
        return results, {identity: error for identity, error in errors.items() if identity not in results}

    def result(self, key: str, stage: str, config: str) -> dict[str, Any] | None:
        """The result of that work under that configuration, if it is finished."""
        return self.ended()[0].get((key, stage, config))

    def append(self, row: dict[str, Any]) -> None:
        """Raises UserError if it cannot be written; what was there before stays."""
        line = json.dumps({**row, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}).encode() + b"\n"
        with lock(self.path.parent / "locks" / "ledger.lock", wait=True):
            try:
                with open(self.path, "a+b", buffering=0) as file:
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
                    if file.write(line) != len(line):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    os.fsync(file.fileno())
            except OSError as error:
                raise UserError(f"cannot write {self.path}: {error.strerror}; the same command resumes") from None


T = TypeVar("T")


@dataclass(frozen=True)
class Unit(Generic[T]):
    """A piece of work with a result of its own."""

    identity: Identity
    title: str
    """Said when it begins."""
    of: T
    """What the worker gets."""
    about: dict[str, Any] = field(default_factory=dict)
    """What else its row says."""
    needs: Identity | None = None
    """The unit that must be finished first."""


class Worker(ABC, Generic[T]):
    """Does units one after another, in whichever process it was sent to, so it must pickle; what it keeps between two
    units is its own business."""

    @abstractmethod
    def do(self, of: T, stop: StopSignals) -> dict[str, Any]:
        """The result of a unit's work. Raises Stopped if `stop` asked for that and something is left to do."""

    def after(self, of: T, row: dict[str, Any]) -> str:
        """Called when the unit's row, of a "result" or an "error", is written. Returns what to say of the result."""
        return ""


@dataclass(frozen=True)
class _Queue(Generic[T]):
    units: Sequence[Unit[T]]
    worker: Worker[T]
    out: Path
    since: int
    """Rows the ledger had at the start: what failed before is tried again."""
    keep_going: bool
    say: Callable[[str], None]

    def pull(self, stop: StopSignals) -> None:
        """Works until no unit is left that is neither finished nor failed, or a stop is asked for."""
        ledger = Ledger(self.out)
        while stop.received is None:
            finished, failed = ledger.ended(self.since)
            waiting = [
                unit
                for unit in self.units
                if unit.identity not in finished and unit.identity not in failed
                if unit.needs is None or unit.needs in finished
            ]
            if not waiting:
                return
            for unit in waiting:
                with lock(self.out / "locks" / f"{unit.identity[2]}.lock") as ours:
                    # another process may have ended it between the last look and our lock
                    if ours and not any(unit.identity in ended for ended in ledger.ended(self.since)):
                        self._work(unit, ledger, stop)
                if ours:
                    break  # with a fresh look at what others have finished meanwhile
            else:
                time.sleep(_POLL_SECONDS)

    def _work(self, unit: Unit[T], ledger: Ledger, stop: StopSignals) -> None:
        """One unit, in the ledger whatever comes of it, unless it was stopped. Its lock must be held."""
        number = [other.identity for other in self.units].index(unit.identity) + 1
        place = f"[{number}/{len(self.units)}]"
        self.say(f"{place} {unit.title}")
        row = {**dict(zip(("key", "stage", "config"), unit.identity, strict=True)), **unit.about}
        try:
            row["result"] = self.worker.do(unit.of, stop)
        except Stopped as stopped:
            self.say(f"{place} {stopped}; the same command resumes from there")
            raise
        except Exception as error:  # whatever it is must not cost the other units their turn; the log has the trace
            if not self.keep_going:
                raise
            row["error"] = str(error)
            if not isinstance(error, UserError):
                log.exception("%s", unit.title)
                row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        ledger.append(row)
        said = self.worker.after(unit.of, row)
        if "error" in row:
            said = f"failed: {row['error']}"
            _free_memory()
        if said:
            self.say(f"{place} {said}")


def say(text: str) -> None:
    print(text, flush=True)


def work(
    units: Sequence[Unit[T]],
    worker: Worker[T],
    out: Path,
    *,
    processes: int = 1,
    gpus: bool = False,
    keep_going: bool = True,
    say: Callable[[str], None] = say,
) -> None:
    """Works until every unit is finished or has failed since now, in this process or in `processes` of its own.

    units: in the order in which they are taken up. gpus: give each process one GPU, in turn, if there are any.
    keep_going: a unit that fails costs only itself and is recorded; otherwise its error is raised.

    Raises Stopped after SIGTERM or SIGINT; UserError if a process died."""
    require(processes >= 1, f"--workers must be at least 1, not {processes}")
    queue = _Queue(units, worker, out, len(Ledger(out).rows()), keep_going, say)
    with StopSignals() as stop:
        if processes == 1:
            queue.pull(stop)
        else:
            _start(queue, processes, _gpus() if gpus else [], stop)
    if stop.received is not None:
        raise Stopped(received=stop.received)


def _start(queue: _Queue[T], count: int, gpus: list[str], stop: StopSignals) -> None:
    """Processes that each see one GPU, in turn, or have their share of the threads, and end with this one."""
    import torch

    threads = max(1, torch.get_num_threads() // count)
    spawn = multiprocessing.get_context("spawn")
    processes = []
    for i in range(count):
        changes = {"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} if gpus else {"OMP_NUM_THREADS": str(threads)}
        process = spawn.Process(target=_process, args=(queue, threads), name=f"worker {i + 1}")
        with _environment(changes):
            process.start()
        processes.append(process)
    told = False
    while alive := [process.sentinel for process in processes if process.is_alive()]:
        multiprocessing.connection.wait(alive, _POLL_SECONDS)
        if stop.received is not None and not told:
            told = True
            for process in processes:
                process.terminate()
    dead = [f"{process.name} (exit code {process.exitcode})" for process in processes if process.exitcode]
    asked = stop.received is not None  # a process that was still starting ends by the signal
    require(asked or not dead, f"{', '.join(dead)} ended before all was done; the same command resumes")


def _process(queue: _Queue[T], threads: int) -> None:
    import torch

    with StopSignals() as stop:
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
        torch.set_num_threads(threads)
        end_with_parent()
        try:
            queue.pull(stop)
        except Stopped:
            pass  # the others go on, unless their parent tells them too
        except UserError as error:
            sys.exit(f"error: {error}")


def _gpus() -> list[str]:
    """Those that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    if not torch.cuda.is_available():
        return []
    visible, count = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()
    return visible.split(",")[:count] if visible else [str(i) for i in range(count)]  # CUDA stops at a wrong one


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Variables that a process started inside the block begins with."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _free_memory() -> None:
    """Of a unit that ended for want of it, so that the next one has it."""
    import torch

    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
