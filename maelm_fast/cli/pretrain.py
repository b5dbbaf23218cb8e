"""`maelm-fast pretrain PRESET --data STORE --out RUN`: a preset, changed by YAML files and dotted options in turn.

jsonargparse reads the dataclasses of config.py, so every field is an option, typed and documented there.
"""

from __future__ import annotations

import dataclasses
from argparse import ArgumentError
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser, set_parsing_settings  # type: ignore[attr-defined]

from maelm_fast import presets
from maelm_fast.cli.common import user_error
from maelm_fast.config import SECTIONS, RunConfig, from_dict, to_dict
from maelm_fast.errors import UserError

_EPILOG = "Options are taken in the order given: a later --config or option overrides an earlier one."


def main(argv: list[str]) -> int:
    if argv and argv[0] in ("-h", "--help"):
        _parser(presets.get("base")).print_help()
        return 0
    if not argv or argv[0].startswith("-"):
        raise UserError(f"name a preset first: maelm-fast pretrain PRESET ...; there are: {', '.join(presets.names())}")
    arguments = parse(argv)
    from maelm_fast.training.job import pretrain

    initial = _initial(arguments["init_from"]) if arguments["init_from"] else None
    pretrain(arguments["preset"], arguments["run"], arguments["data"], arguments["out"], initial)
    return 0


def parse(argv: list[str]) -> dict[str, Any]:
    """{"preset", "data", "out", "init_from", "run": RunConfig}; UserError in one line for anything that is wrong."""
    parser = _parser(presets.get(argv[0]))
    try:
        values = parser.parse_args(argv).as_dict()
    except (ArgumentError, TypeError, ValueError, OSError) as error:
        raise user_error(error, argv, parser) from None
    run = from_dict(RunConfig, {field.name: values[field.name] for field in dataclasses.fields(RunConfig)})
    return {key: values[key] for key in ("preset", "data", "out", "init_from")} | {"run": run}


def _parser(preset: RunConfig) -> ArgumentParser:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(prog="maelm-fast pretrain", epilog=_EPILOG, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("preset", help=f"one of {', '.join(presets.names())}")
    parser.add_argument("--data", required=True, metavar="STORE", help="a store made by 'maelm-fast data prepare'")
    parser.add_argument("--out", required=True, metavar="RUN", help="run directory; an interrupted run in it goes on")
    origins = "a run of ours, or a Hugging Face RoBERTa, BERT or MPNet checkpoint"
    parser.add_argument("--init-from", metavar="DIR", help=f"start from {origins}")
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with any of the options below")
    for (owner, name), section in SECTIONS.items():
        if owner is RunConfig:
            parser.add_class_arguments(section, name)
    parser.add_argument("--seed", type=int, default=preset.seed, help="of initialisation, order, masks and dropout")
    parser.set_defaults(dict(_leaves(to_dict(preset))))
    return parser


def _leaves(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _initial(path: str) -> Any:
    from maelm_fast.training.initial import from_run
    from maelm_fast.training.rundir import RunDir

    if RunDir(path).exists:
        return from_run(path)
    if not Path(path).exists():
        raise UserError(f"--init-from {path}: no such directory")
    from maelm_fast.export.from_huggingface import read_checkpoint

    return read_checkpoint(path)
