"""What a machine's matrix products and memory reach: the products of a training step at their own shapes, and a copy.

    python -m benchmarks.ceilings --device cpu --precision bf16 --batch 4

A step of benchmarks.train_step reaches that share of the products' rate which its own FLOP/s are of it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from benchmarks.measure import Call, environment, quartiles, turns
from benchmarks.program import Parser, count, recorded, several, start
from benchmarks.projection import MODELS, step_of
from benchmarks.rows import Row

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}


def three(rows: int, inputs: int, outputs: int, device: str, dtype: torch.dtype) -> Call:
    """A linear layer's products: forward, and of the gradients of its input and its weight."""
    x, y = (torch.randn(rows, width, device=device, dtype=dtype) for width in (inputs, outputs))
    weight = torch.randn(outputs, inputs, device=device, dtype=dtype)
    return lambda: (x @ weight.t(), y @ weight, y.t() @ x)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """A row of the copy, bytes/s, and one for each model, FLOP/s of all its products one after another."""
    device, dtype = options.device, DTYPES[options.precision]
    source = torch.ones(COPY_BYTES[device], dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    asked = (options.batch, options.seq, options.rate, 0.1, True, dtype.itemsize)
    counted = {model: Counter(step_of(model, *asked).products()) for model in options.models}
    shapes = {str(shape): shape for of_model in counted.values() for shape in of_model}
    calls = {name: three(*shape, device, dtype) for name, shape in shapes.items()}
    taken, _ = turns({"copy": lambda: target.copy_(source), **calls}, device, options.rounds)
    shared = environment(device) | {x: getattr(options, x) for x in ("precision", "batch", "seq", "rate", "rounds")}
    copied = quartiles([2 * source.nbytes / s / 1e9 for s in taken["copy"]])
    yield shared | {"ceiling": "copy", "per_s": copied, "unit": "GB/s"}
    for model, of_model in counted.items():
        flops = sum(6 * math.prod(shape) * times for shape, times in of_model.items())
        rounds = [sum(taken[str(s)][i] * times for s, times in of_model.items()) for i in range(options.rounds)]
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
