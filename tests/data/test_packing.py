"""Best-fit packing: the rule, the invariants, how full the bins get, and what the loader makes of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maelm_fast import native
from maelm_fast.data.packing import best_fit, best_fit_numpy, spread, spread_numpy
from maelm_fast.errors import UserError

PackingFunction = Callable[[np.ndarray, int], tuple[np.ndarray, int]]
implementations = pytest.mark.parametrize("pack_items", [best_fit, best_fit_numpy])


def plain_best_fit(lengths: list[int], budget: int) -> tuple[list[int], int]:
    """The rule as it is told, an item and a bin at a time."""
    left: list[int] = []
    bins = [-1] * len(lengths)
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [b for b in range(len(left)) if left[b] >= lengths[item]]
        if not fitting:
            fitting = [len(left)]
            left.append(budget)
        bins[item] = min(fitting, key=lambda b: left[b])
        left[bins[item]] -= lengths[item]
    return bins, len(left)


@implementations
@settings(max_examples=200, deadline=None)
@given(budget=st.integers(1, 60), data=st.data())
def test_it_follows_the_rule_and_the_invariants(pack_items: PackingFunction, budget: int, data: st.DataObject) -> None:
    lengths = np.array(data.draw(st.lists(st.integers(1, budget), max_size=60)), dtype=np.int64)
    bins, opened = pack_items(lengths, budget)
    assert bins.dtype == np.int32
    assert (bins.tolist(), opened) == plain_best_fit(lengths.tolist(), budget)
    used = np.bincount(bins, weights=lengths, minlength=opened)
    assert len(used) == opened
    assert ((used > 0) & (used <= budget)).all()


@settings(max_examples=30, deadline=None)
@given(count=st.integers(0, 3000), budget=st.integers(1, 20_000), draw=st.integers(0, 2**32 - 1))
def test_cpp_and_numpy_agree(count: int, budget: int, draw: int) -> None:
    lengths = np.random.default_rng(draw).integers(1, budget, count, endpoint=True)
    (bins, opened), (expected, expected_opened) = best_fit(lengths, budget), best_fit_numpy(lengths, budget)
    assert opened == expected_opened
    assert np.array_equal(bins, expected)


@implementations
def test_items_of_one_length_fill_the_bins_in_order(pack_items: PackingFunction) -> None:
    bins, opened = pack_items(np.full(23, 7), 30)
    assert bins.tolist() == [i // 4 for i in range(23)]
    assert opened == 6


@pytest.mark.parametrize("budget", [512, 2048, 16_384])
def test_bins_of_documents_are_full(budget: int) -> None:
    """Log-normal lengths, mean 400 before those over the budget are cut."""
    lengths = np.random.default_rng(0).lognormal(np.log(400) - 0.5, 1.0, 20_000)
    lengths = np.clip(lengths, 2, budget).astype(np.int64)
    _, opened = best_fit(lengths, budget)
    assert lengths.sum() / (opened * budget) >= 0.995


def test_without_the_extension_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 200)
    built, even = best_fit(lengths, 60), spread(lengths, 60)
    monkeypatch.setattr(native, "host", lambda: None)
    plain = best_fit(lengths, 60)
    assert np.array_equal(built[0], plain[0])
    assert built[1] == plain[1]
    assert np.array_equal(even[0], spread(lengths, 60)[0])


@pytest.mark.parametrize("spread_items", [spread, spread_numpy])
@settings(max_examples=200, deadline=None)
@given(budget=st.integers(1, 60), data=st.data())
def test_spreading_follows_the_rule(spread_items: PackingFunction, budget: int, data: st.DataObject) -> None:
    lengths = np.array(data.draw(st.lists(st.integers(1, budget), max_size=60)), dtype=np.int64)
    expected, opened = plain_best_fit(lengths.tolist(), budget)
    used, even = [0] * opened, [-1] * len(lengths)
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        even[item] = min(range(opened), key=lambda b: used[b])
        used[even[item]] += lengths[item]
    bins, count = spread_items(lengths, budget)
    assert bins.dtype == np.int32
    assert (bins.tolist(), count) == (even if max(used, default=0) <= budget else expected, opened)


@pytest.mark.parametrize("budget", [16_384, 131_072])
def test_documents_spread_evenly(budget: int) -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 1.0, 2048), 2, 512).astype(np.int64)
    bins, opened = spread(lengths, budget)
    used = np.bincount(bins, weights=lengths)
    assert opened == best_fit(lengths, budget)[1] == len(used)
    assert used.max() <= budget
    assert used.min() >= 0.995 * used.max()
    assert np.array_equal(bins, spread_numpy(lengths, budget)[0])


def test_spreading_that_would_overflow_leaves_best_fit() -> None:
    """Two bins of 6 hold 3 + 3 and 2 + 2 + 2; the emptiest first makes 3 + 2 and 3 + 2, and the last 2 is too much."""
    lengths = np.array([3, 3, 2, 2, 2])
    for function in (spread, spread_numpy):
        bins, opened = function(lengths, 6)
        assert opened == 2
        assert np.array_equal(bins, best_fit(lengths, 6)[0])
        assert np.bincount(bins, weights=lengths).tolist() == [6, 6]


@pytest.mark.parametrize("into_bins", [best_fit, spread])
def test_what_cannot_be_packed_is_refused(into_bins: PackingFunction) -> None:
    with pytest.raises(UserError, match="a sample of 11 tokens is over the budget of 10"):
        into_bins([3, 11, 10], 10)
    for nothing in (0, -4):
        with pytest.raises(UserError, match=f"cannot pack a sample of {nothing} tokens"):
            into_bins([3, nothing], 10)
    for budget in (0, 2**31):
        with pytest.raises(UserError, match=f"not {budget}"):
            into_bins([], budget)
    for wrong in ([0.5], [[1, 2]]):
        with pytest.raises(ValueError, match="one row of integers"):
            into_bins(wrong, 10)
    assert into_bins([], 10)[1] == 0
