"""The plain references of the other ops, against the PyTorch lines in their docstrings and against gradcheck."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maelm_fast import ops
from maelm_fast.ops.reference.dropout import keep_mask, keep_weights

WIDTH = 12


def table(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, dtype=torch.float64, requires_grad=True)


def norm() -> tuple[Tensor, Tensor]:
    return (torch.randn(WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(2))  # type: ignore[return-value]


def test_embed_packed() -> None:
    ids, positions = torch.tensor([3, 1, 3, 0], dtype=torch.int32), torch.tensor([0, 2, 5, 1], dtype=torch.int32)
    tokens, places, (weight, bias) = table(5), table(6), norm()
    out = ops.embed_packed(ids, positions, tokens, places, weight, bias, eps=1e-5)
    expected = F.layer_norm(tokens[ids.long()] + places[positions.long()], (WIDTH,), weight, bias, 1e-5)
    torch.testing.assert_close(out, expected)
    assert torch.autograd.gradcheck(
        lambda *t: ops.embed_packed(ids, positions, *t, eps=1e-5, dropout_p=0.2, seed=torch.tensor(1)),
        (tokens, places, weight, bias),
    )


def test_add_norm() -> None:
    x, residual, (weight, bias) = table(7), table(7), norm()
    out = ops.add_norm(x, residual, weight, bias, eps=1e-5)
    torch.testing.assert_close(out, F.layer_norm(residual + x, (WIDTH,), weight, bias, 1e-5))
    assert torch.autograd.gradcheck(
        lambda *t: ops.add_norm(*t, eps=1e-5, dropout_p=0.3, seed=torch.tensor(2)), (x, residual, weight, bias)
    )


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_add_norm_does_not_round_the_sum(backend: str) -> None:
    """bf16 in, bf16 out, fp32 between: as close to float64 as one rounding of the exact result allows."""
    x, residual = torch.randn(64, 256).bfloat16(), 30 * torch.randn(64, 256).bfloat16()
    weight, bias = torch.ones(256), torch.zeros(256)
    exact = F.layer_norm(x.double() + residual.double(), (256,), weight.double(), bias.double())
    out = ops.add_norm(x, residual, weight, bias, eps=1e-5, backend=backend)
    assert out.dtype == torch.bfloat16
    assert (out.double() - exact).abs().max() <= 1.01 * (exact.bfloat16().double() - exact).abs().max()


def test_feed_forward() -> None:
    x = table(6)
    w1, b1 = torch.randn(20, WIDTH, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    w2, b2 = torch.randn(WIDTH, 20, dtype=torch.float64), torch.randn(WIDTH, dtype=torch.float64)
    out = ops.feed_forward(x, w1, b1, w2, b2)
    hidden = x @ w1.T + b1
    exact_gelu = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    torch.testing.assert_close(out, exact_gelu @ w2.T + b2)


@pytest.mark.parametrize("source", [[0, -1, 1, 2, -1], [-1, -1], [2, 1, 0], []], ids=str)
def test_scatter_to_decoder(source: list[int]) -> None:
    rows = torch.tensor(source, dtype=torch.int32)
    encoded = table(3 if any(s >= 0 for s in source) else 0)
    mask, positions = torch.randn(WIDTH, dtype=torch.float64, requires_grad=True), table(8)
    weight, bias = norm()
    places = torch.arange(len(source), dtype=torch.int32) + 1
    out = ops.scatter_to_decoder(encoded, rows, mask, places, positions, weight, bias, eps=1e-5)
    parts = [encoded[s] if s >= 0 else mask for s in source]
    stacked = torch.stack(parts) if parts else torch.empty(0, WIDTH, dtype=torch.float64)
    expected = F.layer_norm(stacked + positions[places.long()], (WIDTH,), weight, bias, 1e-5)
    torch.testing.assert_close(out, expected)
    if source:
        wanted = [t for t in (encoded, mask, positions, weight, bias) if t.numel()]
        upstream = torch.randn_like(out)
        for mine, theirs in zip(
            torch.autograd.grad(out, wanted, upstream, allow_unused=True, materialize_grads=True),
            torch.autograd.grad(expected, wanted, upstream, allow_unused=True, materialize_grads=True),
            strict=True,
        ):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_masked_cross_entropy(backend: str, z_loss: float) -> None:
    hidden, tied = table(9), table(64)
    bias = torch.randn(64, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 50, (9,), dtype=torch.int32)
    call = {"vocab_size": 50, "z_loss": z_loss, "backend": backend}
    loss, correct = ops.masked_cross_entropy(hidden, tied, bias, labels, **call)  # type: ignore[arg-type]
    logits = (hidden @ tied.T + bias)[:, :50]
    expected = F.cross_entropy(logits, labels.long(), reduction="sum") + z_loss * logits.logsumexp(-1).square().sum()
    torch.testing.assert_close(loss, expected)
    assert int(correct) == int((logits.argmax(-1) == labels).sum())
    loss.backward()
    assert tied.grad is not None
    assert (tied.grad[50:] == 0).all()  # rows that only pad the table are neither predicted nor trained


def test_masked_cross_entropy_of_nothing() -> None:
    loss, correct = ops.masked_cross_entropy(
        torch.randn(0, 4, requires_grad=True),
        torch.randn(64, 4),
        torch.zeros(64),
        torch.empty(0, dtype=torch.int32),
        vocab_size=50,
        backend="reference",
    )
    assert float(loss.detach()) == 0.0
    assert int(correct) == 0
    loss.backward()


def test_masked_logits_are_those_of_the_vocabulary_alone() -> None:
    hidden, tied, bias = torch.randn(5, 8), torch.randn(64, 8), torch.randn(64)
    torch.testing.assert_close(ops.masked_logits(hidden, tied, bias, 50), hidden @ tied[:50].T + bias[:50])


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_keep_mask_rate(p: float, weights: bool) -> None:
    if weights:
        keep = keep_weights(torch.arange(250), 4, 1001, p, torch.tensor(3)).view(1000, 1001)
    else:
        keep = keep_mask((1000, 1001), p, torch.tensor(3))
    assert float(keep.double().mean()) == pytest.approx(1 - p, abs=5 * (p * (1 - p) / 1e6) ** 0.5 + 2**-16)
    columns = keep.double().mean(0)
    assert float(columns.std()) == pytest.approx((p * (1 - p) / 1000) ** 0.5, rel=0.15)
    neighbours = (keep[:, 1:] & keep[:, :-1]).double().mean()
    assert float(neighbours) == pytest.approx((1 - p) ** 2, abs=2e-3)


def test_dropout_keeps_the_mean_and_is_seeded() -> None:
    x = torch.ones(200, 200)
    once, again, other = (ops.dropout(x, 0.25, torch.tensor(seed)) for seed in (1, 1, 2))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    assert float(once.mean()) == pytest.approx(1.0, abs=0.02)
    assert ops.dropout(x, 0.0, None) is x
