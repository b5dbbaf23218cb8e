"""Packed attention: the fast path against the plain reference, the reference against float64 written out whole."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from maelm_fast.batch import Layout, layout_of
from maelm_fast.errors import UserError
from maelm_fast.ops import AttentionLayout, PositionBias, attention
from maelm_fast.ops.backends import grouped

HEADS, DIM, POSITIONS = 3, 8, 128


def gapped(lengths: list[int], seed: int = 0) -> Layout:
    """Sequences whose positions have gaps, as after the removal of masked tokens."""
    draw = random.Random(seed)
    positions = [p for n in lengths for p in sorted(draw.sample(range(POSITIONS), n))]
    return layout_of(lengths, torch.tensor(positions, dtype=torch.int32))


def inputs(queries: Layout, keys: Layout, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    rows = (queries.num_tokens, keys.num_tokens, keys.num_tokens)
    tensors = [torch.randn(n, HEADS, DIM, dtype=dtype) for n in rows]
    return [*tensors, torch.randn(HEADS, 2 * POSITIONS - 1, dtype=dtype)]


def whole(q: Tensor, k: Tensor, v: Tensor, queries: Layout, keys: Layout, line: Tensor | None) -> Tensor:
    """All pairs of all sequences at once, other sequences masked out."""
    owner_q = torch.repeat_interleave(torch.arange(len(queries.lengths)), torch.tensor(queries.lengths))
    owner_k = torch.repeat_interleave(torch.arange(len(keys.lengths)), torch.tensor(keys.lengths))
    scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
    if line is not None:
        scores = scores + line[:, keys.positions[None, :].long() - queries.positions[:, None].long() + POSITIONS - 1]
    scores = scores.masked_fill(owner_q[:, None] != owner_k[None, :], float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), v)


LAYOUTS = {
    "full": ([16] * 5, [16] * 5),
    "one token": ([1, 1], [1, 1]),
    "mixed": ([1, 17, 100, 3, 64, 65], [1, 17, 100, 3, 64, 65]),
    "cross": ([2, 5, 0, 9, 30], [20, 1, 7, 90, 30]),
    "no keys": ([3, 4, 2], [5, 0, 6]),
    "empty sequences": ([0, 5, 0], [0, 5, 0]),
    "nothing": ([0], [0]),
}


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("backend", ["grouped", "reference"])
def test_forward_and_every_gradient(name: str, bias: bool, backend: str) -> None:
    queries, keys = gapped(LAYOUTS[name][0]), gapped(LAYOUTS[name][1], seed=1)
    if name in ("full", "mixed", "one token"):
        keys = queries
    tensors = [t.requires_grad_() for t in inputs(queries, keys)]
    q, k, v, line = tensors
    out = attention(q, k, v, AttentionLayout(queries, keys), PositionBias(line) if bias else None, backend=backend)  # type: ignore[arg-type]
    expected = whole(q, k, v, queries, keys, line if bias else None)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    if out.numel() == 0:
        return
    upstream = torch.randn_like(out)
    wanted = tensors if bias else tensors[:3]
    for mine, theirs in zip(
        torch.autograd.grad(out, wanted, upstream, allow_unused=True),
        torch.autograd.grad(expected, wanted, upstream, allow_unused=True),
        strict=True,
    ):
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(0, 90), min_size=1, max_size=6), bias=st.booleans(), seed=st.integers(0, 99))
def test_random_layouts(lengths: list[int], bias: bool, seed: int) -> None:
    layout = gapped(lengths, seed)
    q, k, v, line = inputs(layout, layout)
    out = attention(q, k, v, AttentionLayout(layout), PositionBias(line) if bias else None)
    torch.testing.assert_close(out, whole(q, k, v, layout, layout, line if bias else None), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_within_that_of_pytorch(dtype: torch.dtype) -> None:
    """No further from float64 than twice scaled_dot_product_attention at the same dtype."""
    layout = layout_of([64] * 4)
    q, k, v, line = (t.to(dtype) for t in inputs(layout, layout))
    exact = whole(*(t.double() for t in (q, k, v)), layout, layout, line.double())
    out = attention(q, k, v, AttentionLayout(layout), PositionBias(line))
    distance = torch.arange(64)[None, :] - torch.arange(64)[:, None] + POSITIONS - 1
    q_b, k_b, v_b = (t.view(4, 64, HEADS, DIM).transpose(1, 2) for t in (q, k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(q_b, k_b, v_b, line[:, distance][None])
    theirs = theirs.transpose(1, 2).reshape(q.shape)
    assert (out.double() - exact).abs().max() <= 2 * (theirs.double() - exact).abs().max() + 1e-7
    assert out.dtype == dtype


def test_bias_gradient_sums_to_zero() -> None:
    """Rows of the scores' gradient sum to zero, so a head's bias gradient does over all distances."""
    layout = gapped([40, 7, 90, 1])
    q, k, v, line = inputs(layout, layout)
    line.requires_grad_()
    attention(q, k, v, AttentionLayout(layout), PositionBias(line)).pow(2).sum().backward()
    assert line.grad is not None
    assert line.grad.abs().max() > 1e-3
    torch.testing.assert_close(line.grad.sum(1), torch.zeros(HEADS, dtype=torch.float64), atol=1e-12, rtol=0)


def test_gaps_equal_padding_with_the_removed_keys_excluded() -> None:
    layout = gapped([50], seed=3)
    positions = layout.positions.long()
    q, k, v, line = inputs(layout, layout)
    full = [torch.zeros(POSITIONS, HEADS, DIM, dtype=torch.float64).index_put((positions,), t) for t in (q, k, v)]
    distance = torch.arange(POSITIONS)[None, :] - torch.arange(POSITIONS)[:, None] + POSITIONS - 1
    scores = torch.einsum("qhd,khd->hqk", full[0], full[1]) / DIM**0.5 + line[:, distance]
    absent = torch.ones(POSITIONS, dtype=torch.bool)
    absent[positions] = False
    scores = scores.masked_fill(absent, float("-inf"))
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), full[2])[positions]
    out = attention(q, k, v, AttentionLayout(layout), PositionBias(line))
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_permuting_the_sequences_permutes_the_outputs() -> None:
    lengths = [30] * 6
    layout = gapped(lengths)
    q, k, v, line = inputs(layout, layout, torch.float32)
    order = torch.randperm(6)
    rows = torch.cat([torch.arange(30) + 30 * s for s in order.tolist()])
    shuffled = layout_of(lengths, layout.positions[rows])
    out = attention(q, k, v, AttentionLayout(layout), PositionBias(line))
    moved = attention(q[rows], k[rows], v[rows], AttentionLayout(shuffled), PositionBias(line))
    assert torch.equal(moved, out[rows])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lengths", [[16] * 8, [3, 70, 16]])
def test_dropout_is_seeded_and_scaled(bias: bool, lengths: list[int]) -> None:
    layout = gapped(lengths)
    q, k, v, line = inputs(layout, layout)
    v = torch.ones_like(v)  # then each output is the sum of its kept weights, 1 on average
    plan, extra = AttentionLayout(layout), PositionBias(line) if bias else None
    outs = [attention(q, k, v, plan, extra, dropout_p=0.3, seed=torch.tensor(s)) for s in (7, 7, 8)]
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    many = torch.stack([attention(q, k, v, plan, extra, dropout_p=0.3, seed=torch.tensor(s)).mean() for s in range(60)])
    assert abs(float(many.mean()) - 1.0) < 4 * float(many.std()) / 60**0.5 + 1e-3


def test_dropout_gradient_is_that_of_the_same_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """float64 gradcheck with dropout on, over several chunks."""
    monkeypatch.setattr(grouped, "_CHUNK_BYTES", 4 * HEADS * 5 * 5)
    layout = gapped([5] * 3)
    tensors = [t.requires_grad_() for t in inputs(layout, layout)]

    def function(q: Tensor, k: Tensor, v: Tensor, line: Tensor) -> Tensor:
        return attention(q, k, v, AttentionLayout(layout), PositionBias(line), dropout_p=0.25, seed=torch.tensor(5))

    assert torch.autograd.gradcheck(function, tensors)


def test_strided_inputs() -> None:
    """q, k and v are slices of one projection in the model."""
    layout = gapped([20, 20])
    qkv = torch.randn(40, 3, HEADS, DIM, dtype=torch.float64)
    q, k, v = qkv.unbind(1)
    line = torch.randn(HEADS, 2 * POSITIONS - 1, dtype=torch.float64)
    out = attention(q, k, v, AttentionLayout(layout), PositionBias(line))
    same = attention(*(t.contiguous() for t in (q, k, v)), AttentionLayout(layout), PositionBias(line))
    assert torch.equal(out, same)


def test_unknown_backend_names_the_known() -> None:
    layout = layout_of([4])
    q, k, v, _ = inputs(layout, layout)
    with pytest.raises(UserError, match="grouped, reference"):
        attention(q, k, v, AttentionLayout(layout), backend="flash3")  # type: ignore[arg-type]


def test_layouts_must_match() -> None:
    with pytest.raises(UserError, match="2 query sequences but 1 key"):
        AttentionLayout(layout_of([3, 4]), layout_of([7]))
