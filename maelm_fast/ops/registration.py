"""One way to register an op. A forward and a backward op are each a typed function, which is their schema, or compiled
code, whose schema is in csrc/ops/library.cpp; describe() adds to either what torch.library asks of Python: the fake
and, to a forward op, its gradient. A Triton op and the compiled one with the same arguments share them.

The compiled ops are loaded when this is imported: torch.compile could not trace it later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maelm_fast import native

_WHY_NOT = {device: native.why_not(device) for device in ("cpu", "cuda")}
_compiled: set[tuple[str, str]] = set()  # (op, device)


def custom_op(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorates the function that maelm_fast::{name} calls; its annotations are the schema. It changes no argument."""
    return torch.library.custom_op(f"maelm_fast::{name}", mutates_args=())


def describe(
    name: str,
    fake: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., tuple[Any, ...]] | None = None,
) -> None:
    """Register the fake and the gradient of maelm_fast::{name}; nothing if it is a compiled op that was not built.

    setup_context and backward are those of torch.library.register_autograd, but: backward gets None for an output whose
    gradient nobody asked for, is not called if that is so of all, and may leave out the last inputs' gradients."""
    op, _, compiled = name.removesuffix("_fwd").removesuffix("_bwd").rpartition("_")
    if compiled == "native":
        devices = [device for device in _WHY_NOT if native.has(op, device)]
        if not devices:
            return
        _compiled.update((op, device) for device in devices)
    torch.library.register_fake(f"maelm_fast::{name}", fake)
    if setup_context is None or backward is None:
        return

    def set_up(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)  # else autograd would make zeros for what nobody reads
        setup_context(ctx, inputs, output)

    def differentiate(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        asked = any(grad is not None for grad in upstream)
        gradients = backward(ctx, *upstream) if asked else ()
        return (*gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients)))

    torch.library.register_autograd(f"maelm_fast::{name}", differentiate, setup_context=set_up)


def native_reason(op: str, device: str) -> str:
    """Why the compiled extension cannot run `op` on "cpu" or "cuda", or "" if it can."""
    return "" if (op, device) in _compiled else _WHY_NOT.get(device, f"it has no code for {device}")
