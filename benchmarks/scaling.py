"""How a training step's time and memory grow: one axis at a time around a base point.

    python -m benchmarks.scaling --out benchmarks/results/scaling_cpu.jsonl
    python -m benchmarks.scaling --axes batch width --rounds 2 --out scaling.jsonl
    python -m benchmarks.report --plot scaling docs/scaling-cpu.png

All points and models of an axis take turns, in another order each round, so that a machine that slows down does not
look like a cost that grows. Memory is measured alone in a fresh process.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import sys
from collections.abc import Iterator, Sequence

import torch

from benchmarks.contestants import Contestant, Settings
from benchmarks.measure import alone, environment, quartiles
from benchmarks.program import Parser, recorded, start
from benchmarks.rows import Row
from benchmarks.train_step import peak_memory_mb
from maelm_fast.config import RuntimeConfig
from maelm_fast.training.hardware import choose_precision

MODELS = {"base": "MAE-LM", "roberta_base": "RoBERTa"}
AXES = {
    "seq": "sequence length, same number of tokens",
    "seq_fixed_batch": "sequence length, same number of sequences",
    "batch": "sequences",
    "width": "width (heads of 64, feed-forward 4x)",
    "layers": "encoder layers",
    "vocab": "vocabulary",
}
LENGTHS = (128, 256, 512, 1024, 2048)
SMALL = {"hidden_size": 256, "num_heads": 4, "ffn_size": 1024, "num_layers": 4, "decoder_layers": 2, "vocab_size": 8192}
SEQUENCES = {"cpu": 4, "cuda": 32}  # of 512 tokens, at the base point
CHANGES: dict[str, dict[str, int]] = {"cpu": SMALL, "cuda": {}}  # of the preset, there
VALUES = {  # of the axes around it
    "cpu": {
        "seq": LENGTHS,
        "seq_fixed_batch": LENGTHS,
        "batch": (1, 2, 4, 8, 16),
        "width": (128, 192, 256, 384, 512),
        "layers": (1, 2, 4, 8, 16),
        "vocab": (2048, 4096, 8192, 16384, 32768),
    },
    "cuda": {
        "seq": LENGTHS,
        "seq_fixed_batch": LENGTHS,
        "batch": (8, 16, 32, 64, 128),
        "width": (384, 512, 768, 1024, 1536),
        "layers": (4, 8, 12, 18, 24),
        "vocab": (8192, 16384, 32768, 65536, 131072),
    },
}


def settings_at(axis: str, x: int, device: str) -> Settings:
    batch, seq = SEQUENCES[device], 512
    changes = {**CHANGES[device], "max_positions": max(LENGTHS)}  # all points have position tables for the longest
    if axis.startswith("seq"):
        batch, seq = (batch * seq // x if axis == "seq" else batch), x
    elif axis == "batch":
        batch = x
    elif axis == "width":
        changes |= {"hidden_size": x, "num_heads": x // 64, "ffn_size": 4 * x}
    else:
        changes["num_layers" if axis == "layers" else "vocab_size"] = x
    precision = choose_precision(RuntimeConfig(), torch.device(device))
    return Settings(batch=batch, seq=seq, device=device, precision=precision, changes=changes)


def measured(axis: str, models: Sequence[str], device: str, rounds: int) -> Iterator[Row]:
    """A row per point and model; one that does not fit into memory says so."""
    entrants: list[tuple[Row, Contestant, list[float]]] = []
    for x, model in itertools.product(VALUES[device][axis], models):
        settings = settings_at(axis, x, device)
        row = {
            "axis": axis,
            "x": x,
            "model": model,
            "batch": settings.batch,
            "seq": settings.seq,
            "precision": settings.precision,
            "changes": dict(settings.changes),
        }
        try:
            memory = alone(peak_memory_mb, model, settings)
            contestant = Contestant(model, settings)
            contestant.turn()
        except (RuntimeError, MemoryError) as error:
            yield row | {"skipped": (str(error).strip().splitlines() or [type(error).__name__])[0]}
            continue
        row |= {"tokens": contestant.tokens, "flops": contestant.flops, "peak_memory_mb": round(memory)}
        entrants.append((row, contestant, []))
    order, shuffle = list(entrants), random.Random(0).shuffle
    gc.collect()
    for _ in range(rounds):
        shuffle(order)
        for _, contestant, taken in order:
            taken.append(contestant.turn()[0])
    for row, _, taken in entrants:
        yield row | {"skipped": None, "rounds": rounds, "ms": quartiles([1000 * s for s in taken])}


def run(options: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = environment(device)
    rows = (row for axis in options.axes for row in measured(axis, options.models, device, options.rounds))
    recorded("scaling", (machine | row for row in rows), options.out)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("scaling", __doc__, rounds=3)
    parser.add_argument("--axes", nargs="+", choices=list(AXES), default=list(AXES))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    return start(parser, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
