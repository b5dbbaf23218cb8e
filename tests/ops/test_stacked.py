"""Gradients of q, k and v that a kernel wrote side by side are not copied."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from maelm_fast import native
from maelm_fast.batch import layout_of
from maelm_fast.ops import AttentionLayout, PositionBias, attention
from maelm_fast.ops.dispatch import triton_installed
from maelm_fast.ops.stacked import stack_of, unstack
from tests.ops.checks import DEVICE, Seen


def test_stack_of_what_lies_side_by_side() -> None:
    whole = torch.randn(5, 3, 2, 4)
    q, k, v = whole.unbind(1)
    for parts, expected in (((q, k, v), whole), ((k, v), None), ((k, q, v), None), ((q, k, k), None)):
        found = stack_of(*parts)
        assert (found is None) == (expected is None)
        assert expected is None or (torch.equal(found, expected) and found.data_ptr() == expected.data_ptr())
    assert stack_of(q, k, v.clone()) is None
    assert stack_of(q, k, v.clone(), v) is None


def unbind(x: Tensor, *shape: int) -> tuple[Tensor, ...]:
    return x.view(-1, *shape).unbind(1)


@pytest.mark.parametrize("parts", [2, 3])
def test_unstack_is_unbind(parts: int) -> None:
    x = torch.randn(5, parts * 8, requires_grad=True)
    weights = torch.randn(parts, 5, 2, 4)
    loss = [
        sum((w * t.sin()).sum() for w, t in zip(weights, f(x, parts, 2, 4), strict=True)) for f in (unstack, unbind)
    ]
    mine, theirs = (torch.autograd.grad(one, x)[0] for one in loss)
    assert torch.equal(mine, theirs)
    (alone,) = torch.autograd.grad(unstack(x, parts, 2, 4)[1].sum(), x)
    assert alone.sum() == 5 * 2 * 4


TRITON = pytest.mark.skipif(not triton_installed(), reason="triton is not installed")
COMPILED = pytest.mark.skipif(DEVICE != "cpu" or not native.has("attention", "cpu"), reason="it is for the CPU")


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        pytest.param("triton", torch.float32 if DEVICE == "cpu" else torch.bfloat16, marks=TRITON),
        pytest.param("native", torch.float32, marks=COMPILED),
        pytest.param("native", torch.bfloat16, marks=COMPILED),
    ],
)
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("biased", [False, True])
def test_the_kernels_gradients_are_not_copied(backend: str, dtype: torch.dtype, parts: int, biased: bool) -> None:
    layout = AttentionLayout(layout_of([40, 3, 0, 65]).to(DEVICE))
    rows = 108
    x = torch.randn(rows, parts * 64, device=DEVICE).to(dtype).requires_grad_()
    q = torch.randn(rows, 2, 32, device=DEVICE).to(dtype).requires_grad_()
    line = torch.randn(2, 9, device=DEVICE) if biased else None

    def gradients(split) -> tuple[list[Tensor], list[str]]:
        given = [*([q] if parts == 2 else []), *split(x, parts, 2, 32)]
        out = attention(*given, layout, PositionBias(line, 65) if biased else None, backend=backend)
        asked = [x, q] if parts == 2 else [x]
        with Seen() as seen:
            return list(torch.autograd.grad(out.square().sum(), asked)), seen.names

    (mine, without), (theirs, names) = gradients(unstack), gradients(unbind)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    copies = ("aten::stack", "aten::copy_", "aten::select_backward")  # cat: of the rows' sums, which are vectors
    assert not [name for name in without if name in copies]
    assert [name for name in names if name in copies]
