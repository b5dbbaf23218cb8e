"""What a sweep found: results.csv, a row per number of every planned run; SWEEP.md, best cells and the paper's table;
sweep.png. All from the plan and the ledger.

A task's best cell is, among those with the most finished seeds, the one with the highest median of the task's metric on
its first validation split; on a tie the earlier in the grid (scores.best_cells).
"""

from __future__ import annotations

import shlex
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from maelm_fast.errors import UserError
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.fingerprint import deciding
from maelm_fast.finetuning.tasks import TASKS, Task
from maelm_fast.paper.catalogue import GLUE
from maelm_fast.paper.grids import Cell, shown
from maelm_fast.paper.scores import AVERAGE, averages, best_cells, columns, filled, own_scores
from maelm_fast.paper.sweep import Done, Model, Search, Sweep, read_done
from maelm_fast.reporting import (
    NONE,
    RESULTS,
    figure_of,
    frame,
    grid,
    look,
    low_to_high,
    measured,
    number,
    per_group,
    require_matplotlib,
    save,
    table,
    where,
    write_results,
)
from maelm_fast.training.files import write_text
from maelm_fast.work import lock

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
) -> None:
    """SWEEP.md and results.csv of what is finished; each file is replaced in one step.

    printed: rows of a published table to stand beside ours. baselines: by task, then name, the metrics of predictions
    without a model. data_options: by task, those of `maelm-fast finetune`, for the commands that the
    report gives.

    Raises UserError if they cannot be written."""
    with lock(out / "locks" / "report.lock", wait=True):
        done = read_done(out)
        rows = results(sweep, done)
        try:
            write_results(out, rows)
            text = "\n".join(_report(_Found.of(sweep, rows), done, printed, baselines or {}, data_options or {}))
            write_text(out / REPORT, text.rstrip() + "\n")
        except OSError as error:
            raise UserError(f"cannot write in {out}: {error.strerror}; the same command resumes") from None


def results(sweep: Sweep, done: Done) -> Any:
    """A row for every metric of every finished run at its best evaluation, and one for every other run. Columns: model,
    its path and step; task, cell of the grid and all its fields; seed; status, error; best: whether the cell is the
    best one; split, metric, value."""
    rows: list[dict[str, Any]] = []
    for run in sweep.runs:
        result, error, task = done.results.get(run.key), done.errors.get(run.key), run.search.data.task
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
    best = best_cells(found, [search.data.task for search in sweep.searches])
    chosen = set(zip(best["model"], best["task"], best["cell"], strict=True))
    return found.assign(best=[key in chosen for key in zip(found["model"], found["task"], found["cell"], strict=True)])


@dataclass(frozen=True)
class _Found:
    """The finished rows of a sweep, as its report asks for them."""

    sweep: Sweep
    best: Any
    """The rows of the best cells."""
    values: dict[tuple[str, str, str, str], list[float]]
    """Of the best cells: (model, task, split, metric) -> over the seeds."""
    tried: dict[tuple[str, str], set[int]]
    """(model, task) -> the cells of which a seed is finished."""

    @classmethod
    def of(cls, sweep: Sweep, rows: Any) -> _Found:
        rows, tried = where(rows, status="finished"), defaultdict(set)
        for model, task, cell in zip(rows["model"], rows["task"], rows["cell"], strict=True):
            tried[model, task].add(cell)
        best = where(rows, best=True)
        return cls(sweep, best, per_group(best, "model", "task", "split", "metric"), tried)

    @property
    def tasks(self) -> list[Task]:
        return [search.data.task for search in self.sweep.searches]

    def over_seeds(self, model: str, task: Task, metric: str) -> list[float]:
        """On the split that selects; empty if no run is finished."""
        return self.values.get((model, task.name, task.validation[0], metric), [])

    def cell(self, model: str, search: Search) -> Cell | None:
        numbers = where(self.best, model=model, task=search.data.task.name)["cell"].tolist()
        return next((cell for cell in search.cells if cell.number in numbers), None)


def _report(
    found: _Found,
    done: Done,
    printed: Sequence[PrintedRow],
    baselines: Mapping[str, Mapping[str, Any]],
    data_options: Mapping[str, str],
) -> list[str]:
    """SWEEP.md."""
    sweep = found.sweep
    left, failed = len(done.unfinished(sweep)), [run for run in sweep.runs if run.key in done.errors]
    counts = (
        f"{len(sweep.runs)} runs: {len(sweep.runs) - left} finished, {len(failed)} failed, {left - len(failed)} to do"
    )
    lines = ["# Fine-tuning sweep", ""]
    lines += [f"Grid {sweep.grid.name} ({sweep.grid.about}), {sweep.seeds} seeds. {counts}.", ""]
    if left:
        lines += ["**Not all runs are finished: best cells and medians are provisional.**", ""]
    if parts := [
        f"{search.data.task.title} {len(search.cells)} of {search.grid_size}"
        for search in sweep.searches
        if len(search.cells) < search.grid_size
    ]:
        subset = f"a budget of {sweep.budget} cells per task, a fixed pseudo-random subset"
        lines += [f"**Not the whole search: {subset}. Cells: {', '.join(parts)}.**", ""]
    lines += ["## Results", "", *_paper_table(found, printed, baselines)]
    lines += ["## Best cells", "", *_best_table(found)]
    if commands := [
        _command(sweep, model, search, cell, data_options)
        for search in sweep.searches
        for model in sweep.models
        if (cell := found.cell(model.label, search))
    ]:
        intro = "With the model, its predictions, learning curves and effective ranks, a best cell again:"
        lines += [intro, "", "```", *commands, "```", ""]
    if failed:
        lines += ["## Failed runs", "", "The same command tries them again.", ""]
        lines += [f"- {run.title}: {done.errors[run.key]}" for run in failed[:20]]
        lines += [f"- and {len(failed) - 20} more: see the errors in {RESULTS}", ""] if len(failed) > 20 else [""]
    return [*lines, "## Models and data", "", *_sources(sweep), *_cut(sweep, done)]


def _paper_table(found: _Found, printed: Sequence[PrintedRow], baselines: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Per model: medians, then lowest to highest, then seeds and cells; the published rows first, baselines last."""
    sweep, layout = found.sweep, columns(found.tasks)
    labels = [model.label for model in sweep.models]
    mean = averages(found.best, {name: TASKS[name].metric for name in GLUE})
    medians = filled(found.best, layout, labels, _median, mean)
    spreads = filled(found.best, layout, labels, low_to_high)
    rows = [[name, *(cells.get(column.header, NONE) for column in layout)] for name, cells in printed]
    for label, middle, spread in zip(labels, medians, spreads, strict=True):
        efforts = []
        for column in layout:
            search = next((search for search in sweep.searches if search.data.task == column.task), None)
            if search:
                seeds = len(found.over_seeds(label, search.data.task, search.data.task.metric))
                tried = len(found.tried.get((label, search.data.task.name), ()))
                efforts.append(f"{seeds} of {sweep.seeds}; {tried} of {search.grid_size}")
            else:
                efforts.append("")
        low_high = (text if column.task else "" for text, column in zip(spread, layout, strict=True))
        rows += [[f"**{label}**", *middle], ["lowest to highest", *low_high], ["seeds; cells", *efforts]]
    for name in dict.fromkeys(name for by_name in baselines.values() for name in by_name):
        floors = [baselines.get(c.task.name, {}).get(name, {}).get(c.metric) if c.task else None for c in layout]
        rows.append([f"no model: {name}", *map(number, floors)])
    lines = table(["model", *(column.header for column in layout)], rows)
    notes = [
        "Development sets. Medians over seeds of the best cell, in percent. Each run counts with the best of its "
        "evaluations, and the cell is chosen on the same development set, as in the paper: a number for comparing "
        "models that were searched alike, not an unbiased one."
    ]
    if averaged := any(column.header == AVERAGE for column in layout):
        notes.append("AVG: over GLUE's eight tasks, MNLI as the mean of its two splits.")
    if squad := next((task for task in found.tasks if task.name == "squad_v2"), None):
        pairs = {label: [found.over_seeds(label, squad, metric) for metric in ("exact", "f1")] for label in labels}
        fixed = [f"{label} {'/'.join(map(_median, pair))}" for label, pair in pairs.items() if all(pair)]
        also = f"; with the fixed threshold EM/F1 are: {', '.join(fixed)}" if fixed else ""
        notes.append(f"SQuAD EM and F1: each with the no-answer threshold that is best on the development set{also}.")
    for label in labels if averaged else ():
        if missing := [name for name in GLUE if (label, name) not in found.tried]:
            why = f"there is no result for {', '.join(missing)}"
            notes.append(f"{label}: AVG is over GLUE's eight tasks; {why}.")
    return lines + [line for note in notes for line in (note, "")]


def _median(values: Sequence[float]) -> str:
    return number(statistics.median(values))


def _best_table(found: _Found) -> list[str]:
    rows = []
    for search in found.sweep.searches:
        task = search.data.task
        for label in (model.label for model in found.sweep.models):
            cell, values = found.cell(label, search), partial(found.over_seeds, label, task)
            if cell is None:
                rows.append([task.title, label, *[NONE] * 6])
                continue
            own, others = values(task.metric), [metric for metric in task.metrics if metric != task.metric]
            also = ", ".join(f"{metric} {_median(values(metric))}" for metric in others if values(metric))
            seeds, last = f"{len(own)} of {found.sweep.seeds}", _median(values(LAST))
            score = f"{task.metric} {_median(own)} [{number(min(own))}, {number(max(own))}]"
            rows.append([task.title, label, str(cell.number), cell.title, score, seeds, last, also or NONE])
    header = ["task", "model", "cell", "values", "median [lowest, highest]", "seeds", "last evaluation", "also"]
    return table(header, rows)


def _command(sweep: Sweep, model: Model, search: Search, cell: Cell, data_options: Mapping[str, str]) -> str:
    """How to have the model itself, which a sweep does not keep."""
    task = search.data.task
    words = ["maelm-fast finetune", *([task.name] if task.name in TASKS else []), "--model", shlex.quote(model.path)]
    words += ["--step", str(model.step)] if model.step is not None else []
    words += ["--random-init"] if model.random_init else []
    words += ["--engine", sweep.engine_of(model)] if sweep.engine != "auto" else []
    default = FinetuneConfig()
    for name, value in vars(cell.config).items():
        if value != getattr(default, name) or name in cell.values:
            words += [f"--{name}", shlex.quote(str(list(value) if isinstance(value, tuple) else value))]
    return " ".join([*words, "--seeds", str(sweep.seeds), data_options.get(task.name, "--data DIR")])


def _sources(sweep: Sweep) -> list[str]:
    models = (
        [
            model.label,
            model.path,
            number(model.step, 0),
            "random" if model.random_init else "pretrained",
            model.fingerprint,
        ]
        for model in sweep.models
    )
    lines = table(["model", "directory", "checkpoint", "weights", "fingerprint"], models)
    rows = []
    for search in sweep.searches:
        data = search.data
        validation = ", ".join(f"{name} {len(split):,}" for name, split in data.validation.items())
        rows.append([data.task.title, data.train.source, f"{len(data.train):,}", validation, search.fingerprint])
    lines += table(["task", "training examples from", "training", "validation", "fingerprint"], rows)
    return lines + [f"- {search.data.task.title}: {note}" for search in sweep.searches for note in search.data.notes]


def _cut(sweep: Sweep, done: Done) -> list[str]:
    """How many inputs were cut, as the runs recorded it: once for each tokenisation."""
    models: dict[str, dict[str, None]] = {}
    for run in sweep.runs:
        truncation, task = done.results.get(run.key, {}).get("truncation", {}), run.search.data.task
        parts = {name: part for name, part in truncation.items() if isinstance(part, dict) and "inputs" in part}
        told = ", ".join(f"{name} {part['cut']:,} of {part['inputs']:,}" for name, part in parts.items() if part["cut"])
        if told:
            longest = truncation.get("max_length", run.config.max_length)
            what = (
                f"questions cut to {run.config.question_length}" if task.kind == "spans" else f"inputs cut to {longest}"
            )
            models.setdefault(f"- {task.title}: {what} tokens: {told}", {})[run.model.label] = None
    everyone = len(sweep.models)
    return [line if len(labels) == everyone else f"{line} ({', '.join(labels)})" for line, labels in models.items()]


def draw(sweep: Sweep, out: Path) -> None:
    """OUT/sweep.png: a panel per task, the metric over the learning rate. A mark is a cell's median over seeds; the
    line joins the best cells of a model, with the lowest and highest of their seeds.

    Raises UserError if matplotlib is not installed or nothing is finished."""
    require_matplotlib()
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    rows = where(results(sweep, read_done(out)), status="finished")
    panels = [search for search in sweep.searches if search.data.task.name in set(rows["task"])]
    if not panels:
        raise UserError("nothing to draw: no run is finished")
    wide = min(len(panels), 3)
    tall = -(-len(panels) // wide)
    figure = figure_of(1.0 + 4.2 * wide, 0.9 + 3.6 * tall)
    axes = figure.subplots(tall, wide, squeeze=False).ravel()
    for axis in axes[len(panels) :]:
        axis.remove()
    legend: dict[str, Any] = {}
    for axis, search in zip(axes, panels, strict=False):
        rates = sorted({cell.config.lr for cell in search.cells})
        for i, model in enumerate(sweep.models):
            cells = per_group(where(own_scores(rows, search.data.task), model=model.label), "cell", "lr")
            shift = 1.03 ** (i - (len(sweep.models) - 1) / 2)  # beside each other, not on top
            _draw_model(axis, [(rate, values) for (_, rate), values in cells.items()], shift, model.label, look(i))
        axis.set_xscale("log")
        axis.set_xlim(rates[0] / 1.25, rates[-1] * 1.25)
        axis.xaxis.set_major_locator(FixedLocator(rates))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value).replace("e-0", "e-")))
        left = "" if len(search.cells) == search.grid_size else f", {len(search.cells)} of {search.grid_size} cells"
        axis.set_title(f"{search.data.task.title}{left}", size=11)
        axis.set_ylabel(search.data.task.metric.replace("_", " ") + " (%)")
        axis.set_xlabel("peak learning rate")
        grid(axis)
        handles, labels = axis.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    wide = min(len(legend), 4)
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=wide, frameon=False)
    save(figure, out / PICTURE)


def _draw_model(
    axis: Any, cells: list[tuple[float, list[float]]], shift: float, label: str, style: dict[str, Any]
) -> None:
    """cells: (learning rate, the seeds' values)."""
    middles = [statistics.median(values) for _, values in cells]
    axis.plot([rate * shift for rate, _ in cells], middles, linestyle="none", markersize=4, alpha=0.4, **style)
    best: dict[float, list[float]] = {}
    for rate, values in cells:
        if rate not in best or statistics.median(values) > statistics.median(best[rate]):
            best[rate] = values
    found = [(rate * shift, statistics.median(best[rate]), best[rate]) for rate in sorted(best)]
    reach = [[m - min(v) for _, m, v in found], [max(v) - m for _, m, v in found]]
    line = {"linewidth": 1.6, "markersize": 6, "capsize": 3, "label": label, **style}
    if found:
        axis.errorbar([x for x, *_ in found], [m for _, m, _ in found], yerr=reach, **line)
