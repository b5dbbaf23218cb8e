"""`maelm-fast demo`: the whole job, from text to an exported encoder, on text that every machine has.

Each part is the library call behind a command, with that command's defaults; the demo adds only their order.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maelm_fast import presets
from maelm_fast.analysis.effective_rank import REPORT_FILE, measure
from maelm_fast.analysis.fill import fill
from maelm_fast.analysis.plots import plot_ranks, plot_runs
from maelm_fast.cli.common import parse
from maelm_fast.config import require
from maelm_fast.data.prepare import PrepareConfig, prepare
from maelm_fast.data.token_store import TokenStore
from maelm_fast.export.card import About
from maelm_fast.export.huggingface import export
from maelm_fast.reporting import require_matplotlib
from maelm_fast.training.files import write_json
from maelm_fast.training.job import pretrain
from maelm_fast.training.rundir import LoadedRun, RunDir, load_run

PRESET = "tiny_fast"
SEQ_LEN = 64
TEXTS = (
    "This software is provided without warranty of any <mask>.",
    "If this argument is None, the default value <mask> used.",
    "The function returns a list <mask> strings.",
    "Raises an error if the file does <mask> exist.",
)


EXAMPLES = """
    maelm-fast demo
    maelm-fast demo --out elsewhere
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Text to exported encoder in a few minutes, on the English that this machine has."""

    out: Path = Path("demo-run")
    """Where everything goes."""


def main(argv: list[str]) -> int:
    options: Options = parse("demo", argv, Options, examples=EXAMPLES)
    out = options.out
    require_matplotlib()  # now, rather than after the training
    store, run, hf = out / "store", out / "run", out / "hf"
    require(run.exists() or not hf.exists(), f"{hf} is not of an earlier demo: choose another --out")
    start = time.monotonic()

    _title(1, "text: documentation, docstrings and licences of Python and its installed packages")
    config = presets.get(PRESET)
    inputs = PrepareConfig(
        inputs=("embedded",), out=store, vocab_size=config.model.vocab_size, seq_len=SEQ_LEN, validation=0.02
    )
    manifest = prepare(inputs, print)
    print(
        f"unigram entropy of the validation text: {manifest.unigram_nats:.3f} nats per token; a model that ignores the "
        f"context cannot go below it"
    )

    _title(2, f"pretraining: preset {PRESET}, masked tokens removed from the encoder's input")
    pretrain(PRESET, store, run)

    _title(3, "report")
    loaded, report = load_run(run), RunDir(run).report
    summary = _validation_summary(RunDir(run))
    plot_runs([RunDir(run)], report / "loss.png")
    ranks = measure(loaded, TokenStore.open(store, "validation"))
    ranks.write(report / REPORT_FILE)
    plot_ranks([ranks], (report / REPORT_FILE).with_suffix(".png"))
    summary["fill"] = _examples(loaded)
    write_json(report / "summary.json", summary)

    _title(4, "export for Hugging Face Transformers, read back and compared")
    shutil.rmtree(hf, ignore_errors=True)  # of an earlier demo in the same place
    written = export(loaded, hf, about=About(tuple(RunDir(run).metrics())))
    print(f"{hf}: {written.architecture}; hidden states read back differ by {written.differences.hidden:.1e}")

    _title(5, f"done in {time.monotonic() - start:.0f} s")
    print(
        f"validation loss {summary['val_loss']:.3f} nats per masked token, {summary['below_unigram']:.3f} below the "
        f"unigram entropy of {summary['unigram_nats']:.3f}; accuracy {summary['val_accuracy']:.1%}\n\n"
        f"written:\n  {store}/      token store and tokenizer\n"
        f"  {run}/        checkpoints, metrics.jsonl, config.yaml\n"
        f"  {report}/ loss.png, effective_rank.png and .json, summary.json\n"
        f"  {hf}/         for AutoModel.from_pretrained\n\n"
        f"next:\n"
        f'  maelm-fast fill {run} "the <mask> of the file"\n'
        f"  maelm-fast pretrain roberta_tiny_fast --data {store} --out {out / 'roberta'}   (the baseline, same data)\n"
        f"  maelm-fast plot {run} {out / 'roberta'} --out {out / 'both.png'}\n"
        f"(in a shell after: source .venv/bin/activate)"
    )
    return 0


def _title(number: int, text: str) -> None:
    print(f"\n[{number}/5] {text}", flush=True)


def _validation_summary(run: RunDir) -> dict[str, Any]:
    last = [row for row in run.metrics() if row["kind"] == "validation"][-1]
    return {
        key: last[key] for key in ("step", "tokens", "val_loss", "val_perplexity", "val_accuracy", "unigram_nats")
    } | {"below_unigram": last["unigram_nats"] - last["val_loss"]}


def _examples(run: LoadedRun) -> list[dict[str, Any]]:
    """Fills the demo's texts, prints them, and returns them as written to the summary."""
    examples = []
    for text, masks in zip(TEXTS, fill(run, list(TEXTS), top=4), strict=True):
        print(f"  {text}")
        print("     " + "   ".join(f"{json.dumps(c.token)} {c.probability:.0%}" for c in masks[0]))
        examples.append(
            {"text": text, "candidates": [{"token": c.token, "probability": c.probability} for c in masks[0]]}
        )
    return examples
