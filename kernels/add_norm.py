"""layer_norm(residual + dropout(x)): whole rows in registers, one read of each input, statistics in fp32.

The backward pass reads x and residual again rather than a stored sum, and draws the dropout mask again. Its programs
stay resident and loop over rows, each with its own partial sums of the weight and bias gradients and of x's, which is
that of a bias in x; a second kernel adds those in a fixed order, so the result never depends on timing.

R rows and BLOCK columns make a program's tile; BLOCK is the next power of two above the width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maelm_fast.kernels.common import (
    FUSED,
    by_rows,
    dropout_numbers,
    keep_tile,
    norm_gradient,
    persistent_programs,
    row_launch,
    row_statistics,
    sum_partials,
)


@triton.jit(do_not_specialize=["rows", "place", "threshold"], do_not_specialize_on_alignment=["seed"])
def _add_norm_fwd_kernel(
    x,  # (rows, WIDTH)
    residual,  # (rows, WIDTH)
    weight,  # (WIDTH,)
    bias,  # (WIDTH,)
    seed,  # one int64, or None without dropout
    out,  # (rows, WIDTH), contiguous
    mean,  # (rows,) fp32
    rstd,  # (rows,) fp32
    rows,
    x_stride,  # elements from row to row
    residual_stride,
    place,
    threshold,  # a 16-bit half below this drops its element
    scale,  # 1 / (1 - p)
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    there = (row < rows)[:, None] & inside[None, :]
    x_row, residual_row = x + row.to(tl.int64) * x_stride, residual + row.to(tl.int64) * residual_stride
    added = tl.load(x_row[:, None] + column[None, :], mask=there, other=0.0).to(tl.float32)
    total = tl.load(residual_row[:, None] + column[None, :], mask=there, other=0.0).to(tl.float32)
    shift = tl.load(residual_row, mask=row < rows, other=0.0).to(tl.float32)
    if DROPOUT:
        keep = keep_tile(tl.load(seed), place, row, BLOCK // 8, threshold)
        total += tl.where(keep, added * scale, 0.0)
    else:
        total += added
        shift += tl.load(x_row, mask=row < rows, other=0.0).to(tl.float32)
    centred, row_mean, row_rstd = row_statistics(total, shift, inside[None, :], WIDTH, eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    y = centred * row_rstd[:, None] * w[None, :] + b[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * WIDTH + column[None, :], y, mask=there)
    tl.store(mean + row, row_mean, mask=row < rows)
    tl.store(rstd + row, row_rstd, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "place", "threshold"], do_not_specialize_on_alignment=["seed"])
def _add_norm_bwd_kernel(
    grad_out,  # (rows, WIDTH)
    grad_again,  # (rows, WIDTH), or None: the output's gradient is the sum of both
    x,  # (rows, WIDTH)
    residual,  # (rows, WIDTH)
    weight,  # (WIDTH,)
    mean,  # (rows,) fp32
    rstd,  # (rows,) fp32
    seed,  # one int64, or None without dropout
    grad_x,  # (rows, WIDTH), contiguous; without dropout it is the residual's gradient too
    grad_residual,  # (rows, WIDTH), contiguous; None without dropout
    partials,  # (3, programs, WIDTH) fp32: weight and bias gradients, sums of x's
    rows,
    grad_stride,  # elements from row to row
    again_stride,
    x_stride,
    residual_stride,
    place,
    threshold,  # a 16-bit half below this drops its element
    scale,  # 1 / (1 - p)
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    grad_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    grad_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    x_sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None]
        there = (row < rows)[:, None] & inside[None, :]
        added = tl.load(x + at * x_stride + column[None, :], mask=there, other=0.0).to(tl.float32)
        total = tl.load(residual + at * residual_stride + column[None, :], mask=there, other=0.0).to(tl.float32)
        row_mean = tl.load(mean + row, mask=row < rows, other=0.0)
        row_rstd = tl.load(rstd + row, mask=row < rows, other=0.0)
        if DROPOUT:
            keep = keep_tile(tl.load(seed), place, row, BLOCK // 8, threshold)
            total += tl.where(keep, added * scale, 0.0)
        else:
            total += added
        g = tl.load(grad_out + at * grad_stride + column[None, :], mask=there, other=0.0).to(tl.float32)
        if grad_again is not None:
            g += tl.load(grad_again + at * again_stride + column[None, :], mask=there, other=0.0).to(tl.float32)
        normal = (total - row_mean[:, None]) * row_rstd[:, None]
        grad_weight += g * normal
        grad_bias += g
        grad = norm_gradient(g * w[None, :], normal, row_rstd, WIDTH)
        if DROPOUT:
            tl.store(grad_residual + at * WIDTH + column[None, :], grad, mask=there)
            grad = tl.where(keep, grad * scale, 0.0)
        x_sums += grad
        tl.store(grad_x + at * WIDTH + column[None, :], grad, mask=there)
    partial = partials + tl.program_id(0) * WIDTH + column
    tl.store(partial, tl.sum(grad_weight, axis=0), mask=inside)
    tl.store(partial + tl.num_programs(0) * WIDTH, tl.sum(grad_bias, axis=0), mask=inside)
    tl.store(partial + 2 * tl.num_programs(0) * WIDTH, tl.sum(x_sums, axis=0), mask=inside)


def add_norm_fwd(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
    place: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, mean, rstd): out (T, d) in x's dtype, the row statistics (T,) fp32."""
    x, residual, weight, bias = by_rows(x), by_rows(residual), weight.contiguous(), bias.contiguous()
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    if rows == 0:
        return out, mean, rstd
    constants, options = row_launch("fwd", width, dropout_p > 0, x.dtype)
    threshold, scale = dropout_numbers(dropout_p)
    with torch.cuda.device_of(x):
        _add_norm_fwd_kernel[(triton.cdiv(rows, constants["ROWS"]),)](
            x,
            residual,
            weight,
            bias,
            seed if dropout_p > 0 else None,
            out,
            mean,
            rstd,
            rows,
            x.stride(0),
            residual.stride(0),
            place,
            threshold,
            scale,
            eps,
            **constants,
            **options,
            **FUSED,
        )
    return out, mean, rstd


def add_norm_bwd(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(grad_x, grad_residual, grad_weight, grad_bias, the sums of grad_x over the rows) where the output's gradient is
    grad_out, plus grad_again if there is one. Without dropout grad_x is the residual's gradient too, and grad_residual
    has no elements. The parameters' gradients have weight's dtype, the sums are fp32."""
    grad_out, x, residual, weight = by_rows(grad_out), by_rows(x), by_rows(residual), weight.contiguous()
    grad_again = None if grad_again is None else by_rows(grad_again)
    rows, width = x.shape
    constants, options = row_launch("bwd", width, dropout_p > 0, x.dtype)
    programs = persistent_programs(x.device, triton.cdiv(rows, constants["ROWS"]), **options)
    grad_x = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    grad_residual = torch.empty((rows, width) if dropout_p > 0 else 0, dtype=residual.dtype, device=x.device)
    partials = torch.empty((3, programs, width), dtype=torch.float32, device=x.device)
    threshold, scale = dropout_numbers(dropout_p)
    with torch.cuda.device_of(x):
        _add_norm_bwd_kernel[(programs,)](
            grad_out,
            grad_again,
            x,
            residual,
            weight,
            mean,
            rstd,
            seed if dropout_p > 0 else None,
            grad_x,
            grad_residual if dropout_p > 0 else None,
            partials,
            rows,
            grad_out.stride(0),
            0 if grad_again is None else grad_again.stride(0),
            x.stride(0),
            residual.stride(0),
            place,
            threshold,
            scale,
            **constants,
            **options,
            **FUSED,
        )
        grad_weight, grad_bias, sums = sum_partials(partials, weight.dtype, weight.dtype, torch.float32)
    return grad_x, grad_residual, grad_weight, grad_bias, sums
