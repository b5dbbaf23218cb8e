"""The downstream parts of the reports: the paper's columns, filled with what was fine-tuned or prompted here.

Fine-tuned: medians over all seeds, of pretraining and of fine-tuning, with [least, largest], at the best evaluation on
the development data, as in the paper. Prompted: mean and standard deviation over the draws, as in the paper.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from maelm_fast.analysis.plots import short_number
from maelm_fast.finetuning.markdown import NONE, over_draws, over_seeds, table
from maelm_fast.finetuning.tasks import Task
from maelm_fast.paper.catalogue import GLUE, Row
from maelm_fast.paper.downstream import label_words
from maelm_fast.paper.plan import Cell
from maelm_fast.paper.prompting.run import METRICS, MODES
from maelm_fast.paper.results import Results, passes, scores

RANDOM = "random initialisation"
AVERAGE = "AVG"
_BASELINES = {
    "majority class, mean, no answer": ("majority", "mean", "no answer"),
    "lengths of the texts": ("length",),
    "words the texts share": ("overlap",),
    "first sentence": ("first sentence",),
}


def glue_tasks(results: Results) -> list[Task]:
    return [task for task in results.plan.tasks if task.name in GLUE]


def average_name(results: Results) -> str:
    """What the mean over the tasks that are there may be called: the paper's AVG is over all eight, with both halves of
    MNLI."""
    tasks, found = glue_tasks(results), results.plan.found
    assert found is not None
    if len(tasks) == len(GLUE) and all(len(found.data[task.name].validation) == len(task.validation) for task in tasks):
        return AVERAGE
    if len(tasks) == len(GLUE):
        return "mean of the 8 tasks, MNLI matched only"
    return f"mean of {', '.join(task.title for task in tasks)}"


def fine_tuned(results: Results, columns: Sequence[str]) -> list[str]:
    """Tables in the paper's columns (without the model's name): the models, the untrained encoder, the baselines."""
    average = average_name(results) if glue_tasks(results) else AVERAGE
    header = ["setting", "model", *(average if column == AVERAGE else column for column in columns)]
    body = []
    for row in results.plan.rows:
        body.append([row.group, row.label, *_fine_tuned_cells(results, results.plan.of_row(row), columns)])
    for cell in results.plan.controls:
        cells = _fine_tuned_cells(results, [cell], columns, step=0)
        body.append([cell.row.group or cell.row.setting, RANDOM, *cells])
    body += _without_encoder(results, columns, {})
    lines = ["Medians over the seeds, [least, largest], on development data, at the best of the evaluations during "
             "fine-tuning; accuracy, but Matthews' correlation of CoLA and Spearman's of STS-B; SQuAD 2.0 at the "
             "threshold that is best on the same data.", ""]  # fmt: skip
    return lines + table(header, body)


def _fine_tuned_cells(
    results: Results, cells: Sequence[Cell], columns: Sequence[str], step: int | None = None
) -> list[str]:
    written = []
    for column in columns:
        task, metric = task_of(results, column)
        if column == AVERAGE:
            value = results.average(cells, glue_tasks(results), step)
            written.append(NONE if value is None else f"{value:.1f}")
        elif task is None:
            written.append(NONE)
        else:
            runs = results.finetuned(cells, task, step)
            written.append(_halves(task, lambda split: over_seeds(scores(runs, split, metric), 1)))  # noqa: B023
    return written


def _halves(task: Task, cell: Callable[[str], str]) -> str:
    """ "61.2/60.9" of a task with two validation splits; one dash if neither has a value."""
    parts = [cell(split) for split in task.validation]
    return NONE if set(parts) == {NONE} else "/".join(parts)


def _without_encoder(results: Results, columns: Sequence[str], metrics: Mapping[str, str]) -> list[list[str]]:
    """Rows of the table for predictions without an encoder. metrics: of tasks that are not shown by their column's."""
    rows = []
    for name, keys in _BASELINES.items():
        cells = [_baseline_cell(results, column, keys, metrics) for column in columns]
        if any(cell != NONE for cell in cells):
            rows.append(["no encoder", name, *cells])
    return rows


def _baseline_cell(results: Results, column: str, keys: Iterable[str], metrics: Mapping[str, str]) -> str:
    task, own = task_of(results, column)
    if task is None:
        return NONE
    found, metric = results.baselines(task), metrics.get(task.name, own)

    def cell(split: str) -> str:
        values = [found[split][key][metric] for key in keys if key in found.get(split, {})]
        return f"{values[0]:.1f}" if values else NONE

    return _halves(task, cell)


def task_of(results: Results, column: str) -> tuple[Task | None, str]:
    """The task and the metric that fill a column of the paper's tables; None if the task is not there."""
    own = {"MNLI-(m/mm)": "MNLI", "SQuAD EM": "SQuAD 2.0", "SQuAD F1": "SQuAD 2.0"}
    task = next((task for task in results.plan.tasks if task.title == own.get(column, column)), None)
    if task is None:
        return None, ""
    return task, {"SQuAD EM": "best_exact", "SQuAD F1": "best_f1"}.get(column, task.metric)


def squad_em(results: Results, cells: Sequence[Cell], step: int | None = None) -> list[float]:
    """Of every seed; empty if SQuAD 2.0 is not there."""
    task, metric = task_of(results, "SQuAD EM")
    if task is None:
        return []
    return scores(results.finetuned(cells, task, step), task.validation[0], metric)


def prompted(results: Results, columns: Sequence[str]) -> list[str]:
    """Table 7's three blocks."""
    lines = ["Mean over the draws of examples, standard deviation in brackets, on development data; F1 of MRPC and "
             "QQP, Pearson's correlation of STS-B, Matthews' of CoLA, accuracy of the others (as Gao et al. 2021).",
             ""]  # fmt: skip
    average = average_name(results)
    header = ["setting", "model", *(average if column == AVERAGE else column for column in columns)]
    few = results.plan.scale.downstream.few
    titles = {
        "zero-shot": "zero-shot prompting",
        "head": f"head-based few-shot fine-tuning, {few.shots} examples per label",
        "prompt": f"prompt-based few-shot fine-tuning, {few.shots} examples per label",
    }
    for mode in MODES:
        body = [
            [row.group, row.label, *_prompted_cells(results, row, mode, columns)]
            for row in results.plan.rows
        ]  # fmt: skip
        lines += [f"Ours, {titles[mode]}:", "", *table(header, body)]
    lines += ["Without an encoder, from all training examples:", ""]
    lines += table(header, _without_encoder(results, columns, METRICS))
    for task in results.plan.tasks:
        used = [r["label_words"] for row in results.plan.rows for r in results.prompted(row, task, "zero-shot")]
        if used and tuple(used[0]) != label_words(task.name)[0]:
            paper = "/".join(label_words(task.name)[0])
            lines.append(f"- {task.title}: label words {'/'.join(used[0])}; {paper} are not single tokens here.")
    return [*lines, ""]


def _prompted_cells(results: Results, row: Row, mode: str, columns: Sequence[str]) -> list[str]:
    written = []
    for column in columns:
        task, _ = task_of(results, column)
        if column == AVERAGE:
            mean = prompted_average(results, row, mode)
            written.append(NONE if mean is None else f"{mean:.1f}")
        elif task is None:
            written.append(NONE)
        else:
            values = _prompted(results, row, task, mode)
            written.append(_halves(task, lambda split: over_draws(values.get(split, []), 1)))  # noqa: B023
    return written


def _prompted(results: Results, row: Row, task: Task, mode: str) -> dict[str, list[float]]:
    """Values of Table 7's metric over the draws, by validation split."""
    values: dict[str, list[float]] = {}
    for result in results.prompted(row, task, mode):
        for split, metrics in result["test"].items():
            values.setdefault(split, []).append(metrics[result["metric"]])
    return values


def prompted_average(results: Results, row: Row, mode: str) -> float | None:
    """Mean of the tasks' means over the draws; None if one of the tasks is not there."""
    found = [_prompted(results, row, task, mode) for task in glue_tasks(results)]
    if not found or not all(found):
        return None
    return statistics.mean(statistics.mean(map(statistics.mean, values.values())) for values in found)


def checkpoints(results: Results) -> list[str]:
    """Figure 3: the models' checkpoints after fine-tuning, and where the last passes the first one's end."""
    task = results.plan.tasks[0]
    rows = results.plan.rows
    curves = {row.label: {point["step"]: point for point in results.accuracy_curve(row, task)} for row in rows}
    steps = sorted({step for curve in curves.values() for step in curve})
    if not steps:
        return [f"No checkpoint is fine-tuned on {task.title} yet.", ""]

    def cells(step: int) -> Iterable[str]:
        for row in rows:
            point = curves[row.label].get(step)
            yield NONE if point is None else f"{point['seconds']:,.1f}"
            yield NONE if point is None else over_seeds(point["seeds"], 1)

    header = ["updates", "original tokens"]
    for row in rows:
        header += [f"{row.label}: training time, s", f"{row.label}: {task.title} {task.metric}"]
    tokens = {step: point["tokens"] for curve in curves.values() for step, point in curve.items()}
    lines = [f"After fine-tuning every checkpoint on {task.title}: {task.metric} on {task.validation[0]}, median over "
             f"the seeds, [least, largest].", ""]  # fmt: skip
    lines += table(header, ([f"{step:,}", short_number(tokens[step]), *cells(step)] for step in steps))
    lines += [*_passing(results, task), *_without_pretraining(results, task)]
    return lines


def _passing(results: Results, task: Task) -> list[str]:
    mlm, mae_lm = results.plan.rows
    final = results.end(mlm, task)
    if final is None or results.end(mae_lm, task) is None:
        return []
    curve = results.accuracy_curve(mae_lm, task)
    what = f"{mlm.label}'s last {task.metric}, {final['score']:.1f}"
    tokens, seconds = (passes(curve, final["score"], key) for key in ("tokens", "seconds"))
    if tokens is None or seconds is None:
        return [f"{mae_lm.label} does not reach {what}, at any checkpoint here.", ""]
    return [
        f"{mae_lm.label} reaches {what}, after {short_number(tokens)} tokens and {seconds:,.1f} s of training, by "
        f"straight lines between the checkpoints; {mlm.label} had {short_number(final['tokens'])} tokens and "
        f"{final['seconds']:,.1f} s.",
        "",
    ]


def _without_pretraining(results: Results, task: Task) -> list[str]:
    parts = []
    for cell in results.plan.controls:
        values = scores(results.finetuned([cell], task, step=0), task.validation[0], task.metric)
        parts.append(f"{RANDOM} {over_seeds(values, 1)}")
    for name, found in results.baselines(task).get(task.validation[0], {}).items():
        parts.append(f"{name} {found[task.metric]:.1f}")
    return [f"Without pretraining: {', '.join(parts)}.", ""] if parts else []


def ranks_after(results: Results) -> list[list[str]]:
    """Figure 5(b), as rows of the table by layer: model, input, ranks."""
    task = results.plan.tasks[0]
    rows = []
    for row in results.plan.rows:
        for when in ("before", "after"):
            seeds = results.finetuned_ranks(results.plan.of_row(row), task, when)
            if seeds:
                rows.append([row.label, f"{task.title}'s development inputs, {when} fine-tuning", *rank_cells(seeds)])
    return rows


def rank_cells(seeds: Sequence[Sequence[int]]) -> list[str]:
    """Of every layer the median, and [least, largest] where the seeds differ."""
    cells = []
    for layer in zip(*seeds, strict=True):
        spread = f" [{min(layer)}, {max(layer)}]" if len(set(layer)) > 1 else ""
        cells.append(f"{statistics.median(layer):g}{spread}")
    return cells


def task_list(results: Results) -> list[str]:
    """What was trained and tested on, with all that was left out, cut or not official."""
    found = results.plan.found
    if found is None:
        return []
    rows, notes = [], []
    for task in found.tasks:
        data = found.data[task.name]
        validation = ", ".join(f"{name}: {len(split):,}" for name, split in data.validation.items())
        rows.append([task.title, f"{len(data.train):,}", validation, task.metric, _cut(results, task),
                     _files(data.train.source), found.fingerprints[task.name]])  # fmt: skip
        notes += [f"- {task.title}: {note}" for note in data.notes]
    header = ["task", "training examples", "validation examples", "metric", "inputs cut", "from", "fingerprint"]
    return [*table(header, rows), *notes, *([""] if notes else [])]


def _files(source: str) -> str:
    """Each file with its folder alone: the rest of its path says where it was on one machine."""
    return ", ".join("/".join(file.split("/")[-2:]) for file in source.split(", "))


def _cut(results: Results, task: Task) -> str:
    """Of the training inputs of one run: all runs of a plan cut alike unless their models differ in length."""
    for cell in results.plan.cells:
        for unit in cell.units:
            result: dict[str, Any] | None = results.stage(cell, unit.stage) if unit.task == task.name else None
            if result is not None:
                counts = result.get("truncation") or result.get("test_truncation") or {}
                parts = {name: part for name, part in counts.items() if isinstance(part, dict) and part.get("inputs")}
                return (
                    ", ".join(f"{name}: {part['cut']:,} of {part['inputs']:,}" for name, part in parts.items()) or NONE
                )
    return NONE
