"""linear and feed_forward in compiled bf16 products, against PyTorch's and their float64 gradients."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maelm_fast import ops
from maelm_fast.errors import UserError
from maelm_fast.ops.linear import native_reasons
from maelm_fast.ops.reference.feed_forward import feed_forward as plain_feed_forward
from tests.ops.checks import assert_as_good_as_pytorch, opcheck, outputs_and_gradients, poisoned_memory, strided

BF16 = torch.bfloat16
WHY_NOT = "; ".join(native_reasons("linear", torch.empty(2, 2, dtype=BF16), torch.empty(2, 2)))
needs_products = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
SHAPES = [(7, 12, 20), (1, 64, 96), (131, 16, 300), (8, 32, 1100), (40, 2, 2), (2100, 8, 50), (9, 12, 8294)]
"""Rows, width, inner width: whole tiles (8 x 48), parts of them, and more rows (2,048) or outputs (8,192) than one pass
adds up."""


def linear(*tensors: Tensor) -> Tensor:
    return ops.linear(*tensors, backend="native")


def feed_forward(*tensors: Tensor) -> Tensor:
    return ops.feed_forward(*tensors, backend="native")


PAIRS = pytest.mark.parametrize(
    ("op", "plain"), [(linear, F.linear), (feed_forward, plain_feed_forward)], ids=["linear", "feed_forward"]
)


def inputs(op: Callable[..., Tensor], rows: int, width: int, inner: int, parameters: torch.dtype) -> list[Tensor]:
    torch.manual_seed(rows)
    x, weight_in, bias_in = torch.randn(rows, width), torch.randn(inner, width) / width**0.5, torch.randn(inner)
    tensors = [x, weight_in, bias_in, torch.randn(width, inner) / inner**0.5, torch.randn(width)]
    return [x.to(BF16), *(t.to(parameters) for t in tensors[1 : 3 if op is linear else 5])]


def autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*tensors: Tensor) -> Any:
        with torch.autocast("cpu", BF16):
            return function(*tensors)

    return run


def compare(op: Callable[..., Tensor], plain: Callable[..., Tensor], tensors: list[Tensor]) -> None:
    with poisoned_memory():
        mine = outputs_and_gradients(autocast(op), tensors)
    theirs = outputs_and_gradients(autocast(plain), tensors)
    exact = outputs_and_gradients(plain, [t.double() for t in tensors])
    for triple in zip(mine, theirs, exact, strict=True):
        assert_as_good_as_pytorch(*triple, own_rounding=True)


@needs_products
@PAIRS
@pytest.mark.parametrize("parameters", [torch.float32, BF16])
@pytest.mark.parametrize(("rows", "width", "inner"), SHAPES)
def test_as_good_as_pytorch(op: Any, plain: Any, rows: int, width: int, inner: int, parameters: torch.dtype) -> None:
    compare(op, plain, inputs(op, rows, width, inner, parameters))


@needs_products
@PAIRS
@pytest.mark.parametrize("step", [1, 2])
def test_strided(op: Any, plain: Any, step: int) -> None:
    compare(op, plain, [strided(t, step) for t in inputs(op, 9, 16, 24, torch.float32)])


@needs_products
@PAIRS
def test_wide_input_and_a_gradient_that_is_one_number(op: Any, plain: Any) -> None:
    tensors = [t.float().requires_grad_() for t in inputs(op, 9, 16, 24, torch.float32)]
    mine, theirs = (torch.autograd.grad(autocast(f)(*tensors).sum(), tensors) for f in (op, plain))
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))


@needs_products
def test_without_bias_and_with_more_dimensions() -> None:
    x, weight, _ = inputs(linear, 12, 16, 24, torch.float32)
    for shape in ((3, 4, 16), (12, 16)):
        compare(linear, F.linear, [x.view(shape), weight])
    compare(linear, F.linear, [x[0], weight])


@needs_products
@PAIRS
def test_no_rows(op: Any, plain: Any) -> None:
    with poisoned_memory():
        results = outputs_and_gradients(op, inputs(op, 0, 12, 20, torch.float32))
    assert results[0].shape == (0, 20 if op is linear else 12)
    assert all(bool((t == 0).all()) for t in results)


@needs_products
@PAIRS
def test_only_the_gradients_that_are_asked_for(op: Any, plain: Any) -> None:
    """And those that are, whatever the others."""
    tensors = inputs(op, 9, 16, 24, torch.float32)
    whole = outputs_and_gradients(op, tensors)[1:]
    for index, expected in enumerate(whole):
        leaves = [t.detach().requires_grad_(i == index) for i, t in enumerate(tensors)]
        out = op(*leaves)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1234)).bfloat16()
        out.backward(upstream)
        gradient = leaves[index].grad
        assert gradient is not None
        assert torch.equal(gradient, expected)
        assert [leaf.grad is None for leaf in leaves] == [i != index for i in range(len(leaves))]


@needs_products
@PAIRS
def test_same_bits_on_any_number_of_threads(op: Any, plain: Any) -> None:
    tensors, before = inputs(op, 300, 64, 200, torch.float32), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            results.append(outputs_and_gradients(op, tensors))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@needs_products
@PAIRS
def test_a_changed_parameter_is_read_anew(op: Any, plain: Any) -> None:
    """Whoever changed it, and however: nothing packed outlives a call. A change between the two passes is refused."""
    x, *parameters = inputs(op, 9, 16, 24, torch.float32)
    parameters = [torch.nn.Parameter(t) for t in parameters]
    op(x, *parameters)
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def update() -> None:
        op(x, *parameters).float().square().mean().backward()
        optimizer.step()

    def behind_autograd() -> None:
        for p in parameters:
            p.data.mul_(1.5)  # its version does not change

    def through_numpy() -> None:
        parameters[0].detach().numpy()[:] *= -1

    for change in (update, behind_autograd, through_numpy):
        old = op(x, *parameters)
        change()
        now = op(x, *parameters)
        assert torch.equal(now, op(x, *(p.detach().clone() for p in parameters)))
        assert not torch.equal(now, old)
    out = op(x, *parameters)
    with torch.no_grad():
        parameters[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@needs_products
def test_gelu_and_its_gradient_at_every_scale() -> None:
    """Both matrices are the identity. Far tails are as exact as bf16 is, and what is no number stays none."""
    one, zero = torch.eye(2), torch.zeros(2)
    h = torch.linspace(-12, 12, 1031).to(BF16)[:, None].repeat(1, 2)
    exact, at_dtype = h.double().requires_grad_(), h.clone().requires_grad_()
    F.gelu(exact).sum().backward()
    F.gelu(at_dtype).sum().backward()
    mine = h.clone().requires_grad_()
    out = feed_forward(mine, one, zero, one, zero)
    out.sum().backward()
    assert_as_good_as_pytorch(out.detach(), F.gelu(at_dtype).detach(), F.gelu(exact).detach(), floor=0.0)
    assert mine.grad is not None
    assert at_dtype.grad is not None
    assert exact.grad is not None
    assert_as_good_as_pytorch(mine.grad, at_dtype.grad, exact.grad, floor=0.0)
    tail = h.double() / 2 * torch.special.erfc(h.double() / -(2**0.5))  # F.gelu loses it below -8
    error = (out.detach().double() - tail) / tail
    assert float(error[(h < -3) & (h > -12)].abs().max()) < 5e-3
    strange = torch.tensor([[float("nan"), 1.0], [float("inf"), 0.0], [3e38, 0.0]], dtype=BF16)
    out = feed_forward(strange, one, zero, one, zero)
    assert out[:2, 0].isnan().all()  # inf * 0 is no number
    assert out[2, 0] > 2e38


@needs_products
@PAIRS
def test_opcheck(op: Any, plain: Any) -> None:
    tensors = [t.requires_grad_() for t in inputs(op, 5, 8, 12, torch.float32)]
    x, *parameters = (t.detach() for t in tensors)
    if op is linear:
        opcheck(torch.ops.maelm_fast.linear_native_fwd.default, *tensors)
        for wanted in ((True, True), (False, True), (True, False)):
            grad = torch.randn(5, 12).to(BF16)
            opcheck(torch.ops.maelm_fast.linear_native_bwd.default, grad, x, parameters[0], *wanted)
        return
    opcheck(torch.ops.maelm_fast.feed_forward_native_fwd.default, *tensors)
    grad, h, matrices = torch.randn_like(x), torch.randn(5, 12).to(BF16), (parameters[0], parameters[2])
    for wanted in ((True, True), (False, True), (True, False)):
        opcheck(torch.ops.maelm_fast.feed_forward_native_bwd.default, grad, x, h, *matrices, *wanted)


@needs_products
@PAIRS
def test_compiles_whole(op: Any, plain: Any) -> None:
    tensors = inputs(op, 5, 8, 12, torch.float32)
    run = autocast(lambda *t: op(*t) * 2)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for mine, eager in zip(outputs_and_gradients(compiled, tensors), outputs_and_gradients(run, tensors), strict=True):
        torch.testing.assert_close(mine, eager)


def test_fp32_is_pytorchs() -> None:
    x, weight, bias = (t.float() for t in inputs(linear, 5, 8, 12, torch.float32))
    assert torch.equal(ops.linear(x, weight, bias), F.linear(x, weight, bias))


@needs_products
@PAIRS
def test_reasons(op: Any, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs(op, 5, 8, 12, torch.float32)
    with pytest.raises(UserError, match=r"products in float32 \(it computes in bf16\)"):
        op(tensors[0].float(), *tensors[1:])
    with pytest.raises(UserError, match=r"products in bfloat16, float16 \(it computes in bf16\)"):
        op(tensors[0], tensors[1].half(), *tensors[2:])
    with pytest.raises(UserError, match=r"weight of shape \(11, 8\) \(it takes even sizes\)"):
        op(*inputs(op, 5, 8, 11, torch.float32))
    monkeypatch.setattr(importlib.import_module("maelm_fast.ops.linear"), "_FAST", False)
    with pytest.raises(UserError, match=r"lacks AVX-512 BF16"):
        op(*tensors)
