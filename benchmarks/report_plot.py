"""The benchmarks' pictures, drawn from rows. matplotlib is optional and loaded on use."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report_ops import summaries
from benchmarks.rows import FORMATS, Results, Row
from benchmarks.tracks import TRACKS
from maelm_fast.config import require
from maelm_fast.reporting import figure_of, grid, look, require_matplotlib, save


def plot(results: Results, name: str, out: Path) -> None:
    """In the format of its ending. UserError if there are no rows, or no matplotlib."""
    rows = results.rows.get(name, [])
    require(bool(rows), f"there is no row of {name} to draw")
    require_matplotlib()
    save(PLOTS[name](rows), out)


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


PLOTS: dict[str, Callable[[Any], Any]] = {"speedrun": speedrun}
