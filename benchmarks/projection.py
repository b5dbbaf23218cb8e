"""What a training step would take on a GPU that is not at hand: a projection, never a measurement.

    python -m benchmarks.projection --dropout 0.1 --bias --out benchmarks/results/projection.jsonl

Every launch of a step is counted: its FLOPs, and the fewest bytes it can move (each argument read once, each result
written once, of a table as many rows as there are look-ups). Launches follow one another; each takes the longest of its
limits and nothing for the launch itself. The share of the peak that matrix products reach is what is known least, so it
is a range, and the result is one. The other shares are printed with their source.

Attention: PyTorch's or flash-attn's kernels at the rate observed for FlashAttention-2; ours by the slowest of matrix
units, exponentials and instruction slots, as executed (benchmarks/executed.py; 435 of 512 tokens, sm_80, padding of
tiles included). What part of that our kernels reach no GPU has shown: so much that without bias and dropout they are as
fast as FlashAttention-2. One micro-batch makes an update. Left out: whatever is smaller
than one vector a row, as the arithmetic on bias tables and on losses.

Shapes: n rows, m of them computed, d hidden size, f feed-forward size, a bytes of an activation; parameters and their
gradients have four bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.classes import CLASSES
from benchmarks.measure import append_rows, environment
from benchmarks.rows import Row, read_rows, when
from maelm_fast import presets
from maelm_fast.config import ModelConfig, require
from maelm_fast.errors import UserError
from maelm_fast.model.flops import training_flops
from maelm_fast.model.maelm import MaeLm
from maelm_fast.ops.masked_cross_entropy import LOGITS_BYTES
from maelm_fast.ops.reference.mask_and_pack import share_of

MODELS = ("base", "base_cross", "roberta_base")
SINGLE = 4  # bytes of a parameter, a gradient, a row's statistic
GELU_GROUP = 64  # rows whose bias gradient one program of kernels/feed_forward.py sums
ATTENTION_GROUP = 64  # rows of q's and of v's gradients that a program of kernels/attention_backward.py sums


class Share(NamedTuple):
    """What part of a ceiling is taken to be reached, and why."""

    share: float
    reason: str


@dataclass(frozen=True)
class Card:
    """A GPU. peak: dense bf16, FLOP/s; bandwidth: bytes/s; multiprocessors: from NVIDIA's data sheet. clock: Hz under
    load. products: least and largest share of the peak that products are taken to reach."""

    name: str
    arch: int
    peak: float
    bandwidth: float
    multiprocessors: int
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


class Scores(NamedTuple):
    """Attention's pairs of query and key over all heads. kernel: varlen (PyTorch's or flash-attn's), or fwd, dq, dkv
    (kernels/attention.py)."""

    kernel: str
    pairs: int
    head_dim: int
    bias: bool
    dropout: bool


@dataclass(frozen=True)
class Cost:
    """One kind of launch. kind: one of CLASSES. bytes, flops, model_flops (what model/flops.py counts): of one of the
    `launches`. product: of a matrix product (m, n, k), how its operands lie: forward (m, k) (n, k)^T, grad_input (m, k)
    (k, n), grad_weight (k, m)^T (k, n)."""

    op: str
    phase: str
    kind: str
    bytes: int
    flops: int = 0
    model_flops: int = 0
    launches: int = 1
    scores: Scores | None = None
    product: tuple[str, int, int, int] | None = None


class Lengths(NamedTuple):
    """Each sequence's rows in the encoder, original tokens and masked tokens."""

    encoder: tuple[int, ...]
    original: tuple[int, ...]
    masked: tuple[int, ...]


def masked_lengths(config: ModelConfig, original: Sequence[int], rate: float) -> Lengths:
    """With a fixed count of masks, each of them [MASK]."""
    masked = tuple(int(share_of(n, rate, 0.5)) for n in original)
    seen = original if config.decoder == "none" else [n - m for n, m in zip(original, masked, strict=True)]
    return Lengths(tuple(seen), tuple(original), masked)


@cache
def parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in MaeLm(config).parameters())


class Step:
    """A step on the kernels of a GPU. itemsize: bytes of an activation; 2 is bf16 autocast. UserError for the decoders
    of the ablations, which are not counted."""

    def __init__(self, config: ModelConfig, lengths: Lengths, itemsize: int = 2) -> None:
        c = config
        require(
            c.decoder in ("none", "self", "cross"), f"a {c.decoder} decoder is not counted; none, self and cross are"
        )
        own = c if c.decoder == "none" else c.decoder_config
        same = (own.hidden_size, own.num_heads) == (c.hidden_size, c.num_heads)
        require(same, "a decoder of another width or other heads than the encoder's is not counted")
        self.config, self.lengths, self.a = config, lengths, itemsize
        self.d, self.f = config.hidden_size, config.ffn_size
        self.rows, self.slots, self.masked = (sum(x) for x in lengths)

    def costs(self) -> Iterator[Cost]:
        """Every kind of launch, in order."""
        c, (seen, whole, masked) = self.config, self.lengths
        dropout, bias, own = c.dropout > 0, c.relative_bias != "none", c.decoder_relative_bias
        last = c.decoder == "none"  # its last layer computes masked tokens only
        yield from self.embedding(dropout)
        yield from self.block(c.num_layers - last, seen, dropout, bias, goes_on=last)
        if last:
            yield from self.sliced_block(1, masked, seen, dropout, bias)
        else:
            yield from self.scatter()
        if c.decoder == "self":
            yield from self.block(c.decoder_layers - 1, whole, False, own, goes_on=True)
            yield from self.sliced_block(1, masked, whole, False, own)
        elif c.decoder == "cross":
            yield from self.sliced_block(c.decoder_layers, masked, seen, False, own, chosen=False)
            # every layer's and the scatter's gradient of the encoder's outputs
            yield self.addition("gradient sums", self.rows * self.d, self.a, c.decoder_layers)
        yield from self.head()
        size = parameters(c) * SINGLE
        yield Cost("gradient norm", "update", "optimizer", size)
        yield Cost("clipping", "update", "optimizer", 2 * size)
        yield Cost("AdamW", "update", "optimizer", 7 * size)

    # embedding, decoder input

    def embedding(self, dropout: bool) -> Iterator[Cost]:
        n, d, c = self.rows, self.d, self.config
        tables = (min(n, c.table_size) + min(n, c.max_positions)) * d * SINGLE
        given, stats, out = 2 * 4 * n + tables + 8 * dropout, 2 * n * SINGLE, n * d * self.a
        whole = (c.table_size + c.max_positions) * d * SINGLE
        yield Cost("embed_packed", "forward", "norm", given + 2 * d * SINGLE + out + stats)
        yield Cost("embed_packed", "backward", "norm", given + out + stats + 3 * d * SINGLE + whole)
        yield Cost("zeroed tables", "backward", "norm", whole)

    def scatter(self) -> Iterator[Cost]:
        """Of the cross-attention decoder, masked slots only, which name no encoder row; its gradient is whole."""
        c, d = self.config, self.d
        slots, named = (self.masked, 0) if c.decoder == "cross" else (self.slots, self.rows)
        given = named * d * self.a + 2 * 4 * slots + (min(slots, c.max_positions) * d + 3 * d) * SINGLE
        moved = given + slots * d * self.a + 2 * slots * SINGLE
        yield Cost("scatter_to_decoder", "forward", "norm", moved)
        written = self.rows * d * self.a + (c.max_positions * d + 3 * d) * SINGLE
        yield Cost("scatter_to_decoder", "backward", "norm", moved + written)

    # layers

    def block(
        self, times: int, lengths: Sequence[int], dropout: bool, bias: bool, goes_on: bool = False
    ) -> Iterator[Cost]:
        """The first `times` layers of a stack, in which every row is a query and a key. goes_on: others follow."""
        n, d = sum(lengths), self.d
        yield self.addition("gradient sums", n * d, self.a, 1)  # of the stack's input, which no add_norm made
        if times == 0:
            return
        yield from self.linear("qkv", times, n, d, 3 * d, summed=dropout or bias)
        yield from self.attention(times, lengths, lengths, dropout, bias)
        if not (dropout or bias):  # our kernels write them so
            yield Cost("gradients of q, k, v side by side", "backward", "other", 6 * n * d * self.a, launches=times)
        yield from self.rest_of_block(times, n, dropout, goes_on)

    def sliced_block(
        self, times: int, queries: Sequence[int], keys: Sequence[int], dropout: bool, bias: bool, chosen: bool = True
    ) -> Iterator[Cost]:
        """The last `times` layers of a stack, with fewer queries than keys. chosen: the queries are rows of the
        keys', in one layer behind others."""
        m, n, d, a = sum(queries), sum(keys), self.d, self.a
        if chosen:
            rows = m * d * a
            yield Cost("chosen rows", "forward", "other", 2 * rows + 4 * m, launches=times)
            yield Cost("chosen rows", "backward", "other", 3 * rows + 4 * m + n * d * a, launches=times)
        yield from self.linear("q", times, m, d, d, summed=dropout or bias)
        yield from self.linear("kv", times, n, d, 2 * d, summed=dropout or bias)
        # of the slices of one weight: each one's gradient put into zeros, then added
        yield Cost("gradients of weight slices", "backward", "other", 21 * d * (d + 1) * SINGLE, launches=times)
        yield from self.attention(times, queries, keys, dropout, bias)
        if not (dropout or bias):
            yield Cost("gradients of q, k, v side by side", "backward", "other", 4 * n * d * a, launches=times)
        yield from self.rest_of_block(times, m, dropout)
        yield self.addition("gradient sums", m * d, a, 1)  # of the first layer's queries

    def rest_of_block(self, times: int, n: int, dropout: bool, goes_on: bool = False) -> Iterator[Cost]:
        d, f = self.d, self.f
        yield from self.linear("out", times, n, d, d, summed=True)
        yield from self.add_norm(2 * times, n, dropout, not goes_on)
        yield from self.linear("ffn_in", times, n, d, f, bias=False)  # bias_gelu adds it
        yield from self.linear("ffn_out", times, n, f, d, summed=True)
        yield from self.gelu(times, n, f, with_bias=True)

    def linear(
        self, op: str, times: int, n: int, k: int, out: int, bias: bool = True, summed: bool = False
    ) -> Iterator[Cost]:
        """(n, k) to (n, out). bias: whether it is this op that adds it and sums its gradient, unless what made the
        gradient has `summed` it."""
        a, flops, weight, vector = self.a, 2 * n * k * out, k * out, out * bias
        moved = (n * k + weight + n * out) * a  # of either direction: two are read, the third is written
        product = ("forward", n, out, k)
        yield Cost(op, "forward", "gemm", moved + vector * a, flops, flops, times, product=product)
        for product in (("grad_input", n, k, out), ("grad_weight", out, k, n)):
            yield Cost(op, "backward", "gemm", moved, flops, flops, times, product=product)
        if vector and not summed:
            yield Cost(f"{op} bias gradient", "backward", "other", n * out * a + out * SINGLE, launches=times)
        if a != SINGLE:
            for phase, cast in (("forward", weight + vector), ("backward", weight)):
                yield Cost("weight casts", phase, "other", cast * (SINGLE + a), launches=times)

    def add_norm(self, times: int, n: int, dropout: bool, ends: int) -> Iterator[Cost]:
        """Each result is read twice, and two gradients come back, but for the last of a stack, if it `ends` here."""
        d, row, seed, stats = self.d, n * self.d * self.a, 8 * dropout, 2 * n * SINGLE
        yield Cost("add_norm", "forward", "norm", 3 * row + 2 * d * SINGLE + seed + stats, launches=times)
        for launches, gradients in ((times - ends, 2), (ends, 1)):
            moved = (3 + gradients + dropout) * row + 4 * d * SINGLE + stats + seed
            yield Cost("add_norm", "backward", "norm", moved, launches=launches)

    def gelu(self, times: int, n: int, width: int, with_bias: bool) -> Iterator[Cost]:
        """with_bias: kernels/feed_forward.py, which adds it, sums its gradient and makes GELU's output again."""
        elements, vector = n * width * self.a, width * SINGLE * with_bias
        yield Cost("gelu", "forward", "gelu", 2 * elements + vector, launches=times)
        sums = vector * (1 + -(-n // GELU_GROUP))
        yield Cost("gelu", "backward", "gelu", (3 + with_bias) * elements + sums, launches=times)

    def addition(self, op: str, elements: int, size: int, times: int, kind: str = "other") -> Cost:
        return Cost(op, "backward", kind, 3 * elements * size, launches=times)

    def attention(
        self, times: int, queries: Sequence[int], keys: Sequence[int], dropout: bool, bias: bool
    ) -> Iterator[Cost]:
        heads, dim = self.config.num_heads, self.config.head_dim
        pairs = heads * sum(q * k for q, k in zip(queries, keys, strict=True))
        q, k, lse = sum(queries) * self.d * self.a, sum(keys) * self.d * self.a, heads * sum(queries) * SINGLE
        product = 2 * pairs * dim  # FLOPs; the model's are two forward and four backward

        def kernel(name: str, op: str, phase: str, products: int, model: int, moved: int) -> Cost:
            scores = Scores(name, pairs, dim, bias, dropout)
            return Cost(
                f"attention {op}", phase, "attention", moved, products * product, model * product, times, scores
            )

        ours = bias or dropout
        yield kernel("fwd" if ours else "varlen", "fwd", "forward", 2, 2, 2 * q + 2 * k + lse)
        if ours:
            of_q, of_v = (
                sum(-(-n // ATTENTION_GROUP) for n in lengths) * self.d * SINGLE for lengths in (queries, keys)
            )
            yield kernel("dq", "dq", "backward", 3, 2, 4 * q + 2 * k + 2 * lse + of_q)
            yield kernel("dkv", "dkv", "backward", 4, 2, 2 * q + 4 * k + 2 * lse + of_v)
            yield Cost("sums of tiles' sums", "backward", "other", of_q + of_v, launches=times)
        else:
            yield kernel("varlen", "bwd", "backward", 5, 4, 4 * q + 4 * k + lse)

    # head and loss

    def head(self) -> Iterator[Cost]:
        c, d, m, a = self.config, self.d, self.masked, self.a
        yield from self.linear("dense", 1, m, d, d)
        yield from self.gelu(1, m, d, with_bias=False)
        if a != SINGLE:
            for phase in ("forward", "backward"):
                yield Cost("casts of rows", phase, "other", 2 * m * d * (a + SINGLE), launches=2)
        wide, stats, vectors = m * d * SINGLE, 2 * m * SINGLE, 2 * d * SINGLE
        yield Cost("layer_norm", "forward", "norm", 2 * wide + vectors + stats)
        yield Cost("layer_norm", "backward", "norm", 3 * wide + 2 * vectors + stats)
        yield from self.loss()
        table, tables = c.table_size * d, 1  # a gradient from the loss, one from the embedding
        if c.decoder != "none":
            tables = 2  # and one from the [MASK] row: a table of zeros but for it
            yield Cost("gradient of the [MASK] row", "backward", "other", table * SINGLE)
        yield self.addition("gradient sums of the token table", table, SINGLE, tables)

    def loss(self) -> Iterator[Cost]:
        """masked_cross_entropy, which makes the gradients in the forward pass, in chunks of logits."""
        c, d, m, a = self.config, self.d, self.masked, self.a
        width, table, chunks = c.table_size, c.table_size * d, self.loss_chunks()
        flops, model = 2 * m * d * width, 2 * m * d * c.vocab_size
        if a != SINGLE:
            yield Cost("token table cast", "forward", "loss", table * (SINGLE + a))
        rows, chunk = (m * width + m * d) * a, -(-m // chunks)
        for phase, size, product in (
            ("forward", a, ("forward", chunk, width, d)),
            ("backward", a, ("grad_input", chunk, d, width)),
            ("backward", SINGLE, ("grad_weight", width, d, chunk)),
        ):
            moved = rows + chunks * table * size
            yield Cost("vocabulary projection", phase, "gemm", moved, flops, model, product=product)
        logits = m * width * a
        yield Cost("loss rows", "forward", "loss", 2 * logits + width * SINGLE)
        yield Cost("vocabulary bias gradient", "backward", "loss", logits + chunks * width * SINGLE)
        if chunks > 1:
            yield self.addition("gradient sums over chunks", table, SINGLE, chunks - 1, "loss")
        scaled = 2 * (table + m * d) * SINGLE
        yield Cost("gradients scaled", "backward", "loss", scaled + 2 * m * d * (a + SINGLE) * (a != SINGLE))

    def loss_chunks(self) -> int:
        """The rule of ops/masked_cross_entropy.py."""
        rows = max(1, self.masked)
        most = max(1, LOGITS_BYTES["cuda"] // (self.config.table_size * self.a))
        even = -(-rows // -(-rows // most))
        return -(-rows // max(1, min(most, -(-even // 128) * 128)))


def seconds(cost: Cost, card: Card, products: float) -> float:
    """Of one launch: the longest of its limits. products: the share of the peak that matrix products reach."""
    limits = [cost.bytes / (card.bandwidth * card.copy.share * OF_COPY.share)]
    if cost.kind == "gemm":
        limits.append(cost.flops / (card.peak * products))
    elif cost.scores and cost.scores.kernel == "varlen":
        limits.append(cost.flops / (card.peak * card.flash.share))
    elif cost.scores:
        clocks = max(attention_clocks(cost.scores, card)) / share_of_limits(card, cost.scores.head_dim)
        limits.append(clocks / (card.multiprocessors * card.clock))
    return max(limits)


def attention_clocks(scores: Scores, card: Card) -> tuple[float, float, float]:
    """Clocks of one multiprocessor that our kernel takes in matrix units, exponentials, instruction slots."""
    matrix = OUR_PRODUCTS[scores.kernel] * 2 * scores.head_dim / MATRIX_FLOPS[card.arch]
    slots = issued(card.arch, scores.kernel, scores.bias, scores.dropout) / ISSUES
    return scores.pairs * matrix, scores.pairs / EXPONENTIALS, scores.pairs * slots


@cache
def issued(arch: int, kernel: str, bias: bool, dropout: bool) -> float:
    """Instructions of a thread for a score: those executed under the newest Triton, without moves, most of which are
    not in the binary (with them left out they are within 12% of what is counted there), and on sm_90 without those of
    products, of which its wgmma needs few."""
    asked = {"kernel": f"attention_{kernel}", "bias": bias, "dropout": dropout}
    rows = [row for row in read_rows(EXECUTED, EXECUTED.name, "executed") if asked.items() <= row.items()]
    newest = max(rows, key=lambda row: ([int(part) for part in row["triton"].split(".")], when(row)))
    left_out = {"moves"} if arch == 80 else {"moves", "products"}
    return float(sum(count for kind, count in newest["instructions"].items() if kind not in left_out))


@cache
def share_of_limits(card: Card, head_dim: int) -> float:
    """What part of its limits our attention is taken to reach."""
    scores = card.peak * card.flash.share / (FLASH_PRODUCTS * 2 * head_dim)  # a second
    clocks = card.multiprocessors * card.clock / scores
    return sum(max(attention_clocks(Scores(k, 1, head_dim, False, False), card)) for k in OUR_PRODUCTS) / clocks


def step_of(model: str, batch: int, seq: int, rate: float, dropout: float, bias: bool, itemsize: int = 2) -> Step:
    """A step of a preset on full sequences."""
    preset = presets.get(model)
    rule = "none" if not bias else "t5" if preset.model.relative_bias == "none" else preset.model.relative_bias
    config = presets.change(preset, model={"dropout": dropout, "relative_bias": rule}).model
    require(0.0 < rate < 1.0, f"--rate must lie between 0 and 1, not {rate}")
    require(min(batch, seq) >= 1, "--batch and --seq must be at least 1")
    require(seq <= config.max_positions, f"--seq {seq} is more than {model}'s {config.max_positions} positions")
    return Step(config, masked_lengths(config, [seq] * batch, rate), itemsize)


def projected(model: str, options: argparse.Namespace, card: Card) -> Row:
    step = step_of(model, options.batch, options.seq, options.rate, options.dropout, options.bias)
    config, lengths, costs = step.config, step.lengths, list(step.costs())
    ranges: dict[str, list[float]] = {kind: [] for kind in CLASSES}
    for share in (bound.share for bound in card.products):
        for kind, ms in ranges.items():
            ms.append(round(sum(1000 * seconds(c, card, share) * c.launches for c in costs if c.kind == kind), 3))
    taken = [sum(ms[i] for ms in ranges.values()) / 1000 for i in range(2)]
    flops = training_flops(config, *lengths)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": environment("cpu")["commit"],
        "device": card.name,
        "model": model,
        "precision": "bf16",
        "batch": options.batch,
        "seq": options.seq,
        "rate": options.rate,
        "dropout": options.dropout,
        "bias": config.relative_bias,
        "products": [bound.share for bound in card.products],
        "tokens_per_s": [round(sum(lengths.original) / s) for s in taken],
        "mfu": [round(flops / s / card.peak, 4) for s in taken],
        "ms": ranges,
    }


def lines(card: Card, rows: Sequence[Row]) -> Iterator[str]:
    yield f"{card.name}: a projection; assumed or observed elsewhere, as shares of the data sheet:"
    least, largest = card.products
    yield f"  products {least.share:g} ({least.reason}) to {largest.share:g} ({largest.reason})"
    ours = Share(share_of_limits(card, 64), "of the limits by executed counts; assumed: as fast as PyTorch's if plain")
    shares = {"copy": card.copy, "row kernels, of the copy": OF_COPY, "attention, PyTorch's": card.flash}
    yield from (f"  {what} {share:.2g} ({reason})" for what, (share, reason) in {**shares, "attention": ours}.items())
    for row in rows:
        speed, mfu = row["tokens_per_s"], row["mfu"]
        yield f"{row['model']}: {speed[0]:,} to {speed[1]:,} tokens/s, MFU {mfu[0]:.1%} to {mfu[1]:.1%}; ms by class:"
        yield "  " + ", ".join(
            f"{kind} {' to '.join(f'{x:.1f}' for x in dict.fromkeys(ms))}" for kind, ms in row["ms"].items()
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.projection", description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs="+", choices=list(CARDS), default=list(CARDS))
    parser.add_argument("--models", default=",".join(MODELS), help="presets, separated by commas")
    parser.add_argument("--batch", type=int, default=256, help="sequences")
    parser.add_argument("--seq", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--rate", type=float, default=0.15, help="mask rate")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--bias", action=argparse.BooleanOptionalAction, default=False, help="relative position bias")
    parser.add_argument("--out", type=Path, help="JSONL file that the rows are appended to")
    options = parser.parse_args(arguments)
    try:
        for name in options.devices:
            rows = [projected(model, options, CARDS[name]) for model in options.models.split(",")]
            print("\n".join(lines(CARDS[name], rows)))
            if options.out:
                append_rows(options.out, rows)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
