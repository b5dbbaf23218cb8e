"""Masks as functions, and the packing of masked sequences into a PackedBatch, on the host.

The masked positions of a sequence are those with the n smallest Philox words, keyed by (seed, epoch, sample id), one
word per position; ties go to the lower position. Those that the encoder reads as [MASK], where it reads some, are the
ones with the smallest words among them. Hence the same masks at any batch size and worker count, and from any
implementation that draws the same words. There are two here: `pack` uses the C++ of csrc/host/masking.cpp where it was
built; `pack_numpy` is the reference, gives the same bits, and does it where it was not.

Shapes: S sequences, N tokens in all, L tokens in the longest sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from maelm_fast import native
from maelm_fast.batch import PackedBatch, cumulative
from maelm_fast.config import MaskingConfig, require
from maelm_fast.data.update import ALIGNMENT, PackedUpdate, new_row
from maelm_fast.philox import Stream, position_words

VALIDATION_EPOCH = 0xFFFFFFFF  # an epoch no run reaches: validation masks are the same at every evaluation
_NEVER = np.uint64(1) << np.uint64(32)  # larger than any word: a position that cannot be masked
_BERT_MASK, _BERT_RANDOM = 0.8, 0.9  # cumulative shares: 80% [MASK], 10% random, the rest unchanged
_TOKEN_DTYPES = tuple(np.dtype(name) for name in ("uint16", "uint32", "int32", "int64"))
_LARGEST_WORD = 0xFFFFFFFF
_LARGEST_ROW = 2**31 - 1


@dataclass(frozen=True)
class Vocabulary:
    """What masking has to know of a tokenizer. special: ids of the special tokens, mask_id among them."""

    size: int
    mask_id: int
    special: tuple[int, ...]


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

    sequences: S rows of integers of any type. samples, epochs: (S,) the key of each sequence's masks, each in
    [0, 2**32). seed: 64 bits. encoder_sees_mask: False removes the [MASK] tokens from the encoder's row (MAE-LM), all
    but masking.shown of them; True leaves them in (standard MLM). With the BERT and the random policy the tokens shown
    as random or unchanged stay in the encoder's row either way, and are predicted all the same.

    Raises UserError on a token id outside the vocabulary, and if the policy has no random token to draw."""
    rows = _end_to_end(sequences, samples, epochs)
    return pack_update(rows, [len(sequences)], masking, vocabulary, seed, encoder_sees_mask).micro_batches()[0]


def pack_update(
    rows: Rows,
    counts: Sequence[int],
    masking: MaskingConfig,
    vocabulary: Vocabulary,
    seed: int,
    encoder_sees_mask: bool,
) -> PackedUpdate:
    """`pack` for several micro-batches, of counts[b] consecutive sequences each, in one call of the compiled code."""
    _check(rows, vocabulary, masking.policy)
    host = native.host()
    if host is None:
        parts = [_pack_numpy(part, masking, vocabulary, seed, encoder_sees_mask) for part in rows.split(counts)]
        return PackedUpdate.of(parts)
    return _pack_host(host, rows, counts, masking, vocabulary, seed, encoder_sees_mask)


def pack_numpy(
    sequences: Sequence[NDArray[np.generic]],
    samples: NDArray[np.int64],
    epochs: NDArray[np.int64],
    masking: MaskingConfig,
    vocabulary: Vocabulary,
    seed: int,
    encoder_sees_mask: bool,
) -> PackedBatch:
    """`pack` in plain NumPy: the reference for tests and benchmarks."""
    rows = _end_to_end(sequences, samples, epochs)
    _check(rows, vocabulary, masking.policy)
    return _pack_numpy(rows, masking, vocabulary, seed, encoder_sees_mask)


def pack_masked(
    sequences: Sequence[NDArray[np.generic]], vocabulary: Vocabulary, encoder_sees_mask: bool
) -> PackedBatch:
    """Pack S sequences that hold [MASK] already; the labels, which nobody knows, are [MASK] too."""
    unused = np.zeros(len(sequences), dtype=np.int64)
    rows = _end_to_end(sequences, unused, unused)
    _check(rows, vocabulary, "mask")
    ids, valid = _padded(rows)
    masked = valid & (ids == vocabulary.mask_id)
    return _packed(ids, ids, valid, masked, valid if encoder_sees_mask else valid & ~masked)


class Rows(NamedTuple):
    """S sequences, and what keys their masks."""

    ids: NDArray[np.generic]
    """(N,) one sequence after another, contiguous, of one of _TOKEN_DTYPES."""
    lengths: NDArray[np.int64]
    """(S,), as the next two."""
    samples: NDArray[np.int64]
    epochs: NDArray[np.int64]

    def split(self, counts: Sequence[int]) -> list[Rows]:
        """Parts of counts[b] consecutive sequences each."""
        ends = np.cumsum(counts)[:-1]
        tokens = np.concatenate([[0], np.cumsum(self.lengths)])[ends]
        keys = (np.split(values, ends) for values in self[1:])
        return [Rows(*part) for part in zip(np.split(self.ids, tokens), *keys, strict=True)]


def _end_to_end(
    sequences: Sequence[NDArray[np.generic]], samples: NDArray[np.int64], epochs: NDArray[np.int64]
) -> Rows:
    arrays = [np.asarray(sequence) for sequence in sequences]
    dtypes = {array.dtype for array in arrays}
    if any(dtype.kind not in "iu" for dtype in dtypes):
        raise ValueError(f"token ids must be integers, not {', '.join(sorted(map(str, dtypes)))}")
    dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.int64)
    if dtype not in _TOKEN_DTYPES:
        dtype = np.dtype(np.int64)
    ids = np.concatenate(arrays, dtype=dtype, casting="unsafe") if arrays else np.empty(0, dtype)
    if ids.size > _LARGEST_ROW:
        raise ValueError(f"{ids.size} tokens in a batch are more than int32 can count")
    keys = np.asarray(samples, dtype=np.int64), np.asarray(epochs, dtype=np.int64)
    return Rows(ids, np.array([len(array) for array in arrays], dtype=np.int64), *keys)


def _check(rows: Rows, vocabulary: Vocabulary, policy: str) -> None:
    """The only place where both implementations check their input."""
    count = len(rows.lengths)
    for values, name in ((rows.samples, "samples"), (rows.epochs, "epochs")):
        if values.shape != (count,):
            raise ValueError(f"{count} sequences need {name} of shape ({count},), not {values.shape}")
        if values.size and not 0 <= int(values.min()) <= int(values.max()) <= _LARGEST_WORD:
            raise ValueError(f"{name} must lie in [0, 2**32): they are 32-bit words of the generator's counter")
    check_ids(rows.ids, vocabulary)
    if policy != "mask":
        special = {token for token in vocabulary.special if 0 <= token < vocabulary.size}
        require(len(special) < vocabulary.size, f"masking.policy {policy} has no token to draw from: all are special")


def check_ids(ids: NDArray[np.generic], vocabulary: Vocabulary) -> None:
    """UserError if a token lies outside the vocabulary."""
    smallest, largest = (int(ids.min()), int(ids.max())) if ids.size else (0, 0)
    wrong = smallest if smallest < 0 else largest
    require(
        0 <= wrong < vocabulary.size,
        f"token id {wrong} is outside the vocabulary of {vocabulary.size}: the token store is damaged or "
        f"belongs to another tokenizer; prepare it again",
    )


def _pack_host(
    host: ModuleType,
    rows: Rows,
    counts: Sequence[int],
    masking: MaskingConfig,
    vocabulary: Vocabulary,
    seed: int,
    encoder_sees_mask: bool,
) -> PackedUpdate:
    made: list[torch.Tensor] = []

    def allocate(elements: int) -> NDArray[np.int32]:
        made.append(new_row(elements))
        return made[0].numpy()

    sizes, visible, masked = host.pack(
        **rows._asdict(),
        counts=counts,
        alignment=ALIGNMENT,
        allocate=allocate,
        rate=masking.rate,
        stochastic=masking.count == "stochastic",
        special_tokens=masking.special_tokens,
        policy=masking.policy,
        shown=masking.shown,
        encoder_sees_mask=encoder_sees_mask,
        vocab_size=vocabulary.size,
        mask_id=vocabulary.mask_id,
        special=vocabulary.special,
        seed=seed & 0xFFFFFFFFFFFFFFFF,
    )
    original = iter(rows.lengths.tolist())
    lengths = [tuple(itertools.islice(original, count)) for count in counts]
    return PackedUpdate(made[0], sizes, list(zip(visible, lengths, masked, strict=True)))


def _pack_numpy(
    rows: Rows, masking: MaskingConfig, vocabulary: Vocabulary, seed: int, encoder_sees_mask: bool
) -> PackedBatch:
    ids, valid = _padded(rows)
    masked, shown = choose_masked(ids, valid, rows.samples, rows.epochs, masking, vocabulary, seed)
    read, becomes_mask = ids.copy(), masked
    if masking.policy != "mask":
        becomes_mask = _replace(read, masked, rows.samples, rows.epochs, masking.policy, vocabulary, seed)
    read[becomes_mask] = vocabulary.mask_id
    return _packed(ids, read, valid, masked, valid if encoder_sees_mask else valid & ~(becomes_mask & ~shown))


def mask_counts(
    lengths: NDArray[np.int64], samples: NDArray[np.int64], epochs: NDArray[np.int64], masking: MaskingConfig, seed: int
) -> NDArray[np.int64]:
    """(S,) number of tokens to mask in sequences with `lengths` maskable tokens."""
    if masking.count == "fixed":
        counts = np.floor(masking.rate * lengths + 0.5)
    else:
        words = _words(samples, 1, epochs, Stream.ROUNDING, seed)[:, 0]
        counts = np.floor(masking.rate * lengths + words.astype(np.float64) / 2.0**32)
    counts = np.minimum(counts, lengths)  # at a rate next to 1 the sum may round up to one too many
    return counts.astype(np.int64)  # type: ignore[no-any-return]


def choose_masked(
    ids: NDArray[np.int64],
    valid: NDArray[np.bool_],
    samples: NDArray[np.int64],
    epochs: NDArray[np.int64],
    masking: MaskingConfig,
    vocabulary: Vocabulary,
    seed: int,
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(masked, shown), both (S, L): where a token is masked, and where the encoder reads that as [MASK] by
    masking.shown. ids, valid: (S, L); valid is False in the padding."""
    words = _words(samples, ids.shape[1], epochs, Stream.MASK, seed)
    maskable = valid if masking.special_tokens else valid & ~np.isin(ids, vocabulary.special)
    words = np.where(maskable, words, _NEVER)
    counts = mask_counts(maskable.sum(axis=1), samples, epochs, masking, seed)
    ranks = np.empty_like(ids)
    places = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    np.put_along_axis(ranks, np.argsort(words, axis=1, kind="stable"), places, axis=1)
    shown = np.floor(masking.shown * counts + 0.5)
    return ranks < counts[:, None], ranks < shown[:, None]


def _padded(rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """(ids, valid), both (S, L); ids are 0 and valid is False in the padding."""
    valid = np.arange(rows.lengths.max(initial=0))[None, :] < rows.lengths[:, None]
    ids = np.zeros(valid.shape, dtype=np.int64)
    ids[valid] = rows.ids
    return ids, valid


def _packed(
    ids: NDArray[np.int64],
    read: NDArray[np.int64],
    valid: NDArray[np.bool_],
    masked: NDArray[np.bool_],
    in_encoder: NDArray[np.bool_],
) -> PackedBatch:
    """All (S, L). read: what the encoder reads in place of ids; in_encoder: where it reads anything."""
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    rows = np.cumsum(in_encoder).reshape(ids.shape) - 1
    lengths, visible, masks = (here.sum(axis=1).tolist() for here in (valid, in_encoder, masked))
    return PackedBatch(
        visible_ids=_tensor(read[in_encoder]),
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


def _replace(
    read: NDArray[np.int64],
    masked: NDArray[np.bool_],
    samples: NDArray[np.int64],
    epochs: NDArray[np.int64],
    policy: str,
    vocabulary: Vocabulary,
    seed: int,
) -> NDArray[np.bool_]:
    """Writes the random tokens of the bert or the random policy into `read`, never special ones, and returns where
    [MASK] goes."""
    width = read.shape[1]
    random, becomes_mask = masked, np.zeros_like(masked)
    if policy == "bert":
        draw = _words(samples, width, epochs, Stream.POLICY, seed).astype(np.float64) / 2.0**32
        random = masked & (draw >= _BERT_MASK) & (draw < _BERT_RANDOM)
        becomes_mask = masked & (draw < _BERT_MASK)
    ordinary = np.setdiff1d(np.arange(vocabulary.size), vocabulary.special)
    pick = _words(samples, width, epochs, Stream.REPLACEMENT, seed) * np.uint64(len(ordinary)) >> np.uint64(32)
    read[random] = ordinary[pick[random]]
    return becomes_mask


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
