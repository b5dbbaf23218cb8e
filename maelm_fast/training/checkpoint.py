"""Checkpoints: model, optimiser and progress, in safetensors and JSON, so that loading one executes nothing.

The data's state is the number of updates done and dropout's is a function of it, so no generator state is kept.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from maelm_fast.training.files import steps, write_directory, write_json
from maelm_fast.training.parallel import part_like, whole


def save(
    directory: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keep: int,
    best: dict[str, Tensor] | None = None,
    is_main: bool = True,
) -> None:
    """Write directory/step_N, whole or not at all, then remove all but the newest `keep` up to it. A later one is
    damaged, or the run would have gone on from it; it is overwritten when the run gets there.

    best: other weights of the model, to be kept beside it. is_main: of several processes, which all call this, one
    writes. Raises OSError with a message of its own."""
    weights = {name: whole(t.detach()).contiguous() for name, t in model.state_dict().items()}
    moments = optimizer_tensors(model, optimizer)
    if not is_main:
        return
    path = directory / f"step_{step}"
    if path.exists():  # damaged, or passed over by a resume further back
        shutil.rmtree(path)

    def fill(aside: Path) -> None:
        save_file(weights, aside / "model.safetensors")
        save_file(moments, aside / "optimizer.safetensors")
        if best is not None:
            save_file(best, aside / "best.safetensors")
        write_json(aside / "state.json", state)

    try:
        write_directory(path, fill)
    except OSError as error:
        raise OSError(f"cannot save a checkpoint in {directory}: {error.strerror or error}") from None
    for other in [other for other in steps(directory) if other <= step][:-keep]:
        shutil.rmtree(directory / f"step_{other}")


def read_state(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
    return state


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read a checkpoint that was found whole into model and optimiser."""
    own = model.state_dict()
    weights = load_file(path / "model.safetensors")
    model.load_state_dict({name: part_like(t, own[name]) if name in own else t for name, t in weights.items()})
    load_optimizer(load_file(path / "optimizer.safetensors"), model, optimizer)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state by its own and the parameters' names, "exp_avg.head.dense.weight", to be saved."""
    return {
        f"{key}.{name}": whole(value.detach()).contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer(tensors: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The inverse of optimizer_tensors. A run whose every update so far was skipped may have none."""
    parameters = dict(model.named_parameters())
    for full_name, value in tensors.items():
        key, _, name = full_name.partition(".")
        parameter = parameters[name]
        alike = value.shape == parameter.shape
        optimizer.state[parameter][key] = part_like(value, parameter) if alike else value.to(parameter.device)
