"""feed_forward(): two projections with an exact GELU between them, keeping only the input and the first product.

The Triton backend leaves the products to cuBLAS; its kernels do bias and GELU, and in the backward pass make the GELU
again together with its gradient and the bias's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maelm_fast.ops import dispatch
from maelm_fast.ops.reference import feed_forward as reference
from maelm_fast.ops.registration import custom_op, describe
from maelm_fast.ops.row_sums import row_sums_of


def feed_forward(
    x: Tensor, weight_in: Tensor, bias_in: Tensor, weight_out: Tensor, bias_out: Tensor, *, backend: str | None = None
) -> Tensor:
    """F.linear(F.gelu(F.linear(x, weight_in, bias_in)), weight_out, bias_out), with the exact (erf) GELU.

    x: (T, d), T may be 0. weight_in: (f, d). bias_in: (f,). weight_out: (d, f). bias_out: (d,). Returns (T, d) in x's
    dtype; under autocast, as F.linear does, in autocast's. The triton backend does not round between bias and GELU.

    backend: "triton", "reference" or "auto". Raises UserError if the named one cannot run."""
    name = dispatch.pick(
        "feed_forward",
        backend,
        x.device,
        {
            "triton": lambda: dispatch.triton_reasons(x, weight_in, bias_in, weight_out, bias_out),
            "reference": dispatch.always,
        },
    )
    if name == "reference":
        return reference.feed_forward(x, weight_in, bias_in, weight_out, bias_out)
    if torch.is_autocast_enabled(x.device.type):  # the weights too when x is narrow already: the backward op has none
        x, weight_in, weight_out = (t.to(compute_dtype(x)) for t in (x, weight_in, weight_out))
    y: Tensor = _forward(x, weight_in, bias_in, weight_out, bias_out)[0]
    return y


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which F.linear would multiply x: its own, or autocast's, which leaves fp64 alone."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


@custom_op("feed_forward_triton_fwd")
def _forward(
    x: Tensor, weight_in: Tensor, bias_in: Tensor, weight_out: Tensor, bias_out: Tensor
) -> tuple[Tensor, Tensor]:
    """The result and the first product, which the backward pass needs."""
    from maelm_fast.kernels.feed_forward import bias_gelu

    h = torch.mm(x, weight_in.t())
    return torch.addmm(bias_out.to(x.dtype), bias_gelu(h, bias_in.contiguous()), weight_out.t()), h


def _fake_fwd(
    x: Tensor, weight_in: Tensor, bias_in: Tensor, weight_out: Tensor, bias_out: Tensor
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], weight_out.shape[0]), x.new_empty(x.shape[0], weight_in.shape[0])


@custom_op("feed_forward_triton_bwd")
def _backward_op(
    grad: Tensor, x: Tensor, h: Tensor, weight_in: Tensor, bias_in: Tensor, weight_out: Tensor, sums: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight_in, bias_in, weight_out, bias_out; the biases' in fp32, the last without elements unless
    `sums`."""
    from maelm_fast.kernels.feed_forward import bias_gelu_bwd_

    grad_h = torch.mm(grad, weight_out)  # (T, f): of the GELU's output, until the kernel has passed over it
    a, grad_bias_in = bias_gelu_bwd_(grad_h, h, bias_in.contiguous())
    return (
        torch.mm(grad_h, weight_in),
        torch.mm(grad_h.t(), x),
        grad_bias_in,
        torch.mm(grad.t(), a),
        grad.sum(0, dtype=torch.float32) if sums else grad.new_empty(0, dtype=torch.float32),
    )


def _fake_bwd(
    grad: Tensor, x: Tensor, h: Tensor, weight_in: Tensor, bias_in: Tensor, weight_out: Tensor, sums: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (f, d), out = weight_in.shape, weight_out.shape[0]
    biases = [h.new_empty(size, dtype=torch.float32) for size in (f, out if sums else 0)]
    return x.new_empty(x.shape[0], d), x.new_empty(f, d), biases[0], x.new_empty(out, f), biases[1]


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight_in, bias_in, weight_out, bias_out = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, output[1], weight_in, bias_in, weight_out)
    ctx.bias_out_dtype = bias_out.dtype


def _backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor, ...]:
    x, h, weight_in, bias_in, weight_out = ctx.saved_tensors
    sums = row_sums_of(grad)
    dx, dw_in, db_in, dw_out, db_out = _backward_op(grad, x, h, weight_in, bias_in, weight_out, sums is None)
    db_out = db_out if sums is None else sums
    return dx, dw_in, db_in.to(bias_in.dtype), dw_out, db_out.to(ctx.bias_out_dtype)


describe("feed_forward_triton_fwd", _fake_fwd, _setup_context, _backward)
describe("feed_forward_triton_bwd", _fake_bwd)
