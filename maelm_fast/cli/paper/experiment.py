"""`maelm-fast paper EXPERIMENT --scale SCALE`: a figure or table of the paper, planned, run and reported.

The plan and what it costs are shown first. Started again, by hand or beside itself, the command resumes what is
not finished; see maelm_fast/paper/run.py for the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from maelm_fast.cli.common import option, parse
from maelm_fast.config import require
from maelm_fast.paper import catalogue, scales
from maelm_fast.paper.cost import cost, mean_tokens, needs_gpu_missing_here, rate_for, unit_cost
from maelm_fast.paper.downstream import Found, find_tasks
from maelm_fast.paper.plan import Plan, make_plan
from maelm_fast.paper.report import FIGURE, REPORT, write_report
from maelm_fast.paper.results import Results
from maelm_fast.paper.run import is_store, manifests, place_data, run_dir, run_plan, store_path
from maelm_fast.reporting import RESULTS, aligned, require_matplotlib, short_number
from maelm_fast.stop import Stopped
from maelm_fast.work import Ledger, lock

EXAMPLES = """
    maelm-fast paper {name} --scale smoke
    maelm-fast paper {name} --scale cpu --data corpus/ --tasks glue/ --seeds 3
    maelm-fast paper {name} --scale gpu --data store --tasks hub --plan
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """A figure or table of the paper: pretraining, measurements, report. Its plan and cost are shown first.

    Exit code: 0; 1 if a run failed; 2 for bad input; 143 or 130 if stopped by SIGTERM or SIGINT."""

    scale: str = option(help="; ".join(f"{name}: {make().about}" for name, make in scales.SCALES.items()))
    data: str | None = None
    """A token store; or text to make one of: a file, a glob, hf:NAME, 'embedded', or a directory, whose files named
    *validation* are the validation split (smoke: embedded)."""
    tasks: tuple[str, ...] = option((), metavar="DIR|hub")
    """Where GLUE's tasks and SQuAD 2.0 are, for what the paper fine-tunes or prompts: directories with
    NAME/train.parquet and so on (see docs/reproduce.md), the first one that has a task; or 'hub' (default: none, only
    pretraining is reproduced)."""
    train: tuple[str, ...] = option((), metavar="TASK=FILE", more=True)
    """Training file of a task, or several with commas between them, if they are not named so."""
    validation: tuple[str, ...] = option((), metavar="TASK=FILE", more=True)
    """Validation file of a task, likewise."""
    out: Path | None = None
    """Where everything goes; experiments in one directory share runs (default: reproduction-SCALE)."""
    rows: tuple[str, ...] = option((), metavar="ROW")
    """Of fig4 and table2, only these rows, by their names in the plan: --rows 0 0.5 (default: all)."""
    seeds: int = 1
    """Pretrain every model with seeds 0 to N-1."""
    steps: int | None = option(None, aliases=("--updates",))
    """Of every run (default: the scale's)."""
    plan: bool = option(False, aliases=("--dry-run",))
    """Show the plan and its cost, and stop."""
    run: bool = False
    """Start scale full, or scale gpu on a machine without a GPU."""


def main(name: str, argv: list[str]) -> int:
    options: Options = parse(f"paper {name}", argv, Options, examples=EXAMPLES.format(name=name))
    scale = scales.get(options.scale)
    plan = make_plan(catalogue.get(name), scale, options.seeds, options.steps, options.rows)
    data = options.data or scale.text
    out = options.out or Path(f"reproduction-{scale.name}")

    asks_to_be_told = scale.name == "full" or needs_gpu_missing_here(scale)
    only_shown = options.plan or (asks_to_be_told and not options.run)
    if not only_shown:
        require_matplotlib()  # now, rather than after the training
        require(bool(data), f"--data is needed at scale {scale.name}: a token store, or text to make one of")
    plan = _with_tasks(plan, options)
    prepared = all(is_store(str(store_path(out, corpus))) for corpus in plan.corpora)  # so it knows what is finished
    if data and (not only_shown or is_store(data) or prepared):
        plan = place_data(plan, data, out)
    print("\n".join(_shown(plan, data, out)), flush=True)
    if only_shown:
        if not options.plan:
            print(f"\nonly planned: scale {scale.name} starts when --run is given")
        return 0

    stopped = None
    try:
        run_plan(plan, out)
    except Stopped as stop:
        stopped = stop
    results = Results(plan, Ledger(out))
    _write(results, out)
    if stopped is not None:
        print(f"stopped with {len(results.unfinished())} of {len(plan.runs)} runs unfinished; the same command resumes")
        raise stopped
    return 1 if results.errors() else 0


def _with_tasks(plan: Plan, options: Options) -> Plan:
    """The plan with its downstream part."""
    experiment, amount = plan.experiment, plan.scale.downstream
    if experiment.use == "nothing":
        require(not options.tasks, f"{experiment.name} has no downstream part: leave out --tasks")
    files: dict[str, dict[str, list[str]]] = {}
    for split in ("train", "validation"):
        for given in getattr(options, split):
            name, _, paths = given.partition("=")
            require(bool(options.tasks), f"--{split} names files of a task: give --tasks too")
            require(bool(paths), f"--{split} takes TASK=FILE or TASK=FILE,FILE, not '{given}'")
            known = ", ".join(experiment.tasks)
            require(name in experiment.tasks, f"--{split} {given}: {experiment.name} has no task '{name}': {known}")
            files.setdefault(name, {}).setdefault(split, []).extend(paths.split(","))
    if options.tasks:
        return plan.with_tasks(find_tasks(experiment.tasks, options.tasks, amount, experiment.one_task, files))
    return plan


def _shown(plan: Plan, data: str | None, out: Path) -> Iterator[str]:
    """The plan in lines: every run with what it costs, and the sum of what is not finished."""
    yield f"{plan.experiment.title}; scale {plan.scale.name}: {plan.scale.about}"
    yield f"data: {data or 'none given'}" + (", not prepared yet" if data and not plan.cells[0].data else "")
    results, (rate, source) = Results(plan, Ledger(out)), rate_for(plan)
    unfinished = [cell.key for cell in results.unfinished(units=False)]
    costs, seconds = [cost(cell) for cell in plan.runs], 0.0
    lines = [["run", "seed", "steps", "tokens", "FLOP", "about"]]
    for cell, one in zip(plan.runs, costs, strict=True):
        steps = cell.config.optim.max_steps
        done = steps if results.pretraining(cell) is not None else max(run_dir(out, cell).steps(), default=0)
        time = cost(cell, done).flops / rate
        seconds += time
        numbers = [str(cell.config.seed), f"{steps:,}", short_number(one.tokens), f"{one.flops:.2e}"]
        lines.append([cell.row.title, *numbers, duration(time) if cell.key in unfinished else "finished"])
    yield from aligned(lines)
    if repeated := len(plan.cells) - len(plan.runs):
        yield f"{repeated} more rows share a run with one of these"
    for row in plan.left_out:
        yield f"left out at this scale: {row.label} ({row.setting})"
    if plan.not_asked_for:
        yield f"not asked for: {'; '.join(row.label for row in plan.not_asked_for)}"
    yield (
        f"{len(costs)} runs, {short_number(sum(one.tokens for one in costs))} tokens, "
        f"{sum(one.flops for one in costs):.2e} FLOP, {sum(one.disk for one in costs) / 1e9:,.2f} GB of checkpoints; "
        f"{len(unfinished)} unfinished, about {duration(seconds)}"
    )
    if plan.found is not None:
        yield from _shown_units(plan, plan.found, results, rate)
    yield f"rate: {source}"
    for sentence in plan.missing:
        yield f"missing: {sentence}"


def _shown_units(plan: Plan, found: Found, results: Results, rate: float) -> Iterator[str]:
    """Fine-tuning and prompting, a line for each task."""
    what = "prompting" if plan.experiment.use == "prompting" else "fine-tuning"
    yield f"{what}, tasks: {' '.join(found.sources)}"
    runs, unfinished, seconds, lines = 0, 0, 0.0, [["task", "runs", "finished", "examples", "about"]]
    for name, data in found.data.items():
        units = [(cell, unit) for cell in plan.runs for unit in cell.units if unit.task == name]
        left, tokens = [(c, unit) for c, unit in units if results.stage(c, unit.stage) is None], mean_tokens(data)
        time = sum(unit_cost(unit, cell, data, tokens).flops for cell, unit in left) / rate
        runs, unfinished, seconds = runs + len(units), unfinished + len(left), seconds + time
        counts = (len(units), len(units) - len(left), len(data.train))
        lines.append([data.task.title, *(f"{count:,}" for count in counts), duration(time)])
    yield from aligned(lines)
    yield f"{runs:,} {what} runs; {unfinished:,} unfinished, about {duration(seconds)} at the rate of pretraining"


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
        write_report(results, place, manifests(plan), names)
    print(f"\nwritten: {place / REPORT}, {FIGURE}, {RESULTS}")
