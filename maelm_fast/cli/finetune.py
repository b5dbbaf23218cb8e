"""`maelm-fast finetune TASK --model DIR --data DIR`: a task, an encoder, its data; every field of FinetuneConfig is an
option, typed and documented in finetuning/config.py."""

from __future__ import annotations

import dataclasses
from argparse import ArgumentError
from pathlib import Path
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser, set_parsing_settings  # type: ignore[attr-defined]

from maelm_fast.cli.common import user_error
from maelm_fast.config import from_dict, require
from maelm_fast.finetuning import tasks
from maelm_fast.finetuning.config import FinetuneConfig

KINDS = ("classification", "regression")
_FIELDS = tuple(field.name for field in dataclasses.fields(FinetuneConfig))
_EPILOG = (
    "For files of your own: --task classification|regression --text-columns a,b --label-column y instead of TASK. "
    "Options are taken in the order given: a later --config or option overrides an earlier one. docs/finetuning.md "
    "says more."
)


def main(argv: list[str]) -> int:
    if not argv or set(argv) & {"-h", "--help"}:
        _parser().print_help()
        return 0
    options = parse(argv)
    task = _task(options)
    from maelm_fast.finetuning.examples import read_task
    from maelm_fast.finetuning.job import finetune

    data = read_task(task, options["data"], options["train"] or (), options["validation"] or (), options["limit"])
    model = options["model"]
    out = options["out"] or str(Path("finetuned") / Path(model).resolve().name / task.name)
    config: FinetuneConfig = options["config"]
    finetune(
        model,
        data,
        config,
        out,
        range(config.seed, config.seed + options["seeds"]),
        engine=options["engine"],
        step=options["step"],
        random_init=options["random_init"],
        say=_say,
    )
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


def parse(argv: list[str]) -> dict[str, Any]:
    """The options by name, and "config": FinetuneConfig. UserError in one line for anything that is wrong."""
    parser = _parser()
    try:
        values = parser.parse_args([_field_option(word) for word in argv]).as_dict()
    except (ArgumentError, TypeError, ValueError, OSError) as error:
        raise user_error(error, argv, parser) from None
    require(values["seeds"] >= 1, f"--seeds must be at least 1, not {values['seeds']}")
    require(values["limit"] is None or values["limit"] >= 1, f"--limit must be at least 1, not {values['limit']}")
    return values | {"config": from_dict(FinetuneConfig, {name: values.pop(name) for name in _FIELDS})}


def _task(options: dict[str, Any]) -> tasks.Task:
    name, kind = options["TASK"], options["task"]
    own = {f"--{option.replace('_', '-')}": options[option] for option in ("text_columns", "label_column", "name")}
    if kind is None:
        require(
            name is not None,
            f"name a task, one of {', '.join(tasks.TASKS)}, or for files of your own --task classification|regression "
            "with --text-columns and --label-column",
        )
        given = [option for option, value in own.items() if value is not None]
        require(not given, f"{', '.join(given)}: for files of your own, with --task classification|regression")
        return tasks.get(name)
    require(name is None, f"'{name}' and --task {kind}: name one of the two")
    for option in ("--text-columns", "--label-column"):
        require(own[option] is not None, f"--task {kind} needs {option}")
    columns = own["--text-columns"].split(",")
    return tasks.custom(kind, columns, own["--label-column"], name=own["--name"] or "custom")


def _parser() -> ArgumentParser:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(prog="maelm-fast finetune", epilog=_EPILOG, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("TASK", nargs="?", help=f"one of {', '.join(tasks.TASKS)}")
    parser.add_argument("--model", required=True, metavar="DIR", help="a run of ours, or a Hugging Face directory")
    parser.add_argument(
        "--data", required=True, metavar="DIR",
        help="directory with the files (parquet, jsonl, json, csv, tsv), or with them under TASK/; 'hub', or "
        "hub:owner/name[:config], downloads them",
    )  # fmt: skip
    parser.add_argument("--out", metavar="DIR", help="where results go; an interrupted job in it goes on (default: "
                        "finetuned/MODEL/TASK)")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=5, help="runs, with seeds seed, seed+1, ...")
    parser.add_argument("--step", type=int, help="checkpoint of the run (default: the newest)")
    parser.add_argument(
        "--engine", default="auto", choices=("auto", "packed", "transformers"),
        help="packed: our kernels; transformers: its own class, padded, for a Hugging Face directory; auto: packed for "
        "a run of ours",
    )  # fmt: skip
    parser.add_argument("--random-init", action="store_true", help="the same encoder without its pretraining")
    parser.add_argument("--train", nargs="+", metavar="FILE", help="training files, if not those of the split's name")
    parser.add_argument("--validation", nargs="+", metavar="FILE", help="development files, likewise")
    parser.add_argument("--limit", type=int, metavar="N", help="a fixed random subset of the training examples")
    parser.add_argument("--task", choices=KINDS, help="kind of task of files of your own")
    parser.add_argument("--text-columns", metavar="A[,B]", help="of files of your own: the text, or the pair")
    parser.add_argument("--label-column", metavar="Y", help="of files of your own")
    parser.add_argument("--name", help="of a task of your own, for reports (default: custom)")
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with any of the options")
    parser.add_class_arguments(FinetuneConfig, None, as_group=True)
    return parser


def _field_option(word: str) -> str:
    """--batch-size is --batch_size, as are all fields."""
    option, equals, value = word.partition("=")
    name = option.removeprefix("--").replace("-", "_")
    return f"--{name}{equals}{value}" if option.startswith("--") and name in _FIELDS else word
