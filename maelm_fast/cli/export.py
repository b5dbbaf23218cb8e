"""maelm-fast export: a run's model for Hugging Face Transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from maelm_fast.cli.common import option, parse

EXAMPLES = """
    maelm-fast export runs/base
    maelm-fast export runs/base --step 100000 --out exported
    maelm-fast export runs/base --format own
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write a run's encoder for Hugging Face Transformers, read it back and compare."""

    run: Path = option(positional=True)
    """Run directory."""
    format: Literal["auto", "mpnet", "roberta", "layoutlmv3", "own"] = "auto"
    """Class to write. auto: mpnet or roberta where one of them is exact, else own: our own class, whose code is written
    beside the weights."""
    step: int | None = None
    """Checkpoint to export (default: the newest)."""
    out: Path | None = None
    """New directory (default: RUN/export/FORMAT-step_N)."""


def main(argv: list[str]) -> int:
    options: Options = parse("export", argv, Options, examples=EXAMPLES)
    from maelm_fast.export.huggingface import choose_format, export
    from maelm_fast.training.rundir import load_run

    run = load_run(options.run, options.step)
    format = choose_format(run.config.model, options.format)
    out = options.out or options.run / "export" / f"{format}-step_{run.step}"
    print(f"exporting {options.run} at step {run.step} as {format}; the comparison takes a while for large models")
    report = export(run, out, format)
    found = report.differences
    scores = "" if found.logits is None else f", scores of masked tokens by {found.logits:.1e}"
    print(f"written: {report.out} (format {report.format}, {report.architecture}, step {report.step})")
    print(f"read back and compared: {found.layers} layers' hidden states differ by {found.hidden:.1e}{scores}")
    return 0
