"""How every benchmark starts and ends: options spelt alike, an error in one line, and one loop that prints rows and
writes them as they become known."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from benchmarks import report_ops
from benchmarks.measure import Failed, append_rows
from benchmarks.rows import FORMATS, Row
from benchmarks.tables import machine, spread
from maelm_fast.config import RuntimeConfig, require
from maelm_fast.errors import UserError
from maelm_fast.training.hardware import choose_precision, cpu_has_bf16

ALSO = ("updates_to_target", "cpu_seconds_to_target", "cpu_seconds", "loss", "peak_memory_mb")  # told, of each row


class Parser(argparse.ArgumentParser):
    """With the options that several benchmarks have; rounds: their default."""

    def __init__(
        self,
        name: str,
        doc: str | None,
        rounds: int | None = None,
        device: str | None = None,
        precision: bool = False,
        out: bool = True,
    ) -> None:
        super().__init__(prog=f"python -m benchmarks.{name}", description=(doc or "").splitlines()[0])
        if device:
            default = "cuda" if device == "auto" and torch.cuda.is_available() else "cpu"
            self.add_argument("--device", choices=["cpu", "cuda"], default=default)
        if precision:
            self.add_argument(
                "--precision", choices=["auto", "bf16", "fp32"], default="auto", help="auto: as a run chooses"
            )
        if rounds is not None:
            self.add_argument("--rounds", type=count, default=rounds)
        if out:
            self.add_argument("--out", type=Path, help="JSONL file that the rows are added to")

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def count(text: str) -> int:
    """The type of an option."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return int(text)


def several(*known: str, of: Callable[[str], Any] = str) -> Callable[[str], list[Any]]:
    """The type of an option with values separated by commas. known: what there is, if that is known."""

    def values(text: str) -> list[Any]:
        parts = [part for part in text.split(",") if part]
        if unknown := [part for part in parts if known and part not in known]:
            raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; there are: {', '.join(known)}")
        try:
            return [of(part) for part in parts]
        except ValueError:
            raise argparse.ArgumentTypeError(f"numbers separated by commas, not {text}") from None

    return values


def start(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int | None], arguments: Sequence[str] | None
) -> int:
    """The exit status of run: 2 for what is asked wrongly, 1 where a gate fails."""
    try:
        options = parser.parse_args(arguments)
        on_gpu = getattr(options, "device", "cpu") == "cuda" and not getattr(options, "list", False)
        require(not on_gpu or torch.cuda.is_available(), "no CUDA device is visible")
        return run(options) or 0
    except (UserError, Failed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1


def precision_of(options: argparse.Namespace) -> str:
    """What a run would choose; bf16 without instructions for it is said to be slow."""
    if options.device == "cpu" and not cpu_has_bf16():
        print("this CPU has no bf16 matrix instructions; fp32 is the precision to train in here, for every contestant")
    return choose_precision(RuntimeConfig(precision=options.precision), torch.device(options.device))


def recorded(format_: str, rows: Iterable[Row], out: Path | None, alike: Sequence[str] = ()) -> list[Row]:
    """Prints each row, and adds it to the file before the next one is made (alike: see append_rows); then the report's
    tables of them."""
    found: list[Row] = []
    for row in rows:
        if not found and "load" in row:  # a projection has none
            print(f"{machine(row)}, load {row['load']}, commit {row['commit']}")
        print(told(format_, row), flush=True)
        found.append(row)
        if out:
            append_rows(out, [row], alike)
    timed = [row for row in found if not row.get("skipped")]
    if format_ in report_ops.TABLES:
        print("", *(table.text() for table in report_ops.tables(format_, timed)), sep="\n\n")
    return found


def ours_failed(rows: Iterable[Row]) -> int:
    """The exit status."""
    return int(any(row["contestant"] == "ours" and row.get("skipped") for row in rows))


def told(format_: str, row: Row) -> str:
    """What tells it from other rows of its run, and its numbers, or why it has none."""
    names = dict.fromkeys([*(FORMATS[format_].row if format_ in FORMATS else ()), "contestant", "model"])
    words = [f"{name} {row[name]}" for name in names if row.get(name) is not None]
    values = [f"{name} {spread(v)}" for name, v in row.items() if isinstance(v, dict) and "median" in v]
    values += [f"{name} {row[name]:g}" for name in ALSO if row.get(name) is not None]
    return f"  {', '.join(words)}: {row.get('skipped') or '; '.join(values)}"
