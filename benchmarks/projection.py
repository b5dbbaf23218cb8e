"""What a training step would take on a GPU that is not at hand: a projection, never a measurement.

    python -m benchmarks.projection --dropout 0.1 --bias --out benchmarks/results/projection.jsonl

Counted are the FLOPs of every matrix product, the score pairs of attention, and for whatever only moves memory how
often it goes over a tensor of activations, weights or logits; what is one vector long is left out. One thing follows
another; each takes its limit, and nothing for the launch itself. The share of the peak that matrix products reach is
what is known least, so it is a range, and the result is one. The other shares are printed with their source.

Attention: PyTorch's or flash-attn's kernels at the rate observed for FlashAttention-2; ours by the slowest of matrix
units, exponentials and instruction slots, as executed (benchmarks/executed.py; 435 of 512 tokens, sm_80, padding of
tiles included). What part of that our kernels reach no GPU has shown: so much that without bias and dropout they are as
fast as FlashAttention-2. One micro-batch makes an update. GELU's output is kept where a run would keep it.

Shapes: n rows that are keys, m that are queries, d hidden size, f feed-forward size, a bytes of an activation;
parameters and their gradients have four bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.measure import environment
from benchmarks.program import Parser, count, recorded, several, start
from benchmarks.rows import Row, read_rows, when
from benchmarks.shares import CLASSES
from maelm_fast import presets
from maelm_fast.config import ModelConfig, require
from maelm_fast.model.flops import training_flops
from maelm_fast.model.maelm import MaeLm
from maelm_fast.ops.masked_cross_entropy import LOGITS_BYTES
from maelm_fast.ops.reference.mask_and_pack import share_of
from maelm_fast.training import memory

MODELS = ("base", "base_cross", "roberta_base")
SINGLE = 4  # bytes of a parameter and of a gradient


class Share(NamedTuple):
    """What part of a ceiling is taken to be reached, and why."""

    share: float
    reason: str


@dataclass(frozen=True)
class Card:
    """A GPU. peak: dense bf16, FLOP/s; bandwidth: bytes/s; multiprocessors; memory: bytes: from NVIDIA's data sheet.
    clock: Hz under load. products: least and largest share of the peak that products are taken to reach."""

    name: str
    arch: int
    peak: float
    bandwidth: float
    multiprocessors: int
    memory: int
    clock: float
    products: tuple[Share, Share]
    copy: Share
    flash: Share


CARDS = {
    "a100": Card(
        "NVIDIA A100 80 GB SXM",
        80,
        312e12,
        2039e9,
        108,
        80 * 10**9,
        1.41e9,
        (Share(0.65, "assumed"), Share(0.75, "assumed; whole steps of this width reach 0.56 (llm.c)")),
        Share(0.83, "assumed: a copy at 1.7 TB/s"),
        Share(0.42, "FlashAttention-2, head 64, 512: 132 of 312 TFLOP/s with 7 products, observed elsewhere"),
    ),
    "h200": Card(
        "NVIDIA H200 141 GB SXM",
        90,
        989e12,
        4800e9,
        132,
        141 * 10**9,
        1.755e9,
        (Share(0.55, "assumed"), Share(0.66, "assumed; 8192^3 reaches 0.78 to 0.81, observed elsewhere")),
        Share(0.90, "a copy at 4.3 TB/s, observed elsewhere"),
        Share(0.22, "FlashAttention-2, head 64, 512: 215 of 989 TFLOP/s with 7 products, observed elsewhere"),
    ),
}
OF_COPY = Share(0.75, "design goal for row kernels; apex's LayerNorm reached 75-81% of an A100's data sheet")

EXECUTED = Path(__file__).parent / "results" / "executed.jsonl"
FLASH_PRODUCTS = 7
OUR_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
ISSUES = 128  # a clock and multiprocessor: 4 warps of 32
EXPONENTIALS = 16  # a clock and multiprocessor
MATRIX_FLOPS = {80: 2048, 90: 4096}  # dense bf16, a clock and multiprocessor


class Lengths(NamedTuple):
    """Each sequence's rows in the encoder, original tokens and masked tokens."""

    encoder: tuple[int, ...]
    original: tuple[int, ...]
    masked: tuple[int, ...]


class Layer(NamedTuple):
    """chosen: the queries are some of the rows that are keys."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    dropout: bool
    bias: bool
    chosen: bool = False

    @property
    def products(self) -> list[tuple[int, str]]:
        """Rows, and whose weights: what is projected in one product."""
        m, n = sum(self.queries), sum(self.keys)
        return [(n, "qkv")] if self.queries is self.keys else [(m, "q"), (n, "kv")]


class Work(NamedTuple):
    """kind: one of CLASSES. bytes: moved. flops: of matrix products, or of attention by `kernel`: varlen (PyTorch's or
    flash-attn's), or fwd, dq, dkv (kernels/attention.py), over so many pairs of query and key in all heads."""

    kind: str
    bytes: int = 0
    flops: int = 0
    kernel: str = ""
    pairs: int = 0
    layer: Layer | None = None


@dataclass(frozen=True)
class Step:
    """A step on the kernels of a GPU. a: bytes of an activation; 2 is bf16 autocast. keep_gelu: as model/block.py's.
    UserError for the decoders of the ablations, which are not counted."""

    config: ModelConfig
    lengths: Lengths
    a: int = 2
    keep_gelu: bool = False

    def __post_init__(self) -> None:
        c = self.config
        require(c.decoder in ("none", "self", "cross"), f"a {c.decoder} decoder is not counted; none, self, cross are")
        own = c if c.decoder == "none" else c.decoder_config
        same = (own.hidden_size, own.num_heads) == (c.hidden_size, c.num_heads)
        require(same, "a decoder of another width or other heads than the encoder's is not counted")

    def layers(self) -> list[Layer]:
        """The last one in which masked tokens are the only queries comes last."""
        c, (seen, whole, masked) = self.config, self.lengths
        encoder, own = (c.dropout > 0, c.relative_bias != "none"), (False, c.decoder_relative_bias)
        if c.decoder == "none":
            return [Layer(seen, seen, *encoder)] * (c.num_layers - 1) + [Layer(masked, seen, *encoder, True)]
        layers = [Layer(seen, seen, *encoder)] * c.num_layers
        if c.decoder == "cross":
            return layers + [Layer(masked, seen, *own)] * c.decoder_layers
        return layers + [Layer(whole, whole, *own)] * (c.decoder_layers - 1) + [Layer(masked, whole, *own, True)]

    def products(self) -> Iterator[tuple[int, int, int]]:
        """(rows, inputs, outputs) of every linear layer, and of each chunk of the vocabulary's projection."""
        d, f, masked = self.config.hidden_size, self.config.ffn_size, sum(self.lengths.masked)
        for layer in self.layers():
            m = sum(layer.queries)
            yield from ((rows, d, len(names) * d) for rows, names in layer.products)
            yield from ((m, d, d), (m, d, f), (m, f, d))
        yield masked, d, d
        yield from [(-(-masked // self.chunks), d, self.config.table_size)] * self.chunks

    @property
    def chunks(self) -> int:
        """Of logits: the rule of ops/masked_cross_entropy.py."""
        rows = max(1, sum(self.lengths.masked))
        most = max(1, LOGITS_BYTES["cuda"] // (self.config.table_size * self.a))
        even = -(-rows // -(-rows // most))
        return -(-rows // max(1, min(most, -(-even // 128) * 128)))

    def work(self) -> Iterator[Work]:
        c, d, a = self.config, self.config.hidden_size, self.a
        seen, whole, masked = (sum(x) for x in self.lengths)
        for rows, inputs, outputs in self.products():
            yield Work("gemm", flops=3 * 2 * rows * inputs * outputs)
        for layer in self.layers():
            yield from self.of_layer(layer)
        table, tables = c.table_size * d * SINGLE, (c.table_size + c.max_positions) * d * SINGLE
        # read twice, its gradient zeroed and written; rows once each way
        yield Work("norm", 4 * tables + 2 * seen * d * a)
        yield Work("other", 3 * seen * d * a)  # gradients of a stack's input, summed
        if c.decoder == "cross":  # of the encoder's outputs, every layer's and the scatter's
            yield Work("other", 3 * (c.decoder_layers * seen + masked) * d * a)
            yield Work("norm", (2 * masked + seen) * d * a)  # masked slots only, whose gradient is whole
        elif c.decoder == "self":
            yield Work("other", 3 * (whole + masked) * d * a)
            yield Work("norm", (2 * whole + 3 * seen) * d * a)
        else:
            yield Work("other", 3 * masked * d * a)
        # the head: GELU and LayerNorm, the latter in fp32
        yield Work("gelu", 5 * masked * d * a)
        yield Work("norm", 5 * masked * d * SINGLE)
        casts = d * d + 4 * masked * d if a != SINGLE else 0
        yield Work("other", 2 * casts * (a + SINGLE) + masked * d * a)
        # logits read, written as their gradient, read for the bias's; the table cast, its gradient summed and scaled
        cast = (table // SINGLE + 2 * masked * d) * (a + SINGLE) if a != SINGLE else 0
        summed = 3 * table * (self.chunks - 1) + 2 * (table + masked * d * SINGLE)
        yield Work("loss", 3 * masked * c.table_size * a + cast + summed)
        # the table's gradients, from the loss, the embedding and the [MASK] row, which is zeros but for it
        yield Work("other", 3 * table if c.decoder == "none" else 7 * table)
        yield Work("optimizer", 10 * parameters(c) * SINGLE)  # norm 1, clipping 2, AdamW 7

    def of_layer(self, layer: Layer) -> Iterator[Work]:
        """All but the products."""
        d, f, a, m, n = self.config.hidden_size, self.config.ffn_size, self.a, sum(layer.queries), sum(layer.keys)
        yield Work("norm", 2 * (8 + layer.dropout) * m * d * a)  # of each add_norm 3 passes forward, 5 backward
        yield Work("gelu", (5 if self.keep_gelu else 6) * m * f * a)
        ours, split = layer.dropout or layer.bias, layer.queries is not layer.keys
        other = 5 * m * d + n * d if layer.chosen else 0
        if not ours:  # gradients of queries, keys and values put side by side and summed, as our kernels do it
            other += (4 if split else 6) * n * d + sum(rows * len(names) * d for rows, names in layer.products)
        weights = 4 * d * d + 2 * d * f
        casts = 2 * weights * (SINGLE + a) if a != SINGLE else 0
        # split: of the slices of one weight each one's gradient is put into zeros, then added
        yield Work("other", other * a + casts + (21 * d * d * SINGLE if split else 0))
        heads, dim = self.config.num_heads, self.config.head_dim
        pairs = heads * sum(q * k for q, k in zip(layer.queries, layer.keys, strict=True))
        for kernel, products in (OUR_PRODUCTS if ours else {"varlen": FLASH_PRODUCTS}).items():
            yield Work("attention", 0, products * 2 * pairs * dim, kernel, pairs, layer)


@cache
def parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in MaeLm(config).parameters())


def seconds(work: Work, card: Card, products: float, head_dim: int) -> float:
    """products: the share of the peak that matrix products reach."""
    if work.kind == "gemm":
        return work.flops / (card.peak * products)
    if work.kernel == "varlen":
        return work.flops / (card.peak * card.flash.share)
    if work.layer:
        clocks = max(clocks_a_pair(work.kernel, work.layer.bias, work.layer.dropout, card, head_dim))
        return work.pairs * clocks / share_of_limits(card, head_dim) / (card.multiprocessors * card.clock)
    return work.bytes / (card.bandwidth * card.copy.share * OF_COPY.share)


def clocks_a_pair(kernel: str, bias: bool, dropout: bool, card: Card, head_dim: int) -> tuple[float, float, float]:
    """Clocks of one multiprocessor that our kernel takes in matrix units, exponentials, instruction slots."""
    matrix = OUR_PRODUCTS[kernel] * 2 * head_dim / MATRIX_FLOPS[card.arch]
    return matrix, 1 / EXPONENTIALS, issued(card.arch, kernel, bias, dropout) / ISSUES


@cache
def issued(arch: int, kernel: str, bias: bool, dropout: bool) -> float:
    """Instructions of a thread for a score: those executed under the newest Triton, without moves, most of which are
    not in the binary (with them left out they are within 12% of what is counted there), and on sm_90 without those of
    products, of which its wgmma needs few."""
    asked = {"kernel": f"attention_{kernel}", "shape": "12 heads of 64", "bias": bias, "dropout": dropout}
    rows = [row for row in read_rows(EXECUTED, EXECUTED.name, "executed") if asked.items() <= row.items()]
    newest = max(rows, key=lambda row: ([int(part) for part in row["triton"].split(".")], when(row)))
    left_out = {"moves"} if arch == 80 else {"moves", "products"}
    return float(sum(count for kind, count in newest["instructions"].items() if kind not in left_out))


@cache
def share_of_limits(card: Card, head_dim: int) -> float:
    """What part of its limits our attention is taken to reach."""
    pairs = card.peak * card.flash.share / (FLASH_PRODUCTS * 2 * head_dim)  # a second
    clocks = card.multiprocessors * card.clock / pairs
    return sum(max(clocks_a_pair(kernel, False, False, card, head_dim)) for kernel in OUR_PRODUCTS) / clocks


def step_of(model: str, batch: int, seq: int, rate: float, dropout: float, bias: bool, itemsize: int = 2) -> Step:
    """A step of a preset on full sequences, with a fixed count of masks, each of them [MASK]."""
    preset = presets.get(model)
    rule = "none" if not bias else "t5" if preset.model.relative_bias == "none" else preset.model.relative_bias
    config = presets.change(preset, model={"dropout": dropout, "relative_bias": rule}).model
    require(0.0 < rate < 1.0, f"--rate must lie between 0 and 1, not {rate}")
    require(seq <= config.max_positions, f"--seq {seq} is more than {model}'s {config.max_positions} positions")
    masked = int(share_of(seq, rate, 0.5))
    seen = seq if config.decoder == "none" else seq - masked
    return Step(config, Lengths((seen,) * batch, (seq,) * batch, (masked,) * batch), itemsize)


def projected(
    model: str,
    card: Card,
    batch: int = 256,
    seq: int = 512,
    rate: float = 0.15,
    dropout: float = 0.1,
    bias: bool = True,
) -> Row:
    step = step_of(model, batch, seq, rate, dropout, bias)
    config, lengths = step.config, step.lengths
    asked = presets.change(presets.get(model), masking={"rate": rate}, runtime={"micro_batch_size": batch})
    keep = memory.keeps_gelu(replace(asked, model=config), parameters(config), seq, card.memory)
    work = list(replace(step, keep_gelu=keep).work())
    ranges: dict[str, list[float]] = {kind: [] for kind in CLASSES}
    for share in (bound.share for bound in card.products):
        for kind, ms in ranges.items():
            taken = sum(seconds(one, card, share, config.head_dim) for one in work if one.kind == kind)
            ms.append(round(1000 * taken, 3))
    whole = [sum(ms[i] for ms in ranges.values()) / 1000 for i in range(2)]
    return {
        "device": card.name,
        "model": model,
        "precision": "bf16",
        "batch": batch,
        "seq": seq,
        "rate": rate,
        "dropout": dropout,
        "bias": config.relative_bias,
        "keep_gelu": keep,
        "products": [bound.share for bound in card.products],
        "tokens_per_s": [round(sum(lengths.original) / s) for s in whole],
        "mfu": [round(training_flops(config, *lengths) / s / card.peak, 4) for s in whole],
        "ms": ranges,
    }


def assumed(card: Card) -> Iterator[str]:
    yield f"{card.name}: a projection; assumed or observed elsewhere, as shares of the data sheet:"
    ours = Share(share_of_limits(card, 64), "of the limits by executed counts; assumed: as fast as PyTorch's if plain")
    least, largest = card.products
    shares = {"products, at least": least, "products, at most": largest, "copy": card.copy}
    shares |= {"row kernels, of the copy": OF_COPY, "attention, PyTorch's": card.flash, "attention": ours}
    yield from (f"  {what} {share:.2g} ({reason})" for what, (share, reason) in shares.items())


def run(options: argparse.Namespace) -> None:
    cards = [CARDS[name] for name in options.devices]
    print("\n".join(line for card in cards for line in assumed(card)))
    state = {name: value for name, value in environment("cpu").items() if name in ("date", "commit")}
    asked = [getattr(options, name) for name in ("batch", "seq", "rate", "dropout", "bias")]
    rows = [state | projected(model, card, *asked) for card in cards for model in options.models]
    recorded("projection", rows, options.out)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("projection", __doc__)
    add = parser.add_argument
    add("--devices", nargs="+", choices=list(CARDS), default=list(CARDS))
    add("--models", type=several(), default=list(MODELS), help="presets, separated by commas")
    add("--batch", type=count, default=256, help="sequences")
    add("--seq", type=count, default=512, help="tokens per sequence")
    add("--rate", type=float, default=0.15, help="mask rate")
    add("--dropout", type=float, default=0.0)
    add("--bias", action=argparse.BooleanOptionalAction, default=False, help="relative position bias")
    return start(parser, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
