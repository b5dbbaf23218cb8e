"""The job behind `maelm-fast pretrain`: checks everything that can be checked, then trains or goes on training.

Nothing is written before the checks have passed.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from maelm_fast import presets
from maelm_fast.config import ModelConfig, RunConfig, require, to_dict
from maelm_fast.data.files import writing
from maelm_fast.data.loader import TrainingBatches
from maelm_fast.data.token_store import TokenStore
from maelm_fast.errors import UserError
from maelm_fast.masking import Masker
from maelm_fast.model.block import keep_gelu
from maelm_fast.model.maelm import MaeLm
from maelm_fast.training import memory
from maelm_fast.training.files import write_json, write_text
from maelm_fast.training.hardware import choose_precision, deterministic, device_name, environment
from maelm_fast.training.initial import Initial, adapt, load_initial
from maelm_fast.training.optim import describe, learning_rate
from maelm_fast.training.parallel import Processes, processes
from maelm_fast.training.rundir import RunDir, RunRecord, vocabulary_of
from maelm_fast.training.trainer import Trainer, build_model
from maelm_fast.training.verified import verify_data
from maelm_fast.work import lock

_LENGTH = ("max_steps", "cooldown_steps")


def pretrain(
    config: RunConfig | str, data: str | Path, out: str | Path, initial: Initial | None = None, several: bool = False
) -> RunDir:
    """Train `config`, or the preset of that name, on the token store `data` in the run directory `out`; goes on if a
    run of the same is there. Where it is as its preset has it, it takes the store's vocabulary and `initial`'s shape.

    Raises UserError, before anything is written, for what does not fit together; Stopped after SIGTERM or SIGINT, when
    the run is saved. several: called by each of the processes that torchrun has started, if it has; rank 0 writes and
    prints."""
    asked, run = presets.get(config) if isinstance(config, str) else config, RunDir(out)
    with processes(asked.runtime, several) as group, contextlib.ExitStack() as stack:
        train, validation = TokenStore.open(data, "train"), TokenStore.open(data, "validation")
        tokenizer = train.tokenizer()
        vocabulary = vocabulary_of(tokenizer)
        fitted = config = _fit_model(asked, train, vocabulary.size, initial, tokenizer)
        record = RunRecord(config.preset or "custom", str(data), train.fingerprint, initial.source if initial else None)
        say: Callable[[str], None] = print if group.is_main else lambda _: None
        _check_alike(group, record, config)
        precision = choose_precision(config.runtime, group.device)
        group.from_main(lambda: stack.enter_context(_alone(run, record, fitted)))
        group.watch(run.heartbeats)
        starts = group.from_main(run.starts)
        remedy = "move the run elsewhere" if starts else "choose another --out"
        with writing(run.path, remedy):
            verify_data(run.verified_file, train, group, say)
        model = build_model(config, vocabulary)
        if initial is not None:
            fresh = load_initial(model, initial)
            say(f"initialised from {initial.source}" + (f"; newly initialised: {_summary(fresh)}" if fresh else ""))
        masker = Masker(config.masking.final, vocabulary, config.seed, model.encoder_sees_mask)
        config, keep, chosen = _fitted_to_memory(config, run, model, train, masker, group, precision)
        keep_gelu(model, keep)
        trainer = Trainer(run, config, model, train, validation, vocabulary, group, precision)
        now = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "processes": group.world}
        starts.append({**now, **environment(group.device, precision), "keep_gelu": keep})
        with writing(run.path, remedy):
            group.from_main(lambda: _start_files(run, record, config, tokenizer.to_str(), starts))
        resumed = trainer.resume()
        say(_banner(run, config, trainer, train, precision))
        for line in filter(None, (chosen, _idle(trainer))):
            say(line)
        if trainer.progress.finished:
            say(f"{run.path}: already finished ({trainer.progress.finished}) at step {trainer.progress.step:,}")
            return run
        if resumed:
            say(f"resuming from step {trainer.progress.step:,}")
            before = starts[-2].get("precision", precision) if len(starts) > 1 else precision
            if before != precision:
                say(f"in {precision} from here on, until now in {before}: not bit for bit what either makes alone")
        with deterministic(config.runtime.deterministic):
            trainer.train()
    return run


def _fit_model(
    config: RunConfig, store: TokenStore, vocab_size: int, initial: Initial | None, tokenizer: Any
) -> RunConfig:
    """The configuration with the store's vocabulary and, with `initial`, the shape of the encoder to start from."""
    model, asked = config.model, config.model.vocab_size
    preset_model = presets.get(config.preset).model if config.preset else ModelConfig()
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


def _fitted_to_memory(
    config: RunConfig, run: RunDir, model: MaeLm, store: TokenStore, masker: Masker, group: Processes, precision: str
) -> tuple[RunConfig, bool, str | None]:
    """The configuration with a micro_batch_size: the one that it or the run has, or one that fits the GPUs and keeps
    all of them at work; whether GELU's output is kept, which changes no result and so may differ from start to start;
    and what there is to say of both. The same on all processes."""

    def sized(size: int) -> RunConfig:
        return replace(config, runtime=replace(config.runtime, micro_batch_size=size))

    before = group.from_main(lambda: run.read_config()[1].runtime.sequences_at_once if run.exists else None)
    size, remark = config.runtime.micro_batch_size or before, ""
    if not memory.can_estimate(config, group.device, precision):
        return sized(size or config.runtime.sequences_at_once), False, None
    free, length = min(group.everyone(torch.cuda.mem_get_info(group.device)[0])), store.manifest.seq_len
    parameters = sum(p.numel() for p in model.parameters())
    if size is None:
        most = memory.fitting(config, parameters, length, free)
        size = TrainingBatches(store, masker, config.optim.batch_size, most, world=group.world).better_size(most)
        remark = " (--runtime.micro-batch-size asks for another size)"
    keep = memory.keeps_gelu(sized(size), parameters, length, free)
    fixed, each = memory.estimated(config, parameters, length, keep)
    said = (
        f"micro-batches of {size} sequences{remark}, GELU's output {'kept' if keep else 'made again'} for the backward "
        f"pass: by an estimate {(fixed + size * each) / 2**30:.1f} of the GPU's {free / 2**30:.1f} GiB that are free"
    )
    return sized(size), keep, said


def _check_same(run: RunDir, record: RunRecord, config: RunConfig) -> None:
    """A run may only be gone on with as it was started; runtime and metrics settings may change, and its length if no
    update that is done would have been another."""
    old_record, old = run.read_config()
    if old_record.data_fingerprint != record.data_fingerprint:
        raise UserError(f"{run.path} was started with other data ({old_record.data}); choose another --out")
    if old_record.init_from != record.init_from:
        raise UserError(f"{run.path} was started with --init-from {old_record.init_from}; choose another --out")
    before, now = to_dict(old), to_dict(config)
    if all(_alike(old, config, update) for update in range(max(run.steps(), default=0))):
        for field in _LENGTH:
            before["optim"][field] = now["optim"][field]
    different = [
        f"{section}.{key}={value!r}" if section else f"{key}={value!r}"
        for section, key, value in _leaves(before)
        if section not in ("runtime", "metrics") and (now[section][key] if section else now[key]) != value
    ]
    if different:
        raise UserError(f"{run.path} was started with {', '.join(different)}; use the same, or choose another --out")


def _check_alike(group: Processes, record: RunRecord, config: RunConfig) -> None:
    """All processes must have been started alike, but for where the store lies and how many loaders each has: on a
    machine of a cluster with another store or option they would train something else, or wait for each other."""
    mine = {f"{section}.{key}".lstrip("."): value for section, key, value in _leaves(to_dict(config))}
    mine |= {"the preset": record.preset, "--init-from": record.init_from, "the store's hash": record.data_fingerprint}
    for name, value in group.from_main(lambda: mine).items():
        require(
            name == "runtime.workers" or mine[name] == value,
            f"{name} is {mine[name]!r} here, but {value!r} for rank 0: start all processes by the same command",
        )


def _alike(one: RunConfig, other: RunConfig, update: int) -> bool:
    """Whether an update has the same learning rate and share of masked tokens."""
    return one.mask_rate(update) == other.mask_rate(update) and learning_rate(one.optim, update) == learning_rate(
        other.optim, update
    )


def _leaves(config: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from ((name, key, leaf) for key, leaf in value.items())
        else:
            yield "", name, value


def _start_files(
    run: RunDir, record: RunRecord, config: RunConfig, tokenizer: str, starts: list[dict[str, Any]]
) -> None:
    run.write_config(record, config)
    run.checkpoints.mkdir(exist_ok=True)
    write_text(run.tokenizer_file, tokenizer)
    write_json(run.env_file, starts)


_MUCH_IDLE = 0.05
_BEFORE_CONFIG = (".lock", "heartbeats", "verified.json", "verified.json.tmp", "config.yaml.tmp")
"""What one that was killed before its directory was a run may have left there."""


@contextlib.contextmanager
def _alone(run: RunDir, record: RunRecord, config: RunConfig) -> Iterator[None]:
    """Keeps two processes from writing the same run, and takes back all of one that failed before its first update.

    Raises UserError if the directory is another run's, or none's."""
    if run.exists:
        _check_same(run, record, config)
    elif run.path.is_file():
        raise UserError(f"{run.path} is a file; choose another --out")
    elif run.path.exists() and any(path.name not in _BEFORE_CONFIG for path in run.path.iterdir()):
        raise UserError(f"{run.path} exists, is not empty and is not a run; choose another --out")
    created = [path for path in (run.path, *run.path.parents) if not path.exists()]
    try:
        with lock(run.path / ".lock", remove=True) as ours:
            require(ours, f"{run.path} is in use by another process")
            begun = run.exists
            try:
                yield
            except BaseException:
                if not begun and not run.steps() and not any(run.metrics()):
                    _remove(run)
                raise
    finally:
        with contextlib.suppress(OSError):  # the first that is not empty ends it
            for path in created:
                path.rmdir()


def _remove(run: RunDir) -> None:
    """All that a run has before its first update."""
    files = (run.metrics_file, run.env_file, run.tokenizer_file, run.verified_file, run.config_file)
    for path in files:
        path.unlink(missing_ok=True)
    shutil.rmtree(run.heartbeats, ignore_errors=True)
    with contextlib.suppress(OSError):
        run.checkpoints.rmdir()


def _banner(run: RunDir, config: RunConfig, trainer: Trainer, store: TokenStore, precision: str) -> str:
    device, group = device_name(trainer.device), trainer.processes
    if group.world > 1:
        device = f"{group.world} x {device} ({group.strategy})"
    parameters = sum(p.numel() for p in trainer.model.parameters())
    samples, updates = len(store), config.optim.max_steps * config.optim.batch_size
    return (
        f"{config.preset or 'custom'}: {parameters:,} parameters, {config.model.vocab_size:,} tokens in the "
        f"vocabulary, on {device} in {precision}\n"
        f"{Path(store.path)}: {samples:,} training samples of up to {store.manifest.seq_len} tokens; "
        f"{config.optim.max_steps:,} updates of {config.optim.batch_size:,} are {updates / samples:.2f} epochs\n"
        + (f"{describe(trainer.optimizer)}\n" if config.optim.name == "muon" else "")
        + f"run: {run.path}"
    )


def _idle(trainer: Trainer) -> str | None:
    """What share of the processes' time would be lost to waiting, if it is much, and what would mend it."""
    batches, size = trainer.batches, trainer.config.runtime.sequences_at_once
    if batches.world == 1:
        return None
    idle, better = batches.idle(size), batches.better_size(size)
    if idle < _MUCH_IDLE:
        return None
    said = f"{idle:.0%} of the {batches.world} processes' time is idle: an update's micro-batches do not divide by them"
    if better == size:
        return f"{said}; use fewer processes, or a larger optim.batch_size"
    return f"{said}; with --runtime.micro-batch-size {better} it is {batches.idle(better):.0%}"


def _summary(names: list[str]) -> str:
    """decoder (34 tensors), head (5 tensors)"""
    parts: dict[str, int] = {}
    for name in names:
        parts[name.split(".")[0]] = parts.get(name.split(".")[0], 0) + 1
    return ", ".join(f"{part} ({count} tensors)" for part, count in parts.items())
