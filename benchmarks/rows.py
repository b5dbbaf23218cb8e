"""Reads the result files: every row is checked against what its benchmark writes; the newest of each setting count.

A case is what one run of train_step measured in one setting. It counts whole, so that its ratios belong together. Of a
contestant the run's last row counts: the one before it was written in case the run is cut off.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.classes import CLASSES
from maelm_fast.errors import UserError

# a file is called FORMAT.jsonl or FORMAT_*.jsonl
FORMATS = (
    "train_step",
    "ops",
    "attention",
    "loader",
    "scaling",
    "projection",
    "finetune",
    "executed",
    "patch",
    "speedrun",
)
PHASES = ("data", "forward", "backward", "optimizer")
SETTING = ("device", "precision", "batch", "seq", "rate", "lengths")  # of a case, with its dropout and bias
GPU = "NVIDIA"  # what the name of every GPU begins with
COMPILED = "_compiled"
Row = dict[str, Any]
Check = Callable[[Any], bool]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def has_numbers(*names: str) -> Check:
    return lambda value: isinstance(value, dict) and all(is_number(value.get(name)) for name in names)


is_quartiles = has_numbers("median", "q1", "q3")


def is_range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_number, value))


def is_date(value: Any) -> bool:
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False


def by_name(fits: Check, names: Sequence[str] | None = None) -> Check:
    return lambda value: (
        isinstance(value, dict) and all(fits(v) and (names is None or k in names) for k, v in value.items())
    )


def or_null(fits: Check) -> Check:
    return lambda value: value is None or fits(value)


MACHINE: Mapping[str, Check] = {
    "date": is_date,
    "commit": is_text,
    "device": is_text,
    "threads": is_number,
    "load": is_number,
    "torch": is_text,
}
CONTESTANT: Mapping[str, Check] = {
    **MACHINE,
    "transformers": or_null(is_text),
    "model": is_text,
    "precision": is_text,
    "batch": is_number,
    "seq": is_number,
    "rate": is_number,
    "dropout": is_number,
    "bias": is_text,
    "lengths": is_text,
    "skipped": or_null(is_text),
}
TIMED: Mapping[str, Check] = {  # unless it was skipped
    **CONTESTANT,
    "rounds": is_number,
    "tokens_per_s": is_quartiles,
    "ratios": by_name(is_quartiles),
    "cpu_ratios": or_null(by_name(is_quartiles)),
    "mfu": or_null(is_number),
    "peak_memory_mb": or_null(is_number),
    "seconds": or_null(by_name(is_number, PHASES)),
    "kernels": or_null(by_name(is_number, tuple(CLASSES))),
    "joules_per_mtoken": or_null(is_number),
    "recompiles": or_null(is_number),
    "step_ms": or_null(has_numbers("p50", "p99", "steps")),
}
OTHERS: Mapping[str, Mapping[str, Check]] = {
    "ops": {
        **MACHINE,
        "op": is_text,
        "phase": is_text,
        "contestant": is_text,
        "ms": is_quartiles,
        "ratio": or_null(is_quartiles),
    },
    "attention": {
        **MACHINE,
        "case": is_text,
        "bias": is_flag,
        "dropout": is_number,
        "phase": is_text,
        "contestant": is_text,
        "dtype": is_text,
        "tokens": is_number,
        "ms": is_quartiles,
        "tflop_per_s": is_quartiles,
        "yardstick": or_null(is_text),
        "ratio": or_null(is_quartiles),
    },
    "loader": {
        **MACHINE,
        "store": is_text,
        "mode": is_text,
        "store_bytes": is_number,
        "masks": is_text,
        "micro_batch": is_number,
        "workers": is_number,
        "tokens_per_s_per_core": is_quartiles,
        "fill": has_numbers("all"),
        "rss_anon_mb": or_null(is_number),
        "major_faults": or_null(is_number),
    },
    "scaling": {
        **MACHINE,
        "axis": is_text,
        "x": is_number,
        "model": is_text,
        "precision": is_text,
        "skipped": or_null(is_text),
    },
    "finetune": {
        **MACHINE,
        "transformers": is_text,
        "precision": is_text,
        "task": is_text,
        "hidden_size": is_number,
        "layers": is_number,
        "batch": is_number,
        "examples": is_number,
        "epochs": is_number,
        "dropout": is_number,
        "mean_length": is_number,
        "rounds": is_number,
        "metric": is_text,
        "contestant": is_text,
        "examples_per_s": is_quartiles,
        "ratios": by_name(is_quartiles),
        "results": lambda value: isinstance(value, list) and all(is_number(v) for v in value),
    },
    "speedrun": {
        **MACHINE,
        "track": is_text,
        "entry": is_text,
        "kind": lambda value: value in ("mae", "mlm"),
        "recipe": is_text,
        "precision": is_text,
        "data": is_text,
        "seed": is_number,
        "updates": is_number,
        "tokens": is_number,
        "target": is_number,
        "updates_to_target": or_null(is_number),
        "cpu_seconds_to_target": or_null(is_number),
        "cpu_seconds": is_number,
        "loss": is_number,
        "curve": lambda value: isinstance(value, list) and all(len(point) == 3 for point in value),
    },
    "patch": {
        **MACHINE,
        "transformers": is_text,
        "precision": is_text,
        "layers": is_number,
        "hidden_size": is_number,
        "vocab": is_number,
        "dropout": is_number,
        "texts": is_text,
        "mix": is_text,
        "batch": is_number,
        "mean_length": is_number,
        "padding": is_number,
        "rounds": is_number,
        "gate": by_name(is_number),
        "contestant": is_text,
        "tokens_per_s": is_quartiles,
        "ratios": by_name(is_quartiles),
        "cpu_ratios": or_null(by_name(is_quartiles)),
    },
    "executed": {
        "date": is_date,
        "commit": is_text,
        "triton": is_text,
        "kernel": is_text,
        "shape": is_text,
        "dropout": is_flag,
        "bias": is_flag,
        "unit": is_text,
        "instructions": by_name(is_number),
        "wavefronts": or_null(is_number),
        "sectors": or_null(is_number),
    },
    "projection": {
        "date": is_date,
        "commit": is_text,
        "device": is_text,
        "model": is_text,
        "precision": is_text,
        "batch": is_number,
        "seq": is_number,
        "rate": is_number,
        "dropout": is_number,
        "bias": is_text,
        "products": is_range,
        "tokens_per_s": is_range,
        "mfu": is_range,
        "ms": by_name(is_range, tuple(CLASSES)),
    },
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
    for path in sorted((root / "benchmarks" / "results").glob("*.jsonl")):
        name = path.relative_to(root).as_posix()
        format_ = next((f for f in FORMATS if path.stem == f or path.stem.startswith(f + "_")), None)
        if format_ is None:
            unused.append(f"{name}: not used, its name begins with none of {', '.join(FORMATS)}")
        elif format_ == "train_step":
            found, old = read_cases(path, name)
            cases += found
            if old:
                unused.append(f"{name}: {old} rows of an older format ignored")
        else:
            for where, row in read_lines(path, name):
                if is_text(row.get("skipped")):  # so that nobody need try again; there is nothing to tabulate
                    check(row, MACHINE, where)
                    continue
                check(row, OTHERS[format_], where)
                others.setdefault(format_, []).append(row)
    newest = {case.setting: case for case in sorted(cases, key=lambda case: (case.compared, when(case.shared)))}
    order = sorted(newest.values(), key=lambda c: (not c.on_gpu, c.shared["lengths"] != "full", c.setting))
    return Results(order, others, unused)


def read_file(path: Path, format_: str) -> list[Row]:
    """The rows of one file, of a format that is not train_step's."""
    rows = []
    for where, row in read_lines(path, path.name):
        check(row, OTHERS[format_], where)
        rows.append(row)
    return rows


def read_cases(path: Path, name: str) -> tuple[list[Case], int]:
    """And how many rows of the older format, with a ratio_to_hf, there were."""
    cases: dict[tuple[Any, ...], Case] = {}
    old = 0
    for where, row in read_lines(path, name):
        if "ratio_to_hf" in row:
            old += 1
            continue
        row.setdefault("step_ms", None)  # rows of before 2026-11-23 lack it
        check(row, TIMED if row.get("skipped") is None else CONTESTANT, where)
        case = cases.setdefault((row["date"], *(row[f] for f in SETTING)), Case())
        if row["model"] in case.rows and case.rows[row["model"]].get("rounds") == row.get("rounds"):
            raise UserError(f"{where}: a second row of {row['model']} in the run of {row['date']}; remove one")
        case.rows[row["model"]] = row
    return [case for case in cases.values() if case.timed], old


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


def check(row: Row, fields: Mapping[str, Check], where: str) -> None:
    for name, fits in fields.items():
        if name not in row:
            raise UserError(f"{where}: the row has no {name}")
        if not fits(row[name]):
            raise UserError(f"{where}: {name} cannot be {json.dumps(row[name])}")


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
