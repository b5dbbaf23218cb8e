"""Packed attention: the fast path against the plain reference, the reference against float64 written out whole."""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from maelm_fast import native
from maelm_fast.batch import Layout, layout_of
from maelm_fast.errors import UserError
from maelm_fast.ops import AttentionLayout, PositionBias, attention
from maelm_fast.ops.attention_backends import grouped
from maelm_fast.ops.dispatch import triton_installed
from maelm_fast.ops.reference.dropout import keep_weights
from tests.ops.checks import (
    DEVICE,
    DTYPES,
    assert_as_good_as_pytorch,
    deterministic,
    gapped_layout,
    opcheck,
    outputs_and_gradients,
    poisoned_memory,
    seed_tensor,
    strided,
)

HEADS, DIM, POSITIONS = 3, 8, 128
gapped = functools.partial(gapped_layout, POSITIONS)


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
    mine, theirs = (
        torch.autograd.grad(result, tensors, upstream, allow_unused=True, materialize_grads=True)
        for result in (out, expected)
    )
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


@pytest.mark.parametrize("backend", ["grouped", "reference"])
def test_dropout_gradient_is_that_of_the_same_mask(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """float64 gradcheck with dropout on, over several chunks."""
    monkeypatch.setattr(grouped, "_CHUNK_BYTES", 4 * HEADS * 3 * 3)
    layout = gapped([3] * 2)
    q, k, v, line = inputs(layout, layout)
    tensors = [t.requires_grad_() for t in (q, k, v, line[:, :13].clone())]  # a reach of 6: distances beyond it too

    def function(q: Tensor, k: Tensor, v: Tensor, line: Tensor) -> Tensor:
        return attention(
            q,
            k,
            v,
            AttentionLayout(layout),
            PositionBias(line, POSITIONS),
            dropout_p=0.25,
            seed=torch.tensor(5),
            backend=backend,
        )

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


def test_a_bias_serves_layouts_that_come_and_go() -> None:
    """What was made for one is not taken for another that gets its address."""
    bias = PositionBias(torch.randn(HEADS, 2 * POSITIONS - 1))
    for length in range(20, 30):
        layout = layout_of([length])
        (spread,) = grouped.spread(bias, grouped.Grouping(layout, layout))
        assert spread.values.shape == (HEADS, 1, length, length)


def test_grouped_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with FakeTensorMode():
        layout = Layout(*(torch.empty(n, dtype=torch.int32, device="cuda") for n in (2, 4)), (4,))
        with pytest.raises(UserError, match=r"cannot record backend 'grouped'.* runtime\.cuda_graph=false"):
            _ = grouped.Grouping(layout, layout).groups


def test_unknown_backend_names_the_known() -> None:
    layout = layout_of([4])
    q, k, v, _ = inputs(layout, layout)
    with pytest.raises(UserError, match="grouped, reference"):
        attention(q, k, v, AttentionLayout(layout), backend="flash3")  # type: ignore[arg-type]


def test_layouts_must_match() -> None:
    with pytest.raises(UserError, match="2 query sequences but 1 key"):
        AttentionLayout(layout_of([3, 4]), layout_of([7]))


kernel = pytest.mark.skipif(not triton_installed(), reason="triton is not installed")
compiled = pytest.mark.skipif(
    DEVICE != "cpu" or not native.has("attention", "cpu"),
    reason=native.why_not("cpu") if DEVICE == "cpu" else "the compiled attention is for the CPU",
)
GPU_DTYPES = DTYPES if DEVICE == "cpu" else DTYPES[1:]  # on a GPU the kernel takes bf16 and fp16
NAMES = ("out", "grad_q", "grad_k", "grad_v", "grad_line")


def on_device(layout: Layout) -> Layout:
    return layout.to(DEVICE)


class Flash(torch.autograd.Function):
    """What flash attention rounds, in PyTorch, one sequence: products at q's dtype, softmax in fp32, and a backward
    pass that has the rounded output to go by. bias: (heads, Lq, Lk) fp32. keep: the same shape, 0 or 1 / (1 - p)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, keep: Tensor, scale: float) -> Tensor:
        weights = (torch.einsum("qhd,khd->hqk", q, k).float() * scale + bias).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", (weights * keep).to(q.dtype), v)
        ctx.save_for_backward(q, k, v, weights, keep, out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, weights, keep, out = ctx.saved_tensors
        delta = (grad.float() * out.float()).sum(-1).t()[:, :, None]
        scores = weights * (torch.einsum("qhd,khd->hqk", grad, v).float() * keep - delta)
        grad_q = torch.einsum("hqk,khd->qhd", scores.to(q.dtype), k) * ctx.scale
        grad_k = torch.einsum("hqk,qhd->khd", scores.to(q.dtype), q) * ctx.scale
        grad_v = torch.einsum("hqk,qhd->khd", (weights * keep).to(q.dtype), grad)
        return grad_q, grad_k, grad_v, scores, None, None


def flash(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, bias: PositionBias | None, p: float) -> Tensor:
    outputs, start = [], 0
    places = layout.queries.positions.split(layout.queries.lengths), layout.keys.positions.split(layout.keys.lengths)
    rows = q.split(layout.queries.lengths), k.split(layout.keys.lengths), v.split(layout.keys.lengths)
    for q_s, k_s, v_s, q_at, k_at in zip(*rows, *places, strict=True):
        spread, keep = torch.zeros(2, q.shape[1], len(q_s), len(k_s), device=q.device)
        if bias is not None:
            distance = (k_at[None, :] - q_at[:, None]).long().clamp(-bias.reach, bias.reach) + bias.reach
            spread = bias.line[:, distance]
        numbers = torch.arange(start, start + len(q_s), device=q.device)
        kept = keep_weights(numbers, q.shape[1], len(k_s), p, seed_tensor(), 7) if p else torch.ones_like(keep)
        outputs.append(Flash.apply(q_s, k_s, v_s, spread, kept / (1 - p), q.shape[-1] ** -0.5))
        start += len(q_s)
    return torch.cat(outputs)


def check_kernel(
    queries: Layout,
    keys: Layout | None,
    reach: int,
    dtype: torch.dtype,
    p: float = 0.0,
    dim: int = 16,
    step: int = 0,
    backend: str = "triton",
    window: bool = False,
    own_rounding: bool = False,
    positions: int = POSITIONS,
) -> None:
    """Outputs and every gradient in memory full of NaN, against float64, within twice the error of flash attention
    written in PyTorch at that dtype.

    reach: of the line; 0 for no bias. step: strided inputs. window: distances of the reach and beyond are excluded."""
    layout = AttentionLayout(on_device(queries), None if keys is None else on_device(keys))
    draw = torch.Generator().manual_seed(queries.num_tokens + dim)
    counts = (queries.num_tokens, *(layout.keys.num_tokens,) * 2)
    tensors = [torch.randn(n, HEADS, dim, generator=draw).to(DEVICE, dtype) for n in counts]
    if reach:
        tensors.append(torch.randn(HEADS, 2 * reach + 1, generator=draw).to(DEVICE))
    if step:
        tensors = [strided(t, step) for t in tensors[:3]] + tensors[3:]

    def call(backend: str, q: Tensor, k: Tensor, v: Tensor, line: Tensor | None = None) -> Tensor:
        bias = PositionBias(line, positions) if line is not None else None
        if bias is not None and window:
            bias = bias.within(reach - 1, reach - 1)
        if backend == "flash":
            return flash(q, k, v, layout, bias, p)
        seed = seed_tensor() if p else None
        return attention(q, k, v, layout, bias, dropout_p=p, seed=seed, place=7, backend=backend)

    with poisoned_memory():
        actual = outputs_and_gradients(lambda *t: call(backend, *t), tensors)
    at_dtype = outputs_and_gradients(lambda *t: call("flash", *t), tensors)
    exact = outputs_and_gradients(lambda *t: call("reference", *t), [t.double() for t in tensors])
    for name, *triple in zip(NAMES, actual, at_dtype, exact, strict=False):
        try:
            assert_as_good_as_pytorch(*triple, own_rounding=own_rounding)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@kernel
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize(("reach", "p"), [(0, 0.0), (11, 0.2)])
def test_kernel(reach: int, p: float, dtype: torch.dtype) -> None:
    """Lengths of one token, around a tile, over several tiles; far tiles to both sides."""
    check_kernel(gapped([1, 33, 90, 2, 32]), None, reach, dtype, p)


@kernel
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_kernel_where_a_program_walks_through_several_query_tiles(monkeypatch: pytest.MonkeyPatch, p: float) -> None:
    """It adds to the same cells of the bias's gradient again. The tiles are those of the device under test."""
    from maelm_fast.kernels import attention as kernels
    from maelm_fast.kernels import attention_tiles

    dim, reach = (64, 91) if DEVICE == "cuda" else (16, 23)
    tiles = attention_tiles.tiles_for(torch.device(DEVICE), dim)
    own = tiles.fwd.own
    lengths = [2 * own + 1, own - 1, own, own + 1]
    monkeypatch.setattr(kernels, "_programs", lambda *_: 2)
    assert sum(-(-n // tiles.dq.own) for n in lengths) >= 3 * 2
    check_kernel(gapped_layout(4 * own, lengths), None, reach, torch.bfloat16, p, dim, positions=4 * own)


@kernel
@pytest.mark.parametrize(("reach", "p"), [(0, 0.2), (11, 0.0), (127, 0.2)])
def test_kernel_with_other_keys(reach: int, p: float) -> None:
    """Queries of a subset, sequences without queries and without keys."""
    check_kernel(gapped([3, 40, 0, 17, 4]), gapped([70, 0, 7, 90, 1], seed=1), reach, torch.bfloat16, p)


EVERY_BACKEND = ["grouped", "reference", pytest.param("native", marks=compiled), pytest.param("triton", marks=kernel)]


BACKEND_AND_DTYPE = [
    ("grouped", torch.float32),
    ("reference", torch.float32),
    pytest.param("native", torch.float32, marks=compiled),
    pytest.param("native", torch.bfloat16, marks=compiled),  # by products of its own, where the CPU has them
    pytest.param("triton", torch.bfloat16, marks=kernel),
]
SKIPPING = BACKEND_AND_DTYPE[2:]


@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("lengths", [[40, 3], [16, 16]], ids=["padded", "full"])
@pytest.mark.parametrize(("backend", "dtype"), BACKEND_AND_DTYPE)
def test_a_query_whose_keys_are_all_excluded(backend: str, dtype: torch.dtype, lengths: list[int], p: float) -> None:
    """It gives 0 and passes no gradient on, and the others are as without it."""
    queries, keys = gapped(lengths), gapped_layout(POSITIONS - 40, lengths)
    last = torch.zeros(queries.num_tokens, dtype=torch.bool)
    last[[lengths[0] - 1, -1]] = True
    queries.positions[last] = POSITIONS - 1  # the last query of each sequence is beyond every key's reach
    draw = torch.Generator().manual_seed(5)
    tensors = [torch.randn(queries.num_tokens, HEADS, 16, generator=draw).to(DEVICE, dtype) for _ in range(3)]
    line = torch.randn(HEADS, 2 * POSITIONS - 1, generator=draw).to(DEVICE)
    line[:, : POSITIONS - 1 - 38] = float("-inf")
    layout = AttentionLayout(on_device(queries), on_device(keys))

    def call(backend: str, q: Tensor, k: Tensor, v: Tensor, line: Tensor) -> Tensor:
        arguments: dict[str, Any] = {"dropout_p": p, "seed": seed_tensor() if p else None, "backend": backend}
        return attention(q, k, v, layout, PositionBias(line), **arguments)

    distance = keys.positions[None, :] - queries.positions[:, None]
    assert (distance[last] < -38).all()
    out, *gradients = outputs_and_gradients(lambda *t: call(backend, *t), [*tensors, line])
    assert out.any()
    assert not out[last].any()
    assert not gradients[0][last].any()
    doubles = [t.double() for t in (*tensors, line)]
    bound = 0.02 if dtype == torch.bfloat16 else 1e-5
    for mine, exact in zip(
        (out, *gradients), outputs_and_gradients(lambda *t: call("reference", *t), doubles), strict=True
    ):
        assert exact.isfinite().all()
        torch.testing.assert_close(mine.double(), exact, rtol=bound, atol=bound * float(exact.abs().max()))


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU the host does not look")
@pytest.mark.parametrize("backend", [*EVERY_BACKEND, "flex"])
@pytest.mark.parametrize("position", [-1, 12])
def test_positions_beyond_those_of_the_bias_are_an_error(position: int, backend: str) -> None:
    layout = layout_of([4], torch.tensor(sorted([position, 3, 4, 5]), dtype=torch.int32))
    q, bias = torch.randn(4, 2, 16), PositionBias(torch.zeros(2, 7), 12)
    with pytest.raises(RuntimeError, match=r"attention: with a bias, positions must lie in \[0, 12\)"):
        attention(q, q, q, AttentionLayout(layout), bias, backend=backend)
    attention(q, q, q, AttentionLayout(layout), backend=backend)


@kernel
@pytest.mark.parametrize("dim", [8, 64, 96, 128])
def test_kernel_head_dims(dim: int) -> None:
    check_kernel(gapped([5, 35]), None, 9, torch.float16, 0.1, dim=dim)


@kernel
@pytest.mark.parametrize("step", [1, 2])
def test_kernel_strided_inputs(step: int) -> None:
    check_kernel(gapped([5, 35]), None, 9, torch.bfloat16, 0.1, step=step)


@kernel
def test_kernel_with_nothing_to_do() -> None:
    check_kernel(gapped([0, 0]), None, 9, torch.bfloat16)
    check_kernel(gapped([0, 3]), gapped([0, 0]), 9, torch.bfloat16)
    check_kernel(gapped([0, 0]), gapped([5, 0]), 9, torch.bfloat16)


# The same layouts every time: one in some hundred exceeds a bound that is itself a random error (lengths 3, 4, 22 with
# reach 27 and seed 5: grad_line 2.07 times PyTorch's, where twice is allowed).
@kernel
@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=3),
    reach=st.integers(0, 127),
    p=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 99),
)
@example(lengths=[36], reach=115, p=0.4, seed=45)  # the kernel's grad_v of 2.72 goes to the farther bf16 number
def test_kernel_on_random_layouts(lengths: list[int], reach: int, p: float, seed: int) -> None:
    check_kernel(gapped(lengths, seed), None, reach, torch.bfloat16, p, own_rounding=True)


def captured(call: Callable[[], Tensor]) -> tuple[tuple[Any, ...], Any]:
    """(arguments, results) of the registered op that call() runs."""
    seen: list[Any] = []
    forward = torch.ops.maelm_fast.attention_triton_fwd

    def spy(*arguments: Any) -> Any:
        seen.extend((arguments, forward(*arguments)))
        return seen[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.maelm_fast, "attention_triton_fwd", spy)
        call()
    return seen[0], seen[1]


@kernel
def test_kernel_statistics_of_the_softmax() -> None:
    """lse, natural, far below any other for a query without keys; and its gradient."""
    queries, keys = on_device(gapped([20, 3])), on_device(gapped([50, 0], seed=1))
    q, k, v, line = (t.to(DEVICE) for t in inputs(queries, keys, torch.bfloat16))
    layout, bias = AttentionLayout(queries, keys), PositionBias(line.float())
    tensors = [t.requires_grad_() for t in (q, k, v, bias.line)]
    lse = captured(lambda: attention(q, k, v, layout, bias, backend="triton"))[1][1]
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    scores = torch.einsum("qhd,khd->hqk", doubles[0][:20], doubles[1]) / DIM**0.5
    distance = keys.positions[None, :50].long() - queries.positions[:20, None].long() + bias.reach
    exact = (scores + doubles[3][:, distance]).logsumexp(-1)
    torch.testing.assert_close(lse[:, :20].double(), exact, rtol=1e-5, atol=1e-5)
    assert (lse[:, 20:] < -1e29).all()
    upstream = torch.randn(HEADS, 20, device=DEVICE)
    mine = torch.autograd.grad(lse[:, :20], tensors, upstream)
    theirs = torch.autograd.grad(exact, doubles, upstream.double(), allow_unused=True, materialize_grads=True)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-2, atol=2e-2)


@kernel
def test_kernel_bias_gradient_sums_to_zero_and_every_run_gives_the_same_bits() -> None:
    layout = AttentionLayout(on_device(gapped([40, 7, 1])))
    q, k, v, line = (t.to(DEVICE) for t in inputs(layout.queries, layout.keys, torch.bfloat16))
    tensors = [q, k, v, line.float()[:, POSITIONS - 1 - 20 : POSITIONS + 20]]

    def call(q: Tensor, k: Tensor, v: Tensor, line: Tensor) -> Tensor:
        bias = PositionBias(line, POSITIONS)
        return attention(q, k, v, layout, bias, dropout_p=0.1, seed=seed_tensor(), backend="triton")

    once, again = outputs_and_gradients(call, tensors), outputs_and_gradients(call, tensors)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    gradient = once[-1].double()
    rounding = 2**-8 * gradient.abs().sum(1)  # delta comes from an output that was rounded to bf16
    assert gradient.abs().max() > 0.1
    assert (gradient.sum(1).abs() < rounding).all()


LAYOUTS_OF_DQ = """
import re
from benchmarks.kernel_launches import compiled, launches

for launch in launches(["attention"]):
    dim = launch.calls[0].partition(" ")[0]
    if launch.kernel != "_attention_dq_kernel" or launch.calls[0] != f"{dim} bf16 bias" or dim == "96":
        continue
    text, arch = compiled(launch).asm["ttgir"], launch.arch
    ((*shape, name),) = set(re.findall(r"st[.]global.*tensor<([0-9]+)x([0-9]+)xi64, (#[a-z0-9]+)>", text))
    layout = re.search(f"^{name} = (.*)$", text, re.M)[1]
    cuts = [re.search(key + r" = .([0-9]+), ([0-9]+)", layout).groups() for key in ("warpsPerCTA", "instrShape")]
    print(arch, dim, *shape, *cuts[0], *cuts[1])
"""


@kernel
def test_no_score_is_in_two_threads_that_would_both_add_it_to_the_kernel_s_gradient() -> None:
    """Compiled for both architectures: the warps, each with one matrix instruction's piece, fit into the tile."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", LAYOUTS_OF_DQ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [[int(number) for number in line.split()] for line in done.stdout.splitlines()]
    assert len(rows) == 6
    for arch, dim, height, width, down, across, *piece in rows:
        assert down * piece[0] <= height, (arch, dim)
        assert across * piece[1] <= width, (arch, dim)


@kernel
def test_kernel_permuting_the_sequences_permutes_the_outputs() -> None:
    """Bit for bit, of unequal lengths, without dropout."""
    lengths, order = [30, 45, 3, 64], [2, 0, 3, 1]
    layout = gapped(lengths)
    q, k, v, line = (t.to(DEVICE) for t in inputs(layout, layout, torch.bfloat16))
    starts = [sum(lengths[:s]) for s in range(4)]
    rows = torch.cat([torch.arange(starts[s], starts[s] + lengths[s]) for s in order])
    moved = AttentionLayout(on_device(layout_of([lengths[s] for s in order], layout.positions[rows])))
    bias = PositionBias(line.float())
    out = attention(q, k, v, AttentionLayout(on_device(layout)), bias, backend="triton")
    assert torch.equal(attention(q[rows], k[rows], v[rows], moved, bias, backend="triton"), out[rows])


@pytest.mark.parametrize(("backend", "dtype"), BACKEND_AND_DTYPE)
def test_every_backend_drops_the_same_weights(backend: str, dtype: torch.dtype) -> None:
    """With values that are the unit vectors of the keys, an output is a row of weights. Queries without keys count too:
    a query's mask is that of its row."""
    lengths, keys, p = [5, 0, 3, 40], [30, 4, 0, 64], 0.37
    queries, there = on_device(gapped(lengths)), on_device(gapped(keys, seed=1))
    q, k = torch.randn(48, HEADS, 64, device=DEVICE), torch.randn(98, HEADS, 64, device=DEVICE)
    v = torch.cat([torch.eye(64, device=DEVICE)[:n] for n in keys])[:, None].expand(-1, HEADS, -1).contiguous()
    seed, place = seed_tensor(), 2**31 - 5
    layout = AttentionLayout(queries, there)
    out = attention(q.to(dtype), k.to(dtype), v.to(dtype), layout, dropout_p=p, seed=seed, place=place, backend=backend)
    for rows, columns, first in ((slice(0, 5), 30, 0), (slice(8, 48), 64, 8)):
        numbers = torch.arange(first, first + rows.stop - rows.start, device=DEVICE)
        keep = keep_weights(numbers, HEADS, columns, p, seed, place)
        assert torch.equal((out[rows, :, :columns] != 0).transpose(0, 1), keep)


@kernel
def test_kernel_opcheck() -> None:
    p = 0.3  # without dropout fewer arguments are there, not others
    layout = AttentionLayout(on_device(gapped([3, 5])))
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    q, k, v, line = (t.to(DEVICE, dtype) for t in inputs(layout.queries, layout.keys))
    bias, seed = PositionBias(line.float()), seed_tensor() if p else None
    arguments, _ = captured(lambda: attention(q, k, v, layout, bias, dropout_p=p, seed=seed, backend="triton"))
    forward, backward = torch.ops.maelm_fast.attention_triton_fwd, torch.ops.maelm_fast.attention_triton_bwd
    opcheck(forward, *[t.detach().requires_grad_() for t in arguments[:4]], *arguments[4:])
    out, lse = forward(*arguments)
    for stacked, summed in ((0, True), (2, False), (3, True)):
        opcheck(backward, out, None, *arguments[:3], out, lse, *arguments[3:5], True, *arguments[5:], stacked, summed)


@kernel
def test_kernel_compiles_without_a_break() -> None:
    layout = AttentionLayout(on_device(gapped([3, 5])))
    q, k, v, line = (t.to(DEVICE, torch.bfloat16) for t in inputs(layout.queries, layout.keys))

    def call(q: Tensor, k: Tensor, v: Tensor, line: Tensor) -> Tensor:
        return attention(q, k, v, layout, PositionBias(line), dropout_p=0.2, seed=seed_tensor(), backend="triton")

    tensors = [q, k, v, line.float()]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for a, b in zip(outputs_and_gradients(call, tensors), outputs_and_gradients(compiled, tensors), strict=True):
        assert torch.equal(a, b)


@kernel
def test_kernel_says_what_it_cannot_take() -> None:
    layout = AttentionLayout(on_device(layout_of([4])))
    q = torch.randn(4, 2, 192, device=DEVICE)
    with pytest.raises(UserError, match="head_dim 192"):
        attention(q, q, q, layout, backend="triton")
    with pytest.raises(UserError, match="float64"):
        attention(*(q.double(),) * 3, layout, backend="triton")
    with pytest.raises(UserError, match="differ in dtype"):
        attention(q.half(), q, q, layout, backend="triton")


def test_shapes_that_do_not_fit() -> None:
    layout, q = AttentionLayout(layout_of([4])), torch.randn(4, 2, 8)
    with pytest.raises(UserError, match=r"q must be \(4, heads, head_dim\)"):
        attention(q[:3], q, q, layout)
    with pytest.raises(UserError, match="the bias has 3 heads, q has 2"):
        attention(q, q, q, layout, PositionBias(torch.zeros(3, 7)))
    with pytest.raises(UserError, match="needs a seed"):
        attention(q, q, q, layout, dropout_p=0.1)
    with pytest.raises(UserError, match=r"2R\+1"):
        PositionBias(torch.zeros(3, 6))


@kernel
def test_lists_of_tiles_start_with_the_longest() -> None:
    from maelm_fast.kernels.attention_tiles import tile_list

    listed = tile_list((70, 3, 0, 40), (10, 90, 9, 50), 32, torch.device("cpu"))
    assert listed.tolist() == [[1, 0], [3, 0], [3, 32], [0, 0], [0, 32], [0, 64]]


def check_native(
    queries: Layout, keys: Layout | None = None, reach: int = 11, dtype: torch.dtype = torch.float32, **arguments: Any
) -> None:
    """As check_kernel; the compiled code's own memory is full of NaN too."""
    with deterministic():
        check_kernel(queries, keys, reach, dtype, backend="native", **arguments)


NATIVE_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@compiled
@NATIVE_DTYPES
@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("reach", [0, 11, 127])
def test_native(reach: int, p: float, dtype: torch.dtype) -> None:
    """Lengths of one token, around a tile and a panel, over several blocks; gaps of all sizes."""
    check_native(gapped([1, 33, 90, 2, 16, 6, 0, 128]), reach=reach, dtype=dtype, p=p)
    check_native(gapped([3, 40, 0, 17, 4]), gapped([70, 0, 7, 90, 1], seed=1), reach, dtype, p=p)


@compiled
@NATIVE_DTYPES
@pytest.mark.parametrize("dim", [16, 32, 64, 128])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_native_head_dims_and_strides(dim: int, step: int, dtype: torch.dtype) -> None:
    check_native(gapped([5, 35]), dtype=dtype, p=0.1, dim=dim, step=step)


@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_native_half_precision(dtype: torch.dtype, step: int) -> None:
    check_native(gapped([1, 33, 0, 90]), dtype=dtype, step=step)
    check_native(gapped([3, 0, 17]), gapped([70, 0, 7], seed=1), dtype=dtype, p=0.2, step=step)
    check_native(gapped([0, 3]), gapped([0, 0]), dtype=dtype)


@compiled
@pytest.mark.parametrize("wide", [False, True])
def test_native_bf16_over_several_blocks_of_queries(wide: bool) -> None:
    """An odd number of queries; positions without gaps, and with gaps too wide for one lookup."""
    places = torch.tensor(sorted(random.Random(0).sample(range(9000), 601)), dtype=torch.int32)
    layout = layout_of([601], places if wide else None)
    check_native(layout, dtype=torch.bfloat16, reach=50, p=0.1, positions=9000)
    check_native(layout, dtype=torch.bfloat16, reach=50, p=0.1, positions=9000, window=True)


@compiled
def test_native_over_several_blocks_of_queries() -> None:
    """Positions without gaps, and with gaps too wide for one lookup."""
    draw = random.Random(0)
    wide = layout_of([300], torch.tensor(sorted(draw.sample(range(9000), 300)), dtype=torch.int32))
    for layout in (layout_of([700]), wide):
        q, k, v = torch.randn(layout.num_tokens, 3, 2, 16).unbind(1)
        tensors = [q, k, v, torch.randn(2, 101)]

        def call(backend: str, q: Tensor, k: Tensor, v: Tensor, line: Tensor, layout: Layout = layout) -> Tensor:
            return attention(q, k, v, AttentionLayout(layout), PositionBias(line, 9000), backend=backend)

        actual = outputs_and_gradients(lambda *t: call("native", *t), tensors)
        at_dtype = outputs_and_gradients(lambda *t: call("reference", *t), tensors)
        exact = outputs_and_gradients(lambda *t: call("reference", *t), [t.double() for t in tensors])
        for triple in zip(actual, at_dtype, exact, strict=True):
            assert_as_good_as_pytorch(*triple)


@compiled
def test_native_with_nothing_to_do() -> None:
    check_native(gapped([0, 0]))
    check_native(gapped([0, 3]), gapped([0, 0]))
    check_native(gapped([0, 0]), gapped([5, 0]))


@compiled
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=3),
    reach=st.integers(0, 127),
    p=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 99),
)
def test_native_on_random_layouts(lengths: list[int], reach: int, p: float, seed: int) -> None:
    check_native(gapped(lengths, seed), reach=reach, p=p)


# The same layouts every time, as for the Triton kernel: the bound is itself a random error.
@compiled
@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=3),
    reach=st.integers(0, 127),
    p=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 99),
)
def test_native_bf16_on_random_layouts(lengths: list[int], reach: int, p: float, seed: int) -> None:
    check_native(gapped(lengths, seed), reach=reach, dtype=torch.bfloat16, p=p, own_rounding=True)


@compiled
def test_native_exponential_is_within_two_units_in_the_last_place() -> None:
    """Each query has two keys with logits 0 and x: their weights are 1 and exp(x) over the sum."""
    x = -torch.rand(20_000) * 87
    queries, keys = layout_of([1] * len(x)), layout_of([2] * len(x))
    q, k, v = torch.zeros(len(x), 1, 16), torch.zeros(2 * len(x), 1, 16), torch.zeros(2 * len(x), 1, 16)
    q[:, 0, 0], k[1::2, 0, 0], v[1::2, 0, 0] = x, 1.0, 1.0
    out = attention(q, k, v, AttentionLayout(queries, keys), scale=1.0, backend="native")[:, 0, 0].double()
    exact = x.double().exp() / (1 + x.double().exp())
    # the exponential's 2 units of 2**-23 at most, and half a unit each for the sum, the division and the product
    assert ((out - exact).abs() / exact).max() < 3.5 * 2**-23
    beyond = attention(q * 3, k, v, AttentionLayout(queries, keys), scale=1.0, backend="native")
    assert not beyond[x < -30].any()


@compiled
@NATIVE_DTYPES
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e4])
def test_native_keeps_what_is_not_finite(value: float, dtype: torch.dtype) -> None:
    """A NaN is not lost in the exponential; logits far from zero are no danger, nor absent keys of a panel."""
    layout = AttentionLayout(layout_of([5, 19]))
    tensors = list(torch.randn(24, 3, 2, 16, generator=torch.Generator().manual_seed(3)).to(dtype).unbind(1))
    tensors[0][7, 1, 3] = value

    def call(backend: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, layout, backend=backend)

    ours, theirs = (outputs_and_gradients(lambda *t: call(b, *t), tensors) for b in ("native", "reference"))  # noqa: B023
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.isfinite(), b.isfinite())
        bound = 0.02 * float(b.nan_to_num(0.0).abs().max()) if dtype == torch.bfloat16 else 1e-3
        torch.testing.assert_close(a, b, rtol=1e-3, atol=bound, equal_nan=True)


@compiled
@NATIVE_DTYPES
def test_native_gives_the_same_bits_for_every_number_of_threads(dtype: torch.dtype) -> None:
    layout = AttentionLayout(gapped([40, 7, 90, 1, 30] * 8))
    q, k, v = torch.randn(layout.queries.num_tokens, 3, HEADS, 16).to(dtype).unbind(1)
    tensors = [q, k, v, torch.randn(HEADS, 41)]

    def call(q: Tensor, k: Tensor, v: Tensor, line: Tensor) -> Tensor:
        bias = PositionBias(line, POSITIONS)
        return attention(q, k, v, layout, bias, dropout_p=0.1, seed=seed_tensor(), backend="native")

    before, runs = torch.get_num_threads(), []
    try:
        for threads in (1, 1, 2, 3):
            torch.set_num_threads(threads)
            runs.append(outputs_and_gradients(call, tensors))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for run in runs for a, b in zip(runs[0], run, strict=True))
    gradient = runs[0][-1].double()  # sums to zero over all distances
    assert (gradient.sum(1).abs() < 1e-5 * gradient.abs().sum(1)).all()


@compiled
@NATIVE_DTYPES
def test_native_takes_an_upstream_gradient_without_memory_of_its_own(dtype: torch.dtype) -> None:
    """That of a sum is one number, expanded."""
    layout = AttentionLayout(gapped([3, 20]))
    q, k, v = torch.randn(23, 3, HEADS, 16).to(dtype).unbind(1)
    leaves = [t.requires_grad_() for t in (q.clone(), k.clone(), v.clone())]
    mine = torch.autograd.grad(attention(*leaves, layout, backend="native").sum(), leaves)
    out = attention(*leaves, layout, backend="native")
    for a, b in zip(mine, torch.autograd.grad(out, leaves, torch.ones_like(out)), strict=True):
        assert torch.equal(a, b)


@compiled
@pytest.mark.parametrize("line", [torch.zeros(2, 4), torch.zeros(3, 5), torch.zeros(5), torch.zeros(2, 5).double()])
def test_native_checks_the_line_before_it_is_read(line: Tensor) -> None:
    layout = layout_of([4])
    q = torch.randn(4, 2, 16)
    assert attention(q, q, q, AttentionLayout(layout), backend="native").shape == q.shape  # loads the extension
    with pytest.raises(RuntimeError, match=r"attention: line must be \(heads, 2R\+1\)"):
        torch.ops.maelm_fast.attention_native_fwd(
            q, q, q, line, *(layout.cu_seqlens,) * 2, *(layout.positions,) * 2, 0.25, 0.0, None, 0
        )


@compiled
@pytest.mark.parametrize(("p", "dtype"), [(0.0, torch.float32), (0.3, torch.float32), (0.3, torch.bfloat16)])
def test_native_opcheck(p: float, dtype: torch.dtype) -> None:
    layout = gapped([3, 5])
    q, k, v = torch.randn(8, 3, HEADS, 16, dtype=dtype).unbind(1)
    line, seed = torch.randn(HEADS, 2 * POSITIONS - 1), seed_tensor() if p else None
    rest = (*(layout.cu_seqlens,) * 2, *(layout.positions,) * 2)
    ops = torch.ops.maelm_fast
    assert attention(q, k, v, AttentionLayout(layout), backend="native").shape == q.shape  # loads the extension
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v, line)]
    opcheck(ops.attention_native_fwd, *leaves, *rest, 0.25, p, seed, 7)
    out, lse = ops.attention_native_fwd(q, k, v, line, *rest, 0.25, p, seed, 7)
    for stacked in (0, 2, 3):
        opcheck(ops.attention_native_bwd, out, q, k, v, lse, line, *rest, True, 0.25, p, seed, 7, stacked)


@compiled
def test_native_compiles_without_a_break() -> None:
    layout = AttentionLayout(gapped([3, 5]))
    tensors = [*torch.randn(8, 3, HEADS, 16).unbind(1), torch.randn(HEADS, 2 * POSITIONS - 1)]

    def call(q: Tensor, k: Tensor, v: Tensor, line: Tensor) -> Tensor:
        return attention(q, k, v, layout, PositionBias(line), dropout_p=0.2, seed=seed_tensor(), backend="native")

    compiled_call = torch.compile(call, fullgraph=True, backend="aot_eager")
    pairs = zip(outputs_and_gradients(call, tensors), outputs_and_gradients(compiled_call, tensors), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@compiled
def test_native_says_what_it_cannot_take() -> None:
    layout, q = AttentionLayout(layout_of([4])), torch.randn(4, 2, 24)
    with pytest.raises(UserError, match="head_dim 24"):
        attention(q, q, q, layout, backend="native")
    assert attention(q, q, q, layout).shape == q.shape  # auto takes another
    q = torch.randn(4, 2, 32)
    with pytest.raises(UserError, match=r"dtype float64 \(it takes fp32, bf16 and fp16\)"):
        attention(*(q.double(),) * 3, layout, backend="native")
    with pytest.raises(RuntimeError, match="positions must lie in"):
        attention(
            q,
            q,
            q,
            AttentionLayout(layout_of([4], torch.tensor([-1, 0, 1, 2], dtype=torch.int32))),
            PositionBias(torch.zeros(2, 3)),
            backend="native",
        )
