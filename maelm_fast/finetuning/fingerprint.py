"""What decides a fine-tuning result, as short hashes: of a model's weights and tokenizer, of the configuration."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maelm_fast.config import require, to_dict
from maelm_fast.data.files import checksum_of_given
from maelm_fast.encoders import Engine, TextEncoder, load_encoder
from maelm_fast.errors import UserError
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.training.checkpoint import model_checksum
from maelm_fast.training.rundir import RunDir

NOT_DECIDING = ("device", "precision", "micro_batch_tokens")
"""Fields of FinetuneConfig that change where and how fast a run runs; what comes of it, up to rounding and to which
numbers dropout takes, not."""
_WEIGHTS = (".safetensors", ".bin")
_DESCRIPTIONS = (".json", ".txt", ".model", ".py")
_ABOUT_WEIGHTS = ("checksums.json", ".index.json")


def digest(*values: Any) -> str:
    """12 hexadecimal digits of plain data."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def deciding(config: FinetuneConfig) -> dict[str, Any]:
    """The fields that decide a result: not those that only change where and how fast."""
    values: dict[str, Any] = to_dict(config)
    return {name: value for name, value in values.items() if name not in NOT_DECIDING}


def model_fingerprint(path: str | Path, step: int | None, random_init: bool = False) -> str:
    """Of the encoder's architecture, tokenizer and weights; with random_init without the weights.

    step: of a run, its checkpoint. Raises UserError if `path` is neither a run directory nor a Hugging Face one."""
    run = RunDir(path)
    if run.exists:
        _, config = run.read_config()
        weights = None if step is None else model_checksum(run.checkpoint(step))
        return digest("run", to_dict(config.model), checksum_of_given(run.tokenizer_file), weights)
    require(Path(path).is_dir(), f"{path}: no such directory")
    require(step is None, f"{path}: a step was named, but this is no run directory of ours: leave it out")
    files = sorted(file for file in Path(path).iterdir() if file.is_file())
    if not any(file.name == "config.json" for file in files):
        raise UserError(f"{path} is neither a run directory (config.yaml) nor a Hugging Face one (config.json)")
    if random_init:
        files = [f for f in files if f.suffix in _DESCRIPTIONS and not f.name.endswith(_ABOUT_WEIGHTS)]
    else:
        files = [f for f in files if f.suffix in (*_DESCRIPTIONS, *_WEIGHTS)]
    return digest("huggingface", random_init, {file.name: checksum_of_given(file) for file in files})


@dataclass(frozen=True)
class Origin:
    """An encoder to fine-tune, as it was named. Make one with `of`."""

    path: str
    """A run directory of ours, or a Hugging Face one."""
    step: int | None
    """A run's checkpoint; None for a Hugging Face directory, and for random weights."""
    engine: Engine
    random_init: bool
    label: str
    """What tables call it."""
    fingerprint: str

    @classmethod
    def of(
        cls,
        path: str | Path,
        step: int | None = None,
        engine: Engine = "auto",
        random_init: bool = False,
        label: str = "",
    ) -> Origin:
        """step: by default the newest whole one of now. Raises UserError if there is no such model or checkpoint, or
        it is damaged."""
        require(
            step is None or not random_init,
            f"--random-init {path}: random weights have no step: leave out --step, or @STEP",
        )
        if (run := RunDir(path)).exists and not random_init:
            step = int(run.whole_checkpoint(step).name.removeprefix("step_"))
        return cls(str(path), step, engine, random_init, label, model_fingerprint(path, step, random_init))

    def load(self, dropout: float, seed: int = 0, head: bool = False) -> TextEncoder:
        """seed: of random weights. head: as encoders.load_encoder."""
        return load_encoder(
            self.path,
            step=self.step,
            engine=self.engine,
            dropout=dropout,
            random_init=self.random_init,
            seed=seed,
            head=head,
        )
