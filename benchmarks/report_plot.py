"""The benchmarks' pictures, drawn from rows. matplotlib is optional and loaded on use."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report_ops import summaries
from benchmarks.rows import FORMATS, Results, Row
from benchmarks.scaling import AXES, MODELS
from benchmarks.tracks import TRACKS
from maelm_fast.config import require
from maelm_fast.reporting import figure_of, grid, look, require_matplotlib, save


def plot(results: Results, name: str, out: Path) -> None:
    """In the format of its ending. UserError if there are no rows, or no matplotlib."""
    rows = results.rows.get(name, [])
    require(bool(rows), f"there is no row of {name} to draw")
    require_matplotlib()
    save(PLOTS[name](rows), out)


def _reach(quartiles: Sequence[dict[str, float]]) -> list[list[float]]:
    """Error bars."""
    return [[v["median"] - v["q1"] for v in quartiles], [v["q3"] - v["median"] for v in quartiles]]


def scaling(rows: Sequence[Row]) -> Any:
    """Of the newest machine: seconds with quartiles, and dashed how the model FLOPs grow from the middle point; below,
    peak memory."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    rows = list(FORMATS["scaling"].tables(rows))[-1]
    axes = list(dict.fromkeys(row["axis"] for row in rows))
    columns, bands = min(3, len(axes)), math.ceil(len(axes) / 3)
    figure = figure_of(1 + 4.4 * columns, 0.9 + 5.2 * bands)
    panels = figure.subplots(2 * bands, columns, squeeze=False, height_ratios=[3, 1.5] * bands)
    for panel in panels.ravel()[2 * len(axes) :]:
        panel.set_visible(False)
    for i, axis in enumerate(axes):
        above, below = panels[2 * (i // columns), i % columns], panels[2 * (i // columns) + 1, i % columns]
        for place, (model, label) in enumerate(MODELS.items()):
            own = [row for row in rows if (row["axis"], row["model"]) == (axis, model)]
            if own:
                _growth(above, below, own, look(place), label)
        for panel in (above, below):
            low, high = panel.get_ylim()
            room = max(1.0, 8 * low / high) ** 0.5  # what hardly grows looks flat
            panel.set_ylim(low / room, high * room)
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            panel.yaxis.set_minor_formatter(NullFormatter())
        above.set_title(AXES[axis], size=11)
        above.set_ylabel("ms per step")
        below.set_ylabel("peak MB")
        below.set_xlabel(axis.removesuffix("_fixed_batch"))
        above.legend(loc="upper left", fontsize=8.5, frameon=False)
    first = rows[0]
    figure.suptitle(
        f"One training step: {first['device']}, {first['precision']}, {first['rounds']} rounds; median, "
        "quartiles; dashed: growth of the model FLOPs from the middle point",
        size=11,
    )
    return figure


def _growth(above: Any, below: Any, rows: Sequence[Row], style: dict[str, str], label: str) -> None:
    x, flops = ([row[name] for row in rows] for name in ("x", "flops"))
    ms, middle = [row["ms"]["median"] for row in rows], len(rows) // 2
    above.errorbar(x, ms, _reach([row["ms"] for row in rows]), capsize=3, linewidth=1.2, label=label, **style)
    above.plot(x, [ms[middle] * f / flops[middle] for f in flops], "--", linewidth=1.2, color=style["color"])
    below.plot(x, [row["peak_memory_mb"] for row in rows], linewidth=1.2, markersize=4.5, **style)
    for panel in (above, below):
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(x, [str(value) for value in x])
        panel.grid(True, color="#dddddd", linewidth=0.7)


def speedrun(rows: Sequence[Row]) -> Any:
    """Validation loss over CPU seconds: each seed a thin line, each entry's median over seeds a thick one."""
    groups = [summaries(group) for group in FORMATS["speedrun"].tables(rows)]
    figure = figure_of(8.5, 5.2 * len(groups))
    for axis, group in zip(figure.subplots(len(groups), 1, squeeze=False)[:, 0], groups, strict=True):
        first = group[0].rows[0]
        for i, entry in enumerate(group):
            color = look(i)["color"]
            curves = [row["curve"] for row in entry.rows]
            for curve in curves:
                axis.plot(*zip(*((s, loss) for _, s, loss in curve), strict=True), color=color, lw=0.6, alpha=0.4)
            points = list(zip(*curves, strict=True))
            xs = [statistics.median(s for _, s, _ in point) for point in points]
            ys = [statistics.median(loss for _, _, loss in point) for point in points]
            label = f"{entry.name}: {entry.rows[0]['recipe']}"
            axis.plot(xs, ys, lw=2, label=label, markevery=max(len(xs) // 8, 1), markersize=5, **look(i))
        axis.axhline(first["target"], color="#555555", lw=1, ls="--")
        axis.text(axis.get_xlim()[1], first["target"], f"{first['target']:.2f} ", ha="right", va="bottom", fontsize=9)
        axis.set_xlabel("CPU seconds of training, one core")
        axis.set_ylabel("validation loss at 15% masked, nats")
        axis.set_title(f"{first['track']}: {TRACKS[first['track']].about}", fontsize=10, loc="left")
        axis.legend(frameon=False, fontsize=9)
        grid(axis)
    return figure


PLOTS: dict[str, Callable[[Any], Any]] = {"scaling": scaling, "speedrun": speedrun}
