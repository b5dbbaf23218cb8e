"""What every report is made of: Markdown tables, numbers over seeds, figures, and rows of results.

Results are rows: one per measured number, in a pandas frame that is written as results.csv beside the report, which is
queries on it. pandas and matplotlib are loaded on use. Figures are made without pyplot, hence without a display or
global state. Colours are Okabe and Ito's, which colour-blind readers can tell apart; markers or line styles differ too.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from maelm_fast.config import require
from maelm_fast.data.files import written_aside
from maelm_fast.errors import UserError

NONE = "-"
RESULTS = "results.csv"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLES = ("-", "--", ":", "-.")
GREY = "#555555"

# Text


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table and an empty line."""
    body = [list(header), ["---"] * len(header), *map(list, rows)]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in body] + [""]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """For the terminal: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)
    return [line.rstrip() for line in lines]


def number(value: float | None, digits: int = 1) -> str:
    return NONE if value is None else f"{value:,.{digits}f}"


def over_seeds(values: Sequence[float], digits: int = 1) -> str:
    """Median: "2.50" of one value, "2.50 [2.40, 2.70]" of several, a dash of none."""
    if not values:
        return NONE
    middle = number(statistics.median(values), digits)
    return middle if len(values) == 1 else f"{middle} [{number(min(values), digits)}, {number(max(values), digits)}]"


def over_draws(values: Sequence[float], digits: int = 1) -> str:
    """ "2.5" of one value, "2.5 (0.7)" of several, mean and standard deviation, a dash of none."""
    if not values:
        return NONE
    mean = number(statistics.mean(values), digits)
    return mean if len(values) == 1 else f"{mean} ({number(statistics.pstdev(values), digits)})"


def low_to_high(values: Sequence[float], digits: int = 1) -> str:
    return f"{min(values):.{digits}f}..{max(values):.{digits}f}" if values else NONE


def short_number(value: float) -> str:
    """1500000 -> "1.5M"; billions are "B", as token counts are written."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    return f"{value:.4g}"


# Rows


def frame(rows: Iterable[dict[str, Any]], columns: Sequence[str]) -> Any:
    """A pandas frame with these columns, "value" among them, and then whatever else the rows have."""
    import pandas

    rows = list(rows)
    names = dict.fromkeys([*columns, *(name for row in rows for name in row)])
    return pandas.DataFrame(rows, columns=list(names)).convert_dtypes().astype({"value": float})


def measured(about: dict[str, Any], found: Mapping[str, Mapping[str, float]]) -> Iterator[dict[str, Any]]:
    """Rows of the metrics of some splits. about: their other columns."""
    for split, metrics in found.items():
        for metric, value in metrics.items():
            yield {**about, "split": split, "metric": metric, "value": value}


def where(rows: Any, **wanted: Any) -> Any:
    """The rows of a frame that have these values."""
    for column, value in wanted.items():
        rows = rows[rows[column] == value]
    return rows


def per_group(rows: Any, *keys: str) -> dict[Any, list[float]]:
    """The values of every combination of the keys, in the order of the rows."""
    grouped = rows.groupby(list(keys) if len(keys) > 1 else keys[0], sort=False)["value"]
    return {key: values.tolist() for key, values in grouped}


def write_results(out: Path, rows: Any) -> None:
    """OUT/results.csv, replaced in one step."""
    with written_aside(out / RESULTS) as file:
        file.write(rows.to_csv(index=False, lineterminator="\n").encode())


# Figures


def require_matplotlib() -> None:
    """Raises UserError with the remedy if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("plots need matplotlib: pip install matplotlib") from None


def figure_of(width: float, height: float) -> Any:
    """Inches. Raises UserError without matplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")


def look(i: int) -> dict[str, Any]:
    """Colour and marker of the i-th model or quantity."""
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}


def grid(axis: Any) -> None:
    axis.grid(True, color="#dddddd", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=9.5)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def layer_axis(axis: Any, label: str) -> None:
    """Horizontal: the layers of an encoder."""
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel("layer (0: embedding output)")
    axis.set_ylabel(label)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=13, integer=True))
    grid(axis)


def legend_below(axis: Any, columns: int = 1, down: float = -0.16) -> None:
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, down), ncols=columns, frameon=False)


def legend_outside(figure: Any, axes: Iterable[Any], columns: int) -> None:
    """One legend below all panels, of what any of them shows."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    wide = min(len(found), columns)
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=wide, frameon=False)


def thousands(axis: Any) -> None:
    """The horizontal axis in short numbers."""
    from matplotlib.ticker import FuncFormatter

    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))


def not_too_narrow(low: float, high: float) -> tuple[float, float]:
    """Limits at least a twentieth of what the axis shows apart: one as narrow as the values makes much of little."""
    more = max(0.05 * high - (high - low), 0.0)
    return low - more / 2, high + more / 2


def whiskers(axis: Any, at: float, middle: float, seeds: Sequence[float], colour: str, across: bool = False) -> None:
    """A dot for every seed, and a bar from the least to the largest with `middle` in between; nothing of one seed.
    across: the values lie along the horizontal axis."""
    if len(seeds) > 1:
        places, reach = [at] * len(seeds), [[max(middle - min(seeds), 0.0)], [max(max(seeds) - middle, 0.0)]]
        x, y, bar = (seeds, places, "xerr") if across else (places, seeds, "yerr")
        axis.plot(x, y, linestyle="none", marker=".", color=colour, alpha=0.6)
        spot = (middle, at) if across else (at, middle)
        axis.errorbar(*spot, **{bar: reach}, fmt="none", ecolor=colour, capsize=3, elinewidth=1.2)


def save(figure: Any, out: Path) -> None:
    """In the format of the ending, drawn in memory first, so that a failure leaves no half-written file.

    Raises UserError for another ending, or if it cannot be written."""
    kind = out.suffix.lstrip(".").lower()
    kinds = figure.canvas.get_supported_filetypes()
    require(kind in kinds, f"{out}: cannot write a picture of kind '{out.suffix}'; use .png, .pdf or .svg")
    picture = io.BytesIO()
    figure.savefig(picture, format=kind)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(out) as file:
            file.write(picture.getvalue())
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from None
