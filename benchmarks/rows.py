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

from benchmarks.shares import CLASSES
from maelm_fast.errors import UserError

PHASES = ("data", "forward", "backward", "optimizer")
SETTING = ("device", "precision", "batch", "seq", "rate", "lengths")  # of a case, with its dropout and bias
GPU = "NVIDIA"  # what the name of every GPU begins with
COMPILED = "_compiled"
Row = dict[str, Any]
Check = Callable[[Any], bool]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_date(value: Any) -> bool:
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False


def has_numbers(*names: str) -> Check:
    return lambda value: isinstance(value, dict) and all(is_number(value.get(name)) for name in names)


def by_name(fits: Check, *names: str) -> Check:
    """Values by name; names: the only ones there may be."""
    return lambda value: (
        isinstance(value, dict) and all(fits(v) and (not names or k in names) for k, v in value.items())
    )


def list_of(fits: Check, length: int | None = None) -> Check:
    return lambda value: isinstance(value, list) and length in (None, len(value)) and all(map(fits, value))


KINDS: dict[str, Check] = {
    "text": lambda value: isinstance(value, str),
    "number": is_number,
    "flag": lambda value: isinstance(value, bool),
    "date": is_date,
    "quartiles": has_numbers("median", "q1", "q3"),
    "quartiles by name": by_name(has_numbers("median", "q1", "q3")),
    "numbers": list_of(is_number),
    "numbers by name": by_name(is_number),
    "range": list_of(is_number, 2),
    "ranges by class": by_name(list_of(is_number, 2), *CLASSES),
    "shares by class": by_name(is_number, *CLASSES),
    "seconds by phase": by_name(is_number, *PHASES),
    "percentiles": has_numbers("p50", "p99", "steps"),
    "curve": list_of(list_of(is_number, 3)),
    "fill": has_numbers("all"),
}


FIELDS = {
    "date": "date",
    "text": "commit device torch transformers skipped model precision bias lengths op phase contestant case "
    "dtype yardstick store mode masks axis task metric track entry kind recipe data texts mix triton kernel shape unit "
    "ceiling",
    "number": "threads load batch seq rate dropout rounds mfu peak_memory_mb joules_per_mtoken recompiles tokens "
    "store_bytes micro_batch workers rss_anon_mb major_faults x hidden_size layers examples epochs mean_length seed "
    "updates target updates_to_target cpu_seconds_to_target cpu_seconds loss vocab padding wavefronts sectors",
    "quartiles": "tokens_per_s ms ratio tflop_per_s cpu_ratio tokens_per_s_per_core examples_per_s per_s",
    "quartiles by name": "ratios cpu_ratios",
    "numbers": "results",
    "numbers by name": "gate instructions",
    "seconds by phase": "seconds",
    "shares by class": "kernels",
    "percentiles": "step_ms",
    "curve": "curve",
    "fill": "fill",
    "range": "products",
}
"""Fields by kind; in every format alike, unless it says otherwise."""


def checks(names: str, **others: str) -> dict[str, Check]:
    """Of fields, separated by spaces; "?" behind a name: it may also be null. others: kinds that differ from FIELDS."""
    kinds = {name: kind for kind, alike in FIELDS.items() for name in alike.split()} | others
    found = {}
    for name in names.split():
        fits = KINDS[kinds[name.rstrip("?")]]
        found[name.rstrip("?")] = or_null(fits) if name.endswith("?") else fits
    return found


def or_null(fits: Check) -> Check:
    return lambda value: value is None or fits(value)


MACHINE = "date commit device threads load torch "
SKIPPED = checks(MACHINE)  # of whatever benchmark: there is a reason, and nothing to tabulate
CONTESTANT = checks(MACHINE + "transformers? model precision batch seq rate dropout bias lengths skipped?")
TIMED = CONTESTANT | checks(  # unless it was skipped
    "rounds tokens_per_s ratios cpu_ratios? mfu? peak_memory_mb? seconds? kernels? joules_per_mtoken? recompiles? "
    "step_ms?"
)


class Format:
    """What the rows of a benchmark have. table: the fields that all rows of one table have in common; row: those which
    tell its rows apart. Of rows alike in both the newest run's count."""

    def __init__(self, fields: str, table: str, row: str, **kinds: str) -> None:
        self.table, self.row, self.checks = table.split(), row.split(), checks(fields, **kinds)

    def tables(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """The newest rows, by table."""
        yield from grouped(newest_rows(rows, [*self.table, *self.row]), *self.table).values()


FORMATS = {  # a file is called FORMAT.jsonl or FORMAT_*.jsonl; train_step's rows are checked as above
    "ops": Format(MACHINE + "op phase contestant ms ratio?", "device sequences length width dtype", "op phase"),
    "attention": Format(
        MACHINE + "case bias dropout phase contestant dtype tokens ms tflop_per_s yardstick? ratio?",
        "device",
        "case tokens dtype bias dropout phase",
        bias="flag",
    ),
    "loader": Format(
        MACHINE
        + "store mode store_bytes masks micro_batch workers tokens_per_s_per_core fill rss_anon_mb? major_faults?",
        "device",
        "store mode store_bytes masks micro_batch workers",
    ),
    "pretraining": Format(
        MACHINE + "model precision batch seq workers rounds tokens_per_s ratio cpu_ratio",
        "device precision",
        "model batch seq workers",
    ),
    "ceilings": Format(
        MACHINE + "precision batch seq ceiling per_s unit", "device", "precision batch seq ceiling model"
    ),
    "scaling": Format(MACHINE + "axis x model precision skipped?", "device", "axis x model"),
    "finetune": Format(
        MACHINE + "transformers precision task hidden_size layers batch examples epochs dropout mean_length rounds "
        "metric contestant examples_per_s ratios results",
        "device task hidden_size layers batch examples precision dropout",
        "",
    ),
    "speedrun": Format(
        MACHINE + "track entry kind recipe precision data seed updates tokens target updates_to_target? "
        "cpu_seconds_to_target? cpu_seconds loss curve",
        "track device precision data",
        "entry seed",
    ),
    "patch": Format(
        MACHINE + "transformers precision layers hidden_size vocab dropout texts mix batch mean_length padding rounds "
        "gate contestant tokens_per_s ratios cpu_ratios?",
        "device precision layers hidden_size vocab dropout",
        "mix batch",
    ),
    "executed": Format(
        "date commit triton kernel shape dropout bias unit instructions wavefronts? sectors?",
        "",
        "triton kernel shape dropout bias unit",
        dropout="flag",
        bias="flag",
    ),
    "projection": Format(
        "date commit device model precision batch seq rate dropout bias products tokens_per_s mfu ms",
        "device precision batch seq rate",
        "dropout bias model",
        tokens_per_s="range",
        mfu="range",
        ms="ranges by class",
    ),
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
            found, old = read_cases(path, name)
            cases += found
            if old:
                unused.append(f"{name}: {old} rows of an older format ignored")
        else:
            others.setdefault(format_, []).extend(read_rows(path, name, format_))
    newest = {case.setting: case for case in sorted(cases, key=lambda case: (case.compared, when(case.shared)))}
    order = sorted(newest.values(), key=lambda c: (not c.on_gpu, c.shared["lengths"] != "full", c.setting))
    return Results(order, others, unused)


def read_rows(path: Path, name: str, format_: str) -> Iterator[Row]:
    """Those that were not skipped, of a format that is not train_step's."""
    for where, row in read_lines(path, name):
        skipped = isinstance(row.get("skipped"), str)
        check(row, SKIPPED if skipped else FORMATS[format_].checks, where)
        if not skipped:
            yield row


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
