"""Runs the parts of a plan, in this process, resumably, sharing them with any other process on the same directory.

    OUT/ledger.jsonl    what is finished, with its results (work.py)
    OUT/stores/         token stores made from text
    OUT/runs/           ordinary run directories, their names ending in the cell's key
    OUT/states/         of fine-tuning under way, for going on after a kill; removed when it is finished
    OUT/<experiment>/   REPORT.md and figure.png

Killed anywhere, the same command resumes: finished parts are skipped, pretraining resumes from its last checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maelm_fast.analysis.effective_rank import measure
from maelm_fast.config import require
from maelm_fast.data.prepare import PrepareConfig, prepare
from maelm_fast.data.readers import COMPRESSIONS, FORMATS
from maelm_fast.data.token_store import MANIFEST_FILE, Manifest, TokenStore
from maelm_fast.paper.finetune import Downstream, outcome
from maelm_fast.paper.plan import PRETRAINING, Cell, Plan, rank_stage, the_store_fits
from maelm_fast.paper.results import BASELINES, Results
from maelm_fast.paper.scales import Corpus
from maelm_fast.stop import StopSignals
from maelm_fast.training.hardware import choose_device
from maelm_fast.training.job import pretrain
from maelm_fast.training.rundir import RunDir, load_run
from maelm_fast.work import Identity, Ledger, Unit, Worker, lock, work


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


@dataclass(frozen=True)
class Part(Unit):
    """One stage of a cell. All but pretraining need that one first."""

    cell: Cell
    stage: str
    config: str
    out: Path

    @property
    def identity(self) -> Identity:
        return self.cell.key, self.stage, self.config

    @property
    def title(self) -> str:
        return f"{self.cell.title}: {self.stage}"

    @property
    def about(self) -> dict[str, Any]:
        return {"label": self.cell.row.label, "seed": self.cell.config.seed, "run": self.run.path.name}

    @property
    def needs(self) -> Identity | None:
        return None if self.stage == PRETRAINING else (self.cell.key, PRETRAINING, self.cell.key)

    @property
    def run(self) -> RunDir:
        return run_dir(self.out, self.cell)


def run_plan(plan: Plan, out: Path) -> None:
    """Works until no part of the plan is left undone or untried since now, by this process or another.

    Parts that fail are recorded in the ledger and cost only themselves; without its pretraining a cell has no more
    parts. Raises Stopped after SIGTERM or SIGINT."""
    downstream = Downstream(plan.found, out) if plan.found is not None else None
    if downstream is not None:
        _baselines(plan, downstream, Ledger(out), out)
    _tell_finished(plan, Ledger(out))
    parts = [Part(cell, stage, config, out) for cell in plan.runs for stage, config in cell.stages.items()]
    work(parts, _Worker(downstream), out)


def _tell_finished(plan: Plan, ledger: Ledger) -> None:
    unfinished = {cell.key for cell in Results(plan, ledger).unfinished()}
    for number, cell in enumerate(plan.runs, start=1):
        if cell.key not in unfinished:
            print(f"[{number}/{len(plan.runs)}] {cell.title}: finished", flush=True)


def _baselines(plan: Plan, downstream: Downstream, ledger: Ledger, out: Path) -> None:
    """Of every task, once. What they need is needed later too: a fault stops the command before anything is trained."""
    assert plan.found is not None
    with lock(out / "locks" / "baselines.lock", wait=True):
        for task, fingerprint in plan.found.fingerprints.items():
            if ledger.result(task, BASELINES, fingerprint) is None:
                row = {"key": task, "stage": BASELINES, "config": fingerprint, "result": downstream.baselines(task)}
                ledger.append(row)


@dataclass
class _Worker(Worker[Part]):
    downstream: Downstream | None

    def do(self, part: Part, stop: StopSignals) -> dict[str, Any]:
        cell, run = part.cell, part.run
        if part.stage == PRETRAINING:
            pretrain(cell.preset, cell.config, cell.data, str(run.path))
            return pretraining_result(run)
        for step in cell.rank_steps:
            if part.stage == rank_stage(step):
                return _ranks(cell, run, step)
        unit = next(unit for unit in cell.units if unit.stage == part.stage)
        assert self.downstream is not None
        return self.downstream.do(unit, cell, run, stop)

    def after(self, part: Part, row: dict[str, Any]) -> str:
        return outcome(row["result"]) if "result" in row and part.stage in (u.stage for u in part.cell.units) else ""


def run_dir(out: Path, cell: Cell) -> RunDir:
    """Where the cell's run is, under whatever name an experiment gave it first, or where it will be."""
    there = next((out / "runs").glob(f"*-{cell.key}"), None)
    return RunDir(there or out / "runs" / f"{cell.name}-{cell.key}")


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


def manifests(plan: Plan) -> dict[str, Manifest]:
    """By path, of the stores that the plan was placed on."""
    return {cell.data: Manifest.read(Path(cell.data)) for cell in plan.cells}
