"""maelm-fast rank: how many dimensions the encoder uses for real tokens, and for [MASK], layer by layer."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from maelm_fast.analysis.effective_rank import REPORT_FILE, RankReport, measure
from maelm_fast.analysis.plots import plot_ranks, require_matplotlib
from maelm_fast.batch import PackedBatch
from maelm_fast.cli.common import OneLineParser
from maelm_fast.config import require
from maelm_fast.data.token_store import TokenStore
from maelm_fast.training.hardware import choose_device
from maelm_fast.training.rundir import RunDir, load_run


def main(argv: list[str]) -> int:
    parser = OneLineParser(prog="maelm-fast rank", description="Effective rank of the encoder's token representations.")
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument("--step", type=int, help="checkpoint to read (default: the newest)")
    parser.add_argument("--tau", type=float, default=0.9, help="share of the squared singular values (default: 0.9)")
    parser.add_argument("--samples", type=int, help="validation samples (default: the run's runtime.eval_samples)")
    parser.add_argument("--data", metavar="STORE", help="token store (default: the run's)")
    parser.add_argument("--out", metavar="DIR", help="where the report goes (default: RUN/report)")
    options = parser.parse_args(argv)

    require(0.0 < options.tau <= 1.0, f"--tau must lie above 0 and at most at 1, not {options.tau}")
    require_matplotlib()  # now, rather than after the measurement
    run = load_run(options.run, options.step)
    data = Path(options.data or run.record.data)
    require(data.is_dir(), f"the token store {data} does not exist: name one with --data STORE")
    store = TokenStore(data, "validation")
    run.model.to(choose_device(run.config.runtime))
    report = measure(run, store, options.tau, options.samples, watch=_progress)

    out = Path(options.out) if options.out else RunDir(options.run).report
    report.write(out / REPORT_FILE)
    plot_ranks([report], out / Path(REPORT_FILE).with_suffix(".png"))
    print(_table(report))
    print(f"written: {out / REPORT_FILE} and .png")
    return 0


def _progress(batches: Iterable[PackedBatch], total: int) -> Iterable[PackedBatch]:
    if not sys.stdout.isatty():
        return batches
    from rich.progress import track

    return track(batches, "encoding", total=total, transient=True)


def _table(report: RankReport) -> str:
    layers = len(report.inputs[0].ranks)
    width = max(len(entry.label) for entry in report.inputs)
    lines = [
        f"{report.preset}, step {report.step:,}: {report.tau:g}-effective rank of {report.hidden_size} dimensions, "
        f"{report.samples:,} samples, not centred",
        f"{'input':<{width}} {'tokens':>11} {'embed':>6}" + "".join(f"{i:>6}" for i in range(1, layers)),
    ]
    for entry in report.inputs:
        lines.append(f"{entry.label:<{width}} {entry.tokens:>11,} " + "".join(f"{rank:>6}" for rank in entry.ranks))
    few = [entry.label for entry in report.inputs if entry.tokens < report.hidden_size]
    if few:
        lines.append(f"fewer tokens than dimensions in: {'; '.join(few)}. Those ranks are too low: raise --samples")
    return "\n".join(lines)
