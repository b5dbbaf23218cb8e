"""GLUE as its authors hand it out, MNLI/dev_matched.tsv and so on: a folder named after the task's title, columns under
names of their own, CoLA without a line of names, QQP with a few rows that end early.
"""

from __future__ import annotations

from pathlib import Path

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


def as_on_the_hub(task: Task, rows: list[list[str]], places: list[int]) -> list[str]:
    """Gives the rows of a tsv file of GLUE's the hub's names of columns, in place; files that have them stay as they
    are. Returns notes on what is not as it was."""
    if task.name == "cola" and rows and len(rows[0]) == len(_COLA) and "sentence" not in rows[0]:
        rows.insert(0, _COLA)
        places.insert(0, 0)
    names = _NAMES.get(task.name, {})
    if not rows or not names.keys() <= set(rows[0]):
        return []
    rows[0] = [names.get(name, name) for name in rows[0]]
    whole = [i for i, row in enumerate(rows) if len(row) >= len(rows[0]) or task.name != "qqp"]
    if not (early := len(rows) - len(whole)):
        return []
    rows[:], places[:] = [rows[i] for i in whole], [places[i] for i in whole]
    return [f"{early:,} rows end before their label and are left out, as the hub does"]
