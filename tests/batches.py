"""How the tests compare batches."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from maelm_fast.batch import PackedBatch, RaggedBatch


def assert_same_batch(a: PackedBatch | RaggedBatch, b: PackedBatch | RaggedBatch) -> None:
    """Every tensor, all of int32, on whatever device, and every length, all Python ints, or key."""
    if isinstance(a, RaggedBatch) or isinstance(b, RaggedBatch):
        assert isinstance(a, RaggedBatch)
        assert isinstance(b, RaggedBatch)
        assert a.ids.dtype == b.ids.dtype == torch.int32
        assert torch.equal(a.ids, b.ids)
        for x, y in ((a.lengths, b.lengths), (a.samples, b.samples), (a.epochs, b.epochs)):
            assert np.array_equal(x, y)
        return
    for i, (x, y) in enumerate(zip(a.tensors, b.tensors, strict=True)):
        assert x.dtype == y.dtype == torch.int32, i
        assert torch.equal(x.cpu(), y.cpu()), i
    assert a.lengths == b.lengths
    assert all(type(n) is int for n in itertools.chain(*a.lengths, *b.lengths))
