"""Who is missing when processes wait for one another: a heartbeat of each, and a thread that looks at them.

A collective that times out names the process that waited. The one to look at is the one that others wait for: it is
dead, and its file is no longer written, or it is behind them all. A process counts its changes of phase, which are the
same ones in all processes, and its thread writes the count, step and phase every `interval` seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FAILED = "maelm_fast/failed"


def interval(timeout_s: float) -> float:
    """Seconds between heartbeats."""
    return min(max(timeout_s / 20, 0.25), 5.0)


class Watch(threading.Thread):
    """Writes this process's heartbeat, and ends the process if another one fails, or if nothing happens in it for
    timeout_s: a thread in a collective, or in a file system that does not answer, cannot be interrupted otherwise."""

    def __init__(self, rank: int, world: int, flags: Any, timeout_s: float, grace_s: float = 5.0) -> None:
        """flags: a store of torch.distributed that no other thread uses for what may take long. grace_s: for a process
        to end by itself when another has failed, or when its line has been said."""
        super().__init__(daemon=True, name="heartbeat")
        self.rank, self.world, self.flags = rank, world, flags
        self.timeout_s, self.grace_s, self.interval = timeout_s, grace_s, interval(timeout_s)
        self.directory: Path | None = None
        self._place = (0, 0, "starting", time.monotonic())  # replaced as one, since two threads use it
        self._ended, self._once = threading.Event(), threading.Lock()
        self._first: bool | None = None

    @property
    def phase(self) -> str:
        return self._place[2]

    def at(self, phase: str, step: int | None = None) -> None:
        """A phase begins; the same one again only says that this process is alive."""
        count, before, its, _ = self._place
        step = before if step is None else step
        self._place = (count + ((step, phase) != (before, its)), step, phase, time.monotonic())

    def clear(self, directory: Path) -> None:
        """Removes what an earlier start has left, perhaps of more processes."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)

    def run(self) -> None:
        while not self._ended.wait(self.interval):
            self.beat()
            if self._another_failed():
                self._leave()
            elif time.monotonic() - self._place[3] > self.timeout_s:
                missing = self.missing()
                if missing and self.first_to_fail():
                    print(f"error: {missing}", file=sys.stderr, flush=True)
                self._leave()

    def end(self) -> None:
        """The process ends as it should."""
        self._ended.set()
        if self.directory is not None:
            with contextlib.suppress(OSError):
                self._file(self.rank).unlink(missing_ok=True)
                self.directory.rmdir()  # the last one removes it

    def first_to_fail(self) -> bool:
        """Whether this is the first process with an error, so that it is to say it. Once; afterwards no."""
        with self._once:
            if self._first is None:
                self._first = self._ask(lambda: self.flags.add(_FAILED, 1) == 1) is not False
                return self._first
            return False

    def missing(self) -> str | None:
        """Who is dead or behind, as "rank 3: last seen at step 812, waiting for data, 95 s ago"; None if another
        process has said it meanwhile. Takes some intervals, in which those that live write their heartbeats."""
        if self.directory is None:
            return "another process does not answer"
        for _ in range(3):
            if self._another_failed(no_answer=True):
                return None
            self.beat()
            time.sleep(self.interval)
        beats = {rank: self._read(rank) for rank in range(self.world)}
        seen = {rank: beat for rank, beat in beats.items() if beat is not None}
        if len(seen) < self.world:
            return "; ".join(f"rank {rank}: never seen" for rank in beats if rank not in seen)
        newest = max(beat["written"] for beat in seen.values())
        found = [rank for rank, beat in seen.items() if newest - beat["written"] > 2.5 * self.interval]
        least = min(beat["count"] for beat in seen.values())
        found = found or [rank for rank, beat in seen.items() if beat["count"] == least]
        return "; ".join(
            f"rank {rank}: last seen at step {seen[rank]['step']:,}, {seen[rank]['phase']}, "
            f"{newest - seen[rank]['written'] + seen[rank]['seconds']:.0f} s ago"
            for rank in found
        )

    def _file(self, rank: int) -> Path:
        assert self.directory is not None
        return self.directory / f"rank_{rank}.json"

    def beat(self) -> None:
        """Writes where this process is."""
        count, step, phase, since = self._place
        seconds = time.monotonic() - since  # in this phase
        beat = {"step": step, "phase": phase, "seconds": seconds, "count": count, "written": time.time()}
        if self.directory is not None:
            with contextlib.suppress(OSError):  # a disk that is full is not this thread's business
                self._file(self.rank).write_text(json.dumps(beat) + "\n", encoding="utf-8")

    def _read(self, rank: int) -> dict[str, Any] | None:
        if self.directory is None:
            return None
        for _ in range(3):  # it may just be being written
            with contextlib.suppress(OSError, ValueError):
                beat: dict[str, Any] = json.loads(self._file(rank).read_text(encoding="utf-8"))
                return beat
            time.sleep(0.1)
        return None

    def _another_failed(self, no_answer: bool = False) -> bool:
        """no_answer: what it is if the store has gone, with torchrun or with the machine that had it."""
        answer = self._first is None and self._ask(lambda: self.flags.check([_FAILED]))
        return no_answer if answer is None else answer is True

    def _ask(self, question: Callable[[], bool]) -> bool | str | None:
        """What the store answers; None if it has gone, and "silent" if it says nothing for an interval: its machine
        may stand still, and would be waited for without end."""
        answers: list[bool | None] = []

        def ask() -> None:
            try:
                answers.append(question())
            except Exception:
                answers.append(None)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(self.interval)
        return answers[0] if answers else "silent"

    def _leave(self) -> None:
        if not self._ended.wait(self.grace_s):
            os._exit(2)
