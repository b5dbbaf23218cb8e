"""masked_cross_entropy's native backend: bf16 products, and rows of logits that become losses and gradients."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from maelm_fast import ops
from maelm_fast.ops.linear import native_reasons
from maelm_fast.ops.reference.masked_cross_entropy import masked_cross_entropy as reference
from tests.ops.checks import assert_as_good_as_pytorch, opcheck, outputs_and_gradients, strided

op = importlib.import_module("maelm_fast.ops.masked_cross_entropy")  # the package has a function of this name
BF16 = torch.bfloat16
WHY_NOT = "; ".join(native_reasons("linear", torch.empty(2, 2, dtype=BF16), torch.empty(2, 2)))
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
SHAPES = [
    (9, 24, 64, 64, 0.0),
    (1, 8, 64, 50, 0.01),
    (5, 16, 38, 33, 0.0),
    (3, 16, 4224, 4219, 0.01),
    (23, 128, 96, 81, 0.0),
]
"""Rows, width, the table's rows, vocabulary, z_loss: whole steps of 16 and of 64 columns, and parts of them."""


@pytest.fixture(params=["kept", "in chunks"])
def logits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept for the backward pass, or four rows of 64 at once, with gradients from the forward pass."""
    if request.param == "in chunks":
        monkeypatch.setattr(op, "KEPT_BYTES", -1)
        monkeypatch.setattr(op, "LOGITS_BYTES", {"cpu": 4 * 64 * 2})


def inputs(rows: int, width: int, table: int, vocab: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(rows)
    hidden, tokens, bias = torch.randn(rows, width), torch.randn(table, width) / width**0.5, torch.randn(table)
    labels = torch.randint(0, vocab, (rows,), dtype=torch.int32)
    return [hidden.to(BF16), tokens.to(dtype), bias.to(dtype), labels]


def loss(labels: Tensor, vocab: int, z_loss: float, plain: bool = False) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(hidden: Tensor, table: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", BF16, enabled=hidden.dtype != torch.float64):
            of = (hidden, table, bias, labels)
            if plain:
                return reference(*of, vocab_size=vocab, z_loss=z_loss)
            return ops.masked_cross_entropy(*of, vocab_size=vocab, z_loss=z_loss, backend="native")

    return run


def compare(tensors: list[Tensor], vocab: int, z_loss: float = 0.0) -> None:
    *floats, labels = tensors
    actual = outputs_and_gradients(loss(labels, vocab, z_loss), floats)
    at_dtype = outputs_and_gradients(loss(labels, vocab, z_loss, plain=True), floats)
    exact = outputs_and_gradients(loss(labels, vocab, z_loss, plain=True), [t.double() for t in floats])
    # the loss is one number, at which PyTorch may be right by luck; how many are correct bf16's rounding may change
    torch.testing.assert_close(actual[0].double(), exact[0], rtol=2e-3, atol=1e-3)
    for mine, theirs, wanted in zip(actual[2:], at_dtype[2:], exact[2:], strict=True):
        assert_as_good_as_pytorch(mine, theirs, wanted, own_rounding=True)


@pytest.mark.parametrize("parameters", [torch.float32, BF16])
@pytest.mark.parametrize(("rows", "width", "table", "vocab", "z_loss"), SHAPES)
@pytest.mark.usefixtures("logits")
def test_as_good_as_pytorch(
    rows: int, width: int, table: int, vocab: int, z_loss: float, parameters: torch.dtype
) -> None:
    compare(inputs(rows, width, table, vocab, parameters), vocab, z_loss)


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.usefixtures("logits")
def test_strided(step: int) -> None:
    compare([strided(t, step) for t in inputs(6, 16, 80, 70)], 70)


@pytest.mark.parametrize("width", [1, 15, 16, 17, 63, 64, 65, 200])
def test_rows_against_float64(width: int) -> None:
    """Of bf16 logits that are given: what the softmax itself does wrong, without the products' rounding."""
    rows, z_loss = 7, 0.02
    torch.manual_seed(width)
    logits, labels = (4 * torch.randn(rows, width + 6)).to(BF16), torch.randint(0, width, (rows,))
    mine = logits.requires_grad_()
    losses, hits, lse = torch.ops.maelm_fast.loss_rows_native_fwd(mine, labels, width, z_loss)
    exact = logits.detach().double().requires_grad_()
    logs = exact[:, :width].logsumexp(1)
    expected = logs - exact.gather(1, labels[:, None])[:, 0] + z_loss * logs.square()
    upstream = torch.randn(rows)
    losses.backward(upstream)
    expected.backward(upstream.double())
    assert (losses.dtype, lse.dtype, hits.dtype) == (torch.float32, torch.float32, torch.bool)
    torch.testing.assert_close(losses.double(), expected, rtol=4e-6, atol=4e-6)
    torch.testing.assert_close(lse.double(), logs, rtol=2e-6, atol=2e-6)
    assert torch.equal(hits, logits[:, :width].argmax(1) == labels)
    assert mine.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=2**-8, atol=1e-6)
    assert bool((mine.grad[:, width:] == 0).all())


@pytest.mark.usefixtures("logits")
def test_no_rows() -> None:
    hidden, table, bias, labels = inputs(0, 8, 64, 50)
    results = outputs_and_gradients(loss(labels, 50, 0.0), (hidden, table, bias))
    assert [t.shape for t in results] == [(), (), (0, 8), (64, 8), (64,)]
    assert all(bool((t == 0).all()) for t in results)


@pytest.mark.usefixtures("logits")
def test_padding_rows_neither_win_nor_learn() -> None:
    hidden, table, bias, labels = inputs(5, 8, 64, 50)
    table[50:] = 1000.0 * hidden[:1].float()
    mine, _, _, of_table, of_bias = outputs_and_gradients(loss(labels, 50, 0.0), (hidden, table, bias))
    cut = outputs_and_gradients(loss(labels, 50, 0.0), (hidden, table[:50], bias[:50]))
    torch.testing.assert_close(mine, cut[0])
    assert all(bool((g[50:] == 0).all()) and bool((g[:50] != 0).any()) for g in (of_table, of_bias))


@pytest.mark.parametrize(("label", "hit"), [(3, 1), (40, 0), (5, 0)])
@pytest.mark.usefixtures("logits")
def test_first_of_equal_scores_is_the_prediction(label: int, hit: int) -> None:
    bias = torch.zeros(64)
    bias[[3, 40]] = 7.0
    labels = torch.tensor([label])
    _, correct = loss(labels, 64, 0.0)(torch.zeros(1, 8, dtype=BF16), torch.zeros(64, 8), bias)
    assert correct.dtype == torch.int64
    assert int(correct) == hit


@pytest.mark.usefixtures("logits")
def test_confident_and_hopeless_rows() -> None:
    """Scores hundreds apart: no overflow, a loss of 0 in one row and of hundreds in the other."""
    hidden, table, bias, labels = inputs(2, 8, 64, 64)
    table[7], table[9] = 40.0 * hidden[0].float(), -40.0 * hidden[0].float()
    hidden[1] = hidden[0]
    labels[:] = torch.tensor([7, 9])
    compare([hidden, table, bias, labels], 64)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.usefixtures("logits")
def test_not_finite_stays_not_finite(bad: float) -> None:
    hidden, table, bias, labels = inputs(3, 8, 64, 50)
    hidden[1, 2] = bad
    result, _, of_hidden, *_ = outputs_and_gradients(loss(labels, 50, 0.0), (hidden, table, bias))
    assert not bool(result.isfinite())
    assert not bool(of_hidden[1].isfinite().any())
    assert bool(of_hidden[0].isfinite().all())


@pytest.mark.parametrize("label", [-1, 50, 64, 10**6])
@pytest.mark.usefixtures("logits")
def test_label_outside_the_vocabulary(label: int) -> None:
    hidden, table, bias, labels = inputs(3, 8, 64, 50)
    labels[1] = label
    with pytest.raises(RuntimeError, match=r"labels\[\d\] is .*, outside \[0, 50\), the vocabulary"):
        loss(labels, 50, 0.0)(hidden, table, bias)


@pytest.mark.usefixtures("logits")
def test_backward_scales_by_the_incoming_gradient_and_may_run_twice() -> None:
    *floats, labels = inputs(5, 8, 64, 50)
    floats = [t.requires_grad_() for t in floats]
    out, correct = loss(labels, 50, 0.01)(*floats)
    assert not correct.requires_grad
    once = torch.autograd.grad(out, floats, retain_graph=True)
    again = torch.autograd.grad(out, floats, retain_graph=True)
    third = torch.autograd.grad(out, floats, torch.tensor(1 / 3))
    for a, b, c in zip(once, again, third, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(c.float(), a.float() / 3, rtol=2**-7, atol=2e-3 * float(a.abs().max()))


def test_kept_only_as_long_as_they_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    forward = op._forward

    def counted(*arguments: Any) -> Any:
        ran.append(len(arguments))
        return forward(*arguments)

    monkeypatch.setattr(op, "_forward", counted)
    hidden, table, bias, labels = inputs(6, 8, 64, 64)
    monkeypatch.setattr(op, "KEPT_BYTES", 5 * 64 * 2)
    loss(labels[:5], 64, 0.0)(hidden[:5], table, bias)
    assert not ran
    loss(labels, 64, 0.0)(hidden, table, bias)
    assert len(ran) == 1


def test_same_bits_on_any_number_of_threads() -> None:
    *floats, labels = inputs(50, 16, 96, 90)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            results.append(outputs_and_gradients(loss(labels, 90, 0.01), floats))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_opcheck() -> None:
    labels = torch.randint(0, 30, (5,), dtype=torch.int32)
    scores = torch.randn(5, 32).to(BF16).requires_grad_()
    opcheck(torch.ops.maelm_fast.loss_rows_native_fwd.default, scores, labels, 30, 0.01)
    scores, lse = scores.detach(), scores.detach().float()[:, :30].logsumexp(1)
    opcheck(torch.ops.maelm_fast.loss_rows_native_bwd.default, torch.randn(5), scores, labels, lse, 30, 0.01)


@pytest.mark.usefixtures("logits")
def test_compiles_whole() -> None:
    *floats, labels = inputs(5, 8, 64, 50)
    run = loss(labels, 50, 0.0)
    compiled = torch.compile(lambda *t: run(*t)[0] / 5, fullgraph=True, backend="aot_eager")
    eager = outputs_and_gradients(lambda *t: run(*t)[0] / 5, floats)
    for mine, theirs in zip(outputs_and_gradients(compiled, floats), eager, strict=True):
        torch.testing.assert_close(mine, theirs)
