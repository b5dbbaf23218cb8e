"""`maelm-fast finetune TASK --model DIR --data DIR`: a task, an encoder, its data; every field of FinetuneConfig is an
option."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from maelm_fast.cli.common import option, parse
from maelm_fast.cli.tasks import TaskOptions
from maelm_fast.config import require
from maelm_fast.finetuning import tasks
from maelm_fast.finetuning.config import FinetuneConfig

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
        say=_say,
    )
    return 0


def parsed(argv: list[str]) -> tuple[Options, TaskOptions, FinetuneConfig]:
    options: tuple[Options, TaskOptions, FinetuneConfig] = parse(
        "finetune", argv, Options, TaskOptions, FinetuneConfig, examples=EXAMPLES, main=MAIN, config_files=True
    )
    require(options[0].seeds >= 1, f"--seeds must be at least 1, not {options[0].seeds}")
    return options


def _say(text: str) -> None:
    print(text, flush=True)
