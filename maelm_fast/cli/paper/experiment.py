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
from maelm_fast.errors import UserError
from maelm_fast.paper import catalogue, scales
from maelm_fast.paper.cost import (
    ASSUMED_BYTES_PER_TOKEN,
    Cost,
    Rate,
    cost,
    needs_gpu_missing_here,
    rate_for,
    unit_cost,
)
from maelm_fast.paper.downstream import assumed_tasks, find_tasks
from maelm_fast.paper.plan import Plan, make_plan
from maelm_fast.paper.report import FIGURE, REPORT, write_report
from maelm_fast.paper.results import Results
from maelm_fast.paper.run import is_store, manifests, place_data, run_dir, run_plan, store_path
from maelm_fast.reporting import RESULTS, require_matplotlib, short_number
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
    plan = _with_tasks(plan, options, only_shown)
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


def _with_tasks(plan: Plan, options: Options, only_shown: bool) -> Plan:
    """The plan with its downstream part. The paper's own scale is shown with it even if no data are given."""
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
            twice = split in files.setdefault(name, {})
            require(not twice, f"--{split} names {name} twice: give its files with commas between them")
            files[name][split] = paths.split(",")
    if options.tasks:
        return plan.with_tasks(find_tasks(experiment.tasks, options.tasks, amount, experiment.one_task, files))
    if experiment.tasks and plan.scale.name == "full" and only_shown:
        names = experiment.tasks[:1] if experiment.one_task else experiment.tasks
        return plan.with_tasks(assumed_tasks(names, amount))
    return plan


def _shown(plan: Plan, data: str | None, out: Path) -> Iterator[str]:
    """The plan in lines: every run with what it costs, and the sum of what is not finished."""
    bytes_per_token, length = _store_means(plan)
    yield f"{plan.experiment.title}; scale {plan.scale.name}: {plan.scale.about}"
    yield f"data: {data or 'none given'}" + (", not prepared yet" if data and not plan.cells[0].data else "")
    yield f"{'run':42}{'seed':>5}{'steps':>11}{'tokens':>9}{'FLOP':>11}{'about':>10}"
    results = Results(plan, Ledger(out))
    unfinished = [cell.key for cell in results.unfinished(units=False)]
    rate = rate_for(plan)
    everything, seconds = Cost(), 0.0
    for cell in plan.runs:
        one, finished = cost(cell, length), cell.key not in unfinished
        everything += one
        pretrained = results.pretraining(cell) is not None
        done = cell.config.optim.max_steps if pretrained else max(run_dir(out, cell).steps(), default=0)
        time = 0.0 if finished else cost(cell, length, done).flops / rate.flops_per_s[cell.row.setting]
        seconds += time
        yield (
            f"{cell.row.title:42}{cell.config.seed:>5}{cell.config.optim.max_steps:>11,}{short_number(one.tokens):>9}"
            f"{one.flops:>11.2e}{'finished' if finished else duration(time):>10}"
        )
    if repeated := len(plan.cells) - len(plan.runs):
        yield f"{repeated} more rows share a run with one of these"
    for row in plan.left_out:
        yield f"left out at this scale: {row.label} ({row.setting})"
    if plan.not_asked_for:
        yield f"not asked for: {'; '.join(row.label for row in plan.not_asked_for)}"
    yield (
        f"{len(plan.runs)} runs, {short_number(everything.tokens)} tokens, {everything.flops:.2e} FLOP, "
        f"{everything.disk / 1e9:,.2f} GB of checkpoints; {len(unfinished)} unfinished, about {duration(seconds)}"
    )
    if plan.found is not None:
        yield from _shown_units(plan, results, rate, bytes_per_token)
    yield f"rate: {rate.source}"
    for sentence in plan.missing:
        yield f"missing: {sentence}"


def _shown_units(plan: Plan, results: Results, rate: Rate, bytes_per_token: float) -> Iterator[str]:
    """Fine-tuning and prompting, a line for each task."""
    found = plan.found
    assert found is not None
    what = "prompting" if plan.experiment.use == "prompting" else "fine-tuning"
    yield f"{what}, tasks: {' '.join(found.sources) or 'none given, official sizes assumed'}"
    yield f"{'task':14}{'runs':>7}{'finished':>10}{'examples':>10}{'tokens':>9}{'FLOP':>11}{'about':>10}"
    runs, left, seconds = 0, 0, 0.0
    for task in found.tasks:
        whole, mine, finished, time = Cost(), 0, 0, 0.0
        for cell in plan.runs:
            for unit in cell.units:
                if unit.task == task.name:
                    one = unit_cost(unit, cell, found.sizes[task.name], bytes_per_token)
                    whole, mine = whole + one, mine + 1
                    if results.stage(cell, unit.stage) is not None:
                        finished += 1
                    else:
                        time += one.flops / rate.flops_per_s[cell.row.setting]
        runs, left, seconds = runs + mine, left + mine - finished, seconds + time
        yield (
            f"{task.title:14}{mine:>7,}{finished:>10,}{found.sizes[task.name].train:>10,}{short_number(whole.tokens):>9}"
            f"{whole.flops:>11.2e}{duration(time):>10}"
        )
    yield f"{runs:,} {what} runs; {left:,} unfinished, about {duration(seconds)} at the rate of pretraining"


def _store_means(plan: Plan) -> tuple[float, float | None]:
    """(bytes of a token, tokens of a training sample): on average over the token stores; assumed, and None, before the
    plan is on some."""
    if not plan.cells[0].data:
        return ASSUMED_BYTES_PER_TOKEN, None
    splits = [manifest.splits["train"] for manifest in manifests(plan).values()]
    tokens = sum(split.tokens for split in splits)
    return sum(split.text_bytes for split in splits) / tokens, tokens / sum(split.samples for split in splits)


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
            write_report(results, place, manifests(plan), names)
        except OSError as error:
            raise UserError(f"cannot write {place}: {error.strerror}") from None
    print(f"\nwritten: {place / REPORT}, {FIGURE}, {RESULTS}")
