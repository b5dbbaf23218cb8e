"""A table of instructions that compute a thread's result from its own registers.

Approximate functions (ex2.approx, rsqrt.approx, ...) are computed as exactly as NumPy does, and `.ftz` keeps the
denormal numbers that a GPU would take for zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.emulation.ptx import TYPES

Values = Any  # an array, a number a thread, or one number for all


@dataclass(frozen=True)
class Operation:
    """sources, result: types of PTX."""

    sources: tuple[str, ...]
    result: str
    function: Callable[..., Values]


def from_bf16(bits: Values) -> Values:
    """fp32 of bf16's 16 bits."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x: Values) -> Values:
    """bf16's bits of fp32, rounded to the nearest, ties to even."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def to_f16(x: Values) -> Values:
    return np.asarray(x).astype(np.float16).view(np.uint16)


def _pair(high: Values, low: Values) -> Values:
    return high.astype(np.uint32) << np.uint32(16) | low.astype(np.uint32)


WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
Row = Callable[[tuple[str, ...]], Operation]


def plain(function: Callable[..., Values], count: int) -> Row:
    """Operands and result of the type that the instruction names last."""
    return lambda parts: Operation((parts[-1],) * count, parts[-1], function)


def floats(function: Callable[..., Values], count: int) -> Row:
    def row(parts: tuple[str, ...]) -> Operation:
        if parts[-1] != "f32":
            raise NotImplementedError(".".join(parts))
        return plain(function, count)(parts)

    return row


def _shift(function: Callable[..., Values]) -> Row:
    # as on a GPU, a shift by the width or more leaves nothing, or copies of the sign
    return lambda parts: Operation((parts[-1], "u32"), parts[-1], lambda a, n: function(a, n.astype(a.dtype)))


def _multiply(parts: tuple[str, ...]) -> Operation:
    kind = parts[-1]
    if kind in ("f32", "f64") or "lo" in parts:
        return Operation((kind, kind), kind, np.multiply)
    wide = TYPES[WIDE[kind]]
    if "wide" in parts:
        return Operation((kind, kind), WIDE[kind], lambda a, b: a.astype(wide) * b.astype(wide))
    bits = wide(TYPES[kind]().itemsize * 8)
    return Operation((kind, kind), kind, lambda a, b: (a.astype(wide) * b.astype(wide) >> bits).astype(TYPES[kind]))


def _multiply_add(parts: tuple[str, ...]) -> Operation:
    if parts[-1] == "f32":  # one rounding
        return Operation(
            ("f32",) * 3, "f32", lambda a, b, c: (a.astype(np.float64) * b + c.astype(np.float64)).astype(np.float32)
        )
    product = _multiply(parts)
    return Operation((*product.sources, product.result), product.result, lambda a, b, c: product.function(a, b) + c)


def _compare(parts: tuple[str, ...]) -> Operation:
    how, kind = parts[1], parts[-1]
    how = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(how, how)
    function = {
        "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
        "ne": np.not_equal if kind[0] != "f" else lambda a, b: (a < b) | (a > b), "neu": np.not_equal,
        "equ": lambda a, b: ~((a < b) | (a > b)), "ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b),
        "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    }[how]  # fmt: skip
    return Operation((kind, kind), "pred", function)


def _convert(parts: tuple[str, ...]) -> Operation:
    to, source = parts[-2], parts[-1]
    narrow = {"bf16": to_bf16, "f16": to_f16}
    if to in ("bf16x2", "f16x2"):
        half = narrow[to[:-2]]
        return Operation(("f32", "f32"), "b32", lambda high, low: _pair(half(high), half(low)))
    if to == "bf16":
        return Operation((source,), "b16", to_bf16)
    if source == "bf16":
        return Operation(("b16",), to, from_bf16)
    return Operation((source,), to, lambda a: a.astype(TYPES[to]))


def _permute_bytes(a: Values, b: Values, selector: Values) -> Values:
    a, b, selector = np.broadcast_arrays(a, b, selector)
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(a)
    for i in range(4):
        nibble = selector >> np.uint32(4 * i)
        byte = (both >> ((nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8))).astype(np.uint8)
        byte = np.where(nibble & np.uint32(8), byte.view(np.int8) >> 7, byte.view(np.int8)).view(np.uint8)
        result |= byte.astype(np.uint32) << np.uint32(8 * i)
    return result


def _extract_bits(parts: tuple[str, ...]) -> Operation:
    kind = TYPES[parts[-1]]

    def extract(a: Values, start: Values, length: Values) -> Values:
        left = (np.uint32(32) - length).astype(kind)  # of bits that lie within the word
        return a << left - start.astype(kind) >> left

    return Operation((parts[-1], "u32", "u32"), parts[-1], extract)


TABLE: dict[str, Row] = {
    "mov": plain(lambda a: a, 1), "cvta": plain(lambda a: a, 1), "cvt": _convert,
    "selp": lambda parts: Operation((parts[-1], parts[-1], "pred"), parts[-1], lambda a, b, p: np.where(p, a, b)),
    "setp": _compare,
    "add": plain(np.add, 2), "sub": plain(np.subtract, 2), "mul": _multiply, "mad": _multiply_add,
    "fma": _multiply_add, "div": floats(np.divide, 2), "min": plain(np.fmin, 2), "max": plain(np.fmax, 2),
    "neg": plain(np.negative, 1), "abs": plain(np.abs, 1),
    "and": plain(np.bitwise_and, 2), "or": plain(np.bitwise_or, 2), "xor": plain(np.bitwise_xor, 2),
    "not": plain(np.invert, 1), "shl": _shift(np.left_shift), "shr": _shift(np.right_shift), "bfe": _extract_bits,
    "prmt": lambda parts: Operation(("b32", "b32", "b32"), "b32", _permute_bytes),
    "popc": lambda parts: Operation((parts[-1],), "u32", lambda a: np.bitwise_count(a).astype(np.uint32)),
    "ex2": floats(np.exp2, 1), "rsqrt": floats(lambda a: (1 / np.sqrt(a.astype(np.float64))).astype(a.dtype), 1),
}  # fmt: skip
