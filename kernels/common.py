"""What the kernels share: dropout bits, rows of any width, and the list of variants that are compiled ahead of time.

A kernel file holds `_x_fwd_kernel`, `_x_bwd_kernel` and launchers that take and return tensors; no autograd, no config,
no registration. Loads are widened to fp32 at once: what is computed is fp32, what is stored has the tensor's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import triton
import triton.language as tl

DROPOUT_ROUNDS = tl.constexpr(7)


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel that is actually launched, for compiling it without a GPU.

    signature: pointer and scalar types by argument name, as in {"x": "*bf16", "rows": "i32"}; constants: the constexpr
    arguments; divisible: names of arguments that the launcher guarantees to be multiples of 16."""

    label: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    divisible: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


@triton.jit
def keep_block(seed, place, row, GROUPS: tl.constexpr, threshold):
    """(GROUPS * 8,) bools: which columns of `row` dropout keeps. The bits are ops/reference/dropout.py's."""
    group = tl.arange(0, GROUPS)
    zero = tl.zeros_like(group)
    a, b, c, d = tl.philox(seed, group, zero + row, zero + place, zero, DROPOUT_ROUNDS)
    even = tl.join(tl.join(a & 0xFFFF, c & 0xFFFF), tl.join(b & 0xFFFF, d & 0xFFFF))  # (GROUPS, 2, 2): a, b, c, d
    odd = tl.join(tl.join(a >> 16, c >> 16), tl.join(b >> 16, d >> 16))
    halves = tl.join(tl.reshape(even, (GROUPS, 4)), tl.reshape(odd, (GROUPS, 4)))  # (GROUPS, 4, 2): low, high of each
    return tl.reshape(halves, (GROUPS * 8,)).to(tl.int32) >= threshold


def row_block(width: int) -> int:
    """Columns of a program that holds a whole row: the next power of two, at least one Philox block."""
    return max(8, triton.next_power_of_2(width))


def row_warps(block: int) -> int:
    """Warps for a row of `block` columns: eight columns a thread."""
    return min(16, max(1, block // 256))
