"""maelm-fast data: make a token store from text, and look into one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from maelm_fast.cli.common import Settings, option, parse, run_command
from maelm_fast.config import require
from maelm_fast.reporting import aligned

if TYPE_CHECKING:
    from maelm_fast.data.token_store import Manifest, Split, TokenStore

SHOWN_CHARS = 1000
FEW = 64
"""Validation samples, below which their loss is called noise."""
COMMANDS = {
    "prepare": "text to a token store; the same command resumes one that was killed",
    "show": "what is in a token store",
}
PREPARE_EXAMPLES = """
    maelm-fast data prepare corpus/ --out store
    maelm-fast data prepare 'wiki/*.jsonl.xz' hf:NAME --out store --text-field content --cased
    maelm-fast data prepare train.txt --out store --validation-input heldout.txt --vocab-size 8192 --seq-len 128
"""
SHOW_EXAMPLES = """
    maelm-fast data show store
    maelm-fast data show store --samples 3
    maelm-fast data show store --verify
"""
PREPARE_CHANGES: Settings = {
    "inputs": {"positional": True, "metavar": "INPUT"},
    "sample_mode": {"aliases": ("--mode",)},
    "workers": {"more": True},
    "validation_inputs": {"aliases": ("--validation-input",)},
}


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """What is in a token store."""

    store: Path = option(positional=True, metavar="STORE")
    """Made by 'data prepare'."""
    samples: int = 0
    """Also so many decoded samples of each split."""
    verify: bool = False
    """Also read everything and compare checksums."""


def main(argv: list[str]) -> int:
    return run_command("maelm-fast data", COMMANDS, {"prepare": _prepare, "show": _show}.__getitem__, argv)


def _prepare(argv: list[str]) -> int:
    from maelm_fast.data.prepare import PrepareConfig, prepare

    config: PrepareConfig = parse(
        "data prepare", argv, PrepareConfig, examples=PREPARE_EXAMPLES, change=PREPARE_CHANGES
    )
    both = bool(config.validation_inputs) and config.validation != PrepareConfig.validation
    require(not both, "--validation is a share of the inputs, --validation-inputs names others: remove one of the two")
    manifest = prepare(config, log=lambda line: print(line, file=sys.stderr, flush=True))
    print(_text(manifest))
    print(f"store: {config.out}")
    if (few := manifest.splits["validation"].samples) < FEW:
        print(
            f"note: a loss over {few} validation samples says little: raise --validation, or name files with "
            "--validation-input",
            file=sys.stderr,
        )
    return 0


def _show(argv: list[str]) -> int:
    from maelm_fast.data.token_store import Manifest, TokenStore

    options: ShowOptions = parse("data show", argv, ShowOptions, examples=SHOW_EXAMPLES)
    require(options.samples >= 0, f"--samples must not be negative, not {options.samples}")
    stores = [TokenStore(options.store, split) for split in Manifest.read(options.store).splits]
    print(_text(stores[0].manifest))
    if options.verify:
        stores[0].tokenizer()
        for store in stores:
            store.verify()
        print("checksums: right")
    if options.samples:
        for store in stores:
            _print_samples(store, options.samples)
    return 0


def _print_samples(store: TokenStore, count: int) -> None:
    """`count` samples spread evenly over the split, special tokens shown, cut for the screen."""
    import numpy as np

    tokenizer = store.tokenizer()
    for index in np.linspace(0, len(store) - 1, min(count, len(store))).astype(int).tolist():
        text = tokenizer.decode(store[index].tolist(), skip_special_tokens=False)
        more = f" [... {len(text) - SHOWN_CHARS:,} more characters]" if len(text) > SHOWN_CHARS else ""
        print(f"\n{store.split} sample {index}, {len(store[index])} tokens:\n{text[:SHOWN_CHARS]}{more}")


def _text(manifest: Manifest) -> str:
    splits = manifest.splits.values()
    rows = [["", *manifest.splits], *([label, *map(show, splits)] for label, show in ROWS)]
    return "\n".join(
        [
            f"tokenizer: {manifest.vocab_size:,} tokens, {'cased' if manifest.cased else 'uncased'}, "
            f"sha256 {manifest.tokenizer_sha256[:12]}",
            f"samples: {manifest.sample_mode}, at most {manifest.seq_len} tokens",
            f"fingerprint: {manifest.fingerprint[:12]}",
            *aligned(rows),
        ]
    )


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
