"""maelm-fast export: a run's model for Hugging Face Transformers."""

from __future__ import annotations

from pathlib import Path

from maelm_fast.cli.common import OneLineParser
from maelm_fast.export.huggingface import FORMATS, choose_format, export
from maelm_fast.training.rundir import load_run


def main(argv: list[str]) -> int:
    parser = OneLineParser(
        prog="maelm-fast export", description="Write a run's encoder for Hugging Face Transformers, and check it."
    )
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument("--to", choices=["hf"], required=True, help="hf: Hugging Face Transformers")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="auto",
        help="class to write (default: auto, which is mpnet or roberta where one of them is exact, else own: our own "
        "class, whose code is written beside the weights)",
    )
    parser.add_argument("--step", type=int, help="checkpoint to export (default: the newest)")
    parser.add_argument("--out", metavar="DIR", help="new directory (default: RUN/export/FORMAT-step_N)")
    options = parser.parse_args(argv)

    run = load_run(options.run, options.step)
    format = choose_format(run.config.model, options.format)
    out = Path(options.out) if options.out else Path(options.run) / "export" / f"{format}-step_{run.step}"
    print(f"exporting {options.run} at step {run.step} as {format}; the comparison takes a while for large models")
    report = export(run, out, format)
    found = report.differences
    scores = "" if found.logits is None else f", scores of masked tokens by {found.logits:.1e}"
    print(f"written: {report.out} (format {report.format}, {report.architecture}, step {report.step})")
    print(f"read back and compared: {found.layers} layers' hidden states differ by {found.hidden:.1e}{scores}")
    return 0
