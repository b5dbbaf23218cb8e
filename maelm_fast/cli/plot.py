"""maelm-fast plot: loss and accuracy curves of one or more runs in one picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from maelm_fast.cli.common import option, parse

EXAMPLES = """
    maelm-fast plot runs/base
    maelm-fast plot runs/base runs/roberta_base --out both.png
    maelm-fast plot runs/base runs/small --over steps
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Loss and accuracy of one or more runs in one picture."""

    runs: tuple[str, ...] = option(positional=True, metavar="RUN")
    """Run directory."""
    out: Path | None = None
    """Picture to write: .png, .pdf or .svg (default: RUN/report/loss.png, of several runs loss.png)."""
    over: Literal["tokens", "steps"] = "tokens"
    """Horizontal axis."""


def main(argv: list[str]) -> int:
    options: Options = parse("plot", argv, Options, examples=EXAMPLES)
    from maelm_fast.analysis.plots import plot_runs
    from maelm_fast.training.rundir import RunDir

    runs = [RunDir(path) for path in options.runs]
    out = options.out or (runs[0].report / "loss.png" if len(runs) == 1 else Path("loss.png"))
    plot_runs(runs, out, options.over)
    print(f"written: {out}")
    return 0
