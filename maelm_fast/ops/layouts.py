"""Layouts of batches that others made, padded ones with a mask and packed ones with boundaries, and the way of a padded
tensor to packed rows and back.

The lengths of a layout are Python ints. Who has them gives them; else the host reads them from the device, once.

Shapes: B sequences padded to L, of which T tokens are kept; S sequences of a packed row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from maelm_fast.batch import Layout, cumulative
from maelm_fast.errors import UserError
from maelm_fast.ops.attention_inputs import AttentionLayout


class PaddedLayout(AttentionLayout):
    """The layout of a padded batch's kept tokens, packed; attention() takes it as it is.

    shape: (B, L). rows: (T,) int64, where each token lies in the flattened batch, ascending; None without padding.
    A token's position is its column, so padding leaves gaps and a row may begin above 0."""

    def __init__(self, tokens: Layout, shape: tuple[int, int], rows: Tensor | None) -> None:
        super().__init__(tokens)
        self.shape = shape
        self.rows = rows

    @classmethod
    def full(cls, batch: int, length: int, device: torch.device | str = "cpu") -> PaddedLayout:
        """Of a batch (batch, length) without padding. The host waits for nothing."""
        boundaries = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
        positions = torch.arange(length, dtype=torch.int32, device=device).repeat(batch)
        return cls(Layout(boundaries, positions, (length,) * batch), (batch, length), None)


def layout_from_mask(attention_mask: Tensor, sequence_lengths: Sequence[int] | None = None) -> PaddedLayout:
    """The layout of what a mask keeps: AttentionLayout for attention(), and `rows` for unpad() and repad().

    attention_mask: (B, L), any dtype, not 0 where a token is kept: on any side, with holes, or nowhere in a row.
    sequence_lengths: B Python ints, what the mask keeps of each row; with them the host reads nothing from the device,
    without them it reads B numbers, once. Make one per batch and share it among layers.

    Raises UserError if the mask has another shape or the lengths cannot be its rows', RuntimeError (on CUDA: a
    device-side assertion) if they are not."""
    if attention_mask.dim() != 2:
        raise UserError(f"layout_from_mask: the mask must be (batch, length); it is {tuple(attention_mask.shape)}")
    keep = attention_mask != 0
    batch, length = keep.shape
    counts = keep.sum(1)
    if sequence_lengths is None:
        lengths = tuple(counts.tolist())
    else:
        lengths = tuple(int(n) for n in sequence_lengths)
        if len(lengths) != batch or any(not 0 <= n <= length for n in lengths):
            raise UserError(
                f"layout_from_mask: sequence_lengths must be {batch} numbers from 0 to {length}; there are "
                f"{len(lengths)}, from {min(lengths, default=0)} to {max(lengths, default=0)}"
            )
    boundaries = cumulative(lengths).to(keep.device, non_blocking=True)
    if sequence_lengths is not None:
        fits = (counts.cumsum(0) == boundaries[1:]).all()
        torch._assert_async(fits, "layout_from_mask: sequence_lengths are not what the mask keeps of its rows")
    total = sum(lengths)
    if total == batch * length:
        return PaddedLayout.full(batch, length, keep.device)
    rows = torch.nonzero_static(keep.flatten(), size=total).squeeze(1)
    return PaddedLayout(Layout(boundaries, (rows % length).int(), lengths), (batch, length), rows)


def unpad(x: Tensor, layout: PaddedLayout) -> Tensor:
    """x.flatten(0, 1)[layout.rows]: (B, L, ...) -> (T, ...). A view of x if nothing is padding. Differentiable: padding
    gets a gradient of 0. Raises UserError if x is not of the layout's batch."""
    if tuple(x.shape[:2]) != layout.shape:
        raise UserError(f"unpad: the layout is of a batch {layout.shape}, the tensor is {tuple(x.shape)}")
    flat = x.flatten(0, 1)
    if layout.rows is None:
        return flat
    packed: Tensor = _TakeRows.apply(flat, layout.rows)
    return packed


def repad(x: Tensor, layout: PaddedLayout) -> Tensor:
    """The way back of unpad: (T, ...) -> (B, L, ...), zeros where there is padding. A view of x if there is none.
    Differentiable. Raises UserError if x has not T rows."""
    if x.shape[0] != layout.queries.num_tokens:
        raise UserError(f"repad: the layout has {layout.queries.num_tokens} tokens, the tensor is {tuple(x.shape)}")
    if layout.rows is not None:
        x = _put_rows(x, layout.rows, layout.shape[0] * layout.shape[1])
    return x.reshape(*layout.shape, *x.shape[1:])


def _put_rows(x: Tensor, rows: Tensor, count: int) -> Tensor:
    return x.new_zeros((count, *x.shape[1:])).index_copy(0, rows, x)


class _TakeRows(torch.autograd.Function):
    """x[rows], no row twice: so its gradient is put in place, where index_select's would be added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = x.shape[0]
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        return _put_rows(grad, rows, ctx.count), None


def layout_from_boundaries(
    cu_seqlens: Tensor, positions: Tensor | None = None, sequence_lengths: Sequence[int] | None = None
) -> Layout:
    """The layout of a packed row from its boundaries, as varlen attention takes them.

    cu_seqlens: (S+1,) integers, ascending from 0. positions: (T,) integers that ascend within a sequence; each sequence
    counts from 0 unless told. sequence_lengths: S Python ints; without them the host reads cu_seqlens from the device.

    Raises UserError for boundaries that do not ascend from 0, positions of another length, or lengths that are not
    theirs in number or sum."""
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise UserError(f"cu_seqlens must be (sequences + 1,); it is {tuple(cu_seqlens.shape)}")
    if sequence_lengths is None:
        bounds = cu_seqlens.tolist()
        lengths = tuple(end - start for start, end in itertools.pairwise(bounds))
        if bounds[0] != 0 or any(n < 0 for n in lengths):
            raise UserError("cu_seqlens must ascend from 0")
    else:
        lengths = tuple(int(n) for n in sequence_lengths)
        if len(lengths) != cu_seqlens.shape[0] - 1:
            raise UserError(f"cu_seqlens bounds {cu_seqlens.shape[0] - 1} sequences, there are {len(lengths)} lengths")
        fits = (cu_seqlens.diff() == cumulative(lengths).diff().to(cu_seqlens.device, non_blocking=True)).all()
        torch._assert_async(fits & (cu_seqlens[0] == 0), "sequence_lengths are not those that cu_seqlens bounds")
    total = sum(lengths)
    if positions is None:
        starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff(), output_size=total)
        positions = torch.arange(total, device=cu_seqlens.device) - starts
    if positions.shape != (total,):
        raise UserError(f"positions must be ({total},), one a token; they are {tuple(positions.shape)}")
    return Layout(cu_seqlens.int().contiguous(), positions.int().contiguous(), lengths)
