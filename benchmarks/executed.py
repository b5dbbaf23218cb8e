"""What the Triton kernels execute on an A100, counted on the CPU: equal on every machine, and not speed.

tests/emulation runs the PTX that Triton makes. An instruction is one of PTX that a thread runs, so 32 where a warp
issues one; ptxas makes others of them, and of moves mostly none. Units: a score of attention, a token of mask_and_pack,
else an element of the rows; padding of tiles is not among them, but what it costs is.

    python -m benchmarks.executed [--op attention] [--out benchmarks/results/executed.jsonl]
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maelm_fast.kernels import attention_tiles

KINDS = {
    "products": ("mma", "ldmatrix"),
    "exponentials": ("ex2",),
    "shuffles": ("shfl", "redux", "vote"),
    "shared": ("ld.shared", "st.shared"),
    "global": ("ld.global", "st.global", "red.global", "atom.global", "cp.async"),
    "barriers": ("bar",),
    "moves": ("mov", "cvta", "ld.param"),
}
"""What is none of these is arithmetic."""


@dataclass(frozen=True)
class Case:
    """One op's forward and backward pass on sequences of 512 tokens of which 435 are visible, in bf16."""

    op: str
    shape: str
    dropout: bool = False
    bias: bool = False
    twice: bool = False
    """Whether add_norm's result is read twice."""
    keep_gelu: bool = False
    """Of feed_forward; of its kernels those count that it changes."""
    candidate: str = ""
    """Of attention's tiles; the same."""


CASES = [
    *(Case("attention", "12 heads of 64", dropout, bias) for bias in (False, True) for dropout in (False, True)),
    *(Case("attention", f"12 heads of 64, {name}", True, True, candidate=name) for name in attention_tiles.CANDIDATES),
    Case("add_norm", "width 768", dropout=True),
    Case("add_norm", "width 768, two gradients", dropout=True, twice=True),
    Case("embed_packed", "width 768", dropout=True),
    Case("feed_forward", "width 3072"),
    Case("feed_forward", "width 3072, GELU kept", keep_gelu=True),
    Case("masked_cross_entropy", "32,768 columns"),
    Case("mask_and_pack", "512 tokens"),
]
LEFT_OUT = ("_sum_partials_kernel",)  # its work is the number of programs, which is the device's


def counted(case: Case) -> Iterator[dict[str, Any]]:
    """A row for each kernel that the case launches."""
    import torch
    import triton

    from benchmarks import registry
    from maelm_fast import ops
    from tests.emulation.kernels import RECORD

    torch.manual_seed(0)
    setting = registry.Setting(dtype=torch.bfloat16, sequences=1, vocab=32768 if "cross" in case.op else 2048)
    entry = registry.ENTRIES[case.op]
    inputs = entry.inputs(setting)
    leaves = [inputs[name].requires_grad_() for name in entry.gradients if inputs[name] is not None]
    RECORD.counts = {}
    if case.op == "attention":
        inputs |= {"dropout_p": 0.1 if case.dropout else 0.0} | ({} if case.bias else {"line": None})
    if case.keep_gelu:
        inputs["keep_gelu"] = True
    with attention_tiles.trying(case.candidate) if case.candidate else contextlib.nullcontext():
        twice = case.twice and ops.add_norm_twice(**inputs, backend="triton")
        out = torch.stack(twice) if twice else entry(inputs, backend="triton")
        if leaves:
            torch.autograd.grad(out.sum(), leaves, allow_unused=True)
    units = {
        "attention": ("score", setting.heads * setting.visible**2),
        "mask_and_pack": ("token", setting.slots),
        "feed_forward": ("element", setting.visible * setting.ffn),
        "masked_cross_entropy": ("element", setting.masked * setting.vocab),
    }
    unit, number = units.get(case.op, ("element", setting.visible * setting.width))
    for kernel, counts in RECORD.counts.items():
        if kernel in LEFT_OUT:
            continue
        kinds: collections.Counter[str] = collections.Counter()
        for name, issued in counts.issued.items():
            kinds[next((kind for kind, names in KINDS.items() if name in names), "arithmetic")] += issued
        traffic = counts.traffic
        yield {
            "triton": triton.__version__,
            "kernel": kernel.strip("_").removesuffix("_kernel"),
            "shape": case.shape,
            "dropout": case.dropout,
            "bias": case.bias,
            "unit": unit,
            "instructions": {kind: round(32 * n / number, 3) for kind, n in sorted(kinds.items())},
            "wavefronts": ratio(traffic["wavefronts"], traffic["ideal wavefronts"]),
            "sectors": ratio(traffic["sectors"], traffic["requests"]),
        }


def ratio(count: int, of: int) -> float | None:
    return round(count / of, 3) if of else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.executed", description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=sorted({case.op for case in CASES}), help="this op only")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to which a row for each kernel is added")
    options = parser.parse_args(arguments)
    os.environ["TRITON_INTERPRET"] = "0"  # read when Triton and the kernels are imported
    from benchmarks.measure import append_rows, environment
    from tests.emulation.kernels import stand_in

    stand_in()
    os.environ["TRITON_INTERPRET"] = "1"  # read by ops/dispatch.py: kernels take tensors on the CPU
    machine = {name: value for name, value in environment("cpu").items() if name in ("date", "commit", "torch")}
    known: list[Any] = []  # what was counted before
    for case in CASES:
        if options.op in (None, case.op):
            rows = [machine | row for row in counted(case)]
            rows = [row for row in rows if not ((case.candidate or case.keep_gelu) and row["instructions"] in known)]
            known += [row["instructions"] for row in rows]
            for row in rows:
                extra = f"{', dropout' if row['dropout'] else ''}{', bias' if row['bias'] else ''}"
                print(
                    f"{row['kernel']:24} {row['shape']}{extra}: {sum(row['instructions'].values()):.1f} per "
                    f"{row['unit']} {row['instructions']}, wavefronts {row['wavefronts']}, sectors {row['sectors']}",
                    flush=True,
                )
            if options.out:
                append_rows(options.out, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
