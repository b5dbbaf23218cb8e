"""Masks: exact counts, uniform places, a function of (seed, epoch, sample) and of nothing else; and their packing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maelm_fast.batch import PackedBatch
from maelm_fast.config import MaskingConfig
from maelm_fast.data.masking import Vocabulary, choose_masked, mask_counts, pack
from maelm_fast.errors import UserError

VOCABULARY = Vocabulary(size=500, mask_id=499, special=(0, 1, 2, 3, 499))


def sequences(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [np.concatenate([[0], draw.integers(4, 499, n - 2), [2]])[:n] if n > 1 else np.array([0]) for n in lengths]


def packed(
    rows: list[np.ndarray],
    masking: MaskingConfig = MaskingConfig(),
    sees_mask: bool = False,
    seed: int = 0,
    first: int = 0,
    epoch: int = 0,
) -> PackedBatch:
    samples = np.arange(first, first + len(rows))
    return pack(rows, samples, np.full(len(rows), epoch), masking, VOCABULARY, seed, sees_mask)


@pytest.mark.parametrize("rate", [0.15, 0.3, 0.4, 0.9])
def test_fixed_count_is_exact(rate: float) -> None:
    lengths = [512, 511, 100, 64, 7, 3, 2, 1]
    batch = packed(sequences(lengths), MaskingConfig(rate=rate))
    assert batch.masked_lengths == tuple(int(rate * n + 0.5) for n in lengths)


def test_stochastic_count_is_floor_or_ceiling_with_the_right_mean() -> None:
    samples = np.arange(20_000)
    masking = MaskingConfig(count="stochastic")
    counts = mask_counts(np.full(20_000, 512), samples, np.zeros(20_000, int), masking, seed=0)
    assert set(counts) == {76, 77}  # 0.15 * 512 = 76.8
    assert counts.mean() == pytest.approx(76.8, abs=4 * 0.4 / np.sqrt(20_000))


def test_places_are_uniform() -> None:
    """Chi-square over positions; masks are drawn without replacement, which divides its mean by 1 - rate."""
    samples, length = np.arange(20_000), 64
    valid = np.ones((20_000, length), bool)
    ids = np.full((20_000, length), 7)
    masking = MaskingConfig(rate=0.25)
    chosen = choose_masked(ids, valid, samples, np.zeros(20_000, int), masking, VOCABULARY, seed=5)
    assert (chosen.sum(axis=1) == 16).all()
    expected = 20_000 * 0.25
    statistic = ((chosen.sum(axis=0) - expected) ** 2 / (expected * 0.75)).sum() * (length - 1) / length
    assert abs(statistic - (length - 1)) < 4 * np.sqrt(2 * (length - 1))
    pairs = (chosen[:, :-1] & chosen[:, 1:]).mean()
    assert pairs == pytest.approx(16 * 15 / (64 * 63), abs=0.001)  # neighbours are no likelier than any pair


def test_masks_do_not_depend_on_the_batch() -> None:
    rows = sequences([64, 20, 33, 64, 5, 64])
    together = packed(rows)
    ends = np.cumsum(together.masked_lengths)
    for i, row in enumerate(rows):
        alone = packed([row], first=i)
        mine = together.labels[ends[i] - together.masked_lengths[i] : ends[i]]
        assert np.array_equal(alone.labels, mine)
        place = together.decoder_positions[together.masked_index][ends[i] - together.masked_lengths[i] : ends[i]]
        assert np.array_equal(alone.decoder_positions[alone.masked_index], place)


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
    assert set(never.masked_lengths) == {2}  # round(0.15 * 10): special tokens do not count either


def test_the_encoder_never_gets_a_masked_token_or_mask() -> None:
    rows = sequences([64, 17, 1, 40])
    batch = packed(rows)
    whole = np.concatenate(rows)
    masked = np.zeros(len(whole), bool)
    masked[batch.masked_index.numpy()] = True
    assert np.array_equal(batch.visible_ids, whole[~masked])
    assert np.array_equal(batch.labels, whole[masked])
    assert VOCABULARY.mask_id not in batch.visible_ids
    assert (batch.source.numpy()[masked] == -1).all()
    assert np.array_equal(batch.source.numpy()[~masked], np.arange((~masked).sum()))
    assert np.array_equal(batch.visible_positions, batch.decoder_positions.numpy()[~masked])


def test_standard_mlm_leaves_mask_in_the_encoder() -> None:
    rows = sequences([64, 17, 1, 40])
    batch, without = packed(rows, sees_mask=True), packed(rows)
    assert np.array_equal(batch.labels, without.labels)
    assert batch.lengths == batch.decoder_lengths == (64, 17, 1, 40)
    assert (batch.visible_ids[batch.masked_index] == VOCABULARY.mask_id).all()
    assert np.array_equal(batch.source, np.arange(122))


@pytest.mark.parametrize("sees_mask", [False, True])
def test_bert_policy(sees_mask: bool) -> None:
    rows = sequences([512] * 300)
    batch = packed(rows, MaskingConfig(policy="bert"), sees_mask=sees_mask)
    source = batch.source[batch.masked_index]
    shown = batch.visible_ids[source.clamp(min=0)]
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
        assert VOCABULARY.mask_id not in batch.visible_ids


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=8),
    rate=st.floats(0.01, 0.99),
    policy=st.sampled_from(["mask", "bert"]),
    sees_mask=st.booleans(),
    seed=st.integers(0, 2**62),
)
def test_a_packed_batch_is_consistent(lengths: list[int], rate: float, policy: str, sees_mask: bool, seed: int) -> None:
    batch = packed(sequences(lengths), MaskingConfig(rate=rate, policy=policy), sees_mask, seed)  # type: ignore[arg-type]
    counts = batch.counts
    assert counts.original == sum(lengths) == batch.source.numel() == batch.decoder_positions.numel()
    assert counts.visible == batch.visible_ids.numel() == batch.visible_positions.numel()
    assert counts.masked == batch.labels.numel() == batch.masked_index.numel()
    for boundaries, parts in (
        (batch.cu_seqlens, batch.lengths),
        (batch.decoder_cu_seqlens, batch.decoder_lengths),
        (batch.masked_cu_seqlens, batch.masked_lengths),
    ):
        assert boundaries.tolist() == [0, *np.cumsum(parts)]
    filled = batch.source[batch.source >= 0]
    assert np.array_equal(filled, np.arange(counts.visible))
    assert all(t.dtype.itemsize == 4 for t in (batch.source, batch.labels, batch.visible_ids, batch.cu_seqlens))
    if policy == "mask" and not sees_mask:
        assert counts.visible + counts.masked == counts.original


def test_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="token id 500"):
        packed([np.array([0, 5, 500, 2])])
