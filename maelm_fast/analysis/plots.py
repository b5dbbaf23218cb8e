"""Pictures of runs: loss curves, and effective rank over the layers.

matplotlib is optional and loaded on use. Figures are made without pyplot, hence without a display or global state.
Colours are Okabe and Ito's, which colour-blind readers can tell apart; markers or line styles differ as well.
"""

from __future__ import annotations

import io
import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from maelm_fast.analysis.effective_rank import RankReport
from maelm_fast.analysis.inputs import INPUTS
from maelm_fast.config import require
from maelm_fast.data.files import written_aside
from maelm_fast.errors import UserError
from maelm_fast.training.rundir import RunDir

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLES = ("-", "--", ":", "-.")
GREY = "#555555"
_RANK_LINE: dict[str, Any] = {"markersize": 5.5, "linewidth": 1.8, "clip_on": False}
_SMOOTHING = 40  # the smoothed curve averages over a fortieth of the logged updates to either side


def require_matplotlib() -> None:
    """Raises UserError with the remedy if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("plots need matplotlib: pip install matplotlib") from None


@dataclass
class Curve:
    """Points of one quantity over training."""

    x: list[int] = field(default_factory=list)
    y: list[float] = field(default_factory=list)

    def add(self, x: int, y: float | None) -> None:
        """Values that are missing or not finite (a skipped update) are left out."""
        if y is not None and math.isfinite(y):
            self.x.append(x)
            self.y.append(y)


@dataclass
class RunCurves:
    """What is plotted of one run. x counts original tokens, or updates; accuracies are shares of 1."""

    label: str
    train_loss: Curve = field(default_factory=Curve)
    val_loss: Curve = field(default_factory=Curve)
    val_accuracy: Curve = field(default_factory=Curve)
    rank_last: Curve = field(default_factory=Curve)
    """Effective rank of the real tokens in the last layer, where it was measured in training."""
    rank_last_mask: Curve = field(default_factory=Curve)
    unigram_nats: float | None = None


def read_curves(run: RunDir, label: str, over: Literal["tokens", "steps"] = "tokens") -> RunCurves:
    """The curves in a run's metrics. Raises UserError if it has logged nothing yet, or if a row cannot be read."""
    curves = RunCurves(label)
    key = "tokens" if over == "tokens" else "step"
    try:
        for row in run.metrics():
            if row["kind"] == "train":
                curves.train_loss.add(row[key], row["loss"])
            elif row["kind"] == "validation":
                curves.val_loss.add(row[key], row["val_loss"])
                curves.val_accuracy.add(row[key], row["val_accuracy"])
                curves.unigram_nats = row.get("unigram_nats", curves.unigram_nats)
            elif row["kind"] == "rank":
                curves.rank_last.add(row[key], row["rank_last"])
                curves.rank_last_mask.add(row[key], row.get("rank_last_mask"))
    except (OSError, ValueError, LookupError, TypeError):
        raise UserError(f"{run.metrics_file} is damaged: it is not a run's metrics") from None
    require(bool(curves.train_loss.x or curves.val_loss.x), f"{run.path}: no metrics yet, nothing to plot")
    return curves


def smoothed(values: list[float], reach: int) -> list[float]:
    """The mean over up to `reach` values to either side, equally many: unlike a trailing mean it does not lag, which
    would put a falling training loss above a validation loss that equals it."""
    sums = [0.0, *itertools.accumulate(values)]
    result = []
    for i in range(len(values)):
        side = min(reach, i, len(values) - 1 - i)
        result.append((sums[i + side + 1] - sums[i - side]) / (2 * side + 1))
    return result


def plot_runs(runs: list[RunDir], out: Path, over: Literal["tokens", "steps"] = "tokens") -> None:
    """Training and validation loss of one or more runs, validation accuracy and the last layer's effective rank where
    they were measured.

    Writes `out` in the format of its ending. Raises UserError if a directory is no run or has no metrics."""
    require(bool(runs), "no run to plot")
    require_matplotlib()
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    curves = [read_curves(run, label, over) for run, label in zip(runs, _run_labels(runs), strict=True)]
    evaluated = any(run.val_accuracy.x for run in curves)
    ranked = any(run.rank_last.x for run in curves)
    panels = 1 + evaluated + ranked
    figure = figure_of((7.0, 11.0, 16.0)[panels - 1], 4.6)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for i, run in enumerate(curves):
        style = STYLES[i // len(COLOURS) % len(STYLES)]
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        _draw_run(axes[0], axes[1] if evaluated else None, run, colour, marker, style)
        if ranked:
            _draw_ranks(axes[-1], run, colour, marker)
    for nats in sorted({round(run.unigram_nats, 2) for run in curves if run.unigram_nats is not None}):
        label = f"unigram entropy, {nats:.2f} nats"
        axes[0].axhline(nats, color=GREY, linestyle=(0, (6, 3)), linewidth=1.2, label=label)
    title = "Masked-token loss: training (line, smoothed)" + (", validation (marks)" if evaluated else "")
    axes[0].set_title(title, size=11)
    axes[0].set_ylabel("loss (nats per masked token)")
    for axis in axes:
        axis.set_xlabel("original tokens seen" if over == "tokens" else "updates")
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
        axis.set_xlim(left=0)
        grid(axis)
    if evaluated:
        axes[1].set_title("Validation accuracy on masked tokens", size=11)
        axes[1].set_ylabel("accuracy")
        axes[1].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        axes[1].set_ylim(bottom=0)
    if ranked:
        axes[-1].set_title("0.9-effective rank of the last layer", size=11)
        axes[-1].set_ylabel("real tokens (solid), [MASK] (dotted)")
        axes[-1].set_ylim(bottom=0)
    handles, labels = axes[0].get_legend_handles_labels()
    columns = min(len(labels), 3 if panels > 1 else 2)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    save(figure, out)


def _draw_run(loss: Any, accuracy: Any, run: RunCurves, colour: str, marker: str, style: str) -> None:
    train, validation = run.train_loss, run.val_loss
    every = max(1, len(validation.x) // 20)  # marks that touch hide the curve
    line = {"color": colour, "linestyle": style, "linewidth": 1.8}
    marks = {"marker": marker, "markersize": 5.5, "markeredgecolor": "white", "markevery": every}
    loss.plot(train.x, train.y, color=colour, linewidth=0.7, alpha=0.35)
    loss.plot(train.x, smoothed(train.y, len(train.y) // _SMOOTHING), **line)
    loss.plot(validation.x, validation.y, color=colour, linestyle="none", zorder=3, **marks)
    loss.plot([], [], **line, **(marks if validation.x else {}), label=run.label)  # for the legend
    if accuracy is not None:
        accuracy.plot(run.val_accuracy.x, run.val_accuracy.y, **line, **marks)


def _draw_ranks(axis: Any, run: RunCurves, colour: str, marker: str) -> None:
    for curve, style in ((run.rank_last, "-"), (run.rank_last_mask, ":")):
        every = max(1, len(curve.x) // 20)
        axis.plot(
            curve.x,
            curve.y,
            color=colour,
            linestyle=style,
            linewidth=1.8,
            marker=marker,
            markersize=5.5,
            markeredgecolor="white",
            markevery=every,
        )


def plot_ranks(reports: list[RankReport], out: Path) -> None:
    """Effective rank over the layers. One report: a line per input, as Figure 1. Several: their comparison on one
    axis, as Figure 5(a): a model that sees [MASK] with and without it, one that does not on real tokens; and their
    [MASK] positions alone, as Figure 1(b). A row of axes per tau."""
    require(bool(reports), "no report to plot")
    taus = reports[0].taus
    require(all(report.taus == taus for report in reports), "the reports are of different taus: measure them together")
    require_matplotlib()
    columns = 1 if len(reports) == 1 else 2
    figure = figure_of(1.5 + 6.0 * columns, (4.4 + 0.25 * len(reports)) * len(taus) + 0.8)
    axes = figure.subplots(len(taus), columns, squeeze=False, sharex=True)
    for t, tau in enumerate(taus):
        if len(reports) == 1:
            _draw_inputs(axes[t][0], reports[0], t)
            axes[t][0].set_title(f"{reports[0].title}, d = {reports[0].hidden_size}", size=11)
        else:
            _draw_comparison(axes[t][0], axes[t][1], reports, t)
        for axis in axes[t]:
            _layer_axis(axis, f"{tau:g}-effective rank (dimensions)", t == len(taus) - 1)
    save(figure, out)


def _draw_inputs(axis: Any, report: RankReport, t: int) -> None:
    for entry in report.inputs:
        i = INPUTS.index(entry.name)
        axis.plot(
            range(len(entry.ranks[t])),
            entry.ranks[t],
            color=COLOURS[i],
            marker=MARKERS[i],
            **_RANK_LINE,
            label=entry.label,
        )


def _draw_comparison(whole: Any, mask: Any, reports: list[RankReport], t: int) -> None:
    whole.set_title("Real text, and text with [MASK]", size=11)
    mask.set_title("Within text with [MASK]", size=11)
    for i, report in enumerate(reports):
        ranks = {entry.name: entry.ranks[t] for entry in report.inputs}
        style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], **_RANK_LINE}
        lines = [(whole, "without_mask", "-", "all tokens real")]
        if report.encoder_sees_mask:
            lines = [(whole, "with_mask", "-", "with [MASK]"), (whole, "without_mask", "--", "without [MASK]")]
            lines += [
                (mask, "real_positions", "-", "real positions"),
                (mask, "mask_positions", ":", "[MASK] positions"),
            ]
        for axis, name, dash, label in lines:
            axis.plot(range(len(ranks[name])), ranks[name], linestyle=dash, **style, label=f"{report.title}: {label}")
    if not any(report.encoder_sees_mask for report in reports):
        mask.text(0.5, 0.5, "no model here was pretrained with [MASK]", ha="center", transform=mask.transAxes)


def _layer_axis(axis: Any, label: str, named: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    if named:
        axis.set_xlabel("layer (0: embedding output)")
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=1, frameon=False)
    axis.set_ylabel(label)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=13, integer=True))
    axis.margins(x=0.03)
    axis.set_ylim(bottom=0)
    grid(axis)


def short_number(value: float) -> str:
    """1500000 -> "1.5M"; billions are "B", as token counts are written."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    return f"{value:.4g}"


def _run_labels(runs: list[RunDir]) -> list[str]:
    """The preset; with the directory's name where a preset occurs twice; with the path where that does too."""
    presets = [run.read_config()[0].preset for run in runs]
    labels = [f"{preset} ({run.path.resolve().name})" for preset, run in zip(presets, runs, strict=True)]
    paths = [f"{preset} ({run.path})" for preset, run in zip(presets, runs, strict=True)]
    return [
        preset if presets.count(preset) == 1 else label if labels.count(label) == 1 else path
        for preset, label, path in zip(presets, labels, paths, strict=True)
    ]


def figure_of(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")


def grid(axis: Any) -> None:
    axis.grid(True, color="#dddddd", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=9.5)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def save(figure: Any, out: Path) -> None:
    """Drawn in memory first, so that a failure leaves no half-written file."""
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
