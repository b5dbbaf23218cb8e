"""Table 7 for any models and tasks, as units: a model, a task, a mode and, unless it is zero-shot, a draw. Each is
finished by itself and written down.

OUT/ledger.jsonl   a row per finished unit (work.py)
OUT/states/        where the training in hand goes on from
OUT/predictions/   a file per unit, a row per test example
OUT/results.csv, OUT/PROMPTS.md   (report.py)
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from maelm_fast import work
from maelm_fast.config import to_dict
from maelm_fast.data.files import writing
from maelm_fast.errors import UserError
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.examples import Examples, TaskData
from maelm_fast.finetuning.fingerprint import Origin, deciding, digest
from maelm_fast.finetuning.problem import SentenceProblem
from maelm_fast.finetuning.run import device_of
from maelm_fast.paper.prompting.cloze import ClozeProblem
from maelm_fast.paper.prompting.fewshot import FewShotConfig, draw, few_shot
from maelm_fast.paper.prompting.templates import Template, label_ids
from maelm_fast.paper.trials import Trials, require_labels
from maelm_fast.stop import Stop, StopSignals
from maelm_fast.training.files import write_text
from maelm_fast.training.hardware import device_name

STAGE = "prompting"
Mode = Literal["zero-shot", "head", "prompt"]
MODES: tuple[Mode, ...] = ("zero-shot", "head", "prompt")
METRICS = {"mrpc": "f1", "qqp": "f1", "stsb": "pearson"}
"""Where the metric of Table 7 is not the task's own. Its RoBERTa rows are Gao et al.'s, who report these."""


@dataclass(frozen=True)
class Question:
    """A task and its template. data.train: the pool that is drawn from; data.validation: the test."""

    data: TaskData
    template: Template

    @property
    def name(self) -> str:
        return self.data.task.name


def make_question(data: TaskData, template: Template, limit: int | None = None) -> Question:
    """limit: test examples per split, a fixed pseudo-random choice, which is noted."""
    task = replace(data.task, metric=METRICS.get(data.task.name, data.task.metric))
    return Question(replace(data, task=task).limited(validation=limit, why=" (--limit)"), template)


@dataclass(frozen=True)
class Plan:
    models: tuple[Origin, ...]
    questions: tuple[Question, ...]
    modes: tuple[Mode, ...]
    few: FewShotConfig
    seeds: tuple[int, ...]
    """Of the draws."""
    base: FinetuneConfig

    @property
    def units(self) -> list[Unit]:
        """In the order in which they are worked on."""
        return [
            Unit(self, model, question, mode, seed)
            for model in self.models
            for mode in self.modes
            for question in self.questions
            for seed in ((None,) if mode == "zero-shot" else self.seeds)
        ]


@dataclass(frozen=True)
class Unit:
    plan: Plan = field(repr=False)
    model: Origin
    question: Question
    mode: Mode
    seed: int | None

    @property
    def title(self) -> str:
        draw = "" if self.seed is None else f" draw {self.seed}"
        return f"{self.model.label} {self.question.name} {self.mode}{draw}"

    @property
    def config(self) -> str:
        """The hash of all that decides the result."""
        plan = self.plan
        decides: list[Any] = [self.mode, self.model.fingerprint, self.model.engine, self.question.data.fingerprint]
        science = deciding(plan.base)
        if self.mode == "zero-shot":
            science = {"max_length": plan.base.max_length}
        else:
            decides += [to_dict(plan.few), self.seed]
        if self.mode != "head":
            decides += [self.question.template.text, self.question.template.words]
        return digest(science, *decides)

    @property
    def identity(self) -> work.Identity:
        return self.title, STAGE, self.config

    @property
    def predictions(self) -> str:
        """Name of the file."""
        return "".join(c if c.isalnum() or c in "-_." else "_" for c in self.title) + f"-{self.config}.jsonl"


def check(plan: Plan) -> dict[str, dict[str, Any]]:
    """Loads every model once, looks up every label word and draws every draw, so that whatever is wrong is said before
    anything is trained. Returns, by the model's label, its engine and what handles its [MASK]. Raises UserError."""
    require_labels(plan.models)
    for question in plan.questions:
        for seed in plan.seeds if set(plan.modes) != {"zero-shot"} else ():
            assert isinstance(question.data.train, Examples)
            draw(question.data.train, plan.few.shots, seed)
    found: dict[str, dict[str, Any]] = {}
    for model in plan.models:
        encoder = model.load(plan.base.dropout, head=set(plan.modes) != {"head"})
        found[model.label] = {"engine": encoder.engine, "mask_in": encoder.mask_in}
        for question in plan.questions if encoder.mask_in else ():
            try:
                label_ids(encoder.tokenizer, question.template)
            except UserError as error:
                raise UserError(f"{model.label}, {question.name}: {error}") from None
    return found


def prompt(trials: Trials, unit: Unit, stop: Stop) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(what the ledger keeps, a prediction per test example)."""
    plan, question, data = unit.plan, unit.question, unit.question.data
    (device, precision), head = device_of(plan.base), unit.mode != "head"  # of pretraining, or a new one
    encoder = trials.encoder(unit.model, plan.base.dropout, head)

    def make(part: TaskData, config: FinetuneConfig) -> SentenceProblem:
        if encoder.mask_in is not None:
            return ClozeProblem(part, encoder, question.template, config)
        return SentenceProblem(part, encoder, config)

    untrained = replace(data, train=data.train.take([]))
    template = (question.template.text, *question.template.words.values()) if encoder.mask_in else ()
    kind = (*template, plan.base.max_length)
    test = trials.tokenised(lambda: make(untrained, plan.base), encoder, data, kind)
    result: dict[str, Any] = {"engine": encoder.engine, "device": device_name(device), "precision": precision}
    if unit.seed is None:
        model = test.model(encoder, plan.base).to(device)
    else:
        state = trials.states / unit.config
        found, model = few_shot(data, encoder, make, plan.few, plan.base, unit.seed, resume=state, stop=stop)
        result |= found
    evaluation = test.evaluate(model, device, precision)
    truncation = {split: test.truncation[split] for split in data.validation}
    result |= {"test": evaluation.metrics, "test_truncation": truncation, **evaluation.details}
    return result, evaluation.predictions


def run_plan(plan: Plan, out: Path) -> None:
    """Works until every unit is finished, by this process or another.

    Raises Stopped after SIGTERM or SIGINT, UserError if a unit fails; what was finished before stays finished."""
    units = [work.Unit(unit.identity, unit.title, unit) for unit in plan.units]
    work.work(units, _Worker(Trials(out), out), out, keep_going=False)


@dataclass
class _Worker(work.Worker[Unit]):
    trials: Trials
    out: Path

    def do(self, unit: Unit, stop: StopSignals) -> dict[str, Any]:
        started = time.perf_counter()
        result, predictions = prompt(self.trials, unit, stop)
        path = self.out / "predictions" / unit.predictions
        with writing(path, "the same command resumes"):
            path.parent.mkdir(exist_ok=True)
            write_text(path, "".join(json.dumps(row) + "\n" for row in predictions))
        return {**result, "seconds": time.perf_counter() - started}

    def after(self, unit: Unit, row: dict[str, Any]) -> str:
        result, metric = row["result"], unit.question.data.task.metric
        values = ", ".join(f"{split} {found[metric]:.1f}" for split, found in result["test"].items())
        return f"{values}, {result['seconds']:.0f} s"
