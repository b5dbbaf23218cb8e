"""A grid x seeds over tasks and models: planned as runs, each known by the hash of all that decides its result.

    OUT/ledger.jsonl   what is finished or failed (work.py)
    OUT/states/        where a run that was stopped goes on from; gone when it is finished
    OUT/SWEEP.md, results.csv, sweep.png   (sweep_report.py)

Any number of processes pull runs from one directory. Seeds are the outermost order, models the innermost: a sweep that
is stopped early has every cell once, for all models alike, rather than a few cells five times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from maelm_fast.config import require
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.examples import TaskData
from maelm_fast.finetuning.fingerprint import Origin, deciding, digest
from maelm_fast.paper.grids import Cell, Grid
from maelm_fast.paper.trials import Trials, require_labels
from maelm_fast.stop import StopSignals
from maelm_fast.training.rundir import RunDir
from maelm_fast.work import Identity, Unit, Worker, work

STAGE = "finetuning"


@dataclass(frozen=True)
class Run(Unit):
    """A cell with a seed, for one model."""

    model: Origin
    data: TaskData
    cell: Cell
    config: FinetuneConfig
    engine: str

    @property
    def seed(self) -> int:
        return self.config.seed

    @cached_property
    def key(self) -> str:
        model, task, data = self.model, self.data.task.name, self.data.fingerprint
        return digest(task, deciding(self.config), model.fingerprint, model.random_init, self.engine, data)

    @property
    def title(self) -> str:
        task = self.data.task.title
        return f"{self.model.label}, {task}, cell {self.cell.number} ({self.cell.title}), seed {self.seed}"

    @property
    def identity(self) -> Identity:
        return self.key, STAGE, self.key

    @property
    def about(self) -> dict[str, Any]:
        cell = {"cell": self.cell.number, "seed": self.seed}
        return {"model": self.model.label, "task": self.data.task.name, **cell}


@dataclass(frozen=True)
class Sweep:
    grid: Grid
    models: tuple[Origin, ...]
    tasks: tuple[TaskData, ...]
    cells: dict[str, list[Cell]]
    """Of each task's grid those that are to run."""
    seeds: int

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """In the order in which they are taken up."""
        engines = ["packed" if RunDir(model.path).exists else model.engine for model in self.models]  # ours have one
        return tuple(
            Run(model, data, cell, replace(cell.config, seed=seed), engine)
            for seed in range(self.seeds)
            for data in self.tasks
            for cell in self.cells[data.task.name]
            for model, engine in zip(self.models, engines, strict=True)
        )


def make_sweep(
    grid: Grid,
    models: Sequence[Origin],
    tasks: Sequence[TaskData],
    seeds: int = 5,
    budget: int | None = None,
    base: FinetuneConfig | None = None,
) -> Sweep:
    """budget: cells of each task's grid at most. base: fields that the grid does not name. Raises UserError."""
    require(seeds >= 1, f"--seeds must be at least 1, not {seeds}")
    require(budget is None or budget >= 1, f"--budget must be at least 1 cell per task, not {budget}")
    require_labels(models)
    names = [data.task.name for data in tasks]
    for name in names:
        require(names.count(name) == 1, f"task {name} is given twice")
    cells = {data.task.name: grid.cells(data.task, base, budget) for data in tasks}
    return Sweep(grid, tuple(models), tuple(tasks), cells, seeds)


Finished = Mapping[Identity, dict[str, Any]]
"""Of finished runs, by identity: Result.to_dict(), with "seconds_in_all": loading and tokenising counted."""


def estimate(sweep: Sweep, finished: Finished) -> tuple[float, int]:
    """(seconds for the unfinished runs in one process, how many of them cannot be estimated), by the seconds per epoch
    of finished runs of the same model and task."""
    rates: dict[tuple[Origin, str], list[float]] = {}
    for run in sweep.runs:
        if (result := finished.get(run.identity)) is not None:
            rates.setdefault((run.model, run.data.task.name), []).append(result["seconds_in_all"] / run.config.epochs)
    left = [((run.model, run.data.task.name), run.config.epochs) for run in sweep.runs if run.identity not in finished]
    known = [statistics.median(rates[kind]) * epochs for kind, epochs in left if kind in rates]
    return sum(known), len(left) - len(known)


def run_sweep(sweep: Sweep, out: Path, workers: int = 1) -> None:
    """Works until no run is left undone or untried since now, in this process or in `workers` processes of its own.

    Failed runs are recorded and do not stop the others. Raises Stopped after SIGTERM or SIGINT, UserError if a worker
    died."""
    gpus = sweep.runs[0].config.device != "cpu"
    work(sweep.runs, _Worker(Trials(out)), out, processes=workers, gpus=gpus)


@dataclass
class _Worker(Worker[Run]):
    trials: Trials

    def do(self, run: Run, stop: StopSignals) -> dict[str, Any]:
        """Result.to_dict(), and the seconds with loading and tokenising."""
        start = time.perf_counter()
        encoder = run.model.load(run.config.dropout, run.seed)
        result, _, _ = self.trials.finetune(encoder, run.data, run.config, run.key, stop, keep_best=False)
        return {**result.to_dict(), "seconds_in_all": max(time.perf_counter() - start, result.seconds)}

    def after(self, run: Run, row: dict[str, Any]) -> str:
        if "error" in row:
            return ""
        self.trials.finished(run.key)
        result = row["result"]
        return f"{result['metric']} {result['best']:.1f}, {result['seconds_in_all']:.0f} s"
