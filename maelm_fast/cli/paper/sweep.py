"""`maelm-fast paper sweep TASK... --model DIR --data DIR --grid GRID --out OUT`: a grid over seeds, tasks and models.

Started again, by hand or beside itself, the command resumes what is not finished; paper/sweep.py says which
files there are, and in which order runs are taken up.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from maelm_fast.cli.common import option, parse
from maelm_fast.cli.finetune import TaskOptions
from maelm_fast.cli.paper.experiment import duration
from maelm_fast.config import require
from maelm_fast.encoders import Engine
from maelm_fast.errors import UserError
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.examples import read_task
from maelm_fast.finetuning.fingerprint import Origin
from maelm_fast.finetuning.metrics import baselines
from maelm_fast.finetuning.tasks import TASKS, Task
from maelm_fast.paper import grids, printed
from maelm_fast.paper.catalogue import GLUE
from maelm_fast.paper.sweep import Sweep, estimate, make_sweep, run_sweep
from maelm_fast.paper.sweep_report import PICTURE, REPORT, draw, write_tables
from maelm_fast.reporting import RESULTS
from maelm_fast.stop import Stopped
from maelm_fast.training.rundir import RunDir
from maelm_fast.work import Ledger

PAPER = {"base": (printed.TABLE_1, 0), "base++": (printed.TABLE_1, 1), "large++": (printed.TABLE_6, 0)}


EXAMPLES = """
    maelm-fast paper sweep rte mrpc --model runs/base --data glue/ --grid quick --out sweeps/quick
    maelm-fast paper sweep glue --model MLM=runs/mlm --model MAE-LM=runs/mae@50000 --data glue/ --grid paper-base \\
        --workers 2 --out sweeps/glue
    maelm-fast paper sweep glue --model runs/base --data glue/ --grid paper-base --out sweeps/glue --plan
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Fine-tune every cell of a grid with several seeds, and report each task's best cell by the median over seeds on
    the development set. Several of these commands may share one --out, say one per GPU (CUDA_VISIBLE_DEVICES).

    Exit code: 0; 1 if a run failed; 2 for bad input; 143 or 130 if stopped by SIGTERM or SIGINT."""

    tasks: tuple[str, ...] = option(
        (), positional=True, metavar="TASK", help=f"Of {', '.join(TASKS)}; 'glue' is all of GLUE's eight."
    )
    model: tuple[str, ...] = option((), metavar="[LABEL=]DIR[@STEP]")
    """A run directory of ours (newest checkpoint, or that of STEP) or a Hugging Face directory; a row each."""
    random_init: tuple[str, ...] = option((), metavar="[LABEL=]DIR", more=True)
    """A row for the same encoder with random weights, the control that pretraining must beat."""
    data: tuple[str, ...] = option(metavar="DIR")
    """A directory with TASK/ or its files in it, or hub; of several, a task takes the first that has TASK/."""
    grid: str = option(
        help="; ".join(f"{grid.name}: {grid.about}" for grid in grids.GRIDS.values())
        + "; or a YAML file, see docs/sweeps.md."
    )
    out: Path
    """Ledger and reports; sweeps in one directory share runs."""
    seeds: int = 5
    """Each cell with seeds 0 to N-1; the paper's are 5."""
    budget: int | None = option(None, more=True)
    """A fixed pseudo-random subset of so many cells of each task's grid."""
    workers: int = 1
    """Processes, each with one GPU in turn, or its share of the CPU threads."""
    limit: int | None = option(None, more=True)
    """Training examples per task: a fixed pseudo-random subset."""
    engine: Engine = option("auto", more=True)
    """For Hugging Face directories: their own model (auto), or our kernels (packed)."""
    device: Literal["auto", "cpu", "cuda"] = option("auto", more=True)
    precision: Literal["auto", "bf16", "fp32"] = option("auto", more=True)
    """Unless the grid names it."""
    micro_batch_tokens: int = option(FinetuneConfig.micro_batch_tokens, more=True)
    """Tokens of a forward pass: lower it if memory runs out."""
    paper: Literal["base", "base++", "large++"] | None = option(None, more=True)
    """The paper's rows of that setting beside ours."""
    plan: bool = option(False, aliases=("--dry-run",))
    """Show cells, runs and the time they will take, and stop."""


def main(argv: list[str]) -> int:
    options, own = parse("paper sweep", argv, Options, TaskOptions, examples=EXAMPLES)
    sweep, out = _sweep(options, own), options.out
    print("\n".join(_planned(sweep, out)), flush=True)
    if options.plan:
        return 0
    floors, stopped = {data.task.name: baselines(data) for data in sweep.tasks}, None
    try:
        run_sweep(sweep, out, options.workers)
    except Stopped as stop:
        stopped = stop
    finished, failed = Ledger(out).ended()
    if out.exists():  # else it was stopped before anything began
        places = {data.task.name: _data_options(data.task, options, own) for data in sweep.tasks}
        print(f"\n{write_tables(sweep, out, _printed(options.paper), floors, places)}\n")
        written = f"written: {out / REPORT}, {RESULTS}"
        try:
            draw(sweep, out)
        except UserError as error:
            print(f"{written}; {PICTURE} is not drawn: {error}")
        else:
            print(f"{written}, {PICTURE}")
    if stopped is not None:
        left = sum(run.identity not in finished for run in sweep.runs)
        print(f"stopped with {left} of {len(sweep.runs)} runs unfinished; the same command resumes")
        raise stopped
    if faults := sum(run.identity in failed for run in sweep.runs):
        print(f"{faults} of {len(sweep.runs)} runs failed; the same command tries them again")
    return 1 if faults else 0


def _sweep(options: Options, own: TaskOptions) -> Sweep:
    require(bool(options.model or options.random_init), "--model is needed: a run directory or a Hugging Face one")
    grid = grids.get(options.grid)
    chosen = own.chosen(options.tasks, GLUE)
    models = [parse_model(text, options.engine) for text in options.model]
    models += [parse_model(text, options.engine, random_init=True) for text in options.random_init]
    base = FinetuneConfig(
        device=options.device, precision=options.precision, micro_batch_tokens=options.micro_batch_tokens
    )
    for task in chosen:  # before the data is read, which may take long
        grid.cells(task, base)
    data = [read_task(task, _place(task, options.data), own.train, own.validation, options.limit) for task in chosen]
    return make_sweep(grid, models, data, options.seeds, options.budget, base)


def _place(task: Task, places: Sequence[str]) -> str:
    """Which of --data has the task."""
    having = [place for place in places if (Path(place) / task.name).is_dir()]
    require(len(places) == 1 or bool(having), f"none of {', '.join(places)} has a folder {task.name}: see --data")
    return (having or places)[0]


def _data_options(task: Task, options: Options, own: TaskOptions) -> str:
    """The same for `maelm-fast finetune`."""
    words = ["--data", _place(task, options.data)]
    for name, value in {**vars(own), "limit": options.limit}.items():
        if value:
            words += [f"--{name.replace('_', '-')}", *(value if isinstance(value, tuple) else [str(value)])]
    return shlex.join(words)


def parse_model(text: str, engine: Engine, random_init: bool = False) -> Origin:
    """ "LABEL=DIR@STEP"; a directory whose name has these signs in it is taken as it is. engine: of one that is no run
    of ours."""
    label, path, step = "", text, None
    if not Path(path).exists() and "=" in path:
        label, path = path.split("=", 1)
        require(bool(label), f"--model {text}: the label before '=' is empty")
    if not Path(path).exists() and "@" in path:
        path, number = path.rsplit("@", 1)
        require(number.isdigit(), f"--model {text}: after '@' comes a checkpoint's step, not '{number}'")
        step = int(number)
    if not label:
        label = Path(path).resolve().name + (f" at {step:,}" if step is not None else "")
        label += ", random init" if random_init else ""
    return Origin.of(path, step, "auto" if RunDir(path).exists else engine, random_init, label)


def _printed(setting: str | None) -> list[tuple[str, dict[str, str]]]:
    if setting is None:
        return []
    table, group = PAPER[setting]
    _, rows = table.groups[group]
    return [(f"paper, {setting}: {row[0]}", dict(zip(table.columns, row, strict=True))) for row in rows]


def _planned(sweep: Sweep, out: Path) -> Iterator[str]:
    done, _ = Ledger(out).ended()
    waiting = {run.key for run in sweep.runs if run.identity not in done}
    yield f"grid {sweep.grid.name}: {sweep.grid.about}"
    for model in sweep.models:
        step = "" if model.step is None else f", step {model.step:,}"
        yield f"model {model.label}: {model.path}{step}{', random weights' if model.random_init else ''}"
    yield f"{'task':14}{'cells':>14}{'seeds':>7}{'runs':>7}{'finished':>10}  searched"
    for data in sweep.tasks:
        task, runs = data.task, [run for run in sweep.runs if run.data is data]
        cells = f"{len(sweep.cells[task.name])} of {sweep.grid.size(task)}"
        searched = ", ".join(
            f"{name} {'/'.join(grids.shown(value) for value in values)}"
            for name, values in sweep.grid.values(task).items()
            if len(values) > 1
        )
        finished = sum(run.key not in waiting for run in runs)
        yield f"{task.title:14}{cells:>14}{sweep.seeds:>7}{len(runs):>7}{finished:>10}  {searched or 'nothing'}"
        yield from (f"    {note}" for note in data.notes)
    seconds, unknown = estimate(sweep, done)
    if len(waiting) == len(sweep.runs):
        time = "no estimate before a run is finished"
    else:
        time = f"about {duration(seconds)} in one process, by the finished ones"
        time += f", and {unknown} runs of models and tasks of which none is finished" if unknown else ""
    yield f"{len(sweep.runs)} runs, {len(waiting)} unfinished" + (f": {time}" if waiting else "")
