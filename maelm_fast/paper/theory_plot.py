"""One checkpoint against the theorem, as a picture: the residual and its bounds, ranks, and the energy outside."""

from __future__ import annotations

from pathlib import Path

from maelm_fast.paper.theory import TheoryReport
from maelm_fast.reporting import figure_of, layer_axis, legend_below, look, require_matplotlib, save


def plot_theory(report: TheoryReport, out: Path) -> None:
    """Writes `out` in the format of its ending."""
    require_matplotlib()
    from matplotlib.ticker import PercentFormatter

    figure = figure_of(16.0, 5.0)
    bounds, ranks, energy = figure.subplots(1, 3)
    residuals = [report.input_residual, *(step.residual for step in report.attention)]
    printed, corrected = ([getattr(step, name) for step in report.attention] for name in ("printed", "corrected"))
    layers = {name: [getattr(layer, name) for layer in report.layers] for name in vars(report.layers[0])}
    curves = [
        (bounds, 0, 0, residuals, "residual of real rows", "-"),
        (bounds, 1, 1, printed, "bound as printed, from the layer before", "--"),
        (bounds, 2, 1, corrected, "bound that holds, from the layer before", "--"),
        (ranks, 0, 0, layers["rank_real"], "real rows", "-"),
        (ranks, 1, 0, layers["rank_mask"], "[MASK] rows", "-"),
        (energy, 0, 0, layers["outside_real"], "real rows", "-"),
        (energy, 1, 0, layers["outside_mask"], "[MASK] rows", "-"),
    ]
    for axis, i, first, values, label, dash in curves:
        places = range(first, first + len(values))
        axis.plot(places, values, **look(i), linestyle=dash, linewidth=1.8, markersize=5.5, label=label)
    bounds.set_yscale("log")
    energy.yaxis.set_major_formatter(PercentFormatter(1.0))
    titles = {
        bounds: (f"Attention alone, head {report.head} of every layer", r"$\|R\|_{1,\infty}$"),
        ranks: ("The trained network: rank", f"{report.tau:g}-effective rank of {report.hidden_size} dimensions"),
        energy: ("Energy outside the real rows' leading directions", "share of squared norm"),
    }
    for axis, (title, label) in titles.items():
        axis.set_title(title, size=11)
        if axis is not bounds:
            axis.set_ylim(bottom=0)
        layer_axis(axis, label)
        legend_below(axis)
    seen = "" if report.encoder_sees_mask else " ([MASK] never seen in pretraining)"
    figure.suptitle(f"{report.name}, step {report.step:,}{seen}", size=12)
    save(figure, out)
