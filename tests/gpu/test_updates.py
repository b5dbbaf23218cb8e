"""The same computations on a CUDA device. Part of make gpu-gate."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import gates
from benchmarks.contestants import Settings
from maelm_fast import presets
from maelm_fast.batch import PackedBatch, layout_of
from maelm_fast.data.masking import pack
from maelm_fast.masking import Masker, Vocabulary
from maelm_fast.model.maelm import MaeLm
from maelm_fast.ops import AttentionLayout, attention
from maelm_fast.training.optim import build_optimizer
from maelm_fast.training.step import GraphedStep, TrainStep
from tests.devices import ON_GPU

pytestmark = ON_GPU
PRESETS = ["tiny", "tiny_cross", "roberta_tiny"]


def model_and_batch(name: str, lengths: list[int], first: int = 0) -> tuple[MaeLm, PackedBatch]:
    run = presets.change(presets.get(name), model={"dropout": 0.1})
    torch.manual_seed(0)
    model = MaeLm(run.model)
    rows = [np.random.default_rng(i).integers(4, 1023, n) for i, n in enumerate(lengths, first)]
    vocabulary = Vocabulary(1024, 1023, (0, 1, 2, 3, 1023))
    n = len(rows)
    return model, pack(
        rows, np.arange(first, first + n), np.zeros(n, int), Masker(run.masking, vocabulary, 0, model.encoder_sees_mask)
    )


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("lengths", [[64] * 8, [128, 3, 77, 1, 90]], ids=["full", "documents"])
def test_float64_loss_and_gradients_equal_the_cpu(name: str, lengths: list[int]) -> None:
    model, batch = model_and_batch(name, lengths)
    model = model.double().eval()
    loss, correct = model(batch)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    model = model.cuda()
    there, correct_there = model(batch.to("cuda"))
    grads_there = torch.autograd.grad(there, list(model.parameters()))
    torch.testing.assert_close(there.cpu(), loss, rtol=1e-11, atol=0)
    assert int(correct) == int(correct_there)
    for (parameter, _), a, b in zip(model.named_parameters(), grads, grads_there, strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-8, atol=1e-9, msg=lambda m, p=parameter: f"{p}: {m}")


@pytest.mark.parametrize("name", ["base", "base_cross", "roberta_base"])
def test_loss_and_every_gradient_in_bf16_are_as_near_to_float64_as_plain_pytorchs(name: str) -> None:
    """With dropout and bias, at full width and length."""
    gates.kernels(name, Settings(batch=4, dropout=0.1, bias=True, precision="bf16", device="cuda", shape=name))


@pytest.mark.parametrize("name", PRESETS)
def test_bf16_trains(name: str) -> None:
    model, batch = model_and_batch(name, [64] * 32)
    model, batch = model.cuda().train(), batch.to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    losses = []
    for step in range(100):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss, _ = model(batch, dropout_seed=step)
        (loss / batch.counts.masked).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item() / batch.counts.masked)
    assert losses[-1] < 0.5 * losses[0]


def updates(step: TrainStep | GraphedStep, count: int) -> Iterator[Tensor]:
    for n in range(count):
        batches = [model_and_batch("tiny", [64] * 8, first=8 * (2 * n + i))[1].to("cuda") for i in range(2)]
        yield step(batches, torch.tensor([n, n + 100], device="cuda"), 1e-3).clone()


def train_step(name: str = "tiny") -> TrainStep:
    config, model = presets.get(name), model_and_batch(name, [64])[0].cuda().train()
    return TrainStep(model, build_optimizer(model, config.optim), 1.0, "bf16")


@pytest.mark.parametrize("name", PRESETS)
def test_an_update_of_several_micro_batches_waits_for_nothing(name: str) -> None:
    """Not even where its lengths were never seen."""
    step = train_step(name)
    old, new = ([[64] * 8, [128, 3, 77, 1, 90]], [[64] * 7, [17, 128, 2], [5] * 9])
    updates = [[model_and_batch(name, lengths)[1].to("cuda") for lengths in cut] for cut in (old, old, new)]
    seeds = torch.tensor([1, 2, 3], device="cuda")
    for batches in updates[:2]:  # compiles kernels
        step(batches, seeds[:2], 1e-3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        numbers = step(updates[2], seeds, 1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert numbers.isfinite().all()


def test_a_cuda_graph_computes_the_same_updates() -> None:
    plain, graphed = list(updates(train_step(), 8)), list(updates(GraphedStep(train_step()), 8))
    losses = [torch.stack(numbers)[:, 0] for numbers in (graphed, plain)]
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0)
    assert len(set(losses[0].tolist())) == 8  # every replay had its own batch


def test_a_graph_outlives_the_cache_of_its_tiles() -> None:
    pytest.importorskip("triton")
    from maelm_fast.kernels.attention_tiles import tile_list

    layout = AttentionLayout(layout_of([70, 30]).to("cuda"))
    x = torch.randn(100, 2, 64, device="cuda", dtype=torch.bfloat16)
    expected = attention(x, x, x, layout, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(x, x, x, layout, backend="triton")
    tile_list.cache_clear()
    others = [torch.zeros(64, dtype=torch.int32, device="cuda") for _ in range(64)]  # where the tiles were, if freed
    graph.replay()
    assert torch.equal(out, expected)
    assert others
