"""What a fine-tuning job leaves: numbers of all seeds, and of the median seed its predictions and pictures.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from maelm_fast.analysis.effective_rank import TAU
from maelm_fast.analysis.plots import COLOURS, MARKERS, figure_of, grid, require_matplotlib
from maelm_fast.analysis.plots import save as save_figure
from maelm_fast.data.order import subset
from maelm_fast.encoders import TextEncoder
from maelm_fast.errors import UserError
from maelm_fast.finetuning.batches import evaluation_batches, token_batch
from maelm_fast.finetuning.examples import TaskData
from maelm_fast.finetuning.markdown import table as markdown_table
from maelm_fast.finetuning.problem import EVALUATION_TOKENS, Evaluation, autocast
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

_UNTOLD = {
    True: ("seed", "device", "precision", "micro_batch_tokens"),
    False: ("seed", "device", "precision", "micro_batch_tokens", "question_length", "stride", "answer_length"),
}
"""Fields of the configuration that the settings' line leaves out; for SQuAD fewer."""


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
    """Median and spread over the seeds, at the best evaluation and after the last update."""
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


def write_report(
    out: Path,
    origin: dict[str, Any],
    data: TaskData,
    results: Sequence[Result],
    evaluation: Evaluation,
    baselines: dict[str, dict[str, float]],
    before: LayerRanks,
    after: LayerRanks,
    say: Callable[[str], None] = print,
) -> None:
    """All files of this module's list, report.json last. origin: what was fine-tuned. evaluation, after: of the median
    seed; before: of the encoder as it was. Pictures need matplotlib: without it that is said, and the rest written."""
    task = data.task
    values: dict[str, Any] = {
        "task": task.name,
        "title": task.title,
        "kind": task.kind,
        "metric": task.metric,
        "model": {**origin, "name": results[0].encoder, "engine": results[0].engine},
        "data": {
            name: {"source": split.source, "examples": len(split)}
            for name, split in {"train": data.train, **data.validation}.items()
        },
        "notes": list(data.notes),
        "summary": summary(results),
        "baselines": baselines,
        "truncation": results[0].truncation,
        "effective_rank": {
            "tau": TAU, "inputs": before.inputs, "tokens": before.tokens, "before": before.ranks, "after": after.ranks,
        },
        "classes": list(task.labels),
        "details": evaluation.details,
        "results": [result.to_dict() for result in results],
    }  # fmt: skip
    try:
        rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in evaluation.predictions)
        write_text(out / "predictions.jsonl", rows)
        write_text(out / "REPORT.md", _markdown(values, data, results))
        try:
            require_matplotlib()
        except UserError as error:
            say(f"no pictures: {error}")
        else:
            _plot_curves(values, results, out / "curves.png")
            if len(task.labels) > MAX_CLASSES:
                say(f"no confusion.png: {len(task.labels)} classes are too many; the counts are in {REPORT_FILE}")
            elif task.kind != "spans":
                _plot_confusion(values, evaluation, out / "confusion.png")
        write_json(out / REPORT_FILE, values)
    except OSError as error:
        raise UserError(f"cannot write in {out}: {error.strerror}; the same command goes on") from None


def table(data: TaskData, results: Sequence[Result], baselines: dict[str, dict[str, float]]) -> str:
    """For the terminal: a row per baseline, per seed and for their median, a column per metric of the first split."""
    task, first = data.task, next(iter(data.validation))
    has = results[0].metrics[first]  # SQuAD: without unanswerable questions no metrics of them
    names = [task.metric, *(name for name in task.metrics if name != task.metric and name in has)]
    rows = [["", *names, f"last {task.metric}", "seconds", f"{_items(data)}/s"]]
    rows += [[name, *(number(found.get(metric)) for metric in names), "", "", ""] for name, found in baselines.items()]
    for result in results:
        found = [number(result.metrics[first][name]) for name in names]
        rows.append(
            [f"seed {result.seed}", *found, number(result.last), f"{result.seconds:,.1f}",
             f"{result.examples_per_s:,.1f}"]
        )  # fmt: skip
    total = summary(results)
    spreads = [total["metrics_at_best"][first][name] for name in names] + [total["last"]]
    speed = [total["seconds"]["median"], total["examples_per_s"]["median"]]
    rows.append(["median", *(number(s["median"]) for s in spreads), *(f"{value:,.1f}" for value in speed)])
    if len(results) > 1:
        rows.append(["min..max", *(f"{s['min']:.2f}..{s['max']:.2f}" for s in spreads), "", ""])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
             for row in rows]  # fmt: skip
    title = f"{task.title}, development set {first}; of each seed the best of {len(results[0].curve)} evaluations"
    cut = ", ".join(f"{part['cut']:,} of {name}" for name, part in _splits(results[0].truncation) if "cut" in part)
    return "\n".join([title, *(line.rstrip() for line in lines), *([f"inputs cut: {cut}"] if cut else [])])


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _splits(truncation: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, part) for name, part in truncation.items() if isinstance(part, dict)]


def _markdown(values: dict[str, Any], data: TaskData, results: Sequence[Result]) -> str:
    model, chosen = values["model"], values["summary"]["median_seed"]
    step = "" if model["step"] is None else f", step {model['step']:,}"
    start = "randomly initialised" if model["random_init"] else f"pretrained{step}"
    places = ", ".join(dict.fromkeys(f"{result.device} in {result.precision}" for result in results))
    lines = [
        f"# {values['title']}: {model['name']}",
        "",
        f"`{model['path']}`, {start}, engine {model['engine']}; {places}. In model/ that of the median seed, {chosen}: "
        f"{model['saved']}",
        "",
        *(f"- {name}: {part['examples']:,} examples, {part['source']}" for name, part in values["data"].items()),
        *(f"- {note}" for note in values["notes"]),
        "",
        f"Numbers are of the development set, in percent. *Best* is the best of {len(results[0].curve)} evaluations by "
        f"{values['metric']}, as the paper reports; *last* is after the last update. No test set was used.",
        "",
        *_metrics(values, data, results),
        *_settings(values, data, results),
        *_truncation(values),
        *_ranks(values),
    ]
    for split, matrix in values["details"].get("confusion", {}).items():
        lines += [f"## Confusion on {split}, seed {chosen}", "", *_confusion(matrix, values["classes"])]
    for split, found in values["details"].get("errors", {}).items():
        lines += [f"## Errors on {split}, seed {chosen}", "", *_errors(found)]
    return "\n".join(lines)


def _metrics(values: dict[str, Any], data: TaskData, results: Sequence[Result]) -> list[str]:
    """A table per development split; the first has the baselines."""
    lines = []
    for split, found in values["summary"]["metrics_at_best"].items():
        metrics = {name: s for name, s in found.items() if name in data.task.metrics or name.endswith("_thresh")}
        rows = []
        if split == next(iter(data.validation)):
            for name, floor in values["baselines"].items():
                rows.append([name, *(number(floor.get(metric)) for metric in metrics)])
        for result in results:
            for when, at in (("best", result.metrics), ("last", result.curve[-1]["metrics"])):
                rows.append([f"seed {result.seed}, {when}", *(number(at[split][metric]) for metric in metrics)])
        rows.append(["**median, best**", *(f"**{s['median']:.2f}**" for s in metrics.values())])
        if len(results) > 1:
            rows.append(["min..max, best", *(f"{s['min']:.2f}..{s['max']:.2f}" for s in metrics.values())])
        lines += [f"## {split}", "", *markdown_table(["", *metrics], rows)]
    return lines


def _settings(values: dict[str, Any], data: TaskData, results: Sequence[Result]) -> list[str]:
    total, left_out = values["summary"], _UNTOLD[values["kind"] == "spans"]
    used = {key: value for key, value in values["truncation"].items() if key in ("max_length", "stride")}  # the model's
    told = [f"{key} {value}" for key, value in {**results[0].config, **used}.items() if key not in left_out]
    return [
        "## Settings and speed",
        "",
        f"{', '.join(told)}.",
        "",
        f"{results[0].steps:,} updates in a median of {total['seconds']['median']:,.1f} s, evaluations included; "
        f"training alone {total['examples_per_s']['median']:,.1f} {_items(data)}/s, "
        f"{total['tokens_per_s']['median']:,.0f} tokens/s. Updates left out for a gradient that was not finite: "
        f"{total['skipped_updates']}.",
        "",
    ]


def _truncation(values: dict[str, Any]) -> list[str]:
    found = values["truncation"]
    lines = ["## Inputs that were too long", "", f"At most {found['max_length']} tokens, special ones included.", ""]
    for name, part in _splits(found):
        lines.append(f"- {name}: " + ", ".join(f"{key.replace('_', ' ')} {value:,}" for key, value in part.items()))
    return [*lines, ""]


def _ranks(values: dict[str, Any]) -> list[str]:
    rank = values["effective_rank"]
    return [
        f"## Effective rank (tau {rank['tau']:g}) before and after",
        "",
        f"Of {rank['tokens']:,} tokens of {rank['inputs']:,} development inputs, not centred; after: the median seed, "
        f"{values['summary']['median_seed']}. Layer 0 is the embedding output.",
        "",
        *markdown_table(
            ["layer", *map(str, range(len(rank["before"])))],
            [[when, *map(str, rank[when])] for when in ("before", "after")],
        ),
    ]


def _confusion(matrix: list[list[int]], classes: list[str]) -> list[str]:
    if len(classes) > MAX_CLASSES:
        return [f"Of {len(classes)} classes: in {REPORT_FILE}.", ""]
    rows = [[name, *(f"{count:,}" for count in row)] for name, row in zip(classes, matrix, strict=True)]
    return markdown_table(["true \\ predicted", *classes], rows)


def _errors(found: dict[str, Any]) -> list[str]:
    counts = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in found["counts"].items())
    lines = [f"At threshold {found['threshold']:g}: {counts}.", ""]
    for kind, examples in found.items():
        if isinstance(examples, list) and examples:
            lines += [f"### {kind.replace('_', ' ')}", "", *(_error(example) for example in examples), ""]
    return lines


def _items(data: TaskData) -> str:
    return "windows" if data.task.kind == "spans" else "examples"


def _error(example: dict[str, Any]) -> str:
    answers = " / ".join(example["answers"]) or "no answer"
    text = f"- {example['question']} Expected: {answers}. Found (null odds {example['null_odds']:.2f}): "
    return " ".join(f"{text}{example['text'] or 'nothing'}. {example['around_text']}".split())


def _plot_curves(values: dict[str, Any], results: Sequence[Result], out: Path) -> None:
    from matplotlib.ticker import MaxNLocator

    figure = figure_of(15.0, 4.6)
    loss, metric, rank = figure.subplots(1, 3)
    for i, result in enumerate(results):
        style: dict[str, Any] = {
            "color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i // len(COLOURS) % len(MARKERS)], "markersize": 5.0,
            "linewidth": 1.6, "label": f"seed {result.seed}",
        }  # fmt: skip
        epochs = [row["epoch"] for row in result.curve]
        loss.plot(epochs, [math.nan if row["loss"] is None else row["loss"] for row in result.curve], **style)
        metric.plot(epochs, [row["value"] for row in result.curve], **style)
    for name, dashes in zip(values["baselines"], (":", "--", "-."), strict=False):
        value = values["baselines"][name].get(values["metric"])
        if value is not None:
            metric.axhline(value, color="#555555", linestyle=dashes, linewidth=1.2, label=name)
    loss.set_title("Training loss, mean since the evaluation before", size=11)
    loss.set_ylabel("squared error of scores in 0..1" if values["kind"] == "regression" else "loss (nats)")
    loss.set_ylim(bottom=0)
    metric.set_title(f"{values['title']}, development set", size=11)
    metric.set_ylabel(f"{values['metric']} (%)")
    for axis in (loss, metric):
        axis.set_xlabel("epochs")
        axis.set_xlim(left=0)
    ranks = values["effective_rank"]
    for i, when in enumerate(("before", "after")):
        rank.plot(
            range(len(ranks[when])), ranks[when], color=COLOURS[i], marker=MARKERS[i], linewidth=1.8,
            label=f"{when} fine-tuning" + (f" (seed {values['summary']['median_seed']})" if when == "after" else ""),
        )  # fmt: skip
    rank.set_title(f"{ranks['tau']:g}-effective rank on development inputs", size=11)
    rank.set_xlabel("layer (0: embedding output)")
    rank.set_ylabel("dimensions")
    rank.set_ylim(0, 1.08 * max(*ranks["before"], *ranks["after"]))
    rank.xaxis.set_major_locator(MaxNLocator(nbins=13, integer=True))
    for axis in (loss, metric, rank):
        grid(axis)
    metric.legend(loc="best", fontsize=9, frameon=False)
    rank.legend(loc="best", fontsize=9, frameon=False)
    save_figure(figure, out)


def _plot_confusion(values: dict[str, Any], evaluation: Evaluation, out: Path) -> None:
    splits = list(dict.fromkeys(row["split"] for row in evaluation.predictions))
    side = 3.2 + 0.45 * max(2, len(values["classes"]))
    figure = figure_of(side * len(splits), side)
    for axis, split in zip(figure.subplots(1, len(splits), squeeze=False)[0], splits, strict=True):
        if values["kind"] == "regression":
            rows = [row for row in evaluation.predictions if row["split"] == split]
            axis.plot(
                [row["label"] for row in rows], [row["prediction"] for row in rows], ".", color=COLOURS[0], alpha=0.4
            )
            axis.set_xlabel("given score")
            axis.set_ylabel("predicted score")
            grid(axis)
        else:
            _draw_matrix(axis, np.array(evaluation.details["confusion"][split]), values["classes"])
        axis.set_title(f"{values['title']}, {split}, seed {values['summary']['median_seed']}", size=10)
    save_figure(figure, out)


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
