"""linear(): a linear layer, and what decides whether its products, or feed_forward()'s, run in compiled code.

The Triton backend has no kernel: it is F.linear, whose bias's gradient is the sums that the kernel behind it made of
its own gradient's rows (row_sums.py), if it made any.

The native backend is bf16 on a CPU with AVX-512 BF16 (csrc/ops/bf16_products.h). It takes the parameters as they are,
fp32 as a rule, and rounds them while it packs them, forward and backward: no copy of a parameter outlives a call, so
none can be out of date. A parameter's gradient leaves it unrounded, in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maelm_fast import native
from maelm_fast.ops import dispatch
from maelm_fast.ops.reference import linear as reference
from maelm_fast.ops.registration import describe
from maelm_fast.ops.row_sums import row_sums_of

_FAST = native.has("linear", "cpu") and torch.ops.maelm_fast.fast_bf16_products()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """F.linear(x, weight, bias)

    x: (..., in). weight: (out, in). bias: (out,). Returns (..., out) in x's dtype; under autocast, as F.linear does, in
    autocast's. The native backend does not round between product and bias. The triton backend's gradient of the bias is
    summed, and not rounded, in fp32.

    backend: "triton", "native", "reference" or "auto". Raises UserError if the named one cannot run."""
    able = {
        "triton": lambda: dispatch.triton_reasons(*(t for t in (x, weight, bias) if t is not None)),
        "native": lambda: native_reasons("linear", x, weight, bias),
        "reference": dispatch.always,
    }
    name = dispatch.pick("linear", backend, x.device, able)
    if name == "triton" and bias is not None and not torch.compiler.is_compiling():
        summed: Tensor = _Summed.apply(reference.linear(x, weight, bias.detach()), bias)
        return summed
    if name != "native":
        return reference.linear(x, weight, bias)
    rows = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
    out: Tensor = torch.ops.maelm_fast.linear_native_fwd(rows, weight, bias)
    return out.view(*x.shape[:-1], out.shape[-1])


class _Summed(torch.autograd.Function):
    """The result of a linear layer, (..., out), to which a bias, (out,), was added that autograd has not seen."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, bias: Tensor) -> Tensor:
        ctx.dtype = bias.dtype
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        if not ctx.needs_input_grad[1]:
            return grad, None
        sums = row_sums_of(grad)
        sums = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32) if sums is None else sums
        return grad, sums.to(ctx.dtype)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which F.linear would multiply x: its own, or autocast's, which leaves fp64 alone."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


def native_reasons(op: str, x: Tensor, weight: Tensor, *others: Tensor | None) -> list[str]:
    """Why the compiled extension cannot multiply x by these matrices and add these vectors."""
    if (dtype := compute_dtype(x)) == torch.float32:  # first: an fp32 run asks this at every layer
        return ["products in float32 (it computes in bf16)"]
    parameters = [t for t in (weight, *others) if t is not None]
    if reasons := dispatch.native_reasons(op, x, *parameters):
        return reasons
    if not _FAST:
        return ["this CPU lacks AVX-512 BF16, or has AMX, with which PyTorch is faster"]
    found = []
    dtypes = {dtype, *(t.dtype for t in parameters if t.dtype != torch.float32)}
    if dtypes != {torch.bfloat16}:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        found.append(f"products in {names} (it computes in bf16)")
    if any(size % 2 for size in weight.shape):
        found.append(f"weight of shape {tuple(weight.shape)} (it takes even sizes)")
    return found


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _fake_bwd(
    grad_out: Tensor, x: Tensor, weight: Tensor, x_gradient: bool, weight_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    out = weight.shape[0]
    wide = [
        x.new_empty(shape, dtype=torch.float32) for shape in (((out, x.shape[1]), out) if weight_gradient else (0, 0))
    ]
    return x.new_empty(x.shape if x_gradient else 0), wide[0], wide[1]


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    x_wanted, *parameters_wanted = ctx.needs_input_grad
    grad_x, grad_weight, grad_bias = torch.ops.maelm_fast.linear_native_bwd(
        grad, x, weight, x_wanted, any(parameters_wanted)
    )
    return (
        grad_x if x_wanted else None,
        grad_weight.to(weight.dtype) if parameters_wanted[0] else None,
        grad_bias.to(ctx.bias_dtype) if parameters_wanted[1] else None,
    )


describe("linear_native_fwd", _fake, _setup_context, _backward)
describe("linear_native_bwd", _fake_bwd)
