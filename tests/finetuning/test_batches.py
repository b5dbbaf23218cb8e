"""Packed batches of inputs and which examples go together."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from maelm_fast.finetuning.problem import evaluation_batches, token_batch, update_order
from maelm_fast.text import Inputs


def arrays(*rows: list[int]) -> list[np.ndarray]:
    return [np.array(row, dtype=np.int32) for row in rows]


def test_inputs_lie_one_after_another() -> None:
    ids, types = arrays([5, 6], [7], [8, 9, 10]), arrays([0, 1], [0], [0, 0, 1])
    batch = token_batch(Inputs(ids, types, 0, 0, 3), [2, 0])
    assert batch.ids.tolist() == [8, 9, 10, 5, 6]
    assert batch.layout.positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.layout.cu_seqlens.tolist() == [0, 3, 5]
    assert batch.layout.lengths == (3, 2)
    assert batch.token_types is not None
    assert batch.token_types.tolist() == [0, 0, 1, 0, 1]
    moved = batch.to("cpu")
    assert moved.ids.dtype == batch.ids.dtype
    assert token_batch(Inputs(ids, None, 0, 0, 3), np.array([1])).token_types is None


def test_every_example_is_in_one_update_of_an_epoch() -> None:
    epochs = [list(update_order(23, 5, seed=3, epoch=epoch)) for epoch in range(2)]
    for updates in epochs:
        assert [len(update) for update in updates] == [5, 5, 5, 5, 3]
        assert sorted(np.concatenate(updates).tolist()) == list(range(23))
    first, second = (np.concatenate(updates).tolist() for updates in epochs)
    assert first != second
    assert first != np.concatenate(list(update_order(23, 5, seed=4, epoch=0))).tolist()
    assert first == np.concatenate(list(update_order(23, 23, seed=3, epoch=0))).tolist()


@pytest.mark.parametrize("tokens", [1, 10, 25, 1000])
def test_evaluation_batches_keep_to_the_budget(tokens: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 20, 60).tolist()
    batches = evaluation_batches(lengths, tokens)
    assert sorted(np.concatenate(batches).tolist()) == list(range(60))
    order = [lengths[i] for batch in batches for i in batch]
    assert order == sorted(lengths, reverse=True)
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= tokens
    for batch, after in itertools.pairwise(batches):  # as few batches as the budget allows
        assert (len(batch) + 1) * lengths[batch[0]] > tokens, after
    assert evaluation_batches([], 10) == []
