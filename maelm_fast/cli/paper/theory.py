"""maelm-fast paper theory: a run against the paper's theorem: residuals, bounds, ranks, [MASK]'s own subspace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from maelm_fast.analysis.effective_rank import TAU, check_taus
from maelm_fast.cli.common import option, parse
from maelm_fast.config import require
from maelm_fast.data.token_store import TokenStore
from maelm_fast.paper.theory import REPORT_FILE, TheoryReport, plot_theory, theory_report
from maelm_fast.reporting import aligned, require_matplotlib
from maelm_fast.training.hardware import choose_device
from maelm_fast.training.rundir import RunDir, load_run

EXAMPLES = """
    maelm-fast paper theory runs/roberta_base
    maelm-fast paper theory runs/base --step 100000 --samples 512
    maelm-fast paper theory runs/base --tau 0.8 --head 3 --out theory/
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """A run against the paper's theorem: residuals and their bounds, ranks, [MASK]'s own subspace."""

    run: str = option(positional=True)
    """Run directory."""
    step: int | None = None
    """Checkpoint to read (default: the newest)."""
    tau: float = TAU
    """Share of energy of a subspace."""
    head: int = 0
    """Whose weights the attention-only stack has."""
    samples: int | None = None
    """Validation samples (default: the run's runtime.eval_samples)."""
    data: Path | None = option(None, metavar="STORE")
    """Token store (default: the run's)."""
    out: Path | None = None
    """Directory of the report (default: RUN/report)."""


def main(argv: list[str]) -> int:
    options: Options = parse("paper theory", argv, Options, examples=EXAMPLES)
    check_taus([options.tau])
    require_matplotlib()
    run = load_run(options.run, options.step)
    data = options.data or Path(run.record.data)
    require(data.is_dir(), f"the token store {data} does not exist: name one with --data STORE")
    run.model.to(choose_device(run.config.runtime))
    report = theory_report(run, TokenStore(data, "validation"), options.tau, options.samples, options.head)

    out = options.out or RunDir(options.run).report
    report.write(out / REPORT_FILE)
    plot_theory(report, (out / REPORT_FILE).with_suffix(".png"))
    print(_text(report))
    print(f"written: {out / REPORT_FILE} and .png")
    return 0


def _text(report: TheoryReport) -> str:
    seen = "" if report.encoder_sees_mask else " ([MASK] never seen in pretraining)"
    header = "layer|residual/H, real|[MASK]|rank, real|[MASK]|full rank, [MASK]|energy outside real span, real|[MASK]"
    network = [[*header.split("|"), "largest angle"]]
    for i, layer in enumerate(report.layers):
        line = [str(i or "embed"), f"{layer.residual_real:.3f}", f"{layer.residual_mask:.3f}"]
        line += [str(layer.rank_real), str(layer.rank_mask), str(layer.numerical_rank_mask)]
        network.append([*line, f"{layer.outside_real:.1%}", f"{layer.outside_mask:.1%}", f"{layer.angles[-1]:.0f}"])
    stack = [["layer", "residual", "bound printed", "bound that holds", "||U||", "score range"]]
    stack.append(["input", f"{report.input_residual:.3g}", "", "", "", ""])
    for i, step in enumerate(report.attention, 1):
        values = (step.residual, step.printed, step.corrected, step.u, step.spread)
        stack.append([str(i), *(f"{value:.3g}" for value in values)])
    lines = [
        f"{report.name}, step {report.step:,}: {report.real_tokens:,} real and {report.mask_tokens:,} [MASK] positions"
        f"{seen}, {report.tau:g}-effective ranks of {report.hidden_size} dimensions",
        *("", "the trained network (angles: principal ones, in degrees)", *aligned(network), ""),
        *(f"attention alone, head {report.head}: no MLP, no skip connection, no bias", *aligned(stack)),
    ]
    if len(report.attention) < len(report.layers) - 1:
        lines.append("what lies behind is rank one up to rounding")
    if report.assumption_misfit is not None:
        lines.append(
            f"the theorem's assumption, [MASK] rows in the real rows' affine hull, misses by "
            f"{report.assumption_misfit:.0%} of their distance from its centre at the input; they were moved there"
        )
    return "\n".join(lines)
