"""Registers an op's torch.library side: schema, fake, backward, for the Triton and the compiled implementation alike.

Both have the same arguments as a rule, so one fake, one setup_context and one backward serve both. The compiled ops
exist only once the extension is loaded, which happens at the first use of any: their fakes and backwards wait here
until then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from maelm_fast import native

_waiting: dict[str, Callable[[], None]] = {}


@dataclass(frozen=True)
class Direction:
    """The forward or the backward op of a pair.

    schema: without a name, "(Tensor x) -> Tensor". triton: what runs, or None if there is no kernel. fake: the outputs'
    shapes and dtypes, from the same arguments."""

    schema: str
    triton: Callable[..., Any] | None
    fake: Callable[..., Any]


def register(
    op: str,
    forward: Direction,
    backward: Direction,
    setup_context: Callable[..., None],
    differentiate: Callable[..., Any],
    *,
    native: bool = True,
) -> None:
    """Register maelm_fast::{op}_triton_fwd and _bwd now, and the same of {op}_native when the extension is loaded:
    unless `native` is false, since the compiled op has other arguments and a register() of its own.

    setup_context(ctx, inputs, output) and differentiate(backward_op, ctx, *grad_outputs) are those of
    torch.library.register_autograd, the latter with the backward op to call in front."""
    for name, direction in (("fwd", forward), ("bwd", backward)):
        if direction.triton is not None:
            torch.library.custom_op(
                f"maelm_fast::{op}_triton_{name}", direction.triton, mutates_args=(), schema=direction.schema
            )

    def describe(backend: str) -> None:
        names = {name: f"{op}_{backend}_{name}" for name in ("fwd", "bwd")}
        torch.library.register_fake(f"maelm_fast::{names['fwd']}", forward.fake)
        torch.library.register_fake(f"maelm_fast::{names['bwd']}", backward.fake)
        torch.library.register_autograd(
            f"maelm_fast::{names['fwd']}",
            functools.partial(differentiate, getattr(torch.ops.maelm_fast, names["bwd"])),
            setup_context=setup_context,
        )

    if forward.triton is not None:
        describe("triton")
    if native:
        _waiting[op] = functools.partial(describe, "native")


def native_reason(op: str, device: str) -> str:
    """Why the compiled extension cannot run `op` on "cpu" or "cuda", or "" if it can: then its fake and backward are
    registered. Loading a library cannot be traced, so torch.compile takes the answer as a constant."""
    if not native.has(op, device):
        return native.why_not(device)
    if describe := _waiting.pop(op, None):
        describe()
    return ""


# what torch.compiler.assume_constant_result sets; calling that here would import the compiler, and Triton, with us
native_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]
