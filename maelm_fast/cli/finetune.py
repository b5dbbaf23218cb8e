"""`maelm-fast finetune TASK --model DIR --data DIR`: a task, an encoder, its data; every field of FinetuneConfig is an
option."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from maelm_fast.cli.common import option, parse
from maelm_fast.config import require
from maelm_fast.finetuning import tasks
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.tasks import Task

EXAMPLES = """
    maelm-fast finetune mrpc --model runs/base --data glue/
    maelm-fast finetune sst2 --model a-hugging-face-directory --data hub --seeds 1 --lr 2e-5 --epochs 2
    maelm-fast finetune --task classification --text-columns text --label-column y --model runs/base --data csvs/
"""
MAIN = "task text_columns label_column lr epochs batch_size max_length seed device".split()


@dataclass(frozen=True, kw_only=True)
class Options:
    """Fine-tune an encoder on a task, over several seeds. The same command resumes what was interrupted."""

    named: str | None = option(None, positional=True, metavar="TASK", help=f"One of {', '.join(tasks.TASKS)}.")
    model: str
    """A run of ours, or a Hugging Face directory."""
    data: str
    """Directory with the files (parquet, jsonl, json, csv, tsv), or with them under TASK/; 'hub', or
    hub:owner/name[:config], downloads them."""
    out: Path | None = None
    """Where results go (default: finetuned/MODEL/TASK)."""
    seeds: int = 5
    """So many runs, with one seed after the other from --seed."""
    step: int | None = option(None, more=True)
    """Checkpoint of the run (default: the newest)."""
    engine: Literal["auto", "packed", "transformers"] = option("auto", more=True)
    """packed: our kernels. transformers: a Hugging Face directory's own class, padded. auto: packed for ours."""
    random_init: bool = option(False, more=True)
    """The same encoder without its pretraining."""
    limit: int | None = option(None, more=True)
    """A fixed random subset of so many training examples."""


def main(argv: list[str]) -> int:
    options, own, config = parsed(argv)
    task = own.chosen([options.named] if options.named is not None else [])[0]
    from maelm_fast.finetuning.examples import read_task
    from maelm_fast.finetuning.job import finetune
    from maelm_fast.work import say

    data = read_task(task, options.data, own.train, own.validation, options.limit)
    finetune(
        options.model,
        data,
        config,
        options.out or Path("finetuned") / Path(options.model).resolve().name / task.name,
        range(config.seed, config.seed + options.seeds),
        engine=options.engine,
        step=options.step,
        random_init=options.random_init,
        say=say,
    )
    return 0


def parsed(argv: list[str]) -> tuple[Options, TaskOptions, FinetuneConfig]:
    options: tuple[Options, TaskOptions, FinetuneConfig] = parse(
        "finetune", argv, Options, TaskOptions, FinetuneConfig, examples=EXAMPLES, main=MAIN, config_files=True
    )
    require(options[0].seeds >= 1, f"--seeds must be at least 1, not {options[0].seeds}")
    return options


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
        own = {"--text-columns": self.text_columns, "--label-column": self.label_column, "--name": self.name}
        if self.task is None:
            for spelt, value in own.items():
                require(value is None, f"{spelt}: for files of your own, with --task")
            several = f", or 'glue' for {', '.join(glue)}" if glue else ""
            require(bool(names), f"name a task, one of {', '.join(tasks.TASKS)}{several}, or {OWN}")
            names = list(dict.fromkeys(n for given in names for n in (glue if glue and given == "glue" else (given,))))
            require(
                len(names) == 1 or not (self.train or self.validation),
                "--train and --validation are the files of one task: name one task",
            )
            return [tasks.get(name) for name in names]
        require(not names, f"'{' '.join(names)}' and --task {self.task}: name one of the two")
        for spelt in ("--text-columns", "--label-column"):
            require(own[spelt] is not None, f"--task {self.task} needs {spelt}")
        columns = str(self.text_columns).split(",")
        return [tasks.custom(self.task, columns, str(self.label_column), name=self.name or "custom")]
