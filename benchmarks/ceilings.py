"""What a machine's matrix products and memory reach: the products of a training step at their own shapes, and a copy.

    python -m benchmarks.ceilings --device cpu --precision bf16 --batch 4

A step of benchmarks.train_step reaches that share of the products' rate which its own FLOP/s are of it.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.measure import Call, append_rows, environment, quartiles, turns
from benchmarks.projection import MODELS, step_of
from maelm_fast.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}


def multiply(product: tuple[str, int, int, int], device: str, dtype: torch.dtype) -> Call:
    layout, m, n, k = product
    a = torch.randn((k, m) if layout == "grad_weight" else (m, k), device=device, dtype=dtype)
    b = torch.randn((n, k) if layout == "forward" else (k, n), device=device, dtype=dtype)
    return partial(torch.mm, a.t() if layout == "grad_weight" else a, b.t() if layout == "forward" else b)


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    """A row of the copy, bytes/s, and one for each model, FLOP/s of all its products one after another."""
    device, dtype = options.device, DTYPES[options.precision]
    source = torch.ones(COPY_BYTES[device], dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    calls: list[Call] = [lambda: target.copy_(source)]
    counted: dict[str, Counter[tuple[str, int, int, int]]] = {}
    for model in options.models.split(","):
        step = step_of(model, options.batch, options.seq, options.rate, 0.1, True, dtype.itemsize)
        counted[model] = Counter()
        for cost in step.costs():
            if cost.product:
                counted[model][cost.product] += cost.launches
    products = list(dict.fromkeys(product for of_model in counted.values() for product in of_model))
    copy, *taken = turns([*calls, *(multiply(p, device, dtype) for p in products)], device, options.rounds)
    seconds = dict(zip(products, taken, strict=True))
    shared = environment(device) | {
        "precision": options.precision,
        "batch": options.batch,
        "seq": options.seq,
        "rate": options.rate,
        "rounds": options.rounds,
    }
    rows: list[dict[str, object]] = [
        shared | {"ceiling": "copy", "per_s": quartiles([2 * source.nbytes / s / 1e9 for s in copy]), "unit": "GB/s"}
    ]
    for model, of_model in counted.items():
        flops = sum(2 * m * n * k * times for (_, m, n, k), times in of_model.items())
        rounds = [sum(seconds[p][i] * times for p, times in of_model.items()) for i in range(options.rounds)]
        rates = quartiles([flops / s / 1e12 for s in rounds])
        rows.append(shared | {"ceiling": "products", "model": model, "per_s": rates, "unit": "TFLOP/s"})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ceilings", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=list(COPY_BYTES), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=list(DTYPES), default="bf16")
    parser.add_argument("--models", default=",".join(MODELS), help="presets, separated by commas")
    parser.add_argument("--batch", type=int, default=4, help="sequences")
    parser.add_argument("--seq", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--rate", type=float, default=0.15, help="mask rate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSONL file that the rows are appended to")
    options = parser.parse_args(arguments)
    try:
        rows = measure(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for row in rows:
        print(f"{row['ceiling']:9}{row.get('model', ''):14}{row['per_s']} {row['unit']}")
    if options.out:
        append_rows(options.out, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
