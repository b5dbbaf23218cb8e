"""Weights to start from other than random ones: an earlier run of ours, or a checkpoint read by maelm_fast.export."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from maelm_fast.config import ModelConfig
from maelm_fast.errors import UserError
from maelm_fast.model.maelm import MaeLm
from maelm_fast.training.rundir import load_run

ENCODER_FIELDS = (
    "vocab_size",
    "max_positions",
    "hidden_size",
    "num_layers",
    "num_heads",
    "ffn_size",
    "relative_bias",
    "relative_buckets",
    "relative_max_distance",
    "layer_norm_eps",
)


@dataclass(frozen=True)
class Initial:
    """An encoder, and possibly a decoder and a head, under our parameter names.

    model_fields: what the encoder's shape fixes of ModelConfig. vocabulary: token to id, if known, to hold the store's
    tokenizer against."""

    model_fields: dict[str, Any]
    state: dict[str, Tensor]
    vocabulary: dict[str, int] | None
    source: str


def from_run(path: str | Path) -> Initial:
    """The newest whole checkpoint of one of our runs."""
    run = load_run(path)
    model = {f.name: getattr(run.config.model, f.name) for f in fields(ModelConfig) if f.name in ENCODER_FIELDS}
    return Initial(model, run.model.state_dict(), run.tokenizer.get_vocab(), f"{path} at step {run.step}")


def adapt(config: ModelConfig, initial: Initial) -> ModelConfig:
    """The configuration with the initial encoder's shape; decoder, dropout and initialisation stay."""
    return replace(config, **initial.model_fields)


def load_initial(model: MaeLm, initial: Initial) -> list[str]:
    """Copies the initial weights into the model. Returns the parameters that keep their random initialisation: only a
    decoder's or the head's may, else UserError."""
    own = model.state_dict()
    usable = {name: t for name, t in initial.state.items() if name in own and t.shape == own[name].shape}
    fresh = [name for name in own if name not in usable]
    if bad := [name for name in fresh if name.startswith("encoder.")]:
        raise UserError(f"{initial.source}: no fitting weights for {bad[0]} ({len(bad)} encoder tensors in all)")
    model.load_state_dict(usable, strict=False)
    return fresh
