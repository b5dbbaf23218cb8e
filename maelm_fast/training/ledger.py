"""What has been finished, as one append-only JSONL file, and the locks by which several processes share the work.

A row is written by a single write under a lock and flushed to disk, so a process may be killed at any moment: at worst
the last line is torn, and is cut off before the next one is written. Locks end with the process that holds them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maelm_fast.errors import UserError

LEDGER_FILE = "ledger.jsonl"


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

    def result(self, key: str, stage: str, config: str) -> dict[str, Any] | None:
        """The result of that work under that configuration; None if it is not finished, or failed when last tried."""
        wanted = (key, stage, config)
        last = next((r for r in reversed(self.rows()) if (r["key"], r["stage"], r["config"]) == wanted), None)
        return last.get("result") if last else None

    def append(self, row: dict[str, Any]) -> None:
        """Raises UserError if it cannot be written; what was there before stays."""
        line = json.dumps(row).encode() + b"\n"
        try:
            with open(self.path, "a+b", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; the same command goes on") from None


@contextlib.contextmanager
def lock(path: Path, wait: bool = False) -> Iterator[bool]:
    """Whether the lock is ours inside the block. Without `wait` it is not if another process holds it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "w")  # noqa: SIM115  never removed: a process that waits for it has it open
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another --out") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            ours = True
        except BlockingIOError:
            ours = False
        except OSError as error:
            raise UserError(f"cannot lock {path}: {error.strerror}; choose an --out on another disk") from None
        yield ours
