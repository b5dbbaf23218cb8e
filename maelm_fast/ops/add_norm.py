"""add_norm(): the end of a post-LN sublayer, dropout, residual and LayerNorm in one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maelm_fast.errors import UserError
from maelm_fast.ops import dispatch
from maelm_fast.ops.reference.add_norm import add_norm as reference_add_norm
from maelm_fast.ops.reference.dropout import check_dropout
from maelm_fast.ops.registration import Direction, register


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
    if x.dim() != 2 or residual.shape != x.shape or weight.shape != x.shape[1:] or bias.shape != x.shape[1:]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (x, residual, weight, bias))
        raise UserError(f"add_norm: x and residual must be (T, d), weight and bias (d,); they are {shapes}")
    check_dropout(dropout_p, seed)
    tensors = (x, residual, weight, bias)
    able = {
        "triton": lambda: dispatch.triton_reasons(*tensors),
        "native": lambda: dispatch.native_reasons("add_norm", *tensors),
        "reference": dispatch.always,
    }
    name = dispatch.pick("add_norm", backend, x.device, able)
    if name == "reference":
        return reference_add_norm(x, residual, weight, bias, eps=eps, dropout_p=dropout_p, seed=seed, place=place)
    run = torch.ops.maelm_fast.add_norm_triton_fwd if name == "triton" else torch.ops.maelm_fast.add_norm_native_fwd
    wide = torch.promote_types(x.dtype, residual.dtype)  # the kernels take one dtype for each pair; they seldom differ
    norm = torch.promote_types(weight.dtype, bias.dtype)
    out: Tensor = run(x.to(wide), residual.to(wide), weight.to(norm), bias.to(norm), eps, dropout_p, seed, place)[0]
    return out.to(x.dtype)


def _triton_fwd(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    from maelm_fast.kernels.add_norm import add_norm_fwd

    return add_norm_fwd(*args)


def _triton_bwd(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from maelm_fast.kernels.add_norm import add_norm_bwd

    return add_norm_bwd(*args[:-1])  # the kernel is deterministic either way


def _fake_fwd(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = (x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


def _fake_bwd(
    grad_out: Tensor, x: Tensor, residual: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, dropout_p: float, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_residual = residual.new_empty(residual.shape if dropout_p > 0 else (0,))
    return x.new_empty(x.shape), grad_residual, weight.new_empty(weight.shape), weight.new_empty(weight.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, residual, weight, _, _, dropout_p, seed, place = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, residual, weight, mean, rstd, seed)
    ctx.dropout = (dropout_p, place)


def _differentiate(backward: Any, ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, residual, weight, mean, rstd, seed = ctx.saved_tensors
    dropout_p, place = ctx.dropout
    deterministic = torch.are_deterministic_algorithms_enabled()
    grad_x, grad_residual, grad_weight, grad_bias = backward(
        grad_out, x, residual, weight, mean, rstd, dropout_p, seed, place, deterministic
    )
    return grad_x, grad_residual if dropout_p > 0 else grad_x, grad_weight, grad_bias, None, None, None, None


register(
    "add_norm",
    Direction(
        "(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps, float dropout_p, Tensor? seed, int place)"
        " -> (Tensor out, Tensor mean, Tensor rstd)",
        _triton_fwd,
        _fake_fwd,
    ),
    Direction(
        "(Tensor grad_out, Tensor x, Tensor residual, Tensor weight, Tensor mean, Tensor rstd, float dropout_p,"
        " Tensor? seed, int place, bool deterministic)"
        " -> (Tensor grad_x, Tensor grad_residual, Tensor grad_weight, Tensor grad_bias)",
        _triton_bwd,
        _fake_bwd,
    ),
    _setup_context,
    _differentiate,
)
