"""Bias and exact GELU between the two products of the feed-forward sublayer, which are cuBLAS's.

The forward kernel makes a = gelu(h + bias). The backward kernel reads h and the gradient of a once, makes a again, with
the same bits, unless it was kept, puts the gradient of h where that of a was, and sums it for the bias over groups of
64 rows; the groups' sums are added after it, always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maelm_fast.kernels.common import FUSED

GROUP = 64  # rows whose bias gradient one program sums


@triton.jit
def _normal(x):
    """(cumulative distribution, density) of the standard normal at x: gelu(x) = x * cdf, gelu'(x) = cdf + x * density.

    The cdf is Abramowitz & Stegun's 26.2.17, off by at most 7.5e-8, about the rounding of 0.5 * (1 + erf(x / sqrt(2)))
    in fp32 and, unlike that, accurate in the lower tail. It needs the exponential that the density is, and takes half
    the instructions of erf."""
    density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    t = 1.0 / (1.0 + 0.2316419 * tl.abs(x))
    tail = 1.781477937 + t * (-1.821255978 + t * 1.330274429)
    tail = density * t * (0.319381530 + t * (-0.356563782 + t * tail))
    return tl.where(x < 0.0, tail, 1.0 - tail), density


@triton.jit(do_not_specialize=["rows"])
def _feed_forward_fwd_kernel(
    h,  # (rows, width)
    bias,  # (width,)
    a,  # (rows, width), out: gelu(h + bias)
    rows,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < width)
    place = row.to(tl.int64) * width + column
    x = tl.load(h + place, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    cdf, _ = _normal(x)
    tl.store(a + place, (x * cdf).to(a.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _feed_forward_bwd_kernel(
    h,  # (rows, width)
    bias,  # (width,)
    grad,  # (rows, width): the gradient of a, then that of h
    a,  # (rows, width), out if REMAKE: gelu(h + bias)
    grad_bias,  # (groups, width) fp32, out: sums of h's gradient over each group of rows
    rows,
    width,
    REMAKE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    group = tl.program_id(0)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    b = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, GROUP, ROWS):
        row = (group * GROUP + start + tl.arange(0, ROWS))[:, None]
        inside = (row < rows) & (column < width)
        place = row.to(tl.int64) * width + column
        x = tl.load(h + place, mask=inside, other=0.0).to(tl.float32) + b
        upstream = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        cdf, density = _normal(x)
        dh = upstream * (cdf + x * density)
        if REMAKE:
            tl.store(a + place, (x * cdf).to(a.dtype.element_ty), mask=inside)
        tl.store(grad + place, dh.to(grad.dtype.element_ty), mask=inside)
        total += dh
    place = group.to(tl.int64) * width + column
    tl.store(grad_bias + place, tl.sum(total, 0)[None, :], mask=column < width)


def launch_fwd(width: int) -> dict[str, int]:
    columns = min(1024, triton.next_power_of_2(width))
    return {"ROWS": max(1, 4096 // columns), "COLUMNS": columns}


def launch_bwd(width: int) -> dict[str, int]:
    # no tile has fewer elements than the block has threads: Triton would give an element to two warps, and the gradient
    # that one has overwritten is the other's to read
    columns = min(256, max(16, triton.next_power_of_2(width)))
    return {"GROUP": GROUP, "ROWS": min(GROUP, 1024 // columns), "COLUMNS": columns}


def bias_gelu(h: Tensor, bias: Tensor) -> Tensor:
    """F.gelu(h + bias), not rounded between. h: (T, f), contiguous. bias: (f,). Returns (T, f) in h's dtype."""
    rows, width = h.shape
    a = torch.empty_like(h)
    sizes = launch_fwd(width)
    grid = (triton.cdiv(rows, sizes["ROWS"]), triton.cdiv(width, sizes["COLUMNS"]))
    if h.numel():
        with torch.cuda.device_of(h):
            _feed_forward_fwd_kernel[grid](h, bias, a, rows, width, **sizes, **FUSED)
    return a


def bias_gelu_bwd_(grad: Tensor, h: Tensor, bias: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(gelu(h + bias), gradient of the bias); `grad`, the gradient of the former, becomes the gradient of h.

    grad, h: (T, f), contiguous. bias: (f,). kept: what bias_gelu returned; None: it is made again. Returns (T, f) in
    h's dtype and (f,) fp32."""
    rows, width = h.shape
    a = torch.empty_like(h) if kept is None else kept
    sizes = launch_bwd(width)
    groups = triton.cdiv(rows, GROUP)
    grad_bias = torch.empty(groups, width, dtype=torch.float32, device=h.device)
    if h.numel():
        grid = (groups, triton.cdiv(width, sizes["COLUMNS"]))
        with torch.cuda.device_of(h):
            _feed_forward_bwd_kernel[grid](h, bias, grad, a, grad_bias, rows, width, kept is None, **sizes, **FUSED)
    return a, grad_bias.sum(0)
