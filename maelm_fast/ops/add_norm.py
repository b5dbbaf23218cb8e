"""add_norm(): the end of a post-LN sublayer, dropout, residual and LayerNorm in one.

In a Transformer its result has two readers, the next sublayer and the residual sum around that one. add_norm_twice()
gives each a tensor of its own, so that the backward kernel adds their gradients: autograd would do it in a pass of its
own. No custom op may return one memory twice, so this is for PyTorch's eager mode; torch.compile traces add_norm().
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from maelm_fast.errors import UserError
from maelm_fast.ops import dispatch
from maelm_fast.ops.reference.add_norm import add_norm as reference_add_norm
from maelm_fast.ops.reference.dropout import check_dropout
from maelm_fast.ops.registration import custom_op, describe, refuse_twice
from maelm_fast.ops.row_sums import keep_row_sums


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    place: int = 0,
    backend: str | None = None,
) -> Tensor:
    """F.layer_norm(residual + F.dropout(x, dropout_p), (d,), weight, bias, eps), the sum not rounded before the norm.

    x, residual: (T, d), T may be 0. weight, bias: (d,), their dtype may differ from x's. Statistics are fp32 (fp64 for
    fp64 input). seed, place: what the dropout mask is a function of; seed is one int64 on x's device (reference/
    dropout.py). Returns (T, d) in x's dtype. The gradients of weight and bias are the same in every run.

    Raises UserError for shapes that do not fit, a dropout without seed, or a named backend that cannot run."""
    return _add_norm(x, residual, weight, bias, (eps, dropout_p, seed, place), backend, False)[0]


def add_norm_twice(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    place: int = 0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The result of add_norm(), which has these arguments, as two tensors in one memory: not to be changed in place.

    Their gradients are added in fp32 and not rounded before the norm's backward pass reads the sum; on the reference
    and under torch.compile the two are one tensor, and autograd adds."""
    return _add_norm(x, residual, weight, bias, (eps, dropout_p, seed, place), backend, True)


Numbers = tuple[float, float, Tensor | None, int]
"""eps, dropout_p, seed and place."""


def _add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, numbers: Numbers, backend: str | None, twice: bool
) -> tuple[Tensor, Tensor]:
    if x.dim() != 2 or residual.shape != x.shape or weight.shape != x.shape[1:] or bias.shape != x.shape[1:]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (x, residual, weight, bias))
        raise UserError(f"add_norm: x and residual must be (T, d), weight and bias (d,); they are {shapes}")
    eps, dropout_p, seed, place = numbers
    check_dropout(dropout_p, seed)
    tensors = (x, residual, weight, bias)
    able = {
        "triton": lambda: dispatch.triton_reasons(*tensors),
        "native": lambda: dispatch.native_reasons("add_norm", *tensors),
        "reference": dispatch.always,
    }
    name = dispatch.pick("add_norm", backend, x.device, able)
    if name == "reference":
        out = reference_add_norm(x, residual, weight, bias, eps=eps, dropout_p=dropout_p, seed=seed, place=place)
        return out, out
    run = torch.ops.maelm_fast.add_norm_triton_fwd if name == "triton" else torch.ops.maelm_fast.add_norm_native_fwd
    wide = torch.promote_types(x.dtype, residual.dtype)  # the kernels take one dtype for each pair; they seldom differ
    norm = torch.promote_types(weight.dtype, bias.dtype)
    inputs = (x.to(wide), residual.to(wide), weight.to(norm), bias.to(norm), *numbers)
    if twice and not torch.compiler.is_compiling():
        out, again = _Twice.apply(name, *inputs)
        return out.to(x.dtype), again.to(x.dtype)
    out = run(*inputs)[0].to(x.dtype)
    return out, out


@custom_op("add_norm_triton_fwd")
def _triton_fwd(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
    place: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, mean and rstd."""
    from maelm_fast.kernels.add_norm import add_norm_fwd

    return add_norm_fwd(x, residual, weight, bias, eps, dropout_p, seed, place)


@custom_op("add_norm_triton_bwd")
def _triton_bwd(
    grad_out: Tensor,
    grad_again: Tensor | None,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dropout_p: float,
    seed: Tensor | None,
    place: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, residual, weight and bias; the sums of x's over the rows. It is deterministic either way."""
    from maelm_fast.kernels.add_norm import add_norm_bwd

    return add_norm_bwd(grad_out, grad_again, x, residual, weight, mean, rstd, dropout_p, seed, place)


def _fake_fwd(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = (x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


def _fake_bwd(
    grad_out: Tensor,
    grad_again: Tensor | None,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dropout_p: float,
    *_: Any,
) -> tuple[Tensor, ...]:
    grad_residual = residual.new_empty(residual.shape if dropout_p > 0 else (0,))
    return x.new_empty(x.shape), grad_residual, weight.new_empty(weight.shape), weight.new_empty(weight.shape)


def _fake_triton_bwd(*arguments: Any) -> tuple[Tensor, ...]:
    gradients = _fake_bwd(*arguments)
    return *gradients, gradients[2].new_empty(gradients[2].shape, dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, residual, weight, _, _, dropout_p, seed, place = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x, residual, weight, mean, rstd, seed)
    ctx.dropout = (dropout_p, place)


def _backward(name: str, ctx: Any, *upstream: Tensor | None) -> tuple[Tensor, ...]:
    """upstream: the result's gradient, or two whose sum it is; others are None."""
    grad_out, grad_again = [*(grad for grad in upstream if grad is not None), None][:2]
    *saved, seed = ctx.saved_tensors
    dropout_p, place = ctx.dropout
    deterministic = torch.are_deterministic_algorithms_enabled()
    run = getattr(torch.ops.maelm_fast, name)
    grad_x, grad_residual, grad_weight, grad_bias, *sums = run(
        grad_out, grad_again, *saved, dropout_p, seed, place, deterministic
    )
    if sums:
        keep_row_sums(grad_x, sums[0])
    return grad_x, grad_residual if dropout_p > 0 else grad_x, grad_weight, grad_bias


for _backend in ("triton", "native"):
    _bwd = f"add_norm_{_backend}_bwd"
    describe(f"add_norm_{_backend}_fwd", _fake_fwd, _setup_context, functools.partial(_backward, _bwd))
    describe(_bwd, _fake_triton_bwd if _backend == "triton" else _fake_bwd)


class _Twice(torch.autograd.Function):
    """A forward op whose result is returned twice."""

    @staticmethod
    def forward(ctx: Any, name: str, *inputs: Any) -> tuple[Tensor, Tensor]:
        out, mean, rstd = getattr(torch.ops.maelm_fast, f"add_norm_{name}_fwd")(*inputs)
        ctx.set_materialize_grads(False)
        _setup_context(ctx, inputs, (out, mean, rstd))
        ctx.backward_op = f"add_norm_{name}_bwd"
        return out, out.detach()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_twice(ctx.backward_op)
        asked = any(grad is not None for grad in upstream)
        gradients = _backward(ctx.backward_op, ctx, *upstream) if asked else ()
        return None, *gradients, *[None] * (len(ctx.needs_input_grad) - 1 - len(gradients))
