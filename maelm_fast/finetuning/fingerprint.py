"""What decides a fine-tuning result, as short hashes: of a model's weights and tokenizer, of a task's examples."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maelm_fast.config import to_dict
from maelm_fast.data.files import checksum_of_given
from maelm_fast.encoders import Engine, TextEncoder, load_encoder
from maelm_fast.errors import UserError
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.examples import Examples, TaskData
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


def resolve_step(path: str | Path, step: int | None) -> int | None:
    """The checkpoint that would be loaded: of a run directory the newest whole one if none is named. None for a Hugging
    Face directory. Raises UserError if there is no such checkpoint."""
    run = RunDir(path)
    if not run.exists:
        if not Path(path).is_dir():
            raise UserError(f"{path}: no such directory")
        if step is not None:
            raise UserError(f"{path}: a step was named, but this is no run directory of ours: leave it out")
        return None
    if step is not None and step not in run.steps():
        have = ", ".join(map(str, run.steps())) or "none"
        raise UserError(f"{run.path}: no checkpoint at step {step}; there are: {have}")
    if step is None:
        checkpoint = run.last_whole_checkpoint()
        if checkpoint is None:
            raise UserError(f"{run.path}: the run has no checkpoint yet")
        step = int(checkpoint.name.removeprefix("step_"))
    return step


def model_fingerprint(path: str | Path, step: int | None = None, random_init: bool = False) -> str:
    """Of the encoder's architecture, tokenizer and weights; with random_init without the weights.

    Raises UserError if `path` is neither a run directory with that checkpoint nor a Hugging Face directory."""
    run = RunDir(path)
    if not random_init:
        step = resolve_step(path, step)
    if run.exists:
        _, config = run.read_config()
        weights = None if step is None else _model_checksum(run.checkpoint(step))
        return digest("run", to_dict(config.model), checksum_of_given(run.tokenizer_file), weights)
    if not Path(path).is_dir():
        raise UserError(f"{path}: no such directory")
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
    """An encoder to fine-tune, as it was named: a run directory of ours, with the checkpoint's step, or a Hugging Face
    one."""

    path: str
    step: int | None = None
    engine: Engine = "auto"
    random_init: bool = False

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

    def fingerprint(self) -> str:
        return model_fingerprint(self.path, self.step, self.random_init)


def data_fingerprint(data: TaskData) -> str:
    """Of the texts and labels of all splits, in order, and of how they are scored; not of where they were read from."""
    task = data.task
    scored = [task.kind, task.labels, task.metric, task.label_range]
    whole = hashlib.sha256(json.dumps(scored).encode())
    for name, split in data.splits.items():
        if isinstance(split, Examples):
            labels = split.labels.tolist()
        else:
            labels = [[(answer.text, answer.start) for answer in several] for several in split.answers]
        whole.update(json.dumps([name, *split.texts, labels]).encode())
    return whole.hexdigest()[:12]


def _model_checksum(checkpoint: Path) -> str:
    """As written down when the checkpoint was; whoever loads it compares."""
    try:
        return model_checksum(checkpoint)
    except (OSError, ValueError):
        raise UserError(f"{checkpoint}: damaged: checksums.json cannot be read; choose another step") from None
