"""The pictures of the experiments. Thin lines and dots are single seeds, thick lines their medians.

matplotlib is loaded on use; figures are made without pyplot, hence without a display or global state.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maelm_fast.analysis.plots import COLOURS, MARKERS, short_number
from maelm_fast.data.files import written_aside
from maelm_fast.experiments.catalogue import Row
from maelm_fast.experiments.results import REAL, Results, median_by_layer, predicts_all, pretraining_input

_GREY = "#555555"


def draw(results: Results, out: Path) -> None:
    """The figure of the results' experiment, to a PNG file. At least one run must be finished."""
    figure = _DRAW[results.plan.experiment.name](results)
    if results.plan.scale.meaningless:
        figure.suptitle(f"Scale {results.plan.scale.name}: these numbers mean nothing", color="#b00000", size=11)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    with written_aside(out) as file:
        file.write(picture.getvalue())


def _fig1(results: Results) -> Any:
    row = results.plan.rows[0]
    figure = _figure(11.0, 4.8)
    left, right = figure.subplots(1, 2)
    _by_layer(left, [("input w. [MASK]", results.layers(row, "with_mask")), _without(results, row)])
    left.set_title("(a) all positions", size=11)
    _by_layer(right, [("[MASK] positions", results.layers(row, "mask_positions"))], first_colour=2)
    right.set_title("(b) [MASK] positions alone", size=11)
    return figure


def _fig6(results: Results) -> Any:
    row = results.plan.rows[0]
    figure = _figure(6.5, 4.8)
    axis = figure.subplots()
    _by_layer(axis, [("input w. [MASK]", results.layers(row, "with_mask")), _without(results, row)])
    return figure


def _fig5(results: Results) -> Any:
    mlm, mae_lm = results.plan.rows
    figure = _figure(7.5, 5.2)
    axis = figure.subplots()
    lines = [
        ("MLM w. [MASK]", results.layers(mlm, "with_mask")),
        ("MLM w/o. [MASK]", results.layers(mlm, REAL)),
        ("MAE-LM, all tokens real", results.layers(mae_lm, REAL)),
        ("MAE-LM, visible tokens as in pretraining", results.layers(mae_lm, "visible")),
    ]
    _by_layer(axis, lines)
    axis.set_title("(a) after pretraining", size=11)
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
    axis.set_ylim(bottom=0)
    _finish(axis)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)


def _fig4(results: Results) -> Any:
    figure = _figure(10.5, 4.4)
    left, right = figure.subplots(1, 2)
    rows = results.plan.rows
    deltas = [float(row.label) for row in rows]
    _over_delta(left, deltas, [results.of_row(row, "val_loss") for row in rows], 0)
    left.set_ylabel("validation loss (nats per masked token)")
    _over_delta(right, deltas, [results.last_layer(row, REAL) for row in rows], 1)
    right.set_ylabel("0.9-effective rank, last layer, all tokens real")
    return figure


def _over_delta(axis: Any, deltas: Sequence[float], values: Sequence[Sequence[float]], colour: int) -> None:
    there = [(delta, seeds) for delta, seeds in zip(deltas, values, strict=True) if seeds]
    for delta, seeds in there if max(map(len, values)) > 1 else []:
        axis.plot([delta] * len(seeds), seeds, linestyle="none", marker=".", color=COLOURS[colour], alpha=0.6)
    axis.plot([d for d, _ in there], [statistics.median(s) for _, s in there], marker=MARKERS[colour], linewidth=1.8,
              color=COLOURS[colour])  # fmt: skip
    axis.set_xticks(deltas)
    axis.set_xlabel("delta: share of [MASK] tokens in the encoder (0: MAE-LM)")
    _finish(axis)


def _fig3(results: Results) -> Any:
    from matplotlib.ticker import FuncFormatter

    figure = _figure(10.5, 7.6)
    axes = figure.subplots(2, 2, sharex="col")
    for i, row in enumerate(results.plan.rows):
        for j, cell in enumerate(results.plan.of_row(row)):
            curve = results.curve(cell)
            for column, key in enumerate(("tokens", "seconds")):
                for axis, quantity in zip(axes[:, column], ("val_loss", "rank"), strict=True):
                    points = [point for point in curve if point[quantity] is not None]
                    axis.plot([point[key] for point in points], [point[quantity] for point in points],
                              color=COLOURS[i], marker=MARKERS[i], markersize=5, linewidth=1.5,
                              label=row.label if j == 0 else None)  # fmt: skip
    for column, name in enumerate(("original tokens", "seconds of training, without evaluation and saving")):
        axes[0, column].set_ylabel("validation loss (nats per masked token)")
        axes[1, column].set_ylabel("0.9-effective rank, last layer, all tokens real")
        axes[1, column].set_xlabel(name)
        axes[1, column].xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
        for axis in axes[:, column]:
            axis.set_xlim(left=0)
            _finish(axis)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def _by_row(results: Results) -> Any:
    """Of a table: loss and rank of every row, one below the other."""
    rows = results.plan.rows
    figure = _figure(11.0, 1.8 + 0.34 * len(rows))
    left, right = figure.subplots(1, 2, sharey=True)
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
    labels = [row.label if row.setting == "base" else f"{row.label}, {row.setting}" for row in rows]
    left.set_yticks(range(len(rows)), labels)
    left.invert_yaxis()
    left.set_xlabel("validation loss (nats per masked token)")
    right.set_xlabel("0.9-effective rank, last layer")
    for i, label, look in ((2, "all tokens real", "full"), (1, "the input of pretraining", "none")):
        right.plot([], [], linestyle="none", marker=MARKERS[i], color=COLOURS[i], fillstyle=look, label=label)
    right.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    for axis in (left, right):
        axis.set_ylim(len(rows) - 0.5, -0.5)
        _finish(axis)
    return figure


def _dots(axis: Any, y: int, seeds: Sequence[float], colour: str, marker: str, **look: Any) -> None:
    if len(seeds) > 1:
        axis.plot(seeds, [y] * len(seeds), linestyle="none", marker=".", color=colour, alpha=0.6)
    if seeds:
        axis.plot(statistics.median(seeds), y, marker=marker, color=colour, **look)


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")


def _finish(axis: Any) -> None:
    axis.grid(True, color="#dddddd", linewidth=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


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
