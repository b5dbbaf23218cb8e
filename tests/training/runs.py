"""A small run, what it wrote, and a way to cut it short."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from maelm_fast import presets
from maelm_fast.config import RunConfig
from maelm_fast.masking import Vocabulary
from maelm_fast.training.job import pretrain
from maelm_fast.training.rundir import RunDir
from maelm_fast.training.trainer import Trainer

SEED = 7  # not the default, which whatever forgets it would take


def config(**sections: dict[str, Any]) -> RunConfig:
    small = presets.change(
        presets.get("tiny"),
        model={"hidden_size": 32, "num_heads": 2, "ffn_size": 64, "num_layers": 2, "dropout": 0.1},
        optim={"batch_size": 12, "max_steps": 8, "warmup_steps": 2, "lr": 3e-3},
        runtime={
            "micro_batch_size": 5,
            "log_every": 1,
            "eval_every": 3,
            "eval_samples": 20,
            "save_every": 2,
            "device": "cpu",
            "precision": "fp32",
        },
    )
    return replace(presets.change(small, **sections), seed=SEED)


def rows(run: Path) -> list[dict[str, Any]]:
    """The metrics without what the clock decides."""
    return [{k: v for k, v in row.items() if k not in ("tokens_per_s", "mfu")} for row in RunDir(run).metrics()]


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    path = RunDir(run).last_whole_checkpoint()
    assert path is not None
    return load_file(path / "model.safetensors")


def assert_same(run: Path, whole: Path) -> None:
    assert rows(run) == rows(whole)
    mine, theirs = final_weights(run), final_weights(whole)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


class Killed(Exception):
    pass


def pretrain_until(cut: int, *arguments: Any) -> None:
    """A run that dies after `cut` updates."""
    update = Trainer.update

    def dies(self: Trainer, *args: Any) -> Any:
        if self.progress.step == cut:
            raise Killed
        return update(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "update", dies)
        with pytest.raises(Killed):
            pretrain(*arguments)


VOCABULARY = Vocabulary(300, 299, (0, 1, 2, 3, 299))
