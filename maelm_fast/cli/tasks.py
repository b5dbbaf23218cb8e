"""Which tasks a command is about: named ones, or one in files of the user's own. Shared by finetune, sweep, prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from maelm_fast.config import require
from maelm_fast.finetuning import tasks
from maelm_fast.finetuning.tasks import Task

OWN = "for files of your own --task classification|regression with --text-columns and --label-column"


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """A task in files of your own, instead of TASK."""

    task: Literal["classification", "regression"] | None = None
    """Its kind."""
    text_columns: str | None = None
    """The text's column, or A,B: the pair's."""
    label_column: str | None = None
    """The label's."""
    name: str | None = None
    """For reports (default: custom)."""
    train: tuple[str, ...] = ()
    """Training files, if they are not named so; also of a TASK, if there is only one."""
    validation: tuple[str, ...] = ()
    """Validation files, likewise."""

    def chosen(self, names: Sequence[str], glue: Sequence[str] = ()) -> list[Task]:
        """The tasks of these names, "glue" being those of `glue`, or the one in files of the user's own. UserError."""
        if self.task is None:
            for option in ("text_columns", "label_column", "name"):
                spelt = f"--{option.replace('_', '-')}"
                require(getattr(self, option) is None, f"{spelt}: for files of your own, with --task")
            several = f", or 'glue' for {', '.join(glue)}" if glue else ""
            require(bool(names), f"name a task, one of {', '.join(tasks.TASKS)}{several}, or {OWN}")
            names = list(dict.fromkeys(n for given in names for n in (glue if glue and given == "glue" else (given,))))
            require(
                len(names) == 1 or not (self.train or self.validation),
                "--train and --validation are the files of one task: name one task",
            )
            return [tasks.get(name) for name in names]
        require(not names, f"'{' '.join(names)}' and --task {self.task}: name one of the two")
        require(self.text_columns is not None, f"--task {self.task} needs --text-columns")
        require(self.label_column is not None, f"--task {self.task} needs --label-column")
        assert self.text_columns is not None
        assert self.label_column is not None
        return [tasks.custom(self.task, self.text_columns.split(","), self.label_column, name=self.name or "custom")]
