"""A run's directory: what is where, and how to read a run back.

config.yaml      preset, data, and the full merged configuration
env.json         versions, hardware, commit of each start
verified.json    the store's files when their content was compared (verified.py)
tokenizer.json   the store's tokenizer, so that the run can be used without the store
metrics.jsonl    one row per logged update and per evaluation
checkpoints/     step_N/: tensors, state.json, checksums.json (checkpoint.py)
heartbeats/      while several processes run it: where each is (heartbeat.py)
report/          plots and tables
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from maelm_fast.config import RunConfig, from_dict, to_dict
from maelm_fast.data.tokenizer import load_tokenizer, special_ids
from maelm_fast.errors import UserError
from maelm_fast.masking import Vocabulary
from maelm_fast.model.maelm import MaeLm
from maelm_fast.training.checkpoint import load
from maelm_fast.training.files import damage, newest_whole, steps, write_text


@dataclass(frozen=True)
class RunRecord:
    """What a run was started with, beside its configuration."""

    preset: str
    data: str
    data_fingerprint: str
    init_from: str | None


class RunDir:
    """Paths and small files of a run. Creating the object writes nothing."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.yaml"
        self.env_file = self.path / "env.json"
        self.verified_file = self.path / "verified.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.tokenizer_file = self.path / "tokenizer.json"
        self.checkpoints = self.path / "checkpoints"
        self.heartbeats = self.path / "heartbeats"
        self.report = self.path / "report"

    @property
    def exists(self) -> bool:
        return self.config_file.exists()

    def write_config(self, record: RunRecord, config: RunConfig) -> None:
        data = {**vars(record), **to_dict(config)}
        write_text(self.config_file, yaml.safe_dump(data, sort_keys=False))

    def read_config(self) -> tuple[RunRecord, RunConfig]:
        try:
            data = yaml.safe_load(self.config_file.read_text(encoding="utf-8"))
            record = RunRecord(**{key: data.pop(key) for key in RunRecord.__dataclass_fields__})
            return record, from_dict(RunConfig, data)
        except FileNotFoundError:
            why = "no config.yaml" if self.path.is_dir() else "it does not exist"
            raise UserError(f"{self.path}: not a run directory ({why}): name the --out of a 'pretrain'") from None
        except (OSError, ValueError, yaml.YAMLError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"{self.config_file}: not a run's config.yaml ({_one_line(error)})") from None

    def starts(self) -> list[dict[str, Any]]:
        """What env.json says of each start until now. Raises UserError if it is damaged."""
        try:
            starts = json.loads(self.env_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return []
        except (OSError, ValueError):
            starts = None
        if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
            raise UserError(f"{self.env_file} is damaged; it is only a record of the run's starts: remove it")
        return starts

    def steps(self) -> list[int]:
        """Steps with a checkpoint directory, ascending; whether they are whole is not looked at."""
        return steps(self.checkpoints)

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step}"

    def last_whole_checkpoint(self) -> Path | None:
        """The newest checkpoint whose checksums agree. Damaged ones are passed over with a warning; if there are only
        damaged ones, UserError."""
        path = newest_whole(self.checkpoints)
        if path is None and self.steps():
            raise UserError(
                f"{self.checkpoints}: every checkpoint is damaged; remove the directory to start the run again"
            )
        return path

    def whole_checkpoint(self, step: int | None = None) -> Path:
        """The newest whole checkpoint, or that of the given step. Raises UserError with the remedy."""
        if step is None:
            path = self.last_whole_checkpoint()
            if path is None:
                raise UserError(f"{self.path}: the run has no checkpoint yet")
            return path
        path = self.checkpoint(step)
        if step not in self.steps():
            have = ", ".join(map(str, self.steps())) or "none"
            raise UserError(f"{self.path}: no checkpoint at step {step}; there are: {have}")
        if fault := damage(path):
            raise UserError(f"{path}: damaged: {fault}; choose another step")
        return path

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Rows of metrics.jsonl; an unfinished last line is left out. Raises UserError for one damaged otherwise."""
        if self.metrics_file.exists():
            with open(self.metrics_file, "rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.endswith(b"\n"):
                        yield self._row(number, line)

    def _row(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            row: dict[str, Any] = json.loads(line)
        except ValueError:
            row = {}
        if not isinstance(row, dict) or "step" not in row:
            raise UserError(f"{self.metrics_file}: line {number} is damaged: remove that line and run again")
        return row


@dataclass(frozen=True)
class LoadedRun:
    """A model read back from a run, in evaluation mode on the CPU."""

    model: MaeLm
    tokenizer: Any
    vocabulary: Vocabulary
    config: RunConfig
    record: RunRecord
    step: int

    @property
    def encoder_reads_mask(self) -> bool:
        """Whether the [MASK] of a text to be filled in goes into the encoder: if at least half of them did in
        pretraining (ours: between none, MAE-LM, and all, MLM, the paper fills nothing in)."""
        return self.model.encoder_sees_mask or self.config.masking.shown >= 0.5


def load_run(path: str | Path, step: int | None = None) -> LoadedRun:
    """The model of a run's newest whole checkpoint, or of the given step. Raises UserError with the remedy."""
    run = RunDir(path)
    record, config = run.read_config()
    place = run.whole_checkpoint(step)
    tokenizer = load_tokenizer(run.tokenizer_file)
    vocabulary = vocabulary_of(tokenizer)
    model = MaeLm(config.model, mask_id=vocabulary.mask_id)
    load(place, model)
    return LoadedRun(model.eval(), tokenizer, vocabulary, config, record, int(place.name[5:]))


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """What masking needs of a tokenizer."""
    ids = special_ids(tokenizer)
    return Vocabulary(tokenizer.get_vocab_size(), ids["mask"], tuple(sorted(ids.values())))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or error.__class__.__name__
