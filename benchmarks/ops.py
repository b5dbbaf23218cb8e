"""Each op against what it replaces, in one process, taking turns: ours, plain PyTorch, and on a GPU
torch.compile and the peer library, where it is installed.

    python -m benchmarks.ops --device cpu
    python -m benchmarks.ops --device cuda --dtype bf16 --sequences 256 --out benchmarks/results/ops_cuda.jsonl

1. Gate: at a small size the op's outputs and gradients must agree with plain PyTorch's, or it is not timed.
2. Time: A B C A B C ...; a ratio is the median of the rounds' ratios, with quartiles. On a GPU by events, the L2 cache
   flushed between calls. An op's rows are written before the next op begins.
3. Bytes: for the ops that only move memory, the fewest bytes they can move over the time, as a share of what a plain
   copy reaches in the same run.

Who fails has a row with the reason, and the others go on; the exit status is 1 if ours failed. The host's own code
(mask drawing, packing of documents) is timed against its reference on one core.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import GATE, Call, Failed, distance, environment, quartiles, reason, times_base, turns
from benchmarks.program import Parser, count, ours_failed, recorded, several, start
from benchmarks.registry import ENTRIES, Entry, Inputs, Setting
from benchmarks.rows import Row
from maelm_fast import native
from maelm_fast.config import MaskingConfig, require
from maelm_fast.data.masking import pack, pack_plain
from maelm_fast.data.packing import best_fit, best_fit_numpy
from maelm_fast.masking import Masker, Vocabulary
from maelm_fast.ops import dispatch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Contestant:
    name: str
    backend: str
    forward: Call
    both: Call


def contestants(entry: Entry, setting: Setting) -> tuple[list[Contestant], dict[str, str]]:
    """Ours first, then plain PyTorch; ours is left out where plain PyTorch is what runs. And why others cannot run."""
    inputs = entry.inputs(setting)
    ours = backend_of(entry, inputs)
    calls: dict[str, tuple[Callable[[Inputs], Any], str]] = {}
    if ours != "reference":
        calls["ours"] = (functools.partial(entry, backend=ours), ours)
    plain = functools.partial(entry, backend="reference")
    calls["pytorch"] = (plain, "reference")
    if setting.device == "cuda":
        if entry.name != "attention":  # whose reference loops over sequences
            calls["compiled"] = (torch.compile(plain, fullgraph=True), "inductor")
        calls |= {name: (peer, name) for name, peer in entry.peers.items()}
    made, skipped = [], {}
    for name, (call, backend) in calls.items():
        try:
            made.append(contestant(name, backend, call, inputs, entry.gradients))
        except Exception as error:
            skipped[name] = reason(error)
    return made, skipped


def contestant(
    name: str, backend: str, call: Callable[[Inputs], Any], inputs: Inputs, gradients: Sequence[str]
) -> Contestant:
    leaves, wanted = _leaves(inputs, gradients)
    with torch.no_grad():
        out = call(leaves)
        upstream = torch.randn_like(out) if wanted else None

    def forward() -> Any:
        with torch.no_grad():
            return call(leaves)

    def both() -> Any:
        return torch.autograd.grad(call(leaves), wanted, upstream, allow_unused=True)

    return Contestant(name, backend, forward, both)


def _leaves(inputs: Inputs, gradients: Sequence[str]) -> tuple[Inputs, list[Tensor]]:
    leaves = {k: v.detach().requires_grad_() if k in gradients else v for k, v in inputs.items()}
    return leaves, [leaves[k] for k in gradients]


def backend_of(entry: Entry, inputs: Inputs) -> str:
    """The backend that "auto" takes."""
    chosen: list[str] = []
    original = dispatch.pick

    def spy(*arguments: Any) -> str:
        chosen.append(original(*arguments))
        return chosen[-1]

    dispatch.pick = spy  # type: ignore[assignment]
    try:
        with torch.no_grad():
            entry(inputs, backend="auto")
    finally:
        dispatch.pick = original
    return chosen[0]


def gate(entry: Entry, setting: Setting) -> float:
    """The largest relative distance of an output or a gradient from plain PyTorch's. Failed if it is too large."""
    torch.manual_seed(0)
    inputs = entry.inputs(replace(setting, sequences=2))
    results: list[list[Tensor]] = []
    for backend in ("auto", "reference"):
        leaves, wanted = _leaves(inputs, entry.gradients)
        out = entry(leaves, backend=backend)
        torch.manual_seed(1)
        grads = torch.autograd.grad(out, wanted, torch.randn_like(out)) if wanted else ()
        results.append([out, *grads])
    furthest = max(distance(a, b) for a, b in zip(*results, strict=True))
    if not furthest <= GATE[setting.dtype]:  # NaN fails too
        raise Failed(f"gate: {entry.name} differs from plain PyTorch by {furthest:.2g}; nothing is timed")
    return furthest


def copy_bandwidth(device: str) -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.ones((1 << 30) if device == "cuda" else (1 << 28), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    taken, _ = turns({"copy": lambda: target.copy_(source)}, device, 5)
    return 2 * source.nbytes / statistics.median(taken["copy"])


def op_rows(entry: Entry, setting: Setting, rounds: int, bandwidth: float) -> Iterator[Row]:
    """One row per contestant and phase; of who fails one, with the reason."""

    def row(contestant: str, backend: str, phase: str, skipped: str | None, **fields: Any) -> Row:
        return {
            "op": entry.name,
            "phase": phase,
            "contestant": contestant,
            "backend": backend,
            "dtype": str(setting.dtype).removeprefix("torch."),
            "sequences": setting.sequences,
            "length": setting.length,
            "width": setting.width,
            "skipped": skipped,
        } | fields

    try:
        furthest = gate(entry, setting)
    except Exception as error:
        yield row("ours", "auto", "gate", reason(error))
        return
    them, skipped = contestants(entry, setting)
    yield from (row(name, name, "gate", why) for name, why in skipped.items())
    for index, phase in enumerate(("forward", "forward+backward") if entry.gradients else ("forward",)):
        moved = entry.moved(setting)[index] if entry.moved else None
        taken, failed = turns({c.name: c.both if index else c.forward for c in them}, setting.device, rounds)
        for one in them:
            if one.name in failed:
                yield row(one.name, one.backend, phase, failed[one.name])
                continue
            seconds = taken[one.name]
            yield row(
                one.name,
                one.backend,
                phase,
                None,
                gate=float(f"{furthest:.2g}"),
                ms=quartiles([1000 * s for s in seconds]),
                ratio=times_base(taken, one.name, "pytorch"),
                copy_share=round(moved / statistics.median(seconds) / bandwidth, 3) if moved else None,
            )


def listing(entry: Entry, device: str) -> str:
    compiled = ["compiled"] if entry.name != "attention" else []
    others = [*compiled, *entry.peers] if device == "cuda" else []
    return f"  {entry.name}: {', '.join(['ours', 'pytorch', *others])}"


@dataclass(frozen=True)
class HostCase:
    """Compiled code of the host and its reference. note: what it gives, from its seconds."""

    name: str
    ours: Call
    numpy: Call
    note: Callable[[float], str]


def host_cases() -> list[HostCase]:
    """Mask drawing with packing, and best-fit packing of documents. Failed unless both give the same."""
    draw = np.random.default_rng(0)
    vocabulary, every = Vocabulary(32768, 32767, (0, 1, 2, 3, 32767)), np.arange(32)
    ids = list(draw.integers(5, 32767, (32, 512)).astype(np.uint16))
    arguments = (ids, every, np.zeros_like(every), Masker(MaskingConfig(), vocabulary, 0, False))
    documents = np.clip(np.exp(draw.normal(5.5, 1.0, 20_000)), 2, 2048).astype(np.int64)
    bins, bins_used = best_fit(documents, 16384)
    theirs, their_count = best_fit_numpy(documents, 16384)
    pairs = zip(pack(*arguments).tensors, pack_plain(*arguments).tensors, strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    if not same or bins_used != their_count or not np.array_equal(bins, theirs):
        raise Failed("gate: the compiled host code and the reference disagree; nothing is timed")
    filled = documents.sum() / (bins_used * 16384)
    return [
        HostCase(
            "mask and pack 32 x 512",
            functools.partial(pack, *arguments),
            functools.partial(pack_plain, *arguments),
            lambda seconds: f"{32 * 512 / seconds / 1e6:.0f}M tokens/s",
        ),
        HostCase(
            "best fit, 20,000 documents",
            functools.partial(best_fit, documents, 16384),
            functools.partial(best_fit_numpy, documents, 16384),
            lambda _: f"fill {filled:.2%}",
        ),
    ]


def host_rows(rounds: int) -> Iterator[Row]:
    if native.host() is None:
        print(f"host code: {native.reasons['host']}")
        return
    for case in host_cases():
        taken, _ = turns({"ours": case.ours, "numpy": case.numpy}, "cpu", rounds)
        for name, seconds in taken.items():
            yield {
                "op": case.name,
                "phase": "host",
                "contestant": name,
                "ms": quartiles([1000 * s for s in seconds]),
                "ratio": times_base(taken, name, "numpy"),
                "note": case.note(statistics.median(seconds)) if name == "ours" else "",
            }


def run(options: argparse.Namespace) -> int:
    everything = [name for name in ENTRIES if name != "mask_and_pack" or options.device == "cuda"]  # else the host's
    names = options.ops or everything
    if options.list:
        print("\n".join(listing(ENTRIES[name], options.device) for name in names))
        return 0
    sizes = {"sequences": options.sequences, "length": options.length, "width": options.width}
    setting = Setting(device=options.device, dtype=DTYPES[options.dtype], **sizes)
    require(setting.width % setting.heads == 0, f"--width must be a multiple of {setting.heads}, the number of heads")
    bandwidth = copy_bandwidth(options.device)
    machine = environment(options.device) | {"copy_gb_per_s": round(bandwidth / 1e9, 1)}
    rows: Iterator[Row] = (r for name in names for r in op_rows(ENTRIES[name], setting, options.rounds, bandwidth))
    if options.device == "cpu" and names == everything:
        rows = itertools.chain(rows, host_rows(options.rounds))
    return ours_failed(recorded("ops", (machine | row for row in rows), options.out))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("ops", __doc__, rounds=9, device="auto")
    parser.add_argument("--ops", type=several(*ENTRIES), help="separated by commas; default: all")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--sequences", type=count, default=8)
    parser.add_argument("--length", type=count, default=512, help="tokens a sequence")
    parser.add_argument("--width", type=count, default=768)
    parser.add_argument("--list", action="store_true", help="name every op and contestant; run nothing")
    return start(parser, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
