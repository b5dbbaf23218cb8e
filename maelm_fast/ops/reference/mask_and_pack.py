"""Plain PyTorch reference of masking and packing, and what the op's backends share: counts, keys, checks. The loader
masks with it too where its C++ was not built.

It draws on a padded (S, L) rectangle. Nothing is selected by a boolean mask whose size the host would have to read
back: the lengths say every size, but for those that depend on the tokens or on the policy's words.

Shapes: S sequences, L the longest of them, N tokens in all, T of them in the encoder's row, M masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from maelm_fast.batch import Layout, PackedBatch, cumulative, pack_tokens
from maelm_fast.config import require
from maelm_fast.masking import Masker
from maelm_fast.philox import LOW, Stream, philox, position_words

NEVER = 2**63 - 1  # larger than any word and position: one that cannot be masked
# Words of the BERT policy: 80% [MASK], 10% random, 10% as it was.
MASK_BELOW, RANDOM_BELOW = math.ceil(0.8 * 2**32), math.ceil(0.9 * 2**32)

Keys = Tensor | Sequence[int] | int
Number = TypeVar("Number", float, Tensor)


def mask_and_pack(ids: Tensor, lengths: Sequence[int], samples: Keys, epochs: Keys, masker: Masker) -> PackedBatch:
    """data.masking.pack(ids.split(lengths), samples, epochs, masker), on ids' device. ids: (N,) int32 or int64. See
    maelm_fast.ops.mask_and_pack for the rest."""
    lengths = check_lengths(ids, lengths)
    samples, epochs = keys(samples, len(lengths), "samples"), keys(epochs, len(lengths), "epochs")
    masking, device, longest = masker.masking, ids.device, max(lengths, default=1) or 1
    addends = count_addends(samples, epochs, masker)

    length_of = torch.tensor(lengths, dtype=torch.int64).to(device, non_blocking=True)
    position = torch.arange(longest, device=device)
    valid = position < length_of[:, None]  # (S, L)
    inside = torch.nonzero_static(valid.flatten(), size=len(ids)).squeeze(1)  # (N,) places in the rectangle
    sample, epoch = (values.to(device, non_blocking=True)[:, None] for values in (samples, epochs))

    def words(stream: Stream) -> Tensor:
        return position_words(longest, sample, epoch, stream, masker.seed)

    def rectangle(flags: Tensor) -> Tensor:
        """(N,) bool to (S, L), False in the padding."""
        return torch.zeros_like(valid).flatten().index_copy(0, inside, flags).view_as(valid)

    maskable = valid
    if not masking.special_tokens:
        special = torch.tensor(masker.special, dtype=ids.dtype).to(device, non_blocking=True)
        maskable = rectangle(~torch.isin(ids, special))
    addend = torch.tensor(addends, dtype=torch.float64).to(device, non_blocking=True)
    number = share_of(maskable.sum(1).double(), masking.rate, addend)
    ordered = (words(Stream.MASK) << 31 | position).where(maskable, NEVER)
    smallest = ordered.topk(int(share_of(longest, masking.rate, 1.0)), dim=1, largest=False).values  # number and more

    def among_smallest(number: Tensor) -> Tensor:
        """(N,) bool. number: (S,) float64, how many in each sequence."""
        last = smallest.gather(1, (number.long() - 1).clamp(min=0)[:, None])
        return ((ordered <= last) & (number > 0)[:, None]).flatten()[inside]

    masked, shown = among_smallest(number), among_smallest(share_of(number, masker.shown, 0.5))

    read, becomes_mask = ids, masked
    if masking.policy != "mask":
        pick = words(Stream.REPLACEMENT).flatten()[inside] * (masker.vocabulary.size - len(masker.special)) >> 32
        for token in masker.special:  # ascending: the pick-th token that is not special
            pick = pick + (pick >= token)
        random, becomes_mask = masked, torch.zeros_like(masked)
        if masking.policy == "bert":
            draw = words(Stream.POLICY).flatten()[inside]
            random = masked & (draw >= MASK_BELOW) & (draw < RANDOM_BELOW)
            becomes_mask = masked & (draw < MASK_BELOW)
        read = torch.where(random, pick, ids)
    read = read.masked_fill(becomes_mask, masker.vocabulary.mask_id)
    removed = becomes_mask & ~shown

    if masker.sizes_follow_from_lengths:
        masks, gone = counts_from_lengths(lengths, addends, masker)
    else:
        masks, gone = torch.stack((number.long(), rectangle(removed).sum(1))).tolist()
    visible = [length - less for length, less in zip(lengths, gone, strict=True)]
    boundaries = cumulative(lengths).to(device, non_blocking=True)
    decoder = Layout(boundaries, (inside % longest).int(), lengths)
    return pack_tokens(ids, read, decoder, masked, ~removed, visible, masks)


def check_lengths(ids: Tensor, lengths: Sequence[int]) -> tuple[int, ...]:
    """`lengths` as a tuple. Raises UserError if ids (N,) are not tokens of that many positions."""
    lengths = tuple(lengths)
    dtype = str(ids.dtype).removeprefix("torch.")
    require(ids.dtype in (torch.int32, torch.int64), f"mask_and_pack: ids must be int32 or int64, not {dtype}")
    require(ids.dim() == 1, f"mask_and_pack: ids must be (N,), sequences end to end, not {tuple(ids.shape)}")
    require(
        all(length >= 0 for length in lengths) and sum(lengths) == ids.shape[0],
        f"mask_and_pack: the lengths sum to {sum(lengths)}, but there are {ids.shape[0]} ids",
    )
    return lengths


def keys(values: Any, count: int, name: str) -> Tensor:
    """(count,) int64 on the host: sample ids or epochs, one a sequence or one for all. Raises UserError on others."""
    if isinstance(values, Tensor):
        require(values.device.type == "cpu", f"mask_and_pack: {name} must be on the host, not on {values.device}")
    given = torch.as_tensor(values, dtype=torch.int64)
    require(given.shape in ((), (count,)), f"mask_and_pack: {name} has shape {tuple(given.shape)}, not ({count},)")
    if not torch.compiler.is_compiling():
        require(bool(((given >= 0) & (given <= LOW)).all()), f"mask_and_pack: {name} must lie in [0, 2**32)")
    return given.expand(count)


def count_addends(samples: Tensor, epochs: Tensor, masker: Masker) -> list[float]:
    """u of floor(rate * n + u), one a sequence: 1/2, or uniform in [0, 1) with stochastic counts."""
    if masker.masking.count == "fixed":
        return [0.5] * samples.shape[0]
    words = philox((0, samples.numpy(), epochs.numpy(), int(Stream.ROUNDING)), masker.seed)[0]
    addends: list[float] = (words / 2.0**32).tolist()
    return addends


def share_of(total: Number, share: float, addend: Number | float) -> Number:
    """floor(share * total + addend), of numbers and of float64 tensors alike; never more than total, whatever the
    rounding of a share next to 1. The product is rounded before the sum, on a device too: its implementations agree."""
    count = (share * total + addend) // 1
    return count - (count > total) * 1.0


def counts_from_lengths(
    lengths: Sequence[int], addends: Sequence[float], masker: Masker
) -> tuple[list[int], list[int]]:
    """Of each sequence, how many tokens are masked and how many the encoder's row lacks, where the lengths say it."""
    rate = masker.masking.rate
    masks = [int(share_of(length, rate, addend)) for length, addend in zip(lengths, addends, strict=True)]
    return masks, removed_of(masks, masker)


def removed_of(masks: Sequence[int], masker: Masker) -> list[int]:
    """Of so many masked tokens, those that the encoder's row lacks, unless the policy's words say it."""
    return [count - int(share_of(count, masker.shown, 0.5)) for count in masks]
