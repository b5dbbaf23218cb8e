"""Attention within a distance: sliding windows, whose far tiles the kernels leave out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from maelm_fast.batch import layout_of
from maelm_fast.errors import UserError
from maelm_fast.ops import AttentionLayout, PositionBias, attention
from tests.ops.attention_checks import BACKEND_AND_DTYPE, SKIPPING, check_kernel, gapped, on_device
from tests.ops.checks import DEVICE, outputs_and_gradients, seed_tensor


@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("reach", [1, 11, 40])
@pytest.mark.parametrize(("backend", "dtype"), SKIPPING)
def test_outputs_and_gradients(backend: str, dtype: torch.dtype, reach: int, p: float) -> None:
    """Gaps of all sizes; late queries see no key of the first tile, and early ones none of the last."""
    check_kernel(gapped([120, 3, 0, 33]), None, reach, dtype, p, backend=backend, window=True)


@pytest.mark.parametrize(("backend", "dtype"), SKIPPING)
def test_other_keys(backend: str, dtype: torch.dtype) -> None:
    """Queries that see nothing, keys that nobody sees, and queries far apart."""
    queries, keys = gapped([20, 40, 0, 3]), gapped([90, 0, 7, 70], seed=1)
    check_kernel(queries, keys, 11, dtype, 0.2, backend=backend, window=True)


@pytest.mark.parametrize(("backend", "dtype"), BACKEND_AND_DTYPE)
@pytest.mark.parametrize(("before", "after"), [(4, 4), (0, 0), (0, 9), (5, None), (None, 0), (None, None)])
def test_equals_the_pairs_written_out(backend: str, dtype: torch.dtype, before: int | None, after: int | None) -> None:
    """All pairs at once in float64, positions with gaps, a bias that reaches farther than the window."""
    layout = on_device(gapped([70, 5]))
    places = layout.positions.cpu()
    owner = torch.repeat_interleave(torch.arange(2), torch.tensor([70, 5]))
    distance = places[None, :] - places[:, None]
    seen = owner[None, :] == owner[:, None]
    seen &= (distance >= -before) if before is not None else True
    seen &= (distance <= after) if after is not None else True
    draw = torch.Generator().manual_seed(1)
    tensors = [torch.randn(75, 2, 16, generator=draw) for _ in range(3)] + [torch.randn(2, 61, generator=draw)]

    def dense(q: Tensor, k: Tensor, v: Tensor, line: Tensor) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", q, k) / 4 + line[:, distance.clamp(-30, 30).long() + 30]
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)

    def windowed(q: Tensor, k: Tensor, v: Tensor, line: Tensor) -> Tensor:
        bias = PositionBias(line, 128).within(before, after)
        return attention(q, k, v, AttentionLayout(layout), bias, backend=backend)

    mine = [t.to(DEVICE, dtype if i < 3 else torch.float32) for i, t in enumerate(tensors)]
    bound = 0.02 if dtype == torch.bfloat16 else 1e-5
    exact = outputs_and_gradients(dense, [t.cpu().double() for t in mine])
    for actual, expected in zip(outputs_and_gradients(windowed, mine), exact, strict=True):
        largest = max(float(expected.abs().max()), 1.0)
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=bound, atol=bound * largest)


@pytest.mark.parametrize(("backend", "dtype"), SKIPPING)
def test_what_lies_beyond_is_not_computed(backend: str, dtype: torch.dtype) -> None:
    """NaN in the last keys, and in the upstream gradient of the last queries, stays among those near them: what is
    computed and excluded would be NaN too."""
    tokens, clean = 640, 384  # further apart than any kernel's tiles
    layout = AttentionLayout(on_device(layout_of([tokens])))
    q, k, v = (torch.randn(tokens, 2, 32, device=DEVICE, dtype=dtype) for _ in range(3))
    upstream = torch.randn_like(q)
    for tensor in (q, k, v, upstream):
        tensor[-64:] = float("nan")
    bias = PositionBias(torch.zeros(2, 1, device=DEVICE), tokens).within(20, 20)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = attention(*leaves, layout, bias, dropout_p=0.1, seed=seed_tensor(), backend=backend)
    for result in (out, *torch.autograd.grad(out, leaves, upstream)):
        assert result[:clean].isfinite().all()
        assert result[-64:].isnan().any()


@pytest.mark.parametrize(("backend", "dtype"), SKIPPING)
def test_dropout_drops_the_weights_that_it_drops_without_a_window(backend: str, dtype: torch.dtype) -> None:
    """With values that are the keys' unit vectors, an output is a row of weights."""
    layout = AttentionLayout(on_device(gapped([64, 64])))
    q = torch.randn(128, 2, 64, device=DEVICE, dtype=dtype)
    v = torch.eye(64, device=DEVICE, dtype=q.dtype).repeat(2, 1)[:, None].expand(-1, 2, -1).contiguous()
    bias = PositionBias(torch.zeros(2, 1, device=DEVICE), 128)

    def weights(bias: PositionBias) -> Tensor:
        return attention(q, q, v, layout, bias, dropout_p=0.4, seed=seed_tensor(), place=3, backend=backend)

    places = layout.queries.positions.view(2, 64)
    seen = ((places[:, None, :] - places[:, :, None]).abs() <= 9).view(128, 1, 64)
    assert torch.equal(weights(bias.within(9, 9)) != 0, (weights(bias) != 0) & seen)


def test_only_a_line_with_both_ends_excluded_is_bounded() -> None:
    bias = PositionBias(torch.zeros(2, 1), 50)
    both = bias.within(2, 3)
    assert both.bounded
    assert both.line[0].tolist() == [float("-inf")] * 2 + [0.0] * 6 + [float("-inf")]
    assert not bias.bounded
    assert not bias.within(2, None).bounded
    assert both.positions == 50
    assert bias.within(80, 80).positions == 82
    with pytest.raises(UserError, match="reach 0 or more positions, not -1"):
        bias.within(3, -1)


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU the host does not look")
@pytest.mark.parametrize("places", [[3, 2, 5, 8], [2, 2, 5, 8], [2, 3, 5, 5]])
def test_positions_that_do_not_ascend_are_an_error(places: list[int]) -> None:
    """Kernels take the first and the last position of a tile for its least and its largest."""
    q, bias = torch.randn(4, 2, 16), PositionBias(torch.zeros(2, 1), 9).within(2, 2)
    layout = layout_of([2, 2], torch.tensor(places, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="must ascend within a sequence"):
        attention(q, q, q, AttentionLayout(layout), bias)
    attention(q, q, q, AttentionLayout(layout_of([2, 2], torch.tensor([3, 5, 1, 2], dtype=torch.int32))), bias)
