"""Checkpoints: one process and several write and read them, whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from maelm_fast.config import ParallelConfig
from maelm_fast.training.job import pretrain
from tests.processes import together
from tests.training.test_run import config, rows


def asked(strategy: str = "auto", **runtime: Any) -> Any:
    return config(
        runtime={"parallel": ParallelConfig(strategy=strategy), "keep_checkpoints": 9, **runtime},
        metrics={"rank_every": 0},
    )


@pytest.fixture(scope="module")
def whole(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    pretrain("tiny", asked(), str(store), str(out))
    return out


def cut(run: Path, step: int) -> None:
    for later in range(step + 1, 9):
        shutil.rmtree(run / "checkpoints" / f"step_{later}", ignore_errors=True)


def test_ddp_then_fsdp_then_one(store: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    together(2, lambda: pretrain("tiny", asked("ddp"), str(store), str(run)))
    print(sorted(p.name for p in (run / "checkpoints" / "step_4").iterdir()))
    cut(run, 4)
    together(3, lambda: pretrain("tiny", asked("fsdp"), str(store), str(run)))
    print(sorted(p.name for p in (run / "checkpoints" / "step_6").iterdir()))
    cut(run, 6)
    pretrain("tiny", asked(), str(store), str(run))
    for a, b in zip(rows(run), rows(whole), strict=True):
        print(a, b)
