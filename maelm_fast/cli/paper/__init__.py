"""`maelm-fast paper WHAT ...`: its figures and tables, and the three tools they are made with."""

from __future__ import annotations

import functools
import importlib

from maelm_fast.cli.common import Main, run_command
from maelm_fast.paper.catalogue import EXPERIMENTS

TOOLS = {
    "sweep": "fine-tune a grid of hyperparameters with several seeds, and report each task's best cell",
    "prompt": "zero-shot and few-shot results through templates and label words",
    "theory": "a run against the paper's theorem: residuals and bounds, [MASK]'s own subspace",
}


def main(argv: list[str]) -> int:
    commands = {name: experiment.title for name, experiment in EXPERIMENTS.items()} | TOOLS
    return run_command("maelm-fast paper", commands, _find, argv)


def _find(name: str) -> Main:
    module = importlib.import_module(f"maelm_fast.cli.paper.{name if name in TOOLS else 'experiment'}")
    main: Main = module.main if name in TOOLS else functools.partial(module.main, name)
    return main
