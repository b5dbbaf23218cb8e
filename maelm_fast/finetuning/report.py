"""What a fine-tuning job leaves: numbers of all seeds, and of the median seed its predictions and pictures.

results.csv        a row per metric of every evaluation of every seed, and of the baselines
report.json        everything below as data, with every seed's curve
REPORT.md          the same to be read
curves.png         training loss, development metric, effective rank before and after
confusion.png      classification: counts by class, of MAX_CLASSES at most; regression: predicted against given scores.
                   (SQuAD's examples of errors are in REPORT.md and report.json.)
predictions.jsonl  a row per development example, of the median seed

The median seed is the one whose best value is the median of all, of an even number the lower of the two in the middle.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from maelm_fast.analysis.effective_rank import TAU
from maelm_fast.data.files import writing
from maelm_fast.data.order import subset
from maelm_fast.encoders import TextEncoder
from maelm_fast.errors import UserError
from maelm_fast.finetuning.examples import TaskData
from maelm_fast.finetuning.fingerprint import NOT_DECIDING, Origin
from maelm_fast.finetuning.problem import EVALUATION_TOKENS, Evaluation, autocast, evaluation_batches, token_batch
from maelm_fast.reporting import (
    GREY,
    NONE,
    aligned,
    figure_of,
    frame,
    grid,
    layer_axis,
    look,
    low_to_high,
    measured,
    number,
    per_group,
    save,
    table,
    where,
    write_results,
)
from maelm_fast.text import Inputs
from maelm_fast.training.files import write_json, write_text
from maelm_fast.training.gram import GramMatrix, rank_at
from maelm_fast.training.live import evaluating

if TYPE_CHECKING:
    from maelm_fast.finetuning.run import Result

REPORT_FILE = "report.json"
RANK_INPUTS = 2048
"""Development inputs that effective ranks are measured on, at most."""
MAX_CLASSES = 40
"""Of a confusion matrix that is printed and drawn; a larger one is in report.json alone."""

_UNTOLD, _OF_SPANS = ("seed", *NOT_DECIDING), ("question_length", "stride", "answer_length")
"""Fields of the configuration that the settings' line leaves out; the second but for SQuAD."""


@dataclass(frozen=True)
class LayerRanks:
    """TAU-effective rank of all real tokens of some inputs, special ones included: of the embedding output and of every
    layer. No rank exceeds the number of tokens."""

    inputs: int
    tokens: int
    ranks: list[int]


@torch.no_grad()
def effective_ranks(encoder: TextEncoder, inputs: Inputs, device: torch.device, precision: str) -> LayerRanks:
    """On RANK_INPUTS of the inputs, the same ones every time (the paper's Figure 5b); not centred, as all our ranks."""
    count = min(len(inputs), RANK_INPUTS)
    chosen = subset(count, len(inputs))
    grams: list[GramMatrix] = []
    with evaluating(encoder):
        for indices in evaluation_batches([inputs.lengths[i] for i in chosen], EVALUATION_TOKENS):
            layers: list[torch.Tensor] = []
            with autocast(device, precision):
                encoder(token_batch(inputs, chosen[indices]).to(device), layers=layers)
            grams = grams or [GramMatrix(layer.shape[1], device) for layer in layers]
            for gram, layer in zip(grams, layers, strict=True):
                gram.add(layer)
    return LayerRanks(count, grams[0].tokens, [rank_at(gram.squared_singular_values(), TAU) for gram in grams])


def median_of(results: Sequence[Result]) -> Result:
    """The run whose best value is the median; of an even number the lower of the middle two, of equals the first."""
    ranked = sorted(results, key=lambda result: result.best)
    return ranked[(len(ranked) - 1) // 2]


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Median and spread over the seeds, at the best evaluation and after the last step."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for split, metrics in results[0].metrics.items():
        found[split] = {name: spread([result.metrics[split][name] for result in results]) for name in metrics}
    return {
        "seeds": [result.seed for result in results],
        "median_seed": median_of(results).seed,
        "best": spread([result.best for result in results]),
        "last": spread([result.last for result in results]),
        "metrics_at_best": found,
        "seconds": spread([result.seconds for result in results]),
        "examples_per_s": spread([result.examples_per_s for result in results]),
        "tokens_per_s": spread([result.tokens_per_s for result in results]),
        "skipped_updates": sum(result.skipped for result in results),
    }


def results_rows(results: Sequence[Result], baselines: dict[str, dict[str, float]]) -> Any:
    """A row per metric of every evaluation. best: whether it is the seed's best one. Baselines, whose model is their
    name, are of the first split."""
    rows: list[dict[str, Any]] = []
    for result in results:
        about = {"model": result.encoder, "task": result.task, "seed": result.seed}
        for at in result.curve:
            when = {key: at[key] for key in ("step", "epoch", "seconds")}
            rows += measured({**about, **when, "best": at["step"] == result.best_step}, at["metrics"])
    for name, metrics in baselines.items():
        first = next(iter(results[0].metrics))
        rows += measured({"model": name, "task": results[0].task}, {first: metrics})
    return frame(rows, ("model", "task", "seed", "step", "epoch", "best", "split", "metric", "value"))


def write_report(
    out: Path,
    origin: Origin,
    saved: str,
    data: TaskData,
    results: Sequence[Result],
    evaluation: Evaluation,
    baselines: dict[str, dict[str, float]],
    before: LayerRanks,
    after: LayerRanks,
    say: Callable[[str], None] = print,
) -> None:
    """All files of this module's list, report.json last. saved: how the model was. evaluation, after: of the median
    seed; before: of the encoder as it was. Pictures need matplotlib: without it that is said, and the rest written."""
    task = data.task
    ranks = {"inputs": before.inputs, "tokens": before.tokens, "before": before.ranks, "after": after.ranks}
    values: dict[str, Any] = {
        "task": task.name,
        "title": task.title,
        "kind": task.kind,
        "metric": task.metric,
        "model": {
            "path": origin.path,
            "step": origin.step,
            "random_init": origin.random_init,
            "name": results[0].encoder,
            "engine": results[0].engine,
            "saved": saved,
        },
        "data": {name: {"source": split.source, "examples": len(split)} for name, split in data.splits.items()},
        "notes": list(data.notes),
        "summary": summary(results),
        "baselines": baselines,
        "truncation": results[0].truncation,
        "effective_rank": {"tau": TAU, **ranks},
        "classes": list(task.labels),
        "details": evaluation.details,
        "results": [result.to_dict() for result in results],
    }
    with writing(out, "the same command resumes"):
        predictions = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in evaluation.predictions)
        write_text(out / "predictions.jsonl", predictions)
        rows = results_rows(results, baselines)
        write_results(out, rows)
        write_text(out / "REPORT.md", "\n".join(_markdown(values, data, results, rows)))
        try:
            _plot_curves(values, results, out / "curves.png")
            if len(task.labels) > MAX_CLASSES:
                say(f"no confusion.png: {len(task.labels)} classes are too many; the counts are in {REPORT_FILE}")
            elif task.kind != "spans":
                _plot_confusion(values, evaluation, out / "confusion.png")
        except UserError as error:
            say(f"no pictures: {error}")
        write_json(out / REPORT_FILE, values)


def terminal_lines(data: TaskData, results: Sequence[Result], baselines: dict[str, dict[str, float]]) -> list[str]:
    """The first split's table, as in REPORT.md, and how fast it was."""
    first = next(iter(data.validation))
    scores = _scores(where(results_rows(results, baselines), split=first), data, results[0].metrics[first])
    title = f"{data.task.title}, development set {first}; of each seed the best of {len(results[0].curve)} evaluations"
    speed, cut = _speed(summary(results), data), cut_inputs(results[0].truncation)
    return [title, *aligned(scores), speed, *([f"inputs cut: {cut}"] if cut else [])]


def _speed(total: dict[str, Any], data: TaskData) -> str:
    items = "windows" if data.task.kind == "spans" else "examples"
    seconds, examples, tokens = (total[name]["median"] for name in ("seconds", "examples_per_s", "tokens_per_s"))
    return (
        f"a median of {seconds:,.1f} s a seed, evaluations included; training alone {examples:,.1f} {items}/s, "
        f"{tokens:,.0f} tokens/s"
    )


def cut_inputs(truncation: Mapping[str, Any]) -> str:
    """ "train: 3 of 100, validation: 0 of 20"."""
    parts = {name: part for name, part in truncation.items() if isinstance(part, dict) and part.get("inputs")}
    return ", ".join(f"{name}: {part['cut']:,} of {part['inputs']:,}" for name, part in parts.items())


def task_table(tasks: Iterable[TaskData], truncation: Mapping[str, dict[str, Any]]) -> list[str]:
    """What was trained and tested on, with all that was left out, cut or not official. truncation: by task, what one of
    its runs cut."""
    rows, notes = [], []
    for of in tasks:
        task, validation = of.task, ", ".join(f"{name}: {len(split):,}" for name, split in of.validation.items())
        cut = cut_inputs(truncation.get(task.name, {})) or NONE
        # of each file its folder alone: the rest of its path says where it was on one machine
        files = ", ".join("/".join(file.split("/")[-2:]) for file in of.train.source.split(", "))
        rows.append([task.title, f"{len(of.train):,}", validation, task.metric, cut, files, of.fingerprint])
        notes += [f"- {task.title}: {note}" for note in of.notes]
    header = ["task", "training examples", "validation examples", "metric", "inputs cut", "from", "fingerprint"]
    return [*table(header, rows), *notes, *([""] if notes else [])]


def _markdown(values: dict[str, Any], data: TaskData, results: Sequence[Result], rows: Any) -> list[str]:
    """REPORT.md."""
    model, total, rank, cut = values["model"], values["summary"], values["effective_rank"], values["truncation"]
    chosen = total["median_seed"]
    step = "" if model["step"] is None else f", step {model['step']:,}"
    start = "randomly initialised" if model["random_init"] else f"pretrained{step}"
    places = ", ".join(dict.fromkeys(f"{result.device} in {result.precision}" for result in results))
    used = {key: value for key, value in cut.items() if key in ("max_length", "stride")}  # the model's
    untold = _UNTOLD if data.task.kind == "spans" else (*_UNTOLD, *_OF_SPANS)
    told = (f"{key} {value}" for key, value in {**results[0].config, **used}.items() if key not in untold)
    lines = [
        f"# {values['title']}: {model['name']}",
        "",
        f"`{model['path']}`, {start}, engine {model['engine']}; {places}. In model/ that of the median seed, {chosen}: "
        f"{model['saved']}",
        "",
        *task_table([data], {data.task.name: cut}),
        f"Numbers are of the development set, in percent. *Best* is the best of {len(results[0].curve)} evaluations by "
        f"{values['metric']}, as the paper reports; *last* is after the last step. No test set was used.",
        "",
    ]
    for split in results[0].metrics:
        header, *body = _scores(where(rows, split=split), data, results[0].metrics[split])
        lines += [f"## {split}", "", *table(header, body)]
    lines += [
        "## Settings and speed",
        "",
        f"{', '.join(told)}.",
        "",
        f"{results[0].steps:,} steps in {_speed(total, data)}. Steps skipped for a gradient that was not finite: "
        f"{total['skipped_updates']}.",
    ]
    layers = ([when, *map(str, rank[when])] for when in ("before", "after"))
    lines += [
        "",
        f"## Effective rank (tau {rank['tau']:g}) before and after",
        "",
        f"Of {rank['tokens']:,} tokens of {rank['inputs']:,} development inputs, not centred; after: the median seed, "
        f"{chosen}. Layer 0 is the embedding output.",
        "",
        *table(["layer", *map(str, range(len(rank["before"])))], layers),
    ]
    for split, matrix in values["details"].get("confusion", {}).items():
        lines += [f"## Confusion on {split}, seed {chosen}", "", *_confusion(matrix, values["classes"])]
    for split, found in values["details"].get("errors", {}).items():
        lines += [f"## Errors on {split}, seed {chosen}", "", *_errors(found)]
    return lines


def _scores(rows: Any, data: TaskData, metrics: Iterable[str]) -> list[list[str]]:
    """A table of one development split, its header first: baselines (of the first split), seeds, their median."""
    names = [name for name in metrics if name in data.task.metrics or name.endswith("_thresh")]
    runs, floors = rows[rows["seed"].notna()], rows[rows["seed"].isna()]
    best, floor = where(runs, best=True), per_group(floors, "model", "metric")
    found = {"best": best, "last": runs[runs["step"] == runs["step"].max()]}
    lines = [
        ["", *names],
        *(
            [model, *(number(floor.get((model, name), [None])[0], 2) for name in names)]
            for model in floors["model"].unique()
        ),
    ]
    for seed in runs["seed"].unique():
        for when, part in found.items():
            values = per_group(where(part, seed=seed), "metric")
            lines.append([f"seed {seed}, {when}", *(number(values[name][0], 2) for name in names)])
    over = per_group(best, "metric")
    lines.append(["median, best", *(number(statistics.median(over[name]), 2) for name in names)])
    if runs["seed"].nunique() > 1:
        lines.append(["min..max, best", *(low_to_high(over[name], 2) for name in names)])
    return lines


def _confusion(matrix: list[list[int]], classes: list[str]) -> list[str]:
    if len(classes) > MAX_CLASSES:
        return [f"Of {len(classes)} classes: in {REPORT_FILE}.", ""]
    rows = [[name, *(f"{count:,}" for count in row)] for name, row in zip(classes, matrix, strict=True)]
    return table(["true \\ predicted", *classes], rows)


def _errors(found: dict[str, Any]) -> list[str]:
    counts = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in found["counts"].items())
    lines = [f"At threshold {found['threshold']:g}: {counts}.", ""]
    for kind, examples in found.items():
        if isinstance(examples, list) and examples:
            lines += [f"### {kind.replace('_', ' ')}", "", *(_error(example) for example in examples), ""]
    return lines


def _error(example: dict[str, Any]) -> str:
    answers = " / ".join(example["answers"]) or "no answer"
    text = f"- {example['question']} Expected: {answers}. Found (null odds {example['null_odds']:.2f}): "
    return " ".join(f"{text}{example['text'] or 'nothing'}. {example['around_text']}".split())


def _plot_curves(values: dict[str, Any], results: Sequence[Result], out: Path) -> None:
    """Every seed is a line."""
    figure = figure_of(15.0, 4.6)
    loss, metric, rank = figure.subplots(1, 3)
    for i, result in enumerate(results):
        style = {"color": look(i)["color"], "marker": look(i // 7)["marker"], "markersize": 5.0, "linewidth": 1.6}
        epochs, losses = ([row[key] for row in result.curve] for key in ("epoch", "loss"))
        loss.plot(epochs, [math.nan if value is None else value for value in losses], **style)
        metric.plot(epochs, [row["value"] for row in result.curve], **style, label=f"seed {result.seed}")
    for (name, floor), dashes in zip(values["baselines"].items(), (":", "--", "-."), strict=False):
        if values["metric"] in floor:
            metric.axhline(floor[values["metric"]], color=GREY, linestyle=dashes, linewidth=1.2, label=name)
    loss.set_title("Training loss, mean since the evaluation before", size=11)
    loss.set_ylabel("squared error of scores in 0..1" if values["kind"] == "regression" else "loss (nats)")
    loss.set_ylim(bottom=0)
    metric.set_title(f"{values['title']}, development set", size=11)
    metric.set_ylabel(f"{values['metric']} (%)")
    for axis in (loss, metric):
        axis.set_xlabel("epochs")
        axis.set_xlim(left=0)
        grid(axis)
    ranks, after = values["effective_rank"], f"after fine-tuning (seed {values['summary']['median_seed']})"
    for i, (when, label) in enumerate((("before", "before fine-tuning"), ("after", after))):
        rank.plot(range(len(ranks[when])), ranks[when], **look(i), linewidth=1.8, label=label)
    rank.set_title(f"{ranks['tau']:g}-effective rank on development inputs", size=11)
    layer_axis(rank, "dimensions")
    rank.set_ylim(0, 1.08 * max(*ranks["before"], *ranks["after"]))
    for axis in (metric, rank):
        axis.legend(loc="best", fontsize=9, frameon=False)
    save(figure, out)


def _plot_confusion(values: dict[str, Any], evaluation: Evaluation, out: Path) -> None:
    splits = list(dict.fromkeys(row["split"] for row in evaluation.predictions))
    side = 3.2 + 0.45 * max(2, len(values["classes"]))
    figure = figure_of(side * len(splits), side)
    for axis, split in zip(figure.subplots(1, len(splits), squeeze=False)[0], splits, strict=True):
        if values["kind"] == "regression":
            pairs = [(row["label"], row["prediction"]) for row in evaluation.predictions if row["split"] == split]
            axis.plot(*zip(*pairs, strict=True), ".", color=look(0)["color"], alpha=0.4)
            axis.set_xlabel("given score")
            axis.set_ylabel("predicted score")
            grid(axis)
        else:
            _draw_matrix(axis, np.array(evaluation.details["confusion"][split]), values["classes"])
        axis.set_title(f"{values['title']}, {split}, seed {values['summary']['median_seed']}", size=10)
    save(figure, out)


def _draw_matrix(axis: Any, counts: NDArray[np.int64], classes: list[str]) -> None:
    """Shaded by the share of the true class."""
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axis.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    for (row, column), count in np.ndenumerate(counts):
        dark = shares[row, column] > 0.6
        axis.text(column, row, f"{count:,}", ha="center", va="center", color="white" if dark else "black", size=9)
    axis.set_xticks(range(len(classes)), classes, rotation=30, ha="right", size=9)
    axis.set_yticks(range(len(classes)), classes, size=9)
    axis.set_xlabel("predicted")
    axis.set_ylabel("true")
