"""The columns of the paper's tables, filled from rows of results; the grid's best cells; AVG.

What sweeps, experiments and prompting have in common: rows with model, task, split, metric and value, one per seed or
draw.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maelm_fast.finetuning.tasks import Task
from maelm_fast.paper.catalogue import GLUE
from maelm_fast.reporting import NONE, number, per_group, where

AVERAGE = "AVG"
_PAPER = {
    "MNLI-(m/mm)": "mnli",
    "QQP": "qqp",
    "QNLI": "qnli",
    "SST-2": "sst2",
    "CoLA": "cola",
    "RTE": "rte",
    "MRPC": "mrpc",
    "STS-B": "stsb",
    AVERAGE: "",
    "SQuAD EM": "squad_v2",
    "SQuAD F1": "squad_v2",
}
"""Header of the paper's tables, in their order: task."""
_METRICS = {"SQuAD EM": "best_exact", "SQuAD F1": "best_f1"}
"""Where a column's metric is not its task's own."""


@dataclass(frozen=True)
class Column:
    """task: None of AVG, and of a task that is not there."""

    header: str
    task: Task | None
    metric: str = ""


def column(header: str, tasks: Iterable[Task]) -> Column:
    """A column of the paper's."""
    task = next((task for task in tasks if task.name == _PAPER[header]), None)
    return Column(header, task, _METRICS.get(header, task.metric) if task else "")


def columns(tasks: Sequence[Task]) -> list[Column]:
    """The paper's columns of these tasks, with AVG if one is of GLUE, then the others."""
    names = {task.name for task in tasks}
    average = not names.isdisjoint(GLUE)
    found = [column(header, tasks) for header, name in _PAPER.items() if name in names or (not name and average)]
    own = [task for task in tasks if task.name not in _PAPER.values()]
    return found + [Column(f"{task.title} ({task.metric})", task, task.metric) for task in own]


def own_scores(rows: Any, task: Task) -> Any:
    """The rows of a task's own metric on its first validation split, the one that selects."""
    return where(rows, task=task.name, split=task.validation[0], metric=task.metric)


def best_cells(rows: Any, tasks: Iterable[Task], keys: Sequence[str] = ("model", "task")) -> Any:
    """Of every combination of the keys only the rows of its best cell of the grid: among the cells with the most seeds,
    the one with the highest median of the task's metric on its first validation split, on a tie the earlier. One lucky
    seed of a cell whose others failed does not win."""
    own = {(task.name, task.validation[0], task.metric) for task in tasks}
    chosen = [key in own for key in zip(rows["task"], rows["split"], rows["metric"], strict=True)]
    merits = rows.loc[chosen].groupby([*keys, "cell"])["value"].agg(["count", "median"]).reset_index()
    merits = merits.sort_values(["count", "median", "cell"], ascending=[False, False, True])
    return rows.merge(merits.drop_duplicates(list(keys))[[*keys, "cell"]])


def averages(
    rows: Any, tasks: Mapping[str, str], middle: Callable[[Sequence[float]], float] = statistics.median
) -> dict[str, float]:
    """By model, the mean over the tasks of the middle of their values; models without one of the tasks are left out: it
    would not compare with another's. tasks: the metric of each.

    MNLI counts once, as the mean of its two splits: this is what reproduces every AVG of the paper's Tables 1, 6 and 7
    from its own rows (matched alone fits Tables 1 and 6 only). Without the mismatched split: matched alone, as for the
    paper's baselines."""
    found: dict[str, dict[str, list[float]]] = {}
    for (model, task, _, metric), values in per_group(rows, "model", "task", "split", "metric").items():
        if tasks.get(task) == metric:
            found.setdefault(model, {}).setdefault(task, []).append(middle(values))
    return {
        model: statistics.mean(map(statistics.mean, by_task.values()))
        for model, by_task in found.items()
        if len(by_task) == len(tasks)
    }


def filled(
    rows: Any,
    columns: Sequence[Column],
    models: Iterable[str],
    show: Callable[[Sequence[float]], str],
    average: Mapping[str, float] | None = None,
) -> list[list[str]]:
    """A line of cells for every model: the values of a column as `show` writes them, "61.2/60.9" of a task with two
    validation splits; a dash of what is not there."""
    found = {key: show(values) for key, values in per_group(rows, "model", "task", "split", "metric").items()}

    def cell(model: str, column: Column) -> str:
        if column.task is None:
            return number((average or {}).get(model)) if column.header == AVERAGE else NONE
        parts = [found.get((model, column.task.name, split, column.metric), NONE) for split in column.task.validation]
        return NONE if set(parts) == {NONE} else "/".join(parts)

    return [[cell(model, column) for column in columns] for model in models]
