"""Masks as functions, and the packing of masked sequences into a PackedBatch, on the host in NumPy.

The masked positions of a sequence are those with the n smallest Philox words, keyed by (seed, epoch, sample id), one
word per position; ties go to the lower position. Hence the same masks at any batch size and worker count, and from any
implementation that draws the same words.

Shapes: S sequences, L the longest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from maelm_fast.batch import PackedBatch, cumulative
from maelm_fast.config import MaskingConfig, require
from maelm_fast.philox import Stream, position_words

VALIDATION_EPOCH = 0xFFFFFFFF  # an epoch no run reaches: validation masks are the same at every evaluation
_NEVER = np.uint64(1) << np.uint64(32)  # larger than any word: a position that cannot be masked
_BERT_MASK, _BERT_RANDOM = 0.8, 0.9  # cumulative shares: 80% [MASK], 10% random, the rest unchanged


@dataclass(frozen=True)
class Vocabulary:
    """What masking has to know of a tokenizer. special: ids of the special tokens, mask_id among them."""

    size: int
    mask_id: int
    special: tuple[int, ...]


def mask_counts(
    lengths: NDArray[np.int64], samples: NDArray[np.int64], epochs: NDArray[np.int64], masking: MaskingConfig, seed: int
) -> NDArray[np.int64]:
    """(S,) number of tokens to mask in sequences with `lengths` maskable tokens."""
    if masking.count == "fixed":
        return np.floor(masking.rate * lengths + 0.5).astype(np.int64)  # type: ignore[no-any-return]
    words = _words(samples, 1, epochs, Stream.ROUNDING, seed)[:, 0]
    return np.floor(masking.rate * lengths + words.astype(np.float64) / 2.0**32).astype(np.int64)


def choose_masked(
    ids: NDArray[np.int64],
    valid: NDArray[np.bool_],
    samples: NDArray[np.int64],
    epochs: NDArray[np.int64],
    masking: MaskingConfig,
    vocabulary: Vocabulary,
    seed: int,
) -> NDArray[np.bool_]:
    """(S, L) True where a token is masked. ids, valid: (S, L); valid is False in the padding."""
    words = _words(samples, ids.shape[1], epochs, Stream.MASK, seed)
    maskable = valid if masking.special_tokens else valid & ~np.isin(ids, vocabulary.special)
    words = np.where(maskable, words, _NEVER)
    counts = mask_counts(maskable.sum(axis=1), samples, epochs, masking, seed)
    order = np.argsort(words, axis=1, kind="stable")
    chosen = np.zeros_like(valid)
    np.put_along_axis(chosen, order, np.arange(ids.shape[1])[None, :] < counts[:, None], axis=1)
    return chosen


def pack(
    sequences: Sequence[NDArray[np.generic]],
    samples: NDArray[np.int64],
    epochs: NDArray[np.int64],
    masking: MaskingConfig,
    vocabulary: Vocabulary,
    seed: int,
    encoder_sees_mask: bool,
) -> PackedBatch:
    """Mask S sequences of token ids and pack them.

    samples, epochs: (S,) the key of each sequence's masks. encoder_sees_mask: False removes the [MASK] tokens from the
    encoder's row (MAE-LM); True leaves them in (standard MLM). With the BERT policy the tokens shown as random or
    unchanged stay in the encoder's row either way, and are predicted all the same."""
    ids, valid = _padded(sequences, vocabulary)
    masked = choose_masked(ids, valid, samples, epochs, masking, vocabulary, seed)
    shown, becomes_mask = ids.copy(), masked
    if masking.policy == "bert":
        becomes_mask = _bert_policy(shown, masked, samples, epochs, vocabulary, seed)
    shown[becomes_mask] = vocabulary.mask_id
    return _packed(ids, shown, valid, masked, becomes_mask, encoder_sees_mask)


def pack_masked(
    sequences: Sequence[NDArray[np.generic]], vocabulary: Vocabulary, encoder_sees_mask: bool
) -> PackedBatch:
    """Pack S sequences that hold [MASK] already; the labels, which nobody knows, are [MASK] too."""
    ids, valid = _padded(sequences, vocabulary)
    masked = valid & (ids == vocabulary.mask_id)
    return _packed(ids, ids, valid, masked, masked, encoder_sees_mask)


def _padded(
    sequences: Sequence[NDArray[np.generic]], vocabulary: Vocabulary
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """(ids, valid), both (S, L); ids are 0 and valid is False in the padding."""
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    width = int(lengths.max(initial=0))
    valid = np.arange(width)[None, :] < lengths[:, None]
    ids = np.zeros((len(sequences), width), dtype=np.int64)
    ids[valid] = np.concatenate([np.asarray(sequence, dtype=np.int64) for sequence in sequences])
    require(
        int(ids.max(initial=0)) < vocabulary.size,
        f"token id {ids.max(initial=0)} is outside the vocabulary of {vocabulary.size}: the token store is damaged or "
        f"belongs to another tokenizer; prepare it again",
    )
    return ids, valid


def _packed(
    ids: NDArray[np.int64],
    shown: NDArray[np.int64],
    valid: NDArray[np.bool_],
    masked: NDArray[np.bool_],
    becomes_mask: NDArray[np.bool_],
    encoder_sees_mask: bool,
) -> PackedBatch:
    """All (S, L). shown: what the encoder's row holds in place of ids; becomes_mask: where that is [MASK]."""
    in_encoder = valid if encoder_sees_mask else valid & ~becomes_mask
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    rows = np.cumsum(in_encoder).reshape(ids.shape) - 1
    lengths, visible, masks = (here.sum(axis=1).tolist() for here in (valid, in_encoder, masked))
    return PackedBatch(
        visible_ids=_tensor(shown[in_encoder]),
        visible_positions=_tensor(positions[in_encoder]),
        cu_seqlens=cumulative(visible),
        source=_tensor(np.where(in_encoder, rows, -1)[valid]),
        decoder_positions=_tensor(positions[valid]),
        decoder_cu_seqlens=cumulative(lengths),
        masked_index=_tensor(np.flatnonzero(masked[valid])),
        masked_cu_seqlens=cumulative(masks),
        labels=_tensor(ids[masked]),
        lengths=tuple(visible),
        decoder_lengths=tuple(lengths),
        masked_lengths=tuple(masks),
    )


def _bert_policy(
    shown: NDArray[np.int64],
    masked: NDArray[np.bool_],
    samples: NDArray[np.int64],
    epochs: NDArray[np.int64],
    vocabulary: Vocabulary,
    seed: int,
) -> NDArray[np.bool_]:
    """Writes random tokens into `shown` and returns where [MASK] goes. Random tokens are never special ones."""
    width = shown.shape[1]
    draw = _words(samples, width, epochs, Stream.POLICY, seed).astype(np.float64) / 2.0**32
    ordinary = np.setdiff1d(np.arange(vocabulary.size), vocabulary.special)
    pick = _words(samples, width, epochs, Stream.REPLACEMENT, seed) * np.uint64(len(ordinary)) >> np.uint64(32)
    random = masked & (draw >= _BERT_MASK) & (draw < _BERT_RANDOM)
    shown[random] = ordinary[pick[random]]
    return masked & (draw < _BERT_MASK)


def _words(
    samples: NDArray[np.int64], length: int, epochs: NDArray[np.int64], stream: Stream, seed: int
) -> NDArray[np.uint64]:
    """(S, length) words; one pass per epoch among the samples (a batch spans two at most)."""
    words = np.empty((len(samples), length), dtype=np.uint64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        words[here] = position_words(samples[here], length, int(epoch), stream, seed)
    return words


def _tensor(values: NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))
