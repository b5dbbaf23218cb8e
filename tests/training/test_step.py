"""The update: what it computes and leaves out, that nothing in it makes the host wait, and how its graph is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from maelm_fast import ops, presets
from maelm_fast.batch import PackedBatch
from maelm_fast.config import MaskingConfig, RunConfig
from maelm_fast.data.masking import pack
from maelm_fast.errors import UserError
from maelm_fast.masking import Masker, Vocabulary
from maelm_fast.model.maelm import MaeLm
from maelm_fast.training.optim import build_optimizer
from maelm_fast.training.step import GraphedStep, Numbers, Readback, TrainStep, check_recordable
from tests.devices import DEVICES

VOCABULARY = Vocabulary(1024, 1023, (0, 1, 2, 3, 1023))
LR = 2.0**-10  # the same number in fp32
OPS = ("embed_packed", "attention", "add_norm", "linear", "feed_forward", "masked_cross_entropy")
KERNELS = dict.fromkeys(OPS, "triton")


def run_config(name: str = "tiny") -> RunConfig:
    return presets.change(presets.get(name), model={"dropout": 0.1, "num_layers": 2})


def batch_of(number: int, lengths: tuple[int, ...] = (64,) * 4, sees_mask: bool = False) -> PackedBatch:
    random = np.random.default_rng(number)
    rows = [random.integers(4, 1023, n) for n in lengths]
    samples = np.arange(len(rows)) + 100 * number
    return pack(rows, samples, np.zeros_like(samples), Masker(MaskingConfig(), VOCABULARY, 0, sees_mask))


def train_step(clip_norm: float = 0.5, device: str = "cpu", optimizer: str = "adamw") -> TrainStep:
    config = presets.change(run_config(), optim={"name": optimizer})
    torch.manual_seed(0)
    model = MaeLm(config.model).to(device).train()
    return TrainStep(model, build_optimizer(model, config.optim), clip_norm, "fp32")


def weights(step: TrainStep) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in step.parameters]


def assert_alike(device: str, mine: Sequence[Tensor], theirs: Sequence[Tensor], atol: float = 0.0) -> None:
    """Weights after the same updates. On a GPU sums are added in any order, and AdamW makes a step of full length of a
    gradient that is nothing but their rounding: a few elements may be off."""
    for a, b in zip(mine, theirs, strict=True):
        off = (a - b).abs() > 1e-3 * b.abs() * (atol > 0) + (atol if device == "cpu" else 2e-5)
        assert off.float().mean() <= (0.0 if device == "cpu" else 1e-3)


@pytest.mark.parametrize("clip_norm", [0.0, 0.5, 1e3])
@pytest.mark.parametrize("device", DEVICES)
def test_it_is_forward_backward_clipping_and_adamw(device: str, clip_norm: float) -> None:
    step = train_step(clip_norm, device)
    model = copy.deepcopy(step.model)
    optimizer = build_optimizer(model, run_config().optim)
    for group in optimizer.param_groups:
        group["lr"] = LR
    for update in range(3):
        batches = [batch_of(2 * update).to(device), batch_of(2 * update + 1, (64, 3, 17)).to(device)]
        seeds = torch.tensor([update, 7], device=device)
        numbers = Numbers(*step(batches, seeds, LR).tolist())
        results = [model(batch, dropout_seed=seed) for batch, seed in zip(batches, seeds, strict=True)]
        masked = sum(batch.counts.masked for batch in batches)
        loss = sum(result[0] for result in results) / masked
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        assert numbers.loss == pytest.approx(loss.item(), rel=1e-5)
        assert numbers.norm == pytest.approx(norm.item(), rel=1e-4)
        assert numbers.correct == sum(result[1].item() for result in results)
        assert numbers.skipped == 0
    assert_alike(device, weights(step), list(model.parameters()), atol=2e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("device", DEVICES)
def test_an_update_without_a_finite_gradient_changes_nothing(device: str, bad: float) -> None:
    step, twin = train_step(device=device), train_step(device=device)
    batches, seeds = [batch_of(0).to(device)], torch.tensor([5], device=device)
    step(batches, seeds, LR)
    twin(batches, seeds, LR)
    table = step.model.head.vocabulary_bias
    hook = table.register_hook(lambda grad: torch.full_like(grad, bad))
    before = weights(step)
    numbers = Numbers(*step([batch_of(1).to(device)], seeds, LR).tolist())
    hook.remove()
    assert numbers.skipped == 1
    assert not np.isfinite(numbers.norm)
    assert all(map(torch.equal, before, weights(step)))
    step([batch_of(2).to(device)], seeds, LR)
    twin([batch_of(2).to(device)], seeds, LR)  # as if the bad one had never been: Adam's count and averages too
    assert_alike(device, weights(twin), weights(step))


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("tiny", "adamw"), ("tiny", "muon"), ("tiny_cross", "adamw"), ("roberta_tiny", "adamw")],
)
def test_the_host_reads_nothing_back(name: str, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have no values: whatever would make the host wait for one fails. The ops are the GPU's."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    config = presets.change(run_config(name), optim={"name": optimizer})
    sees_mask = config.model.decoder == "none"
    updates = [[batch_of(n, sees_mask=sees_mask), batch_of(7, (5, 64), sees_mask)] for n in range(2)]
    with FakeTensorMode(allow_non_fake_inputs=True), ops.backends(**KERNELS):
        model = MaeLm(config.model).train()
        step = TrainStep(model, build_optimizer(model, config.optim), 1.0, "fp32")
        for batches in updates:
            numbers = step(batches, torch.tensor([1, 2]), LR)
        assert numbers.shape == (4,)
        with pytest.raises(DataDependentOutputException):
            float(numbers[0])


def narrow_config() -> RunConfig:
    """For kernels under the interpreter."""
    return presets.change(run_config(), model={"hidden_size": 32, "num_heads": 1, "ffn_size": 64, "num_layers": 1})


def test_bf16_updates_with_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast as on a GPU, every op's kernel, interpreted: the numbers of plain PyTorch's update, which are not those
    of fp32."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    config = narrow_config()
    numbers = []
    plain = dict.fromkeys(OPS, "reference")
    for backends, precision in ((KERNELS, "bf16"), (plain, "bf16"), (plain, "fp32")):
        torch.manual_seed(0)
        model = MaeLm(config.model).train()
        step = TrainStep(model, build_optimizer(model, config.optim), 1.0, precision)
        with ops.backends(**backends):
            rows = [step([batch_of(n, (9, 5), model.encoder_sees_mask)], torch.tensor([n]), LR) for n in range(2)]
        numbers.append(torch.stack(rows))
    torch.testing.assert_close(numbers[0][:, 0], numbers[1][:, 0], rtol=2e-2, atol=0)
    torch.testing.assert_close(numbers[0][:, 2], numbers[1][:, 2], rtol=1e-1, atol=0)
    assert (numbers[1][:, [0, 2]] != numbers[2][:, [0, 2]]).all()


def test_one_compilation_serves_all_updates_of_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    config = narrow_config()
    model = MaeLm(config.model).train()
    step = TrainStep(model, build_optimizer(model, config.optim), 1.0, "fp32")
    counters.clear()
    model.compile(fullgraph=True, backend="aot_eager")
    try:
        with ops.backends(**KERNELS):
            losses = [step([batch_of(n, (9, 9))], torch.tensor([n]), LR)[0].item() for n in range(2)]
    finally:
        torch._dynamo.reset()
    assert len(set(losses)) == 2
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["recompiles"]


def rerun(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """In a graph's place: the recorded function itself, which reads the same tensors."""
    rerun.calls += 1  # type: ignore[attr-defined]
    return function


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_recorded_update_is_the_same_update(optimizer: str) -> None:
    plain, inner = train_step(optimizer=optimizer), train_step(optimizer=optimizer)
    rerun.calls = 0  # type: ignore[attr-defined]
    recorded = GraphedStep(inner, rerun)
    for update in range(6):
        batches, seeds = [batch_of(update), batch_of(update + 50)], torch.tensor([update, 3])
        lr = LR * 2.0**-update
        expected, got = plain(batches, seeds, lr), recorded(batches, seeds, lr)
        assert torch.equal(expected, got)
    assert all(map(torch.equal, weights(plain), weights(inner)))
    assert rerun.calls == 1  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="differ in length"):
        recorded([batch_of(1), batch_of(2, (64, 64, 64, 63))], torch.tensor([1, 2]), LR)


@pytest.mark.parametrize(
    ("masking", "sees_mask", "lengths", "need"),
    [
        ({}, False, [64, 63], "--mode full"),
        ({"count": "stochastic"}, False, [64, 64], "masking.count=fixed"),
        ({"special_tokens": False}, True, [64], "masking.special_tokens=true"),
        ({"policy": "bert"}, False, [64], "masking.policy=mask"),
        ({"policy": "bert"}, True, [64], None),
        ({}, False, [64], None),
    ],
)
def test_what_can_be_recorded(masking: dict[str, Any], sees_mask: bool, lengths: list[int], need: str | None) -> None:
    arguments = Masker(MaskingConfig(**masking), VOCABULARY, 0, sees_mask), lengths
    with pytest.raises(UserError, match="needs a GPU"):
        check_recordable(torch.device("cpu"), *arguments)
    if need is None:
        check_recordable(torch.device("cuda"), *arguments)
    else:
        with pytest.raises(UserError, match=need):
            check_recordable(torch.device("cuda"), *arguments)


def test_readback_keeps_the_order() -> None:
    readback = Readback()
    for n in range(3):
        readback.put(n, torch.tensor([n, 1.0, 2.0, 0.0], dtype=torch.float64))
    assert [(key, numbers.loss) for key, numbers in readback.take(everything=False)] == [(0, 0), (1, 1), (2, 2)]
    assert not list(readback.take(everything=True))
