"""Pictures of runs: loss curves, and effective rank over the layers."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any, Literal

from maelm_fast.analysis.effective_rank import RankReport
from maelm_fast.analysis.inputs import INPUTS
from maelm_fast.config import MaskingConfig, require
from maelm_fast.errors import UserError
from maelm_fast.reporting import (
    COLOURS,
    GREY,
    STYLES,
    figure_of,
    grid,
    layer_axis,
    legend_below,
    look,
    require_matplotlib,
    save,
    thousands,
)
from maelm_fast.training.rundir import RunDir

Over = Literal["tokens", "steps"]
_RANK_LINE: dict[str, Any] = {"markersize": 5.5, "linewidth": 1.8, "clip_on": False}
_SMOOTHING = 40  # the smoothed curve averages over a fortieth of the logged updates to either side
_CURVES = {
    "train": ("loss",),
    "validation": ("val_loss", "val_accuracy", "unigram_nats"),
    "rank": ("rank_last", "rank_last_mask"),
}
"""What is plotted of the rows of a run's metrics, by their kind."""
_OPTIONAL = ("unigram_nats", "rank_last_mask")

Curve = tuple[list[int], list[float]]
"""Original tokens, or updates, and a quantity; accuracies are shares of 1."""


def read_curves(run: RunDir, over: Over = "tokens") -> dict[str, Curve]:
    """The curves in a run's metrics, without values that are missing or not finite (a skipped update).

    Raises UserError if it has logged nothing yet, or if a row cannot be read."""
    curves: dict[str, Curve] = {name: ([], []) for names in _CURVES.values() for name in names}
    try:
        for row in run.metrics():
            for name in _CURVES.get(row["kind"], ()):
                value = row.get(name) if name in _OPTIONAL else row[name]
                if value is not None and math.isfinite(value):
                    curves[name][0].append(row["tokens" if over == "tokens" else "step"])
                    curves[name][1].append(value)
    except (OSError, ValueError, LookupError, TypeError):
        raise UserError(f"{run.metrics_file} is damaged: it is not a run's metrics") from None
    require(bool(curves["loss"][0] or curves["val_loss"][0]), f"{run.path}: no metrics yet, nothing to plot")
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


def plot_runs(runs: list[RunDir], out: Path, over: Over = "tokens") -> None:
    """Training and validation loss of one or more runs, validation accuracy and the last layer's effective rank where
    they were measured.

    Writes `out` in the format of its ending. Raises UserError if a directory is no run or has no metrics."""
    require(bool(runs), "no run to plot")
    require_matplotlib()
    from matplotlib.ticker import PercentFormatter

    labels, curves = _run_labels(runs), [read_curves(run, over) for run in runs]
    evaluated = any(run["val_accuracy"][0] for run in curves)
    ranked, masked = (any(run[name][0] for run in curves) for name in ("rank_last", "rank_last_mask"))
    panels = 1 + evaluated + ranked
    figure = figure_of((7.0, 11.0, 16.0)[panels - 1], 4.6)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for i, (run, label) in enumerate(zip(curves, labels, strict=True)):
        _draw_run(axes, run, label, i, evaluated, ranked)
    for nats in sorted({round(run["unigram_nats"][1][-1], 2) for run in curves if run["unigram_nats"][1]}):
        label = f"unigram entropy, {nats:.2f} nats"
        axes[0].axhline(nats, color=GREY, linestyle=(0, (6, 3)), linewidth=1.2, label=label)
    title = "Masked-token loss: training (line, smoothed)" + (", validation (marks)" if evaluated else "")
    axes[0].set_title(title, size=11)
    axes[0].set_ylabel("loss (nats per masked token)")
    if evaluated:
        axes[1].set_title("Validation accuracy on masked tokens", size=11)
        axes[1].set_ylabel("accuracy")
        axes[1].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    if ranked:
        axes[-1].set_title("0.9-effective rank of the last layer", size=11)
        axes[-1].set_ylabel("real tokens (solid), [MASK] (dotted)" if masked else "real tokens")
    for axis in axes:
        axis.set_xlabel("original tokens seen" if over == "tokens" else "updates")
        thousands(axis)
        axis.set_xlim(left=0)
        grid(axis)
    for axis in axes[1:]:
        axis.set_ylim(bottom=0)
    handles, labels = axes[0].get_legend_handles_labels()
    columns = min(len(labels), 3 if panels > 1 else 2)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    save(figure, out)


def _draw_run(axes: Any, run: dict[str, Curve], label: str, i: int, evaluated: bool, ranked: bool) -> None:
    colour, marker = look(i)["color"], look(i)["marker"]
    line = {"color": colour, "linestyle": STYLES[i // len(COLOURS) % len(STYLES)], "linewidth": 1.8}

    def marks(curve: Curve) -> dict[str, Any]:
        every = max(1, len(curve[0]) // 20)  # marks that touch hide the curve
        return {"marker": marker, "markersize": 5.5, "markeredgecolor": "white", "markevery": every}

    train, validation = run["loss"], run["val_loss"]
    axes[0].plot(*train, color=colour, linewidth=0.7, alpha=0.35)
    axes[0].plot(train[0], smoothed(train[1], len(train[1]) // _SMOOTHING), **line)
    dots = marks(validation)
    axes[0].plot(*validation, color=colour, linestyle="none", zorder=3, **dots)
    axes[0].plot([], [], **line, **(dots if validation[0] else {}), label=label)  # for the legend
    if evaluated:
        axes[1].plot(*run["val_accuracy"], **line, **dots)
    for name, style in (("rank_last", "-"), ("rank_last_mask", ":")) if ranked else ():
        axes[-1].plot(*run[name], **{**line, "linestyle": style}, **marks(run[name]))


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
            for entry, above in zip(reports[0].inputs, reversed(range(len(reports[0].inputs))), strict=True):
                ranks, style = entry.ranks[t], look(INPUTS.index(entry.name))
                wider = {"linewidth": 1.2 + 0.5 * above, "markersize": 4.5 + 1.3 * above}  # seen where lines coincide
                axes[t][0].plot(range(len(ranks)), ranks, **{**style, **_RANK_LINE, **wider}, label=entry.label)
            axes[t][0].set_title(f"{reports[0].title}, d = {reports[0].hidden_size}", size=11)
        else:
            _draw_comparison(axes[t][0], axes[t][1], reports, t)
        for axis in axes[t]:
            layer_axis(axis, f"{tau:g}-effective rank (dimensions)")
            if t == len(taus) - 1:
                legend_below(axis)
            else:
                axis.set_xlabel("")
            axis.margins(x=0.03)
            axis.set_ylim(bottom=0)
    save(figure, out)


def _draw_comparison(whole: Any, mask: Any, reports: list[RankReport], t: int) -> None:
    whole.set_title("Real text, and text with [MASK]", size=11)
    mask.set_title("Within text with [MASK]", size=11)
    for i, report in enumerate(reports):
        ranks = {entry.name: entry.ranks[t] for entry in report.inputs}
        lines = [(whole, "without_mask", "-", "all tokens real")]
        if report.encoder_sees_mask:
            lines = [(whole, "with_mask", "-", "with [MASK]"), (whole, "without_mask", "--", "without [MASK]")]
            lines += [(mask, f"{where}_positions", dash, text) for where, dash, text in _POSITIONS]
        for axis, name, dash, label in lines:
            style = {"linestyle": dash, **look(i), **_RANK_LINE}
            axis.plot(range(len(ranks[name])), ranks[name], **style, label=f"{report.title}: {label}")
    if not any(report.encoder_sees_mask for report in reports):
        mask.text(0.5, 0.5, "no model here was pretrained with [MASK]", ha="center", transform=mask.transAxes)


_POSITIONS = (("real", "-", "real positions"), ("mask", ":", "[MASK] positions"))


def _run_labels(runs: list[RunDir]) -> list[str]:
    """The preset; with the directory's name where a preset occurs twice; with the path where that does too. And the
    masks, where those of training are not those of validation, so that its losses lie apart."""
    records = [run.read_config() for run in runs]
    presets = [record.preset for record, _ in records]
    labels = [f"{preset} ({run.path.resolve().name})" for preset, run in zip(presets, runs, strict=True)]
    paths = [f"{preset} ({run.path})" for preset, run in zip(presets, runs, strict=True)]
    return [
        (preset if presets.count(preset) == 1 else label if labels.count(label) == 1 else path) + _masks(config.masking)
        for (_, config), preset, label, path in zip(records, presets, labels, paths, strict=True)
    ]


def _masks(masking: MaskingConfig) -> str:
    if masking.rate_end is None:
        return ""
    return f"; masked {masking.rate:.0%} to {masking.rate_end:.0%}, in validation {masking.rate_end:.0%}"
