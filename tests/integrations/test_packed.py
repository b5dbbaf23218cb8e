"""A packed batch as a dict: what other trainers' loops do to one on its way to the model leaves it whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from maelm_fast.batch import PackedBatch, from_kwargs, to_kwargs
from maelm_fast.data.masking import pack_masked
from maelm_fast.masking import Vocabulary
from tests.batches import assert_same_batch


def packed() -> PackedBatch:
    """Three sequences, one of which has nothing visible."""
    sequences = [np.array([5, 99, 7, 8, 99]), np.array([99]), np.array([6, 9])]
    return pack_masked(sequences, Vocabulary(100, 99, ()), encoder_sees_mask=False)


def as_it_is(batch: dict[str, Any]) -> dict[str, Any]:
    return batch


def moved_by_accelerate(batch: dict[str, Any]) -> dict[str, Any]:
    operations = pytest.importorskip("accelerate.utils.operations")
    moved: dict[str, Any] = operations.send_to_device(batch, torch.device("cpu"), non_blocking=True)
    return moved


def moved_by_ddp(batch: dict[str, Any]) -> dict[str, Any]:
    """Which makes lists of lists, one per device."""
    from torch.distributed.utils import _to_kwargs

    _, (moved,) = _to_kwargs((), batch, torch.device("cpu"), False)
    return moved


def with_tuples(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, torch.Tensor) else tuple(value) for name, value in batch.items()}


@pytest.mark.parametrize("way", [as_it_is, moved_by_accelerate, moved_by_ddp, with_tuples])
def test_there_and_back(way: Any) -> None:
    batch = packed()
    kwargs = to_kwargs(batch)
    assert len(kwargs) == 13
    assert kwargs["labels"] is batch.labels
    assert_same_batch(from_kwargs(**way(kwargs)), batch)


@pytest.mark.parametrize(
    ("change", "names"),
    [({"idx": 3}, "idx"), ({"ids": None}, "ids"), ({"ids": None, "input_ids": 1}, "ids, input_ids")],
)
def test_what_is_no_packed_batch_says_which_names(change: dict[str, Any], names: str) -> None:
    kwargs = {name: value for name, value in {**to_kwargs(packed()), **change}.items() if value is not None}
    with pytest.raises(TypeError, match=f"not a packed batch.*: {names}$"):
        from_kwargs(**kwargs)
