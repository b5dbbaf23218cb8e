"""Sequences masked and packed on the host: by the C++ of csrc/host/masking.cpp, or where it was not built by the
reference of ops.mask_and_pack, with the same bits. What a mask depends on is said in maelm_fast/masking.py.

Shapes: S sequences, N tokens in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray

from maelm_fast import native
from maelm_fast.batch import PackedBatch, RaggedBatch, layout_of, pack_tokens
from maelm_fast.config import require
from maelm_fast.data.update import ALIGNMENT, PackedUpdate, new_row
from maelm_fast.masking import Masker, Vocabulary
from maelm_fast.ops.reference.mask_and_pack import mask_and_pack

_TOKEN_DTYPES = tuple(np.dtype(name) for name in ("uint16", "uint32", "int32", "int64"))
_LARGEST_WORD = 0xFFFFFFFF
_LARGEST_ROW = 2**31 - 1


def pack(
    sequences: Sequence[NDArray[np.generic]], samples: NDArray[np.int64], epochs: NDArray[np.int64], masker: Masker
) -> PackedBatch:
    """Mask S sequences of token ids and pack them.

    sequences: S rows of integers of any type. samples, epochs: (S,) the key of each sequence's masks, each in
    [0, 2**32).

    Raises UserError on a token id outside the vocabulary."""
    return pack_update(end_to_end(sequences, samples, epochs), [len(sequences)], masker).micro_batches()[0]


def pack_update(batch: RaggedBatch, counts: Sequence[int], masker: Masker) -> PackedUpdate:
    """`pack` for several micro-batches, of counts[b] consecutive sequences each, in one call of the compiled code."""
    _check(batch, masker.vocabulary)
    host = native.host()
    if host is not None:
        return _pack_host(host, batch, counts, masker)
    return PackedUpdate.of([_pack_plain(part, masker) for part in batch.split(counts)])


def pack_plain(
    sequences: Sequence[NDArray[np.generic]], samples: NDArray[np.int64], epochs: NDArray[np.int64], masker: Masker
) -> PackedBatch:
    """`pack` in plain PyTorch: the reference for tests and benchmarks."""
    batch = end_to_end(sequences, samples, epochs)
    _check(batch, masker.vocabulary)
    return _pack_plain(batch, masker)


def pack_masked(
    sequences: Sequence[NDArray[np.generic]], vocabulary: Vocabulary, encoder_sees_mask: bool
) -> PackedBatch:
    """Pack S sequences that hold [MASK] already; the labels, which nobody knows, are [MASK] too."""
    unused = np.zeros(len(sequences), dtype=np.int64)
    batch = end_to_end(sequences, unused, unused)
    _check(batch, vocabulary)
    ids = batch.ids.long()
    masked = ids == vocabulary.mask_id
    masks = [int((np.asarray(sequence) == vocabulary.mask_id).sum()) for sequence in sequences]
    lengths = batch.lengths.tolist()
    if encoder_sees_mask:
        return pack_tokens(ids, ids, layout_of(lengths), masked, torch.ones_like(masked), lengths, masks)
    visible = [length - count for length, count in zip(lengths, masks, strict=True)]
    return pack_tokens(ids, ids, layout_of(lengths), masked, ~masked, visible, masks)


def end_to_end(
    sequences: Sequence[NDArray[np.generic]], samples: NDArray[np.int64], epochs: NDArray[np.int64]
) -> RaggedBatch:
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
    return RaggedBatch(torch.from_numpy(ids), np.array([len(array) for array in arrays], dtype=np.int64), *keys)


def _check(batch: RaggedBatch, vocabulary: Vocabulary) -> None:
    """The only place where both implementations check their input."""
    count = len(batch.lengths)
    for values, name in ((batch.samples, "samples"), (batch.epochs, "epochs")):
        if values.shape != (count,):
            raise ValueError(f"{count} sequences need {name} of shape ({count},), not {values.shape}")
        if values.size and not 0 <= int(values.min()) <= int(values.max()) <= _LARGEST_WORD:
            raise ValueError(f"{name} must lie in [0, 2**32): they are 32-bit words of the generator's counter")
    check_ids(batch.ids, vocabulary)


def check_ids(ids: torch.Tensor, vocabulary: Vocabulary) -> None:
    """UserError if a token, on the host, lies outside the vocabulary."""
    array = ids.numpy()  # PyTorch has no minimum of uint16
    smallest, largest = (int(array.min()), int(array.max())) if array.size else (0, 0)
    wrong = smallest if smallest < 0 else largest
    require(
        0 <= wrong < vocabulary.size,
        f"token id {wrong} is outside the vocabulary of {vocabulary.size}: the token store is damaged or "
        f"belongs to another tokenizer; prepare it again",
    )


def _pack_plain(batch: RaggedBatch, masker: Masker) -> PackedBatch:
    keys = torch.from_numpy(batch.samples), torch.from_numpy(batch.epochs)
    return mask_and_pack(batch.ids.long(), batch.lengths.tolist(), *keys, masker)


def _pack_host(host: ModuleType, batch: RaggedBatch, counts: Sequence[int], masker: Masker) -> PackedUpdate:
    made: list[torch.Tensor] = []

    def allocate(elements: int) -> NDArray[np.int32]:
        made.append(new_row(elements))
        return made[0].numpy()

    masking, vocabulary = masker.masking, masker.vocabulary
    visible, masked = host.pack(
        ids=batch.ids.numpy(),
        lengths=batch.lengths,
        samples=batch.samples,
        epochs=batch.epochs,
        counts=counts,
        alignment=ALIGNMENT,
        allocate=allocate,
        rate=masking.rate,
        stochastic=masking.count == "stochastic",
        special_tokens=masking.special_tokens,
        policy=masking.policy,
        shown=masker.shown,
        vocab_size=vocabulary.size,
        mask_id=vocabulary.mask_id,
        special=masker.special,
        seed=masker.seed & 0xFFFFFFFFFFFFFFFF,
    )
    original = (tuple(lengths.tolist()) for lengths in np.split(batch.lengths, np.cumsum(counts))[:-1])
    return PackedUpdate(made[0], list(zip(visible, original, masked, strict=True)))
