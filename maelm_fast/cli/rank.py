"""maelm-fast rank: how many dimensions encoders use for real tokens, and for [MASK], layer by layer."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from maelm_fast.analysis.effective_rank import REPORT_FILE, TAU, RankReport, check_taus, measure, write_reports
from maelm_fast.analysis.huggingface import LONGEST, load_checkpoint, measure_checkpoint
from maelm_fast.analysis.plots import plot_ranks
from maelm_fast.batch import PackedBatch
from maelm_fast.cli.common import option, parse
from maelm_fast.config import require
from maelm_fast.data.token_store import TokenStore
from maelm_fast.errors import UserError
from maelm_fast.reporting import aligned, require_matplotlib
from maelm_fast.training.hardware import choose_device
from maelm_fast.training.rundir import RunDir, load_run

CHECKPOINT_SAMPLES = 2048  # what runtime.eval_samples is to a run


EXAMPLES = """
    maelm-fast rank runs/base
    maelm-fast rank runs/base runs/roberta_base --tau 0.8,0.9 --out ranks/
    maelm-fast rank --hf roberta-base/ --text heldout.txt
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Effective rank of encoders' token representations, of one or of several in one table and picture."""

    runs: tuple[str, ...] = option((), positional=True, metavar="RUN")
    """Run directory."""
    hf: tuple[str, ...] = option((), metavar="DIR")
    """Directory of a Hugging Face encoder."""
    step: int | None = None
    """Checkpoint of the runs to read (default: the newest)."""
    tau: str = str(TAU)
    """Shares of the squared singular values, as 0.8,0.9."""
    samples: int | None = option(
        None, help=f"Sequences (default: a run's runtime.eval_samples, {CHECKPOINT_SAMPLES:,} for --hf)."
    )
    data: Path | None = option(None, metavar="STORE")
    """Token store (default: the runs' own; for --hf see --text)."""
    text: str | None = None
    """For --hf: a file, 'embedded', or a token store (default: --data)."""
    length: int | None = option(None, help=f"Tokens of a sequence for --hf, at most (default: {LONGEST}).")
    out: Path | None = None
    """Directory of the report (default: RUN/report, of several here)."""


def main(argv: list[str]) -> int:
    options: Options = parse("rank", argv, Options, examples=EXAMPLES)
    taus = _taus(options.tau)
    require(bool(options.runs or options.hf), "name a run, or a Hugging Face encoder with --hf DIR")
    text = options.text or (str(options.data) if options.data else None)
    require(text is not None or not options.hf, "--hf needs text: --text FILE, --text embedded, or --data STORE")
    require(bool(options.hf) or not options.text, "--text is for --hf: a run is measured on a token store (--data)")
    require(bool(options.hf) or options.length is None, "--length is for --hf: a run is measured on whole samples")
    require(bool(options.runs) or options.step is None, "--step names a checkpoint of runs: --hf has one only")
    require_matplotlib()  # now, rather than after the measurement
    reports = [_of_run(path, options, taus) for path in options.runs]
    reports += [_of_checkpoint(path, str(text), options, taus) for path in options.hf]

    alone = len(reports) == 1 and bool(options.runs)
    out = options.out or (RunDir(options.runs[0]).report if alone else Path())
    write_reports(out / REPORT_FILE, reports)
    plot_ranks(reports, (out / REPORT_FILE).with_suffix(".png"))
    for report in reports:
        print(_text(report))
    print(f"written: {out / REPORT_FILE} and .png")
    return 0


def _of_run(path: str, options: Options, taus: list[float]) -> RankReport:
    run = load_run(path, options.step)
    data = options.data or Path(run.record.data)
    require(data.is_dir(), f"the token store {data} does not exist: name one with --data STORE")
    store = TokenStore(data, "validation")
    run.model.to(choose_device(run.config.runtime))
    return measure(run, store, taus, options.samples, watch=_progress)


def _of_checkpoint(path: str, text: str, options: Options, taus: list[float]) -> RankReport:
    encoder = load_checkpoint(path, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    samples = CHECKPOINT_SAMPLES if options.samples is None else options.samples
    length = LONGEST if options.length is None else options.length
    return measure_checkpoint(encoder, text, taus, samples, length, watch=_progress)


def _taus(text: str) -> list[float]:
    try:
        taus = sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise UserError(f"--tau takes numbers with commas between them, not '{text}'") from None
    try:
        check_taus(taus)
    except UserError as error:
        raise UserError(f"--{error}") from None
    return taus


def _progress(batches: Iterable[PackedBatch], total: int) -> Iterable[PackedBatch]:
    if not sys.stdout.isatty():
        return batches
    from rich.progress import track

    return track(batches, "encoding", total=total, transient=True)


def _text(report: RankReport) -> str:
    layers, lines = len(report.inputs[0].ranks[0]), []
    for i, tau in enumerate(report.taus):
        lines.append(
            f"{report.title}: {tau:g}-effective rank of {report.hidden_size} dimensions, {report.samples:,} samples, "
            "not centred"
        )
        header = ["input", "tokens", "embed", *map(str, range(1, layers))]
        lines += aligned([header, *([e.label, f"{e.tokens:,}", *map(str, e.ranks[i])] for e in report.inputs)])
    few = [entry.label for entry in report.inputs if entry.tokens < report.hidden_size]
    if few:
        lines.append(f"fewer tokens than dimensions in: {'; '.join(few)}. Those ranks are too low: raise --samples")
    return "\n".join(lines)
