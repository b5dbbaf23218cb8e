"""`maelm-fast reproduce EXPERIMENT --scale SCALE`: a figure or table of the paper, planned, run and reported.

The plan and what it costs are shown first. Started again, by hand or beside itself, the command goes on with what is
not finished; see maelm_fast/experiments/run.py for the files.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from maelm_fast.analysis.plots import require_matplotlib, short_number
from maelm_fast.cli.common import OneLineParser
from maelm_fast.config import require
from maelm_fast.errors import UserError
from maelm_fast.experiments import catalogue, scales
from maelm_fast.experiments.cost import cost, needs_gpu_missing_here, rate_for, total
from maelm_fast.experiments.figures import draw
from maelm_fast.experiments.ledger import Ledger, lock
from maelm_fast.experiments.plan import Plan, make_plan
from maelm_fast.experiments.report import FIGURE, report
from maelm_fast.experiments.results import Results
from maelm_fast.experiments.run import Stopped, is_store, manifests, place_data, run_dir, run_plan
from maelm_fast.training.files import write_text

REPORT_FILE = "REPORT.md"


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    scale = scales.get(options.scale)
    plan = make_plan(catalogue.get(options.experiment), scale, options.seeds, options.updates)
    data = options.data or scale.text
    out = Path(options.out or f"reproduction-{scale.name}")

    asks_to_be_told = scale.name == "full" or needs_gpu_missing_here(scale)
    only_shown = options.plan or (asks_to_be_told and not options.run)
    if not only_shown:
        require_matplotlib()  # now, rather than after the training
        require(bool(data), f"--data is needed at scale {scale.name}: a token store, or text to make one of")
    if data and (not only_shown or is_store(data)):
        plan = place_data(plan, data, out)
    print("\n".join(_shown(plan, data, Ledger(out))), flush=True)
    if only_shown:
        if not options.plan:
            print(f"\nonly planned: scale {scale.name} starts when --run is given")
        return 0

    stopped = False
    try:
        run_plan(plan, out)
    except Stopped:
        stopped = True
    results = Results(plan, Ledger(out))
    _write(results, out)
    if stopped:
        print(f"stopped with {len(results.unfinished())} of {len(plan.runs)} runs unfinished; the same command goes on")
        return 0
    return 1 if results.errors() else 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="maelm-fast reproduce",
        description="A figure or table of the paper: pretraining, measurements, report. Shows its plan and cost first.",
        epilog="Exit code: 0, also when stopped by SIGTERM or SIGINT; 1 if a run failed; 2 for bad input.",
    )
    add = parser.add_argument
    add("experiment", metavar="EXPERIMENT", help=f"one of {', '.join(catalogue.EXPERIMENTS)}")
    sizes = "; ".join(f"{name}: {make().about}" for name, make in scales.SCALES.items())
    add("--scale", required=True, metavar="SCALE", help=sizes)
    add("--data", metavar="PATH", help="a token store; or text to make one of: a file, a glob, hf:NAME, 'embedded', "
        "or a directory, whose files named *validation* are the validation split (smoke: embedded)")  # fmt: skip
    add("--out", metavar="DIR", help="where everything goes; experiments in one directory share runs (default: "
        "reproduction-SCALE)")  # fmt: skip
    add("--seeds", type=int, default=1, metavar="N", help="pretrain every model with seeds 0 to N-1 (default: 1)")
    add("--updates", type=int, metavar="N", help="of every run (default: the scale's)")
    add("--plan", "--dry-run", action="store_true", help="show the plan and its cost, and stop")
    add("--run", action="store_true", help="start scale full, or scale gpu on a machine without a GPU")
    return parser


def _shown(plan: Plan, data: str | None, ledger: Ledger) -> Iterator[str]:
    """The plan in lines: every run with what it costs, and the sum of those that are not finished."""
    length = _mean_length(plan)
    yield f"{plan.experiment.title}; scale {plan.scale.name}: {plan.scale.about}"
    yield f"data: {data or 'none given'}" + ("" if plan.cells[0].data else ", not prepared yet")
    yield f"{'run':42}{'seed':>5}{'updates':>11}{'tokens':>9}{'FLOP':>11}{'about':>10}"
    unfinished = [cell.key for cell in Results(plan, ledger).unfinished()]
    rate = rate_for(plan)
    seconds = 0.0
    for cell in plan.runs:
        one = cost(cell, length)
        time = one.flops / rate.flops_per_s[cell.row.setting]
        finished = cell.key not in unfinished
        seconds += 0.0 if finished else time
        name = cell.row.label if cell.row.setting == "base" else f"{cell.row.label}, {cell.row.setting}"
        yield (
            f"{name:42}{cell.config.seed:>5}{cell.config.optim.max_steps:>11,}{short_number(one.tokens):>9}"
            f"{one.flops:>11.2e}{'finished' if finished else duration(time):>10}"
        )
    if repeated := len(plan.cells) - len(plan.runs):
        yield f"{repeated} more rows share a run with one of these"
    for row in plan.left_out:
        yield f"left out at this scale: {row.label} ({row.setting})"
    everything = total(plan.runs, length)
    yield (
        f"{len(plan.runs)} runs, {short_number(everything.tokens)} tokens, {everything.flops:.2e} FLOP, "
        f"{everything.disk / 1e9:,.2f} GB of checkpoints; {len(unfinished)} unfinished, about {duration(seconds)}"
    )
    yield f"rate: {rate.source}"
    for sentence in plan.experiment.missing:
        yield f"missing: {sentence}"


def _mean_length(plan: Plan) -> float | None:
    """Tokens of a training sample, once the plan is on token stores."""
    if not plan.cells[0].data:
        return None
    splits = [manifest.splits["train"] for manifest in manifests(plan).values()]
    return sum(split.tokens for split in splits) / sum(split.samples for split in splits)


def duration(seconds: float) -> str:
    """ "40 s", "12 min", "3.5 h", "8 days"."""
    for limit, size, unit, digits in ((90, 1, "s", 0), (5400, 60, "min", 0), (172_800, 3600, "h", 1)):
        if seconds < limit:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds / 86_400:,.0f} days"


def _write(results: Results, out: Path) -> None:
    """The report and its figure, if there is anything to report."""
    plan = results.plan
    place = out / plan.experiment.name
    if not any(results.pretraining(cell) for cell in plan.cells):
        print("nothing to report: no run is finished")
        return
    names = {cell.key: run_dir(out, cell).path.name for cell in plan.cells}
    with lock(out / "locks" / f"report-{plan.experiment.name}.lock", wait=True):
        try:
            place.mkdir(parents=True, exist_ok=True)
            draw(results, place / FIGURE)
            write_text(place / REPORT_FILE, report(results, manifests(plan), names))
        except OSError as error:
            raise UserError(f"cannot write {place}: {error.strerror}") from None
    print(f"\nwritten: {place / REPORT_FILE} and {FIGURE}")
