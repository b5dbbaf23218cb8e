"""A bias's gradient is not a pass of its own where the kernel behind it has summed the rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from maelm_fast import ops, presets
from maelm_fast.batch import layout_of
from maelm_fast.model.block import Block, Dropout
from maelm_fast.ops import AttentionLayout, PositionBias
from maelm_fast.ops.dispatch import triton_installed
from maelm_fast.ops.row_sums import keep_row_sums, row_sums_of
from tests.ops.checks import (
    DEVICE,
    check_against_reference,
    gapped_layout,
    outputs_and_gradients,
    poisoned_memory,
    seed_tensor,
)

ROWS, WIDTH, INNER = 37, 24, 40
needs_triton = pytest.mark.skipif(not triton_installed(), reason="triton is not installed")


def inputs(dtype: torch.dtype, rows: int = ROWS) -> list[Tensor]:
    """x, weights and biases of the two products; the residual, weight and bias of the norm."""
    shapes = [(rows, WIDTH), (INNER, WIDTH), (INNER,), (WIDTH, INNER), (WIDTH,), (rows, WIDTH), (WIDTH,), (WIDTH,)]
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=draw).div(shape[-1] ** 0.5).to(DEVICE, dtype) for shape in shapes]


def sublayer(backend: str, dropout_p: float, hooked: bool, *tensors: Tensor) -> Tensor:
    out = ops.feed_forward(*tensors[:5], backend=backend)
    if hooked:
        out.register_hook(lambda grad: grad.mul_(2))
    seed = seed_tensor() if dropout_p else None
    return ops.add_norm(out, *tensors[5:], eps=1e-5, dropout_p=dropout_p, seed=seed, place=2, backend=backend)


def both(dropout_p: float, hooked: bool = False) -> list[Callable[..., Tensor]]:
    return [functools.partial(sublayer, backend, dropout_p, hooked) for backend in ("triton", "reference")]


def spy(summed: list[torch.Size]) -> Callable[..., Tensor]:
    """Tensor.sum, which notes the shapes of what it sums."""
    plain = Tensor.sum

    def noted(tensor: Tensor, *arguments: Any, **named: Any) -> Tensor:
        summed.append(tensor.shape)
        return plain(tensor, *arguments, **named)

    return noted


@needs_triton
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("rows", [ROWS, 1, 0])
def test_no_pass_sums_the_rows(rows: int, dropout_p: float) -> None:
    call = both(dropout_p)
    for dtype in (torch.float32, torch.bfloat16):
        tensors = inputs(dtype, rows)
        summed: list[torch.Size] = []
        with mock.patch.object(Tensor, "sum", spy(summed)), poisoned_memory():
            outputs_and_gradients(call[0], tensors)
        assert (-(-rows // 64), INNER) in summed  # of the GELU's kernel
        assert (rows, WIDTH) not in summed
        check_against_reference(*call, tensors, floor=1e-5 if dtype == torch.float32 else 1e-2)


def gradients_of_a_block(dim: int, sliced: bool, backend: str) -> dict[str, Tensor]:
    """Of a block with two heads, of which some rows are queries where it is sliced."""
    sizes = {"hidden_size": 2 * dim, "num_heads": 2, "ffn_size": INNER, "dropout": 0.0}
    torch.manual_seed(0)
    block = Block(presets.change(presets.get("tiny"), model=sizes).model).to(DEVICE)
    keys = gapped_layout(60, [30, 0, 6]).to(DEVICE)
    rows = torch.arange(0, 36, 3, device=DEVICE) if sliced else None
    queries = keys
    if rows is not None:
        queries = dataclasses.replace(layout_of([10, 0, 2]).to(DEVICE), positions=keys.positions[rows])
    seed, x = seed_tensor(), torch.randn(36, 2 * dim).to(DEVICE)
    bias = PositionBias(torch.randn(2, 9).to(DEVICE), 60)
    with ops.backends(**dict.fromkeys(("attention", "add_norm", "linear", "feed_forward"), backend)):
        out, again = block(x, x, AttentionLayout(queries, keys), bias, Dropout(0.3, seed), rows=rows)
        torch.autograd.backward((out, again), (out.detach().sin(), again.detach().cos()))
    return {name: parameter.grad for name, parameter in block.named_parameters()}


@needs_triton
@pytest.mark.skipif(DEVICE != "cpu", reason="in fp32, which attention's kernel takes on no GPU")
@pytest.mark.parametrize("sliced", [False, True])
def test_no_pass_sums_the_rows_for_a_projection_of_attention(sliced: bool) -> None:
    summed: list[torch.Size] = []
    for dim, wide in ((32, False), (80, True)):
        with mock.patch.object(Tensor, "sum", spy(summed)), poisoned_memory():
            mine = gradients_of_a_block(dim, sliced, "triton")
        passes = {(36, 4 * dim), (12, 2 * dim)} if sliced else {(36, 6 * dim)}
        assert passes & set(summed) == (passes if wide else set())
        assert (36, 2 * dim) not in summed  # of the output projection, or of the feed-forward sublayer
        for name, gradient in gradients_of_a_block(dim, sliced, "reference").items():
            torch.testing.assert_close(
                mine[name], gradient, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
            )


@needs_triton
def test_a_gradient_that_a_hook_changes_is_summed_again() -> None:
    check_against_reference(*both(0.3, hooked=True), inputs(torch.float32), floor=1e-5)


def test_sums_are_of_one_version_of_one_tensor() -> None:
    gradient, sums = torch.ones(3, 2), torch.full((2,), 3.0)
    assert row_sums_of(gradient) is None
    keep_row_sums(gradient, sums)
    assert row_sums_of(gradient) is sums
    assert row_sums_of(gradient.view(3, 2)) is None
    gradient.add_(1)
    assert row_sums_of(gradient) is None


@needs_triton
def test_compiled() -> None:
    call = both(0.3)[0]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    tensors = inputs(torch.float32)
    for a, b in zip(outputs_and_gradients(call, tensors), outputs_and_gradients(compiled, tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
