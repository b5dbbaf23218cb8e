"""What a sweep found: results.csv, a row per number of every planned run; SWEEP.md, best cells and the paper's table;
sweep.png. All from the plan and the ledger.

A task's best cell is, among those with the most finished seeds, the one with the highest median of the task's metric on
its first validation split; on a tie the earlier in the grid (scores.best_cells).
"""

from __future__ import annotations

import itertools
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maelm_fast.data.files import writing
from maelm_fast.errors import UserError
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.examples import TaskData
from maelm_fast.finetuning.fingerprint import Origin, deciding
from maelm_fast.finetuning.report import task_table
from maelm_fast.finetuning.tasks import TASKS
from maelm_fast.paper.catalogue import GLUE
from maelm_fast.paper.grids import Cell, shown
from maelm_fast.paper.scores import AVERAGE, averages, best_cells, columns, filled, own_scores
from maelm_fast.paper.sweep import Finished, Sweep
from maelm_fast.reporting import (
    NONE,
    figure_of,
    frame,
    grid,
    legend_outside,
    look,
    measured,
    number,
    over_seeds,
    per_group,
    save,
    table,
    where,
    whiskers,
    write_results,
)
from maelm_fast.training.files import write_text
from maelm_fast.work import Identity, Ledger, lock

REPORT, PICTURE = "SWEEP.md", "sweep.png"
LAST = "last"
"""The metric of the rows with the task's own after the last step."""
_MEASURED = ("steps", "skipped", "seconds", "examples_per_s", "device", "precision")

PrintedRow = tuple[str, Mapping[str, str]]
"""A row of a published table: the model's name, and cells by column header."""


def write_tables(
    sweep: Sweep,
    out: Path,
    printed: Sequence[PrintedRow] = (),
    baselines: Mapping[str, Mapping[str, Any]] | None = None,
    data_options: Mapping[str, str] | None = None,
) -> str:
    """SWEEP.md and results.csv of what is finished; each file is replaced in one step. Returns the table of results.

    printed: rows of a published table to stand beside ours. baselines: by task, then name, the metrics of predictions
    without a model. data_options: by task, those of `maelm-fast finetune`, for the commands that the
    report gives.

    Raises UserError if they cannot be written."""
    with lock(out / "locks" / "report.lock", wait=True), writing(out, "the same command resumes"):
        finished, failed = Ledger(out).ended()
        rows = results(sweep, finished, failed)
        write_results(out, rows)
        table = _paper_table(sweep, where(rows, status="finished", best=True), printed, baselines or {})
        text = "\n".join(_report(sweep, rows, finished, failed, table, data_options or {}))
        write_text(out / REPORT, text.rstrip() + "\n")
    return "\n".join(table).strip()


def results(sweep: Sweep, finished: Finished, failed: Mapping[Identity, str]) -> Any:
    """A row for every metric of every finished run at its best evaluation, and one for every other run. Columns: model,
    its path and step; task, cell of the grid and all its fields; seed; status, error; best: whether the cell is the
    best one; split, metric, value."""
    rows: list[dict[str, Any]] = []
    for run in sweep.runs:
        result, error, task = finished.get(run.identity), failed.get(run.identity), run.data.task
        status = "finished" if result else "failed" if error else "unfinished"
        about = {
            "model": run.model.label,
            "path": run.model.path,
            "checkpoint": run.model.step,
            "task": task.name,
            "cell": run.cell.number,
            **deciding(run.config),
            **run.cell.values,
            "seed": run.seed,
            "status": status,
            "error": error,
            "key": run.key,
        }
        if result is None:
            rows.append(about)
            continue
        about |= {name: result.get(name) for name in _MEASURED}
        rows += measured(about, {task.validation[0]: {LAST: result["last"]}})
        rows += measured(about, result["metrics"])
    found = frame(rows, ("model", "task", "cell", "seed", "status", "split", "metric", "value"))
    best = best_cells(found, [data.task for data in sweep.tasks])
    chosen = set(zip(best["model"], best["task"], best["cell"], strict=True))
    return found.assign(best=[key in chosen for key in zip(found["model"], found["task"], found["cell"], strict=True)])


def _report(
    sweep: Sweep,
    rows: Any,
    finished: Finished,
    failed: Mapping[Identity, str],
    table: list[str],
    data_options: Mapping[str, str],
) -> list[str]:
    """SWEEP.md."""
    left = sum(run.identity not in finished for run in sweep.runs)
    faults = [f"- {run.title}: {failed[run.identity]}" for run in sweep.runs if run.identity in failed]
    state = f"{len(sweep.runs) - left} finished, {len(faults)} failed, {left - len(faults)} to do"
    grid = f"Grid {sweep.grid.name} ({sweep.grid.about}), {sweep.seeds} seeds. {len(sweep.runs)} runs: {state}."
    lines = ["# Fine-tuning sweep", "", grid, ""]
    if left:
        lines += ["**Not all runs are finished: best cells and medians are provisional.**", ""]
    tried = {data.task: (len(sweep.cells[data.task.name]), sweep.grid.size(data.task)) for data in sweep.tasks}
    if parts := [f"{task.title} {cells} of {size}" for task, (cells, size) in tried.items() if cells < size]:
        subset = "a fixed pseudo-random subset of each task's cells (--budget)"
        lines += [f"**Not the whole search: {subset}: {', '.join(parts)}.**", ""]
    lines += ["## Results", "", *table, "## Best cells", "", *_best_cells(sweep, rows, data_options)]
    if faults:
        lines += ["## Failed runs", "", "The same command tries them again.", "", *faults[:20], ""]
    truncation = {
        run.data.task.name: finished[run.identity]["truncation"] for run in sweep.runs if run.identity in finished
    }
    return [*lines, "## Models and data", "", *_models(sweep), *task_table(sweep.tasks, truncation)]


def _paper_table(
    sweep: Sweep, best: Any, printed: Sequence[PrintedRow], baselines: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Per model the medians; the published rows first, baselines last."""
    tasks, labels = [data.task for data in sweep.tasks], [model.label for model in sweep.models]
    layout = columns(tasks)
    mean = averages(best, {name: TASKS[name].metric for name in GLUE})
    body = [[name, *(cells.get(column.header, NONE) for column in layout)] for name, cells in printed]
    for label, cells in zip(labels, filled(best, layout, labels, over_seeds, mean), strict=True):
        body.append([f"**{label}**", *cells])
    for name in dict.fromkeys(name for by_name in baselines.values() for name in by_name):
        floors = [baselines.get(c.task.name, {}).get(name, {}).get(c.metric) if c.task else None for c in layout]
        body.append([f"no model: {name}", *map(number, floors)])
    notes = [
        "Development sets, in percent. Medians over seeds of the best cell, [lowest, highest]. Each run counts with "
        "the best of its evaluations, and the cell is chosen on the same development set, as in the paper: a number "
        "for comparing models that were searched alike, not an unbiased one."
    ]
    fixed = per_group(where(best, task="squad_v2"), "metric", "model")
    if "squad_v2" in (task.name for task in tasks):
        pairs = {label: [fixed.get((metric, label), []) for metric in ("exact", "f1")] for label in labels}
        parts = [f"{label} {'/'.join(map(over_seeds, pair))}" for label, pair in pairs.items() if all(pair)]
        also = f"; with the fixed threshold EM/F1 are: {', '.join(parts)}" if parts else ""
        notes.append(f"SQuAD EM and F1: each with the no-answer threshold that is best on the development set{also}.")
    if AVERAGE in (column.header for column in layout):
        notes.append("AVG: over GLUE's eight tasks, only if all are there; MNLI as the mean of its two splits.")
    return table(["model", *(column.header for column in layout)], body) + [x for note in notes for x in (note, "")]


def _best_cells(sweep: Sweep, rows: Any, data_options: Mapping[str, str]) -> list[str]:
    """How good, of how many seeds and cells, and the command that gives the model itself, which a sweep keeps not."""
    body, commands = [], []
    done = where(rows, status="finished")
    for data, model in itertools.product(sweep.tasks, sweep.models):
        task, mine = data.task, where(done, model=model.label, task=data.task.name, split=data.task.validation[0])
        best, cells = where(mine, best=True), {cell.number: cell for cell in sweep.cells[task.name]}
        if len(best):
            values, cell = per_group(best, "metric"), cells[best["cell"].iloc[0]]
            score, last = f"{task.metric} {over_seeds(values[task.metric])}", over_seeds(values[LAST])
            seeds = f"{len(values[task.metric])} of {sweep.seeds}"
            tried = f"{mine['cell'].nunique()} of {sweep.grid.size(task)}"
            body.append([task.title, model.label, f"{cell.number}: {cell.title}", score, seeds, tried, last])
            commands.append(_command(sweep, model, data, cell, data_options.get(task.name, "--data DIR")))
    header = ["task", "model", "best cell", "median [lowest, highest]", "seeds", "cells tried", "last evaluation"]
    again = "With the model, its predictions, learning curves and effective ranks, a best cell again:"
    return [*table(header, body), *([again, "", "```", *commands, "```", ""] if commands else [])]


def _command(sweep: Sweep, model: Origin, data: TaskData, cell: Cell, place: str) -> str:
    words = ["maelm-fast finetune", *([data.task.name] if data.task.name in TASKS else [])]
    words += ["--model", shlex.quote(model.path)]
    words += ["--step", str(model.step)] if model.step is not None else []
    words += ["--random-init"] if model.random_init else []
    words += ["--engine", model.engine] if model.engine != "auto" else []
    default = FinetuneConfig()
    for name, value in vars(cell.config).items():
        if value != getattr(default, name) or name in cell.values:
            words += [f"--{name}", shlex.quote(str(list(value) if isinstance(value, tuple) else value))]
    return " ".join([*words, "--seeds", str(sweep.seeds), place])


def _models(sweep: Sweep) -> list[str]:
    weights = {True: "random", False: "pretrained"}
    header = ["model", "directory", "checkpoint", "weights", "fingerprint"]
    return table(
        header, ([m.label, m.path, number(m.step, 0), weights[m.random_init], m.fingerprint] for m in sweep.models)
    )


def draw(sweep: Sweep, out: Path) -> None:
    """OUT/sweep.png: a panel per task, the metric over the learning rate. A mark is a cell's median over seeds; the
    line joins the best cells of a model, with their seeds and bars from the lowest to the highest.

    Raises UserError if matplotlib is not installed or nothing is finished."""
    rows = where(results(sweep, *Ledger(out).ended()), status="finished")
    panels = [data for data in sweep.tasks if data.task.name in set(rows["task"])]
    if not panels:
        raise UserError("nothing to draw: no run is finished")
    wide = min(len(panels), 3)
    tall = -(-len(panels) // wide)
    figure = figure_of(1.0 + 4.2 * wide, 0.9 + 3.6 * tall)
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes = figure.subplots(tall, wide, squeeze=False).ravel()
    for axis in axes[len(panels) :]:
        axis.remove()
    for axis, data in zip(axes, panels, strict=False):
        tried, whole = sweep.cells[data.task.name], sweep.grid.size(data.task)
        for i, model in enumerate(sweep.models):
            shift = 1.03 ** (i - (len(sweep.models) - 1) / 2)  # beside each other, not on top
            best: dict[float, list[float]] = {}
            mine = where(own_scores(rows, data.task), model=model.label)
            for (rate, _), values in per_group(mine, "lr", "cell").items():
                middle = statistics.median(values)
                axis.plot(rate * shift, middle, linestyle="none", markersize=4, alpha=0.4, **look(i))
                best[rate] = max(best.get(rate, values), values, key=statistics.median)
            for rate, values in best.items():
                whiskers(axis, rate * shift, statistics.median(values), values, look(i)["color"])
            line = [(rate * shift, statistics.median(best[rate])) for rate in sorted(best)]
            if line:
                axis.plot(*zip(*line, strict=True), linewidth=1.6, label=model.label, **look(i))
        rates = sorted({cell.config.lr for cell in tried})
        axis.set_xscale("log")
        axis.set_xlim(rates[0] / 1.25, rates[-1] * 1.25)
        axis.xaxis.set_major_locator(FixedLocator(rates))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value).replace("e-0", "e-")))
        left = "" if len(tried) == whole else f", {len(tried)} of {whole} cells"
        axis.set_title(f"{data.task.title}{left}", size=11)
        axis.set_ylabel(data.task.metric.replace("_", " ") + " (%)")
        axis.set_xlabel("peak learning rate")
        grid(axis)
    legend_outside(figure, axes[: len(panels)], 4)
    save(figure, out / PICTURE)
