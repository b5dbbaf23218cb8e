"""maelm-fast export: a run's model for Hugging Face Transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from maelm_fast.cli.common import option, parse
from maelm_fast.config import require

EXAMPLES = """
    maelm-fast export runs/base
    maelm-fast export runs/base --step 100000 --out exported
    maelm-fast export runs/base --format own
    maelm-fast export runs/base --push-to-hub you/my-encoder --license apache-2.0
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write a run's encoder for Hugging Face Transformers, read it back and compare."""

    run: Path = option(positional=True, metavar="RUN")
    """Run directory."""
    format: Literal["auto", "mpnet", "roberta", "layoutlmv3", "own"] = "auto"
    """Class to write. auto: mpnet or roberta where one of them is exact, else own: our own class, whose code is written
    beside the weights."""
    step: int | None = None
    """Checkpoint to export (default: the newest)."""
    out: Path | None = None
    """New directory (default: RUN/export/FORMAT-step_N)."""
    license: str | None = None
    """Of the weights, for the model card, as the hub spells it: apache-2.0, cc-by-sa-4.0 ..."""
    push_to_hub: str | None = None
    """Upload it, once it is written and compared, to this repository, OWNER/NAME. A new one is private."""
    public: bool = False
    """With --push-to-hub: make a new repository public."""


def main(argv: list[str]) -> int:
    options: Options = parse("export", argv, Options, examples=EXAMPLES)
    from maelm_fast.export import hub
    from maelm_fast.export.card import About
    from maelm_fast.export.huggingface import choose_format, export
    from maelm_fast.export.mapping import own_holds_all
    from maelm_fast.training.rundir import RunDir, load_run

    require(options.push_to_hub is not None or not options.public, "--public needs --push-to-hub OWNER/NAME")
    if options.push_to_hub is not None:
        hub.check_upload(options.push_to_hub)
    run = load_run(options.run, options.step)
    format = choose_format(run.config.model, options.format)
    out = options.out or options.run / "export" / f"{format}-step_{run.step}"
    print(f"exporting {options.run} at step {run.step} as {format}; the comparison takes a while for large models")
    about = About(tuple(RunDir(options.run).metrics()), options.license, options.push_to_hub)
    report = export(run, out, format, about)
    found = report.differences
    scores = "" if found.logits is None else f", scores of masked tokens by {found.logits:.1e}"
    print(f"written: {report.out} (format {report.format}, {report.architecture}, step {report.step})")
    print(f"read back and compared: {found.layers} layers' hidden states differ by {found.hidden:.1e}{scores}")
    if found.logits is None and own_holds_all(run.config):
        print("for fine-tuning; it cannot fill in <mask>, which takes decoder and head: --format own")
    if options.push_to_hub is not None:
        print(f"uploaded: {hub.upload(report.out, options.push_to_hub, public=options.public)}")
    return 0
