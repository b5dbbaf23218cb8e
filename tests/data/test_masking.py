"""Masks: exact counts, uniform places, a function of (seed, epoch, sample) and of nothing else; and their packing."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maelm_fast import presets
from maelm_fast.batch import PackedBatch
from maelm_fast.config import MaskingConfig
from maelm_fast.data.masking import pack, pack_plain
from maelm_fast.errors import UserError
from maelm_fast.masking import Masker, Vocabulary
from maelm_fast.philox import Stream, position_words
from maelm_fast.training.step import check_recordable
from tests.batches import assert_same_batch

VOCABULARY = Vocabulary(size=500, mask_id=499, special=(0, 1, 2, 3, 499))


def sequences(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [
        np.concatenate([[0], draw.integers(4, 499, n - 2), [2]])[:n] if n > 1 else np.zeros(n, int) for n in lengths
    ]


def packed(
    rows: list[np.ndarray],
    masking: MaskingConfig = MaskingConfig(),
    sees_mask: bool = False,
    seed: int = 0,
    first: int = 0,
    epoch: int = 0,
) -> PackedBatch:
    samples = np.arange(first, first + len(rows))
    return pack(rows, samples, np.full(len(rows), epoch), Masker(masking, VOCABULARY, seed, sees_mask))


@pytest.mark.parametrize("rate", [0.15, 0.3, 0.4, 0.9])
def test_fixed_count_is_exact(rate: float) -> None:
    lengths = [512, 511, 100, 64, 7, 3, 2, 1]
    batch = packed(sequences(lengths), MaskingConfig(rate=rate))
    assert batch.masked.lengths == tuple(int(rate * n + 0.5) for n in lengths)


def test_stochastic_count_is_floor_or_ceiling_with_the_right_mean() -> None:
    batch = packed([np.full(512, 7)] * 2_000, MaskingConfig(count="stochastic"))
    counts = np.array(batch.masked.lengths)
    assert set(counts) == {76, 77}  # 0.15 * 512 = 76.8
    assert counts.mean() == pytest.approx(76.8, abs=4 * 0.4 / np.sqrt(2_000))


def test_places_are_uniform() -> None:
    """Chi-square over positions; masks are drawn without replacement, which divides its mean by 1 - rate."""
    length = 64
    batch = packed([np.full(length, 7)] * 20_000, MaskingConfig(rate=0.25), seed=5)
    chosen = (batch.source == -1).numpy().reshape(20_000, length)
    assert (chosen.sum(axis=1) == 16).all()
    expected = 20_000 * 0.25
    statistic = ((chosen.sum(axis=0) - expected) ** 2 / (expected * 0.75)).sum() * (length - 1) / length
    assert abs(statistic - (length - 1)) < 4 * np.sqrt(2 * (length - 1))
    pairs = (chosen[:, :-1] & chosen[:, 1:]).mean()
    assert pairs == pytest.approx(16 * 15 / (64 * 63), abs=0.001)  # neighbours are no likelier than any pair


def test_masks_do_not_depend_on_the_batch() -> None:
    rows = sequences([64, 20, 33, 64, 5, 64])
    together = packed(rows)
    ends = np.cumsum(together.masked.lengths)
    for i, row in enumerate(rows):
        alone = packed([row], first=i)
        mine = together.labels[ends[i] - together.masked.lengths[i] : ends[i]]
        assert np.array_equal(alone.labels, mine)
        place = together.masked.positions[ends[i] - together.masked.lengths[i] : ends[i]]
        assert np.array_equal(alone.masked.positions, place)


def test_masks_differ_by_epoch_seed_and_sample() -> None:
    row = sequences([512])
    variants = [packed(row), packed(row, epoch=1), packed(row, seed=1), packed(row, first=1)]
    masks = [set(v.masked_index.tolist()) for v in variants]
    for i in range(4):
        for j in range(i):
            assert len(masks[i] & masks[j]) < 35  # 77 of 512 twice: 11.6 in common on average


def test_special_tokens_are_masked_only_if_allowed() -> None:
    rows = [np.array([0, *range(4, 14), 2])] * 200
    assert set(packed(rows).labels.tolist()) & {0, 2}
    never = packed(rows, MaskingConfig(special_tokens=False))
    assert not set(never.labels.tolist()) & set(VOCABULARY.special)
    assert set(never.masked.lengths) == {2}  # round(0.15 * 10): special tokens do not count either


def test_the_encoder_never_gets_a_masked_token_or_mask() -> None:
    rows = sequences([64, 17, 1, 40])
    batch = packed(rows)
    whole = np.concatenate(rows)
    masked = np.zeros(len(whole), bool)
    masked[batch.masked_index.numpy()] = True
    assert np.array_equal(batch.ids, whole[~masked])
    assert np.array_equal(batch.labels, whole[masked])
    assert VOCABULARY.mask_id not in batch.ids
    assert (batch.source.numpy()[masked] == -1).all()
    assert np.array_equal(batch.source.numpy()[~masked], np.arange((~masked).sum()))
    assert np.array_equal(batch.visible.positions, batch.decoder.positions.numpy()[~masked])


def test_standard_mlm_leaves_mask_in_the_encoder() -> None:
    rows = sequences([64, 17, 1, 40])
    batch, without = packed(rows, sees_mask=True), packed(rows)
    assert np.array_equal(batch.labels, without.labels)
    assert batch.visible.lengths == batch.decoder.lengths == (64, 17, 1, 40)
    assert (batch.ids[batch.masked_index] == VOCABULARY.mask_id).all()
    assert np.array_equal(batch.source, np.arange(122))


@pytest.mark.parametrize("sees_mask", [False, True])
def test_bert_policy(sees_mask: bool) -> None:
    rows = sequences([512] * 300)
    batch = packed(rows, MaskingConfig(policy="bert"), sees_mask=sees_mask)
    source = batch.source[batch.masked_index]
    shown = batch.ids[source.clamp(min=0)]
    is_mask = (shown == VOCABULARY.mask_id) if sees_mask else (source == -1)
    kept = (shown == batch.labels) & ~is_mask
    random = ~is_mask & ~kept
    total = batch.counts.masked
    for share, expected in ((is_mask, 0.8), (random, 0.1), (kept, 0.1)):
        assert int(share.sum()) / total == pytest.approx(
            expected, abs=4 * np.sqrt(expected * (1 - expected) / total) + 2e-4
        )
    assert not set(shown[random].tolist()) & set(VOCABULARY.special)
    if not sees_mask:
        assert VOCABULARY.mask_id not in batch.ids


ODD = [512, 511, 77, 7, 3, 2, 1, 0]


def read_at(batch: PackedBatch) -> list[np.ndarray]:
    """Of each sequence what the encoder reads at its masked tokens, -1 where it reads nothing."""
    source = batch.source[batch.masked_index].numpy()
    read = np.where(source >= 0, batch.ids.numpy()[source], -1)
    return np.split(read, np.cumsum(batch.masked.lengths)[:-1])


@pytest.mark.parametrize("implementation", [pack, pack_plain])
@pytest.mark.parametrize(
    ("policy", "count", "sees_mask", "checksum"),
    [
        ("mask", "fixed", False, 1522695901),
        ("mask", "fixed", True, 2858545705),
        ("mask", "stochastic", False, 1037058939),
        ("mask", "stochastic", True, 1927227148),
        ("bert", "fixed", False, 2886974848),
        ("bert", "fixed", True, 106684563),
        ("bert", "stochastic", False, 1415257677),
        ("bert", "stochastic", True, 3257498322),
    ],
)
def test_batches_stay_what_they_were(
    implementation: Callable[..., PackedBatch], policy: Any, count: Any, sees_mask: bool, checksum: int
) -> None:
    """Bits of batches made before anything was shown or replaced: runs of that time can be resumed and compared."""
    rows = [4 + 37 * np.arange(n) % 495 for n in (512, 77, 3, 1, 0, 64)]
    masking = MaskingConfig(policy=policy, count=count)
    batch = implementation(rows, np.arange(6), np.full(6, 3), Masker(masking, VOCABULARY, 11, sees_mask))
    visible, decoder, masked = batch.visible, batch.decoder, batch.masked
    tensors = (
        *(batch.ids, visible.positions, visible.cu_seqlens, batch.source, decoder.positions, decoder.cu_seqlens),
        *(batch.masked_index, masked.cu_seqlens, batch.labels),
    )
    assert zlib.crc32(torch.cat(tensors).numpy().tobytes()) == checksum
    assert torch.equal(masked.positions, decoder.positions[batch.masked_index])


@pytest.mark.parametrize("rate", [0.15, 0.4])
@pytest.mark.parametrize("count", ["fixed", "stochastic"])
@pytest.mark.parametrize("special_tokens", [False, True])
def test_a_share_of_the_masked_tokens_is_shown(rate: float, count: Any, special_tokens: bool) -> None:
    """Those with the smallest words; what is masked, the labels and the rest of the row do not change."""
    rows = sequences(ODD)
    masking = MaskingConfig(rate=rate, count=count, special_tokens=special_tokens)
    without = packed(rows, masking, seed=7)
    words = position_words(512, torch.arange(len(rows))[:, None], 0, Stream.MASK, 7).numpy()
    places = np.split(without.masked.positions.numpy(), np.cumsum(without.masked.lengths)[:-1])
    for shown in (0.0, 0.25, 0.5, 0.75, 1.0):
        batch = packed(rows, dataclasses.replace(masking, shown=shown), seed=7)
        assert torch.equal(batch.labels, without.labels)
        assert torch.equal(batch.masked_index, without.masked_index)
        for i, (read, here) in enumerate(zip(read_at(batch), places, strict=True)):
            number = int(shown * len(here) + 0.5)
            assert batch.visible.lengths[i] == ODD[i] - len(here) + number
            smallest = np.argsort(words[i, here], kind="stable")[:number]
            assert (np.delete(read, smallest) == -1).all()
            assert (read[smallest] == VOCABULARY.mask_id).all()
        is_mask = batch.ids == VOCABULARY.mask_id
        assert torch.equal(batch.ids[~is_mask], without.ids)
        assert torch.equal(batch.visible.positions[~is_mask], without.visible.positions)


@pytest.mark.parametrize("count", ["fixed", "stochastic"])
def test_all_shown_is_what_standard_mlm_reads(count: Any) -> None:
    rows = sequences(ODD)
    mlm = packed(rows, MaskingConfig(count=count), sees_mask=True)
    assert_same_batch(packed(rows, MaskingConfig(count=count, shown=1.0)), mlm)
    for shown in (0.25, 1.0):  # without a decoder nothing is removed, whatever share is asked for
        assert_same_batch(packed(rows, MaskingConfig(count=count, shown=shown), sees_mask=True), mlm)


@pytest.mark.parametrize("sees_mask", [False, True])
def test_random_policy(sees_mask: bool) -> None:
    rows = sequences([512] * 300 + ODD)
    batch = packed(rows, MaskingConfig(policy="random"), sees_mask=sees_mask)
    with_mask = packed(rows, sees_mask=True)
    assert batch.visible.lengths == batch.decoder.lengths == with_mask.visible.lengths
    assert_same_batch(dataclasses.replace(batch, ids=with_mask.ids), with_mask)  # masks and labels as with [MASK]
    is_mask = with_mask.ids == VOCABULARY.mask_id
    assert torch.equal(batch.ids[~is_mask], with_mask.ids[~is_mask])
    drawn = batch.ids[is_mask]
    counts = np.bincount(drawn, minlength=VOCABULARY.size)
    assert not counts[list(VOCABULARY.special)].any()
    expected = len(drawn) / 495  # ordinary tokens, each as likely as another
    statistic = ((np.delete(counts, VOCABULARY.special) - expected) ** 2 / expected).sum()
    assert abs(statistic - 494) < 4 * np.sqrt(2 * 494)


def test_random_tokens_are_those_of_the_bert_policy() -> None:
    rows = sequences([512] * 20)
    bert = packed(rows, MaskingConfig(policy="bert"), sees_mask=True)
    random = packed(rows, MaskingConfig(policy="random"), sees_mask=True)
    drawn, labels = np.concatenate(read_at(bert)), bert.labels.numpy()
    replaced = (drawn != VOCABULARY.mask_id) & (drawn != labels)
    assert 100 < replaced.sum() < 210  # a tenth of 1,540
    assert np.array_equal(np.concatenate(read_at(random))[replaced], drawn[replaced])


@pytest.mark.parametrize("policy", ["bert", "random"])
def test_a_vocabulary_without_ordinary_tokens_is_refused(policy: Any) -> None:
    with pytest.raises(UserError, match=f"masking.policy {policy} has no token to draw from"):
        Masker(MaskingConfig(policy=policy), Vocabulary(2, 1, (0, 1)), 0, False)


@pytest.mark.parametrize("name", presets.variants())
def test_what_the_encoder_reads_in_every_row_of_the_ablations(name: str) -> None:
    run = presets.variant(presets.get("base"), name)
    batch = packed(sequences([512, 100, 13]), run.masking, sees_mask=run.model.decoder == "none")
    shares = {"mlm": 1.0, "enc_mask_dec": 1.0, "dec_resets_mask": 1.0, "delta_1": 1.0}
    shares |= {"delta_0.25": 0.25, "delta_0.5": 0.5, "delta_0.75": 0.75}
    for length, read in zip(batch.decoder.lengths, read_at(batch), strict=True):
        masked = int((0.4 if name == "mask40" else 0.15) * length + 0.5)
        is_mask, missing = int((read == VOCABULARY.mask_id).sum()), int((read == -1).sum())
        assert len(read) == masked
        if name == "bert_masking":
            assert missing == 0 < is_mask
            assert length < 512 or is_mask < masked
        elif name == "random_replace":
            assert is_mask == missing == 0
            assert (read >= 4).all()
        else:
            assert (is_mask, missing) == (number := int(shares.get(name, 0.0) * masked + 0.5), masked - number)


KINDS: list[dict[str, Any]] = [{"shown": shown} for shown in (0.0, 0.25, 0.5, 1.0)]
KINDS += [{"policy": "bert"}, {"policy": "random"}]


@pytest.mark.parametrize("sees_mask", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_shapes_vary_exactly_where_a_graph_is_refused(kind: dict[str, Any], sees_mask: bool) -> None:
    rows = [np.random.default_rng(i).integers(0, 499, 64) for i in range(40)]
    for count, special_tokens in itertools.product(("fixed", "stochastic"), (True, False)):
        masking = MaskingConfig(count=count, special_tokens=special_tokens, **kind)  # type: ignore[arg-type]
        batch = packed(rows, masking, sees_mask)
        sizes = set(zip(batch.visible.lengths, batch.masked.lengths, strict=True))
        expected = pytest.raises(UserError, match="cuda_graph needs") if len(sizes) > 1 else contextlib.nullcontext()
        with expected:
            check_recordable(torch.device("cuda"), Masker(masking, VOCABULARY, 0, sees_mask), batch.decoder.lengths)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=8),
    rate=st.floats(0.01, 0.99),
    kind=st.sampled_from(KINDS),
    sees_mask=st.booleans(),
    seed=st.integers(0, 2**62),
)
def test_a_packed_batch_is_consistent(
    lengths: list[int], rate: float, kind: dict[str, Any], sees_mask: bool, seed: int
) -> None:
    rows = sequences(lengths)
    batch = packed(rows, MaskingConfig(rate=rate, **kind), sees_mask, seed)
    assert np.array_equal(batch.original_ids, np.concatenate(rows))
    counts = batch.counts
    assert counts.original == sum(lengths) == batch.source.numel() == batch.decoder.positions.numel()
    assert counts.visible == batch.ids.numel() == batch.visible.positions.numel()
    assert counts.masked == batch.labels.numel() == batch.masked_index.numel()
    for boundaries, parts in (
        (batch.visible.cu_seqlens, batch.visible.lengths),
        (batch.decoder.cu_seqlens, batch.decoder.lengths),
        (batch.masked.cu_seqlens, batch.masked.lengths),
    ):
        assert boundaries.tolist() == [0, *np.cumsum(parts)]
    filled = batch.source[batch.source >= 0]
    assert np.array_equal(filled, np.arange(counts.visible))
    assert all(t.dtype.itemsize == 4 for t in (batch.source, batch.labels, batch.ids, batch.visible.cu_seqlens))
    if kind == {"shown": 0.0} and not sees_mask:
        assert counts.visible + counts.masked == counts.original


def test_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="token id 500"):
        packed([np.array([0, 5, 500, 2])])
