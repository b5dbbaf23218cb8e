"""Tables, numbers over seeds, rows of results and what figures show of seeds, by hand."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from maelm_fast.errors import UserError
from maelm_fast.reporting import (
    RESULTS,
    aligned,
    figure_of,
    frame,
    not_too_narrow,
    number,
    over_draws,
    over_seeds,
    per_group,
    save,
    short_number,
    table,
    where,
    whiskers,
    write_results,
)


def test_numbers_over_seeds() -> None:
    assert (number(None), number(1234.56), number(1234.56, 0)) == ("-", "1,234.6", "1,235")
    assert over_seeds([], 2) == "-"
    assert over_seeds([2.5], 2) == "2.50"
    assert over_seeds([1.0, 4.0, 2.0], 1) == "2.0 [1.0, 4.0]"
    assert (over_draws([], 1), over_draws([2.5], 1), over_draws([1.0, 3.0], 1)) == ("-", "2.5", "2.0 (1.0)")
    values = (0, 500, 1500, 2.5e6, 131e9, 1e12)
    assert [short_number(v) for v in values] == ["0", "500", "1.5K", "2.5M", "131B", "1T"]


def test_tables() -> None:
    assert table(["a", "b|c"], [["1", "2"]]) == ["| a | b\\|c |", "| --- | --- |", "| 1 | 2 |", ""]
    assert aligned([["", "x"], ["long", "10"], ["s", ""]]) == ["       x", "long  10", "s"]


def test_rows_are_written_as_they_are_asked_for(tmp_path: Path) -> None:
    rows = frame(
        [
            {"model": "b", "seed": 1, "value": 0.1 + 0.2, "extra": "x,y"},
            {"model": "a", "seed": 0, "value": 2},
            {"model": "b", "seed": 0, "value": 1.0},
            {"model": "floor", "value": None},
        ],
        ("model", "seed", "value"),
    )
    assert per_group(where(rows, model="b"), "model") == {"b": [0.1 + 0.2, 1.0]}
    assert list(per_group(rows, "model", "seed")) == [("b", 1), ("a", 0), ("b", 0)]
    write_results(tmp_path, rows)
    with open(tmp_path / RESULTS, newline="") as file:
        read = list(csv.DictReader(file))
    assert [(row["model"], row["seed"], row["extra"]) for row in read][:3] == [
        ("b", "1", "x,y"),
        ("a", "0", ""),
        ("b", "0", ""),
    ]
    assert [row["value"] for row in read] == [repr(0.1 + 0.2), "2.0", "1.0", ""]
    assert len(where(frame([], ("model", "value")), model="b")) == 0


def test_seeds_are_seen_in_a_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = figure_of(2.0, 2.0)
    axis = figure.subplots()
    whiskers(axis, 1.0, 5.0, [4.0, 8.0, 5.0], "#000000", across=True)
    (bar,) = axis.containers
    assert bar.lines[2][0].get_segments()[0].tolist() == [[4.0, 1.0], [8.0, 1.0]]
    assert axis.lines[0].get_xdata().tolist() == [4.0, 8.0, 5.0]
    whiskers(axis, 2.0, 5.0, [5.0], "#000000")
    assert len(axis.containers) == 1, "one seed has no spread"
    assert not_too_narrow(3.17, 3.21) == pytest.approx((3.19 - 0.08025, 3.19 + 0.08025))
    assert not_too_narrow(1.0, 3.0) == (1.0, 3.0)
    with pytest.raises(UserError, match=r"use \.png"):
        save(figure, tmp_path / "x.doc")
