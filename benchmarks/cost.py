"""What a training step computes and moves, counted: every kind of launch with its FLOPs, the bytes it reads and writes,
and what the forward pass keeps for the backward pass.

Bytes are the fewest a launch can move: each tensor argument read once, each result written once, of a table only as
many rows as there are look-ups. FLOPs are counted twice over: what the hardware does, attention's second pass over the
scores included, and model FLOPs, whose sum is that of maelm_fast.model.flops. One micro-batch makes an update. Left
out: whatever is smaller than one vector a row, as the arithmetic on bias tables and on losses.

Shapes: T encoder rows, N decoder rows, M masked tokens, d hidden size, f feed-forward size, H heads, V rows of the
token table, P rows of a position table; a, bytes of an activation; parameters and their gradients have four bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from maelm_fast.batch import PackedBatch, layout_of
from maelm_fast.config import ModelConfig, require
from maelm_fast.model.maelm import MaeLm
from maelm_fast.ops.attention_backends import native
from maelm_fast.ops.attention_inputs import AttentionLayout, Call
from maelm_fast.ops.masked_cross_entropy import LOGITS_BYTES
from maelm_fast.ops.reference.mask_and_pack import count_of

Pairs = list[tuple[int, int]]  # each sequence's queries and keys
SINGLE = 4  # bytes of a parameter, a gradient, a row's statistic
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GELU_GROUP = 64  # rows whose bias gradient one program of kernels/feed_forward.py sums


class Product(NamedTuple):
    """A matrix product with an (m, n) result, contracted over k. How its operands lie: forward (m, k) (n, k)^T,
    grad_input (m, k) (k, n), grad_weight (k, m)^T (k, n)."""

    layout: str
    m: int
    n: int
    k: int


class Scores(NamedTuple):
    """Attention's pairs of query and key, over all heads, in one launch of a kernel on a GPU.

    kernel: varlen_fwd, varlen_bwd (PyTorch's or flash-attn's); fwd, dq, dkv (kernels/attention.py)."""

    kernel: str
    pairs: int
    head_dim: int
    bias: bool
    dropout: bool


class Attention(NamedTuple):
    """The compiled attention of a CPU (csrc/ops/attention.cpp) on sequences of this shape, whose elements are the pairs
    of query and key over all heads. direction: fwd or bwd. queries, keys: of a sequence, at some of its positions."""

    direction: str
    queries: int
    keys: int
    positions: int
    heads: int
    head_dim: int
    bias: bool
    dropout: bool

    def __str__(self) -> str:
        return (
            f"attention {self.direction} of {self.queries} queries and {self.keys} keys at {self.positions} positions, "
            f"{self.heads} x {self.head_dim}" + ", bias" * self.bias + ", dropout" * self.dropout
        )


class Elements(NamedTuple):
    """`number` elements that a function costs more than their bytes, on a CPU."""

    function: str | Attention
    number: int


@dataclass(frozen=True)
class Cost:
    """One kind of launch. part: encoder, decoder, head or update. phase: forward, backward or update. kind: one of
    benchmarks.classes. read, written: bytes, flops, model_flops: of one of the `launches`."""

    part: str
    op: str
    phase: str
    kind: str
    read: int
    written: int
    flops: int = 0
    model_flops: int = 0
    launches: int = 1
    work: Product | Scores | Elements | None = None

    @property
    def bytes(self) -> int:
        return self.read + self.written


class Lengths(NamedTuple):
    """Each sequence's rows in the encoder, original tokens and masked tokens."""

    encoder: tuple[int, ...]
    original: tuple[int, ...]
    masked: tuple[int, ...]


def lengths_of(batch: PackedBatch) -> Lengths:
    return Lengths(batch.lengths, batch.decoder_lengths, batch.masked_lengths)


def masked_lengths(config: ModelConfig, original: Sequence[int], rate: float) -> Lengths:
    """With a fixed count of masks, each of them [MASK]."""
    masked = tuple(count_of(n, 0.5, rate) for n in original)
    seen = original if config.decoder == "none" else [n - m for n, m in zip(original, masked, strict=True)]
    return Lengths(tuple(seen), tuple(original), masked)


@dataclass(frozen=True)
class Step:
    """What is counted. device: cuda or cpu, which decides the backends; precision: bf16 (autocast) or fp32. Raises
    UserError for what is not counted: the decoders of the ablations; on a CPU bf16, and any step without the compiled
    attention."""

    config: ModelConfig
    lengths: Lengths
    precision: str = "bf16"
    device: str = "cuda"

    def __post_init__(self) -> None:
        c = self.config
        require(
            c.decoder in ("none", "self", "cross"), f"a {c.decoder} decoder is not counted; none, self and cross are"
        )
        own = c if c.decoder == "none" else c.decoder_config
        same = (own.hidden_size, own.num_heads) == (c.hidden_size, c.num_heads)
        require(same, "a decoder of another width or other heads than the encoder's is not counted")
        if self.device == "cpu":
            require(self.precision == "fp32", "a CPU's step is counted in fp32 only")
            q = torch.empty(0, c.num_heads, c.head_dim)
            call = Call(q, q, q, AttentionLayout(layout_of([])), None, 1.0, 0.0, None, 0)
            reasons = "; ".join(native.why_not(call))
            require(not reasons, f"a CPU's step is counted with the compiled attention only: {reasons}")

    @property
    def itemsize(self) -> int:
        return DTYPES[self.precision].itemsize


@functools.cache
def parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in MaeLm(config).parameters())


def count(step: Step) -> list[Cost]:
    """Every kind of launch of a step, in order."""
    return list(_Counter(step).costs())


class _Counter:
    def __init__(self, step: Step) -> None:
        config, self.step = step.config, step
        self.d, self.f, self.a = config.hidden_size, config.ffn_size, step.itemsize
        self.rows, self.slots, self.masked = (sum(x) for x in step.lengths)
        self.cuda = step.device == "cuda"

    def costs(self) -> Iterator[Cost]:
        config, lengths = self.step.config, self.step.lengths
        dropout, bias = config.dropout > 0, config.relative_bias != "none"
        last = config.decoder == "none"  # its last layer computes masked tokens only
        yield from self.embedding(dropout)
        everyone, few = _pairs(lengths.encoder, lengths.encoder), _pairs(lengths.masked, lengths.encoder)
        yield from self.block("encoder", config.num_layers - last, self.rows, everyone, dropout, bias)
        if last:
            yield from self.sliced_block("encoder", 1, self.masked, self.rows, few, dropout, bias, rows=True)
        if not last:
            yield from self.scatter()
        own = config.decoder_relative_bias
        if config.decoder == "self":
            whole = _pairs(lengths.original, lengths.original)
            yield from self.block("decoder", config.decoder_layers - 1, self.slots, whole, False, own)
            ends = _pairs(lengths.masked, lengths.original)
            yield from self.sliced_block("decoder", 1, self.masked, self.slots, ends, False, own, rows=True)
        elif config.decoder == "cross":
            layers = config.decoder_layers
            yield from self.sliced_block("decoder", layers, self.masked, self.rows, few, False, own, rows=False)
            # every layer's and the scatter's gradient of the encoder's outputs
            yield self.addition("decoder", "gradient sums", self.rows * self.d, self.a, layers)
        yield from self.head()
        yield from self.update()

    # embedding, decoder input

    def embedding(self, dropout: bool) -> Iterator[Cost]:
        n, d, c = self.rows, self.d, self.step.config
        tables = (min(n, c.table_size) + min(n, c.max_positions)) * d * SINGLE
        seed, stats = 8 * dropout, 2 * n * SINGLE
        given = 2 * 4 * n + tables + seed
        yield Cost(
            "encoder", "embed_packed", "forward", "norm", given + 2 * d * SINGLE, n * d * self.a + 2 * n * SINGLE
        )
        whole = (c.table_size + c.max_positions) * d * SINGLE
        yield Cost(
            "encoder", "embed_packed", "backward", "norm", given + n * d * self.a + d * SINGLE + stats,
            whole + 2 * d * SINGLE,
        )  # fmt: skip
        if self.cuda:
            yield Cost("encoder", "zeroed tables", "backward", "norm", 0, whole)

    def scatter(self) -> Iterator[Cost]:
        """Of the cross-attention decoder, masked slots only, which name no encoder row; its gradient is whole."""
        c, d = self.step.config, self.d
        cross = c.decoder == "cross"
        slots, named = (self.masked, 0) if cross else (self.slots, self.rows)
        given = named * d * self.a + 2 * 4 * slots + (min(slots, c.max_positions) * d + 3 * d) * SINGLE
        stats = 2 * slots * SINGLE
        yield Cost("decoder", "scatter_to_decoder", "forward", "norm", given, slots * d * self.a + stats)
        yield Cost(
            "decoder", "scatter_to_decoder", "backward", "norm", given + slots * d * self.a + stats,
            self.rows * d * self.a + (c.max_positions * d + 3 * d) * SINGLE,
        )  # fmt: skip

    # layers

    def block(self, part: str, times: int, n: int, pairs: Pairs, dropout: bool, bias: bool) -> Iterator[Cost]:
        """`times` layers in which all n rows are queries and keys."""
        if times == 0:
            return
        d = self.d
        yield from self.linear(part, "qkv", times, n, d, 3 * d)
        yield from self.attention(part, times, n, n, pairs, dropout, bias)
        moved = 3 * n * d * self.a
        yield Cost(part, "gradients of q, k, v side by side", "backward", "other", moved, moved, launches=times)
        yield from self.rest_of_block(part, times, n, dropout)
        yield self.addition(part, "gradient sums", n * d, self.a, 2 * times)

    def sliced_block(
        self, part: str, times: int, m: int, n: int, pairs: Pairs, dropout: bool, bias: bool, rows: bool
    ) -> Iterator[Cost]:
        """`times` layers with m queries and n keys. rows: the queries are chosen from the keys' rows."""
        d, a = self.d, self.a
        if rows:
            chosen = m * d * a
            yield Cost(part, "chosen rows", "forward", "other", chosen + 4 * m, chosen, launches=times)
            yield Cost(part, "chosen rows", "backward", "other", 2 * chosen + 4 * m, n * d * a + chosen, launches=times)
            yield self.addition(part, "gradient sums", n * d, a, times)
        yield from self.linear(part, "q", times, m, d, d)
        yield from self.linear(part, "kv", times, n, d, 2 * d)
        whole = 3 * d * (d + 1) * SINGLE
        # of the slices of one weight: each one's gradient put into zeros, then added
        yield Cost(part, "gradients of weight slices", "backward", "other", 3 * whole, 4 * whole, launches=times)
        yield from self.attention(part, times, m, n, pairs, dropout, bias)
        moved = 2 * n * d * a
        yield Cost(part, "gradients of q, k, v side by side", "backward", "other", moved, moved, launches=times)
        yield from self.rest_of_block(part, times, m, dropout)
        yield self.addition(part, "gradient sums", m * d, a, 2 * times)

    def rest_of_block(self, part: str, times: int, n: int, dropout: bool) -> Iterator[Cost]:
        d, f = self.d, self.f
        yield from self.linear(part, "out", times, n, d, d)
        yield from self.add_norm(part, 2 * times, n, dropout)
        yield from self.linear(part, "ffn_in", times, n, d, f, bias=not self.cuda)
        yield from self.linear(part, "ffn_out", times, n, f, d)
        yield from self.gelu(part, times, n, f, with_bias=self.cuda)

    def linear(self, part: str, op: str, times: int, n: int, k: int, out: int, bias: bool = True) -> Iterator[Cost]:
        """(n, k) to (n, out). bias: whether it is this op that adds it and sums its gradient."""
        a, flops = self.a, 2 * n * k * out
        weight, vector = k * out, out * bias

        def product(phase: str, layout: str, m: int, columns: int, inner: int) -> Cost:
            read = (m * inner + inner * columns) * a + (vector * a if phase == "forward" else 0)
            work = Product(layout, m, columns, inner)
            return Cost(part, op, phase, "gemm", read, m * columns * a, flops, flops, times, work)

        yield product("forward", "forward", n, out, k)
        yield product("backward", "grad_input", n, k, out)
        yield product("backward", "grad_weight", out, k, n)
        if vector:
            yield Cost(part, f"{op} bias gradient", "backward", "other", n * out * a, out * a, launches=times)
        if a != SINGLE:
            cast = weight + vector
            yield Cost(part, "weight casts", "forward", "other", cast * SINGLE, cast * a, launches=times)
            yield Cost(part, "weight casts", "backward", "other", cast * a, cast * SINGLE, launches=times)

    def add_norm(self, part: str, times: int, n: int, dropout: bool) -> Iterator[Cost]:
        d, row, seed = self.d, n * self.d * self.a, 8 * dropout
        stats = 2 * n * SINGLE
        yield Cost(part, "add_norm", "forward", "norm", 2 * row + 2 * d * SINGLE + seed, row + stats, launches=times)
        yield Cost(
            part, "add_norm", "backward", "norm", 3 * row + d * SINGLE + stats + seed,
            (2 if dropout else 1) * row + 2 * d * SINGLE, launches=times,
        )  # fmt: skip

    def gelu(self, part: str, times: int, n: int, width: int, with_bias: bool) -> Iterator[Cost]:
        """with_bias: kernels/feed_forward.py, which adds it, sums its gradient and makes GELU's output again."""
        elements, vector = n * width * self.a, width * SINGLE * with_bias
        work = [None if self.cuda else Elements(name, n * width) for name in ("gelu", "gelu_backward")]
        yield Cost(part, "gelu", "forward", "gelu", elements + vector, elements, launches=times, work=work[0])
        sums = -(-n // GELU_GROUP) * vector
        written = (2 if with_bias else 1) * elements + sums
        yield Cost(part, "gelu", "backward", "gelu", 2 * elements + vector, written, launches=times, work=work[1])

    def addition(self, part: str, op: str, elements: int, size: int, times: int, kind: str = "other") -> Cost:
        return Cost(part, op, "backward", kind, 2 * elements * size, elements * size, launches=times)

    # attention

    def attention(
        self, part: str, times: int, m: int, n: int, pairs: Pairs, dropout: bool, bias: bool
    ) -> Iterator[Cost]:
        """m queries, n keys, pairs of them by sequence."""
        heads, dim = self.step.config.num_heads, self.step.config.head_dim
        scores = heads * sum(q * k for q, k in pairs)
        q, k, lse = m * self.d * self.a, n * self.d * self.a, heads * m * SINGLE
        step = 2 * scores * dim  # FLOPs of one product; the model's are two forward and four backward

        def kernel(name: str, op: str, phase: str, products: int, model: int, read: int, written: int) -> Cost:
            work: Scores | Elements = Scores(name, scores, dim, bias, dropout)
            if not self.cuda:
                work = Elements(Attention(name, *self.mean_lengths(pairs), heads, dim, bias, dropout), scores)
            return Cost(part, op, phase, "attention", read, written, products * step, model * step, times, work)

        if not self.cuda:
            yield kernel("fwd", "attention fwd", "forward", 2, 2, q + 2 * k, q + lse)
            yield kernel("bwd", "attention bwd", "backward", 5, 4, 2 * q + 2 * k + lse, q + 2 * k)
            return
        ours = bias or dropout
        yield kernel("fwd" if ours else "varlen_fwd", "attention fwd", "forward", 2, 2, q + 2 * k, q + lse)
        if ours:
            yield kernel("dq", "attention dq", "backward", 3, 2, 3 * q + 2 * k + lse, q + lse)
            yield kernel("dkv", "attention dkv", "backward", 4, 2, 2 * q + 2 * k + 2 * lse, 2 * k)
        else:
            yield kernel("varlen_bwd", "attention bwd", "backward", 5, 4, 3 * q + 2 * k + lse, q + 2 * k)

    def mean_lengths(self, pairs: Pairs) -> tuple[int, int, int]:
        """Queries, keys and positions of a sequence, of those that have pairs."""
        used = [(q, k, n) for (q, k), n in zip(pairs, self.step.lengths.original, strict=True) if q * k] or [(1, 1, 1)]
        queries, keys, positions = (round(sum(x) / len(used)) for x in zip(*used, strict=True))
        return queries, keys, positions

    # head, loss, update

    def head(self) -> Iterator[Cost]:
        c, d, m, a = self.step.config, self.d, self.masked, self.a
        yield from self.linear("head", "dense", 1, m, d, d)
        yield from self.gelu("head", 1, m, d, with_bias=False)
        elements = m * d
        if a != SINGLE:
            for phase in ("forward", "backward"):
                yield Cost("head", "casts of rows", phase, "other", elements * (a + SINGLE), elements * (a + SINGLE),
                           launches=2)  # fmt: skip
        wide, stats, vectors = elements * SINGLE, 2 * m * SINGLE, 2 * d * SINGLE
        yield Cost("head", "layer_norm", "forward", "norm", wide + vectors, wide + stats)
        yield Cost("head", "layer_norm", "backward", "norm", 2 * wide + stats + vectors, wide + vectors)
        yield from self.loss()
        table = c.table_size * d
        tables = 1  # a gradient from the loss, one from the embedding
        if c.decoder != "none":
            tables = 2  # and one from the [MASK] row: a table of zeros but for it
            yield Cost("head", "gradient of the [MASK] row", "backward", "other", 0, table * SINGLE)
        yield self.addition("head", "gradient sums of the token table", table, SINGLE, tables)

    def loss(self) -> Iterator[Cost]:
        """masked_cross_entropy, which makes the gradients in the forward pass, in chunks of r rows."""
        c, d, m, a = self.step.config, self.d, self.masked, self.a
        width, table = c.table_size, c.table_size * d
        chunks, r = loss_chunks(self.step)
        hardware, model = 2 * m * d * width, 2 * m * d * c.vocab_size
        if a != SINGLE:
            yield Cost("head", "token table cast", "forward", "loss", table * SINGLE, table * a)
        for phase, layout, rows, columns, inner, read, written in (
            ("forward", "forward", r, width, d, m * d + chunks * table, m * width * a),
            ("backward", "grad_input", r, d, width, m * width + chunks * table, m * d * a),
            ("backward", "grad_weight", width, d, r, m * (width + d), chunks * table * SINGLE),
        ):
            yield Cost("head", "vocabulary projection", phase, "gemm", read * a, written, hardware, model, 1,
                       Product(layout, rows, columns, inner))  # fmt: skip
        logits = m * width * a
        yield Cost("head", "loss rows", "forward", "loss", logits + width * SINGLE, logits, launches=1,
                   work=None if self.cuda else Elements("softmax", m * width))  # fmt: skip
        yield Cost("head", "vocabulary bias gradient", "backward", "loss", logits, chunks * width * SINGLE)
        if chunks > 1:
            yield self.addition("head", "gradient sums over chunks", table, SINGLE, chunks - 1, "loss")
        yield Cost("head", "gradients scaled", "backward", "loss", table * SINGLE, table * SINGLE)
        rows_wide = m * d * SINGLE
        casts = 2 * (m * d * a + rows_wide) if a != SINGLE else 0
        yield Cost("head", "gradients scaled", "backward", "loss", rows_wide + casts // 2, rows_wide + casts // 2)

    def update(self) -> Iterator[Cost]:
        size = parameters(self.step.config) * SINGLE
        yield Cost("update", "gradient norm", "update", "optimizer", size, 0)
        yield Cost("update", "gradient clipping", "update", "optimizer", size, size)
        yield Cost("update", "AdamW", "update", "optimizer", 4 * size, 3 * size)


def _pairs(queries: Sequence[int], keys: Sequence[int]) -> Pairs:
    return list(zip(queries, keys, strict=True))


def loss_chunks(step: Step) -> tuple[int, int]:
    """How many chunks of logits there are, and the rows of one: the rule of ops/masked_cross_entropy.py."""
    rows = max(1, sum(step.lengths.masked))
    most = max(1, LOGITS_BYTES[step.device] // (step.config.table_size * step.itemsize))
    even = -(-rows // -(-rows // most))
    chunk = max(1, min(most, -(-even // 128) * 128))
    return -(-rows // chunk), min(rows, chunk)


# memory


def saved(step: Step) -> dict[str, int]:
    """Bytes kept from the forward pass for the backward pass, by what they are; parameters and the batch excluded."""
    return _Saved(step).kept


class _Saved:
    def __init__(self, step: Step) -> None:
        c, self.step = step.config, step
        self.kept: dict[str, int] = {}
        self.d, self.a = c.hidden_size, step.itemsize
        n, slots, m = (sum(x) for x in step.lengths)
        last = c.decoder == "none"
        self.keep("statistics of norms", 2 * n * SINGLE)
        self.block(c.num_layers - last, n)
        if last:
            self.sliced_block(m, n)
        elif c.decoder == "self":
            self.keep("encoder output", n * self.d * self.a)
            self.keep("statistics of norms", 2 * slots * SINGLE)
            self.block(c.decoder_layers - 1, slots)
            self.sliced_block(m, slots)
        else:
            self.keep("encoder output", n * self.d * self.a)
            self.keep("statistics of norms", 2 * m * SINGLE)
            for _ in range(c.decoder_layers):
                self.sliced_block(m, n, memory=True)
        # head: the decoder's output, dense's output, the norm's input, the gradients that the loss has made
        self.weights(self.d * self.d)
        self.keep("head", m * self.d * (2 * self.a + SINGLE) + 2 * m * SINGLE)
        self.keep("gradients made by the loss", m * self.d * self.a + c.table_size * (self.d + 1) * SINGLE)

    def keep(self, name: str, size: int) -> None:
        self.kept[name] = self.kept.get(name, 0) + size

    def weights(self, elements: int) -> None:
        if self.a != SINGLE:
            self.keep("weights in bf16", elements * self.a)

    def block(self, times: int, n: int) -> None:
        if times == 0:
            return
        row = self.d * self.a * times
        self.keep("layer inputs", n * row)
        self.keep("q, k, v", 3 * n * row)
        self.rest(times, n)
        self.weights(times * 3 * self.d * self.d)

    def sliced_block(self, m: int, n: int, memory: bool = False) -> None:
        """memory: keys come from the encoder's output, which is kept once for all layers."""
        row = self.d * self.a
        self.keep("layer inputs", m * row + (0 if memory else n * row))
        self.keep("q, k, v", (m + 2 * n) * row)
        self.rest(1, m)
        self.weights(3 * self.d * self.d)

    def rest(self, times: int, n: int) -> None:
        row, f = self.d * self.a, self.step.config.ffn_size
        self.keep("attention outputs", times * n * row)
        self.keep("log-sum-exp", times * n * self.step.config.num_heads * SINGLE)
        self.keep("outputs of the attention projection", times * n * row)
        self.keep("norm outputs within layers", times * n * row)
        self.keep("feed-forward, inside", times * n * f * self.a * (1 if self.step.device == "cuda" else 2))
        self.keep("outputs of the feed-forward", times * n * row)
        self.keep("statistics of norms", times * 4 * n * SINGLE)
        self.weights(times * (self.d * self.d + 2 * self.d * f))


def peak_memory(step: Step) -> int:
    """Bytes at the worse of two moments, weights and optimiser states included: while the last chunk's logits exist,
    and while the backward pass is in the feed-forward of the last layer that has all rows."""
    c = step.config
    kept, table = sum(saved(step).values()), c.table_size * c.hidden_size
    static = 3 * SINGLE * parameters(c)
    chunks, rows = loss_chunks(step)
    at_loss = rows * c.table_size * step.itemsize + table * step.itemsize * (step.itemsize != SINGLE)
    at_loss += table * SINGLE * (chunks > 1)
    widest = sum(step.lengths.original) if c.decoder == "self" else sum(step.lengths.encoder)
    in_backward = widest * (2 * c.ffn_size + 2 * c.hidden_size) * step.itemsize
    return static + kept + max(at_loss, in_backward)
