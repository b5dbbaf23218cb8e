"""Checkpoints: model, optimiser and progress, in safetensors and JSON, so that loading one executes nothing.

The data's state is the number of updates done and dropout's is a function of it, so no generator state is kept.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from maelm_fast.training.files import write_directory, write_json
from maelm_fast.training.rundir import RunDir


@dataclass
class Progress:
    """Where a run stands after `step` updates."""

    step: int = 0
    tokens: int = 0
    """Original tokens consumed."""
    skipped: int = 0
    """Updates skipped for a non-finite gradient, in all and in a row."""
    skipped_in_a_row: int = 0
    best_val_loss: float | None = None
    evaluations_without_gain: int = 0
    finished: str | None = None
    """Why the run is over: "max_steps" or "early_stop"."""


def save(run: RunDir, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, keep: int) -> Path:
    """Write checkpoints/step_N, whole or not at all, then remove all but the newest `keep` up to it. A later one is
    damaged, or the run would have gone on from it; it is overwritten when the run gets there."""
    path = run.checkpoint(progress.step)
    if path.exists():  # damaged, or passed over by a resume further back
        shutil.rmtree(path)

    def fill(aside: Path) -> None:
        save_file(
            {name: t.detach().contiguous() for name, t in model.state_dict().items()}, aside / "model.safetensors"
        )
        save_file(optimizer_tensors(model, optimizer), aside / "optimizer.safetensors")
        write_json(aside / "state.json", asdict(progress))

    write_directory(path, fill)
    for step in [step for step in run.steps() if step <= progress.step][:-keep]:
        shutil.rmtree(run.checkpoint(step))
    return path


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Read a checkpoint that `RunDir.last_whole_checkpoint` found whole into model and optimiser."""
    model.load_state_dict(load_file(path / "model.safetensors"))
    load_optimizer(load_file(path / "optimizer.safetensors"), model, optimizer)
    return Progress(**json.loads((path / "state.json").read_text(encoding="utf-8")))


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's state by the parameters' names, to be saved."""
    return {
        f"{key}.{name}": value.detach().contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer(tensors: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The inverse of optimizer_tensors."""
    for name, parameter in model.named_parameters():
        state = {
            key: tensors[f"{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{name}" in tensors
        }
        if state:  # a run whose every update so far was skipped has none
            optimizer.state[parameter] = {
                key: value if key == "step" and parameter.device.type == "cpu" else value.to(parameter.device)
                for key, value in state.items()
            }
