"""The paper's numbers: some checked by hand, all against their own averages."""

from __future__ import annotations

import re
import statistics

import pytest

from maelm_fast.paper import printed
from maelm_fast.paper.printed import PaperTable

TABLES = {"1": printed.TABLE_1, "2": printed.TABLE_2, "6": printed.TABLE_6, "7": printed.TABLE_7}
TASKS = ("MNLI-(m/mm)", "QQP", "QNLI", "SST-2", "CoLA", "RTE", "MRPC", "STS-B")


def named(table: PaperTable, group: int, name: str) -> dict[str, str]:
    return next(dict(zip(table.columns, row, strict=True)) for row in table.groups[group][1] if row[0] == name)


def test_some_numbers_read_off_the_paper() -> None:
    ours = named(printed.TABLE_1, 0, "RoBERTa (Ours)")
    assert (ours["MNLI-(m/mm)"], ours["CoLA"], ours["AVG"], ours["SQuAD F1"]) == ("85.9/85.8", "64.3", "85.2", "81.5")
    assert named(printed.TABLE_1, 1, "MAE-LM")["AVG"] == "87.8"
    assert named(printed.TABLE_1, 0, "TUPE")["SQuAD EM"] == "-"
    assert named(printed.TABLE_2, 5, "6 layer, 768 dimension")["GLUE"] == "84.8"
    assert named(printed.TABLE_6, 0, "BART")["MNLI-(m/mm)"] == "89.9/90.1"
    assert named(printed.TABLE_7, 1, "MAE-LM")["CoLA"] == "31.1 (13.9)"
    assert named(printed.TABLE_7, 2, "RoBERTa")["RTE"] == "69.1 (3.6)"


@pytest.mark.parametrize(
    ("number", "count", "total"), [("1", 95, 8080.1), ("2", 14, 1198.3), ("6", 36, 3196.2), ("7", 96, 3559.3)]
)
def test_all_numbers_of_a_table_add_up_to_those_of_the_paper_s_text(number: str, count: int, total: float) -> None:
    """Subscripts included. Unlike the averages below this covers SQuAD, and the rows that have no average."""
    cells = [cell for _, rows in TABLES[number].groups for row in rows for cell in row[1:]]
    values = [float(value) for cell in cells for value in re.findall(r"-?\d+\.\d", cell)]
    assert len(values) == count
    assert sum(values) == pytest.approx(total)


@pytest.mark.parametrize("number", TABLES)
def test_every_row_is_as_wide_as_its_header(number: str) -> None:
    for _, rows in TABLES[number].groups:
        for row in rows:
            assert len(row) == len(TABLES[number].columns), row


@pytest.mark.parametrize(("number", "count"), [("1", 6), ("6", 3), ("7", 6)])
def test_the_printed_average_is_that_of_the_eight_tasks(number: str, count: int) -> None:
    """The paper states no rule; MNLI as the mean of its two halves gives what it prints, to the last digit."""
    checked = 0
    for row in _rows(TABLES[number]):
        if row["AVG"] != "-" and row[TABLES[number].columns[0]] != "UniLMv2":  # whose average is another publication's
            scores = [statistics.mean(_scores(row[task])) for task in TASKS]
            assert statistics.mean(scores) == pytest.approx(float(row["AVG"]), abs=0.051), row
            checked += 1
    assert checked == count


def _scores(cell: str) -> list[float]:
    """ "70.7 (2.0)/73.3 (1.8)" -> [70.7, 73.3]"""
    return [float(part.split()[0]) for part in cell.split("/") if part != "-"]


def _rows(table: PaperTable) -> list[dict[str, str]]:
    return [dict(zip(table.columns, row, strict=True)) for _, rows in table.groups for row in rows]
