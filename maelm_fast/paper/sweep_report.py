"""What a sweep found: best cells, the paper's table, every run; all from the plan and the ledger.

A task's best cell is, among those with the most finished seeds, the one with the highest median of the task's metric on
its first validation split; on a tie the earlier in the grid. One lucky seed of a cell whose others failed does not win.
"""

from __future__ import annotations

import csv
import io
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maelm_fast.errors import UserError
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.fingerprint import deciding
from maelm_fast.finetuning.markdown import NONE, table
from maelm_fast.finetuning.tasks import TASKS
from maelm_fast.paper.grids import Cell
from maelm_fast.paper.sweep import Done, Model, Search, Sweep, read_done
from maelm_fast.training.files import write_json, write_text
from maelm_fast.work import lock

REPORT, BEST, RUNS = "SWEEP.md", "best.json", "cells.csv"
_COLUMNS = (
    ("MNLI-(m/mm)", "mnli", "accuracy"),
    ("QQP", "qqp", "accuracy"),
    ("QNLI", "qnli", "accuracy"),
    ("SST-2", "sst2", "accuracy"),
    ("CoLA", "cola", "matthews"),
    ("RTE", "rte", "accuracy"),
    ("MRPC", "mrpc", "accuracy"),
    ("STS-B", "stsb", "spearman"),
    ("AVG", "", ""),
    ("SQuAD EM", "squad_v2", "best_exact"),
    ("SQuAD F1", "squad_v2", "best_f1"),
)
"""Header, task, metric: the paper's tables, in their order. AVG has no task."""
GLUE = tuple(task for _, task, _ in _COLUMNS[:8])

PrintedRow = tuple[str, Mapping[str, str]]
"""A row of a published table: the model's name, and cells by column header."""


@dataclass(frozen=True)
class Best:
    """The best cell of a task for one model."""

    model: Model
    search: Search
    cell: Cell
    results: dict[int, dict[str, Any]]
    """Seed -> Result.to_dict()."""
    cells_tried: int
    """Cells of which at least one seed is finished."""

    @property
    def values(self) -> list[float]:
        """Of the task's metric, over the seeds."""
        return [result["best"] for result in self.results.values()]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def over_seeds(self, split: str, metric: str) -> list[float]:
        return [r["metrics"][split][metric] for r in self.results.values() if metric in r["metrics"].get(split, {})]

    def splits(self) -> list[str]:
        return list(self.search.data.validation)


def find_best(sweep: Sweep, done: Done, model: Model, search: Search) -> Best | None:
    """None if no run of them is finished."""
    cells: dict[int, dict[int, dict[str, Any]]] = {}
    for run in sweep.of(model, search):
        if run.key in done.results:
            cells.setdefault(run.cell.number, {})[run.seed] = done.results[run.key]
    if not cells:
        return None

    def merit(number: int) -> tuple[int, float, int]:
        return len(cells[number]), statistics.median(r["best"] for r in cells[number].values()), -number

    number = max(cells, key=merit)
    cell = next(cell for cell in search.cells if cell.number == number)
    return Best(model, search, cell, dict(sorted(cells[number].items())), len(cells))


def average(bests: Mapping[str, Best | None]) -> tuple[float | None, str]:
    """(mean of GLUE's eight medians, "") or (None, why there is none).

    MNLI counts once, as the mean of its two splits: this is what reproduces every AVG of the paper's Tables 1, 6 and 7
    from its own rows (matched alone fits Tables 1 and 6 only). Without the mismatched split: matched alone, as for the
    paper's baselines."""
    missing = [task for task in GLUE if bests.get(task) is None]
    if missing:
        return None, f"AVG is over GLUE's eight tasks; there is no result for {', '.join(missing)}"
    medians = []
    for task in GLUE:
        best = bests[task]
        assert best is not None
        metric = best.search.data.task.metric
        medians.append(statistics.mean(statistics.median(best.over_seeds(split, metric)) for split in best.splits()))
    return statistics.mean(medians), ""


def write_tables(
    sweep: Sweep,
    out: Path,
    printed: Sequence[PrintedRow] = (),
    baselines: Mapping[str, Mapping[str, Any]] | None = None,
    data_options: Mapping[str, str] | None = None,
) -> None:
    """SWEEP.md, best.json and cells.csv of what is finished; each file is replaced in one step.

    printed: rows of a published table to stand beside ours. baselines: by task, then name, the metrics of predictions
    without a model. data_options: by task, those of `maelm-fast finetune`, for the commands that the
    report gives.

    Raises UserError if they cannot be written."""
    with lock(out / "locks" / "report.lock", wait=True):
        done = read_done(out)
        try:
            write_text(out / RUNS, runs_csv(sweep, done))
            write_json(out / BEST, best_json(sweep, done))
            write_text(out / REPORT, report(sweep, done, printed, baselines or {}, data_options or {}))
        except OSError as error:
            raise UserError(f"cannot write in {out}: {error.strerror}; the same command goes on") from None


def best_json(sweep: Sweep, done: Done) -> dict[str, Any]:
    results, averages = [], {}
    for model in sweep.models:
        bests = {search.data.task.name: find_best(sweep, done, model, search) for search in sweep.searches}
        averages[model.label] = average(bests)[0]
        results += [_best_entry(best) for best in bests.values() if best is not None]
    return {
        "grid": sweep.grid.name,
        "seeds": sweep.seeds,
        "budget": sweep.budget,
        "engine": sweep.engine,
        "runs": len(sweep.runs),
        "unfinished": len(done.unfinished(sweep)),
        "average": averages,
        "results": results,
    }


def _best_entry(best: Best) -> dict[str, Any]:
    task, model = best.search.data.task, best.model
    config = deciding(best.cell.config)
    del config["seed"]
    medians = {
        split: {
            metric: statistics.median(values) for metric in task.metrics if (values := best.over_seeds(split, metric))
        }
        for split in best.splits()
    }
    return {
        **{"model": model.label, "path": model.path, "step": model.step, "random_init": model.random_init},
        **{"task": task.name, "metric": task.metric, "median": best.median},
        **{"lowest": min(best.values), "highest": max(best.values)},
        "by_seed": {str(seed): result["best"] for seed, result in best.results.items()},
        "medians": medians,
        **{"cell": best.cell.number, "values": best.cell.values, "config": config},
        **{
            "cells_tried": best.cells_tried,
            "cells_planned": len(best.search.cells),
            "grid_size": best.search.grid_size,
        },
    }


def runs_csv(sweep: Sweep, done: Done) -> str:
    """A row per planned run, finished or not."""
    measured = ("steps", "skipped", "seconds", "examples_per_s", "device", "precision")
    named = (name for search in sweep.searches for cell in search.cells for name in cell.values)
    fields = dict.fromkeys(name for name in named if name not in measured)
    scores = dict.fromkeys(
        (split, metric)
        for search in sweep.searches
        for split in search.data.validation
        for metric in search.data.task.metrics
    )
    header = ["model", "task", "cell", *fields, "seed", "status", "metric", "best", "last"]
    header += [f"{split}/{metric}" for split, metric in scores] + [*measured, "error", "key"]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(header)
    for run in sweep.runs:
        result, error = done.results.get(run.key), done.errors.get(run.key, "")
        status = "finished" if result else "failed" if error else "unfinished"
        row = [run.model.label, run.search.data.task.name, run.cell.number]
        row += [run.cell.values.get(name, getattr(run.config, name)) for name in fields]
        row += [run.seed, status, run.search.data.task.metric]
        row += [result["best"], result["last"]] if result else ["", ""]
        row += [result["metrics"].get(split, {}).get(metric, "") if result else "" for split, metric in scores]
        row += [result.get(name, "") if result else "" for name in measured]
        table.writerow([*row, error, run.key])
    return text.getvalue()


def report(
    sweep: Sweep,
    done: Done,
    printed: Sequence[PrintedRow],
    baselines: Mapping[str, Mapping[str, Any]],
    data_options: Mapping[str, str],
) -> str:
    """SWEEP.md."""
    bests = {
        (model.label, search.data.task.name): find_best(sweep, done, model, search)
        for search in sweep.searches
        for model in sweep.models
    }
    left = len(done.unfinished(sweep))
    failed = sum(run.key in done.errors for run in sweep.runs)
    counts = f"{len(sweep.runs)} runs: {len(sweep.runs) - left} finished, {failed} failed, {left - failed} to do"
    lines = ["# Fine-tuning sweep", ""]
    lines += [f"Grid {sweep.grid.name} ({sweep.grid.about}), {sweep.seeds} seeds. {counts}.", ""]
    if left:
        lines += ["**Not all runs are finished: best cells and medians are provisional.**", ""]
    if parts := [
        f"{search.data.task.title} {_of(len(search.cells), search.grid_size)}"
        for search in sweep.searches
        if len(search.cells) < search.grid_size
    ]:
        subset = f"a budget of {sweep.budget} cells per task, a fixed pseudo-random subset"
        lines += [f"**Not the whole search: {subset}. Cells: {', '.join(parts)}.**", ""]
    lines += ["## Results", "", *_paper_table(sweep, bests, printed, baselines)]
    lines += ["## Best cells", "", *_best_table(sweep, bests), *_commands(sweep, bests, data_options)]
    lines += _failures(sweep, done)
    lines += ["## Models and data", "", *_sources(sweep, done)]
    return "\n".join(lines).rstrip() + "\n"


def columns(sweep: Sweep) -> list[tuple[str, Search | None, str]]:
    """(header, task's search, metric): the paper's columns of the tasks at hand, AVG if one is of GLUE, the rest."""
    by_name = {search.data.task.name: search for search in sweep.searches}
    result: list[tuple[str, Search | None, str]] = []
    for header, task, metric in _COLUMNS:
        if task in by_name:
            result.append((header, by_name[task], metric))
        elif not task and any(name in by_name for name in GLUE):
            result.append((header, None, ""))
    known = {task for _, task, _ in _COLUMNS}
    for name, search in by_name.items():
        if name not in known:
            task_ = search.data.task
            result.append((f"{task_.title} ({task_.metric})", search, task_.metric))
    return result


def _paper_table(
    sweep: Sweep,
    bests: Mapping[tuple[str, str], Best | None],
    printed: Sequence[PrintedRow],
    baselines: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """Per model: medians, then lowest to highest, then seeds and cells; the published rows first, baselines last."""
    layout = columns(sweep)
    rows = [[name, *(cells.get(header, NONE) for header, _, _ in layout)] for name, cells in printed]
    reasons = []
    for model in sweep.models:
        own = {search.data.task.name: bests[model.label, search.data.task.name] for search in sweep.searches}
        mean, reason = average(own)
        middle, spread, effort = [f"**{model.label}**"], ["lowest to highest"], ["seeds; cells"]
        for _, search, metric in layout:
            if search is None:
                middle.append(NONE if mean is None else f"{mean:.1f}")
                spread.append("")
                effort.append("")
                reasons += [f"{model.label}: {reason}."] if reason else []
                continue
            best = own[search.data.task.name]
            if best is None:
                middle.append(NONE)
                spread.append(NONE)
                effort.append(f"0 of {sweep.seeds}; {_of(0, search.grid_size)}")
                continue
            over = [best.over_seeds(split, metric) for split in _both(search)]
            middle.append("/".join(f"{statistics.median(v):.1f}" if v else NONE for v in over))
            spread.append("/".join(f"{min(v):.1f}..{max(v):.1f}" if v else NONE for v in over))
            effort.append(f"{_of(len(best.results), sweep.seeds)}; {_of(best.cells_tried, search.grid_size)}")
        rows += [middle, spread, effort]
    names = list(dict.fromkeys(name for by_name in baselines.values() for name in by_name))
    for name in names:
        cells = [_baseline(baselines, name, search, metric) for _, search, metric in layout]
        rows.append([f"no model: {name}", *cells])
    lines = table(["model", *(header for header, _, _ in layout)], rows)
    for note in [*_notes(sweep, bests, layout), *dict.fromkeys(reasons)]:
        lines += [note, ""]
    return lines


def _notes(
    sweep: Sweep, bests: Mapping[tuple[str, str], Best | None], layout: Sequence[tuple[str, Search | None, str]]
) -> list[str]:
    """What the numbers of the paper's table are."""
    notes = [
        "Development sets. Medians over seeds of the best cell, in percent. Each run counts with the best of its "
        "evaluations, and the cell is chosen on the same development set, as in the paper: a number for comparing "
        "models that were searched alike, not an unbiased one."
    ]
    if any(search is None for _, search, _ in layout):
        notes.append("AVG: over GLUE's eight tasks, MNLI as the mean of its two splits.")
    squad = next((search for header, search, _ in layout if header == "SQuAD F1"), None)
    if squad is not None:
        fixed = []
        for model in sweep.models:
            if (best := bests[model.label, squad.data.task.name]) is not None:
                both = [best.over_seeds(_both(squad)[0], metric) for metric in ("exact", "f1")]
                if all(both):
                    fixed.append(f"{model.label} " + "/".join(f"{statistics.median(values):.1f}" for values in both))
        notes.append(
            "SQuAD EM and F1: each with the no-answer threshold that is best on the development set"
            + (f"; with the fixed threshold EM/F1 are: {', '.join(fixed)}." if fixed else ".")
        )
    return notes


def _both(search: Search) -> list[str]:
    """The splits that a column shows: MNLI's two, also where one is missing; otherwise the first."""
    splits = search.data.task.validation
    return list(splits) if search.data.task.name == "mnli" else list(search.data.validation)[:1]


def _baseline(baselines: Mapping[str, Mapping[str, Any]], name: str, search: Search | None, metric: str) -> str:
    value = baselines.get(search.data.task.name, {}).get(name, {}).get(metric) if search is not None else None
    return NONE if value is None else f"{value:.1f}"


def _best_table(sweep: Sweep, bests: Mapping[tuple[str, str], Best | None]) -> list[str]:
    rows = []
    for search in sweep.searches:
        task = search.data.task
        for model in sweep.models:
            best = bests[model.label, task.name]
            if best is None:
                rows.append([task.title, model.label, *[NONE] * 6])
                continue
            others = ", ".join(
                f"{metric} {statistics.median(v):.1f}"
                for metric in task.metrics
                if metric != task.metric and (v := best.over_seeds(best.splits()[0], metric))
            )
            last = statistics.median(result["last"] for result in best.results.values())
            rows.append(
                [
                    *(task.title, model.label, str(best.cell.number), best.cell.title),
                    f"{task.metric} {best.median:.1f} [{min(best.values):.1f}, {max(best.values):.1f}]",
                    *(_of(len(best.results), sweep.seeds), f"{last:.1f}", others or NONE),
                ]
            )
    header = ["task", "model", "cell", "values", "median [lowest, highest]", "seeds", "last evaluation", "also"]
    return table(header, rows)


def _commands(sweep: Sweep, bests: Mapping[tuple[str, str], Best | None], data_options: Mapping[str, str]) -> list[str]:
    """How to have the models themselves, which a sweep does not keep."""
    lines = []
    for best in bests.values():
        if best is None:
            continue
        task, config = best.search.data.task, best.cell.config
        named = task.name in TASKS
        words = ["maelm-fast finetune"] + ([task.name] if named else [])
        words += ["--model", shlex.quote(best.model.path)]
        words += ["--step", str(best.model.step)] if best.model.step is not None else []
        words += ["--random-init"] if best.model.random_init else []
        words += ["--engine", sweep.engine_of(best.model)] if sweep.engine != "auto" else []
        default = FinetuneConfig()
        for name, value in vars(config).items():
            if value != getattr(default, name) or name in best.cell.values:
                words += [f"--{name}", shlex.quote(str(list(value) if isinstance(value, tuple) else value))]
        lines.append(" ".join([*words, "--seeds", str(sweep.seeds), data_options.get(task.name, "--data DIR")]))
    if not lines:
        return []
    intro = "With the model, its predictions, learning curves and effective ranks, a best cell again:"
    return [intro, "", "```", *lines, "```", ""]


def _failures(sweep: Sweep, done: Done) -> list[str]:
    failed = [run for run in sweep.runs if run.key in done.errors]
    if not failed:
        return []
    lines = [f"- {run.title}: {done.errors[run.key]}" for run in failed[:20]]
    if len(failed) > 20:
        lines.append(f"- and {len(failed) - 20} more: see the errors in {RUNS}")
    return ["## Failed runs", "", "The same command tries them again.", "", *lines, ""]


def _sources(sweep: Sweep, done: Done) -> list[str]:
    rows = [
        [
            *(model.label, model.path, NONE if model.step is None else f"{model.step:,}"),
            *("random" if model.random_init else "pretrained", model.fingerprint),
        ]
        for model in sweep.models
    ]
    lines = table(["model", "directory", "checkpoint", "weights", "fingerprint"], rows)
    rows = []
    for search in sweep.searches:
        data = search.data
        validation = ", ".join(f"{name} {len(split):,}" for name, split in data.validation.items())
        rows.append([data.task.title, data.train.source, f"{len(data.train):,}", validation, search.fingerprint])
    lines += table(["task", "training examples from", "training", "validation", "fingerprint"], rows)
    lines += [f"- {search.data.task.title}: {note}" for search in sweep.searches for note in search.data.notes]
    lines += _cut(sweep, done)
    return [*lines, ""]


def _cut(sweep: Sweep, done: Done) -> list[str]:
    """How many inputs were cut, as the runs recorded it: once for each tokenisation."""
    models: dict[str, list[str]] = {}
    for run in sweep.runs:
        truncation = done.results.get(run.key, {}).get("truncation", {})
        parts = [
            f"{name} {part['cut']:,} of {part['inputs']:,}"
            for name, part in truncation.items()
            if isinstance(part, dict) and part.get("cut") and "inputs" in part
        ]
        if parts:
            longest = truncation.get("max_length", run.config.max_length)
            task = run.search.data.task
            what = (
                f"inputs cut to {longest}" if task.kind != "spans" else f"questions cut to {run.config.question_length}"
            )
            line = f"- {task.title}: {what} tokens: {', '.join(parts)}"
            labels = models.setdefault(line, [])
            labels += [run.model.label] if run.model.label not in labels else []
    everyone = len(sweep.models)
    return [line if len(labels) == everyone else f"{line} ({', '.join(labels)})" for line, labels in models.items()]


def _of(some: int, whole: int) -> str:
    return f"{some} of {whole}"
