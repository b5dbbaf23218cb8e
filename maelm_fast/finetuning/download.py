"""GLUE as its authors hand it out, MNLI/dev_matched.tsv and so on: a folder named after the task's title, columns under
names of their own, CoLA without a line of names, QQP with a few rows that end early.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from maelm_fast.data.readers import read_rows
from maelm_fast.finetuning.tasks import Task

_NAMES = {
    "mnli": {"sentence1": "premise", "sentence2": "hypothesis", "gold_label": "label"},
    "qqp": {"is_duplicate": "label"},
    "mrpc": {"#1 String": "sentence1", "#2 String": "sentence2", "Quality": "label"},
    "stsb": {"score": "label"},
}
"""Task -> their name of a column -> the hub's."""
_COLA = ["source", "label", "star", "sentence"]


def task_folder(root: Path, task: Task) -> Path | None:
    """root's folder of the task, by its name ("sst2") or its title ("SST-2"); None if there is none."""
    return next((root / name for name in (task.name, task.title) if (root / name).is_dir()), None)


def read_task_rows(task: Task, path: Path) -> tuple[list[tuple[str, Any]], int]:
    """(read_rows of a file with the hub's names of columns, how many lines were left out because they end early)."""
    if path.suffix != ".tsv":
        return list(read_rows(str(path), path.suffix)), 0
    _, first = next(read_rows(str(path), ".tsv", early=True), ("", {}))
    names = _NAMES.get(task.name, {})
    if task.name == "cola" and len(first) == len(_COLA) and "sentence" not in first:
        return list(read_rows(str(path), ".tsv", _COLA)), 0
    if not names or not names.keys() <= first.keys():
        return list(read_rows(str(path), ".tsv")), 0
    rows = [
        (where, {names.get(name, name): cell for name, cell in row.items()})
        for where, row in read_rows(str(path), ".tsv", early=task.name == "qqp")
    ]
    whole = [(where, row) for where, row in rows if "label" in row]
    return whole, len(rows) - len(whole)
