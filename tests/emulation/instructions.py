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
ROUNDED = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
Row = Callable[[tuple[str, ...]], Operation]


def plain(function: Callable[..., Values], count: int) -> Row:
    """Operands and result of the type that the instruction names last."""
    return lambda parts: Operation((parts[-1],) * count, parts[-1], function)


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
        "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b), "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
        "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    }[how]  # fmt: skip
    if len(parts) == 3 or parts[2] == "ftz":
        return Operation((kind, kind), "pred", function)
    joined = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[parts[2]]
    return Operation((kind, kind, "pred"), "pred", lambda a, b, p: joined(function(a, b), p))


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
    if source[0] == "f" and to[0] in "su":
        rounded = ROUNDED[next(part for part in parts if part in ROUNDED)]
        limits = np.iinfo(TYPES[to]).min, np.iinfo(TYPES[to]).max
        return Operation(
            (source,), to, lambda a: np.clip(rounded(np.nan_to_num(a.astype(np.float64))), *limits).astype(TYPES[to])
        )
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


def _insert_bits(a: Values, b: Values, start: Values, length: Values) -> Values:
    mask = (np.uint64(1) << length.astype(np.uint64)) - np.uint64(1) << start.astype(np.uint64)
    return (b & ~mask | a.astype(np.uint64) << start.astype(np.uint64) & mask).astype(np.uint32)


def _logic(a: Values, b: Values, c: Values, table: Values) -> Values:
    rows = [(a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8) if table >> i & 1]
    return np.bitwise_or.reduce(rows) if rows else a & np.uint32(0)


def _funnel(parts: tuple[str, ...]) -> Operation:
    def shift(low: Values, high: Values, n: Values) -> Values:
        both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
        n = (n & np.uint32(31) if "wrap" in parts else np.minimum(n, np.uint32(32))).astype(np.uint64)
        return (both << n >> np.uint64(32) if "l" in parts else both >> n).astype(np.uint32)

    return Operation(("u32", "u32", "u32"), "u32", shift)


def _divide(parts: tuple[str, ...]) -> Operation:
    function = np.divide if parts[-1][0] == "f" else lambda a, b: np.trunc(a / b).astype(a.dtype)
    return Operation((parts[-1],) * 2, parts[-1], function)


def _words(*types: str) -> Callable[[Callable[..., Values]], Row]:
    return lambda function: lambda parts: Operation(types, "b32", function)


TABLE: dict[str, Row] = {
    "mov": plain(lambda a: a, 1), "cvta": plain(lambda a: a, 1), "cvt": _convert,
    "selp": lambda parts: Operation((parts[-1], parts[-1], "pred"), parts[-1], lambda a, b, p: np.where(p, a, b)),
    "setp": _compare,
    "add": plain(np.add, 2), "sub": plain(np.subtract, 2), "mul": _multiply, "mad": _multiply_add,
    "fma": _multiply_add, "div": _divide, "rem": plain(np.fmod, 2), "min": plain(np.fmin, 2), "max": plain(np.fmax, 2),
    "neg": plain(np.negative, 1), "abs": plain(np.abs, 1),
    "and": plain(np.bitwise_and, 2), "or": plain(np.bitwise_or, 2), "xor": plain(np.bitwise_xor, 2),
    "not": plain(np.invert, 1), "shl": _shift(np.left_shift), "shr": _shift(np.right_shift), "shf": _funnel,
    "bfe": _extract_bits, "bfi": _words("b32", "b32", "u32", "u32")(_insert_bits),
    "prmt": _words("b32", "b32", "b32")(_permute_bytes), "lop3": _words("b32", "b32", "b32", "u32")(_logic),
    "popc": lambda parts: Operation((parts[-1],), "u32", lambda a: np.bitwise_count(a).astype(np.uint32)),
    "ex2": plain(np.exp2, 1), "lg2": plain(np.log2, 1), "sqrt": plain(np.sqrt, 1),
    "rsqrt": plain(lambda a: (1 / np.sqrt(a.astype(np.float64))).astype(a.dtype), 1),
    "rcp": plain(lambda a: a.dtype.type(1) / a, 1),
}  # fmt: skip
