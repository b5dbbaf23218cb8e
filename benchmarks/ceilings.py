"""What a machine's matrix products and memory reach: the products of a training step at their own shapes, and a copy.

    python -m benchmarks.ceilings --device cpu --precision bf16 --batch 4

A step of benchmarks.train_step reaches that share of the products' rate which its own FLOP/s are of it.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from benchmarks.measure import Call, environment, quartiles, turns
from benchmarks.program import Parser, count, recorded, several, start
from benchmarks.projection import MODELS, step_of
from benchmarks.rows import Row

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}


def multiply(product: tuple[str, int, int, int], device: str, dtype: torch.dtype) -> Call:
    layout, m, n, k = product
    a = torch.randn((k, m) if layout == "grad_weight" else (m, k), device=device, dtype=dtype)
    b = torch.randn((n, k) if layout == "forward" else (k, n), device=device, dtype=dtype)
    return partial(torch.mm, a.t() if layout == "grad_weight" else a, b.t() if layout == "forward" else b)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """A row of the copy, bytes/s, and one for each model, FLOP/s of all its products one after another."""
    device, dtype = options.device, DTYPES[options.precision]
    source = torch.ones(COPY_BYTES[device], dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    counted: dict[str, Counter[tuple[str, int, int, int]]] = {}
    for model in options.models:
        counted[model] = Counter()
        for cost in step_of(model, options.batch, options.seq, options.rate, 0.1, True, dtype.itemsize).costs():
            if cost.product:
                counted[model][cost.product] += cost.launches
    products = {str(product): product for of_model in counted.values() for product in of_model}
    calls = {name: multiply(product, device, dtype) for name, product in products.items()}
    taken, _ = turns({"copy": lambda: target.copy_(source), **calls}, device, options.rounds)
    asked = {name: getattr(options, name) for name in ("precision", "batch", "seq", "rate", "rounds")}
    shared = environment(device) | asked
    copied = quartiles([2 * source.nbytes / s / 1e9 for s in taken["copy"]])
    yield shared | {"ceiling": "copy", "per_s": copied, "unit": "GB/s"}
    for model, of_model in counted.items():
        flops = sum(2 * m * n * k * times for (_, m, n, k), times in of_model.items())
        rounds = [sum(taken[str(p)][i] * times for p, times in of_model.items()) for i in range(options.rounds)]
        rates = quartiles([flops / s / 1e12 for s in rounds])
        yield shared | {"ceiling": "products", "model": model, "per_s": rates, "unit": "TFLOP/s"}


def run(options: argparse.Namespace) -> None:
    recorded("ceilings", rows(options), options.out)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("ceilings", __doc__, rounds=3, device="auto")
    parser.add_argument("--precision", choices=list(DTYPES), default="bf16")
    parser.add_argument("--models", type=several(), default=list(MODELS), help="presets, separated by commas")
    parser.add_argument("--batch", type=count, default=4, help="sequences")
    parser.add_argument("--seq", type=count, default=512, help="tokens per sequence")
    parser.add_argument("--rate", type=float, default=0.15, help="mask rate")
    return start(parser, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
