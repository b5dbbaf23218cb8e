"""Queries, keys and values of one projection, and their gradients in one tensor.

autograd would copy three gradients into one. Where a kernel has written them side by side already, unstack's backward
finds that and takes the tensor as it is, and the sums of its rows (row_sums.py) where the kernel made them. It looks at
addresses, so only where PyTorch runs eagerly (CUDA graphs of that too); what torch.compile traces copies.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        gradient = _together(gradients)
        sums = [found[None] for found in map(row_sums_of, gradients) if found is not None]
        if len(sums) == len(gradients):
            keep_row_sums(gradient, _together(sums)[0])
        return gradient, None, None, None


def _together(parts: Sequence[Tensor]) -> Tensor:
    """(T, n * H * D) from n of (T, H, D)."""
    if len(parts) == 1:
        return parts[0].flatten(1)
    whole = stack_of(*parts)
    return (torch.stack(list(parts), 1) if whole is None else whole).flatten(1)


def stack_of(*tensors: Tensor) -> Tensor | None:
    """torch.stack(tensors, 1) without a copy, if they lie so in memory: each (T, H, D), from one (T, n, H, D)."""
    first, size = tensors[0], tensors[0][:1].numel()
    strides = (len(tensors) * size, first.shape[-1], 1)
    told = 1 if len(first) == 1 else 0  # a single row's stride means nothing
    for i, tensor in enumerate(tensors):
        same = tensor.shape == first.shape and tensor.dtype == first.dtype
        same = same and tensor.stride()[told:] == strides[told:]
        beside = same and tensor.storage_offset() == first.storage_offset() + i * size
        if not beside or tensor.untyped_storage()._cdata != first.untyped_storage()._cdata:
            return None
    shape = (first.shape[0], len(tensors), *first.shape[1:])
    return first.as_strided(shape, (strides[0], size, *strides[1:]))


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
