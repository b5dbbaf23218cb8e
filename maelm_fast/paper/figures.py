"""The pictures of the experiments. Thin lines and dots are single seeds, thick lines their medians.

matplotlib is loaded on use; figures are made without pyplot, hence without a display or global state.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maelm_fast.analysis.plots import COLOURS, GREY, MARKERS, figure_of, grid, save, short_number
from maelm_fast.finetuning.tasks import Task
from maelm_fast.paper.catalogue import Row
from maelm_fast.paper.plan import Cell
from maelm_fast.paper.prompting.run import MODES
from maelm_fast.paper.results import (
    REAL,
    Results,
    median_by_layer,
    passes,
    predicts_all,
    pretraining_input,
    scores,
)
from maelm_fast.paper.scores import RANDOM, average_name, glue_tasks, prompted_average, squad_em


def draw(results: Results, out: Path) -> None:
    """The figure of the results' experiment, to a PNG file. At least one run must be finished."""
    figure = _DRAW[results.plan.experiment.name](results)
    if results.plan.scale.meaningless:
        figure.suptitle(f"Scale {results.plan.scale.name}: these numbers mean nothing", color="#b00000", size=11)
    save(figure, out)


def _fig1(results: Results) -> Any:
    row = results.plan.rows[0]
    figure = figure_of(11.0, 4.8)
    left, right = figure.subplots(1, 2)
    _by_layer(left, [("input w. [MASK]", results.layers(row, "with_mask")), _without(results, row)])
    left.set_title("(a) all positions", size=11)
    _by_layer(right, [("[MASK] positions", results.layers(row, "mask_positions"))], first_colour=2)
    right.set_title("(b) [MASK] positions alone", size=11)
    return figure


def _fig6(results: Results) -> Any:
    row = results.plan.rows[0]
    figure = figure_of(6.5, 4.8)
    axis = figure.subplots()
    _by_layer(axis, [("input w. [MASK]", results.layers(row, "with_mask")), _without(results, row)])
    return figure


def _fig5(results: Results) -> Any:
    mlm, mae_lm = results.plan.rows
    after = [
        (row.label, results.finetuned_ranks(results.plan.of_row(row), task))
        for task in results.plan.tasks
        for row in results.plan.rows
    ]
    both = any(seeds for _, seeds in after)
    figure = figure_of(12.0 if both else 7.5, 5.2)
    axis, *second = figure.subplots(1, 2, squeeze=False)[0] if both else [figure.subplots()]
    lines = [
        ("MLM w. [MASK]", results.layers(mlm, "with_mask")),
        ("MLM w/o. [MASK]", results.layers(mlm, REAL)),
        ("MAE-LM, all tokens real", results.layers(mae_lm, REAL)),
        ("MAE-LM, visible tokens as in pretraining", results.layers(mae_lm, "visible")),
    ]
    _by_layer(axis, lines)
    axis.set_title("(a) after pretraining", size=11)
    for other in second:
        _by_layer(other, after, first_colour=1)
        other.set_title(f"(b) after fine-tuning on {results.plan.tasks[0].title}, its development inputs", size=11)
    return figure


def _without(results: Results, row: Row) -> tuple[str, list[list[int]]]:
    return "input w/o. [MASK]", results.layers(row, REAL)


def _by_layer(axis: Any, lines: Sequence[tuple[str, list[list[int]]]], first_colour: int = 0) -> None:
    """Effective ranks over the layers: of every line the seeds, thin, and their median."""
    from matplotlib.ticker import MaxNLocator

    for i, (label, seeds) in enumerate(lines, start=first_colour):
        if not seeds:
            continue
        for ranks in seeds if len(seeds) > 1 else []:
            axis.plot(range(len(ranks)), ranks, color=COLOURS[i], linewidth=0.7, alpha=0.5)
        middle = median_by_layer(seeds)
        axis.plot(range(len(middle)), middle, color=COLOURS[i], marker=MARKERS[i], linewidth=1.8,
                  linestyle="--" if i % 2 else "-", label=label)  # fmt: skip
    axis.set_xlabel("layer (0: embedding output)")
    axis.set_ylabel("0.9-effective rank (dimensions)")
    axis.xaxis.set_major_locator(MaxNLocator(nbins=13, integer=True))
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    largest = max((rank for _, seeds in lines for ranks in seeds for rank in ranks), default=1)
    axis.set_ylim(0, 1.06 * largest)  # matplotlib's own margin cuts the highest marks
    grid(axis)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)


def _fig4(results: Results) -> Any:
    plan, glue = results.plan, glue_tasks(results)

    def mean(cells: Sequence[Cell], step: int | None = None) -> list[float]:
        value = results.average(cells, glue, step)
        return [] if value is None else [value]

    panels: list[tuple[str, list[list[float]], list[list[float]]]] = [
        (name, [of(plan.of_row(row), None) for row in plan.rows], [of([cell], 0) for cell in plan.controls])
        for name, of in (
            (average_name(results) if glue else "", mean),
            ("SQuAD 2.0 EM", lambda cells, step: squad_em(results, cells, step)),
        )
    ]
    panels = [panel for panel in panels if any(panel[1])]
    losses = [results.of_row(row, "val_loss") for row in plan.rows]
    ranks = [[float(rank) for rank in results.last_layer(row, REAL)] for row in plan.rows]
    panels.append(("validation loss (nats per masked token)", losses, []))
    panels.append(("0.9-effective rank, last layer, all tokens real", ranks, []))
    figure = figure_of(10.5, 4.4 * -(-len(panels) // 2))
    axes = list(figure.subplots(-(-len(panels) // 2), 2, squeeze=False).flat)
    deltas = [float(row.label) for row in plan.rows]
    for i, (axis, (name, values, untrained)) in enumerate(zip(axes, panels, strict=False)):
        _over_delta(axis, deltas, values, i)
        axis.set_ylabel(_wrapped(name))
        for seeds in untrained:
            if seeds:
                axis.axhline(statistics.median(seeds), color=GREY, linestyle=":", label=RANDOM)
                axis.legend(frameon=False)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    return figure


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 50))


def _over_delta(axis: Any, deltas: Sequence[float], values: Sequence[Sequence[float]], colour: int) -> None:
    there = [(delta, seeds) for delta, seeds in zip(deltas, values, strict=True) if seeds]
    for delta, seeds in there if max(map(len, values)) > 1 else []:
        axis.plot([delta] * len(seeds), seeds, linestyle="none", marker=".", color=COLOURS[colour], alpha=0.6)
    axis.plot([d for d, _ in there], [statistics.median(s) for _, s in there], marker=MARKERS[colour], linewidth=1.8,
              color=COLOURS[colour])  # fmt: skip
    axis.set_xticks(deltas)
    axis.set_xlabel("delta: share of [MASK] tokens in the encoder (0: MAE-LM)")
    low, high = axis.get_ylim()
    if (more := 0.05 * high - (high - low)) > 0:  # an axis as narrow as the values would make much of little
        axis.set_ylim(low - more / 2, high + more / 2)
    grid(axis)


def _fig3(results: Results) -> Any:
    from matplotlib.ticker import FuncFormatter

    task = results.plan.tasks[0] if results.plan.tasks else None
    quantities = (["score"] if task else []) + ["val_loss", "rank"]
    figure = figure_of(10.5, 0.6 + 3.5 * len(quantities))
    axes = figure.subplots(len(quantities), 2, sharex="col")
    for column, key in enumerate(("tokens", "seconds")):
        if task is not None:
            _accuracy(axes[0, column], results, task, key)
        for axis, quantity in zip(axes[-2:, column], quantities[-2:], strict=True):
            for i, row in enumerate(results.plan.rows):
                for j, cell in enumerate(results.plan.of_row(row)):
                    points = [point for point in results.curve(cell) if point[quantity] is not None]
                    axis.plot([point[key] for point in points], [point[quantity] for point in points],
                              color=COLOURS[i], marker=MARKERS[i], markersize=5, linewidth=1.5,
                              label=row.label if j == 0 else None)  # fmt: skip
    for column, name in enumerate(("original tokens", "seconds of training, without evaluation and saving")):
        axes[-2, column].set_ylabel("validation loss (nats per masked token)")
        axes[-1, column].set_ylabel("0.9-effective rank, last layer, all tokens real")
        axes[-1, column].set_xlabel(name)
        axes[-1, column].xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
        for axis in axes[:, column]:
            axis.set_xlim(left=0)
            grid(axis)
    handles, labels = axes[-2, 0].get_legend_handles_labels()
    extra = [pair for pair in zip(*axes[0, 0].get_legend_handles_labels(), strict=True) if pair[1] not in labels]
    handles, labels = handles + [h for h, _ in extra], labels + [name for _, name in extra]
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _accuracy(axis: Any, results: Results, task: Task, key: str) -> None:
    """The paper's panel: checkpoints after fine-tuning, and where the second model passes the first one's end."""
    curves = [results.accuracy_curve(row, task) for row in results.plan.rows]
    for i, (row, curve) in enumerate(zip(results.plan.rows, curves, strict=True)):
        for point in curve if any(len(point["seeds"]) > 1 for point in curve) else []:
            axis.plot([point[key]] * len(point["seeds"]), point["seeds"], linestyle="none", marker=".",
                      color=COLOURS[i], alpha=0.5)  # fmt: skip
        axis.plot([point[key] for point in curve], [point["score"] for point in curve], color=COLOURS[i],
                  marker=MARKERS[i], linewidth=1.8, label=row.label)  # fmt: skip
    for cell in results.plan.controls:
        if values := scores(results.finetuned([cell], task, step=0), task.validation[0], task.metric):
            axis.axhline(statistics.median(values), color=GREY, linestyle=":", label=RANDOM)
    first = results.plan.rows[0]
    if (final := results.end(first, task)) is not None:
        axis.axhline(final["score"], color=COLOURS[0], linestyle="--", linewidth=0.9, label=f"{first.label}, last")
        if (place := passes(curves[1], final["score"], key)) is not None:
            axis.axvline(place, color=COLOURS[1], linestyle="--", linewidth=0.9)
            axis.annotate(short_number(place), (place, 0.02), xycoords=("data", "axes fraction"), xytext=(4, 0),
                          textcoords="offset points", size=9, color=COLOURS[1])  # fmt: skip
    axis.set_ylabel(f"{task.title} {task.metric} after fine-tuning")


def _by_row(results: Results) -> Any:
    """Of a table: loss, rank and, where there is any, the downstream mean of every row, one below the other."""
    rows = results.plan.rows
    downstream = bool(glue_tasks(results))
    figure = figure_of(14.0 if downstream else 11.0, (2.4 if downstream else 1.8) + 0.34 * len(rows))
    left, right, *third = figure.subplots(1, 3 if downstream else 2, sharey=True)
    for y, row in enumerate(rows):
        config = results.plan.of_row(row)[0].config
        if predicts_all(config):
            left.annotate("over all tokens: not comparable", (0.02, y), xycoords=("axes fraction", "data"), va="center",
                          size=9)  # fmt: skip
        else:
            _dots(left, y, results.of_row(row, "val_loss"), COLOURS[0], MARKERS[0])
        if name := pretraining_input(config):
            _dots(right, y, results.last_layer(row, name), COLOURS[1], MARKERS[1], markersize=10, fillstyle="none")
        _dots(right, y, results.last_layer(row, REAL), COLOURS[2], MARKERS[2])
    left.set_yticks(range(len(rows)), [row.title for row in rows])
    left.invert_yaxis()
    left.set_xlabel("validation loss (nats per masked token)")
    right.set_xlabel("0.9-effective rank, last layer")
    for i, label, look in ((2, "all tokens real", "full"), (1, "the input of pretraining", "none")):
        right.plot([], [], linestyle="none", marker=MARKERS[i], color=COLOURS[i], fillstyle=look, label=label)
    right.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    for axis in third:
        _means(axis, results)
    for axis in (left, right, *third):
        axis.set_ylim(len(rows) - 0.5, -0.5)
        grid(axis)
    return figure


def _means(axis: Any, results: Results) -> None:
    """The mean over the tasks of every row: fine-tuned, with the untrained encoder's, or prompted in each way."""
    glue = glue_tasks(results)
    prompting = results.plan.experiment.use == "prompting"
    for y, row in enumerate(results.plan.rows):
        for i, mode in enumerate(MODES if prompting else ("",)):
            mean = (
                prompted_average(results, row, mode) if prompting else results.average(results.plan.of_row(row), glue)
            )
            if mean is not None:
                named = mode in axis.get_legend_handles_labels()[1]
                axis.plot(mean, y, linestyle="none", color=COLOURS[3 + i], marker=MARKERS[3 + i],
                          label=mode if prompting and not named else None)  # fmt: skip
    for cell in [] if prompting else results.plan.controls:
        if (mean := results.average([cell], glue, step=0)) is not None:
            axis.axvline(mean, color=GREY, linestyle=":", label=f"{RANDOM}, {cell.row.setting}")
    axis.set_xlabel(_wrapped(average_name(results)))
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)


def _dots(axis: Any, y: int, seeds: Sequence[float], colour: str, marker: str, **look: Any) -> None:
    if len(seeds) > 1:
        axis.plot(seeds, [y] * len(seeds), linestyle="none", marker=".", color=colour, alpha=0.6)
    if seeds:
        axis.plot(statistics.median(seeds), y, marker=marker, color=colour, **look)


_DRAW = {
    "fig1": _fig1,
    "fig3": _fig3,
    "fig4": _fig4,
    "fig5": _fig5,
    "fig6": _fig6,
    "table1": _by_row,
    "table2": _by_row,
    "table6": _by_row,
    "table7": _by_row,
}
