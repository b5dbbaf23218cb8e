"""mask_and_pack(): draws the masks and builds the PackedBatch where the tokens are.

The host keeps knowing every length. Most counts follow from the lengths alone; where they follow from the tokens, the
device counts first and the host reads that back, once. What the host computed is sent in one copy.

Shapes: S sequences, N tokens in all, T of them in the encoder's row, M masked.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from maelm_fast.batch import Layout, PackedBatch
from maelm_fast.masking import Masker
from maelm_fast.ops import dispatch
from maelm_fast.ops.reference import mask_and_pack as reference
from maelm_fast.ops.reference.mask_and_pack import Keys
from maelm_fast.ops.registration import custom_op, describe

_LONGEST = 4096  # maelm_fast.kernels.mask_and_pack.LONGEST
_ALIGNMENT = 16  # numbers: each part of what is sent starts on a cache sector


def mask_and_pack(
    ids: Tensor,
    lengths: Sequence[int],
    samples: Keys,
    epochs: Keys,
    masker: Masker,
    *,
    backend: str | None = None,
) -> PackedBatch:
    """maelm_fast.data.masking.pack(ids.split(lengths), samples, epochs, masker), bit for bit, on ids' device.

    ids: (N,) int32 or int64, S sequences end to end (of full sequences (S, L): ids.view(-1)). That they lie in
    [0, masker.vocabulary.size) is the caller's duty: a device does not say so in time. lengths: S Python ints, 0 is
    allowed. samples, epochs: what keys each sequence's masks, in [0, 2**32): S ints or one for all, or a tensor of them
    on the host.

    The host waits for the device exactly once if masking.special_tokens is False, or if masking.policy is "bert" and
    the encoder does not see [MASK]: then the sizes follow from the tokens or from the policy's draw. Else never.

    backend: triton (sequences of up to 4,096), reference or auto. Traces under torch.compile(fullgraph=True) where it
    never waits and masking.count is "fixed".

    Raises UserError on ids of another dtype or shape, on lengths that do not sum to N, on keys out of range or on the
    device, and if the backend cannot run (host is the loader's)."""
    lengths = reference.check_lengths(ids, lengths)
    name = dispatch.pick(
        "mask_and_pack",
        backend,
        ids.device,
        {"triton": lambda: _triton_reasons(ids, lengths), "reference": dispatch.always},
    )
    if name == "reference":
        return reference.mask_and_pack(ids, lengths, samples, epochs, masker)
    count, masking, special = len(lengths), masker.masking, masker.special
    longest = max(lengths, default=0)
    samples = reference.keys(samples, count, "samples")
    epochs = reference.keys(epochs, count, "epochs")
    addends = reference.count_addends(samples, epochs, masker)
    seed = (masker.seed + 2**63) % 2**64 - 2**63  # 64 bits, as an int64
    ids = ids.int().contiguous()

    if masker.sizes_follow_from_lengths:
        masks, removed = reference.counts_from_lengths(lengths, addends, masker)
    else:
        sent = _send([_boundaries(lengths), samples, epochs, special, _bits(addends)], ids.device)
        starts, *rest, bits = sent
        masks, by_policy = mask_and_pack_triton_counts(
            ids,
            starts,
            *rest,
            bits.view(torch.float64),
            longest,
            seed,
            masking.rate,
            masking.special_tokens,
            masker.removes_by_policy,
        ).tolist()
        removed = by_policy if masker.removes_by_policy else reference.removed_of(masks, masker)
    visible = tuple(length - gone for length, gone in zip(lengths, removed, strict=True))

    rows = [_boundaries(visible), _boundaries(lengths), _boundaries(masks)]
    sent = _send([*rows, samples, epochs, special], ids.device)
    visible_ids, visible_positions, source, decoder_positions, masked_index, labels = mask_and_pack_triton_fwd(
        ids,
        *sent,
        sum(visible),
        sum(masks),
        longest,
        seed,
        masker.vocabulary.size,
        masker.vocabulary.mask_id,
        masking.special_tokens,
        masking.policy,
        _read(masker),
    )
    return PackedBatch(
        visible_ids,
        source,
        masked_index,
        labels,
        visible=Layout(sent[0], visible_positions, visible),
        decoder=Layout(sent[1], decoder_positions, lengths),
        masked=Layout(sent[2], decoder_positions[masked_index], tuple(masks)),
    )


@custom_op("mask_and_pack_triton_counts")
def mask_and_pack_triton_counts(
    ids: Tensor,
    starts: Tensor,
    samples: Tensor,
    epochs: Tensor,
    special: Tensor,
    addends: Tensor,
    longest: int,
    seed: int,
    rate: float,
    special_tokens: bool,
    policy_removes: bool,
) -> Tensor:
    """(2, S) int32: the tokens to mask, and those of them that the BERT policy removes (else the same again)."""
    from maelm_fast.kernels import mask_and_pack as kernels

    maskable = starts.diff() if special_tokens else kernels.maskable_counts(ids, starts, special, longest)
    numbers = reference.share_of(maskable.double(), rate, addends).int()
    removed = numbers
    if policy_removes:
        removed = kernels.removed_counts(ids, starts, samples, epochs, special, numbers, longest, seed, special_tokens)
    return torch.stack((numbers, removed))


def _fake_counts(ids: Tensor, starts: Tensor, *_: object) -> Tensor:
    return starts.new_empty(2, starts.shape[0] - 1)


describe("mask_and_pack_triton_counts", _fake_counts)


@custom_op("mask_and_pack_triton_fwd")
def mask_and_pack_triton_fwd(
    ids: Tensor,
    cu_seqlens: Tensor,
    decoder_cu_seqlens: Tensor,
    masked_cu_seqlens: Tensor,
    samples: Tensor,
    epochs: Tensor,
    special: Tensor,
    num_visible: int,
    num_masked: int,
    longest: int,
    seed: int,
    vocab_size: int,
    mask_id: int,
    special_tokens: bool,
    policy: str,
    read: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """visible_ids, visible_positions, source, decoder_positions, masked_index, labels. Integers have no backward."""
    from maelm_fast.kernels import mask_and_pack as kernels

    return kernels.mask_and_pack_fwd(
        ids,
        cu_seqlens,
        decoder_cu_seqlens,
        masked_cu_seqlens,
        samples,
        epochs,
        special,
        num_visible,
        num_masked,
        longest,
        seed,
        vocab_size,
        mask_id,
        special_tokens,
        policy,
        read,
    )


def _fake_fwd(
    ids: Tensor,
    cu_seqlens: Tensor,
    decoder_cu_seqlens: Tensor,
    masked_cu_seqlens: Tensor,
    samples: Tensor,
    epochs: Tensor,
    special: Tensor,
    num_visible: int,
    num_masked: int,
    *_: object,
) -> tuple[Tensor, ...]:
    sizes = (num_visible, num_visible, ids.shape[0], ids.shape[0], num_masked, num_masked)
    return tuple(ids.new_empty(size, dtype=torch.int32) for size in sizes)


describe("mask_and_pack_triton_fwd", _fake_fwd)


def _triton_reasons(ids: Tensor, lengths: tuple[int, ...]) -> list[str]:
    reasons = dispatch.triton_reasons(ids)
    if (longest := max(lengths, default=0)) > _LONGEST:
        reasons.append(f"a sequence of {longest} tokens (it takes up to {_LONGEST})")
    return reasons


def _read(masker: Masker) -> str:
    """Which of [MASK] the encoder reads: none, some or all."""
    return {0.0: "none", 1.0: "all"}.get(masker.shown, "some")


def _boundaries(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def _bits(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).view(torch.int32)


def _send(parts: Sequence[Tensor | list[int]], device: torch.device) -> list[Tensor]:
    """The parts on the device as int32 (of larger numbers the low bits), in one copy; the host does not wait for it."""
    tensors = [part if isinstance(part, Tensor) else torch.tensor(part, dtype=torch.int64) for part in parts]
    room = [-(-part.shape[0] // _ALIGNMENT) * _ALIGNMENT for part in tensors]
    pinned = device.type == "cuda" and not torch.compiler.is_compiling()
    row = torch.zeros(sum(room), dtype=torch.int32, pin_memory=pinned)
    starts = [0, *itertools.accumulate(room)]
    for start, part in zip(starts, tensors, strict=False):
        row[start : start + part.shape[0]] = part
    row = row.to(device, non_blocking=True)
    return [row[start : start + part.shape[0]] for start, part in zip(starts, tensors, strict=False)]
