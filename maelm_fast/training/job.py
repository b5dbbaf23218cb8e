"""The job behind `maelm-fast pretrain`: checks everything that can be checked, then trains or goes on training.

Nothing is written before the checks have passed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from maelm_fast import presets
from maelm_fast.config import RunConfig, require, to_dict
from maelm_fast.data.token_store import TokenStore
from maelm_fast.errors import UserError
from maelm_fast.training.files import write_json, write_text
from maelm_fast.training.hardware import choose_device, choose_precision, device_name, environment
from maelm_fast.training.initial import Initial, adapt, load_initial
from maelm_fast.training.optim import describe
from maelm_fast.training.rundir import RunDir, RunRecord, vocabulary_of
from maelm_fast.training.trainer import Trainer, build_model
from maelm_fast.work import lock

log = logging.getLogger(__name__)


def pretrain(preset: str, config: RunConfig, data: str, out: str, initial: Initial | None = None) -> RunDir:
    """Train `config` on the token store `data` in the run directory `out`; goes on if a run of the same is there.

    Raises UserError, before anything is written, for what does not fit together; Stopped after SIGTERM or SIGINT, when
    the run is saved."""
    train, validation = TokenStore.open(data, "train"), TokenStore.open(data, "validation")
    tokenizer = train.tokenizer()
    vocabulary = vocabulary_of(tokenizer)
    config = _fit_model(preset, config, train, vocabulary.size, initial, tokenizer)
    device = choose_device(config.runtime)
    precision = choose_precision(config.runtime, device)
    record = RunRecord(preset, str(data), train.fingerprint, initial.source if initial else None)

    run = RunDir(out)
    if run.exists:
        _check_same(run, record, config)
    elif run.path.is_file():
        raise UserError(f"{run.path} is a file; choose another --out")
    elif run.path.exists() and any(run.path.iterdir()):
        raise UserError(f"{run.path} exists, is not empty and is not a run; choose another --out")

    with _alone(run):
        model = build_model(config, vocabulary)
        if initial is not None:
            fresh = load_initial(model, initial)
            print(f"initialised from {initial.source}" + (f"; newly initialised: {_summary(fresh)}" if fresh else ""))
        trainer = Trainer(run, config, model, train, validation, vocabulary, device, precision)
        _start_files(run, record, config, tokenizer.to_str(), environment(device, precision))
        resumed = trainer.resume()
        print(_banner(run, preset, config, trainer, train, precision, device_name(device)))
        if trainer.progress.finished:
            print(f"{run.path}: already finished ({trainer.progress.finished}) at step {trainer.progress.step:,}")
            return run
        if resumed:
            print(f"resuming from step {trainer.progress.step:,}")
        try:
            trainer.train()
        except UserError:
            if not run.steps() and not any(run.metrics()):  # refused before its first update: not a run yet
                run.config_file.unlink()
                run.metrics_file.unlink(missing_ok=True)
            raise
    return run


def _fit_model(
    preset: str, config: RunConfig, store: TokenStore, vocab_size: int, initial: Initial | None, tokenizer: Any
) -> RunConfig:
    """The configuration with the store's vocabulary and, with `initial`, the shape of the encoder to start from."""
    model, preset_model, asked = config.model, presets.get(preset).model, config.model.vocab_size
    if asked not in (preset_model.vocab_size, vocab_size):
        raise UserError(
            f"model.vocab_size is {asked} but the store {store.path} has {vocab_size} tokens; leave model.vocab_size "
            f"out, or prepare the data with --vocab-size {asked}"
        )
    if initial is not None:
        for name, value in initial.model_fields.items():
            given = getattr(model, name)
            if name != "vocab_size" and given not in (value, getattr(preset_model, name)):
                raise UserError(
                    f"model.{name} is {given}, but --init-from {initial.source} has an encoder of {value}: leave it out"
                )
        model = adapt(model, initial)
        if initial.vocabulary is not None and initial.vocabulary != tokenizer.get_vocab():
            raise UserError(
                f"{initial.source} was trained with another tokenizer than the store {store.path}; prepare the data "
                f"with 'data prepare --tokenizer' and that model's tokenizer.json"
            )
        if model.vocab_size != vocab_size:
            raise UserError(
                f"{initial.source} has {model.vocab_size} tokens but the store {store.path} has {vocab_size}; prepare "
                f"the data with 'data prepare --tokenizer' and that model's tokenizer.json"
            )
    model = replace(model, vocab_size=vocab_size)
    if store.manifest.seq_len > model.max_positions:
        raise UserError(
            f"the store's sequences of up to {store.manifest.seq_len} tokens do not fit model.max_positions "
            f"{model.max_positions}; prepare the data with --seq-len {model.max_positions}, or raise it"
        )
    return replace(config, model=model)


def _check_same(run: RunDir, record: RunRecord, config: RunConfig) -> None:
    """A run may only be gone on with as it was started; runtime and metrics settings may change."""
    old_record, old = run.read_config()
    if old_record.data_fingerprint != record.data_fingerprint:
        raise UserError(f"{run.path} was started with other data ({old_record.data}); choose another --out")
    if old_record.init_from != record.init_from:
        raise UserError(f"{run.path} was started with --init-from {old_record.init_from}; choose another --out")
    before, now = to_dict(old), to_dict(config)
    different = [
        f"{section}.{key}={value!r}" if section else f"{key}={value!r}"
        for section, key, value in _leaves(before)
        if section not in ("runtime", "metrics") and (now[section][key] if section else now[key]) != value
    ]
    if different:
        raise UserError(f"{run.path} was started with {', '.join(different)}; use the same, or choose another --out")


def _leaves(config: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from ((name, key, leaf) for key, leaf in value.items())
        else:
            yield "", name, value


def _start_files(run: RunDir, record: RunRecord, config: RunConfig, tokenizer: str, env: dict[str, Any]) -> None:
    run.checkpoints.mkdir(exist_ok=True)
    write_text(run.tokenizer_file, tokenizer)
    starts = json.loads(run.env_file.read_text()) if run.env_file.exists() else []
    write_json(run.env_file, [*starts, {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **env}])
    run.write_config(record, config)


@contextlib.contextmanager
def _alone(run: RunDir) -> Iterator[None]:
    """Keeps two processes from writing the same run, and takes back a directory that a failure left empty."""
    created = not run.path.exists()
    try:
        with lock(run.path / ".lock", remove=True) as ours:
            require(ours, f"{run.path} is in use by another process")
            try:
                yield
            finally:
                if created and not run.exists:
                    for leftover in (run.tokenizer_file, run.env_file):
                        leftover.unlink(missing_ok=True)
                    with contextlib.suppress(OSError):
                        run.checkpoints.rmdir()
    finally:
        if created and not run.exists:
            with contextlib.suppress(OSError):
                run.path.rmdir()


def _banner(
    run: RunDir, preset: str, config: RunConfig, trainer: Trainer, store: TokenStore, precision: str, device: str
) -> str:
    parameters = sum(p.numel() for p in trainer.model.parameters())
    samples, updates = len(store), config.optim.max_steps * config.optim.batch_size
    return (
        f"{preset}: {parameters:,} parameters, {config.model.vocab_size:,} tokens in the vocabulary, on {device} in "
        f"{precision}\n{Path(store.path)}: {samples:,} training samples of up to {store.manifest.seq_len} tokens; "
        f"{config.optim.max_steps:,} updates of {config.optim.batch_size:,} are {updates / samples:.2f} epochs\n"
        + (f"{describe(trainer.optimizer)}\n" if config.optim.name == "muon" else "")
        + f"run: {run.path}"
    )


def _summary(names: list[str]) -> str:
    """decoder (34 tensors), head (5 tensors)"""
    parts: dict[str, int] = {}
    for name in names:
        parts[name.split(".")[0]] = parts.get(name.split(".")[0], 0) + 1
    return ", ".join(f"{part} ({count} tensors)" for part, count in parts.items())
