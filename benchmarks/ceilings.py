"""What a machine can do: published, observed elsewhere, or measured here at the shapes of a training step.

Measured are the rate of every distinct product of the step, of one large square product, of a large copy, and on a CPU
of writing to fresh memory, of writing in place, of the functions that cost more than their bytes, on operands that fit
a cache, and of the compiled attention at every distinct shape. The contestants take turns. Attention on a GPU has no
ceiling of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cost import DTYPES, SINGLE, Attention, Cost, Elements, Product
from benchmarks.measure import Call, environment, quartiles, turns
from maelm_fast.errors import UserError

SQUARE = {"cpu": 2048, "cuda": 8192}
COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
FRESH_ABOVE = 32 << 20
"""On a CPU a larger result lies in fresh pages each time: glibc takes it from the system and gives it back."""
FIELDS = {"device", "threads", "torch", "commit", "date", "dtype"}
FUNCTIONS = ("softmax", "gelu", "gelu_backward")
FUNCTION_ELEMENTS = 1 << 19  # fp32: 2 MiB, which a core's share of the last-level cache holds
ATTENTION_BYTES = 16 << 20  # of q, k and v: as a layer of 4 x 435 tokens of width 768, and more than a core's cache


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
    in_place, reading and writing the same memory: bytes/s. functions: elements/s, of attention pairs/s."""

    machine: dict[str, Any]
    dtype: str
    products: dict[Product, float] = field(default_factory=dict)
    copy: float = 0.0
    square: float = 0.0
    fresh: float = 0.0
    in_place: float = 0.0
    functions: dict[str | Attention, float] = field(default_factory=dict)

    def rate(self, product: Product) -> float:
        """Of the measured product that lies alike and is nearest in shape; of the square one if none does."""
        alike = [p for p in self.products if p.layout == product.layout]
        if not alike:
            return self.square
        return self.products[min(alike, key=partial(_apart, product))]

    def exact(self, products: Iterable[Product]) -> bool:
        """Whether each of these very shapes was measured."""
        return all(product in self.products for product in products)


def _apart(a: Product, b: Product) -> float:
    return sum(abs(math.log(x / y)) for x, y in zip(a[1:], b[1:], strict=True))


def measure(costs: Sequence[Cost], dtype: str, device: str, rounds: int) -> list[dict[str, Any]]:
    """One row for each ceiling that these launches need."""
    products = list(dict.fromkeys(c.work for c in costs if isinstance(c.work, Product)))
    functions = list(dict.fromkeys(c.work.function for c in costs if isinstance(c.work, Elements)))
    side = SQUARE[device]
    square = Product("forward", side, side, side)
    kind = DTYPES[dtype]
    numbers = max(max(p.m * p.k, p.k * p.n) for p in [*products, square])
    left, right = (torch.randn(numbers, dtype=kind, device=device) for _ in range(2))
    calls: list[tuple[dict[str, Any], float, Call]] = [
        ({"ceiling": "product", "shape": list(p)}, 2.0 * p.m * p.n * p.k, _multiply(p, left, right)) for p in products
    ]
    calls.append(({"ceiling": "square", "shape": list(square)}, 2.0 * side**3, _multiply(square, left, right)))
    source = torch.ones(COPY_BYTES[device], dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    calls.append(({"ceiling": "copy", "shape": None}, 2.0 * source.nbytes, lambda: target.copy_(source)))
    if device == "cpu":
        calls.append(({"ceiling": "fresh", "shape": None}, float(target.nbytes), partial(_write_fresh, target.nbytes)))
        floats = target.view(torch.float32)
        calls.append(({"ceiling": "in_place", "shape": None}, 2.0 * target.nbytes, partial(floats.mul_, 1.0)))
    for work in functions:
        if isinstance(work, Attention):
            pairs, call = _attention(work)
            calls.append(({"ceiling": "attention", "shape": list(work)}, float(pairs), call))
        else:
            calls.append(({"ceiling": "function", "shape": work}, float(FUNCTION_ELEMENTS), _function(work)))
    taken = turns([call for _, _, call in calls], device, rounds)
    machine = environment(device) | {"dtype": dtype, "rounds": rounds}
    return [
        machine | row | {"per_s": quartiles([work / s for s in seconds])}
        for (row, work, _), seconds in zip(calls, taken, strict=True)
    ]


def _multiply(product: Product, left: Tensor, right: Tensor) -> Call:
    layout, m, n, k = product
    a, b = left[: m * k], right[: k * n]
    first = a.view(k, m).t() if layout == "grad_weight" else a.view(m, k)
    second = b.view(n, k).t() if layout == "forward" else b.view(k, n)
    return partial(torch.mm, first, second)


def _write_fresh(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.int8).fill_(0)


def _function(name: str) -> Call:
    x, y = (torch.randn(FUNCTION_ELEMENTS // 512, 512) for _ in range(2))
    if name == "softmax":
        return partial(torch.softmax, x, -1)
    return partial(F.gelu, x) if name == "gelu" else partial(torch.ops.aten.gelu_backward, y, x)


def _attention(shape: Attention) -> tuple[int, Call]:
    """Pairs of a call, and the call: as many sequences as fill ATTENTION_BYTES, their tokens drawn from all positions;
    q, k and v lie side by side, as a linear layer returns them. The share that dropout drops costs nothing."""
    width = shape.heads * shape.head_dim
    number = -(-ATTENTION_BYTES // ((shape.queries + 2 * shape.keys) * width * SINGLE))

    def sequences(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.randn(number * tokens, 3, shape.heads, shape.head_dim)
        starts = torch.arange(number + 1, dtype=torch.int32) * tokens
        drawn = torch.rand(number, shape.positions).argsort(-1)[:, :tokens].sort(-1).values
        return rows, starts, drawn.flatten().int()

    (q_rows, *queries), (k_rows, *keys) = sequences(shape.queries), sequences(shape.keys)
    q, k, v = q_rows[:, 0], k_rows[:, 1], k_rows[:, 2]
    line = torch.randn(shape.heads, 2 * shape.positions - 1) if shape.bias else None
    layout = (queries[0], keys[0], queries[1], keys[1])
    rest = (shape.head_dim**-0.5, 0.1 * shape.dropout, torch.tensor(7) if shape.dropout else None, 1)
    forward = partial(torch.ops.maelm_fast.attention_native_fwd, q, k, v, line, *layout, *rest)
    pairs = number * shape.heads * shape.queries * shape.keys
    if shape.direction == "fwd":
        return pairs, forward
    out, lse = forward()
    backward = torch.ops.maelm_fast.attention_native_bwd
    return pairs, partial(backward, torch.randn_like(out), q, k, v, lse, line, *layout, shape.bias, *rest)


def load(path: Path, dtype: str, begins: str = "") -> Measured | None:
    """The newest rows of the file's last machine whose name begins so, or None if there is no such row. Older rows may
    hold what nothing needs any more: products in batches, whose shape had a fifth number, and functions of attention.
    Raises UserError on a line that is not such a row."""
    rows = [row for row in _rows(path) if row["device"].startswith(begins) and row["dtype"] == dtype]
    if not rows:
        return None
    machine = {key: rows[-1][key] for key in ("device", "threads", "torch", "commit", "date")}
    products: dict[Product, float] = {}
    functions: dict[str | Attention, float] = {}
    single = {"copy": 0.0, "square": 0.0, "fresh": 0.0, "in_place": 0.0}
    for row in rows:
        if (row["device"], row["threads"]) != (machine["device"], machine["threads"]):
            continue
        rate = row["per_s"]["median"]
        if row["ceiling"] == "product":
            products[Product(*row["shape"][:4])] = rate
        elif row["ceiling"] == "attention":
            functions[Attention(*row["shape"])] = rate
        elif row["ceiling"] != "function":
            single[row["ceiling"]] = rate
        elif row["shape"] in FUNCTIONS:
            functions[row["shape"]] = rate
    return Measured(machine, dtype, products, functions=functions, **single)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            if row["ceiling"] == "product":
                Product(*row["shape"][:4])
            elif row["ceiling"] == "attention":
                Attention(*row["shape"])
            elif row["ceiling"] not in ("copy", "square", "fresh", "in_place", "function"):
                raise ValueError
            if not row["per_s"]["median"] > 0 or not row.keys() >= FIELDS:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}, line {number}: not a row of ceilings (made by --measure)") from None
        yield row
