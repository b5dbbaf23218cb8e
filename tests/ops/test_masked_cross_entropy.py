"""masked_cross_entropy: the chunked backends against the reference and its float64 gradients."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from maelm_fast import ops
from maelm_fast.errors import UserError
from maelm_fast.ops.reference.masked_cross_entropy import masked_cross_entropy as reference
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

op = importlib.import_module("maelm_fast.ops.masked_cross_entropy")  # the package has a function of this name
BACKENDS = ["triton", "chunked"]
NAMES = ("loss", "correct", "hidden", "table", "bias", "labels")


def inputs(rows: int, width: int, table: int, vocab: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    hidden, tokens, bias = torch.randn(rows, width), torch.randn(table, width) / width**0.5, torch.randn(table)
    labels = torch.randint(0, vocab, (rows,), dtype=torch.int32)
    return [*(t.to(DEVICE, dtype) for t in (hidden, tokens, bias)), labels.to(DEVICE)]


def compare(tensors: list[Tensor], vocab: int, backend: str, z_loss: float = 0.0) -> None:
    """A sum is one number, at which PyTorch may be right by luck: its error may also be a 64th of the dtype's step."""
    *floats, labels = tensors
    check_against_reference(
        lambda *t: ops.masked_cross_entropy(*t, labels, vocab_size=vocab, z_loss=z_loss, backend=backend),
        lambda *t: reference(*t, labels, vocab_size=vocab, z_loss=z_loss),
        floats,
        floor=max(2e-6, torch.finfo(floats[0].dtype).eps / 64),
        names=NAMES,
    )


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows of the (V=80) logits at once, in fp32."""
    monkeypatch.setattr(op, "LOGITS_BYTES", {"cuda": 4 * 80 * 4, "cpu": 4 * 80 * 4})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width", "table", "vocab", "z_loss"),
    [(9, 24, 64, 64, 0.0), (1, 8, 64, 50, 0.01), (5, 16, 37, 37, 0.0), (3, 16, 4224, 4219, 0.01)],
)
def test_against_reference(
    rows: int, width: int, table: int, vocab: int, z_loss: float, dtype: torch.dtype, backend: str
) -> None:
    compare(inputs(rows, width, table, vocab, dtype), vocab, backend, z_loss)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("small_chunks")
def test_several_chunks(dtype: torch.dtype, backend: str) -> None:
    compare(inputs(11, 24, 80, 77, dtype), 77, backend, z_loss=0.01)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.usefixtures("small_chunks")
def test_strided(step: int, backend: str) -> None:
    compare([strided(t, step) for t in inputs(6, 16, 80, 70)], 70, backend)


def test_chunked_in_float64() -> None:
    *floats, labels = inputs(4, 6, 20, 17, torch.float64)
    assert torch.autograd.gradcheck(
        lambda *t: ops.masked_cross_entropy(*t, labels, vocab_size=17, z_loss=0.1, backend="chunked")[0],
        [t.requires_grad_() for t in floats],
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend: str) -> None:
    hidden, table, bias, labels = inputs(0, 8, 64, 50)
    with poisoned_memory():
        results = outputs_and_gradients(
            lambda *t: ops.masked_cross_entropy(*t, labels, vocab_size=50, backend=backend), (hidden, table, bias)
        )
    assert [t.shape for t in results] == [(), (), (0, 8), (64, 8), (64,)]
    assert all(bool((t == 0).all()) for t in results)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_rows_neither_win_nor_learn(backend: str) -> None:
    hidden, table, bias, labels = inputs(5, 8, 64, 50)
    table[50:] = 1000.0 * hidden[:1]
    table.requires_grad_()
    bias.requires_grad_()
    loss, correct = ops.masked_cross_entropy(hidden, table, bias, labels, vocab_size=50, backend=backend)
    expected, expected_correct = reference(hidden, table, bias, labels, vocab_size=50)
    torch.testing.assert_close(loss, expected)
    assert torch.equal(correct, expected_correct)
    grads = torch.autograd.grad(loss, (table, bias))
    assert all(bool((g[50:] == 0).all()) and bool((g[:50] != 0).any()) for g in grads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("label", "hit"), [(3, 1), (40, 0), (5, 0)])
def test_first_of_equal_scores_is_the_prediction(label: int, hit: int, backend: str) -> None:
    bias = torch.zeros(64, device=DEVICE)
    bias[[3, 40]] = 7.0
    _, correct = ops.masked_cross_entropy(
        torch.zeros(1, 8, device=DEVICE),
        torch.zeros(64, 8, device=DEVICE),
        bias,
        torch.tensor([label], dtype=torch.int32, device=DEVICE),
        vocab_size=64,
        backend=backend,
    )
    assert correct.dtype == torch.int64
    assert int(correct) == hit


@pytest.mark.parametrize("backend", BACKENDS)
def test_confident_and_hopeless_rows(backend: str) -> None:
    """Scores hundreds apart: no overflow, a loss of 0 in one row and of hundreds in the other."""
    hidden, table, bias, labels = inputs(2, 8, 64, 64)
    table[7], table[9] = 40.0 * hidden[0], -40.0 * hidden[0]
    hidden[1] = hidden[0]
    labels[:] = torch.tensor([7, 9])
    compare([hidden, table, bias, labels], 64, backend)


@pytest.mark.parametrize("label", [-1, 50, 63, 64, 10**6])
def test_label_outside_the_vocabulary_is_an_infinite_loss(label: int) -> None:
    hidden, table, bias, labels = inputs(3, 8, 64, 50)
    labels[1] = label
    loss, _ = ops.masked_cross_entropy(hidden, table, bias, labels, vocab_size=50, backend="triton")
    assert float(loss) == float("inf")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_finite_stays_not_finite(bad: float, backend: str) -> None:
    hidden, table, bias, labels = inputs(3, 8, 64, 50)
    hidden[1, 2] = bad
    loss, _ = ops.masked_cross_entropy(hidden, table, bias, labels, vocab_size=50, backend=backend)
    assert not bool(loss.isfinite())


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_scales_by_the_incoming_gradient_and_may_run_twice(backend: str) -> None:
    *floats, labels = inputs(5, 8, 64, 50, torch.bfloat16)
    floats = [t.requires_grad_() for t in floats]
    loss, correct = ops.masked_cross_entropy(*floats, labels, vocab_size=50, backend=backend)
    assert not correct.requires_grad
    scale = torch.tensor(1 / 3, device=DEVICE)
    once = torch.autograd.grad(loss, floats, retain_graph=True)
    third = torch.autograd.grad(loss, floats, scale)
    for a, b in zip(once, third, strict=True):
        torch.testing.assert_close(b.float(), a.float() / 3, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("small_chunks")
def test_autocast(backend: str) -> None:
    """Products in bf16, gradients of the fp32 parameters in fp32, no further from float64 than the reference's."""
    *floats, labels = inputs(11, 24, 80, 77)

    def under_autocast(function: object) -> list[Tensor]:
        def run(*t: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                return function(*t, labels, vocab_size=77)  # type: ignore[operator,no-any-return]

        return outputs_and_gradients(run, floats)

    with poisoned_memory():
        actual = under_autocast(lambda *t, **k: ops.masked_cross_entropy(*t, **k, backend=backend))
    at_dtype = under_autocast(reference)
    exact = outputs_and_gradients(lambda *t: reference(*t, labels, vocab_size=77), [t.double() for t in floats])
    for triple in zip(actual, at_dtype, exact, strict=True):
        assert_as_good_as_pytorch(*triple)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_gradients_none_are_made(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *floats, labels = inputs(5, 8, 64, 50)
    made = []
    forward = op._forward
    monkeypatch.setattr(op, "_forward", lambda *a: made.append(forward(*a)) or made[-1])
    plain, _ = ops.masked_cross_entropy(*floats, labels, vocab_size=50, backend=backend)
    leaves = [t.requires_grad_() for t in floats]
    with torch.no_grad():
        muted, _ = ops.masked_cross_entropy(*leaves, labels, vocab_size=50, backend=backend)
    full, _ = ops.masked_cross_entropy(*leaves, labels, vocab_size=50, backend=backend)
    assert [g.numel() for result in made[:2] for g in result[2:]] == [0] * 6
    assert torch.equal(plain, full)
    assert torch.equal(muted, full)
    assert full.requires_grad
    assert not muted.requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(grad: bool, backend: str) -> None:
    *floats, labels = inputs(3, 8, 32, 30)
    floats = [t.requires_grad_(grad) for t in floats]
    forward = torch.ops.maelm_fast.masked_cross_entropy_fwd.default
    opcheck(forward, *floats, labels, 30, 0.01, torch.float32, grad, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_whole(autocast: bool, backend: str) -> None:
    *floats, labels = inputs(5, 8, 64, 50)

    def loss(*t: Tensor) -> Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=autocast):
            return ops.masked_cross_entropy(*t, labels, vocab_size=50, backend=backend)[0] / 5

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for mine, eager in zip(outputs_and_gradients(compiled, floats), outputs_and_gradients(loss, floats), strict=True):
        torch.testing.assert_close(mine, eager)


def test_auto_is_chunked_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    forward = op._forward
    monkeypatch.setattr(op, "_forward", lambda *a: ran.extend((a[-1], *forward(*a))) or ran[1:])
    *floats, labels = (t.cpu() for t in inputs(3, 8, 32, 30))
    auto, _ = ops.masked_cross_entropy(*floats, labels, vocab_size=30)
    assert ran[0] == "chunked"  # not by the kernel
    assert auto is ran[1]


def test_shapes_that_do_not_fit() -> None:
    hidden, table, bias, labels = inputs(3, 8, 32, 30)
    for wrong in ((hidden, table, bias, labels[:2]), (hidden, table, bias[:30], labels)):
        with pytest.raises(UserError, match="do not fit together"):
            ops.masked_cross_entropy(*wrong, vocab_size=30)
    with pytest.raises(UserError, match="do not fit together"):
        ops.masked_cross_entropy(hidden, table, bias, labels, vocab_size=33)


@pytest.mark.parametrize(
    ("rows", "columns", "itemsize", "device"),
    [
        (19_712, 32_768, 2, "cuda"),
        (2_500, 64_000, 2, "cuda"),
        (1_232, 32_768, 4, "cpu"),
        (0, 64, 4, "cpu"),
        (7, 1 << 28, 4, "cuda"),
    ],
)
def test_chunks_fill_the_memory_evenly(rows: int, columns: int, itemsize: int, device: str) -> None:
    step = op._chunk_rows(rows, columns * itemsize, device)
    assert step == 1 or step * columns * itemsize <= op.LOGITS_BYTES[device]
    sizes = [min(step, rows - start) for start in range(0, rows, step)]
    fewest = -(-rows // max(1, op.LOGITS_BYTES[device] // (columns * itemsize)))
    assert len(sizes) == fewest
    assert max(sizes, default=0) - min(sizes, default=0) <= 128 * len(sizes)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="no CUDA device")
def test_the_host_never_waits() -> None:
    *floats, labels = inputs(300, 64, 1024, 1000)
    leaves = [t.requires_grad_() for t in floats]
    for mode in ("default", "error"):  # once to compile
        torch.cuda.set_sync_debug_mode(mode)
        try:
            ops.masked_cross_entropy(*leaves, labels, vocab_size=1000, backend="triton")[0].backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(t.grad is not None for t in leaves)
