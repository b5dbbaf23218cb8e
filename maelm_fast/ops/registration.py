"""One way to register an op. A forward and a backward op are each a typed function, which is their schema, or compiled
code, whose schema is in csrc/ops/library.cpp; describe() adds to either what torch.library asks of Python: the fake
and, to a forward op, its gradient. A Triton op and the compiled one with the same arguments share them.

torch.library.custom_op and register_autograd would do the same, but take 20 to 40 us of Python a call (2.13): they read
the schema anew to fill in defaults, which these ops have not.

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
_library = torch.library.Library("maelm_fast", "FRAGMENT")


def custom_op(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function the op maelm_fast::{name}; its annotations are the schema. It must change no argument and return
    new tensors."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        schema = torch.library.infer_schema(function, mutates_args=(), op_name=name)
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, function, "CompositeExplicitAutograd")
        op: Callable[..., Any] = getattr(torch.ops.maelm_fast, name)
        return op

    return register


def describe(
    name: str,
    fake: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., tuple[Any, ...]] | None = None,
) -> None:
    """Register the fake and the gradient of maelm_fast::{name}; nothing if it is a compiled op that was not built.

    setup_context and backward are those of torch.library.register_autograd, but: backward gets None for an output whose
    gradient nobody asked for, is not called if that is so of all, may leave out the last inputs' gradients, and cannot
    be differentiated again: create_graph=True is an error."""
    op, _, compiled = name.removesuffix("_fwd").removesuffix("_bwd").rpartition("_")
    if compiled == "native":
        devices = [device for device in _WHY_NOT if native.has(op, device)]
        if not devices:
            return
        _compiled.update((op, device) for device in devices)
    torch.library.register_fake(f"maelm_fast::{name}", fake)
    if setup_context is not None and backward is not None:
        _library.impl(name, _gradient(name, setup_context, backward), "Autograd")


def _gradient(name: str, setup_context: Callable[..., None], backward: Callable[..., tuple[Any, ...]]) -> Any:
    """What the op is to autograd: a function that runs it below autograd, and its gradient."""
    run = getattr(torch.ops.maelm_fast, name).default

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                output = run(*inputs)
            ctx.set_materialize_grads(False)  # else autograd would make zeros for what nobody reads
            setup_context(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
            refuse_twice(name)
            asked = any(grad is not None for grad in upstream)
            gradients = backward(ctx, *upstream) if asked else ()
            return (*gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients)))

    Gradient.__name__ = Gradient.__qualname__ = f"{name}_gradient"

    def differentiable(*inputs: Any) -> Any:
        if torch.is_grad_enabled():
            return Gradient.apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return run(*inputs)

    return differentiable


def refuse_twice(name: str) -> None:
    """To be called where a gradient is made that cannot be differentiated; raises RuntimeError if it is to be.

    Not torch's once_differentiable, which finds out only if the upstream gradient can be differentiated: a loss's
    cannot, and the second derivative would lack the op's part without a word."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} can be differentiated once: for create_graph=True, or a gradient of a gradient, take "
            "backend='reference'"
        )


def native_reason(op: str, device: str) -> str:
    """Why the compiled extension cannot run `op` on "cpu" or "cuda", or "" if it can."""
    return "" if (op, device) in _compiled else _WHY_NOT.get(device, f"it has no code for {device}")
