"""maelm-fast checkpoint: a run's checkpoints listed, compared with their checksums, put together, removed."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
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
LIST_EXAMPLES = """
    maelm-fast checkpoint list runs/base
    maelm-fast checkpoint list ~/runs/tiny
"""
VERIFY_EXAMPLES = """
    maelm-fast checkpoint verify runs/base
    maelm-fast checkpoint verify ~/runs/tiny
"""
CONSOLIDATE_EXAMPLES = """
    maelm-fast checkpoint consolidate runs/base
    maelm-fast checkpoint consolidate runs/base --step 50000 --out base-50000
"""
PRUNE_EXAMPLES = """
    maelm-fast checkpoint prune runs/base
    maelm-fast checkpoint prune runs/base --keep 3
"""


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """The checkpoints of a run, without reading them."""

    run: Path = option(positional=True, metavar="RUN")
    """Run directory."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Compares every checkpoint of a run with its checksums; exit code 2 if one is damaged."""

    run: Path = option(positional=True, metavar="RUN")
    """Run directory."""


@dataclass(frozen=True, kw_only=True)
class ConsolidateOptions:
    """Writes model.safetensors and optimizer.safetensors from the shares of several processes. Needed for other
    programs only: every command here reads both."""

    run: Path = option(positional=True, metavar="RUN")
    """Run directory."""
    step: int | None = None
    """Default: of the newest whole one."""
    out: Path | None = None
    """New directory (default: RUN/consolidated/step_N)."""


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """Removes all but the newest whole checkpoints of a run, and what was damaged or not finished."""

    run: Path = option(positional=True, metavar="RUN")
    """Run directory."""
    keep: int = 1
    """How many to leave."""


def main(argv: list[str]) -> int:
    functions = {"list": _list, "verify": _verify, "consolidate": _consolidate, "prune": _prune}
    return run_command("maelm-fast checkpoint", COMMANDS, functions.__getitem__, argv)


def _run(path: Path) -> RunDir:
    from maelm_fast.training.rundir import RunDir

    run = RunDir(path)
    run.read_config()
    require(bool(run.steps()), f"{path}: the run has no checkpoint yet")
    return run


def _list(argv: list[str]) -> int:
    options: ListOptions = parse("checkpoint list", argv, ListOptions, examples=LIST_EXAMPLES)
    run = _run(options.run)
    print(f"{'step':>12}  {'MB':>10}  written by")
    for step in run.steps():
        files = list(run.checkpoint(step).iterdir())
        processes = max(1, sum(file.name.startswith("shard-") for file in files))
        size = sum(file.stat().st_size for file in files) / 1e6
        print(f"{step:>12,}  {size:>10,.1f}  {processes} process{'es' if processes > 1 else ''}")
    return 0


def _verify(argv: list[str]) -> int:
    from maelm_fast.training.files import damage

    options: VerifyOptions = parse("checkpoint verify", argv, VerifyOptions, examples=VERIFY_EXAMPLES)
    run = _run(options.run)
    faults = {step: damage(run.checkpoint(step)) for step in run.steps()}
    for step, fault in faults.items():
        print(f"{run.checkpoint(step)}: {'whole' if fault is None else f'damaged: {fault}'}")
    damaged = [step for step, fault in faults.items() if fault is not None]
    if damaged:
        remedy = "a run goes on from the newest whole one; 'checkpoint prune' removes the others"
        raise UserError(f"{len(damaged)} of {len(faults)} checkpoints are damaged; {remedy}")
    return 0


def _consolidate(argv: list[str]) -> int:
    from maelm_fast.data.files import writing
    from maelm_fast.training.checkpoint import MODEL, consolidate

    options: ConsolidateOptions = parse(
        "checkpoint consolidate", argv, ConsolidateOptions, examples=CONSOLIDATE_EXAMPLES
    )
    run = _run(options.run)
    place = run.whole_checkpoint(options.step)
    require(not (place / MODEL).exists(), f"{place} has {MODEL}: it was written by one process")
    out = options.out or run.path / "consolidated" / place.name
    require(not out.exists(), f"{out} exists already; choose another --out")
    with writing(out, "choose another --out"):
        consolidate(place, out)
    print(f"{place} as of one process: {out}")
    return 0


def _prune(argv: list[str]) -> int:
    from maelm_fast.training.files import damage
    from maelm_fast.work import lock

    options: PruneOptions = parse("checkpoint prune", argv, PruneOptions, examples=PRUNE_EXAMPLES)
    require(options.keep >= 1, f"--keep must be at least 1, not {options.keep}")
    run = _run(options.run)
    with lock(run.path / ".lock", remove=True) as ours:
        require(ours, f"{run.path} is in use by another process")
        kept: list[int] = []
        for step in reversed(run.steps()):
            if len(kept) < options.keep and damage(run.checkpoint(step)) is None:
                kept.append(step)
        require(bool(kept), f"{run.checkpoints}: every checkpoint is damaged; nothing was removed")
        gone = [run.checkpoint(step) for step in run.steps() if step not in kept]
        gone += run.checkpoints.glob(".step_*.tmp")
        for path in gone:
            shutil.rmtree(path)
            print(f"removed {path}")
    print(f"kept: {', '.join(f'step {step:,}' for step in sorted(kept))}")
    return 0
