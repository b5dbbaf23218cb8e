"""The picture of a sweep, from the plan and the ledger. matplotlib is optional and loaded on use."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maelm_fast.analysis.plots import COLOURS, MARKERS, figure_of, grid, require_matplotlib, save
from maelm_fast.errors import UserError
from maelm_fast.paper.grids import shown
from maelm_fast.paper.sweep import Done, Run, Sweep, read_done

PICTURE = "sweep.png"


def draw(sweep: Sweep, out: Path) -> None:
    """OUT/sweep.png: a panel per task, the metric over the learning rate. A mark is a cell's median over seeds; the
    line joins the best cells of a model, with the lowest and highest of their seeds.

    Raises UserError if matplotlib is not installed or nothing is finished."""
    require_matplotlib()
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    done = read_done(out)
    panels = [s for s in sweep.searches if any(run.key in done.results for run in sweep.runs if run.search is s)]
    if not panels:
        raise UserError("nothing to draw: no run is finished")
    wide = min(len(panels), 3)
    tall = -(-len(panels) // wide)
    figure = figure_of(1.0 + 4.2 * wide, 0.9 + 3.6 * tall)
    axes = figure.subplots(tall, wide, squeeze=False).ravel()
    for axis in axes[len(panels) :]:
        axis.remove()
    for axis, search in zip(axes, panels, strict=False):
        rates = sorted({cell.config.lr for cell in search.cells})
        for i, model in enumerate(sweep.models):
            _draw_model(axis, sweep.of(model, search), done, model.label, i, len(sweep.models))
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
    legend: dict[str, Any] = {}
    for axis in axes[: len(panels)]:
        handles, labels = axis.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    wide = min(len(legend), 4)
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=wide, frameon=False)
    save(figure, out / PICTURE)


def _draw_model(axis: Any, runs: Sequence[Run], done: Done, label: str, i: int, models: int) -> None:
    cells: dict[int, tuple[float, list[float]]] = {}
    for run in runs:
        if (result := done.results.get(run.key)) is not None:
            cells.setdefault(run.cell.number, (run.config.lr, []))[1].append(result["best"])
    if not cells:
        return
    shift = 1.03 ** (i - (models - 1) / 2)  # beside each other, not on top
    style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
    x = [rate * shift for rate, _ in cells.values()]
    axis.plot(x, [statistics.median(v) for _, v in cells.values()], linestyle="none", markersize=4, alpha=0.4, **style)
    best: dict[float, list[float]] = {}
    for rate, values in cells.values():
        if rate not in best or statistics.median(values) > statistics.median(best[rate]):
            best[rate] = values
    rates = sorted(best)
    middles = [statistics.median(best[rate]) for rate in rates]
    below = [m - min(best[rate]) for m, rate in zip(middles, rates, strict=True)]
    above = [max(best[rate]) - m for m, rate in zip(middles, rates, strict=True)]
    axis.errorbar([rate * shift for rate in rates], middles, yerr=[below, above], label=label, linewidth=1.6,
                  markersize=6, capsize=3, **style)  # fmt: skip
