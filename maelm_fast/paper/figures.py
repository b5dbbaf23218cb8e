"""The pictures of the experiments. Thin lines, dots and whiskers are single seeds; thick lines and marks, medians."""

from __future__ import annotations

import statistics
import textwrap
from pathlib import Path
from typing import Any

from maelm_fast.finetuning.tasks import Task
from maelm_fast.paper.prompting.run import MODES
from maelm_fast.paper.results import RANDOM, REAL, Results, passes, predicts_all, pretraining_input, untrained
from maelm_fast.paper.scores import column
from maelm_fast.reporting import (
    COLOURS,
    GREY,
    figure_of,
    grid,
    layer_axis,
    legend_below,
    legend_outside,
    look,
    not_too_narrow,
    per_group,
    save,
    short_number,
    thousands,
    where,
    whiskers,
)

_LOSS = "validation loss (nats per masked token)"
_RANK = "0.9-effective rank, last layer, all tokens real"


def draw(results: Results, out: Path) -> None:
    """The figure of the results' experiment, to a PNG file. At least one run must be finished."""
    figure = _DRAW.get(results.plan.experiment.name, _by_row)(results)
    if results.plan.scale.meaningless:
        figure.suptitle(f"Scale {results.plan.scale.name}: these numbers mean nothing", color="#b00000", size=11)
    save(figure, out)


def _fig1(results: Results) -> Any:
    figure = figure_of(11.0, 4.8)
    left, right = figure.subplots(1, 2)
    _with_and_without(left, results)
    left.set_title("(a) all positions", size=11)
    _by_layer(right, {"[MASK] positions": results.layers(results.plan.rows[0], "mask_positions")}, first=2)
    right.set_title("(b) [MASK] positions alone", size=11)
    return figure


def _fig6(results: Results) -> Any:
    figure = figure_of(6.5, 4.8)
    _with_and_without(figure.subplots(), results)
    return figure


def _with_and_without(axis: Any, results: Results) -> None:
    inputs = {"input w. [MASK]": "with_mask", "input w/o. [MASK]": REAL}
    _by_layer(axis, {label: results.layers(results.plan.rows[0], name) for label, name in inputs.items()})


def _fig5(results: Results) -> Any:
    mlm, mae_lm = results.plan.rows
    after = {
        row.label: results.finetuned_layers(row, task, "after fine-tuning")
        for task in results.plan.tasks
        for row in results.plan.rows
    }
    both = any(after.values())
    figure = figure_of(12.0 if both else 7.5, 5.2)
    axis, *second = figure.subplots(1, 2, squeeze=False)[0] if both else [figure.subplots()]
    lines = {
        "MLM w. [MASK]": results.layers(mlm, "with_mask"),
        "MLM w/o. [MASK]": results.layers(mlm, REAL),
        "MAE-LM, all tokens real": results.layers(mae_lm, REAL),
        "MAE-LM, visible tokens as in pretraining": results.layers(mae_lm, "visible"),
    }
    _by_layer(axis, lines)
    axis.set_title("(a) after pretraining", size=11)
    for other in second:
        _by_layer(other, after, first=1)
        other.set_title(f"(b) after fine-tuning on {results.plan.tasks[0].title}, its development inputs", size=11)
    return figure


def _by_layer(axis: Any, lines: dict[str, list[list[int]]], first: int = 0) -> None:
    """Effective ranks over the layers: of every line the seeds, thin, and their median."""
    from matplotlib.ticker import MaxNLocator

    for i, (label, seeds) in enumerate(lines.items(), start=first):
        for ranks in seeds if len(seeds) > 1 else []:
            axis.plot(range(len(ranks)), ranks, color=COLOURS[i], linewidth=0.7, alpha=0.5)
        if middle := [statistics.median(layer) for layer in zip(*seeds, strict=True)]:
            axis.plot(range(len(middle)), middle, **look(i), linewidth=1.8, ls="--" if i % 2 else "-", label=label)
    layer_axis(axis, "0.9-effective rank (dimensions)")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    largest = max((rank for seeds in lines.values() for ranks in seeds for rank in ranks), default=1)
    axis.set_ylim(0, 1.06 * largest)  # matplotlib's own margin cuts the highest marks
    legend_below(axis, 2, -0.14)


Spread = dict[str, tuple[float, list[float]]]
"""By model: what the table says, and the seeds that it is the median of (of means over tasks: the seeds' own means)."""


def _spread(seeds: dict[str, list[float]]) -> Spread:
    return {model: (statistics.median(values), values) for model, values in seeds.items() if values}


def _means(results: Results, kind: str = "finetuning") -> Spread:
    seeds = results.means_by_seed(kind)
    return {model: (mean, seeds.get(model, [])) for model, mean in results.means(kind).items()}


def _fig4(results: Results) -> Any:
    rows, squad = results.plan.rows, column("SQuAD EM", results.plan.tasks)
    exact = where(results.finetuned, task=squad.task.name, metric=squad.metric) if squad.task else None
    panels: dict[str, Spread] = {
        results.average_name if results.glue else "": _means(results),
        "SQuAD 2.0 EM": {} if exact is None else _spread(per_group(exact, "model")),
        _LOSS: _spread({row.title: results.of_row(row, "val_loss") for row in rows}),
        _RANK: _spread({row.title: list(map(float, results.last_layer(row, REAL))) for row in rows}),
    }
    panels = {name: found for name, found in panels.items() if any(row.title in found for row in rows)}
    tall = -(-len(panels) // 2)
    figure = figure_of(10.5, 4.4 * tall)
    axes = list(figure.subplots(tall, 2, squeeze=False).flat)
    for i, (axis, (name, found)) in enumerate(zip(axes, panels.items(), strict=False)):
        there = [(float(row.label), *found[row.title]) for row in rows if row.title in found]
        axis.plot([delta for delta, *_ in there], [middle for _, middle, _ in there], **look(i), linewidth=1.8)
        for delta, middle, seeds in there:
            whiskers(axis, delta, middle, seeds, COLOURS[i])
        axis.set_xticks([float(row.label) for row in rows])
        axis.set_xlabel("delta: share of [MASK] tokens in the encoder (0: MAE-LM)")
        axis.set_ylim(*not_too_narrow(*axis.get_ylim()))
        axis.set_ylabel(_wrapped(name))
        grid(axis)
        for cell in results.plan.controls:
            if untrained(cell) in found:
                axis.axhline(found[untrained(cell)][0], color=GREY, linestyle=":", label=RANDOM)
                axis.legend(frameon=False)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    return figure


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 50))


def _fig3(results: Results) -> Any:
    plan, task = results.plan, results.plan.tasks[0] if results.plan.tasks else None
    quantities = {"val_loss": _LOSS, "rank": _RANK}
    figure = figure_of(10.5, 0.6 + 3.5 * (len(quantities) + bool(task)))
    axes = figure.subplots(len(quantities) + bool(task), 2, sharex="col")
    names = {"tokens": "original tokens", "seconds": "seconds of training, without evaluation and saving"}
    for column_, (key, name) in enumerate(names.items()):
        if task is not None:
            _accuracy(axes[0, column_], results, task, key)
        for axis, (quantity, label) in zip(axes[-2:, column_], quantities.items(), strict=True):
            for i, row in enumerate(plan.rows):
                for j, cell in enumerate(plan.of_row(row)):  # every seed is a line
                    points = [point for point in results.curve(cell) if point[quantity] is not None]
                    line = {**look(i), "markersize": 5, "linewidth": 1.5, "label": None if j else row.label}
                    axis.plot([point[key] for point in points], [point[quantity] for point in points], **line)
            axis.set_ylabel(label)
        axes[-1, column_].set_xlabel(name)
        thousands(axes[-1, column_])
        for axis in axes[:, column_]:
            axis.set_xlim(left=0)
            grid(axis)
    legend_outside(figure, (axes[-2, 0], axes[0, 0]), 2)
    return figure


def _accuracy(axis: Any, results: Results, task: Task, key: str) -> None:
    """The paper's panel: checkpoints after fine-tuning, and where the second model passes the first one's end."""
    curves = [results.accuracy_curve(row, task) for row in results.plan.rows]
    for i, (row, curve) in enumerate(zip(results.plan.rows, curves, strict=True)):
        for point in curve:
            whiskers(axis, point[key], point["score"], point["seeds"], COLOURS[i])
        places, scores = [point[key] for point in curve], [point["score"] for point in curve]
        axis.plot(places, scores, **look(i), linewidth=1.8, label=row.label)
    for cell in results.plan.controls:
        if values := results.control(cell, task):
            axis.axhline(statistics.median(values), color=GREY, linestyle=":", label=RANDOM)
    first = results.plan.rows[0]
    if (final := results.end(first, task)) is not None:
        axis.axhline(final["score"], color=COLOURS[0], linestyle="--", linewidth=0.9, label=f"{first.label}, last")
        if (place := passes(curves[1], final["score"], key)) is not None:
            axis.axvline(place, color=COLOURS[1], linestyle="--", linewidth=0.9)
            text = {"xycoords": ("data", "axes fraction"), "xytext": (4, 0), "textcoords": "offset points", "size": 9}
            axis.annotate(short_number(place), (place, 0.02), **text, color=COLOURS[1])
    axis.set_ylabel(f"{task.title} {task.metric} after fine-tuning")


def _by_row(results: Results) -> Any:
    """Of a table: loss, rank and, where there is any, the downstream mean of every row, one below the other."""
    rows, downstream = results.plan.rows, bool(results.glue)
    figure = figure_of(14.0 if downstream else 11.0, (2.4 if downstream else 1.8) + 0.34 * len(rows))
    loss, rank, *third = figure.subplots(1, 3 if downstream else 2, sharey=True)
    for y, row in enumerate(rows):
        config = results.plan.of_row(row)[0].config
        if predicts_all(config):
            place = {"xycoords": ("axes fraction", "data"), "va": "center", "size": 9}
            loss.annotate("over all tokens: not comparable", (0.02, y), **place)
        else:
            _marked(loss, y, _spread({"": results.of_row(row, "val_loss")}), 0)
        name = pretraining_input(config)
        own = {"": list(map(float, results.last_layer(row, name)))} if name else {}
        _marked(rank, y, _spread(own), 1, markersize=10, fillstyle="none")
        _marked(rank, y, _spread({"": list(map(float, results.last_layer(row, REAL)))}), 2)
    loss.set_yticks(range(len(rows)), [row.title for row in rows])
    loss.invert_yaxis()
    alone = "\none pretraining seed" if results.plan.seeds == 1 else ""
    loss.set_xlabel(_LOSS + alone)
    rank.set_xlabel("0.9-effective rank, last layer" + alone)
    rank.plot([], [], linestyle="none", **look(2), label="all tokens real")
    rank.plot([], [], linestyle="none", **look(1), fillstyle="none", label="the input of pretraining")
    for axis in third:
        _downstream(axis, results)
    for axis in (loss, rank, *third):
        if axis.get_legend_handles_labels()[0]:
            axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xlim(*not_too_narrow(*axis.get_xlim()))
        grid(axis)
    return figure


def _downstream(axis: Any, results: Results) -> None:
    """The mean over the tasks of every row: fine-tuned, with the untrained encoder's, or prompted in each way."""
    prompting = results.plan.experiment.use == "prompting"
    for i, kind in enumerate(MODES if prompting else ("finetuning",)):
        found = _means(results, kind)
        for y, row in enumerate(results.plan.rows):
            _marked(axis, y, {"": found[row.title]} if row.title in found else {}, 3 + i)
        if prompting and found:
            axis.plot([], [], linestyle="none", **look(3 + i), label=kind)
        for cell in results.plan.controls:
            if untrained(cell) in found:
                mean, seeds = found[untrained(cell)]
                axis.axvline(mean, color=GREY, linestyle=":", label=untrained(cell))
                if len(seeds) > 1:
                    axis.axvspan(min(seeds), max(seeds), color=GREY, alpha=0.12, linewidth=0)
    axis.set_xlabel(_wrapped(results.average_name))


def _marked(axis: Any, y: int, found: Spread, i: int, **style: Any) -> None:
    for middle, seeds in found.values():
        whiskers(axis, y, middle, seeds, COLOURS[i], across=True)
        axis.plot(middle, y, linestyle="none", **look(i), **style)


_DRAW = {"fig1": _fig1, "fig3": _fig3, "fig4": _fig4, "fig5": _fig5, "fig6": _fig6}  # the others are tables
