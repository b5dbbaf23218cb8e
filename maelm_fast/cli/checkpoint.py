"""maelm-fast checkpoint: a run's checkpoints listed, compared with their checksums, put together, removed."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from maelm_fast.cli.common import option, parse, run_command
from maelm_fast.config import require
from maelm_fast.errors import UserError

if TYPE_CHECKING:
    from maelm_fast.training.rundir import RunDir

COMMANDS = {
    "list": "what there is",
    "verify": "compare each with its checksums",
    "consolidate": "one of several processes as one process would have written it",
    "prune": "remove all but the newest whole ones",
}
EXAMPLES = """
    maelm-fast checkpoint list runs/base
    maelm-fast checkpoint verify runs/base
    maelm-fast checkpoint consolidate runs/base --step 50000 --out base-50000
    maelm-fast checkpoint prune runs/base --keep 3
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """A run's checkpoints. list: without reading them. verify: each compared with its checksums; exit code 2 if one is
    damaged. consolidate: model.safetensors and optimizer.safetensors from the shares of several processes, which other
    programs need; every command here reads both. prune: all but the newest whole ones are removed, and what was damaged
    or not finished."""

    what: str = option(positional=True, metavar="COMMAND", help=f"One of {', '.join(COMMANDS)}.")
    run: Path = option(positional=True, metavar="RUN")
    """Run directory."""
    step: int | None = None
    """consolidate: of this step (default: the newest whole one)."""
    out: Path | None = None
    """consolidate: new directory (default: RUN/consolidated/step_N)."""
    keep: int | None = None
    """prune: how many to leave (default: 1)."""


def main(argv: list[str]) -> int:
    return run_command("maelm-fast checkpoint", COMMANDS, lambda name: partial(_do, name), argv)


def _do(name: str, argv: list[str]) -> int:
    options: Options = parse("checkpoint", [name, *argv], Options, examples=EXAMPLES)
    for given, command in (("step", "consolidate"), ("out", "consolidate"), ("keep", "prune")):
        require(getattr(options, given) is None or name == command, f"--{given} is for 'checkpoint {command}'")
    {"list": _list, "verify": _verify, "consolidate": _consolidate, "prune": _prune}[name](options)
    return 0


def _run(path: Path) -> RunDir:
    from maelm_fast.training.rundir import RunDir

    run = RunDir(path)
    run.read_config()
    require(bool(run.steps()), f"{path}: the run has no checkpoint yet")
    return run


def _list(options: Options) -> None:
    run = _run(options.run)
    print(f"{'step':>12}  {'MB':>10}  written by")
    for step in run.steps():
        files = list(run.checkpoint(step).iterdir())
        processes = max(1, sum(file.name.startswith("shard-") for file in files))
        size = sum(file.stat().st_size for file in files) / 1e6
        print(f"{step:>12,}  {size:>10,.1f}  {processes} process{'es' if processes > 1 else ''}")


def _verify(options: Options) -> None:
    from maelm_fast.training.files import damage

    run = _run(options.run)
    faults = {step: damage(run.checkpoint(step)) for step in run.steps()}
    for step, fault in faults.items():
        print(f"{run.checkpoint(step)}: {'whole' if fault is None else f'damaged: {fault}'}")
    damaged = [step for step, fault in faults.items() if fault is not None]
    if damaged:
        remedy = "a run goes on from the newest whole one; 'checkpoint prune' removes the others"
        raise UserError(f"{len(damaged)} of {len(faults)} checkpoints are damaged; {remedy}")


def _consolidate(options: Options) -> None:
    from maelm_fast.data.files import writing
    from maelm_fast.training.checkpoint import MODEL, consolidate

    run = _run(options.run)
    place = run.whole_checkpoint(options.step)
    require(not (place / MODEL).exists(), f"{place} has {MODEL}: it was written by one process")
    out = options.out or run.path / "consolidated" / place.name
    require(not out.exists(), f"{out} exists already; choose another --out")
    with writing(out, "choose another --out"):
        consolidate(place, out)
    print(f"{place} as of one process: {out}")


def _prune(options: Options) -> None:
    from maelm_fast.training.files import damage
    from maelm_fast.work import lock

    keep = 1 if options.keep is None else options.keep
    require(keep >= 1, f"--keep must be at least 1, not {keep}")
    run = _run(options.run)
    with lock(run.path / ".lock", remove=True) as ours:
        require(ours, f"{run.path} is in use by another process")
        kept: list[int] = []
        for step in reversed(run.steps()):
            if len(kept) < keep and damage(run.checkpoint(step)) is None:
                kept.append(step)
        require(bool(kept), f"{run.checkpoints}: every checkpoint is damaged; nothing was removed")
        gone = [run.checkpoint(step) for step in run.steps() if step not in kept]
        gone += run.checkpoints.glob(".step_*.tmp")
        for path in gone:
            shutil.rmtree(path)
            print(f"removed {path}")
    print(f"kept: {', '.join(f'step {step:,}' for step in sorted(kept))}")
