"""Runs on a GPU. Part of make gpu-rest; needs neither data nor network."""

from __future__ import annotations

from pathlib import Path

import pytest

from maelm_fast import presets
from tests.devices import ON_GPU

pytestmark = ON_GPU


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_a_run_on_the_gpu_goes_on_from_its_checkpoint(
    cuda_graph: bool, deterministic: bool, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    from maelm_fast.training.job import pretrain
    from maelm_fast.training.rundir import RunDir

    run = presets.change(
        presets.get("tiny"),
        optim={"max_steps": 12, "warmup_steps": 2, "batch_size": 8},
        runtime={
            "device": "cuda",
            "log_every": 1,
            "save_every": 6,
            "eval_samples": 32,
            "cuda_graph": cuda_graph,
            "deterministic": deterministic,
        },
    )
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    pretrain(run, store, whole)
    pretrain(run, store, cut)
    last = RunDir(cut).checkpoint(12)
    (last / "model.safetensors").write_bytes(b"damaged")
    pretrain(run, store, cut)
    assert "resuming from step 6" in capsys.readouterr().out
    losses = [[row["loss"] for row in RunDir(r).metrics() if row["kind"] == "train"] for r in (whole, cut)]
    assert losses[0] == (losses[1] if deterministic else pytest.approx(losses[1], rel=1e-2))
