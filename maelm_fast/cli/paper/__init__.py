"""`maelm-fast paper WHAT ...`: its figures and tables, and the three tools they are made with."""

from __future__ import annotations

import importlib

from maelm_fast.errors import unknown

TOOLS = {
    "sweep": "fine-tune a grid of hyperparameters with several seeds, and report each task's best cell",
    "prompt": "zero-shot and few-shot results through templates and label words",
    "theory": "a run against the paper's theorem: residuals and bounds, [MASK]'s own subspace",
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if argv[0] in TOOLS:
        return int(importlib.import_module(f"maelm_fast.cli.paper.{argv[0]}").main(argv[1:]))
    from maelm_fast.cli.paper import experiment
    from maelm_fast.paper.catalogue import EXPERIMENTS

    if argv[0] not in EXPERIMENTS:
        raise unknown("experiment", argv[0], [*EXPERIMENTS, *TOOLS])
    return experiment.main(argv)


def _usage() -> str:
    from maelm_fast.paper.catalogue import EXPERIMENTS

    shown = [(name, experiment.title) for name, experiment in EXPERIMENTS.items()] + list(TOOLS.items())
    lines = [f"  {name:8}{text}" for name, text in shown]
    return "usage: maelm-fast paper WHAT ...\n\n" + "\n".join(lines) + "\n\n'maelm-fast paper WHAT --help' says more."
