"""Sample order: a bijection for every size, different every epoch, evaluated anywhere."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from maelm_fast.data.order import permutation, permutation_numpy, samples_at, subset
from maelm_fast.philox import Stream, fold_seed, philox, position_words


@pytest.mark.parametrize("size", [1, 2, 3, 7, 15, 16, 17, 255, 256, 257, 1001, 4096, 65_537, 100_003])
def test_bijection(size: int) -> None:
    order = permutation(np.arange(size), size, seed=3, epoch=5)
    assert np.array_equal(np.sort(order), np.arange(size))


def test_evaluated_one_by_one_or_together() -> None:
    whole = permutation(np.arange(1001), 1001, seed=1, epoch=0)
    alone = np.array([permutation(np.array([i]), 1001, seed=1, epoch=0)[0] for i in range(0, 1001, 77)])
    assert np.array_equal(whole[::77], alone)


def test_seed_and_epoch_change_the_order() -> None:
    orders = [permutation(np.arange(999), 999, seed, epoch) for seed, epoch in [(0, 0), (0, 1), (1, 0)]]
    for a, b in [(0, 1), (0, 2), (1, 2)]:
        assert (orders[a] == orders[b]).mean() < 0.02  # a random pair agrees in one place on average


def test_looks_shuffled() -> None:
    """Where a place is sent is uniform: chi-square over 16 bins of the images of 16 blocks (225 degrees of freedom)."""
    size = 65_536
    order = permutation(np.arange(size), size, seed=11, epoch=2)
    table = np.histogram2d(np.arange(size) // 4096, order // 4096, bins=16)[0]
    assert ((table - 256) ** 2 / 256).sum() < 225 + 4 * np.sqrt(2 * 225)


def test_large_sizes_need_no_memory() -> None:
    size = 10**12 + 39
    order = permutation(np.arange(1000), size, seed=0, epoch=0)
    assert len(np.unique(order)) == 1000
    assert order.max() < size
    assert order.max() > size // 2


def test_samples_run_through_epoch_ends() -> None:
    ids, epochs = samples_at(start=5, count=20, size=9, seed=4)
    whole = np.concatenate([permutation(np.arange(9), 9, 4, epoch) for epoch in range(3)])
    assert np.array_equal(ids, whole[5:25])
    assert np.array_equal(epochs, np.arange(5, 25) // 9)


@pytest.mark.parametrize("order", [permutation, permutation_numpy])
def test_orders_stay_what_they_were(order: Callable[..., np.ndarray]) -> None:
    """Runs of that time can be resumed: their samples, and the seeds of their weights and dropout."""
    assert order(np.arange(6), 1001, 3, 5).tolist() == [793, 379, 142, 457, 565, 652]
    assert order(np.arange(2), 10**12 + 39, 2**63 - 1, 0).tolist() == [851148994838, 357813497148]
    assert fold_seed(7, 0) == 3595544800446187243
    assert fold_seed(7, 1, 100, 2) == 7157861868691803558


def test_a_smaller_subset_lies_within_a_larger_one() -> None:
    small, large = subset(7, 1001), subset(300, 1001)
    assert small.tolist() == [367, 381, 551, 674, 908, 937, 987]
    assert set(small) < set(large) < set(range(1001))
    assert np.all(np.diff(large) > 0)
    assert subset(5, 5).tolist() == [0, 1, 2, 3, 4]


def test_index_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        permutation(np.array([10]), 10, 0, 0)


def test_philox_known_answers() -> None:
    """The Random123 library's test vectors for philox4x32-10."""
    ones = 0xFFFFFFFF
    cases = [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, ones << 32 | ones, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0 << 32 | 0xA4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, expected in cases:
        for array in (torch.tensor, lambda word: np.array([word])):
            assert [int(word.reshape(())) for word in philox([array(word) for word in counter], key)] == list(expected)
            for i in range(4):  # the others as numbers
                mixed = *counter[:i], array(counter[i]), *counter[i + 1 :]
                assert [int(word.reshape(())) for word in philox(mixed, key)] == list(expected)


def test_words_do_not_depend_on_length_or_company() -> None:
    samples = torch.tensor([[3], [9], [27]])
    long = position_words(103, samples, 2, Stream.MASK, 7)
    assert torch.equal(position_words(10, samples[1:2], 2, Stream.MASK, 7)[0], long[1, :10])
    assert not torch.equal(position_words(103, samples, 2, Stream.POLICY, 7), long)


def test_folded_seeds_differ() -> None:
    seeds = {fold_seed(s, a, b) for s in range(10) for a in range(30) for b in range(30)}
    assert len(seeds) == 9000
    assert all(0 <= s < 2**63 for s in seeds)
