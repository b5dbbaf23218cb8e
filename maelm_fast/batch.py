"""PackedBatch: the only thing that data and model share.

Sequences lie one after another in a row, without padding. There are two rows: the encoder's holds what the encoder
may see; the decoder's holds every position of the original sequences. Every length is known to the host as a Python
int, so that no training step has to read one back from a device.

Shapes: S sequences, T encoder rows, N decoder rows, M masked tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


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

    visible_ids        (T,) token ids that the encoder reads; in standard MLM, or if masking.shown > 0, with [MASK].
    visible_positions  (T,) their positions in the original sequences.
    cu_seqlens         (S+1,) boundaries of the sequences in the encoder's row.
    source             (N,) for each decoder slot the encoder row that fills it, or -1 for the [MASK] embedding.
    decoder_positions  (N,) original position of each decoder slot: 0, 1, ... within each sequence.
    decoder_cu_seqlens (S+1,) boundaries in the decoder's row.
    masked_index       (M,) decoder slots to predict, ascending.
    masked_cu_seqlens  (S+1,) boundaries of the sequences in masked_index.
    labels             (M,) the tokens that stood there.
    lengths, decoder_lengths, masked_lengths: per sequence, as Python ints.
    """

    visible_ids: Tensor
    visible_positions: Tensor
    cu_seqlens: Tensor
    source: Tensor
    decoder_positions: Tensor
    decoder_cu_seqlens: Tensor
    masked_index: Tensor
    masked_cu_seqlens: Tensor
    labels: Tensor
    lengths: tuple[int, ...]
    decoder_lengths: tuple[int, ...]
    masked_lengths: tuple[int, ...]

    @property
    def max_seqlen(self) -> int:
        return max(self.lengths, default=0)

    @property
    def counts(self) -> TokenCounts:
        return TokenCounts(sum(self.decoder_lengths), sum(self.lengths), sum(self.masked_lengths))

    @property
    def visible(self) -> Layout:
        return Layout(self.cu_seqlens, self.visible_positions, self.lengths)

    @property
    def decoder(self) -> Layout:
        return Layout(self.decoder_cu_seqlens, self.decoder_positions, self.decoder_lengths)

    @property
    def masked(self) -> Layout:
        """The masked tokens alone, as the queries of a last layer or of a cross-attention decoder."""
        return Layout(self.masked_cu_seqlens, self.decoder_positions[self.masked_index], self.masked_lengths)

    @property
    def original_ids(self) -> Tensor:
        """(N,) the tokens before masking, put together from the visible ones and the labels."""
        padded = torch.cat([self.visible_ids, self.visible_ids.new_zeros(1)])  # a source of -1 reads the last
        return padded[self.source.long()].index_copy(0, self.masked_index.long(), self.labels)

    @property
    def tensors(self) -> list[Tensor]:
        """In the order of the fields."""
        return [value for field in fields(self) if isinstance(value := getattr(self, field.name), Tensor)]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedBatch:
        return self.map(Tensor.pin_memory)

    def map(self, function: Callable[[Tensor], Tensor]) -> PackedBatch:
        """A batch of the function's results for each tensor."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            values[name] = function(value) if isinstance(value, Tensor) else value
        return PackedBatch(**values)


@dataclass(frozen=True)
class RaggedBatch:
    """S sequences not yet masked, for ops.mask_and_pack.

    ids: (N,) int32 tokens, end to end. lengths, samples, epochs: per sequence, as Python ints; the latter two key its
    masks."""

    ids: Tensor
    lengths: tuple[int, ...]
    samples: tuple[int, ...]
    epochs: tuple[int, ...]
