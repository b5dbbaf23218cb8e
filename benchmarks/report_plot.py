"""The benchmarks' pictures, drawn from rows. matplotlib is optional and loaded on use."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report_ops import summaries
from benchmarks.rows import FORMATS, Case, Results, Row
from benchmarks.scaling import AXES, MODELS
from benchmarks.shares import CLASSES
from benchmarks.tracks import TRACKS
from maelm_fast.config import require
from maelm_fast.reporting import COLOURS, GREY, figure_of, grid, look, require_matplotlib, save

DARK = ("#0072B2", "#D55E00", "#009E73", "#000000", GREY)  # of the colours, those that take white letters
HATCHES = ("", "///", "...", "xxx")
WRITTEN_SHARE = 0.06  # a narrower part of a bar has no room for its number


def plot(results: Results, name: str, out: Path) -> None:
    """In the format of its ending. UserError if there are no rows, or no matplotlib."""
    rows = results.cases if name == "train_step" else results.rows.get(name)
    require(bool(rows), f"there is no row of {name} to draw")
    require_matplotlib()
    save(PLOTS[name](rows), out)


def steps(cases: Sequence[Case]) -> Any:
    """For each device a row of two panels: tokens/s of every case, and what a step's time is spent on. Cases of one
    device share a scale, devices do not."""
    devices = list(dict.fromkeys(case.shared["device"] for case in cases))
    on = [[case for case in cases if case.shared["device"] == device] for device in devices]
    heights = [max(4.5, 1.4 + 0.26 * sum(len(case.timed) + 1 for case in group)) for group in on]
    figure = figure_of(15, sum(heights))
    for part, group in zip(figure.subfigures(len(on), 1, height_ratios=heights, squeeze=False)[:, 0], on, strict=True):
        left, right = part.subfigures(1, 2, width_ratios=(1.0, 1.1))
        _speeds(left.subplots(), group)
        _shares(right.subplots(), group)
        for panel, columns in ((left, 1), (right, 4)):
            handles, labels = panel.axes[0].get_legend_handles_labels()
            panel.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return figure


def _short(case: Case) -> str:
    row = case.shared
    documents = " documents" if row["lengths"] != "full" else ""
    shape = f"{row['batch']} x {row['seq']}{documents}"
    return f"{row['precision']}, {shape}, {row['rate']:.0%} masked, {case.regularisation}"


def _speeds(axis: Any, cases: Sequence[Case]) -> None:
    """Groups of bars by contestant, a bar for each case."""
    names = list(dict.fromkeys(name for case in cases for name in case.timed))
    width = 0.8 / len(cases)
    for i, case in enumerate(cases):
        speeds = [row["tokens_per_s"] for row in case.timed.values()]
        axis.bar(
            [names.index(name) + (i - (len(cases) - 1) / 2) * width for name in case.timed],
            [speed["median"] for speed in speeds],
            0.92 * width,
            yerr=_reach(speeds),
            label=_short(case),
            color=COLOURS[i % len(COLOURS)],
            hatch=HATCHES[i % len(HATCHES)],
            edgecolor="white",
            capsize=2.5,
        )
    axis.set_xticks(range(len(names)), names, rotation=25, ha="right")
    axis.set_title(f"{cases[0].shared['device']}: tokens per second, median and quartiles", size=11)
    axis.set_ylabel("original tokens / s")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    grid(axis)


def _reach(quartiles: Sequence[dict[str, float]]) -> list[list[float]]:
    """Error bars."""
    return [[v["median"] - v["q1"] for v in quartiles], [v["q3"] - v["median"] for v in quartiles]]


def _shares(axis: Any, cases: Sequence[Case]) -> None:
    """A stacked bar for each case and contestant that has a profile."""
    bars: list[tuple[float, str, dict[str, float]]] = []
    place = 0.0
    for case in cases:
        profiled = {name: row["kernels"] for name, row in case.timed.items() if row["kernels"]}
        if profiled:
            axis.text(0.0, place, _short(case), size=8.5, va="center", weight="bold")
            bars += [(place + 1 + i, name, kernels) for i, (name, kernels) in enumerate(profiled.items())]
            place += 1 + len(profiled)
    axis.set_title("share of a step's time by class of kernels", size=11)
    left = [0.0] * len(bars)
    for colour, kind in zip((*COLOURS, GREY), CLASSES, strict=True):
        width = [kernels.get(kind, 0.0) for _, _, kernels in bars]
        axis.barh([at for at, _, _ in bars], width, 0.8, left=left, color=colour, edgecolor="white", label=kind)
        for (at, _, _), start, share in zip(bars, left, width, strict=True):
            if share >= WRITTEN_SHARE:
                ink = "white" if colour in DARK else "black"
                axis.text(start + share / 2, at, f"{share:.0%}", ha="center", va="center", size=8, color=ink)
        left = [start + share for start, share in zip(left, width, strict=True)]
    axis.set_yticks([at for at, _, _ in bars], [name for _, name, _ in bars])
    axis.set_ylim(place - 0.4, -0.6)
    axis.set_xlim(0, 1)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    grid(axis)


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


PLOTS: dict[str, Callable[[Any], Any]] = {"train_step": steps, "scaling": scaling, "speedrun": speedrun}
