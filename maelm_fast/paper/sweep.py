"""A grid x seeds over tasks and models: planned as runs, each known by the hash of all that decides its result.

    OUT/ledger.jsonl   what is finished or failed (training/ledger.py)
    OUT/locks/         a lock per run, held while it is worked on
    OUT/states/        where a run that was stopped goes on from; gone when it is finished
    OUT/SWEEP.md, results.csv, sweep.png   (sweep_report.py)

Any number of processes pull runs from one directory. Seeds are the outermost order, models the innermost: a sweep that
is stopped early has every cell once, for all models alike, rather than a few cells five times.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from maelm_fast.config import require
from maelm_fast.errors import UserError
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.encoders import Engine, load_encoder
from maelm_fast.finetuning.examples import TaskData
from maelm_fast.finetuning.fingerprint import data_fingerprint, deciding, digest, model_fingerprint, resolve_step
from maelm_fast.finetuning.job import make_problem
from maelm_fast.finetuning.problem import Problem
from maelm_fast.finetuning.run import Stopped, train
from maelm_fast.paper.grids import Cell, Grid
from maelm_fast.training.ledger import Ledger, lock
from maelm_fast.training.rundir import RunDir
from maelm_fast.training.stop import StopSignals

log = logging.getLogger(__name__)

STAGE = "finetuning"
_POLL_SECONDS = 1.0  # while other processes work on all that is left


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
class Run:
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
    labels = [model.label for model in models]
    for label in labels:
        require(labels.count(label) == 1, f"two models are called '{label}': name them as --model LABEL=DIR")
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


def read_done(out: Path, since: int = 0) -> Done:
    """since: errors of this many rows at the ledger's beginning do not count."""
    results, errors = {}, {}
    for number, row in enumerate(Ledger(out).rows()):
        if row["stage"] != STAGE:
            continue
        if "result" in row:
            results[row["key"]] = row["result"]
        elif number >= since:
            errors[row["key"]] = row["error"]
    return Done(results, {key: error for key, error in errors.items() if key not in results})


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


def run_sweep(sweep: Sweep, out: Path, workers: int = 1, after_run: AfterRun | None = None) -> bool:
    """Works until no run is left undone or untried since now, in this process or in `workers` processes of its own.

    after_run: called with `sweep` and `out` after each run, whichever process it ran in; must be a module's function.
    Failed runs are recorded and do not stop the others. Returns False if SIGTERM or SIGINT ended it; raises UserError
    if a worker died."""
    require(workers >= 1, f"--workers must be at least 1, not {workers}")
    since = len(Ledger(out).rows())
    with StopSignals() as stop:
        if workers == 1:
            _pull(sweep, out, since, after_run, stop)
        else:
            _start_workers(sweep, out, since, workers, after_run, stop)
    return stop.received is None


def _pull(sweep: Sweep, out: Path, since: int, after_run: AfterRun | None, stop: StopSignals) -> None:
    problems: Problems = {}
    while stop.received is None:
        done = read_done(out, since)
        waiting = [run for run in done.unfinished(sweep) if run.key not in done.errors]
        if not waiting:
            return
        for run in waiting:
            with lock(out / "locks" / f"{run.key}.lock") as ours:
                if ours and not _tried(run, out, since):
                    _work(sweep, run, out, problems, stop)
                    if after_run is not None:
                        after_run(sweep, out)
            if ours:
                break  # with a fresh look at what others have finished meanwhile
        else:
            time.sleep(_POLL_SECONDS)


def _tried(run: Run, out: Path, since: int) -> bool:
    """Whether another process has finished or failed it between the last look and our lock."""
    done = read_done(out, since)
    return run.key in done.results or run.key in done.errors


def _work(sweep: Sweep, run: Run, out: Path, problems: Problems, stop: StopSignals) -> None:
    """One run, recorded in the ledger whatever comes of it, unless it was stopped. Its lock must be held."""
    place = f"[{sweep.runs.index(run) + 1}/{len(sweep.runs)}]"
    print(f"{place} {run.title}", flush=True)
    row: dict[str, Any] = {
        "key": run.key,
        "stage": STAGE,
        "config": run.key,
        "model": run.model.label,
        "task": run.search.data.task.name,
        "cell": run.cell.number,
        "seed": run.seed,
    }
    try:
        row["result"] = _train(sweep, run, out, problems, lambda: stop.received is not None)
    except Stopped as stopped:
        print(f"{place} {stopped}; the same command goes on from there", flush=True)
        return
    except UserError as error:
        row["error"] = str(error)
    except Exception as error:  # whatever it is must not cost the other runs their turn; the log has the trace
        log.exception("%s", run.title)
        row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    Ledger(out).append({**row, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")})
    if "error" in row:
        print(f"{place} failed: {row['error']}", flush=True)
        if torch.cuda.is_available():
            gc.collect()  # of a run that ended for want of memory, so that the next one has it
            torch.cuda.empty_cache()
    else:
        shutil.rmtree(out / "states" / run.key, ignore_errors=True)
        result = row["result"]
        print(f"{place} {result['metric']} {result['best']:.1f}, {result['seconds_in_all']:.0f} s", flush=True)


def _train(sweep: Sweep, run: Run, out: Path, problems: Problems, stop: Callable[[], bool]) -> dict[str, Any]:
    """Result.to_dict(), and the seconds with loading and tokenising."""
    start = time.perf_counter()
    model, config = run.model, run.config
    encoder = load_encoder(
        model.path,
        step=model.step,
        engine=sweep.engine_of(model),
        dropout=config.dropout,
        random_init=model.random_init,
        seed=run.seed,
    )
    lengths = (config.max_length, config.question_length, config.stride, config.answer_length)
    tokenised = (run.search.fingerprint, model.path, *lengths)
    if tokenised not in problems:
        problems[tokenised] = make_problem(run.search.data, encoder, config)
    state = out / "states" / run.key
    result, _, _ = train(problems[tokenised], encoder, config, resume=state, keep_best=False, stop=stop)
    return {**result.to_dict(), "seconds_in_all": max(time.perf_counter() - start, result.seconds)}


def _start_workers(
    sweep: Sweep, out: Path, since: int, workers: int, after_run: AfterRun | None, stop: StopSignals
) -> None:
    """Processes that each see one GPU, in turn, or have their share of the threads, and end with this one."""
    gpus = _gpus(sweep)
    threads = max(1, torch.get_num_threads() // workers)
    spawn = multiprocessing.get_context("spawn")
    processes = []
    for i in range(workers):
        changes = {"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} if gpus else {"OMP_NUM_THREADS": str(threads)}
        arguments = (sweep, out, since, threads, after_run)
        process = spawn.Process(target=_worker, args=arguments, name=f"worker {i + 1}")
        with _environment(changes):
            process.start()
        processes.append(process)
    told = False
    while alive := [process.sentinel for process in processes if process.is_alive()]:
        multiprocessing.connection.wait(alive, _POLL_SECONDS)
        if stop.received is not None and not told:
            told = True
            for process in processes:
                process.terminate()
    dead = [f"{process.name} (exit code {process.exitcode})" for process in processes if process.exitcode]
    asked = stop.received is not None  # a worker that was still starting ends by the signal
    require(asked or not dead, f"{', '.join(dead)} ended before all was done; the same command goes on")


def _gpus(sweep: Sweep) -> list[str]:
    """Those that this process may use, as CUDA_VISIBLE_DEVICES names them; none if the runs are for the CPU."""
    if sweep.runs[0].config.device == "cpu" or not torch.cuda.is_available():
        return []
    visible, count = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()
    return visible.split(",")[:count] if visible else [str(i) for i in range(count)]  # CUDA stops at a wrong one


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Variables that a process started inside the block begins with."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _worker(sweep: Sweep, out: Path, since: int, threads: int, after_run: AfterRun | None) -> None:
    with StopSignals() as stop:
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
        torch.set_num_threads(threads)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        try:
            _pull(sweep, out, since, after_run, stop)
        except UserError as error:
            sys.exit(f"error: {error}")


def _end_with_parent() -> None:
    """Even a parent that was killed and could say nothing takes its workers with it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
