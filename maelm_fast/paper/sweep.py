"""A grid x seeds over tasks and models: planned as runs, each known by the hash of all that decides its result.

    OUT/ledger.jsonl   what is finished or failed (work.py)
    OUT/states/        where a run that was stopped goes on from; gone when it is finished
    OUT/SWEEP.md, results.csv, sweep.png   (sweep_report.py)

Any number of processes pull runs from one directory. Seeds are the outermost order, models the innermost: a sweep that
is stopped early has every cell once, for all models alike, rather than a few cells five times.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from maelm_fast.config import require
from maelm_fast.encoders import Engine
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.examples import TaskData
from maelm_fast.finetuning.fingerprint import (
    Origin,
    data_fingerprint,
    deciding,
    digest,
    model_fingerprint,
    resolve_step,
)
from maelm_fast.finetuning.job import make_problem
from maelm_fast.finetuning.problem import Problem
from maelm_fast.finetuning.run import train
from maelm_fast.paper.grids import Cell, Grid
from maelm_fast.stop import Stop, StopSignals
from maelm_fast.training.rundir import RunDir
from maelm_fast.work import Identity, Ledger, Unit, Worker, work

STAGE = "finetuning"


@dataclass(frozen=True)
class Model:
    """An encoder to fine-tune: a row of the table."""

    label: str
    path: str
    step: int | None
    """Checkpoint of a run directory; None for a Hugging Face one."""
    random_init: bool
    fingerprint: str


@dataclass(frozen=True)
class Search:
    """A task and the cells of its grid that are to run."""

    data: TaskData
    fingerprint: str
    cells: tuple[Cell, ...]
    grid_size: int


@dataclass(frozen=True)
class Run(Unit):
    """A cell with a seed, for one model."""

    model: Model
    search: Search
    cell: Cell
    config: FinetuneConfig
    key: str

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def title(self) -> str:
        task = self.search.data.task.title
        return f"{self.model.label}, {task}, cell {self.cell.number} ({self.cell.title}), seed {self.seed}"

    @property
    def identity(self) -> Identity:
        return self.key, STAGE, self.key

    @property
    def about(self) -> dict[str, Any]:
        cell = {"cell": self.cell.number, "seed": self.seed}
        return {"model": self.model.label, "task": self.search.data.task.name, **cell}


@dataclass(frozen=True)
class Sweep:
    grid: Grid
    models: tuple[Model, ...]
    searches: tuple[Search, ...]
    seeds: int
    budget: int | None
    engine: Engine

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """In the order in which they are taken up."""
        return tuple(
            self._run(model, search, cell, seed)
            for seed in range(self.seeds)
            for search in self.searches
            for cell in search.cells
            for model in self.models
        )

    def engine_of(self, model: Model) -> Engine:
        """A run of ours has one engine only."""
        return "packed" if RunDir(model.path).exists else self.engine

    def of(self, model: Model, search: Search) -> list[Run]:
        return [run for run in self.runs if run.model == model and run.search is search]

    def _run(self, model: Model, search: Search, cell: Cell, seed: int) -> Run:
        config, engine = replace(cell.config, seed=seed), self.engine_of(model)
        key = digest(
            search.data.task.name, deciding(config), model.fingerprint, model.random_init, engine, search.fingerprint
        )
        return Run(model, search, cell, config, key)


def make_model(label: str, path: str, step: int | None = None, random_init: bool = False) -> Model:
    """step: of a run directory, its checkpoint; by default the newest whole one of now. Raises UserError if there is no
    such model."""
    if not random_init:
        step = resolve_step(path, step)
    require(step is None or not random_init, f"--random-init {path}: random weights have no step: leave it out")
    return Model(label, path, step, random_init, model_fingerprint(path, step, random_init))


def require_labels(models: Sequence[Model]) -> None:
    """Raises UserError if two have the same."""
    labels = [model.label for model in models]
    for label in labels:
        require(labels.count(label) == 1, f"two models are called '{label}': name them as --model LABEL=DIR")


def make_sweep(
    grid: Grid,
    models: Sequence[Model],
    tasks: Sequence[TaskData],
    seeds: int = 5,
    budget: int | None = None,
    engine: Engine = "auto",
    base: FinetuneConfig | None = None,
) -> Sweep:
    """budget: cells of each task's grid at most. base: fields that the grid does not name. Raises UserError."""
    require(seeds >= 1, f"--seeds must be at least 1, not {seeds}")
    require(budget is None or budget >= 1, f"--budget must be at least 1 cell per task, not {budget}")
    require_labels(models)
    names = [data.task.name for data in tasks]
    for name in names:
        require(names.count(name) == 1, f"task {name} is given twice")
    searches = tuple(
        Search(data, data_fingerprint(data), tuple(grid.cells(data.task, base, budget)), grid.size(data.task))
        for data in tasks
    )
    return Sweep(grid, tuple(models), searches, seeds, budget, engine)


@dataclass(frozen=True)
class Done:
    """What the ledger says of a sweep's runs."""

    results: dict[str, dict[str, Any]]
    """Run key -> Result.to_dict() of a finished run, with "seconds_in_all": loading and tokenising counted."""
    errors: dict[str, str]
    """Run key -> why it failed when it was last tried; not of runs that were finished since."""

    def unfinished(self, sweep: Sweep) -> list[Run]:
        return [run for run in sweep.runs if run.key not in self.results]


def read_done(out: Path) -> Done:
    results, errors = Ledger(out).ended()
    return Done(
        {key: result for (key, stage, _), result in results.items() if stage == STAGE},
        {key: error for (key, stage, _), error in errors.items() if stage == STAGE},
    )


def estimate(sweep: Sweep, done: Done) -> tuple[float, int]:
    """(seconds for the unfinished runs in one process, how many of them cannot be estimated).

    By the seconds per epoch of finished runs of the same model and task, of the same batch size if there are any."""
    rates: dict[tuple[Any, ...], list[float]] = {}
    for run in sweep.runs:
        if (result := done.results.get(run.key)) is not None:
            rate = result["seconds_in_all"] / run.config.epochs
            same = (run.model.label, run.search.data.task.name)
            rates.setdefault(same, []).append(rate)
            rates.setdefault((*same, run.config.batch_size), []).append(rate)
    seconds, unknown = 0.0, 0
    for run in done.unfinished(sweep):
        same = (run.model.label, run.search.data.task.name)
        known = rates.get((*same, run.config.batch_size)) or rates.get(same)
        if known:
            seconds += statistics.median(known) * run.config.epochs
        else:
            unknown += 1
    return seconds, unknown


AfterRun = Callable[[Sweep, Path], None]
Problems = dict[tuple[Any, ...], Problem]
"""Tokenised tasks of a process, by what they depend on."""


def run_sweep(sweep: Sweep, out: Path, workers: int = 1, after_run: AfterRun | None = None) -> None:
    """Works until no run is left undone or untried since now, in this process or in `workers` processes of its own.

    after_run: called with `sweep` and `out` after each run, whichever process it ran in; must be a module's function.
    Failed runs are recorded and do not stop the others. Raises Stopped after SIGTERM or SIGINT, UserError if a worker
    died."""
    gpus = sweep.runs[0].config.device != "cpu"
    work(sweep.runs, _Worker(sweep, out, after_run), out, processes=workers, gpus=gpus)


@dataclass
class _Worker(Worker[Run]):
    sweep: Sweep
    out: Path
    after_run: AfterRun | None
    problems: Problems = field(default_factory=dict)

    def do(self, run: Run, stop: StopSignals) -> dict[str, Any]:
        return _train(self.sweep, run, self.out, self.problems, stop)

    def after(self, run: Run, row: dict[str, Any]) -> str:
        if "result" in row:
            shutil.rmtree(self.out / "states" / run.key, ignore_errors=True)
        if self.after_run is not None:
            self.after_run(self.sweep, self.out)
        if "error" in row:
            return ""
        result = row["result"]
        return f"{result['metric']} {result['best']:.1f}, {result['seconds_in_all']:.0f} s"


def _train(sweep: Sweep, run: Run, out: Path, problems: Problems, stop: Stop) -> dict[str, Any]:
    """Result.to_dict(), and the seconds with loading and tokenising."""
    start = time.perf_counter()
    model, config = run.model, run.config
    encoder = Origin(model.path, model.step, sweep.engine_of(model), model.random_init).load(config.dropout, run.seed)
    lengths = (config.max_length, config.question_length, config.stride, config.answer_length)
    tokenised = (run.search.fingerprint, model.path, *lengths)
    if tokenised not in problems:
        problems[tokenised] = make_problem(run.search.data, encoder, config)
    state = out / "states" / run.key
    result, _, _ = train(problems[tokenised], encoder, config, resume=state, keep_best=False, stop=stop)
    return {**result.to_dict(), "seconds_in_all": max(time.perf_counter() - start, result.seconds)}
