"""maelm-fast plot: loss and accuracy curves of one or more runs in one picture."""

from __future__ import annotations

from pathlib import Path

from maelm_fast.analysis.plots import plot_runs
from maelm_fast.cli.common import OneLineParser
from maelm_fast.training.rundir import RunDir


def main(argv: list[str]) -> int:
    parser = OneLineParser(prog="maelm-fast plot", description="Loss curves of one or more runs.")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run directory")
    places = "RUN/report/loss.png, of several runs loss.png"
    parser.add_argument("--out", metavar="FILE", help=f"picture to write: .png, .pdf or .svg (default: {places})")
    over = ("tokens", "steps")
    parser.add_argument("--over", choices=over, default=over[0], help=f"horizontal axis (default: {over[0]})")
    options = parser.parse_args(argv)

    runs = [RunDir(path) for path in options.runs]
    default = runs[0].report / "loss.png" if len(runs) == 1 else Path("loss.png")
    out = Path(options.out) if options.out else default
    plot_runs(runs, out, options.over)
    print(f"written: {out}")
    return 0
