"""Runs the cells of a plan, in this process, resumably, sharing the work with any other process on the same directory.

    OUT/ledger.jsonl    what is finished, with its results (ledger.py)
    OUT/locks/          a lock per cell, held while it is worked on
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
from pathlib import Path
from typing import Any

import numpy as np

from maelm_fast.analysis.effective_rank import measure
from maelm_fast.analysis.live import live_metric
from maelm_fast.config import require
from maelm_fast.data.prepare import PrepareConfig, prepare
from maelm_fast.data.readers import COMPRESSIONS, FORMATS
from maelm_fast.data.token_store import MANIFEST_FILE, Manifest, TokenStore
from maelm_fast.errors import UserError
from maelm_fast.experiments.finetune import Worker, outcome
from maelm_fast.experiments.plan import PRETRAINING, Cell, Plan, rank_stage, the_store_fits
from maelm_fast.experiments.results import BASELINES
from maelm_fast.experiments.scales import Corpus
from maelm_fast.finetuning.run import Stopped as StoppedTraining
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


def run_plan(plan: Plan, out: Path) -> None:
    """Works until no cell of the plan is left undone or untried, by this process or another.

    Cells that fail are recorded in the ledger and do not stop the others. Raises Stopped after SIGTERM or SIGINT."""
    ledger, runs = Ledger(out), plan.runs
    worker = Worker(plan.found, out) if plan.found is not None else None
    waiting = list(runs)
    with _stops():
        if worker is not None:
            _baselines(plan, worker, ledger, out)
        while waiting:
            busy = []
            for cell in waiting:
                with lock(out / "locks" / f"{cell.key}.lock") as ours:
                    if ours:
                        _work(cell, ledger, out, f"[{runs.index(cell) + 1}/{len(runs)}]", worker)
                    else:
                        busy.append(cell)
            if len(busy) == len(waiting):
                time.sleep(_POLL_SECONDS)
            waiting = busy


def _baselines(plan: Plan, worker: Worker, ledger: Ledger, out: Path) -> None:
    """Of every task, once. What they need is needed later too: a fault stops the command before anything is trained."""
    assert plan.found is not None
    with lock(out / "locks" / "baselines.lock", wait=True):
        for task, fingerprint in plan.found.fingerprints.items():
            if ledger.result(task, BASELINES, fingerprint) is None:
                row = {"key": task, "stage": BASELINES, "config": fingerprint, "result": worker.baselines(task)}
                ledger.append({**row, "time": _now()})


def _work(cell: Cell, ledger: Ledger, out: Path, place: str, worker: Worker | None) -> None:
    """The stages of a cell that the ledger does not have. Its lock must be held. Without pretraining there is no more;
    any other stage that fails costs only itself."""
    done = {(row["stage"], row["config"]) for row in ledger.rows() if row["key"] == cell.key and "result" in row}
    todo = [stage for stage in cell.stages.items() if stage not in done]
    if not todo:
        print(f"{place} {cell.title}: finished", flush=True)
        return
    run = run_dir(out, cell)
    for stage, config in todo:
        print(f"\n{place} {cell.title}: {stage}", flush=True)
        row: dict[str, Any] = {"key": cell.key, "stage": stage, "config": config, "label": cell.row.label,
                               "seed": cell.config.seed, "run": run.path.name}  # fmt: skip
        try:
            row["result"] = _stage(cell, stage, run, worker)
        except Stopped:
            raise
        except UserError as error:
            row["error"] = str(error)
        except Exception as error:  # whatever it is must not cost the other stages their turn; the log has the trace
            log.exception("%s: %s", cell.title, stage)
            row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        ledger.append({**row, "time": _now()})
        if "error" in row:
            print(f"{place} {cell.title}: failed: {row['error']}", flush=True)
            if stage == PRETRAINING:
                return
        elif stage in (unit.stage for unit in cell.units):
            print(f"{place} {cell.title}: {outcome(row['result'])}", flush=True)
        if worker is not None and worker.asked_to_stop:
            raise Stopped


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _stage(cell: Cell, stage: str, run: RunDir, worker: Worker | None) -> dict[str, Any]:
    if stage == PRETRAINING:
        pretrain(cell.preset, cell.config, cell.data, str(run.path), live_metric=live_metric)
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
