"""Attention over packed sequences against what else computes it, in one process, taking turns.

    python -m benchmarks.attention --list
    python -m benchmarks.attention --device cuda --out benchmarks/results/attention_cuda.jsonl
    python -m benchmarks.attention --device cpu --cases kept --sequences 1

1. Gate: on two sequences of the case, ours must agree with the reference in output and every gradient, or nothing of
   the case is timed. At the size that is timed, what computes the same as ours must agree with ours, or it is skipped.
2. Time: A B C A B C ...; by events on a GPU, the L2 cache flushed between calls. A ratio is the median of the rounds'
   ratios to the yardstick, with quartiles. Ours also runs with other tiles that may be faster, those of
   kernels/attention_tiles.py's CANDIDATES.
3. TFLOP/s count 4 head_dim per pair and head forward, 2.5 times that backward, whatever a kernel recomputes.

Each phase's rows are written before the next begins. Who fails, wherever, has a row with the reason, and the others go
on; the exit status is 1 if ours failed.

The yardstick on a GPU is PyTorch's varlen attention, in every case without bias and dropout, which it does not have;
on a CPU, the reference. Which kernel it takes depends on the release (FlashAttention 2, cuDNN).

What the layers of a model share is made before the clock starts, and timed by itself, as phase "once": the bias spread
out for our kernel, FlexAttention's block mask, the bias of all pairs for SDPA. SDPA is spared the padding and the way
back from the gradient of what was written out to the line's, which the others' backward passes give. PyTorch's cuDNN
attention has no gradient of a bias at all: for "cudnn", dense attention forced to it, the bias is a constant, which is
kinder than training is.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measure import GATE, Call, Failed, distance, environment, quartiles, reason, release, times_base, turns
from benchmarks.program import Parser, count, ours_failed, recorded, several, start
from benchmarks.registry import t5_line
from benchmarks.rows import Row
from maelm_fast import ops
from maelm_fast.batch import layout_of
from maelm_fast.errors import UserError
from maelm_fast.kernels import attention_tiles
from maelm_fast.ops import AttentionLayout, PositionBias
from maelm_fast.ops.attention_backends import flex, triton

HEADS, HEAD_DIM = 12, 64
DROPOUT = 0.1
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
SEQUENCES = {"cpu": 2, "cuda": 256}
ROUNDS = {"cpu": 2, "cuda": 5}
CONTESTANTS = {
    "cpu": {"ours": "native", "grouped": "grouped", "reference": "reference", "sdpa": "sdpa"},
    "cuda": {
        "ours": "triton",
        **{f"ours, {candidate}": "triton" for candidate in attention_tiles.CANDIDATES},
        "torch varlen": "torch",
        "flash-attn": "flash",
        "flex": "flex",
        "cudnn": "cudnn",
        "sdpa": "sdpa",
        "xformers": "xformers",
    },
}
DENSE = ("cudnn", "sdpa")
YARDSTICK = {"cpu": "reference", "cuda": "torch varlen"}
PHASES = {"fwd+bwd": 3.5, "fwd": 1.0, "once": 0.0}  # FLOPs, times those of a forward pass
WRITTEN_OUT_LIMIT = 20e9  # bytes
LINE_STD = 0.5  # of the bias table: enough that a gate sees a bias that is left out


@dataclass(frozen=True)
class Case:
    """Sequences of `positions` positions, `kept` of them at random; None: documents of log-normal length, whole."""

    positions: int
    kept: float | None

    def lengths(self, tokens: int) -> tuple[int, ...]:
        """Of sequences that together have about this many tokens."""
        if self.kept is not None:
            length = int(self.kept * self.positions + 0.5)
            return (length,) * max(1, round(tokens / length))
        draw = np.random.default_rng(0)
        drawn = np.clip(np.exp(draw.normal(5.5, 1.0, tokens)), 2, self.positions).astype(int)
        return tuple(drawn[: int(np.searchsorted(np.cumsum(drawn), tokens)) + 1].tolist())

    def layout(self, lengths: tuple[int, ...], device: str) -> AttentionLayout:
        draw = np.random.default_rng(1)
        places = [
            np.arange(n) if self.kept is None else np.sort(draw.choice(self.positions, n, replace=False))
            for n in lengths
        ]
        return AttentionLayout(layout_of(lengths, torch.from_numpy(np.concatenate(places)).int()).to(device))


CASES = {"kept": Case(512, 0.85), "documents": Case(2048, None), "1024": Case(1024, 0.85), "2048": Case(2048, 0.85)}


@dataclass(frozen=True)
class Setting:
    """One case with or without bias and dropout. tokens: about how many there are."""

    name: str
    bias: bool
    dropout: float
    tokens: int
    device: str

    @property
    def case(self) -> Case:
        return CASES[self.name]

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.case.lengths(self.tokens)

    @property
    def label(self) -> str:
        return f"{self.name}, {'bias' if self.bias else 'no bias'}, dropout {self.dropout:g}"

    @property
    def flops(self) -> float:
        """Of a forward pass."""
        return 4.0 * sum(n * n for n in self.lengths) * HEADS * HEAD_DIM

    @property
    def written_out(self) -> int:
        """Bytes of the bias of all pairs of the padded batch, and of its gradient."""
        longest = max(self.lengths)
        return 2 * len(self.lengths) * HEADS * longest * _aligned(longest) * DTYPE[self.device].itemsize

    @property
    def too_large(self) -> bool:
        return self.bias and self.written_out > WRITTEN_OUT_LIMIT

    def names(self) -> dict[str, str]:
        """What each contestant is called here, by its name."""
        plain = ", plain" if self.bias or self.dropout else ""
        dense = ", bias written out" if self.bias else ""
        called = {"torch varlen": "torch varlen" + plain, "sdpa": "sdpa" + dense, "cudnn": "cudnn" + dense}
        return {name: called.get(name, name) for name in CONTESTANTS[self.device]}


class Work:
    """The tensors of a setting: q, k, v and the upstream gradient (T, heads, head_dim), the line (heads, 2R+1)."""

    def __init__(self, setting: Setting, lengths: tuple[int, ...]) -> None:
        device, case = setting.device, setting.case
        torch.manual_seed(0)
        shape = (4, sum(lengths), HEADS, HEAD_DIM)
        *qkv, self.upstream = torch.randn(shape, device=device, dtype=DTYPE[device]).unbind()
        self.q, self.k, self.v = (x.clone().requires_grad_() for x in qkv)
        self.layout = case.layout(lengths, device)
        self.positions = case.positions
        self.line = t5_line(case.positions, LINE_STD, device).requires_grad_() if setting.bias else None
        self.dropout = setting.dropout
        self.seed = torch.tensor(7, device=device)

    def bias(self) -> PositionBias | None:
        return None if self.line is None else PositionBias(self.line, self.positions)


@dataclass(frozen=True)
class Contestant:
    """forward: a differentiable output. wanted: what the backward pass differentiates by, queries, keys and values
    first. packed: an output, or a gradient of these three, as (T, heads, head_dim). same: computes what ours does.
    once: makes what layers share, where there is such a thing. within: what holds while it runs."""

    name: str
    backend: str
    forward: Callable[[], Tensor]
    wanted: list[Tensor]
    upstream: Tensor
    packed: Callable[[Tensor], Tensor]
    same: bool = True
    once: Call | None = None
    within: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def results(self) -> list[Tensor]:
        """Output and gradients, of the packed shape; the line's last, where it is among them."""
        with self.within():
            out = self.forward()
            grads = torch.autograd.grad(out, self.wanted, self.upstream)
        packed = [self.packed(x.detach()) for x in (out, *grads[:3])]
        return packed + [g for g in grads[3:] if g.dim() == 2]  # SDPA has the written-out bias's, not the line's

    def call(self, phase: str) -> Call:
        def forward() -> Tensor:
            with torch.no_grad():
                return self.forward()

        def both() -> Any:
            return torch.autograd.grad(self.forward(), self.wanted, self.upstream)

        def run() -> Any:
            with self.within():
                return chosen()

        chosen = {"fwd": forward, "fwd+bwd": both, "once": self.once or forward}[phase]
        return run


def contestant(name: str, backend: str, work: Work) -> Contestant:
    """UserError where it cannot run, and when."""
    if backend in DENSE:
        return padded_sdpa(name, backend, work)
    plain = backend == "torch"  # the yardstick
    line = None if plain else work.line
    # Our kernel's lookup is made once for all layers. What grouped writes out belongs to one graph: new at every call.
    kept = work.bias() if backend == "triton" else None
    candidate = name.removeprefix("ours, ") if name.startswith("ours, ") else None
    layout = AttentionLayout(work.layout.queries, work.layout.keys) if candidate else work.layout

    def forward() -> Tensor:
        return ops.attention(
            work.q,
            work.k,
            work.v,
            layout,
            None if plain else kept or work.bias(),
            dropout_p=0.0 if plain else work.dropout,
            seed=work.seed,
            backend=backend,
        )

    wanted = [work.q, work.k, work.v] + ([] if line is None else [line])
    same = not plain or (work.line is None and work.dropout == 0.0)
    shared = {
        "triton": None if line is None else lambda: triton.lookup_of(PositionBias(line, work.positions)),
        "flex": lambda: flex.block_mask(work.layout.queries, work.layout.keys),
    }
    within = partial(attention_tiles.trying, candidate) if candidate else contextlib.nullcontext
    return Contestant(name, backend, forward, wanted, work.upstream, lambda x: x, same, shared.get(backend), within)


def padded_sdpa(name: str, backend: str, work: Work) -> Contestant:
    """F.scaled_dot_product_attention on sequences padded to the longest one's length L, the bias written out for each.

    Its mask is (S, heads, L, L), -inf where there is no key; without bias (S, 1, 1, L), and none without pads."""
    layout = work.layout.queries
    lengths = torch.tensor(layout.lengths, device=work.q.device)
    valid = torch.arange(layout.max_seqlen, device=lengths.device) < lengths[:, None]  # (S, L)
    starts = layout.cu_seqlens[:-1].long()[:, None]
    rows = starts + torch.where(valid, torch.arange(valid.shape[1], device=lengths.device), 0)
    q, k, v = (x.detach()[rows].transpose(1, 2).contiguous().requires_grad_() for x in (work.q, work.k, work.v))
    upstream = (work.upstream[rows] * valid[:, :, None, None]).transpose(1, 2)
    mask = None if bool(valid.all()) else valid[:, None, None, :]
    wanted, once = [q, k, v], None
    if work.line is not None:
        once = partial(written_out, work.line.detach().to(q.dtype), layout.positions.long()[rows], valid)
        mask = once()
        if backend == "sdpa":
            wanted.append(mask.requires_grad_())

    def forward() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if backend == "cudnn" else contextlib.nullcontext():
            return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=work.dropout)

    # its dropout draws other bits
    same = work.dropout == 0.0
    return Contestant(name, backend, forward, wanted, upstream, lambda x: x.transpose(1, 2)[valid], same, once)


def written_out(line: Tensor, positions: Tensor, valid: Tensor) -> Tensor:
    """(S, heads, L, L): the bias of every pair, -inf where there is no key. positions, valid: (S, L). Rows lie a
    multiple of 8 elements apart, or SDPA would copy it at every call."""
    longest, reach = positions.shape[1], line.shape[1] // 2
    distances = positions[:, None, :] - positions[:, :, None]
    index = F.pad(distances.clamp_(-reach, reach) + reach, (0, _aligned(longest) - longest))
    bias = line[:, index].transpose(0, 1)[..., :longest]
    return bias if bool(valid.all()) else bias.masked_fill_(~valid[:, None, None, :], float("-inf"))


def _aligned(length: int) -> int:
    return -(-length // 8) * 8


def gate(setting: Setting) -> float:
    """The largest relative distance of ours from the reference. Failed if it is too large."""
    work = Work(setting, setting.lengths[:2])
    ours, reference = (
        contestant("", backend, work).results() for backend in (CONTESTANTS[setting.device]["ours"], "reference")
    )
    furthest = max(distance(a, b) for a, b in zip(ours, reference, strict=True))
    if not furthest <= GATE[DTYPE[setting.device]]:  # NaN fails too
        raise Failed(f"gate: differs from the reference by {furthest:.2g}; nothing is timed")
    return furthest


def entrants(setting: Setting) -> tuple[list[tuple[Contestant, float | None]], dict[str, str]]:
    """Who can run, each with its largest relative distance from ours (None: it computes something else, or is ours);
    and why the others cannot, by name. Raises what is wrong with ours."""
    work = Work(setting, setting.lengths)
    made: list[tuple[Contestant, float | None]] = []
    skipped: dict[str, str] = {}
    ours: list[Tensor] = []
    for name, backend in CONTESTANTS[setting.device].items():
        if backend in DENSE and setting.too_large:
            skipped[name] = f"the bias and its gradient would take {setting.written_out / 1e9:.0f} GB"
            continue
        furthest = None
        try:
            one = contestant(name, backend, work)
            results = one.results()
            if ours and one.same:
                furthest = max(distance(a, b) for a, b in zip(results, ours, strict=False))
        except Exception as error:  # other packages refuse in their own ways
            if name == "ours":
                raise
            skipped[name] = reason(error)
            continue
        ours = ours or results
        if furthest is not None and not furthest <= GATE[DTYPE[setting.device]]:
            skipped[name] = f"gate: differs from ours by {furthest:.2g}"
        else:
            made.append((one, furthest))
    return made, skipped


def measured(setting: Setting, rounds: int) -> Iterator[Row]:
    """Rows as they become known: of who is skipped, and why, then of each phase for each contestant that has it."""
    names, lengths, yardstick = setting.names(), setting.lengths, YARDSTICK[setting.device]

    def row(name: str, phase: str | None, skipped: str | None, **fields: Any) -> Row:
        return {
            "case": setting.name,
            "bias": setting.bias,
            "dropout": setting.dropout,
            "phase": phase,
            "contestant": names[name],
            "backend": CONTESTANTS[setting.device][name],
            "sequences": len(lengths),
            "tokens": sum(lengths),
            "heads": HEADS,
            "head_dim": HEAD_DIM,
            "dtype": str(DTYPE[setting.device]).removeprefix("torch."),
            "rounds": rounds,
            "skipped": skipped,
        } | fields

    try:
        torch._dynamo.reset()  # FlexAttention shall be compiled for this case's shapes, not for any shape
        furthest = gate(setting)
        torch._dynamo.reset()
        made, skipped = entrants(setting)
    except UserError:  # ours cannot run here, whatever the case
        raise
    except Exception as error:
        yield row("ours", None, reason(error))
        return
    yield from (row(name, None, why) for name, why in skipped.items())
    for phase, factor in PHASES.items():
        able = [(one, apart) for one, apart in made if one.name not in skipped and (phase != "once" or one.once)]
        taken, failed = turns({one.name: one.call(phase) for one, _ in able}, setting.device, rounds)
        skipped |= failed
        for one, apart in able:
            if one.name in failed:
                yield row(one.name, phase, failed[one.name])
                continue
            ratio = None if phase == "once" else times_base(taken, one.name, yardstick)
            yield row(
                one.name,
                phase,
                None,
                gate=float(f"{furthest:.2g}"),
                from_ours=None if apart is None else float(f"{apart:.2g}"),
                ms=quartiles([1000 * s for s in taken[one.name]]),
                tflop_per_s=quartiles([factor * setting.flops / s / 1e12 for s in taken[one.name]]),
                yardstick=yardstick if ratio else None,
                ratio=ratio,
            )


def settings(names: Sequence[str], tokens: int, device: str) -> list[Setting]:
    return [
        Setting(name, bias, dropout, tokens, device)
        for name in names
        for bias in (True, False)
        for dropout in (0.0, DROPOUT)
    ]


def listing(setting: Setting) -> Iterator[str]:
    """What would be timed, and at what size."""
    lengths, names = setting.lengths, setting.names()
    gaps = setting.case.kept is not None
    extent = f"{lengths[0]} of {setting.case.positions}" if gaps else f"{min(lengths)} to {max(lengths)}"
    yield (
        f"{setting.label}: {len(lengths)} x {extent} positions, {sum(lengths)} tokens, "
        f"{setting.flops / 1e12:.3f} TFLOP forward"
    )
    for name, backend in CONTESTANTS[setting.device].items():
        size = ""
        if backend in DENSE and setting.bias:
            size = f", {setting.written_out / 1e9:.1f} GB{': skipped' if setting.too_large else ''}"
        yield f"  {names[name]} ({backend}{size})"


def run(options: argparse.Namespace) -> int:
    device = options.device
    sequences, rounds = options.sequences or SEQUENCES[device], options.rounds or ROUNDS[device]
    everything = settings(options.cases, sequences * CASES["kept"].lengths(1)[0], device)
    if options.list:
        print("\n".join(line for setting in everything for line in listing(setting)))
        return 0
    machine = environment(device)

    def rows() -> Iterator[Row]:
        for setting in everything:
            yield from (machine | row for row in measured(setting, rounds))
            release()

    return ours_failed(recorded("attention", rows(), options.out))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("attention", __doc__, device="auto")
    parser.add_argument("--cases", type=several(*CASES), default=list(CASES), help="separated by commas")
    parser.add_argument("--sequences", type=count, help="of the case kept; the other cases have as many tokens")
    parser.add_argument("--rounds", type=count)
    parser.add_argument("--list", action="store_true", help="name every case and contestant with sizes; run nothing")
    return start(parser, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
