"""maelm-fast data: make a token store from text, and look into one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from maelm_fast.cli.common import OneLineParser
from maelm_fast.config import require
from maelm_fast.data.prepare import PrepareConfig, prepare
from maelm_fast.data.token_store import Manifest, Split, TokenStore

SHOWN_CHARS = 1000


def main(argv: list[str]) -> int:
    parser = OneLineParser(prog="maelm-fast data", description="Make a token store from text, or look into one.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _prepare_arguments(commands.add_parser("prepare", help="text to a token store; a killed run is gone on with"))
    _show_arguments(commands.add_parser("show", help="what is in a token store"))
    options = parser.parse_args(argv)
    options.run(options)
    return 0


def _prepare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_prepare)
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="file or glob (.txt, .jsonl, also .xz .gz .zst; .parquet), "
        "hf:NAME[:CONFIG] (Hugging Face dataset, split train), or 'embedded' (text found on this machine)")  # fmt: skip
    add("--out", required=True, type=Path, metavar="STORE", help="the directory to make")
    add("--vocab-size", type=int, metavar="N", help="of the tokenizer trained (default: 32768; with --cased 64000)")
    add("--cased", action="store_true", help="keep upper case")
    add("--tokenizer", type=Path, metavar="FILE", help="use this tokenizer.json, train none")
    add("--mode", choices=["full", "document"], default="full", help="full: samples of exactly --seq-len tokens, cut "
        "from all text end to end (default); document: whole lines of a document, at most --seq-len")  # fmt: skip
    add("--seq-len", type=int, default=512, metavar="N", help="tokens of a sample, <s> included (default: 512)")
    validation = parser.add_mutually_exclusive_group()
    validation.add_argument("--validation", type=float, default=0.01, metavar="F",
                            help="share of the documents, chosen by a hash of their text (default: 0.01)")  # fmt: skip
    validation.add_argument("--validation-input", action="append", default=[], metavar="INPUT",
                            help="validate on these instead; may be repeated")  # fmt: skip
    add("--text-field", default="text", metavar="NAME", help="field or column with the text (default: text)")
    add("--seed", type=int, default=0, metavar="N", help="changes which documents go to validation (default: 0)")
    add("--workers", type=int, metavar="N", help="tokenising processes (default: one per core); the result is the same")


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_show)
    parser.add_argument("store", type=Path, metavar="STORE")
    parser.add_argument("--samples", type=int, default=0, metavar="K", help="also K decoded samples of each split")
    parser.add_argument("--verify", action="store_true", help="also read everything and compare checksums")


def _prepare(options: argparse.Namespace) -> None:
    workers = {} if options.workers is None else {"workers": options.workers}
    config = PrepareConfig(
        inputs=tuple(options.inputs),
        out=options.out,
        tokenizer=options.tokenizer,
        vocab_size=options.vocab_size,
        cased=options.cased,
        sample_mode=options.mode,
        seq_len=options.seq_len,
        validation=options.validation,
        validation_inputs=tuple(options.validation_input),
        text_field=options.text_field,
        seed=options.seed,
        **workers,
    )
    manifest = prepare(config, log=lambda line: print(line, file=sys.stderr, flush=True))
    print(_table(manifest))
    print(f"store: {options.out}")


def _show(options: argparse.Namespace) -> None:
    require(options.samples >= 0, f"--samples must not be negative, not {options.samples}")
    stores = [TokenStore(options.store, split) for split in Manifest.read(options.store).splits]
    print(_table(stores[0].manifest))
    if options.verify:
        stores[0].tokenizer()
        for store in stores:
            store.verify()
        print("checksums: right")
    if options.samples:
        for store in stores:
            _print_samples(store, options.samples)


def _print_samples(store: TokenStore, count: int) -> None:
    """`count` samples spread evenly over the split, special tokens shown, cut for the screen."""
    tokenizer = store.tokenizer()
    for index in np.linspace(0, len(store) - 1, min(count, len(store))).astype(int).tolist():
        text = tokenizer.decode(store[index].tolist(), skip_special_tokens=False)
        more = f" [... {len(text) - SHOWN_CHARS:,} more characters]" if len(text) > SHOWN_CHARS else ""
        print(f"\n{store.split} sample {index}, {len(store[index])} tokens:\n{text[:SHOWN_CHARS]}{more}")


def _table(manifest: Manifest) -> str:
    names = list(manifest.splits)
    splits = list(manifest.splits.values())
    rows = [("", *names), *((label, *(show(split) for split in splits)) for label, show in ROWS)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"tokenizer: {manifest.vocab_size:,} tokens, {'cased' if manifest.cased else 'uncased'}, "
        f"sha256 {manifest.tokenizer_sha256[:12]}",
        f"samples: {manifest.sample_mode}, at most {manifest.seq_len} tokens",
        f"fingerprint: {manifest.fingerprint[:12]}",
    ]
    for label, *cells in rows:
        shown = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append(f"{label.ljust(widths[0])}  {shown}".rstrip())
    return "\n".join(lines)


ROWS = [
    ("documents", lambda split: f"{split.documents:,}"),
    ("lines", lambda split: f"{split.lines:,}"),
    ("text, MB", lambda split: f"{split.text_bytes / 1e6:,.2f}"),
    ("samples", lambda split: f"{split.samples:,}"),
    ("tokens", lambda split: f"{split.tokens:,}"),
    ("bytes per token", lambda split: f"{_bytes_per_token(split):.2f}"),
    ("unigram entropy, nats", lambda split: f"{split.unigram_nats:.3f}"),
    ("dropped tokens", lambda split: f"{split.dropped_tokens:,}"),
    ("lines cut for their length", lambda split: f"{split.split_lines:,}"),
    ("shards", lambda split: f"{len(split.shards):,}"),
]


def _bytes_per_token(split: Split) -> float:
    """Over the text's own tokens: not the <s> of each sample; </s> stands for the line end and its byte."""
    return (split.text_bytes + split.lines) / (split.tokens - split.samples + split.dropped_tokens)
