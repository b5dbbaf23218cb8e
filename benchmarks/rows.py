"""Reads the result files; the newest rows of each setting count.

A case is what one run of train_step measured in one setting. It counts whole, so that its ratios belong together. Of a
contestant the run's last row counts: the one before it was written in case the run is cut off.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from maelm_fast.errors import UserError

PHASES = ("data", "forward", "backward", "optimizer")
SETTING = ("device", "precision", "batch", "seq", "rate", "lengths")  # of a case, with its dropout and bias
GPU = "NVIDIA"  # what the name of every GPU begins with
COMPILED = "_compiled"
Row = dict[str, Any]


class Format:
    """Of a benchmark's rows. table: the fields that all rows of one table have in common; row: those which tell its
    rows apart. Of rows alike in both the newest run's count."""

    def __init__(self, table: str, row: str) -> None:
        self.table, self.row = table.split(), row.split()

    def tables(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """The newest rows, by table."""
        yield from grouped(newest_rows(rows, [*self.table, *self.row]), *self.table).values()


FORMATS = {  # a file is called FORMAT.jsonl or FORMAT_*.jsonl; what train_step's rows are of is a Case
    "ops": Format("device sequences length width dtype", "op phase"),
    "attention": Format("device", "case tokens dtype bias dropout phase"),
    "loader": Format("device", "store mode store_bytes masks micro_batch workers"),
    "pretraining": Format("device precision", "model batch seq workers"),
    "ceilings": Format("device precision batch seq", "ceiling model"),
    "finetune": Format("device task hidden_size layers batch examples precision dropout", ""),
    "speedrun": Format("track device precision data", "entry seed"),
    "patch": Format("device precision layers hidden_size vocab dropout", "mix batch"),
    "executed": Format("", "triton kernel shape dropout bias unit"),
    "projection": Format("device precision batch seq rate", "dropout bias model"),
}


@dataclass
class Case:
    """Rows by contestant, in the order of the file. A contestant that has no bias, or another dropout by its nature,
    does not make it another case."""

    rows: dict[str, Row] = field(default_factory=dict)

    @property
    def shared(self) -> Row:
        """A row to read from it what all have in common."""
        return next(iter((self.timed or self.rows).values()))

    @property
    def timed(self) -> dict[str, Row]:
        return {name: row for name, row in self.rows.items() if row["skipped"] is None}

    @property
    def compared(self) -> bool:
        """Whether the run came to the contestants' turns."""
        return any(row["ratios"] for row in self.timed.values())

    @property
    def on_gpu(self) -> bool:
        return bool(self.shared["device"].startswith(GPU))

    @property
    def dropout(self) -> float:
        return float(max(row["dropout"] for row in self.rows.values()))

    @property
    def bias(self) -> str:
        return next((row["bias"] for row in self.rows.values() if row["bias"] != "none"), "none")

    @property
    def setting(self) -> tuple[Any, ...]:
        return (*(self.shared[name] for name in SETTING), -self.dropout, self.bias)

    @property
    def regularisation(self) -> str:
        return regularisation(self.dropout, self.bias)


@dataclass
class Results:
    """cases: the newest of each setting, of those that were not cut off if there is one. rows: of the other formats, as
    they lie in the files. unused: what was not read, and why."""

    cases: list[Case]
    rows: dict[str, list[Row]]
    unused: list[str]


def read(root: Path) -> Results:
    """What lies under root/benchmarks/results. UserError with file and line for a row that is not of its format."""
    cases: list[Case] = []
    others: dict[str, list[Row]] = {}
    unused = []
    known = ("train_step", *FORMATS)
    for path in sorted((root / "benchmarks" / "results").glob("*.jsonl")):
        name = path.relative_to(root).as_posix()
        format_ = next((f for f in known if path.stem == f or path.stem.startswith(f + "_")), None)
        if format_ is None:
            unused.append(f"{name}: not used, its name begins with none of {', '.join(known)}")
        elif format_ == "train_step":
            cases += read_cases(path, name)
        else:
            others.setdefault(format_, []).extend(read_rows(path, name, format_))
    newest = {case.setting: case for case in sorted(cases, key=lambda case: (case.compared, when(case.shared)))}
    order = sorted(newest.values(), key=lambda c: (not c.on_gpu, c.shared["lengths"] != "full", c.setting))
    return Results(order, others, unused)


def read_rows(path: Path, name: str, format_: str) -> Iterator[Row]:
    """Those that were not skipped, of a format that is not train_step's."""
    for where, row in read_lines(path, name):
        if not isinstance(row.get("skipped"), str):
            check(row, [] if format_ == "ops" else [*FORMATS[format_].table, *FORMATS[format_].row], where)
            yield row


def read_cases(path: Path, name: str) -> list[Case]:
    """Those of which something was timed."""
    cases: dict[tuple[Any, ...], Case] = {}
    for where, row in read_lines(path, name):
        check(row, [*SETTING, "model", "skipped", "dropout", "bias"], where)
        case = cases.setdefault((row["date"], *(row[f] for f in SETTING)), Case())
        if row["model"] in case.rows and case.rows[row["model"]].get("rounds") == row.get("rounds"):
            raise UserError(f"{where}: a second row of {row['model']} in the run of {row['date']}; remove one")
        case.rows[row["model"]] = row
    return [case for case in cases.values() if case.timed]


def read_lines(path: Path, name: str) -> Iterator[tuple[str, Row]]:
    """Where a row stands, and the row."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name}: cannot be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise UserError(f"{name}:{number}: not a row, which is one JSON object on one line")
        yield f"{name}:{number}", row


def check(row: Row, fields: Iterable[str], where: str) -> None:
    """That the row has what it is sorted by. (What else a table lacks is said when it is made: report.py.)"""
    for name in ("date", "commit", *fields):
        if name not in row:
            raise UserError(f"{where}: the row has no {name}")
    try:
        when(row)
    except (TypeError, ValueError):
        raise UserError(f"{where}: date cannot be {json.dumps(row['date'])}") from None


def regularisation(dropout: float, bias: str) -> str:
    return f"dropout {dropout:g}, {'no' if bias == 'none' else bias.upper()} bias"


def when(row: Row) -> datetime:
    return datetime.fromisoformat(row["date"])


def newest_rows(rows: Sequence[Row], alike: Sequence[str]) -> list[Row]:
    """Of rows alike in these fields, the newest run's."""
    newest = {tuple(row.get(name) for name in alike): when(row) for row in sorted(rows, key=when)}
    return [row for row in rows if when(row) == newest[tuple(row.get(name) for name in alike)]]


def grouped(rows: Sequence[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """By these fields, in the order in which they first occur."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name) for name in names), []).append(row)
    return groups
