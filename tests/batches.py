"""How the tests compare batches."""

from __future__ import annotations

import dataclasses

import torch

from maelm_fast.batch import PackedBatch, RaggedBatch


def assert_same_batch(a: PackedBatch | RaggedBatch, b: PackedBatch | RaggedBatch) -> None:
    """Every tensor, all of int32, on whatever device, and every length and key, all Python ints."""
    assert type(a) is type(b)
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype == torch.int32, field.name
            assert torch.equal(x.cpu(), y.cpu()), field.name
        else:
            assert x == y, field.name
            assert all(type(n) is int for n in (*x, *y)), field.name
