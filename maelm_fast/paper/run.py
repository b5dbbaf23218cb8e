"""Runs the parts of a plan, in this process, resumably, sharing them with any other process on the same directory.

    OUT/ledger.jsonl    what is finished, with its results (work.py)
    OUT/stores/         token stores made from text
    OUT/runs/           ordinary run directories, their names ending in the cell's key
    OUT/states/         of fine-tuning under way, for going on after a kill; removed when it is finished
    OUT/<experiment>/   REPORT.md and figure.png

Killed anywhere, the same command resumes: finished parts are skipped, pretraining resumes from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from maelm_fast.analysis.effective_rank import measure
from maelm_fast.config import require
from maelm_fast.data.prepare import PrepareConfig, prepare
from maelm_fast.data.readers import COMPRESSIONS, FORMATS
from maelm_fast.data.token_store import MANIFEST_FILE, Manifest, TokenStore
from maelm_fast.encoders import load_encoder
from maelm_fast.errors import UserError
from maelm_fast.finetuning.examples import TaskData
from maelm_fast.finetuning.fingerprint import Origin
from maelm_fast.finetuning.metrics import baselines
from maelm_fast.finetuning.report import effective_ranks
from maelm_fast.finetuning.run import device_of
from maelm_fast.finetuning.tasks import Task
from maelm_fast.paper.downstream import FineTuning, Found, Prompting, label_words
from maelm_fast.paper.plan import PRETRAINING, Cell, Plan, rank_stage, the_store_fits
from maelm_fast.paper.prompting.fewshot import base_config
from maelm_fast.paper.prompting.plan import Plan as PromptingPlan
from maelm_fast.paper.prompting.plan import make_question
from maelm_fast.paper.prompting.templates import Template, label_ids, template_for
from maelm_fast.paper.results import BASELINES, Results
from maelm_fast.paper.scales import Corpus
from maelm_fast.paper.trials import Trials
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

    @property
    def unit(self) -> FineTuning | Prompting | None:
        """None: pretraining, or ranks."""
        return next((unit for unit in self.cell.units if unit.stage == self.stage), None)


def run_plan(plan: Plan, out: Path) -> None:
    """Works until no part of the plan is left undone or untried since now, by this process or another.

    Parts that fail are recorded in the ledger and cost only themselves; without its pretraining a cell has no more
    parts. Raises Stopped after SIGTERM or SIGINT."""
    ledger = Ledger(out)
    if plan.found is not None:
        _baselines(plan.found, ledger, out)
    unfinished = {cell.key for cell in Results(plan, ledger).unfinished()}
    for number, cell in enumerate(plan.runs, start=1):
        if cell.key not in unfinished:
            print(f"[{number}/{len(plan.runs)}] {cell.title}: finished", flush=True)
    parts = [Part(cell, stage, config, out) for cell in plan.runs for stage, config in cell.stages.items()]
    work(parts, _Worker(plan.found.data if plan.found is not None else {}, Trials(out)), out)


def _baselines(found: Found, ledger: Ledger, out: Path) -> None:
    """Of every task, once. What they need is needed later too: a fault stops the command before anything is trained."""
    with lock(out / "locks" / "baselines.lock", wait=True):
        for task, data in found.data.items():
            if ledger.result(task, BASELINES, data.fingerprint) is None:
                result = {split: baselines(data, split) for split in data.validation}
                ledger.append({"key": task, "stage": BASELINES, "config": data.fingerprint, "result": result})


@dataclass
class _Worker(Worker[Part]):
    tasks: dict[str, TaskData]
    trials: Trials

    def do(self, part: Part, stop: StopSignals) -> dict[str, Any]:
        cell, run = part.cell, part.run
        # Finished, yet not there: the ledger came without its runs.
        if part.stage == PRETRAINING or cell.config.optim.max_steps not in run.steps():
            pretrain(cell.config, cell.data, run.path)
        if part.stage == PRETRAINING:
            return pretraining_result(run)
        for step in cell.rank_steps:
            if part.stage == rank_stage(step):
                return _ranks(cell, run, step)
        unit = part.unit
        assert unit is not None
        do: Any = self._prompt if isinstance(unit, Prompting) else self._finetune
        found: dict[str, Any] = do(unit, cell, run, self.tasks[unit.task], stop)
        return found

    def after(self, part: Part, row: dict[str, Any]) -> str:
        """A finished unit in a line: its metric by split."""
        if part.unit is None or "error" in row:
            return ""
        found, metric = row["result"], row["result"]["metric"]
        tested = found["metrics"] if "metrics" in found else found["test"]
        return f"{metric}: " + ", ".join(f"{split} {metrics[metric]:.1f}" for split, metrics in tested.items())

    def _finetune(self, unit: FineTuning, cell: Cell, run: RunDir, data: TaskData, stop: StopSignals) -> dict[str, Any]:
        """metrics: of the best evaluation, by split. ranks: by layer, before and after (with the best weights), on the
        development inputs."""
        config = replace(unit.config, device=cell.config.runtime.device, precision=cell.config.runtime.precision)
        step = unit.step or None
        encoder = load_encoder(run.path, step=step, dropout=config.dropout, random_init=not step, seed=cell.config.seed)
        key = unit.hash(cell.key)
        result, model, problem = self.trials.finetune(encoder, data, config, key, stop)
        row = {name: value for name, value in result.to_dict().items() if name not in _OF_THE_UNIT}
        if unit.ranks:
            place = device_of(config)
            ranked: dict[str, Any] = {"before": encoder.to(place[0]), "after": model.encoder}
            row["ranks"] = {
                when: asdict(effective_ranks(one, problem.validation_inputs, *place)) for when, one in ranked.items()
            }
        self.trials.finished(key)
        return row

    def _prompt(self, unit: Prompting, cell: Cell, run: RunDir, data: TaskData, stop: StopSignals) -> dict[str, Any]:
        """test: metrics by validation split. metric: Table 7's, which for some tasks is not the task's own."""
        runtime = cell.config.runtime
        template = _template(data.task, run, unit) if unit.mode != "head" else template_for(data.task)
        question = make_question(data, template)
        model = Origin.of(run.path, unit.step, label=cell.row.label)
        base = base_config(device=runtime.device, precision=runtime.precision)
        plan = PromptingPlan((model,), (question,), (unit.mode,), unit.few, (unit.seed or 0,), base)
        result, _ = self.trials.prompt(plan.units[0], stop)
        row = {key: value for key, value in result.items() if key not in ("confusion", "cells")}
        return {**row, "metric": question.data.task.metric, "label_words": list(template.words.values())}


_OF_THE_UNIT = ("seed", "config", "encoder", "engine")
"""Fields of a result that the unit decides."""


def _template(task: Task, run: RunDir, unit: Prompting) -> Template:
    """With the first label words that the run's vocabulary has. Raises UserError for the paper's if it has none."""
    tokenizer = load_encoder(run.path, step=unit.step, head=True).tokenizer
    for words in label_words(task.name):
        template = template_for(task, words=words)
        with contextlib.suppress(UserError):
            label_ids(tokenizer, template)
            return template
    return template_for(task)


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
