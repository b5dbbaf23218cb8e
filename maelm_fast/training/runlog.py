"""What a run writes and shows as it goes: metrics.jsonl, and a live line on a terminal or plain lines elsewhere."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from typing import Any, Self

from maelm_fast.data.files import writing
from maelm_fast.training.files import write_text
from maelm_fast.training.rundir import RunDir

_PLAIN_SECONDS = 10.0  # between progress lines where there is no terminal to redraw


class Metrics:
    """metrics.jsonl: one JSON object a line, each written once and whole. Nothing if it is not `on`: of several
    processes one writes it."""

    def __init__(self, run: RunDir, step: int, on: bool = True) -> None:
        """Opens the file to go on after `step`: rows beyond it, of updates that a crash undid, and an unfinished last
        line are removed first, so that every update is in the file once."""
        self.on, self._path = on, run.metrics_file
        if not on:
            return
        kept = [row for row in run.metrics() if row["step"] <= step]
        with writing(run.metrics_file, "move the run elsewhere"):
            if run.metrics_file.exists():
                write_text(run.metrics_file, "".join(json.dumps(row) + "\n" for row in kept))
            self._file = open(run.metrics_file, "a", encoding="utf-8")  # noqa: SIM115  closed by close()

    def write(self, row: dict[str, Any]) -> None:
        """Numbers that are not finite, a skipped update's, are written as null: JSON has no others."""
        if not self.on:
            return
        row = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}
        with writing(self._path, "move the run elsewhere"):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Before a save, which costs only itself if this fails: OSError."""
        if not self.on:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(f"cannot write {self._path}: {error.strerror}") from None

    def close(self) -> None:
        if self.on:
            self._file.close()


class Display:
    """Progress for people. On a terminal one line is redrawn; elsewhere a line is printed every few seconds. Nothing if
    it is not `on`: of several processes one shows it."""

    def __init__(self, first_step: int, max_steps: int, on: bool = True) -> None:
        self.max_steps, self.on = max_steps, on
        self._first, self._start = first_step, time.monotonic()
        self._last_plain = 0.0
        self._progress = None
        if on and sys.stdout.isatty():
            from rich.progress import BarColumn, Progress, TextColumn

            self._progress = Progress(
                TextColumn("{task.fields[text]}"),
                BarColumn(bar_width=10),
                redirect_stderr=sys.stderr.isatty(),  # what is logged goes above the line; a file stays a file
            )
            self._task = self._progress.add_task("", total=max_steps, completed=first_step, text="starting")

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, row: dict[str, Any]) -> None:
        text = (
            f"step {row['step']:,}/{self.max_steps:,}  loss {row['loss']:.3f}  "
            f"accuracy {row['accuracy']:.1%}  {row['tokens_per_s']:,.0f} tok/s"
        )
        if row.get("mfu") is not None:
            text += f"  MFU {row['mfu']:.1%}"
        self.show(row["step"], text)

    def show(self, step: int, text: str) -> None:
        """A line of progress after `step` updates, with the time that is left added."""
        text += f"  ETA {self._eta(step)}"
        if self._progress is not None:
            self._progress.update(self._task, completed=step, text=text)
        elif self.on and (time.monotonic() - self._last_plain >= _PLAIN_SECONDS or step == self.max_steps):
            self._last_plain = time.monotonic()
            print(text, flush=True)

    def say(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(text, highlight=False)
        elif self.on:
            print(text, flush=True)

    def _eta(self, step: int) -> str:
        done = step - self._first
        if not done:
            return "-"
        seconds = round((time.monotonic() - self._start) / done * (self.max_steps - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
