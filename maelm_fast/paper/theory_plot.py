"""One checkpoint against the theorem, as a picture: the residual and its bounds, ranks, and the energy outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from maelm_fast.analysis.plots import COLOURS, MARKERS, figure_of, grid, require_matplotlib, save
from maelm_fast.paper.theory import TheoryReport


def plot_theory(report: TheoryReport, out: Path) -> None:
    """Writes `out` in the format of its ending."""
    require_matplotlib()
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = figure_of(16.0, 5.0)
    bounds, ranks, energy = figure.subplots(1, 3)
    line: dict[str, Any] = {"linewidth": 1.8, "markersize": 5.5}

    residuals = [report.input_residual, *(step.residual for step in report.attention)]
    curves = [
        (0, residuals, "residual of real rows", "-"),
        (1, [step.printed for step in report.attention], "bound as printed, from the layer before", "--"),
        (1, [step.corrected for step in report.attention], "bound that holds, from the layer before", "--"),
    ]
    for i, (first, values, label, dash) in enumerate(curves):
        layers = range(first, first + len(values))
        bounds.plot(layers, values, color=COLOURS[i], marker=MARKERS[i], linestyle=dash, **line, label=label)
    bounds.set_yscale("log")
    bounds.set_title(f"Attention alone, head {report.head} of every layer", size=11)
    bounds.set_ylabel(r"$\|R\|_{1,\infty}$")

    layers = range(len(report.layers))
    for i, (name, label) in enumerate((("rank_real", "real rows"), ("rank_mask", "[MASK] rows"))):
        values = [getattr(layer, name) for layer in report.layers]
        ranks.plot(layers, values, color=COLOURS[i], marker=MARKERS[i], **line, label=label)
    ranks.set_title("The trained network: rank", size=11)
    ranks.set_ylabel(f"{report.tau:g}-effective rank of {report.hidden_size} dimensions")

    for i, (name, label) in enumerate((("outside_real", "real rows"), ("outside_mask", "[MASK] rows"))):
        values = [getattr(layer, name) for layer in report.layers]
        energy.plot(layers, values, color=COLOURS[i], marker=MARKERS[i], **line, label=label)
    energy.yaxis.set_major_formatter(PercentFormatter(1.0))
    energy.set_title("Energy outside the real rows' leading directions", size=11)
    energy.set_ylabel("share of squared norm")
    for axis in (ranks, energy):
        axis.set_ylim(bottom=0)
    for axis in (bounds, ranks, energy):
        axis.set_xlabel("layer (0: embedding output)")
        axis.xaxis.set_major_locator(MaxNLocator(nbins=13, integer=True))
        grid(axis)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=1, frameon=False)
    seen = "" if report.encoder_sees_mask else " ([MASK] never seen in pretraining)"
    figure.suptitle(f"{report.name}, step {report.step:,}{seen}", size=12)
    save(figure, out)
