"""Plain PyTorch reference of masking and packing on the device, and what its backends share: counts, keys, checks.

It works on a padded (S, L) rectangle. Nothing is selected by a boolean mask, whose size the host would have to read
back: values are scattered to the rows they get, and those that get none share a slot behind the end, which is cut off.

Shapes: S sequences, L the longest of them, N tokens in all, T of them in the encoder's row, M masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from maelm_fast.batch import PackedBatch, cumulative
from maelm_fast.config import MaskingConfig, require
from maelm_fast.ops.reference.philox import LOW, philox
from maelm_fast.philox import ROUNDS, Stream, philox4x32

NEVER = 1 << 32  # larger than any word: a position that cannot be masked
MASK_BELOW, RANDOM_BELOW = (
    math.ceil(0.8 * 2**32),
    math.ceil(0.9 * 2**32),
)  # words: 80% [MASK], 10% random, 10% as it was

Keys = Tensor | Sequence[int] | int


class Vocabulary(Protocol):
    """What masking has to know of a tokenizer; maelm_fast.data.masking.Vocabulary is one."""

    @property
    def size(self) -> int: ...
    @property
    def mask_id(self) -> int: ...
    @property
    def special(self) -> Sequence[int]: ...


def mask_and_pack(
    ids: Tensor,
    lengths: Sequence[int],
    samples: Keys,
    epochs: Keys,
    masking: MaskingConfig,
    vocabulary: Vocabulary,
    seed: int,
    encoder_sees_mask: bool,
) -> PackedBatch:
    """data.masking.pack(ids.split(lengths), samples, epochs, masking, vocabulary, seed, encoder_sees_mask), on ids'
    device. ids: (N,) int32 or int64. See maelm_fast.ops.mask_and_pack for the rest."""
    lengths = check_lengths(ids, lengths)
    samples, epochs = keys(samples, len(lengths), "samples"), keys(epochs, len(lengths), "epochs")
    special = special_ids(vocabulary, masking)
    addends = count_addends(samples, epochs, masking, seed)
    longest = max(lengths, default=0)

    device = ids.device
    position = torch.arange(longest, device=device)
    length_of = _sent(torch.tensor(lengths, dtype=torch.int64), device)
    start_of = length_of.cumsum(0) - length_of
    valid = position < length_of[:, None]  # (S, L)
    place = (start_of[:, None] + position).clamp(max=max(ids.shape[0] - 1, 0))
    tokens = ids[place].long() * valid
    key = (_sent(samples, device)[:, None], _sent(epochs, device)[:, None])

    maskable = valid
    if not masking.special_tokens:
        maskable = valid & ~torch.isin(tokens, _sent(torch.tensor(special, dtype=torch.int64), device))
    number = device_counts(maskable.sum(1), _sent(torch.tensor(addends, dtype=torch.float64), device), masking.rate)
    words = position_words(longest, key, Stream.MASK, seed).where(maskable, NEVER)
    order = words.argsort(dim=1, stable=True)
    rank = order.argsort(dim=1)
    masked = rank < number[:, None]
    shown = rank < device_counts(number, 0.5, masking.shown)[:, None]

    read, becomes_mask = tokens, masked
    if masking.policy != "mask":
        pick = position_words(longest, key, Stream.REPLACEMENT, seed) * (vocabulary.size - len(special)) >> 32
        for token in special:  # ascending: the pick-th token that is not special
            pick = pick + (pick >= token)
        random, becomes_mask = masked, torch.zeros_like(masked)
        if masking.policy == "bert":
            draw = position_words(longest, key, Stream.POLICY, seed)
            random = masked & (draw >= MASK_BELOW) & (draw < RANDOM_BELOW)
            becomes_mask = masked & (draw < MASK_BELOW)
        read = pick.where(random, tokens)
    read = read.masked_fill(becomes_mask, vocabulary.mask_id)
    in_encoder = valid if encoder_sees_mask else valid & ~(becomes_mask & ~shown)

    if counts_depend_on_device(masking, encoder_sees_mask):
        masks, removed = torch.stack((masked.sum(1), (valid & ~in_encoder).sum(1))).tolist()
    else:
        masks = [count_of(length, addend, masking.rate) for length, addend in zip(lengths, addends, strict=True)]
        removed = [removed_of(count, masking, encoder_sees_mask) for count in masks]
    visible = [length - gone for length, gone in zip(lengths, removed, strict=True)]
    rows = in_encoder.flatten().cumsum(0).view_as(tokens) - 1
    slots = valid.flatten().cumsum(0).view_as(tokens) - 1
    positions = position.expand_as(tokens)
    return PackedBatch(
        visible_ids=_compact(read, in_encoder, sum(visible)),
        visible_positions=_compact(positions, in_encoder, sum(visible)),
        cu_seqlens=_sent(cumulative(visible), device),
        source=_compact(rows.where(in_encoder, -1), valid, sum(lengths)),
        decoder_positions=_compact(positions, valid, sum(lengths)),
        decoder_cu_seqlens=_sent(cumulative(lengths), device),
        masked_index=_compact(slots, masked, sum(masks)),
        masked_cu_seqlens=_sent(cumulative(masks), device),
        labels=_compact(tokens, masked, sum(masks)),
        lengths=tuple(visible),
        decoder_lengths=lengths,
        masked_lengths=tuple(masks),
    )


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


def special_ids(vocabulary: Vocabulary, masking: MaskingConfig) -> list[int]:
    """The special tokens, ascending, each once. Raises UserError if the policy draws random tokens and no other is
    left."""
    special = sorted({token for token in vocabulary.special if 0 <= token < vocabulary.size})
    require(
        masking.policy == "mask" or len(special) < vocabulary.size,
        f"masking.policy {masking.policy} draws random tokens, but every token of the vocabulary is special",
    )
    return special


def counts_depend_on_device(masking: MaskingConfig, encoder_sees_mask: bool) -> bool:
    """Whether the sizes of the batch follow from the ids or from the policy's words, not from the lengths alone."""
    return not masking.special_tokens or (masking.policy == "bert" and not encoder_sees_mask)


def count_addends(samples: Tensor, epochs: Tensor, masking: MaskingConfig, seed: int) -> list[float]:
    """u of floor(rate * n + u), one a sequence: 1/2, or uniform in [0, 1) with stochastic counts."""
    if masking.count == "fixed":
        return [0.5] * samples.shape[0]
    zero = np.zeros(samples.shape[0], dtype=np.uint64)
    counter = (zero, samples.numpy().astype(np.uint64), epochs.numpy().astype(np.uint64), Stream.ROUNDING)
    addends: list[float] = (philox4x32(counter, seed)[0].astype(np.float64) / 2.0**32).tolist()
    return addends


def count_of(maskable: int, addend: float, rate: float) -> int:
    """Tokens to mask of `maskable`; never more, whatever the rounding of a rate next to 1."""
    return min(math.floor(rate * maskable + addend), maskable)


def removed_of(masked: int, masking: MaskingConfig, encoder_sees_mask: bool) -> int:
    """Of so many masked tokens, those that the encoder's row lacks; not with the BERT policy, whose draw says it."""
    if encoder_sees_mask or masking.policy == "random":
        return 0
    return masked - count_of(masked, 0.5, masking.shown)


def device_counts(maskable: Tensor, addends: Tensor | float, rate: float) -> Tensor:
    """count_of() on the device. Two operations, so that the product is rounded before the sum, as on the host."""
    product = maskable.double() * rate
    return torch.minimum((product + addends).floor().to(maskable.dtype), maskable)


def position_words(length: int, key: tuple[Tensor, Tensor], stream: Stream, seed: int) -> Tensor:
    """(S, length) int64, a 32-bit word per position: word p is word p % 4 of block p // 4. key: samples and epochs,
    both (S, 1)."""
    sample, epoch = key
    block = torch.arange(-(-length // 4), device=sample.device).expand(sample.shape[0], -1)
    counter = (block, sample.expand_as(block), epoch.expand_as(block), torch.full_like(block, int(stream)))
    return philox(counter, seed, ROUNDS).flatten(1)[:, :length]


def _compact(values: Tensor, keep: Tensor, total: int) -> Tensor:
    """values[keep] as int32, for a `keep` that is known to hold `total` places."""
    slot = (keep.flatten().cumsum(0) - 1).where(keep.flatten(), total)
    return values.new_empty(total + 1).scatter_(0, slot, values.flatten())[:total].int()


def _sent(values: Tensor, device: torch.device) -> Tensor:
    return values.to(device, non_blocking=True)
