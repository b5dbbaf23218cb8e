"""The estimate of a step's memory against what PyTorch's allocator gives out, and what a run makes of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from maelm_fast import native, presets
from maelm_fast.config import BackendConfig, RunConfig
from maelm_fast.data.loader import TrainingBatches
from maelm_fast.data.masking import pack
from maelm_fast.data.token_store import TokenStore
from maelm_fast.errors import UserError
from maelm_fast.masking import Masker, Vocabulary
from maelm_fast.model.block import keep_gelu
from maelm_fast.model.maelm import MaeLm
from maelm_fast.ops import dispatch
from maelm_fast.training import memory
from maelm_fast.training.job import _fitted_to_memory, pretrain
from maelm_fast.training.parallel import Processes
from maelm_fast.training.rundir import RunDir
from tests.devices import DEVICES

GIB = 2**30


def step(config: RunConfig, sequences: int, device: str, keep: bool) -> Callable[[], None]:
    """A micro-batch's forward and backward pass."""
    model = MaeLm(config.model).to(device).train()
    keep_gelu(model, keep)
    every, vocabulary = np.arange(sequences), Vocabulary(128, 127, (127,))
    rows = [np.random.default_rng(i).integers(5, 100, 64) for i in every]
    masker = Masker(config.masking, vocabulary, 0, model.encoder_sees_mask)
    batch = pack(rows, every, np.zeros_like(every), masker).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def run() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = model(batch, torch.tensor(7, device=device))[0]
        loss.backward()

    return run


def peak(run: Callable[[], None], device: str) -> int:
    """The most bytes that PyTorch's allocator had given out at once, above what it had at the start."""
    if device == "cuda":
        run()  # compiles kernels, makes workspaces of libraries
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    found: list[tuple[int, int, int]] = []

    def look(events: Any) -> None:
        for event in events:
            if event.typed[0] == _EventType.Allocation:
                found.append((event.start_time_ns, event.typed[1].total_allocated, event.typed[1].alloc_size))
            look(event.children)

    look(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    _, first, size = min(found)
    return max(held for _, held, _ in found) - (first - size)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dropout": 0.1, "decoder": "cross"},
        {"decoder": "none"},
        {"decoder": "self_cross"},
        {"decoder": "causal_cross"},
        {"decoder_hidden_size": 128},
    ],
    ids=str,
)
def test_the_estimate_is_little_more_than_a_step_needs(
    change: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native.has("scatter_to_decoder", device):
        pytest.skip("without the extension more is kept")
    if change.get("decoder") == "none":
        change = {**change, "decoder_relative_bias": False}
    sizes = {"vocab_size": 128, "hidden_size": 256, "ffn_size": 1024, "num_layers": 6, "decoder_layers": 3}
    config = presets.change(presets.get("tiny"), model={**sizes, **change})
    # A GPU's products keep what PyTorch's do; a CPU's compiled ones keep less.
    monkeypatch.setattr(importlib.import_module("maelm_fast.ops.linear"), "_FAST", False)
    for keep in (True,) if device == "cpu" else (False, True):  # PyTorch's own keeps GELU's output
        few, more = (peak(step(config, sequences, device, keep), device) for sequences in (4, 12))
        assert 1.0 < memory.sequence_bytes(config.model, config.masking, 64, 10, keep) / ((more - few) / 8) < 1.2


@pytest.mark.parametrize(
    ("name", "gib", "size", "keep"),
    [
        ("base", 139, 256, True),
        ("base", 74, 256, True),
        ("base", 56, 256, False),
        ("base", 40, 205, False),
        ("base", 24, 121, False),
        ("large++", 80, 187, False),
        ("base", 1, 1, False),
    ],
)
def test_a_size_follows_from_the_memory(name: str, gib: int, size: int, keep: bool) -> None:
    config = presets.get(name)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in MaeLm(config.model).parameters())
    fixed, each = memory.estimated(config, parameters, 512)
    assert memory.fitting(config, parameters, 512, gib * GIB) == size
    assert fixed + size * each <= memory.SHARE * gib * GIB or size == 1
    sized = presets.change(config, runtime={"micro_batch_size": size})
    assert memory.keeps_gelu(sized, parameters, 512, gib * GIB) == keep
    more = presets.change(config, masking={"rate_end": 0.05})  # more tokens in the encoder then
    assert memory.estimated(more, parameters, 512)[1] > each


class OnAGpu:
    """A CPU taken for a GPU with so much free memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        self.free = free
        monkeypatch.setattr(memory, "can_estimate", lambda *_: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (self.free, 2 * self.free))


def small(**runtime: Any) -> RunConfig:
    return presets.change(
        presets.get("tiny"),
        model={"vocab_size": 300, "hidden_size": 32, "num_heads": 2, "ffn_size": 64, "num_layers": 2, "dropout": 0.1},
        optim={"batch_size": 12, "max_steps": 4, "warmup_steps": 1},
        runtime={"micro_batch_size": None, "device": "cpu", "precision": "fp32", "eval_samples": 8, "log_every": 1}
        | runtime,
    )


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in RunDir(run).metrics() if row["kind"] == "train"]


def recorded(run: Path) -> int | None:
    return RunDir(run).read_config()[1].runtime.micro_batch_size


def test_a_run_keeps_the_size_that_it_was_begun_with(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    config = small(save_every=2)
    parameters = sum(p.numel() for p in MaeLm(config.model).parameters())
    fixed, each = memory.estimated(config, parameters, TokenStore.open(store, "train").manifest.seq_len)
    gpu = OnAGpu(monkeypatch, round((fixed + 5.5 * each) / memory.SHARE))
    pretrain(config, str(store), str(run))
    said = "sequences (--runtime.micro-batch-size asks for another size), GELU's output kept for the backward pass: "
    assert f"micro-batches of 4 {said}by an estimate 0.5 of the GPU's 0.6 GiB" in capsys.readouterr().out
    assert recorded(run) == 4  # 5 fit, and 4, 4, 4 are no more micro-batches than 5, 5, 2
    pretrain(small(save_every=2, micro_batch_size=4), str(store), str(whole))
    (RunDir(run).checkpoint(4) / "model.safetensors").write_bytes(b"damaged")
    gpu.free *= 2
    pretrain(config, str(store), str(run))
    assert "micro-batches of 4 sequences, GELU's output kept" in capsys.readouterr().out
    assert (recorded(run), losses(run)) == (4, losses(whole))
    pretrain(small(save_every=2, micro_batch_size=3), str(store), str(run))
    assert recorded(run) == 3


@pytest.mark.skipif(not dispatch.interpreted(), reason="the kernels of a CPU's run are the interpreter's")
def test_gelus_output_is_kept_where_it_fits_and_changes_nothing(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that goes on with more memory than it was begun with."""
    run, whole, passes = tmp_path / "run", tmp_path / "whole", []
    config = small(save_every=2, backend=BackendConfig(feed_forward="triton"))
    parameters = sum(p.numel() for p in MaeLm(config.model).parameters())
    fixed, each = memory.estimated(config, parameters, TokenStore.open(store, "train").manifest.seq_len)
    gpu = OnAGpu(monkeypatch, round((fixed + 4.1 * each) / memory.SHARE))
    kernels = importlib.import_module("maelm_fast.kernels.feed_forward")
    backward = kernels.bias_gelu_bwd_

    def spy(*tensors: Any) -> Any:
        passes.append(tensors[3] is not None)
        return backward(*tensors)

    monkeypatch.setattr(kernels, "bias_gelu_bwd_", spy)
    pretrain(config, str(store), str(run))
    assert "micro-batches of 4 sequences (--runtime.micro-batch-size asks" in (out := capsys.readouterr().out)
    assert "GELU's output made again for the backward pass: by an estimate 0.5 of" in out
    assert set(passes) == {False}
    (RunDir(run).checkpoint(4) / "model.safetensors").write_bytes(b"damaged")
    passes.clear()
    gpu.free *= 2
    pretrain(config, str(store), str(run))
    assert "micro-batches of 4 sequences, GELU's output kept for the backward pass" in capsys.readouterr().out
    assert set(passes) == {True}
    assert [start["keep_gelu"] for start in RunDir(run).starts()] == [False, True]
    pretrain(presets.change(config, runtime={"micro_batch_size": 4}), str(store), str(whole))
    assert losses(run) == losses(whole)


def test_all_processes_take_the_size_that_suits_all(
    document_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    OnAGpu(monkeypatch, 64 * GIB)
    group, config, store = Processes(torch.device("cpu")), small(), TokenStore.open(document_store, "train")
    group.world = 3
    model, masker = MaeLm(config.model), Masker(config.masking, Vocabulary(1024, 1023, (1023,)), 0, False)
    run = RunDir(tmp_path / "run")

    def size() -> int | None:
        return _fitted_to_memory(config, run, model, store, masker, group, "bf16")[0].runtime.micro_batch_size

    monkeypatch.setattr(group, "everyone", lambda free: [free, 2 * free, 3 * free])
    batches = TrainingBatches(store, masker, 12, 12, world=3)
    assert batches.idle(12) > 0.3
    assert batches.idle(size() or 0) < 0.15
    monkeypatch.setattr(group, "everyone", lambda free: [free, free // 1000])  # too little for any
    assert size() == 1


def test_without_a_gpu_nothing_is_estimated(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not memory.can_estimate(RunConfig(), torch.device("cpu"), "bf16")
    assert not memory.can_estimate(RunConfig(), torch.device("cuda"), "fp32")
    named = presets.change(presets.get("base"), runtime={"backend": BackendConfig(attention="reference")})
    assert not memory.can_estimate(named, torch.device("cuda"), "bf16")
    pretrain(small(), str(store), str(tmp_path / "run"))
    assert recorded(tmp_path / "run") == 32
    assert "micro-batches" not in capsys.readouterr().out
    with pytest.raises(UserError, match="micro_batch_size must be positive, not 0"):
        small(micro_batch_size=0)
