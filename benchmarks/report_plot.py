"""The report's picture: for each device a row of two panels, tokens/s of every case and what a step's time is spent on.

matplotlib is optional and loaded on use. Cases of one device share a scale, devices do not. Colours are those of the
package's other pictures; cases differ in hatching too, and large shares carry their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.classes import CLASSES
from benchmarks.rows import Case
from maelm_fast.config import require
from maelm_fast.errors import UserError
from maelm_fast.reporting import COLOURS, require_matplotlib

DARK = ("#0072B2", "#D55E00", "#009E73", "#000000")  # of the colours, those that take white letters
HATCHES = ("", "///", "...", "xxx")
WRITTEN_SHARE = 0.06  # a narrower part of a bar has no room for its number


def plot(cases: Sequence[Case], out: Path) -> None:
    """Writes `out` in the format of its ending. UserError if there is no case, or no matplotlib."""
    require(bool(cases), "there is no row of train_step to draw")
    require_matplotlib()
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    require(out.suffix.lstrip(".") in kinds, f"{out}: cannot draw a picture of kind '{out.suffix}'; use .png or .svg")

    devices = list(dict.fromkeys(case.shared["device"] for case in cases))
    on = [[case for case in cases if case.shared["device"] == device] for device in devices]
    heights = [max(4.5, 1.4 + 0.26 * sum(len(case.timed) + 1 for case in group)) for group in on]
    figure = Figure(figsize=(15, sum(heights)), dpi=130, layout="constrained", facecolor="white")
    for part, group in zip(figure.subfigures(len(on), 1, height_ratios=heights, squeeze=False)[:, 0], on, strict=True):
        left, right = part.subfigures(1, 2, width_ratios=(1.0, 1.1))
        draw_speed(left.subplots(), group)
        draw_split(right.subplots(), group)
        for panel, columns in ((left, 1), (right, 4)):
            handles, labels = panel.axes[0].get_legend_handles_labels()
            panel.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from None


def short(case: Case) -> str:
    row = case.shared
    documents = " documents" if row["lengths"] != "full" else ""
    return (
        f"{row['precision']}, {row['batch']} x {row['seq']}{documents}, {row['rate']:.0%} masked, {case.regularisation}"
    )


def draw_speed(axis: Any, cases: Sequence[Case]) -> None:
    """Groups of bars by contestant, a bar for each case."""
    names = list(dict.fromkeys(name for case in cases for name in case.timed))
    width = 0.8 / len(cases)
    for i, case in enumerate(cases):
        timed = {name: row["tokens_per_s"] for name, row in case.timed.items()}
        x = [names.index(name) + (i - (len(cases) - 1) / 2) * width for name in timed]
        median = [value["median"] for value in timed.values()]
        error = [[v["median"] - v["q1"] for v in timed.values()], [v["q3"] - v["median"] for v in timed.values()]]
        axis.bar(
            x,
            median,
            0.92 * width,
            yerr=error,
            label=short(case),
            color=COLOURS[i % len(COLOURS)],
            hatch=HATCHES[i % len(HATCHES)],
            edgecolor="white",
            error_kw={"elinewidth": 1.1, "capsize": 2.5},
        )
    axis.set_xticks(range(len(names)), names, rotation=25, ha="right")
    axis.set_title(f"{cases[0].shared['device']}: tokens per second, median and quartiles", size=11)
    axis.set_ylabel("original tokens / s")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    tidy(axis, "y")


def draw_split(axis: Any, cases: Sequence[Case]) -> None:
    """A stacked bar for each case and contestant that has a profile."""
    y, labels, place = [], [], 0.0
    shares: list[dict[str, float]] = []
    for case in cases:
        profiled = {name: row["kernels"] for name, row in case.timed.items() if row["kernels"]}
        if profiled:
            axis.text(0.0, place, short(case), size=8.5, va="center", weight="bold")
            place += 1
        for name, kernels in profiled.items():
            y.append(place)
            labels.append(name)
            shares.append(kernels)
            place += 1
    axis.set_title("share of a step's time by class of kernels", size=11)
    if not shares:
        axis.set_axis_off()
        axis.text(0.5, 0.5, "no row has a profile", ha="center", transform=axis.transAxes)
        return
    left = [0.0] * len(y)
    for colour, name in zip(COLOURS, CLASSES, strict=True):
        width = [kernels.get(name, 0.0) for kernels in shares]
        axis.barh(y, width, 0.8, left=left, color=colour, edgecolor="white", label=name)
        for at, start, share in zip(y, left, width, strict=True):
            if share >= WRITTEN_SHARE:
                ink = "white" if colour in DARK else "black"
                axis.text(start + share / 2, at, f"{share:.0%}", ha="center", va="center", size=8, color=ink)
        left = [start + share for start, share in zip(left, width, strict=True)]
    axis.set_yticks(y, labels)
    axis.set_ylim(place - 0.4, -0.6)
    axis.set_xlim(0, 1)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    tidy(axis, "x")


def tidy(axis: Any, along: str) -> None:
    """With lines to read the values off."""
    axis.grid(True, axis=along, color="#dddddd", linewidth=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
