"""Masking and packing: one program draws a sequence's words, selects, and writes its part of every output.

The n smallest words are found by bisecting their 32-bit range: a threshold that exactly n words do not exceed will do,
and of random words there is one after about log2(length) counts. Only if the words run into a tie is the range bisected
to its end; the lower positions win it. Which of the masked tokens the encoder reads as [MASK], where it reads some, is
the same search among them with a smaller n. The encoder's and the masked tokens' ranks come from one scan: two 16-bit
counters in each lane. All arithmetic is on integers, so that the bits are those of maelm_fast/data/masking.py.

Shapes: S sequences, N tokens in all, T of them in the encoder's row, M masked; BLOCK lanes, at least the longest
sequence.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from maelm_fast.kernels.common import FUSED

LONGEST = 4096  # tokens of a sequence: what a program holds in registers; ranks must fit 16 bits
ROUNDS = tl.constexpr(10)
# maelm_fast.philox.Stream
MASK_STREAM, POLICY_STREAM, REPLACEMENT_STREAM = tl.constexpr(0), tl.constexpr(2), tl.constexpr(3)
MASK_BELOW = tl.constexpr(math.ceil(0.8 * 2**32))  # a policy word below it: [MASK]
RANDOM_BELOW = tl.constexpr(math.ceil(0.9 * 2**32))  # else, below this: a random token
READ_BY_POLICY = {"mask": ("none", "some", "all"), "bert": ("none", "all"), "random": ("all",)}

# Sequences start anywhere in their rows: compiling a kernel again for aligned arguments would gain nothing.
RUNTIME = (
    *("ids", "starts", "cu_seqlens", "decoder_cu_seqlens", "masked_cu_seqlens", "samples", "epochs", "special"),
    *("numbers", "maskable", "removed"),
    *("visible_ids", "visible_positions", "source", "decoder_positions", "masked_index", "labels"),
    *("seed_low", "seed_high", "mask_id", "num_special", "num_ordinary"),
)


@triton.jit
def _words(sample, epoch, seed_low, seed_high, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    """(BLOCK,) uint32, a word per position: word p is word p % 4 of Philox block p // 4."""
    block = tl.arange(0, BLOCK // 4)
    zero = tl.zeros_like(block)
    seed = (seed_high.to(tl.uint32).to(tl.uint64) << 32) | seed_low.to(tl.uint32).to(tl.uint64)
    a, b, c, d = tl.philox(seed, block, zero + sample, zero + epoch, zero + STREAM, ROUNDS)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK,))


@triton.jit
def smallest(words, maskable, number):
    """(BLOCK,) bools: the `number` smallest of the maskable words, ties to the lower position. words: uint32."""
    low = tl.full((), 0, tl.int64)
    high = tl.full((), 0xFFFFFFFF, tl.int64)
    found = tl.sum(maskable.to(tl.int32), 0)  # maskable words that do not exceed high: `number` at least
    while (low < high) & (found != number):
        middle = (low + high) >> 1
        count = tl.sum((maskable & (words <= middle.to(tl.uint32))).to(tl.int32), 0)
        enough = count >= number
        found = tl.where(enough, count, found)
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    chosen = maskable & (words <= high.to(tl.uint32))
    if found != number:
        edge = (maskable & (words == high.to(tl.uint32))).to(tl.int32)
        chosen = chosen & ((edge == 0) | (tl.cumsum(edge, 0) <= tl.sum(edge, 0) - (found - number)))
    return chosen


@triton.jit
def _is_special(tokens, special, num_special):
    """Bools like tokens. special: pointer, (num_special,)."""
    found = tl.full(tokens.shape, False, tl.int1)
    for i in range(num_special):
        found = found | (tokens == tl.load(special + i))
    return found


@triton.jit(do_not_specialize=RUNTIME)
def _mask_and_pack_maskable_kernel(
    ids,  # (N,) int32
    starts,  # (S + 1,) int32, boundaries of the sequences in ids
    special,  # (num_special,) int32
    maskable,  # out (S,) int32, tokens that are not special
    num_special,  # int32
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    start = tl.load(starts + sequence)
    position = tl.arange(0, BLOCK)
    valid = position < tl.load(starts + sequence + 1) - start
    tokens = tl.load(ids + start + position, mask=valid, other=0).to(tl.int32)
    tl.store(maskable + sequence, tl.sum((valid & ~_is_special(tokens, special, num_special)).to(tl.int32), 0))


@triton.jit(do_not_specialize=RUNTIME)
def _mask_and_pack_removed_kernel(
    ids,  # (N,) int32
    starts,  # (S + 1,) int32, boundaries of the sequences in ids
    samples,  # (S,) int32, the bits of a uint32
    epochs,  # (S,) int32, the bits of a uint32
    special,  # (num_special,) int32
    numbers,  # (S,) int32, tokens to mask
    removed,  # out (S,) int32, tokens that the BERT policy turns into [MASK]
    seed_low,  # int32, the bits of the seed's low half
    seed_high,  # int32, and of its high half
    num_special,  # int32
    SPECIAL_TOKENS: tl.constexpr,  # special tokens may be masked
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    start = tl.load(starts + sequence)
    sample = tl.load(samples + sequence)
    epoch = tl.load(epochs + sequence)
    position = tl.arange(0, BLOCK)
    valid = position < tl.load(starts + sequence + 1) - start
    maskable = valid
    if not SPECIAL_TOKENS:
        tokens = tl.load(ids + start + position, mask=valid, other=0).to(tl.int32)
        maskable = valid & ~_is_special(tokens, special, num_special)
    words = _words(sample, epoch, seed_low, seed_high, MASK_STREAM, BLOCK)
    masked = smallest(words, maskable, tl.load(numbers + sequence))
    draw = _words(sample, epoch, seed_low, seed_high, POLICY_STREAM, BLOCK)
    tl.store(removed + sequence, tl.sum((masked & (draw < MASK_BELOW)).to(tl.int32), 0))


@triton.jit(do_not_specialize=RUNTIME)
def _mask_and_pack_fwd_kernel(
    ids,  # (N,) int32
    cu_seqlens,  # (S + 1,) int32, boundaries of the sequences in the encoder's row
    decoder_cu_seqlens,  # (S + 1,) int32, in ids and in the decoder's row
    masked_cu_seqlens,  # (S + 1,) int32, in masked_index
    samples,  # (S,) int32, the bits of a uint32
    epochs,  # (S,) int32, the bits of a uint32
    special,  # (num_special,) int32, ascending
    visible_ids,  # out (T,) int32
    visible_positions,  # out (T,) int32
    source,  # out (N,) int32
    decoder_positions,  # out (N,) int32
    masked_index,  # out (M,) int32
    labels,  # out (M,) int32
    seed_low,  # int32, the bits of the seed's low half
    seed_high,  # int32, and of its high half
    mask_id,  # int32
    num_special,  # int32
    num_ordinary,  # int32, tokens of the vocabulary that are not special
    SPECIAL_TOKENS: tl.constexpr,  # special tokens may be masked
    POLICY: tl.constexpr,  # masked tokens become: mask: [MASK]; bert: 80% that, 10% random; random: random
    READ: tl.constexpr,  # which of [MASK] stay in the encoder's row: none, all, or some, by the length of the row
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    start = tl.load(decoder_cu_seqlens + sequence)
    first_visible = tl.load(cu_seqlens + sequence)
    first_masked = tl.load(masked_cu_seqlens + sequence)
    number = tl.load(masked_cu_seqlens + sequence + 1) - first_masked
    sample = tl.load(samples + sequence)
    epoch = tl.load(epochs + sequence)
    position = tl.arange(0, BLOCK)
    valid = position < tl.load(decoder_cu_seqlens + sequence + 1) - start
    slot = start + position
    tokens = tl.load(ids + slot, mask=valid, other=0).to(tl.int32)

    maskable = valid
    if not SPECIAL_TOKENS:
        maskable = valid & ~_is_special(tokens, special, num_special)
    words = _words(sample, epoch, seed_low, seed_high, MASK_STREAM, BLOCK)
    masked = smallest(words, maskable, number)
    becomes_mask = masked
    read = tokens
    if POLICY != "mask":
        random = masked
        if POLICY == "bert":
            draw = _words(sample, epoch, seed_low, seed_high, POLICY_STREAM, BLOCK)
            becomes_mask = masked & (draw < MASK_BELOW)
            random = masked & (draw >= MASK_BELOW) & (draw < RANDOM_BELOW)
        word = _words(sample, epoch, seed_low, seed_high, REPLACEMENT_STREAM, BLOCK)
        pick = tl.umulhi(word, tl.zeros_like(word) + num_ordinary.to(tl.uint32)).to(tl.int32)
        for i in range(num_special):
            pick += (pick >= tl.load(special + i)).to(tl.int32)
        read = tl.where(random, pick, tokens)
    if POLICY != "random":
        read = tl.where(becomes_mask, mask_id, read)
    in_encoder = valid
    if READ == "none":
        in_encoder = valid & ~becomes_mask
    if READ == "some":
        visible = tl.load(cu_seqlens + sequence + 1) - first_visible
        length = tl.load(decoder_cu_seqlens + sequence + 1) - start
        in_encoder = valid & (~masked | smallest(words, masked, number - (length - visible)))

    here = in_encoder.to(tl.int32) | (masked.to(tl.int32) << 16)
    before = tl.cumsum(here, 0) - here
    row = first_visible + (before & 0xFFFF)
    tl.store(visible_ids + row, read, mask=in_encoder)
    tl.store(visible_positions + row, position, mask=in_encoder)
    tl.store(source + slot, tl.where(in_encoder, row, -1), mask=valid)
    tl.store(decoder_positions + slot, position, mask=valid)
    place = first_masked + (before >> 16)
    tl.store(masked_index + place, slot, mask=masked)
    tl.store(labels + place, tokens, mask=masked)


def maskable_counts(ids: Tensor, starts: Tensor, special: Tensor, longest: int) -> Tensor:
    """(S,) int32: the tokens of each sequence that are not special. ids: (N,), starts: (S + 1,), special: any number.
    longest: tokens of the longest sequence."""
    maskable = torch.empty(starts.shape[0] - 1, dtype=torch.int32, device=ids.device)
    if maskable.shape[0]:
        with torch.cuda.device_of(ids):
            _mask_and_pack_maskable_kernel[maskable.shape](
                ids, starts, special, maskable, special.shape[0], **launch(longest)
            )
    return maskable


def removed_counts(
    ids: Tensor,
    starts: Tensor,
    samples: Tensor,
    epochs: Tensor,
    special: Tensor,
    numbers: Tensor,
    longest: int,
    seed: int,
    special_tokens: bool,
) -> Tensor:
    """(S,) int32: the tokens of each sequence that become [MASK] with the BERT policy, of `numbers` (S,) masked."""
    removed = torch.empty_like(numbers)
    if removed.shape[0]:
        with torch.cuda.device_of(ids):
            _mask_and_pack_removed_kernel[removed.shape](
                ids,
                starts,
                samples,
                epochs,
                special,
                numbers,
                removed,
                *halves(seed),
                special.shape[0],
                SPECIAL_TOKENS=special_tokens,
                **launch(longest),
            )
    return removed


def mask_and_pack_fwd(
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
    """(visible_ids, visible_positions, source, decoder_positions, masked_index, labels) of a PackedBatch, all int32.

    The three boundaries (S + 1,) hold the counts, so that num_visible, num_masked and longest follow from them. policy:
    mask, bert or random. read: which of [MASK] the encoder reads: none, some (policy mask only) or all."""
    sizes = (num_visible, num_visible, ids.shape[0], ids.shape[0], num_masked, num_masked)
    outputs = tuple(torch.empty(size, dtype=torch.int32, device=ids.device) for size in sizes)
    if samples.shape[0]:
        with torch.cuda.device_of(ids):
            _mask_and_pack_fwd_kernel[samples.shape](
                ids,
                cu_seqlens,
                decoder_cu_seqlens,
                masked_cu_seqlens,
                samples,
                epochs,
                special,
                *outputs,
                *halves(seed),
                mask_id,
                special.shape[0],
                vocab_size - special.shape[0],
                SPECIAL_TOKENS=special_tokens,
                POLICY=policy,
                READ=read,
                **launch(longest),
            )
    return outputs  # type: ignore[return-value]


def halves(seed: int) -> tuple[int, int]:
    """The low and the high 32 bits of a 64-bit seed, each as the int32 of the same bits."""
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    return low - (low >> 31 << 32), high - (high >> 31 << 32)


def launch(longest: int) -> dict[str, Any]:
    """Lanes and warps: 16 lanes a thread. Up to 512 tokens one warp counts without a barrier, and any batch of them
    runs the same binary."""
    block = max(512, triton.next_power_of_2(longest))
    return {"BLOCK": block, "num_warps": block // 512, **FUSED}
