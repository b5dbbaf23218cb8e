"""Queries, keys and values of one projection, and their gradients in one tensor.

autograd would copy three gradients into one. Where a kernel has written them side by side already, unstack's backward
finds that and takes the tensor as it is, and the sums of its rows (row_sums.py) where the kernel made them. It looks at
addresses, so only where PyTorch runs eagerly (CUDA graphs of that too); what torch.compile traces copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maelm_fast.ops.row_sums import keep_row_sums, row_sums_of


def unstack(x: Tensor, parts: int, heads: int, dim: int) -> tuple[Tensor, ...]:
    """x.view(-1, parts, heads, dim).unbind(1). x: (T, parts * heads * dim)."""
    if torch.compiler.is_compiling():
        return x.view(-1, parts, heads, dim).unbind(1)
    apart: tuple[Tensor, ...] = _Unstack.apply(x, parts, heads, dim)
    return apart


class _Unstack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *shape: int) -> tuple[Tensor, ...]:
        return x.view(-1, *shape).unbind(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        whole = gradients[0] if len(gradients) == 1 else stack_of(*gradients)
        gradient = (torch.stack(gradients, 1) if whole is None else whole).flatten(1)
        sums = [found.flatten() for found in map(row_sums_of, gradients) if found is not None]
        if len(sums) == len(gradients):
            keep_row_sums(gradient, torch.cat(sums))
        return gradient, None, None, None


def stack_of(*tensors: Tensor) -> Tensor | None:
    """torch.stack(tensors, 1) without a copy, if they lie so in memory: each (T, H, D), from one (T, n, H, D)."""
    first = tensors[0]
    rows, heads, width = shape = first.shape
    size, dtype, start, storage = heads * width, first.dtype, first.storage_offset(), first.untyped_storage()._cdata
    strides = (len(tensors) * size, width, 1)
    for i, tensor in enumerate(tensors):
        same = tensor.shape == shape and tensor.dtype == dtype and tensor.stride() == strides
        if not same or tensor.storage_offset() != start + i * size or tensor.untyped_storage()._cdata != storage:
            return None
    return first.as_strided((rows, len(tensors), heads, width), (strides[0], size, width, 1))


def stacked_of(q: Tensor, k: Tensor, v: Tensor) -> int:
    """How many of them, from the last on, lie side by side: 3, 2 or 0."""
    return 3 if stack_of(q, k, v) is not None else 2 if stack_of(k, v) is not None else 0


def gradients_of(q: Tensor, k: Tensor, v: Tensor, stacked: int) -> list[Tensor]:
    """Memory for gradients of q, k and v, the last `stacked` (0, 2 or 3) of them side by side in one (T, stacked, H, D)
    that ends the list."""
    memory = [t.new_empty(t.shape) for t in (q, k, v)[: 3 - stacked]]
    if stacked:
        memory.append(v.new_empty((v.shape[0], stacked, *v.shape[1:])))
    return memory


def apart(gradients: list[Tensor]) -> list[Tensor]:
    """Of q, k and v, each (T, H, D), from gradients_of's list."""
    return [one for given in gradients for one in (given.unbind(1) if given.dim() == 4 else (given,))]
