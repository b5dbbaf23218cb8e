"""Attention over packed sequences against what else computes it, in one process, taking turns.

    python -m benchmarks.attention --list
    python -m benchmarks.attention --device cuda --out benchmarks/results/attention_cuda.jsonl
    python -m benchmarks.attention --device cpu --cases kept --sequences 1

1. Gate: on two sequences of the case, ours must agree with the reference in output and every gradient, or nothing is
   timed. At the size that is timed, what computes the same as ours must agree with ours, or it is skipped.
2. Time: A B C A B C ...; by events on a GPU, the L2 cache flushed between calls. The backward pass alone walks a kept
   graph again and again. A ratio is the median of the rounds' ratios to the yardstick, with quartiles.
3. TFLOP/s count 4 head_dim per pair and head forward, 2.5 times that backward, whatever a kernel recomputes.

The yardstick on a GPU is PyTorch's varlen attention, in every case without bias and dropout, which it does not have;
on a CPU, the reference. What the layers of a model share is made before the clock starts: tile lists, the block mask,
the bias spread out for our kernel. SDPA is even spared the padding, the writing out of the bias and the way back from
the gradient of what was written out to that of the line; the others' backward passes give the line's gradient.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import GATE, Call, append_rows, distance, environment, quartiles, turns
from benchmarks.registry import t5_line
from maelm_fast import ops
from maelm_fast.batch import layout_of
from maelm_fast.errors import UserError
from maelm_fast.ops import AttentionLayout, PositionBias

HEADS, HEAD_DIM = 12, 64
DROPOUT = 0.1
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
SEQUENCES = {"cpu": 2, "cuda": 256}
ROUNDS = {"cpu": 2, "cuda": 5}
CONTESTANTS = {
    "cpu": {"ours": "native", "grouped": "grouped", "reference": "reference", "sdpa": "sdpa"},
    "cuda": {
        "ours": "triton", "torch varlen": "torch", "flash-attn": "flash", "xformers": "xformers", "flex": "flex",
        "sdpa": "sdpa",
    },
}  # fmt: skip
YARDSTICK = {"cpu": "reference", "cuda": "torch varlen"}
PHASES = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}  # FLOPs, times those of a forward pass
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
        called = {"torch varlen": "torch varlen" + plain, "sdpa": "sdpa, bias written out" if self.bias else "sdpa"}
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
    first. packed: an output, or a gradient of these three, as (T, heads, head_dim). same: computes what ours does."""

    name: str
    backend: str
    forward: Callable[[], Tensor]
    wanted: list[Tensor]
    upstream: Tensor
    packed: Callable[[Tensor], Tensor]
    same: bool = True

    def results(self) -> list[Tensor]:
        """Output and gradients, of the packed shape; the line's last, where it is among them."""
        out = self.forward()
        grads = torch.autograd.grad(out, self.wanted, self.upstream)
        packed = [self.packed(x.detach()) for x in (out, *grads[:3])]
        return packed + [g for g in grads[3:] if g.dim() == 2]  # SDPA has the written-out bias's, not the line's

    def call(self, phase: str) -> Call:
        if phase == "bwd":
            return partial(torch.autograd.grad, self.forward(), self.wanted, self.upstream, retain_graph=True)
        return self._fwd if phase == "fwd" else self._both

    def _fwd(self) -> Tensor:
        with torch.no_grad():
            return self.forward()

    def _both(self) -> Any:
        return torch.autograd.grad(self.forward(), self.wanted, self.upstream)


def contestant(name: str, backend: str, work: Work) -> Contestant:
    """UserError where it cannot run, and when."""
    if backend == "sdpa":
        return padded_sdpa(name, work)
    plain = backend == "torch"  # the yardstick
    line = None if plain else work.line
    # Our kernel's lookup is made once for all layers. What grouped writes out belongs to one graph: new at every call.
    kept = work.bias() if backend == "triton" else None

    def forward() -> Tensor:
        return ops.attention(
            work.q, work.k, work.v, work.layout, None if plain else kept or work.bias(),
            dropout_p=0.0 if plain else work.dropout, seed=work.seed, backend=backend,
        )  # fmt: skip

    wanted = [work.q, work.k, work.v] + ([] if line is None else [line])
    same = not plain or (work.line is None and work.dropout == 0.0)
    return Contestant(name, backend, forward, wanted, work.upstream, lambda x: x, same)


def padded_sdpa(name: str, work: Work) -> Contestant:
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
    wanted = [q, k, v]
    if work.line is not None:
        mask = written_out(work.line.detach().to(q.dtype), layout.positions.long()[rows], valid).requires_grad_()
        wanted.append(mask)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=work.dropout)

    # its dropout draws other bits
    return Contestant(
        name, "sdpa", forward, wanted, upstream, lambda x: x.transpose(1, 2)[valid], same=work.dropout == 0.0
    )


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
    """The largest relative distance of ours from the reference. SystemExit if it is too large."""
    work = Work(setting, setting.lengths[:2])
    ours, reference = (
        contestant("", backend, work).results() for backend in (CONTESTANTS[setting.device]["ours"], "reference")
    )
    furthest = max(distance(a, b) for a, b in zip(ours, reference, strict=True))
    if not furthest <= GATE[DTYPE[setting.device]]:  # NaN fails too
        raise SystemExit(f"gate: {setting.label}: ours differs from the reference by {furthest:.2g}; nothing is timed")
    return furthest


def entrants(setting: Setting) -> tuple[list[tuple[Contestant, float | None]], list[str]]:
    """Who can run, each with its largest relative distance from ours (None: it computes something else, or is ours);
    and why the others cannot."""
    work = Work(setting, setting.lengths)
    names = setting.names()
    made: list[tuple[Contestant, float | None]] = []
    skipped: list[str] = []
    ours: list[Tensor] = []
    for name, backend in CONTESTANTS[setting.device].items():
        if backend == "sdpa" and setting.too_large:
            skipped.append(f"{names[name]}: the bias and its gradient would take {setting.written_out / 1e9:.0f} GB")
            continue
        furthest = None
        try:
            one = contestant(name, backend, work)
            results = one.results()
            if ours and one.same:
                furthest = max(distance(a, b) for a, b in zip(results, ours, strict=False))
        except (UserError, RuntimeError, ValueError) as error:  # other packages refuse in their own ways
            if name == "ours":
                raise
            skipped.append(f"{names[name]}: {(str(error).strip().splitlines() or [type(error).__name__])[0]}")
            continue
        ours = ours or results
        if furthest is not None and not furthest <= GATE[DTYPE[setting.device]]:
            skipped.append(f"{names[name]}: differs from ours by {furthest:.2g}")
        else:
            made.append((one, furthest))
    return made, skipped


def measured(setting: Setting, rounds: int) -> tuple[list[dict[str, Any]], list[str]]:
    """A row per contestant and phase; who was skipped, and why."""
    torch._dynamo.reset()  # FlexAttention shall be compiled for this case's shapes, not for any shape
    furthest = gate(setting)
    torch._dynamo.reset()
    made, skipped = entrants(setting)
    names, lengths = setting.names(), setting.lengths
    rows = []
    for phase, factor in PHASES.items():
        taken = turns([one.call(phase) for one, _ in made], setting.device, rounds)
        by_name = {one.name: seconds for (one, _), seconds in zip(made, taken, strict=True)}
        base = by_name.get(YARDSTICK[setting.device])
        for (one, apart), seconds in zip(made, taken, strict=True):
            rows.append({
                "case": setting.name, "bias": setting.bias, "dropout": setting.dropout, "phase": phase,
                "contestant": names[one.name], "backend": one.backend, "sequences": len(lengths),
                "tokens": sum(lengths), "heads": HEADS, "head_dim": HEAD_DIM,
                "dtype": str(DTYPE[setting.device]).removeprefix("torch."), "gate": float(f"{furthest:.2g}"),
                "from_ours": None if apart is None else float(f"{apart:.2g}"), "rounds": rounds,
                "ms": quartiles([1000 * s for s in seconds]),
                "tflop_per_s": quartiles([factor * setting.flops / s / 1e12 for s in seconds]),
                "yardstick": YARDSTICK[setting.device] if base else None,
                "ratio": quartiles([b / s for b, s in zip(base, seconds, strict=True)]) if base else None,
            })  # fmt: skip
    return rows, skipped


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        ms, speed, ratio = row["ms"], row["tflop_per_s"], row["ratio"]
        spread = f"{ms['median']:10.3f} [{ms['q1']:.3f}, {ms['q3']:.3f}]"
        over = f"{ratio['median']:8.2f} [{ratio['q1']:.2f}, {ratio['q3']:.2f}]" if ratio else "       -"
        yield f"  {row['phase']:8}{row['contestant']:26}{spread:34}{speed['median']:10.3f}{over}"


def settings(names: Sequence[str], tokens: int, device: str) -> list[Setting]:
    return [
        Setting(name, bias, dropout, tokens, device)
        for name in names
        for bias in (False, True)
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
        if backend == "sdpa" and setting.bias:
            size = f", {setting.written_out / 1e9:.1f} GB{': skipped' if setting.too_large else ''}"
        yield f"  {names[name]} ({backend}{size})"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", default="all", help="separated by commas")
    parser.add_argument("--sequences", type=int, help="of the case kept; the other cases have as many tokens")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--list", action="store_true", help="name every case and contestant with sizes; run nothing")
    parser.add_argument("--out", type=Path, help="JSONL file that the rows are appended to")
    options = parser.parse_args(arguments)
    names = list(CASES) if options.cases == "all" else options.cases.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"unknown case {', '.join(unknown)}; there are: {', '.join(CASES)}")
    device = options.device
    rounds = ROUNDS[device] if options.rounds is None else options.rounds
    sequences = SEQUENCES[device] if options.sequences is None else options.sequences
    if rounds < 1 or sequences < 1:
        parser.error("--rounds and --sequences must be at least 1")
    everything = settings(names, sequences * CASES["kept"].lengths(1)[0], device)
    if options.list:
        print("\n".join(line for setting in everything for line in listing(setting)))
        return 0
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is visible")
    machine = environment(device)
    print(f"{machine['device']}, {machine['threads']} threads, load {machine['load']}, torch {machine['torch']}, "
          f"commit {machine['commit']}")  # fmt: skip
    print(f"{HEADS} heads of {HEAD_DIM}, {str(DTYPE[device]).removeprefix('torch.')}, {rounds} rounds; milliseconds "
          f"[quartiles], TFLOP/s, times {YARDSTICK[device]} [quartiles]")  # fmt: skip
    # A compiled backward pass refuses to be walked twice, unless it is told not to reuse what the forward pass kept. It
    # asks on the thread it runs in, and a configuration holds for one thread: hence no others.
    try:
        with functorch_config.patch(donated_buffer=False), torch.autograd.set_multithreading_enabled(False):
            for setting in everything:
                print(next(listing(setting)))
                rows, skipped = measured(setting, rounds)
                print("\n".join([*table(rows), *(f"  skipped: {line}" for line in skipped)]), flush=True)
                if options.out:
                    append_rows(options.out, (machine | row for row in rows))
    except UserError as error:  # ours cannot run here
        print(f"python -m benchmarks.attention: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
