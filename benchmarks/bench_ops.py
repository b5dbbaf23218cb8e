"""Ops, host code and a training step of `tiny` under pytest-benchmark, to hold a change against a saved baseline.

    python -m pytest benchmarks/bench_ops.py --benchmark-save=before
    python -m pytest benchmarks/bench_ops.py --benchmark-compare --benchmark-compare-fail=median:10%

Only what a user gets is timed, on whatever device is there; `benchmarks.ops` compares it with plain PyTorch in turns.
The two runs are minutes apart, so the machine has to be idle in both. An op that fails its gate is not timed. Baselines
lie in .benchmarks/, by machine. The tests do not collect this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import ops
from benchmarks.registry import ENTRIES, Setting
from maelm_fast import native, presets
from maelm_fast.config import MaskingConfig
from maelm_fast.data.masking import pack
from maelm_fast.data.packing import best_fit
from maelm_fast.masking import Masker, Vocabulary
from maelm_fast.model.maelm import MaeLm

SETTINGS = {
    "cpu": Setting(sequences=8, length=128),
    "cuda": Setting("cuda", torch.bfloat16, sequences=64, length=512),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [
    pytest.param(name, phase, id=f"{name}, {phase}, {DEVICE}")
    for name, entry in ENTRIES.items()
    for phase in (("forward", "both") if entry.gradients else ("forward",))
    if name != "mask_and_pack" or DEVICE == "cuda"  # on a CPU the loader's host code does it
]
pytestmark = pytest.mark.benchmark(min_rounds=5, max_time=0.5, warmup=True, warmup_iterations=2, disable_gc=True)


def timed(benchmark: Any, call: Callable[[], Any], group: str) -> None:
    """With the wait for the device, where it is one that runs behind."""

    def finished() -> None:
        call()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    benchmark.group = group
    benchmark(finished)


@pytest.mark.parametrize(("name", "phase"), CASES)
def test_op(benchmark: Any, name: str, phase: str) -> None:
    entry, setting = ENTRIES[name], SETTINGS[DEVICE]
    ops.gate(entry, setting)
    ours = ops.contestant(entry, entry.inputs(setting), "ours", "auto")
    timed(benchmark, ours.forward if phase == "forward" else ours.both, "ops")


def test_mask_and_pack_on_the_host(benchmark: Any) -> None:
    _needs_compiled_host_code()
    vocabulary, samples = Vocabulary(32768, 32767, (0, 1, 2, 3, 32767)), np.arange(32)
    ids = list(np.random.default_rng(0).integers(5, 32767, (32, 512)).astype(np.uint16))
    epochs = np.zeros_like(samples)
    benchmark.group = "host"
    benchmark(pack, ids, samples, epochs, Masker(MaskingConfig(), vocabulary, 0, False))


def test_best_fit_of_20000_documents(benchmark: Any) -> None:
    _needs_compiled_host_code()
    lengths = np.exp(np.random.default_rng(0).normal(5.5, 1.0, 20_000))
    benchmark.group = "host"
    benchmark(best_fit, np.clip(lengths, 2, 2048).astype(np.int64), 16384)


def _needs_compiled_host_code() -> None:
    if native.host() is None:
        pytest.skip(str(native.reasons["host"]))


def test_training_step_of_tiny(benchmark: Any) -> None:
    run = presets.get("tiny")
    torch.manual_seed(0)
    model = MaeLm(run.model).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    size = run.model.vocab_size
    vocabulary, samples = Vocabulary(size, size - 1, (size - 1,)), np.arange(32)
    ids = list(np.random.default_rng(0).integers(0, size - 1, (32, 64)))
    batch = pack(ids, samples, np.zeros_like(samples), Masker(run.masking, vocabulary, 0, model.encoder_sees_mask)).to(
        DEVICE
    )

    def step() -> None:
        loss = model(batch)[0] / batch.counts.masked
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    timed(benchmark, step, "step")
