"""A Hugging Face RoBERTa patched, against the same RoBERTa as it comes: training steps on real lengths, in turns.

    python -m benchmarks.patch --data corpus/ --out benchmarks/results/patch_cpu.jsonl

patched     maelm_fast.patch(model)
attention   the model with attention `maelm` by name, and nothing else
sdpa        the model as transformers makes it
eager       with eager attention; flash_attention_2 on a GPU that has it

paragraphs  a line of text each, batches of 32: mostly padding; as it comes the model takes some 16 GB for one of them
documents   whole lines up to 512 tokens, batches of 8

There is one model: before a turn it is patched, or its attention chosen, and every turn goes on with the same weights.
Gate: in fp32 without dropout all contestants' losses and gradients of the token table must agree, or nothing is timed.
A round is a batch of its own, padded to its longest text, on which each takes a step: forward, backward, clip, fused
AdamW. A ratio is the median of the rounds' ratios, by the clock and by CPU seconds. Tokens are real ones, no padding.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.contestants import CLIP_NORM, LR
from benchmarks.gates import TOLERANCE
from benchmarks.measure import Failed, distance, environment, quartiles, ratios, transformers_version
from benchmarks.peers import PAD_ID, hugging_face_roberta
from benchmarks.program import Parser, count, precision_of, recorded, several, start
from benchmarks.report_ops import PATCHED, STOCK
from benchmarks.rows import Row
from maelm_fast import native, presets
from maelm_fast.config import require
from maelm_fast.data.prepare import PrepareConfig, prepare
from maelm_fast.data.token_store import TokenStore
from maelm_fast.data.tokenizer import BOS, EOS
from maelm_fast.integrations.transformers.patch import patch, unpatch

BATCH = {"paragraphs": 32, "documents": 8}
LONGEST, SHORTEST, RATE, IGNORED = 512, 4, 0.15, -100
GATE_TEXTS = 4
Texts = dict[str, list[NDArray[np.int64]]]


def texts_of(data: Sequence[str], longest: int, vocab_size: int) -> Texts:
    """By mix, from text files, tokenised by a tokenizer trained on them."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "store"
        settings: dict[str, Any] = {"vocab_size": vocab_size, "seq_len": longest, "sample_mode": "document"}
        prepare(PrepareConfig(inputs=tuple(data), out=out, workers=1, **settings), log=lambda _: None)
        store = TokenStore.open(str(out), "train")
        documents = [np.array(store[i], np.int64) for i in range(len(store))]
    lines = [line for row in documents for line in np.split(row[1:], np.flatnonzero(row[1:] == EOS) + 1)]
    paragraphs = [np.concatenate([[BOS], line]) for line in lines if len(line) >= SHORTEST]
    return {"paragraphs": paragraphs, "documents": documents}


def batch_of(texts: Sequence[NDArray[np.int64]], size: int, vocab_size: int, seed: int) -> dict[str, Tensor]:
    """Texts drawn at random, padded to the longest, RATE of each masked by the last token."""
    draw = np.random.default_rng(seed)
    rows = [texts[int(i)] for i in draw.integers(0, len(texts), size)]
    shape = (size, max(map(len, rows)))
    ids, labels, kept = np.full(shape, PAD_ID), np.full(shape, IGNORED), np.zeros(shape, np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)], kept[i, : len(row)] = row, 1
        masked = draw.choice(len(row), max(1, round(RATE * len(row))), replace=False)
        labels[i, masked], ids[i, masked] = row[masked], vocab_size - 1
    named = {"input_ids": ids, "attention_mask": kept, "labels": labels}
    return {name: torch.from_numpy(array) for name, array in named.items()}


@contextlib.contextmanager
def as_contestant(model: Any, name: str) -> Iterator[None]:
    """The model as this contestant has it, and back."""
    if name == "patched":
        patch(model)
        yield
        unpatch(model)
        return
    before = model.config._attn_implementation
    model.set_attn_implementation("maelm" if name == "attention" else name)
    yield
    model.set_attn_implementation(before)


class Comparison:
    """One model, and what a step of it is."""

    def __init__(self, model: Any, precision: str, device: str) -> None:
        self.model, self.precision, self.device = model.to(device).train(), precision, device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def forward(self, batch: dict[str, Tensor], precision: str) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=precision == "bf16"):
            loss: Tensor = self.model(**batch).loss
        return loss

    def step(self, batch: dict[str, Tensor]) -> tuple[float, float]:
        """Seconds, and CPU seconds."""
        began, busy = time.perf_counter(), time.process_time()
        self.forward(batch, self.precision).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began, time.process_time() - busy

    def gate(self, names: Sequence[str], batch: dict[str, Tensor]) -> dict[str, float]:
        """Each contestant's loss in fp32 without dropout; Failed if they are not one, or the gradients are not."""
        dropouts = [module for module in self.model.modules() if isinstance(module, nn.Dropout)]
        rates = [module.p for module in dropouts]
        for module in dropouts:
            module.p = 0.0
        losses, gradients = {}, {}
        for name in names:
            with as_contestant(self.model, name):
                loss = self.forward(batch, "bf16" if name == "flash_attention_2" else "fp32")
                loss.backward()
            losses[name] = loss.item()
            gradients[name] = self.model.get_input_embeddings().weight.grad.clone()
            self.optimizer.zero_grad(set_to_none=True)
        for module, rate in zip(dropouts, rates, strict=True):
            module.p = rate
        first = names[-1]
        for name, found in losses.items():
            allowed = TOLERANCE["bf16" if name == "flash_attention_2" else "fp32"]
            apart = distance(gradients[name], gradients[first])
            if not (abs(found / losses[first] - 1) <= allowed and apart <= 10 * allowed):  # no number fails too
                raise Failed(
                    f"gate: {name} and {first} disagree: losses of {found:.7g} and {losses[first]:.7g}, gradients "
                    f"{apart:.1e} apart"
                )
        return losses


def compare(
    comparison: Comparison, names: Sequence[str], mix: str, batches: Sequence[dict[str, Tensor]], about: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """A row per contestant. batches: one to warm up on, then one a round."""
    first = {name: x[:GATE_TEXTS] for name, x in batches[0].items()}
    losses = comparison.gate(names, first)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for batch in batches:
        for name in names:
            with as_contestant(comparison.model, name):
                taken[name].append(comparison.step(batch))
    tokens = [int(batch["attention_mask"].sum()) for batch in batches[1:]]
    slots = [batch["attention_mask"].numel() for batch in batches[1:]]
    clock, busy = ({name: [turn[i] for turn in turns[1:]] for name, turns in taken.items()} for i in range(2))
    for name in names:
        yield {
            **about,
            "mix": mix,
            "batch": len(batches[0]["input_ids"]),
            "mean_length": round(sum(tokens) / len(tokens) / len(batches[0]["input_ids"]), 1),
            "padding": round(1 - sum(tokens) / sum(slots), 4),
            "rounds": len(tokens),
            "gate": losses,
            "contestant": name,
            "tokens_per_s": quartiles([real / seconds for real, seconds in zip(tokens, clock[name], strict=True)]),
            "ratios": ratios(clock, name, inverse=True),
            "cpu_ratios": ratios(busy, name, inverse=True) if comparison.device == "cpu" else None,
        }


def rows(options: argparse.Namespace) -> Iterator[Row]:
    if options.device == "cpu" and (host := native.host()) is not None:
        host.keep_freed_memory()
    precision = precision_of(options)
    shape = {"num_layers": options.layers, "hidden_size": options.width, "num_heads": options.width // 64 or 1}
    shape |= {"ffn_size": 4 * options.width, "vocab_size": options.vocab}
    changes = {**shape, "dropout": options.dropout, "relative_bias": "none"}
    model = presets.change(presets.get("roberta_base"), model=changes).model
    texts = texts_of(options.data, options.longest, options.vocab)
    torch.manual_seed(0)
    comparison = Comparison(hugging_face_roberta(model), precision, options.device)
    about = environment(options.device) | {
        "date": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "transformers": transformers_version(),
        "precision": precision,
        "layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "vocab": model.vocab_size,
        "dropout": model.dropout,
    }
    for mix in options.mixes:
        size = options.batch or BATCH[mix]
        made = [batch_of(texts[mix], size, options.vocab, seed) for seed in range(options.rounds + 1)]
        batches = [{name: x.to(options.device) for name, x in batch.items()} for batch in made]
        yield from compare(comparison, options.contestants, mix, batches, about)


def run(options: argparse.Namespace) -> None:
    first, *others = options.contestants
    require(first == "patched" and len({first, *others}) == 1 + len(others), "--contestants: patched comes first")
    recorded("patch", rows(options), options.out)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("patch", __doc__, rounds=5, device="cpu", precision=True)
    add = parser.add_argument
    add("--data", nargs="+", required=True, help="text files or directories")
    add("--mixes", type=several(*BATCH), default=list(BATCH))
    add("--contestants", type=several(*PATCHED), default=["patched", *STOCK[:2]], help=f"of {', '.join(PATCHED)}")
    add("--batch", type=count, help=f"texts (default: {', '.join(f'{size} {mix}' for mix, size in BATCH.items())})")
    add("--layers", type=count, default=12)
    add("--width", type=count, default=768)
    add("--vocab", type=count, default=32_768)
    add("--longest", type=count, default=LONGEST, help="tokens of the longest text")
    add("--dropout", type=float, default=0.1)
    return start(parser, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
