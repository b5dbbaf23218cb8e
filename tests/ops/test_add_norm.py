"""add_norm: every backend against the reference in float64, the exact dropout mask, extreme rows, tracing."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maelm_fast import ops
from maelm_fast.errors import UserError
from maelm_fast.ops.reference.dropout import keep_mask
from tests.ops.checks import (
    DEVICE,
    DTYPES,
    Seen,
    assert_as_good_as_pytorch,
    backends_of,
    check_against_reference,
    opcheck,
    outputs_and_gradients,
    poisoned_memory,
    seed_tensor,
    strided,
)

BACKENDS = backends_of("add_norm", "triton", "native")
NAMES = ("out", "grad_x", "grad_residual", "grad_weight", "grad_bias")
EPS = 1e-5


def inputs(rows: int, width: int, dtype: torch.dtype, parameters: torch.dtype | None = None) -> list[Tensor]:
    """x, residual, weight, bias."""
    draw = torch.Generator().manual_seed(rows * 10_007 + width)
    shapes = [(rows, width), (rows, width), (width,), (width,)]
    x, residual, weight, bias = (torch.randn(shape, generator=draw).to(DEVICE) for shape in shapes)
    tensors = [x.to(dtype), (2 * residual + 0.5).to(dtype)]
    return tensors + [t.to(parameters or dtype) for t in (1 + 0.2 * weight, bias)]


def both(backend: str, dropout_p: float = 0.0, place: int = 0) -> tuple[functools.partial, functools.partial]:
    """The op on `backend`, and the reference, as functions of x, residual, weight and bias."""
    return _both(ops.add_norm, backend, dropout_p, place)


def twice(backend: str, dropout_p: float = 0.0) -> tuple[functools.partial, functools.partial]:
    """both(), of the op with two results."""
    return _both(ops.add_norm_twice, backend, dropout_p, 3)


def _both(op: Any, backend: str, dropout_p: float, place: int) -> tuple[functools.partial, functools.partial]:
    seed = seed_tensor() if dropout_p else None
    call = functools.partial(op, eps=EPS, dropout_p=dropout_p, seed=seed, place=place)
    return functools.partial(call, backend=backend), functools.partial(call, backend="reference")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [6, 100, 768])
@pytest.mark.parametrize("backend", BACKENDS)
def test_matches_the_reference(backend: str, width: int, dtype: torch.dtype) -> None:
    rows = 4 if width > 500 else 19
    for dropout_p in (0.0, 0.3):
        check_against_reference(*both(backend, dropout_p, place=3), inputs(rows, width, dtype), names=NAMES)


@pytest.mark.parametrize("backend", BACKENDS)
def test_wide_rows(backend: str) -> None:
    check_against_reference(*both(backend, 0.1), inputs(1, 3000, torch.bfloat16), names=NAMES)
    check_against_reference(*both(backend), inputs(1, 4096, torch.bfloat16), names=NAMES)


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_row_and_one_row(backend: str, dropout_p: float, rows: int) -> None:
    check_against_reference(*both(backend, dropout_p), inputs(rows, 72, torch.float32), names=NAMES)


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_inputs(backend: str, step: int) -> None:
    tensors = [strided(t, step) for t in inputs(9, 40, torch.bfloat16)]
    check_against_reference(*both(backend, 0.3), tensors, names=NAMES)


@pytest.mark.parametrize("backend", BACKENDS)
def test_expanded_gradient(backend: str) -> None:
    run, reference = both(backend)
    check_against_reference(
        lambda *t: run(*t).sum().expand(1), lambda *t: reference(*t).sum().expand(1), inputs(6, 40, torch.float32)
    )


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("backend", BACKENDS)
def test_fp32_parameters(backend: str, dtype: torch.dtype) -> None:
    check_against_reference(*both(backend, 0.3), inputs(21, 136, dtype, torch.float32), names=NAMES)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes_that_all_differ(backend: str) -> None:
    x, residual, weight, bias = inputs(21, 136, torch.float32)
    tensors = [x.bfloat16(), residual, weight.half(), bias]
    for dropout_p in (0.0, 0.3):
        check_against_reference(*both(backend, dropout_p), tensors, names=NAMES)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_mask_is_the_references(backend: str) -> None:
    """A dropped element's gradient is an exact zero; a kept one's is the residual's, scaled."""
    place, p = 2**31 - 5, 0.37
    tensors = inputs(19, 92, torch.float32)
    run, _ = both(backend, p, place)
    _, grad_x, grad_residual, _, _ = outputs_and_gradients(run, tensors)
    keep = keep_mask((19, 92), p, seed_tensor(), place)
    assert torch.equal(grad_x != 0, keep)
    assert (grad_x - keep * grad_residual / (1 - p)).abs().max() < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_constant_rows(backend: str) -> None:
    """Variance 0: the output is the bias, however large the constant."""
    _, _, weight, bias = inputs(1, 200, torch.float32)
    constants = torch.tensor([0.0, 1.0, 1000.1, -3e4], device=DEVICE)[:, None].expand(4, 200)
    run, _ = both(backend)
    out = run(constants, torch.zeros_like(constants), weight, bias)
    assert torch.equal(out, bias.expand(4, 200))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_far_from_zero(backend: str) -> None:
    """Mean 1000, standard deviation 1: one pass over E[x^2] - E[x]^2 would lose it."""
    x, residual, weight, bias = inputs(7, 200, torch.float32)
    check_against_reference(*both(backend), [x, residual + 1000, weight, bias], names=NAMES, floor=1e-4)
    out = both(backend)[0](x, residual + 1000, weight, bias)
    exact = F.layer_norm(x.double() + (residual + 1000).double(), (200,), weight.double(), bias.double(), EPS)
    assert (out - exact).abs().max() < 2e-4  # fp32 has 6e-5 between neighbours at 1000


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_run_gives_the_same_bits(backend: str) -> None:
    tensors = inputs(65, 40, torch.bfloat16)
    run, _ = both(backend, 0.2)
    for once, again in zip(outputs_and_gradients(run, tensors), outputs_and_gradients(run, tensors), strict=True):
        assert torch.equal(once, again)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_twice_adds_what_its_two_readers_say(backend: str, dtype: torch.dtype) -> None:
    for width, dropout_p in ((6, 0.3), (100, 0.0), (768, 0.3)):
        check_against_reference(*twice(backend, dropout_p), inputs(5, width, dtype), names=("out", *NAMES))
    call, reference = twice(backend, 0.3)
    for reader in (0, 1):
        tensors = inputs(3, 40, dtype, torch.float32)
        check_against_reference(lambda *t, i=reader: call(*t)[i], lambda *t, i=reader: reference(*t)[i], tensors)


@pytest.mark.parametrize("backend", BACKENDS)
def test_twice_adds_without_a_pass_of_its_own(backend: str) -> None:
    """Exactly, in fp32: the gradients are those of the sum. No operator but the kernel's sees it."""
    tensors = [t.requires_grad_() for t in inputs(9, 40, torch.float32)]
    first, second = torch.randn(2, 9, 40, device=DEVICE).unbind()
    out, again = twice(backend, 0.3)[0](*tensors)
    assert out.data_ptr() == again.data_ptr()
    with Seen() as seen:
        mine = torch.autograd.grad((out, again), tensors, (first, strided(second)))
    assert [name for name in seen.names if "add" in name] == [f"maelm_fast::add_norm_{backend}_bwd"]
    once = both(backend, 0.3, place=3)[0](*tensors)
    for a, b in zip(mine, torch.autograd.grad(once, tensors, first + second), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend: str, dropout_p: float) -> None:
    tensors = [t.requires_grad_() for t in inputs(2, 16, torch.float32)]
    seed = seed_tensor() if dropout_p else None
    forward = getattr(torch.ops.maelm_fast, f"add_norm_{backend}_fwd")
    opcheck(forward, *tensors, EPS, dropout_p, seed, 1)
    _, mean, rstd = forward(*(t.detach() for t in tensors), EPS, dropout_p, seed, 1)
    x, residual, weight, _ = (t.detach() for t in tensors)
    backward = getattr(torch.ops.maelm_fast, f"add_norm_{backend}_bwd")
    for grad_again in (None, torch.randn_like(x)):
        opcheck(backward, torch.randn_like(x), grad_again, x, residual, weight, mean, rstd, dropout_p, seed, 1, False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_without_a_break(backend: str) -> None:
    tensors = inputs(6, 24, torch.float32)
    for run, _ in (both(backend, 0.3), twice(backend, 0.3)):
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        for eager, traced in zip(
            outputs_and_gradients(run, tensors), outputs_and_gradients(compiled, tensors), strict=True
        ):
            assert torch.equal(eager, traced)


@pytest.mark.parametrize("backend", BACKENDS)
def test_seed_is_read_at_each_call(backend: str) -> None:
    """A captured graph is given another mask by writing into the seed."""
    seed, tensors = seed_tensor(1), inputs(4, 24, torch.float32)
    call = functools.partial(ops.add_norm, *tensors, eps=EPS, dropout_p=0.5, seed=seed, backend=backend)
    once, again = call(), call()
    seed.fill_(2)
    assert torch.equal(once, again)
    assert not torch.equal(once, call())


def test_float64_runs_on_the_reference() -> None:
    tensors = [t.double() for t in inputs(4, 24, torch.float32)]
    assert ops.add_norm(*tensors, eps=EPS).dtype == torch.float64
    with pytest.raises(UserError, match="float64"):
        ops.add_norm(*tensors, eps=EPS, backend="triton")


def test_errors() -> None:
    x, residual, weight, bias = inputs(4, 24, torch.float32)
    with pytest.raises(UserError, match="seed"):
        ops.add_norm(x, residual, weight, bias, eps=EPS, dropout_p=0.1)
    with pytest.raises(UserError, match="below 1"):
        ops.add_norm(x, residual, weight, bias, eps=EPS, dropout_p=1.0, seed=seed_tensor())
    with pytest.raises(UserError, match=r"\(3, 24\)"):
        ops.add_norm(x, residual[:3], weight, bias, eps=EPS)
    with pytest.raises(UserError, match="no backend 'fast'"):
        ops.add_norm(x, residual, weight, bias, eps=EPS, backend="fast")


def test_the_bound_catches_what_it_should() -> None:
    exact = torch.randn(40, dtype=torch.float64)
    rounded = exact.bfloat16()
    assert_as_good_as_pytorch(rounded, rounded, exact)
    with pytest.raises(AssertionError, match="allowed"):
        assert_as_good_as_pytorch((exact * 1.02).bfloat16(), rounded, exact)
    with poisoned_memory(), pytest.raises(AssertionError, match="not written"):
        assert_as_good_as_pytorch(torch.empty_like(rounded), rounded, exact)
