"""Every op, swapped for its plain reference by config, gives the same loss and gradients; named backends run or say why
they cannot."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import typing
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from maelm_fast import native, ops, presets
from maelm_fast.batch import PackedBatch
from maelm_fast.config import BackendConfig
from maelm_fast.data.masking import pack
from maelm_fast.errors import UserError
from maelm_fast.masking import Masker, Vocabulary
from maelm_fast.model.maelm import MaeLm
from maelm_fast.ops import dispatch
from tests.ops import test_attention_backends

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALTERNATIVES = {
    "embed_packed": ("triton", "native"),
    "attention": ("triton", "native", "grouped"),
    "add_norm": ("triton", "native"),
    "linear": ("triton",),
    "feed_forward": ("triton",),
    "scatter_to_decoder": ("native",),
    "masked_cross_entropy": ("triton", "chunked"),
}
# These refuse dropout and most run on a GPU only, or compute in bf16 only: tests/ops/test_attention_backends.py and
# test_linear.py test them.
ELSEWHERE = {
    "attention": ("flash", "torch", "xformers", "flex"),
    "linear": ("native",),
    "feed_forward": ("native",),
    "masked_cross_entropy": ("native",),
}
FP32_KERNEL = dispatch.triton_installed() and DEVICE == "cpu"
NO_FP32_KERNEL = "triton is not installed" if DEVICE == "cpu" else "on a GPU attention's kernel takes no fp32"
SWAPS = [(op, name) for op, names in ALTERNATIVES.items() for name in names]
REFERENCE = BackendConfig(**dict.fromkeys(ALTERNATIVES, "reference"))


def model_and_batch() -> tuple[MaeLm, PackedBatch]:
    run = presets.change(presets.get("tiny"), model={"dropout": 0.1, "num_layers": 2, "vocab_size": 300})
    torch.manual_seed(0)
    model = MaeLm(run.model).to(DEVICE).train()
    rows = [np.random.default_rng(i).integers(4, 299, n) for i, n in enumerate([33, 1, 20])]
    vocabulary = Vocabulary(300, 299, (0, 1, 2, 3, 299))
    batch = pack(rows, np.arange(3), np.zeros(3, int), Masker(run.masking, vocabulary, 0, model.encoder_sees_mask))
    return model, batch.to(DEVICE)


def loss_and_gradients(backends: BackendConfig) -> list[Tensor]:
    model, batch = model_and_batch()
    with ops.backends(backends):
        loss, correct = model(batch, dropout_seed=3)
        return [loss.detach(), correct, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize(("op", "name"), SWAPS, ids=[f"{op}-{name}" for op, name in SWAPS])
def test_an_op_and_its_reference_give_the_same_loss_and_gradients(op: str, name: str) -> None:
    """With dropout: all backends draw the same bits."""
    if name == "native" and not native.has(op, DEVICE):
        pytest.skip(native.why_not(DEVICE))
    if (op, name) == ("attention", "triton") and not FP32_KERNEL:
        pytest.skip(NO_FP32_KERNEL)
    expected = loss_and_gradients(REFERENCE)
    actual = loss_and_gradients(dataclasses.replace(REFERENCE, **{op: name}))  # type: ignore[arg-type]
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-4 * float(theirs.abs().max().clamp(max=1.0)))


ONCE = [swap for swap in SWAPS if swap not in (("attention", "grouped"), ("linear", "triton"))]  # these are PyTorch's


@pytest.mark.parametrize(("op", "name"), ONCE, ids=[f"{op}-{name}" for op, name in ONCE])
def test_a_second_derivative_is_an_error(op: str, name: str) -> None:
    """Not a number from which the op's part is missing."""
    if name == "native" and not native.has(op, DEVICE):
        pytest.skip(native.why_not(DEVICE))
    if (op, name) == ("attention", "triton") and not FP32_KERNEL:
        pytest.skip(NO_FP32_KERNEL)
    model, batch = model_and_batch()
    with ops.backends(dataclasses.replace(REFERENCE, **{op: name})):  # type: ignore[arg-type]
        loss, _ = model(batch, dropout_seed=3)
        with pytest.raises(RuntimeError, match="differentiated once"):
            torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


@pytest.mark.skipif(not dispatch.triton_installed(), reason="triton is not installed")
def test_every_kernel_is_launched_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several GPUs the current one may be another, and Triton launches on that."""
    kernel_class = type(importlib.import_module("maelm_fast.kernels.add_norm")._add_norm_fwd_kernel)
    launch, device_of = kernel_class.run, torch.cuda.device_of
    entered: list[Tensor] = []
    launched: dict[str, bool] = {}

    @contextlib.contextmanager
    def watched(tensor: Tensor) -> Iterator[None]:
        entered.append(tensor)
        with device_of(tensor):
            yield
        entered.pop()

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        launched[kernel.fn.__name__] = bool(entered) and launched.get(kernel.fn.__name__, True)
        return launch(kernel, *args, **kwargs)

    monkeypatch.setattr(torch.cuda, "device_of", watched)
    monkeypatch.setattr(kernel_class, "run", run)
    ids, lengths = torch.randint(4, 299, (12,), device=DEVICE), (9, 3)
    config = presets.change(
        presets.get("tiny"),
        model={"hidden_size": 32, "num_heads": 1, "ffn_size": 64, "num_layers": 1, "dropout": 0.1, "vocab_size": 300},
    )
    kernels = {op: "triton" for op in (*ALTERNATIVES, "mask_and_pack") if op not in ("scatter_to_decoder", "linear")}
    model = MaeLm(config.model).to(DEVICE).train()
    vocabulary = Vocabulary(300, 299, (0, 1, 2, 3, 299))
    with ops.backends(**kernels), torch.autocast(DEVICE, torch.bfloat16):
        masking = dataclasses.replace(config.masking, special_tokens=False, policy="bert")
        batch = ops.mask_and_pack(ids, lengths, (0, 1), 0, Masker(masking, vocabulary, 0, False))
        model(batch, dropout_seed=3)[0].backward()
    assert {op for op in kernels for name in launched if name.startswith(f"_{op}")} == set(kernels)
    assert [name for name, inside in launched.items() if not inside] == []


@pytest.mark.skipif(not FP32_KERNEL, reason=NO_FP32_KERNEL)
def test_a_toy_model_trains_the_same_with_the_attention_kernel() -> None:
    """Loss after loss, the bias table's updates among what makes them, with dropout."""

    def losses(backend: str) -> list[float]:
        model, batch = model_and_batch()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        history = []
        for step in range(3):
            with ops.backends(REFERENCE, attention=backend):
                loss, _ = model(batch, dropout_seed=step)
                (loss / batch.counts.masked).backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append(loss.item() / batch.counts.masked)
        return history

    ours, plain = losses("triton"), losses("reference")
    assert plain[-1] < plain[0] - 0.1
    assert ours == pytest.approx(plain, rel=1e-4)


def test_every_op_has_a_backend_setting_and_every_backend_is_tested() -> None:
    settings = {op: set(typing.get_args(kind)) for op, kind in typing.get_type_hints(BackendConfig).items()}
    assert settings.pop("mask_and_pack") == {"auto", "host", "triton", "reference"}  # tests/training/test_run.py
    tested = {op: {*names, *ELSEWHERE.get(op, ())} for op, names in ALTERNATIVES.items()}
    assert settings == {op: {"auto", "reference", *names} for op, names in tested.items()}
    assert set(ELSEWHERE["attention"]) == set(test_attention_backends.ADAPTERS)


def test_an_unknown_backend_names_the_known_ones() -> None:
    x, w = torch.randn(2, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    with pytest.raises(UserError, match=r"add_norm: no backend 'cuda'; there are: auto, triton, native, reference"):
        ops.add_norm(x, x, w, w, eps=1e-5, backend="cuda")


def test_a_backend_that_cannot_run_gives_its_reasons() -> None:
    x, w = torch.randn(2, 8, dtype=torch.float64, device=DEVICE), torch.ones(8, device=DEVICE)
    with pytest.raises(UserError, match=r"add_norm: backend 'triton' cannot run: dtype float64"):
        ops.add_norm(x, x, w, w, eps=1e-5, backend="triton")


def test_auto_is_logged_once_per_op(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_logged", set())
    monkeypatch.setattr(dispatch, "picked", {})
    x, w = torch.randn(2, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    with caplog.at_level(logging.INFO, logger=dispatch.__name__):
        for _ in range(2):
            ops.add_norm(x, x, w, w, eps=1e-5)
    assert len(caplog.records) == 1
    assert caplog.messages[0].startswith("add_norm on ")


def test_backends_are_restored_after_the_block() -> None:
    x, w = torch.randn(2, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    with pytest.raises(UserError), ops.backends(add_norm="nonsense"):
        ops.add_norm(x, x, w, w, eps=1e-5)
    ops.add_norm(x, x, w, w, eps=1e-5)
