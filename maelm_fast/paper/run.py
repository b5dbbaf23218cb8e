"""Runs the parts of a plan, in this process, resumably, sharing them with any other process on the same directory.

    OUT/ledger.jsonl    what is finished, with its results (ledger.py)
    OUT/locks/          a lock per part, held while it is worked on
    OUT/stores/         token stores made from text
    OUT/runs/           ordinary run directories, their names ending in the cell's key
    OUT/states/         of fine-tuning under way, for going on after a kill; removed when it is finished
    OUT/<experiment>/   REPORT.md and figure.png

Killed anywhere, the same command goes on: finished parts are skipped, pretraining goes on from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maelm_fast.analysis.effective_rank import measure
from maelm_fast.config import require
from maelm_fast.data.prepare import PrepareConfig, prepare
from maelm_fast.data.readers import COMPRESSIONS, FORMATS
from maelm_fast.data.token_store import MANIFEST_FILE, Manifest, TokenStore
from maelm_fast.errors import UserError
from maelm_fast.finetuning.run import Stopped as StoppedTraining
from maelm_fast.paper.finetune import Worker, outcome
from maelm_fast.paper.plan import PRETRAINING, Cell, Plan, rank_stage, the_store_fits
from maelm_fast.paper.results import BASELINES, Results
from maelm_fast.paper.scales import Corpus
from maelm_fast.training.hardware import choose_device
from maelm_fast.training.job import pretrain
from maelm_fast.training.ledger import Ledger, lock
from maelm_fast.training.rundir import RunDir, load_run

log = logging.getLogger(__name__)

_POLL_SECONDS = 1.0  # while another process works on what is left


class Stopped(Exception):
    """A signal asked for a stop; all that was finished is in the ledger, and pretraining in its checkpoint."""


def is_store(data: str) -> bool:
    return (Path(data) / MANIFEST_FILE).is_file()


def place_data(plan: Plan, data: str, out: Path) -> Plan:
    """The plan on token stores: the given one, or one for each corpus of the plan made from the text."""
    if is_store(data):
        manifest = TokenStore.open(data, "train").manifest
        the_store_fits(plan, manifest.seq_len, manifest.cased, data)
        return plan.with_data(dict.fromkeys(plan.corpora, (data, manifest.fingerprint, manifest.vocab_size)))
    stores = {}
    for corpus in plan.corpora:
        path = store_path(out, corpus)
        with lock(out / "locks" / f"store-{corpus.name}.lock", wait=True):
            manifest = prepare(_prepare_config(data, corpus, path), lambda line: print(line, flush=True))
        stores[corpus] = (str(path), manifest.fingerprint, manifest.vocab_size)
    return plan.with_data(stores)


def store_path(out: Path, corpus: Corpus) -> Path:
    """Of the token store made from text."""
    return out / "stores" / corpus.name


def _prepare_config(data: str, corpus: Corpus, out: Path) -> PrepareConfig:
    """Of a directory, files with "validation" in their names are the validation split, if there are any."""
    inputs: tuple[str, ...] = (data,)
    validation: tuple[str, ...] = ()
    if Path(data).is_dir():
        endings = tuple(f + c for f in FORMATS for c in ("", *COMPRESSIONS))
        files = sorted(str(p) for p in Path(data).iterdir() if p.name.endswith(endings))
        require(bool(files), f"{data} is neither a token store nor a directory of text ({', '.join(FORMATS)})")
        validation = tuple(f for f in files if "validation" in Path(f).name)
        inputs = tuple(f for f in files if f not in validation)
    return PrepareConfig(
        inputs=inputs,
        validation_inputs=validation,
        out=out,
        vocab_size=corpus.vocab_size,
        cased=corpus.cased,
        seq_len=corpus.seq_len,
        validation=corpus.validation,
    )


Identity = tuple[str, str, str]
"""Of a part, as the ledger has it: the cell's key, the stage, the hash of all that decides the result."""


@dataclass(frozen=True)
class Part:
    """One stage of a cell. All but pretraining need that one first."""

    cell: Cell
    stage: str
    config: str

    @property
    def identity(self) -> Identity:
        return self.cell.key, self.stage, self.config


def run_plan(plan: Plan, out: Path) -> None:
    """Works until no part of the plan is left undone or untried since now, by this process or another.

    Parts that fail are recorded in the ledger and cost only themselves; without its pretraining a cell has no more
    parts. Raises Stopped after SIGTERM or SIGINT."""
    ledger, since = Ledger(out), len(Ledger(out).rows())
    worker = Worker(plan.found, out) if plan.found is not None else None
    with _stops():
        if worker is not None:
            _baselines(plan, worker, ledger, out)
        _tell_finished(plan, ledger)
        while waiting := _waiting(plan, *_ended(ledger, since)):
            for part in waiting:
                with lock(out / "locks" / f"{part.config}.lock") as ours:
                    if ours and not any(part.identity in ended for ended in _ended(ledger, since)):
                        _work(part, plan, ledger, out, worker)
                if ours:
                    break  # with a fresh look at what others have finished meanwhile
            else:
                time.sleep(_POLL_SECONDS)


def _ended(ledger: Ledger, since: int) -> tuple[set[Identity], set[Identity]]:
    """(finished, failed). since: rows the ledger had when this process began; what failed before is tried again."""
    finished, failed = set(), set()
    for number, row in enumerate(ledger.rows()):
        identity = row["key"], row["stage"], row["config"]
        if "result" in row:
            finished.add(identity)
        elif number >= since:
            failed.add(identity)
    return finished, failed


def _waiting(plan: Plan, finished: set[Identity], failed: set[Identity]) -> list[Part]:
    """What can be taken up, or is being worked on by others, in order."""
    waiting = []
    for cell in plan.runs:
        first, *rest = (Part(cell, stage, config) for stage, config in cell.stages.items())
        parts = rest if first.identity in finished else [first]
        waiting += [part for part in parts if part.identity not in finished | failed]
    return waiting


def _tell_finished(plan: Plan, ledger: Ledger) -> None:
    unfinished = {cell.key for cell in Results(plan, ledger).unfinished()}
    for number, cell in enumerate(plan.runs, start=1):
        if cell.key not in unfinished:
            print(f"[{number}/{len(plan.runs)}] {cell.title}: finished", flush=True)


def _baselines(plan: Plan, worker: Worker, ledger: Ledger, out: Path) -> None:
    """Of every task, once. What they need is needed later too: a fault stops the command before anything is trained."""
    assert plan.found is not None
    with lock(out / "locks" / "baselines.lock", wait=True):
        for task, fingerprint in plan.found.fingerprints.items():
            if ledger.result(task, BASELINES, fingerprint) is None:
                row = {"key": task, "stage": BASELINES, "config": fingerprint, "result": worker.baselines(task)}
                ledger.append({**row, "time": _now()})


def _work(part: Part, plan: Plan, ledger: Ledger, out: Path, worker: Worker | None) -> None:
    """Its lock must be held."""
    cell, stage = part.cell, part.stage
    place = f"[{plan.runs.index(cell) + 1}/{len(plan.runs)}] {cell.title}"
    run = run_dir(out, cell)
    print(f"\n{place}: {stage}", flush=True)
    row: dict[str, Any] = {"key": cell.key, "stage": stage, "config": part.config, "label": cell.row.label,
                           "seed": cell.config.seed, "run": run.path.name}  # fmt: skip
    try:
        row["result"] = _stage(cell, stage, run, worker)
    except Stopped:
        raise
    except UserError as error:
        row["error"] = str(error)
    except Exception as error:  # whatever it is must not cost the other parts their turn; the log has the trace
        log.exception("%s: %s", cell.title, stage)
        row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    ledger.append({**row, "time": _now()})
    if "error" in row:
        print(f"{place}: failed: {row['error']}", flush=True)
    elif stage in (unit.stage for unit in cell.units):
        print(f"{place}: {outcome(row['result'])}", flush=True)
    if worker is not None and worker.asked_to_stop:
        raise Stopped


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _stage(cell: Cell, stage: str, run: RunDir, worker: Worker | None) -> dict[str, Any]:
    if stage == PRETRAINING:
        pretrain(cell.preset, cell.config, cell.data, str(run.path))
        if not _finished(run):
            raise Stopped
        return pretraining_result(run)
    for step in cell.rank_steps:
        if stage == rank_stage(step):
            return _ranks(cell, run, step)
    unit = next(unit for unit in cell.units if unit.stage == stage)
    assert worker is not None
    try:
        return worker.do(unit, cell, run)
    except StoppedTraining:
        raise Stopped from None


def run_dir(out: Path, cell: Cell) -> RunDir:
    """Where the cell's run is, under whatever name an experiment gave it first, or where it will be."""
    there = next((out / "runs").glob(f"*-{cell.key}"), None)
    return RunDir(there or out / "runs" / f"{cell.name}-{cell.key}")


def _finished(run: RunDir) -> bool:
    """Whether pretraining came to its end, not to a signal."""
    checkpoint = run.last_whole_checkpoint()
    return checkpoint is not None and bool(json.loads((checkpoint / "state.json").read_text())["finished"])


def pretraining_result(run: RunDir) -> dict[str, Any]:
    """What the run's own files say of it, over all its starts."""
    rows = list(run.metrics())
    environment = json.loads(run.env_file.read_text())[-1]
    evaluations = [row for row in rows if row["kind"] == "validation"]
    steps, seconds = training_seconds(rows)
    keys = ("step", "tokens", "val_loss", "val_accuracy", "unigram_nats")
    return {
        **{key: evaluations[-1][key] for key in keys},
        "seconds": seconds[-1],
        "curve": [
            {
                **{key: row[key] for key in ("step", "tokens", "val_loss")},
                "seconds": float(np.interp(row["step"], steps, seconds)),
            }
            for row in evaluations
        ],
        **{key: environment[key] for key in ("device", "precision", "threads", "commit")},
        "torch": environment["packages"]["torch"],
    }


def training_seconds(rows: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    """(steps, seconds of training up to each), evaluation and saving left out: tokens over the logged rate, summed."""
    seconds, tokens = 0.0, 0
    steps, sums = [], []
    for row in rows:
        if row["kind"] == "train":
            seconds += (row["tokens"] - tokens) / row["tokens_per_s"]
            tokens = row["tokens"]
            steps.append(row["step"])
            sums.append(seconds)
    return steps, sums


def _ranks(cell: Cell, run: RunDir, step: int) -> dict[str, Any]:
    """Effective ranks of one checkpoint by input, a list over the layers; all of the report is in the run directory."""
    loaded = load_run(run.path, step)
    loaded.model.to(choose_device(loaded.config.runtime))
    report = measure(loaded, TokenStore.open(cell.data, "validation"), samples=cell.rank_samples)
    report.write(run.report / f"effective_rank-step_{step}.json")
    return {
        "step": step,
        "tau": report.taus[0],
        "hidden_size": report.hidden_size,
        "samples": report.samples,
        "ranks": {entry.name: entry.ranks[0] for entry in report.inputs},
        "rows": {entry.name: entry.tokens for entry in report.inputs},
    }


@contextlib.contextmanager
def _stops() -> Iterator[None]:
    """SIGTERM and SIGINT end the work where it stands. While a model trains, the trainer takes them and saves first."""

    def stop(number: int, _: object) -> None:
        raise Stopped

    previous: dict[signal.Signals, Callable[..., Any] | int | None] = {}
    try:
        for s in (signal.SIGTERM, signal.SIGINT):
            previous[s] = signal.signal(s, stop)
        yield
    finally:
        for s, handler in previous.items():
            signal.signal(s, handler)


def manifests(plan: Plan) -> dict[str, Manifest]:
    """By path, of the stores that the plan was placed on."""
    return {cell.data: Manifest.read(Path(cell.data)) for cell in plan.cells}
