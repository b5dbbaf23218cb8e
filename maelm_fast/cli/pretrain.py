"""`maelm-fast pretrain PRESET --data STORE --out RUN`: a preset, changed by YAML files and options in turn; every field
of RunConfig is an option."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from maelm_fast import presets
from maelm_fast.cli.common import option, parse
from maelm_fast.config import RunConfig, to_dict
from maelm_fast.errors import UserError

EXAMPLES = """
    maelm-fast pretrain tiny --data store --out runs/tiny
    maelm-fast pretrain small --data store --out runs/short --steps 5000 --lr 1e-3
    maelm-fast pretrain base --data store --out runs/base40 --masking.rate 0.4 --config mine.yaml
"""
MAIN = (
    "optim.lr optim.batch_size optim.max_steps optim.warmup_steps masking.rate model.dropout runtime.device "
    "runtime.micro_batch_size seed"
).split()
ALIASES = {
    "optim.lr": "--lr",
    "optim.batch_size": "--batch-size",
    "optim.max_steps": "--steps",
    "optim.warmup_steps": "--warmup",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Pretrain an encoder on a token store, or resume a run that was interrupted."""

    preset: str = option(positional=True)
    """tiny, small, base, base++, large++, roberta_base, ...: 'maelm-fast presets' lists them."""
    data: Path = option(metavar="STORE")
    """A store made by 'maelm-fast data prepare'."""
    out: Path = option(metavar="RUN")
    """Run directory; the same command resumes what is in it."""
    init_from: Path | None = None
    """Start from a run of ours, or a Hugging Face RoBERTa, BERT or MPNet checkpoint."""


def main(argv: list[str]) -> int:
    options, config = parsed(argv)
    from maelm_fast.training.job import pretrain
    from maelm_fast.training.rundir import RunDir

    if (run := RunDir(options.out)).exists:
        record, before = run.read_config()
        if record.preset == options.preset:
            options, config = parsed(argv, before)
    initial = _initial(options.init_from) if options.init_from else None
    pretrain(replace(config, preset=options.preset), options.data, options.out, initial, several=True)
    return 0


def parsed(argv: list[str], before: RunConfig | None = None) -> tuple[Options, RunConfig]:
    """before: of a run that goes on, which has what it was started with where nothing else is asked for: the preset may
    have been another then."""
    help_only = bool({"-h", "--help", "--help-all"} & {*argv})
    if not help_only and (not argv or argv[0].startswith("-")):
        raise UserError(f"name a preset first: maelm-fast pretrain PRESET ...; there are: {', '.join(presets.names())}")
    preset = presets.get("base" if argv[0].startswith("-") else argv[0])
    warmup: float = preset.optim.warmup_steps / preset.optim.max_steps
    if before is not None:
        model, warmup = replace(before.model, vocab_size=preset.model.vocab_size), before.optim.warmup_steps
        preset = replace(preset, model=model, masking=before.masking, optim=before.optim, seed=before.seed)
    change: dict[str, dict[str, Any]] = {name: {"default": value} for name, value in _leaves(to_dict(preset))}
    for name, alias in ALIASES.items():
        change[name]["aliases"] = (alias,)
    change["optim.warmup_steps"]["default"] = warmup
    options: tuple[Options, RunConfig] = parse(
        "pretrain", argv, Options, RunConfig, examples=EXAMPLES, main=MAIN, change=change, config_files=True
    )
    return options


def _leaves(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _initial(path: Path) -> Any:
    from maelm_fast.training.initial import from_run
    from maelm_fast.training.rundir import RunDir

    if RunDir(path).exists:
        return from_run(path)
    if not path.exists():
        raise UserError(f"--init-from {path}: no such directory")
    from maelm_fast.export.from_huggingface import read_checkpoint

    return read_checkpoint(path)
