"""`maelm-fast sweep TASK... --model DIR --data DIR --grid GRID --out OUT`: a grid over seeds, tasks and models.

Started again, by hand or beside itself, the command goes on with what is not finished; finetuning/sweep.py says which
files there are, and in which order runs are taken up.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from maelm_fast.cli.common import OneLineParser
from maelm_fast.cli.reproduce import duration
from maelm_fast.config import require
from maelm_fast.errors import UserError
from maelm_fast.finetuning import tasks
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.examples import TaskData, read_task
from maelm_fast.finetuning.metrics import baselines
from maelm_fast.finetuning.tasks import Task
from maelm_fast.paper import grids, printed
from maelm_fast.paper.sweep import Model, Sweep, estimate, make_model, make_sweep, read_done, run_sweep
from maelm_fast.paper.sweep_plot import PICTURE, draw
from maelm_fast.paper.sweep_report import GLUE, REPORT, RUNS, write_tables
from maelm_fast.stop import Stopped

PAPER = {"base": (printed.TABLE_1, 0), "base++": (printed.TABLE_1, 1), "large++": (printed.TABLE_6, 0)}


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    sweep = _sweep(options)
    out = Path(options.out)
    print("\n".join(_planned(sweep, out)), flush=True)
    if options.plan:
        return 0
    rows = _printed(options.paper) if options.paper else []
    references = {search.data.task.name: baselines(search.data) for search in sweep.searches}
    places = {search.data.task.name: _data_options(search.data.task, options) for search in sweep.searches}
    tables = partial(write_tables, printed=rows, baselines=references, data_options=places)
    stopped = None
    try:
        run_sweep(sweep, out, options.workers, tables)
    except Stopped as stop:
        stopped = stop
    finally:
        if out.exists():
            tables(sweep, out)
    if (out / REPORT).exists():  # not if it was stopped before anything began
        _finish(sweep, out)
    done = read_done(out)
    if stopped is not None:
        left = len(done.unfinished(sweep))
        print(f"stopped with {left} of {len(sweep.runs)} runs unfinished; the same command goes on")
        raise stopped
    if failed := [run for run in sweep.runs if run.key in done.errors]:
        print(f"{len(failed)} of {len(sweep.runs)} runs failed; the same command tries them again")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="maelm-fast sweep",
        description="Fine-tunes every cell of a grid with several seeds, and reports each task's best cell by the "
        "median over seeds on the development set. Several of these commands may share one --out, say one per GPU "
        "(CUDA_VISIBLE_DEVICES).",
        epilog="Exit code: 0; 1 if a run failed; 2 for bad input; 143 or 130 if stopped by SIGTERM or SIGINT.",
    )
    add = parser.add_argument
    add("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(tasks.TASKS)}; 'glue' is all of GLUE's eight")
    add("--model", action="append", default=[], metavar="[LABEL=]DIR[@STEP]", help="a run directory of ours (newest "
        "checkpoint, or that of STEP) or a Hugging Face directory; give it again for more rows")  # fmt: skip
    add("--random-init", action="append", default=[], metavar="[LABEL=]DIR", help="a row for the same encoder with "
        "random weights, the control that pretraining must beat; may be given again")  # fmt: skip
    add("--data", required=True, nargs="+", action="extend", metavar="DIR", help="a directory with TASK/ or its files "
        "in it, or hub; of several, a task takes the first that has TASK/")  # fmt: skip
    known = "; ".join(f"{grid.name}: {grid.about}" for grid in grids.GRIDS.values())
    add("--grid", required=True, metavar="GRID", help=f"{known}; or a YAML file, see docs/sweeps.md")
    add("--out", required=True, metavar="OUT", help="ledger and reports; sweeps in one directory share runs")
    add("--seeds", type=int, default=5, metavar="N", help="each cell with seeds 0 to N-1 (default: 5, the paper's)")
    add("--budget", type=int, metavar="N", help="a fixed pseudo-random subset of N cells of each task's grid")
    add("--workers", type=int, default=1, metavar="N", help="processes on this machine: each sees one GPU, in turn, or "
        "has its share of the CPU threads (default: 1)")  # fmt: skip
    add("--limit", type=int, metavar="N", help="training examples per task: a fixed pseudo-random subset")
    add("--engine", choices=("auto", "packed", "transformers"), default="auto", help="for Hugging Face directories: "
        "their own model (auto), or our kernels (packed)")  # fmt: skip
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--precision", choices=("auto", "bf16", "fp32"), default="auto", help="unless the grid names it")
    add("--micro-batch-tokens", type=int, default=FinetuneConfig.micro_batch_tokens, metavar="N",
        help="tokens of a forward pass: lower it if memory runs out (default: %(default)s)")  # fmt: skip
    add("--paper", choices=tuple(PAPER), help="the paper's rows of that setting beside ours")
    add("--plan", "--dry-run", action="store_true", help="show cells, runs and the time they will take, and stop")
    own = parser.add_argument_group("a task of your own, instead of TASK")
    own.add_argument("--task", choices=("classification", "regression"))
    own.add_argument("--text-columns", metavar="A[,B]")
    own.add_argument("--label-column", metavar="NAME")
    own.add_argument("--name", help="in the table (default: custom)")
    own.add_argument("--train", nargs="+", action="extend", default=[], metavar="FILE",
                     help="training files, if not DIR/train.*; also of a TASK, if there is only one")  # fmt: skip
    own.add_argument("--validation", nargs="+", action="extend", default=[], metavar="FILE", help="likewise")
    return parser


def _sweep(options: argparse.Namespace) -> Sweep:
    require(bool(options.model or options.random_init), "--model is needed: a run directory or a Hugging Face one")
    grid = grids.get(options.grid)
    chosen = _tasks(options)
    models = [parse_model(text) for text in options.model] + [parse_model(text, True) for text in options.random_init]
    base = FinetuneConfig(
        device=options.device, precision=options.precision, micro_batch_tokens=options.micro_batch_tokens
    )
    for task in chosen:  # before the data is read, which may take long
        grid.cells(task, base)
    data = [_read(task, options) for task in chosen]
    return make_sweep(grid, models, data, options.seeds, options.budget, options.engine, base)


def _tasks(options: argparse.Namespace) -> list[Task]:
    own = (options.task, options.text_columns, options.label_column)
    if any(own):
        require(not options.tasks, "a task by name and --task exclude each other")
        require(all(own), "a task of your own needs --task, --text-columns and --label-column")
        return [tasks.custom(options.task, options.text_columns.split(","), options.label_column,
                             name=options.name or "custom")]  # fmt: skip
    require(options.name is None, "--name is for a task of your own, with --task")
    require(bool(options.tasks), f"name a task: {', '.join(tasks.TASKS)}, or 'glue' for GLUE's eight")
    names = [name for given in options.tasks for name in (GLUE if given == "glue" else (given,))]
    require(
        len(names) == 1 or not (options.train or options.validation),
        "--train and --validation are the files of one task: name one task",
    )
    return [tasks.get(name) for name in names]


def _read(task: Task, options: argparse.Namespace) -> TaskData:
    return read_task(task, _place(task, options.data), options.train, options.validation, options.limit)


def _place(task: Task, places: list[str]) -> str:
    """Which of --data has the task."""
    having = [place for place in places if (Path(place) / task.name).is_dir()]
    require(len(places) == 1 or bool(having), f"none of {', '.join(places)} has a folder {task.name}: see --data")
    return (having or places)[0]


def _data_options(task: Task, options: argparse.Namespace) -> str:
    """The same for `maelm-fast finetune`."""
    words = ["--data", _place(task, options.data)]
    for name in ("task", "text_columns", "label_column", "name", "limit"):
        value = getattr(options, name)
        words += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    for name in ("train", "validation"):
        words += [f"--{name}", *getattr(options, name)] if getattr(options, name) else []
    return shlex.join(words)


def parse_model(text: str, random_init: bool = False) -> Model:
    """ "LABEL=DIR@STEP"; a directory whose name has these signs in it is taken as it is."""
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
    return make_model(label, path, step, random_init)


def _printed(setting: str) -> list[tuple[str, dict[str, str]]]:
    table, group = PAPER[setting]
    _, rows = table.groups[group]
    return [(f"paper, {setting}: {row[0]}", dict(zip(table.columns, row, strict=True))) for row in rows]


def _planned(sweep: Sweep, out: Path) -> Iterator[str]:
    done = read_done(out)
    waiting = {run.key for run in done.unfinished(sweep)}
    yield f"grid {sweep.grid.name}: {sweep.grid.about}"
    for model in sweep.models:
        step = "" if model.step is None else f", step {model.step:,}"
        yield f"model {model.label}: {model.path}{step}{', random weights' if model.random_init else ''}"
    yield f"{'task':14}{'cells':>14}{'seeds':>7}{'runs':>7}{'finished':>10}  searched"
    for search in sweep.searches:
        runs = [run for run in sweep.runs if run.search is search]
        cells = f"{len(search.cells)} of {search.grid_size}"
        searched = ", ".join(
            f"{name} {'/'.join(grids.shown(value) for value in values)}"
            for name, values in sweep.grid.values(search.data.task).items()
            if len(values) > 1
        )
        finished = sum(run.key not in waiting for run in runs)
        counts = f"{cells:>14}{sweep.seeds:>7}{len(runs):>7}{finished:>10}"
        yield f"{search.data.task.title:14}{counts}  {searched or 'nothing'}"
        for note in search.data.notes:
            yield f"    {note}"
    seconds, unknown = estimate(sweep, done)
    if len(waiting) == len(sweep.runs):
        time = "no estimate before a run is finished"
    else:
        time = f"about {duration(seconds)} in one process, by the finished ones"
        time += f", and {unknown} runs of models and tasks of which none is finished" if unknown else ""
    yield f"{len(sweep.runs)} runs, {len(waiting)} unfinished" + (f": {time}" if waiting else "")


def _finish(sweep: Sweep, out: Path) -> None:
    """The picture, and where everything is."""
    text = (out / REPORT).read_text(encoding="utf-8")
    print("\n" + text.split("## Results", 1)[1].split("## Best cells", 1)[0].strip() + "\n")
    written = f"written: {out / REPORT}, best.json, {RUNS}"
    try:
        draw(sweep, out)
    except UserError as error:
        print(f"{written}; {PICTURE} is not drawn: {error}")
    else:
        print(f"{written}, {PICTURE}")
