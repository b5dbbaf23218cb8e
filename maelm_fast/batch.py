"""PackedBatch: the only thing that data and model share.

Sequences lie one after another in a row, without padding. There are two rows: the encoder's holds what the encoder
may see; the decoder's holds every position of the original sequences. Every length is known to the host as a Python
int, so that no training step has to read one back from a device.

Shapes: S sequences, T encoder rows, N decoder rows, M masked tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TENSORS = 10  # of a PackedBatch
Lengths = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Visible, original and masked tokens of each sequence."""


class TokenCounts(NamedTuple):
    """Tokens of a batch. `original` counts every position once: visible and masked, never padding."""

    original: int
    visible: int
    masked: int


@dataclass(frozen=True)
class Layout:
    """How S sequences lie in a packed row of T tokens.

    cu_seqlens: (S+1,) int32, first row of each sequence and T.
    positions:  (T,) int32, position of each token in its original sequence; masked tokens that were removed leave gaps.
    lengths:    S Python ints, the sequences' lengths in this row (0 is allowed).
    """

    cu_seqlens: Tensor
    positions: Tensor
    lengths: tuple[int, ...]

    @property
    def max_seqlen(self) -> int:
        return max(self.lengths, default=0)

    @property
    def num_tokens(self) -> int:
        return int(self.positions.shape[0])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Layout:
        return replace(
            self,
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=non_blocking),
            positions=self.positions.to(device, non_blocking=non_blocking),
        )


def cumulative(lengths: Sequence[int]) -> Tensor:
    """Lengths to the int32 (S+1,) boundaries that varlen attention kernels take."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def layout_of(lengths: Sequence[int], positions: Tensor | None = None) -> Layout:
    """A layout from lengths; without `positions` every sequence counts from 0, without gaps."""
    lengths = tuple(int(n) for n in lengths)
    if positions is None:
        positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths] or [torch.empty(0)]).int()
    return Layout(cumulative(lengths), positions, lengths)


@dataclass(frozen=True)
class PackedBatch:
    """S sequences, packed. All tensors are int32.

    ids           (T,) token ids that the encoder reads; in standard MLM, or if masking.shown > 0, with [MASK].
    source        (N,) for each decoder slot the encoder row that fills it, or -1 for the [MASK] embedding.
    masked_index  (M,) decoder slots to predict, ascending.
    labels        (M,) the tokens that stood there.
    visible       the sequences in the encoder's row.
    decoder       the sequences in the decoder's row: positions 0, 1, ... within each.
    masked        the masked tokens alone, as the queries of a last layer or of a cross-attention decoder.
    """

    ids: Tensor
    source: Tensor
    masked_index: Tensor
    labels: Tensor
    visible: Layout
    decoder: Layout
    masked: Layout

    @property
    def lengths(self) -> Lengths:
        return self.visible.lengths, self.decoder.lengths, self.masked.lengths

    @property
    def counts(self) -> TokenCounts:
        visible, original, masked = map(sum, self.lengths)
        return TokenCounts(original, visible, masked)

    @property
    def original_ids(self) -> Tensor:
        """(N,) the tokens before masking, put together from the visible ones and the labels."""
        padded = torch.cat([self.ids, self.ids.new_zeros(1)])  # a source of -1 reads the last
        return padded[self.source.long()].index_copy(0, self.masked_index.long(), self.labels)

    @property
    def tensors(self) -> list[Tensor]:
        """Those of the fields, in their order; a layout's are cu_seqlens and positions."""
        layouts = (self.visible, self.decoder, self.masked)
        own = [self.ids, self.source, self.masked_index, self.labels]
        return own + [tensor for layout in layouts for tensor in (layout.cu_seqlens, layout.positions)]

    @classmethod
    def of(cls, tensors: Iterable[Tensor], lengths: Iterable[tuple[int, ...]]) -> PackedBatch:
        """The batch whose `tensors` and `lengths` these are."""
        ids, source, masked_index, labels, *rest = tensors
        return cls(ids, source, masked_index, labels, *map(Layout, rest[::2], rest[1::2], lengths))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedBatch:
        return self.map(Tensor.pin_memory)

    def map(self, function: Callable[[Tensor], Tensor]) -> PackedBatch:
        """A batch of the function's results for each tensor."""
        return self.of(map(function, self.tensors), self.lengths)


def to_kwargs(batch: PackedBatch) -> dict[str, Tensor | list[int]]:
    """The batch as a flat dict, which other trainers' collators return and their loops unpack into `model(**batch)`.

    Its ten tensors by name, a layout's as in visible_cu_seqlens and visible_positions, and visible_lengths,
    decoder_lengths and masked_lengths, lists of Python ints, which moving a dict to a device leaves where they are.
    `labels` holds the tokens to predict and nothing else: a trainer that counts labels that are not -100 counts
    right."""
    lengths = {f"{name}_lengths": list(of) for name, of in zip(_LAYOUTS, batch.lengths, strict=True)}
    return {**dict(zip(_TENSOR_NAMES, batch.tensors, strict=True)), **lengths}


def from_kwargs(**kwargs: Any) -> PackedBatch:
    """The batch that `to_kwargs` made a dict of; the lengths may have become tuples on the way. TypeError if a name is
    missing or is not one of it, ValueError if a loop cut its tensors, as if each had a row for each sequence."""
    names = (*_TENSOR_NAMES, *(f"{name}_lengths" for name in _LAYOUTS))
    if kwargs.keys() != set(names):
        wrong = sorted(kwargs.keys() ^ set(names))
        raise TypeError(f"not a packed batch, such as to_kwargs and PackedMaskingCollator make: {', '.join(wrong)}")
    tensors, lengths = names[:TENSORS], names[TENSORS:]
    batch = PackedBatch.of((kwargs[name] for name in tensors), (tuple(kwargs[name]) for name in lengths))
    for name, tensor, size in zip(_TENSOR_NAMES, batch.tensors, tensor_sizes(batch.lengths), strict=True):
        if tensor.shape != (size,):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, and its batch's lengths make ({size},): something cut a "
                "packed batch. With Accelerate or a Trainer set dispatch_batches=False; in the place of DataParallel "
                "start one process for each device with torchrun"
            )
    return batch


def tensor_sizes(lengths: Lengths) -> list[int]:
    """How long each of the tensors of a batch with these lengths is."""
    visible, original, masked = map(sum, lengths)
    bounds = len(lengths[0]) + 1
    return [visible, original, masked, masked, bounds, visible, bounds, original, bounds, masked]


_LAYOUTS = ("visible", "decoder", "masked")
_TENSOR_NAMES = (
    *("ids", "source", "masked_index", "labels"),
    *(f"{name}_{part}" for name in _LAYOUTS for part in ("cu_seqlens", "positions")),
)


@dataclass(frozen=True)
class RaggedBatch:
    """S sequences not yet masked, end to end.

    ids: (N,) tokens, integers of any type. lengths, samples, epochs: (S,) int64 on the host; the latter two key the
    masks, each in [0, 2**32)."""

    ids: Tensor
    lengths: NDArray[np.int64]
    samples: NDArray[np.int64]
    epochs: NDArray[np.int64]

    def split(self, counts: Sequence[int]) -> list[RaggedBatch]:
        """Parts of counts[b] consecutive sequences each."""
        ends = list(itertools.accumulate(counts))
        here = [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]
        tokens = [0, *np.cumsum(self.lengths).tolist()]
        ids = self.ids.split([tokens[part.stop] - tokens[part.start] for part in here])
        keys = self.lengths, self.samples, self.epochs
        return [RaggedBatch(row, *(key[part] for key in keys)) for row, part in zip(ids, here, strict=True)]


def pack_tokens(
    ids: Tensor,
    read: Tensor,
    decoder: Layout,
    masked: Tensor,
    in_encoder: Tensor,
    visible: Sequence[int],
    masks: Sequence[int],
) -> PackedBatch:
    """The batch that follows from what becomes of each token, on its device, which the host does not wait for.

    ids: (N,) the original tokens, which `decoder` lays out. read: (N,) what the encoder reads in their place, where
    in_encoder, (N,) bool, is True. masked: (N,) bool. visible, masks: per sequence, how many are True of either."""
    row = torch.nonzero_static(in_encoder, size=sum(visible)).squeeze(1)
    masked_index = torch.nonzero_static(masked, size=sum(masks)).squeeze(1)
    source = torch.where(in_encoder, in_encoder.cumsum(0) - 1, -1)

    def layout(lengths: Sequence[int], places: Tensor) -> Layout:
        boundaries = cumulative(lengths).to(ids.device, non_blocking=True)
        return Layout(boundaries, decoder.positions[places], tuple(lengths))

    return PackedBatch(
        read[row].int(),
        source.int(),
        masked_index.int(),
        ids[masked_index].int(),
        layout(visible, row),
        decoder,
        layout(masks, masked_index),
    )
