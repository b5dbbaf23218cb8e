"""The compiled attention of a CPU: against float64, on any number of threads, and what it refuses."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from maelm_fast.batch import Layout, layout_of
from maelm_fast.errors import UserError
from maelm_fast.ops import AttentionLayout, PositionBias, attention
from tests.ops.attention_checks import HEADS, POSITIONS, check_kernel, compiled, gapped
from tests.ops.checks import assert_as_good_as_pytorch, deterministic, opcheck, outputs_and_gradients, seed_tensor


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
