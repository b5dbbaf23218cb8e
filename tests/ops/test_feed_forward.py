"""feed_forward: the Triton backend against the reference and its float64 gradients."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maelm_fast import ops
from maelm_fast.ops.reference.feed_forward import feed_forward as reference
from tests.ops.checks import (
    DEVICE,
    DTYPES,
    assert_as_good_as_pytorch,
    check_against_reference,
    opcheck,
    outputs_and_gradients,
    poisoned_memory,
    strided,
)

NAMES = ("y", "x", "weight_in", "bias_in", "weight_out", "bias_out")


def kernels() -> object:
    return importlib.import_module("maelm_fast.kernels.feed_forward")


def triton(*tensors: Tensor, keep_gelu: bool = False) -> Tensor:
    return ops.feed_forward(*tensors, keep_gelu=keep_gelu, backend="triton")


def inputs(rows: int, width: int, inner: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    x, bias_in, bias_out = torch.randn(rows, width), torch.randn(inner), torch.randn(width)
    weight_in, weight_out = torch.randn(inner, width) / width**0.5, torch.randn(width, inner) / inner**0.5
    return [t.to(DEVICE, dtype) for t in (x, weight_in, bias_in, weight_out, bias_out)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "inner"), [(7, 12, 20), (1, 64, 96), (131, 16, 300), (5, 32, 1100)])
def test_against_reference(rows: int, width: int, inner: int, dtype: torch.dtype) -> None:
    check_against_reference(triton, reference, inputs(rows, width, inner, dtype), names=NAMES)


@pytest.mark.parametrize("step", [1, 2])
def test_strided(step: int) -> None:
    check_against_reference(triton, reference, [strided(t, step) for t in inputs(9, 16, 24)], names=NAMES)


def test_strided_gradient() -> None:
    """The gradient of a sum is one number, expanded."""
    tensors = [t.requires_grad_() for t in inputs(9, 16, 24)]
    mine, theirs = (torch.autograd.grad(f(*tensors).sum(), tensors) for f in (triton, reference))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_no_rows() -> None:
    with poisoned_memory():
        results = outputs_and_gradients(triton, inputs(0, 12, 20))
    assert results[0].shape == (0, 12)
    assert all(bool((t == 0).all()) for t in results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_and_its_gradient_at_every_scale(dtype: torch.dtype) -> None:
    """As exact as PyTorch's own, far tails included, where a tanh GELU is off by up to 5e-4."""
    h = torch.linspace(-12, 12, 1031).to(DEVICE, dtype)[:, None]
    bias = torch.zeros(1, device=DEVICE)
    exact, at_dtype = h.double().requires_grad_(), h.clone().requires_grad_()
    F.gelu(exact).sum().backward()
    F.gelu(at_dtype).sum().backward()
    grad = torch.ones_like(h)
    with poisoned_memory():
        forward = kernels().bias_gelu(h, bias)  # type: ignore[attr-defined]
        again, grad_bias = kernels().bias_gelu_bwd_(grad, h, bias)  # type: ignore[attr-defined]
    assert torch.equal(forward, again)
    assert_as_good_as_pytorch(forward, F.gelu(at_dtype).detach(), F.gelu(exact).detach(), floor=0.0)
    assert_as_good_as_pytorch(grad, at_dtype.grad, exact.grad, floor=0.0)
    torch.testing.assert_close(grad_bias.double(), exact.grad.sum(0), rtol=1e-5, atol=1e-2)
    if dtype != torch.float16:  # which has no numbers that small
        error = (forward.double() - F.gelu(exact.detach())) / F.gelu(exact.detach())
        assert float(error[(h < -3) & (h > -6)].abs().max()) < 1e-2


def test_parameters_wider_than_the_input() -> None:
    """fp32 biases beside bf16 products: their gradients come in fp32."""
    x, weight_in, bias_in, weight_out, bias_out = inputs(9, 16, 24, torch.bfloat16)
    mixed = [x, weight_in, bias_in.float(), weight_out, bias_out.float()]
    with poisoned_memory():
        mine = outputs_and_gradients(triton, mixed)
    narrow = outputs_and_gradients(reference, [t.bfloat16() for t in mixed])
    exact = outputs_and_gradients(reference, [t.double() for t in mixed])
    assert [t.dtype for t in mine[1:]] == [t.dtype for t in mixed]
    for a, b, c in zip(mine, narrow, exact, strict=True):
        assert_as_good_as_pytorch(a, b.to(a.dtype), c)


@pytest.mark.parametrize("narrow", [False, True])
def test_autocast(narrow: bool) -> None:
    """Products in bf16; gradients reach the fp32 parameters in fp32. narrow: x comes from another bf16 op."""
    tensors = inputs(9, 16, 24)
    if narrow:
        tensors[0] = tensors[0].bfloat16()

    def under_autocast(function: object) -> list[Tensor]:
        def run(*t: Tensor) -> Tensor:
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                return function(*t)  # type: ignore[operator,no-any-return]

        return outputs_and_gradients(run, tensors)

    with poisoned_memory():
        mine = under_autocast(triton)
    exact = outputs_and_gradients(reference, [t.double() for t in tensors])
    for triple in zip(mine, under_autocast(reference), exact, strict=True):
        assert_as_good_as_pytorch(*triple)


def test_same_bits_every_time() -> None:
    tensors = inputs(200, 16, 24)
    for first, second in zip(
        outputs_and_gradients(triton, tensors), outputs_and_gradients(triton, tensors), strict=True
    ):
        assert torch.equal(first, second)


@pytest.mark.parametrize("keep_gelu", [False, True])
def test_what_is_kept(keep_gelu: bool) -> None:
    """Besides the arguments the backward pass holds the first product, (T, f), and GELU's output only if asked to; that
    it then reads: of twice as much of it the second weight has twice the gradient, and nothing else changes."""
    tensors = [t.requires_grad_() for t in inputs(9, 16, 24)]
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> tuple[Tensor, int]:
        kept.append(tensor)
        return tensor, sum(t.shape == (9, 24) for t in kept)

    def unpack(packed: tuple[Tensor, int]) -> Tensor:
        tensor, number = packed
        return 2 * tensor if tensor.shape == (9, 24) and number == 2 else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        doubled = torch.autograd.grad(triton(*tensors, keep_gelu=keep_gelu).sum(), tensors)
    x, weight_in, bias_in, weight_out, _ = tensors
    arguments = sum(t.nbytes for t in (x, weight_in, bias_in, weight_out))
    assert sum(t.nbytes for t in kept) == arguments + (1 + keep_gelu) * 9 * 24 * 4
    plain = torch.autograd.grad(triton(*tensors).sum(), tensors)
    for name, a, b in zip(NAMES[1:], doubled, plain, strict=True):
        assert torch.equal(a, (1 + keep_gelu) * b if name == "weight_out" else b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "inner"), [(0, 12, 20), (7, 12, 20), (131, 16, 300)])
def test_kept_and_made_again_are_the_same_bits(rows: int, width: int, inner: int, dtype: torch.dtype) -> None:
    tensors = inputs(rows, width, inner, dtype)
    with poisoned_memory():
        kept = outputs_and_gradients(functools.partial(triton, keep_gelu=True), tensors)
        remade = outputs_and_gradients(triton, tensors)
    assert all(map(torch.equal, kept, remade))


def test_what_is_kept_is_not_written_again() -> None:
    h, bias, grad = (torch.randn(shape, device=DEVICE) for shape in ((70, 24), (24,), (70, 24)))
    kept, also = torch.full_like(h, float("nan")), grad.clone()
    a, grad_bias = kernels().bias_gelu_bwd_(grad, h, bias, kept)  # type: ignore[attr-defined]
    again, also_bias = kernels().bias_gelu_bwd_(also, h, bias)  # type: ignore[attr-defined]
    assert a is kept
    assert bool(kept.isnan().all())
    assert torch.equal(again, kernels().bias_gelu(h, bias))  # type: ignore[attr-defined]
    assert torch.equal(grad, also)
    assert torch.equal(grad_bias, also_bias)


@pytest.mark.parametrize("keep_gelu", [False, True])
def test_opcheck(keep_gelu: bool) -> None:
    tensors = [t.requires_grad_() for t in inputs(5, 8, 12)]
    opcheck(torch.ops.maelm_fast.feed_forward_triton_fwd.default, *tensors, keep_gelu)
    x, *weights, _ = (t.detach() for t in tensors)
    h, kept = (torch.randn(shape, device=DEVICE) for shape in ((5, 12), (5, 12) if keep_gelu else (0,)))
    for sums in (True, False):
        arguments = (torch.randn_like(x), x, *weights, h, kept, sums)
        opcheck(torch.ops.maelm_fast.feed_forward_triton_bwd.default, *arguments)


@pytest.mark.parametrize("keep_gelu", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_whole(autocast: bool, keep_gelu: bool) -> None:
    tensors = inputs(5, 8, 12)

    def run(*t: Tensor) -> Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=autocast):
            return triton(*t, keep_gelu=keep_gelu) * 2

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for mine, eager in zip(outputs_and_gradients(compiled, tensors), outputs_and_gradients(run, tensors), strict=True):
        torch.testing.assert_close(mine, eager)


def test_float64_is_the_reference() -> None:
    tensors = inputs(5, 8, 12, torch.float64)
    assert torch.equal(ops.feed_forward(*tensors), reference(*tensors))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="no CUDA device")
def test_the_host_never_waits() -> None:
    leaves = [t.requires_grad_() for t in inputs(300, 64, 256)]
    for mode in ("default", "error"):  # once to compile
        torch.cuda.set_sync_debug_mode(mode)
        try:
            triton(*leaves).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(t.grad is not None for t in leaves)
