"""What every report of the benchmarks is made of: a table, printed as text or as Markdown, and the words and numbers in
it. A row of a table may stand for one row of a result file, or for several: what a column shows is a function of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.rows import Row, when
from maelm_fast import reporting

Columns = Mapping[str, Callable[[Any], str]]


class Table:
    """columns: by heading, what it shows of each item. Columns but the first in which no item has anything are left
    out."""

    def __init__(self, title: str, items: Iterable[Any], columns: Columns, notes: Sequence[str] = ()) -> None:
        made = [[cell(item) for cell in columns.values()] for item in items]
        kept = [i for i in range(len(columns)) if i == 0 or any(row[i] not in ("", "-") for row in made)]
        self.title, self.notes = title, notes
        self.header = [list(columns)[i] for i in kept]
        self.rows = [[row[i] for i in kept] for row in made]

    def text(self) -> str:
        cells = [self.header, *self.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.header))]
        body = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
        return "\n".join(line for line in (self.title, *body, *self.notes) if line)

    def markdown(self) -> str:
        body = "\n".join(reporting.table(self.header, self.rows)).rstrip("\n")
        notes = f"<sub>{' '.join(self.notes)}</sub>" if self.notes else ""
        return "\n\n".join(block for block in (self.title and f"**{self.title}**", body, notes) if block)


def spread(value: Mapping[str, float] | None, form: str | None = None) -> str:
    if value is None:
        return "-"
    form = form or (".2f" if value["median"] < 10 else ".1f")
    return f"{value['median']:{form}} [{value['q1']:{form}}, {value['q3']:{form}}]"


def number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def span(ends: Sequence[float], form: str) -> str:
    return " to ".join(dict.fromkeys(format(end, form) for end in ends))


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def field(name: str, form: str = "") -> Callable[[Row], str]:
    """A column: the field as it is, or in a format."""
    return lambda row: format(row[name], form)


def machine(row: Row) -> str:
    return f"{row['device']}, {counted(row['threads'], 'thread')}, torch {row['torch']}"


def machines(rows: Iterable[Row]) -> str:
    return "; ".join(dict.fromkeys(map(machine, rows)))


def run(row: Row) -> str:
    return f"{when(row):%Y-%m-%d %H:%M}, commit {row['commit']}"


def runs(rows: Iterable[Row]) -> str:
    return "; ".join(sorted({run(row) for row in rows}))


def batch(row: Row) -> str:
    documents = row.get("lengths", "full") != "full"
    return f"{row['batch']} x {row['seq']} tokens{' at most, lengths of documents' if documents else ''}"
