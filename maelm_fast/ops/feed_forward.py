"""feed_forward(): two projections with an exact GELU between them, keeping the input, the first product, and on request
GELU's output.

The Triton backend leaves the products to cuBLAS; its kernels do bias and GELU, and in the backward pass GELU's gradient
and the bias's, and GELU again if it was not kept. The native one does all of that on the products' sums (linear.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maelm_fast.ops import dispatch
from maelm_fast.ops.linear import compute_dtype, native_reasons
from maelm_fast.ops.reference import feed_forward as reference
from maelm_fast.ops.registration import custom_op, describe
from maelm_fast.ops.row_sums import row_sums_of


def feed_forward(
    x: Tensor,
    weight_in: Tensor,
    bias_in: Tensor,
    weight_out: Tensor,
    bias_out: Tensor,
    *,
    keep_gelu: bool = False,
    backend: str | None = None,
) -> Tensor:
    """F.linear(F.gelu(F.linear(x, weight_in, bias_in)), weight_out, bias_out), with the exact (erf) GELU.

    x: (T, d), T may be 0. weight_in: (f, d). bias_in: (f,). weight_out: (d, f). bias_out: (d,). Returns (T, d) in x's
    dtype; under autocast, as F.linear does, in autocast's. The triton backend does not round between bias and GELU, the
    native one not between product and bias.

    keep_gelu: the triton backend keeps GELU's output, (T, f) in its dtype, for the backward pass, whose kernel then
    writes one tensor of that size instead of two; else that makes it again. The bits are the same. What the other
    backends keep does not depend on it.

    backend: "triton", "native", "reference" or "auto". Raises UserError if the named one cannot run."""
    name = dispatch.pick(
        "feed_forward",
        backend,
        x.device,
        {
            "triton": lambda: dispatch.triton_reasons(x, weight_in, bias_in, weight_out, bias_out),
            "native": lambda: native_reasons("feed_forward", x, weight_in, bias_in, weight_out, bias_out),
            "reference": dispatch.always,
        },
    )
    if name == "reference":
        return reference.feed_forward(x, weight_in, bias_in, weight_out, bias_out)
    if name == "native":
        out: Tensor = torch.ops.maelm_fast.feed_forward_native_fwd(
            x.to(torch.bfloat16), weight_in, bias_in, weight_out, bias_out
        )[0]
        return out
    if torch.is_autocast_enabled(x.device.type):  # the weights too when x is narrow already: the backward op has none
        x, weight_in, weight_out = (t.to(compute_dtype(x)) for t in (x, weight_in, weight_out))
    y: Tensor = _forward(x, weight_in, bias_in, weight_out, bias_out, keep_gelu)[0]
    return y


@custom_op("feed_forward_triton_fwd")
def _forward(
    x: Tensor, weight_in: Tensor, bias_in: Tensor, weight_out: Tensor, bias_out: Tensor, keep_gelu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and what the backward pass gets: the first product, and GELU's output, without elements unless
    `keep_gelu`."""
    from maelm_fast.kernels.feed_forward import bias_gelu

    h = torch.mm(x, weight_in.t())
    a = bias_gelu(h, bias_in.contiguous())
    return torch.addmm(bias_out.to(x.dtype), a, weight_out.t()), h, a if keep_gelu else a.new_empty(0)


def _fake_fwd(
    x: Tensor, weight_in: Tensor, bias_in: Tensor, weight_out: Tensor, bias_out: Tensor, keep_gelu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y, h = _fake_native_fwd(x, weight_in, bias_in, weight_out, bias_out)
    return y, h, h.new_empty(h.shape if keep_gelu else 0)


def _fake_native_fwd(
    x: Tensor, weight_in: Tensor, bias_in: Tensor, weight_out: Tensor, bias_out: Tensor
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], weight_out.shape[0]), x.new_empty(x.shape[0], weight_in.shape[0])


@custom_op("feed_forward_triton_bwd")
def _backward_op(
    grad: Tensor, x: Tensor, weight_in: Tensor, bias_in: Tensor, weight_out: Tensor, h: Tensor, kept: Tensor, sums: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight_in, bias_in, weight_out, bias_out; the biases' in fp32, the last without elements unless
    `sums`. kept: GELU's output, or without elements."""
    from maelm_fast.kernels.feed_forward import bias_gelu_bwd_

    grad_h = torch.mm(grad, weight_out)  # (T, f): of the GELU's output, until the kernel has passed over it
    a, grad_bias_in = bias_gelu_bwd_(grad_h, h, bias_in.contiguous(), kept if kept.numel() else None)
    return (
        torch.mm(grad_h, weight_in),
        torch.mm(grad_h.t(), x),
        grad_bias_in,
        torch.mm(grad.t(), a),
        grad.sum(0, dtype=torch.float32) if sums else grad.new_empty(0, dtype=torch.float32),
    )


def _fake_bwd(
    grad: Tensor, x: Tensor, weight_in: Tensor, bias_in: Tensor, weight_out: Tensor, h: Tensor, kept: Tensor, sums: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (f, d), out = weight_in.shape, weight_out.shape[0]
    biases = [h.new_empty(size, dtype=torch.float32) for size in (f, out if sums else 0)]
    return x.new_empty(x.shape[0], d), x.new_empty(f, d), biases[0], x.new_empty(out, f), biases[1]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *before, bias_out = inputs[:5]
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*before, *output[1:])
    ctx.bias_out_dtype = bias_out.dtype


def _backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor, ...]:
    bias_in, sums = ctx.saved_tensors[2], row_sums_of(grad)
    dx, dw_in, db_in, dw_out, db_out = _backward_op(grad, *ctx.saved_tensors, sums is None)
    db_out = db_out if sums is None else sums
    return dx, dw_in, db_in.to(bias_in.dtype), dw_out, db_out.to(ctx.bias_out_dtype)


def _fake_native_bwd(
    grad: Tensor, x: Tensor, h: Tensor, weight_in: Tensor, weight_out: Tensor, x_gradient: bool, weight_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (f, d), out = weight_in.shape, weight_out.shape[0]
    shapes = ((f, d), (f,), (out, f), (out,)) if weight_gradient else ((0,),) * 4
    a, b, c, e = (h.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return x.new_empty(x.shape if x_gradient else 0), a, b, c, e


def _native_backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    x, weight_in, bias_in, weight_out, h = ctx.saved_tensors
    x_wanted, *wanted = ctx.needs_input_grad
    grad_x, *gradients = torch.ops.maelm_fast.feed_forward_native_bwd(
        grad, x, h, weight_in, weight_out, x_wanted, any(wanted)
    )
    dtypes = (weight_in.dtype, bias_in.dtype, weight_out.dtype, ctx.bias_out_dtype)
    parameters = zip(gradients, dtypes, wanted, strict=True)
    return (grad_x if x_wanted else None, *(g.to(dtype) if asked else None for g, dtype, asked in parameters))


describe("feed_forward_triton_fwd", _fake_fwd, _setup_context, _backward)
describe("feed_forward_triton_bwd", _fake_bwd)
describe("feed_forward_native_fwd", _fake_native_fwd, _setup_context, _native_backward)
describe("feed_forward_native_bwd", _fake_native_bwd)
