"""What a machine can do: published, observed elsewhere, or measured here at the shapes of a training step.

Measured are the rate of every distinct product of the step, of one large square product, of a large copy, and on a CPU
of writing to fresh memory, of writing in place, and of the functions that cost more than their bytes, on operands that
fit a cache. The contestants take turns. Attention has no ceiling of its own: it is predicted from its products and its
functions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cost import Cost, Elements, Product
from benchmarks.measure import Call, environment, quartiles, turns
from maelm_fast import native
from maelm_fast.errors import UserError
from maelm_fast.ops.reference.dropout import keep_weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SQUARE = {"cpu": 2048, "cuda": 8192}
COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
FRESH_ABOVE = 32 << 20
"""On a CPU a larger result lies in fresh pages each time: glibc takes it from the system and gives it back."""
FIELDS = {"device", "threads", "torch", "commit", "date", "dtype"}
FUNCTION_ELEMENTS = 1 << 19  # fp32: 2 MiB, which a core's share of the last-level cache holds


@dataclass(frozen=True)
class Card:
    """A GPU from its data sheet. peak: dense bf16, FLOP/s. bandwidth: bytes/s. clock: Hz under load. memory: GB."""

    name: str
    peak: float
    bandwidth: float
    multiprocessors: int
    clock: float
    arch: int
    memory: int


CARDS = {
    "a100": Card("NVIDIA A100 80 GB SXM", 312e12, 2039e9, 108, 1.41e9, 80, 80),
    "h100": Card("NVIDIA H100 80 GB SXM", 989e12, 3350e9, 132, 1.755e9, 90, 80),
    "h200": Card("NVIDIA H200 141 GB SXM", 989e12, 4800e9, 132, 1.755e9, 90, 141),
}
"""Peak, bandwidth and multiprocessors from NVIDIA's data sheets; clocks as in kernels/README.md."""
DEVICE_NAMES = {"a100": "NVIDIA A100", "h100": "NVIDIA H100", "h200": "NVIDIA H200"}
"""How the name that the driver gives begins."""


@dataclass(frozen=True)
class Measured:
    """Rates measured on one machine, medians. products: FLOP/s. copy, and on a CPU fresh, writing to fresh memory, and
    in_place, reading and writing the same memory: bytes/s. functions: elements/s."""

    machine: dict[str, Any]
    dtype: str
    products: dict[Product, float] = field(default_factory=dict)
    copy: float = 0.0
    square: float = 0.0
    fresh: float = 0.0
    in_place: float = 0.0
    functions: dict[str, float] = field(default_factory=dict)

    def rate(self, product: Product) -> float:
        """Of the measured product that lies alike and is nearest in shape; of the square one if none does."""
        alike = [p for p in self.products if p.layout == product.layout and bool(p.batch) == bool(product.batch)]
        if not alike:
            return self.square
        return self.products[min(alike, key=partial(_apart, product))]

    def exact(self, products: Iterable[Product]) -> bool:
        """Whether each of these very shapes was measured."""
        return all(product in self.products for product in products)


def _apart(a: Product, b: Product) -> float:
    return sum(abs(math.log(x / y)) for x, y in zip(a[1:4], b[1:4], strict=True))


def measure(costs: Sequence[Cost], dtype: str, device: str, rounds: int) -> list[dict[str, Any]]:
    """One row for each ceiling that these launches need."""
    products = list(dict.fromkeys(c.work for c in costs if isinstance(c.work, Product)))
    functions = list(dict.fromkeys(c.work.function for c in costs if isinstance(c.work, Elements)))
    side = SQUARE[device]
    square = Product("forward", side, side, side)
    kind = DTYPES[dtype]
    numbers = max(max(p.batch, 1) * max(p.m * p.k, p.k * p.n) for p in [*products, square])
    left, right = (torch.randn(numbers, dtype=kind, device=device) for _ in range(2))
    calls: list[tuple[dict[str, Any], float, Call]] = [
        ({"ceiling": "product", "shape": list(p)}, 2.0 * p.m * p.n * p.k * max(p.batch, 1), _multiply(p, left, right))
        for p in products
    ]
    calls.append(({"ceiling": "square", "shape": list(square)}, 2.0 * side**3, _multiply(square, left, right)))
    source = torch.ones(COPY_BYTES[device], dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    calls.append(({"ceiling": "copy", "shape": None}, 2.0 * source.nbytes, lambda: target.copy_(source)))
    if device == "cpu":
        calls.append(({"ceiling": "fresh", "shape": None}, float(target.nbytes), partial(_write_fresh, target.nbytes)))
        floats = target.view(torch.float32)
        calls.append(({"ceiling": "in_place", "shape": None}, 2.0 * target.nbytes, partial(floats.mul_, 1.0)))
    for name in functions:
        calls.append(({"ceiling": "function", "shape": name}, float(FUNCTION_ELEMENTS), _function(name)))
    taken = turns([call for _, _, call in calls], device, rounds)
    machine = environment(device) | {"dtype": dtype, "rounds": rounds}
    return [
        machine | row | {"per_s": quartiles([work / s for s in seconds])}
        for (row, work, _), seconds in zip(calls, taken, strict=True)
    ]


def _multiply(product: Product, left: Tensor, right: Tensor) -> Call:
    layout, m, n, k, batch = product
    count = max(batch, 1)
    a, b = left[: count * m * k], right[: count * k * n]
    if batch:
        first = a.view(count, k, m).transpose(1, 2) if layout == "transposed" else a.view(count, m, k)
        second = b.view(count, n, k).transpose(1, 2) if layout == "scores" else b.view(count, k, n)
        return partial(torch.bmm, first, second)
    first = a.view(k, m).t() if layout == "grad_weight" else a.view(m, k)
    second = b.view(n, k).t() if layout == "forward" else b.view(k, n)
    return partial(torch.mm, first, second)


def _write_fresh(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.int8).fill_(0)


def _function(name: str) -> Call:
    x, y = (torch.randn(FUNCTION_ELEMENTS // 512, 512) for _ in range(2))
    rows, seed = torch.arange(x.shape[0]), torch.tensor(7)
    weights = x.softmax(-1)

    def bits() -> Tensor:
        if native.has("keep_weights", "cpu"):
            kept: Tensor = torch.ops.maelm_fast.keep_weights_native_fwd(rows, 1, 512, 0.1, seed, 1, torch.float32)
            return kept
        return keep_weights(rows, 1, 512, 0.1, seed, 1, torch.float32)

    functions: dict[str, Callable[[], Any]] = {
        "softmax": partial(torch.softmax, x, -1),
        "softmax_backward": partial(torch._softmax_backward_data, y, weights, -1, torch.float32),
        "multiply": partial(weights.mul_, torch.ones_like(x)),
        "dropout": bits,
        "gelu": partial(F.gelu, x),
        "gelu_backward": partial(torch.ops.aten.gelu_backward, y, x),
    }
    return functions[name]


def load(path: Path, dtype: str, begins: str = "") -> Measured | None:
    """The newest rows of the file's last machine whose name begins so, or None if there is no such row. Raises
    UserError on a line that is not such a row."""
    rows = [row for row in _rows(path) if row["device"].startswith(begins) and row["dtype"] == dtype]
    if not rows:
        return None
    machine = {key: rows[-1][key] for key in ("device", "threads", "torch", "commit", "date")}
    products: dict[Product, float] = {}
    functions: dict[str, float] = {}
    single = {"copy": 0.0, "square": 0.0, "fresh": 0.0, "in_place": 0.0}
    for row in rows:
        if (row["device"], row["threads"]) != (machine["device"], machine["threads"]):
            continue
        rate = row["per_s"]["median"]
        if row["ceiling"] == "product":
            products[Product(*row["shape"])] = rate
        elif row["ceiling"] == "function":
            functions[row["shape"]] = rate
        else:
            single[row["ceiling"]] = rate
    return Measured(machine, dtype, products, functions=functions, **single)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            if row["ceiling"] == "product":
                Product(*row["shape"])
            elif row["ceiling"] not in ("copy", "square", "fresh", "in_place", "function"):
                raise ValueError
            if not row["per_s"]["median"] > 0 or not row.keys() >= FIELDS:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}, line {number}: not a row of ceilings (made by --measure)") from None
        yield row
