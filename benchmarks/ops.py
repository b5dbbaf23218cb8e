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
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import GATE, Call, Failed, append_rows, distance, environment, quartiles, reason, turns
from benchmarks.registry import ENTRIES, Entry, Inputs, Setting
from benchmarks.rows import Row
from maelm_fast import native
from maelm_fast.config import MaskingConfig
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
    calls = {"ours": (entry.call, ours)} if ours != "reference" else {}
    calls["pytorch"] = (entry.call, "reference")
    if setting.device == "cuda":
        if entry.name != "attention":  # whose reference loops over sequences
            compiled = torch.compile(lambda i: entry.call(i, "reference"), fullgraph=True)
            calls["compiled"] = (_ignoring_backend(compiled), "inductor")
        calls |= {name: (_ignoring_backend(peer), name) for name, peer in entry.peers.items()}
    made, skipped = [], {}
    for name, (call, backend) in calls.items():
        try:
            made.append(contestant(replace(entry, call=call), inputs, name, backend))
        except Exception as error:
            skipped[name] = reason(error)
    return made, skipped


def _ignoring_backend(peer: Callable[[Inputs], Any]) -> Callable[[Inputs, str | None], Any]:
    return lambda inputs, _: peer(inputs)


def contestant(entry: Entry, inputs: Inputs, name: str, backend: str) -> Contestant:
    leaves = {k: v.detach().requires_grad_() if k in entry.gradients else v for k, v in inputs.items()}
    wanted = [leaves[k] for k in entry.gradients]
    with torch.no_grad():
        out = entry.call(leaves, backend)
        upstream = torch.randn_like(out) if wanted else None

    def forward() -> Any:
        with torch.no_grad():
            return entry.call(leaves, backend)

    def both() -> Any:
        return torch.autograd.grad(entry.call(leaves, backend), wanted, upstream, allow_unused=True)

    return Contestant(name, backend, forward, both)


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
            entry.call(inputs, "auto")
    finally:
        dispatch.pick = original
    return chosen[0]


def gate(entry: Entry, setting: Setting) -> float:
    """The largest relative distance of an output or a gradient from plain PyTorch's. Failed if it is too large."""
    small = replace(setting, sequences=2)
    torch.manual_seed(0)
    inputs = entry.inputs(small)
    results: list[list[Tensor]] = []
    for backend in ("auto", "reference"):
        leaves = {k: v.detach().requires_grad_() if k in entry.gradients else v for k, v in inputs.items()}
        out = entry.call(leaves, backend)
        torch.manual_seed(1)
        wanted = [leaves[k] for k in entry.gradients]
        grads = torch.autograd.grad(out, wanted, torch.randn_like(out)) if wanted else ()
        results.append([out, *grads])
    distances = [distance(a, b) for a, b in zip(*results, strict=True)]
    if not max(distances) <= GATE[setting.dtype]:  # NaN fails too
        raise Failed(f"gate: {entry.name} differs from plain PyTorch by {max(distances):.2g}; nothing is timed")
    return max(distances)


def copy_bandwidth(device: str) -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.ones((1 << 30) if device == "cuda" else (1 << 28), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    seconds = turns([lambda: target.copy_(source)], device, 5)[0]
    return 2 * source.nbytes / statistics.median(seconds)


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
        failed: dict[int, str] = {}
        taken = turns([c.both if index else c.forward for c in them], setting.device, rounds, failed)
        yield from (row(them[i].name, them[i].backend, phase, why) for i, why in failed.items())
        able = [(c, seconds) for i, (c, seconds) in enumerate(zip(them, taken, strict=True)) if i not in failed]
        base = next((seconds for c, seconds in able if c.name == "pytorch"), None)
        for one, seconds in able:
            moved = entry.moved(setting)[index] if entry.moved else None
            yield row(
                one.name,
                one.backend,
                phase,
                None,
                gate=float(f"{furthest:.2g}"),
                ms=quartiles([1000 * s for s in seconds]),
                ratio=quartiles([b / s for b, s in zip(base, seconds, strict=True)]) if base else None,
                copy_share=round(moved / statistics.median(seconds) / bandwidth, 3) if moved else None,
            )


def listing(entry: Entry, device: str) -> str:
    compiled = ["compiled"] if entry.name != "attention" else []
    others = [*compiled, *entry.peers] if device == "cuda" else []
    return f"  {entry.name}: {', '.join(['ours', 'pytorch', *others])}"


def host_rows(rounds: int) -> list[dict[str, Any]]:
    """Mask drawing with packing, and best-fit packing of documents: compiled code against its reference."""
    if native.host() is None:
        print(f"host code: {native.reasons['host']}")
        return []
    draw = np.random.default_rng(0)
    vocabulary, every = Vocabulary(32768, 32767, (0, 1, 2, 3, 32767)), np.arange(32)
    ids = list(draw.integers(5, 32767, (32, 512)).astype(np.uint16))
    arguments = (ids, every, np.zeros_like(every), Masker(MaskingConfig(), vocabulary, 0, False))
    documents = np.clip(np.exp(draw.normal(5.5, 1.0, 20_000)), 2, 2048).astype(np.int64)
    bins, count = best_fit(documents, 16384)
    theirs, their_count = best_fit_numpy(documents, 16384)
    pairs = zip(pack(*arguments).tensors, pack_plain(*arguments).tensors, strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    if not same or count != their_count or not np.array_equal(bins, theirs):
        raise SystemExit("gate: the compiled host code and the reference disagree; nothing is timed")
    cases: list[tuple[str, Call, Call, str]] = [
        ("mask and pack 32 x 512", lambda: pack(*arguments), lambda: pack_plain(*arguments), "tokens/s"),
        (
            "best fit, 20,000 documents",
            lambda: best_fit(documents, 16384),
            lambda: best_fit_numpy(documents, 16384),
            f"fill {documents.sum() / (count * 16384):.2%}",
        ),
    ]
    rows = []
    for name, ours, numpy, note in cases:
        taken = turns([ours, numpy], "cpu", rounds)
        speed = f"{32 * 512 / statistics.median(taken[0]) / 1e6:.0f}M tokens/s" if note == "tokens/s" else note
        ratio = [quartiles([b / a for a, b in zip(*taken, strict=True)]), quartiles([1.0])]
        for i, contestant in enumerate(("ours", "numpy")):
            rows.append(
                {
                    "op": name,
                    "phase": "host",
                    "contestant": contestant,
                    "ms": quartiles([1000 * s for s in taken[i]]),
                    "ratio": ratio[i],
                    "note": "" if i else speed,
                }
            )
    return rows


HEAD = f"{'op':28}{'phase':18}{'contestant':20}{'ms':>28}{'times PyTorch':>24}{'of copy':>9}"


def told(row: Row) -> str:
    name = row["contestant"] + (f" ({row['backend']})" if row["contestant"] == "ours" and "backend" in row else "")
    begins = f"{row['op']:28}{row['phase']:18}{name:20}"
    if row.get("skipped") is not None:
        return f"{begins}{row['skipped']}"
    ms, ratio = row["ms"], row["ratio"]
    share = f"{row['copy_share']:.0%}" if row.get("copy_share") else row.get("note", "")
    over = f"{ratio['median']:>8.2f} [{ratio['q1']:.2f}, {ratio['q3']:.2f}]" if ratio else f"{'-':>8}"
    return f"{begins}{ms['median']:>12.3f} [{ms['q1']:.3f}, {ms['q3']:.3f}]".ljust(94) + f"{over}  {share}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ops", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ops", default="all", help="separated by commas")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=512, help="tokens a sequence")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--list", action="store_true", help="name every op and contestant; run nothing")
    parser.add_argument("--out", type=Path, help="JSONL file that the rows are appended to")
    options = parser.parse_args(arguments)
    everything = [name for name in ENTRIES if name != "mask_and_pack" or options.device == "cuda"]  # else the host's
    names = everything if options.ops == "all" else options.ops.split(",")
    if unknown := [name for name in names if name not in ENTRIES]:
        parser.error(f"unknown op {', '.join(unknown)}; there are: {', '.join(ENTRIES)}")
    if options.list:
        print("\n".join(listing(ENTRIES[name], options.device) for name in names))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is visible")
    setting = Setting(
        device=options.device,
        dtype=DTYPES[options.dtype],
        sequences=options.sequences,
        length=options.length,
        width=options.width,
    )
    if min(setting.sequences, setting.length, setting.width, options.rounds) < 1 or setting.width % setting.heads:
        parser.error(
            "--sequences, --length and --rounds must be at least 1, --width a multiple of "
            f"{setting.heads}, the number of heads"
        )
    machine = environment(options.device)
    bandwidth = copy_bandwidth(options.device)
    machine["copy_gb_per_s"] = round(bandwidth / 1e9, 1)
    print(
        f"{machine['device']}, {machine['threads']} threads, load {machine['load']}, torch {machine['torch']}, "
        f"commit {machine['commit']}; copy {machine['copy_gb_per_s']} GB/s"
    )
    print(
        f"{setting.sequences} x {setting.length} tokens, width {setting.width}, {options.dtype}, {options.rounds} "
        f"rounds; median [quartiles]"
    )
    print(HEAD)
    ours_failed = False
    rows: Iterator[Row] = (r for name in names for r in op_rows(ENTRIES[name], setting, options.rounds, bandwidth))
    if options.device == "cpu" and names == everything:
        rows = itertools.chain(rows, host_rows(options.rounds))
    for row in rows:
        print(told(row), flush=True)
        ours_failed = ours_failed or (row["contestant"] == "ours" and row.get("skipped") is not None)
        if options.out:
            append_rows(options.out, [machine | row])
    return 1 if ours_failed else 0


if __name__ == "__main__":
    sys.exit(main())
