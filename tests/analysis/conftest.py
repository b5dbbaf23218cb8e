"""A run directory without a training run: configuration, tokenizer, an untrained checkpoint, made-up metrics."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file

from maelm_fast import presets
from maelm_fast.data.token_store import TokenStore
from maelm_fast.model.maelm import MaeLm
from maelm_fast.training.files import write_directory
from maelm_fast.training.rundir import RunDir, RunRecord

MakeRun = Callable[..., RunDir]


@pytest.fixture
def make_run(store: Path, tmp_path: Path) -> MakeRun:
    def make(name: str = "run", preset: str = "tiny", step: int = 20, **model: object) -> RunDir:
        manifest = TokenStore(store, "validation").manifest
        smaller = {"vocab_size": manifest.vocab_size, "max_positions": 32, "hidden_size": 16, "num_layers": 2}
        config = presets.change(
            presets.get(preset),
            model={**smaller, "num_heads": 2, "ffn_size": 32, **model},
            runtime={"micro_batch_size": 8, "device": "cpu"},
        )
        run = RunDir(tmp_path / name)
        run.path.mkdir()
        run.write_config(RunRecord(preset, str(store), manifest.fingerprint, None), config)
        shutil.copy(store / "tokenizer.json", run.tokenizer_file)
        network = MaeLm(config.model)
        run.checkpoints.mkdir()
        write_directory(
            run.checkpoint(step), lambda aside: save_file(dict(network.state_dict()), aside / "model.safetensors")
        )
        return run

    return make


@pytest.fixture
def write_metrics() -> Callable[..., None]:
    def write(run: RunDir, updates: int = 200, evaluate_every: int = 50, floor: float = 3.0) -> None:
        rows = []
        for step in range(1, updates + 1):
            loss = floor + 3.0 * math.exp(-step / updates * 4) + 0.1 * math.sin(step * 1.7)
            row = {"kind": "train", "step": step, "tokens": step * 2048, "loss": loss, "accuracy": 0.1, "lr": 1e-3}
            rows.append(row)
            if evaluate_every and step % evaluate_every == 0:
                result = {"val_loss": loss, "val_perplexity": math.exp(loss), "val_accuracy": 0.5 - 0.08 * loss}
                place = {"kind": "validation", "step": step, "tokens": step * 2048}
                rows.append({**place, **result, "unigram_nats": 5.3})
        run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    return write
