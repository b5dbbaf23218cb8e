"""The picture of a sweep: a panel of time and one of memory for each axis, three axes side by side.

Colours are Okabe and Ito's; markers differ as well. matplotlib is optional and loaded on use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scaling_fits import Row
from maelm_fast.analysis.plots import COLOURS, MARKERS, require_matplotlib
from maelm_fast.config import require

LABELS = {"mae": "MAE-LM", "roberta": "RoBERTa"}


def check_plot(out: Path) -> None:
    """UserError now rather than after the measurement."""
    require_matplotlib()
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    require(out.suffix.lstrip(".") in kinds, f"{out}: cannot draw a picture of kind '{out.suffix}'; use .png or .svg")


def plot(rows: Sequence[Row], found: Sequence[Row], titles: Mapping[str, str], out: Path) -> None:
    """rows: the points. found: their fits. titles: what the axes mean, by name."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D

    axes = list(dict.fromkeys(row["axis"] for row in rows))
    models = list(dict.fromkeys(row["model"] for row in rows))
    fitted = {(row["axis"], row["model"]): row for row in found if row["kind"] == "fit"}
    columns, bands = min(3, len(axes)), math.ceil(len(axes) / 3)
    layout = ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.08)
    figure = Figure(figsize=(1 + 4.6 * columns, 0.9 + 5.6 * bands), dpi=130, layout=layout, facecolor="white")
    grid = figure.subplots(2 * bands, columns, squeeze=False, height_ratios=[3, 1.5] * bands)
    for panel in grid.ravel():
        panel.set_visible(False)
    for i, axis in enumerate(axes):
        above, below = grid[2 * (i // columns), i % columns], grid[2 * (i // columns) + 1, i % columns]
        for panel in (above, below):
            _scales(panel, sorted({row["x"] for row in rows if row["axis"] == axis}))
        for model in models:
            own = [row for row in rows if row["axis"] == axis and row["model"] == model]
            if own:
                place = list(LABELS).index(model)
                _draw_time(above, own, fitted.get((axis, model)), place)
                _draw_memory(below, own, place)
        above.set_title(titles[axis], size=11)
        above.set_ylabel("seconds per step")
        below.set_ylabel("peak MB")
        _room(above, least=8, above=0.6)  # for the legend
        _room(below, least=4, above=0.0)
        above.legend(loc="upper left", fontsize=8.5, frameon=False, handlelength=1.6)
    shared = rows[0]
    handles = [
        Line2D([], [], color="#555555", marker="o", linestyle="none", label="measured: median, quartiles"),
        Line2D([], [], color="#555555", linestyle="-", label="power law fitted to it"),
        Line2D([], [], color="#555555", linestyle="--", label="growth of the model FLOPs, from the middle point"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9.5)
    machine = f"{shared['device']}, {shared['threads']} CPU thread{'s' if shared['threads'] > 1 else ''}"
    figure.suptitle(f"One training step: {machine}, {shared['precision']}, {shared['rounds']} rounds", size=12)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def _draw_time(panel: Any, rows: Sequence[Row], fit: Row | None, place: int) -> None:
    colour = COLOURS[place]
    x, flops = (np.array([row[name] for row in rows], float) for name in ("x", "flops"))
    low, seconds, high = (np.array([row["seconds"][name] for row in rows]) for name in ("q1", "median", "q3"))
    name = LABELS[rows[0]["model"]]
    panel.errorbar(x, seconds, [seconds - low, high - seconds], color=colour, marker=MARKERS[place], markersize=5.5,
                   linestyle="none", capsize=3, zorder=3)  # fmt: skip
    if fit is not None:
        exponent = fit["exponent"]
        line = np.exp(np.log(seconds).mean()) * (x / np.exp(np.log(x).mean())) ** exponent["median"]
        label = f"{name}: $x^{{{exponent['median']:.2f}}}$ [{exponent['low']:.2f}, {exponent['high']:.2f}]"
        panel.plot(x, line, color=colour, marker=MARKERS[place], markersize=0, linewidth=1.6, label=label)
        middle = len(x) // 2
        label = f"its FLOPs: $x^{{{fit['flop_exponent']:.2f}}}$"
        panel.plot(x, seconds[middle] * flops / flops[middle], color=colour, linestyle="--", linewidth=1.2, label=label)


def _draw_memory(panel: Any, rows: Sequence[Row], place: int) -> None:
    x, memory = [row["x"] for row in rows], [row["peak_memory_mb"] for row in rows]
    panel.plot(x, memory, color=COLOURS[place], marker=MARKERS[place], markersize=4.5, linewidth=1.2)


def _room(panel: Any, least: float, above: float) -> None:
    """Shows at least that ratio of values, so that what hardly grows looks flat, and that much more height above."""
    low, high = panel.get_ylim()
    ratio = max(least, high / low)
    bottom = math.sqrt(low * high / ratio)
    panel.set_ylim(bottom, bottom * ratio ** (1 + above))


def _scales(panel: Any, xs: Sequence[int]) -> None:
    """Both logarithmic, with the measured x and 1, 2, 5 times powers of ten as labels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    panel.set_visible(True)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xticks(xs, [str(x) for x in xs])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.grid(True, color="#dddddd", linewidth=0.7)
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=9)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
