"""Table 7 for any models and tasks: planned as units, each finished by itself and written down.

OUT/ledger.jsonl   a row per finished unit: a model, a task, a mode and, unless it is zero-shot, a draw (work.py)
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

from torch import nn

from maelm_fast import work as queue
from maelm_fast.config import to_dict
from maelm_fast.encoders import Engine, TextEncoder
from maelm_fast.errors import UserError
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.examples import Examples, TaskData
from maelm_fast.finetuning.fingerprint import Origin, data_fingerprint, deciding, digest
from maelm_fast.finetuning.problem import SentenceProblem
from maelm_fast.finetuning.run import Watch, device_of
from maelm_fast.paper.prompting.cloze import ClozeProblem
from maelm_fast.paper.prompting.fewshot import FewShotConfig, draw, few_shot
from maelm_fast.paper.prompting.templates import Template
from maelm_fast.paper.prompting.tokens import label_ids, shown
from maelm_fast.paper.sweep import Model, require_labels
from maelm_fast.stop import Stop, StopSignals
from maelm_fast.training.files import write_text
from maelm_fast.training.hardware import device_name
from maelm_fast.training.rundir import RunDir

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
    fingerprint: str

    @property
    def name(self) -> str:
        return self.data.task.name


def make_question(data: TaskData, template: Template, limit: int | None = None) -> Question:
    """limit: test examples per split, a fixed pseudo-random choice, which is noted."""
    task = replace(data.task, metric=METRICS.get(data.task.name, data.task.metric))
    data = replace(data, task=task).limited(validation=limit, why=" (--limit)")
    return Question(data, template, data_fingerprint(data))


@dataclass(frozen=True)
class Plan:
    models: tuple[Model, ...]
    questions: tuple[Question, ...]
    modes: tuple[Mode, ...]
    few: FewShotConfig
    seeds: tuple[int, ...]
    """Of the draws."""
    base: FinetuneConfig
    engine: Engine = "auto"

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
class Unit(queue.Unit):
    plan: Plan = field(repr=False)
    model: Model
    question: Question
    mode: Mode
    seed: int | None

    @property
    def key(self) -> str:
        draw = "" if self.seed is None else f" draw {self.seed}"
        return f"{self.model.label} {self.question.name} {self.mode}{draw}"

    @property
    def config(self) -> str:
        """The hash of all that decides the result."""
        plan = self.plan
        engine = engine_of(plan, self.model)
        decides: list[Any] = [self.mode, self.model.fingerprint, engine, self.question.fingerprint]
        science = deciding(plan.base)
        if self.mode == "zero-shot":
            science = {"max_length": plan.base.max_length}
        else:
            decides += [to_dict(plan.few), self.seed]
        if self.mode != "head":
            decides += [self.question.template.text, self.question.template.words]
        return digest(science, *decides)

    @property
    def identity(self) -> queue.Identity:
        return self.key, STAGE, self.config

    @property
    def title(self) -> str:
        return self.key

    @property
    def predictions(self) -> str:
        """Name of the file."""
        return "".join(c if c.isalnum() or c in "-_." else "_" for c in self.key) + f"-{self.config}.jsonl"


def check(plan: Plan) -> dict[str, dict[str, Any]]:
    """Loads every model once, looks up every label word and draws every draw, so that whatever is wrong is said before
    anything is trained. Returns, by the model's label, what it is. Raises UserError."""
    require_labels(plan.models)
    for question in plan.questions:
        if set(plan.modes) != {"zero-shot"}:
            for seed in plan.seeds:
                assert isinstance(question.data.train, Examples)
                draw(question.data.train, plan.few.shots, seed)
    found: dict[str, dict[str, Any]] = {}
    for model in plan.models:
        about: dict[str, Any] = {"path": model.path, "step": model.step}
        if set(plan.modes) == {"head"}:
            about["engine"] = load(plan, model, "head").engine
        else:
            lm = load(plan, model)
            about |= {"engine": lm.engine, "mask_in": lm.mask_in, "label_tokens": {}}
            for question in plan.questions:
                template, texts = question.template, len(question.data.task.text_columns)
                try:
                    ids = label_ids(lm.tokenizer, template, texts)
                except UserError as error:
                    raise UserError(f"{model.label}, {question.name}: {error}") from None
                tokens = shown(lm.tokenizer, ids).split()
                about["label_tokens"][question.name] = dict(zip(template.words, tokens, strict=True))
        found[model.label] = about
    return found


def run_plan(plan: Plan, out: Path, watch: Watch | None = None) -> None:
    """Works until every unit is finished, by this process or another.

    Raises Stopped after SIGTERM or SIGINT, UserError if a unit fails; what was finished before stays finished."""
    queue.work(plan.units, Worker(plan, out, watch), out, keep_going=False)


def _write(path: Path, predictions: list[dict[str, Any]]) -> None:
    try:
        path.parent.mkdir(exist_ok=True)
        write_text(path, "".join(json.dumps(row) + "\n" for row in predictions))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; the same command resumes") from None


class Worker(queue.Worker[Unit]):
    """Keeps the model and the tokenised test of the last unit, which the next one mostly shares."""

    def __init__(self, plan: Plan, out: Path, watch: Watch | None = None) -> None:
        self.plan, self.out, self.watch = plan, out, watch
        self.encoder: tuple[Any, TextEncoder] | None = None
        self.test: tuple[Any, SentenceProblem] | None = None
        self.device, self.precision = device_of(plan.base)

    def do(self, unit: Unit, stop: StopSignals) -> dict[str, Any]:
        started = time.perf_counter()
        result, predictions = self.work(unit, stop)
        result["seconds"] = time.perf_counter() - started
        _write(self.out / "predictions" / unit.predictions, predictions)
        return result

    def after(self, unit: Unit, row: dict[str, Any]) -> str:
        result, metric = row["result"], unit.question.data.task.metric
        values = ", ".join(f"{split} {found[metric]:.1f}" for split, found in result["test"].items())
        return f"{values}, {result['seconds']:.0f} s"

    def work(self, unit: Unit, stop: Stop) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """(what the ledger keeps, predictions)."""
        plan, data = self.plan, unit.question.data
        encoder = self._encoder(unit)

        def make(part: TaskData, config: FinetuneConfig) -> SentenceProblem:
            if encoder.mask_in is not None:
                return ClozeProblem(part, encoder, unit.question.template, config)
            return SentenceProblem(part, encoder, config)

        place = (unit.model, unit.mode == "head", unit.question.fingerprint)
        if self.test is None or self.test[0] != place:
            self.test = place, make(replace(data, train=data.train.take([])), plan.base)
        test = self.test[1]
        result: dict[str, Any] = {
            "engine": encoder.engine,
            "device": device_name(self.device),
            "precision": self.precision,
        }
        if unit.seed is None:
            assert isinstance(test, ClozeProblem)
            model: nn.Module = test.model(encoder, plan.base).to(self.device)
        else:
            found, model = few_shot(
                data,
                encoder,
                make,
                plan.few,
                plan.base,
                unit.seed,
                watch=self.watch,
                resume=self.out / "states" / unit.config,
                stop=stop,
            )
            result |= found
        evaluation = test.evaluate(model, self.device, self.precision)
        truncation = {split: test.truncation[split] for split in data.validation}
        result |= {"test": evaluation.metrics, "test_truncation": truncation, **evaluation.details}
        return result, evaluation.predictions

    def _encoder(self, unit: Unit) -> TextEncoder:
        place = (unit.model, unit.mode == "head")
        if self.encoder is None or self.encoder[0] != place:
            self.encoder = None  # two models at once may be more than the memory holds
            self.encoder = place, load(self.plan, unit.model, unit.mode)
        return self.encoder[1]


def load(plan: Plan, model: Model, mode: Mode = "prompt") -> TextEncoder:
    """With what it was pretrained with, unless the mode puts a head of its own on it."""
    origin = Origin(model.path, model.step, engine_of(plan, model))
    return origin.load(plan.base.dropout, head=mode != "head")


def engine_of(plan: Plan, model: Model) -> Engine:
    """A run of ours has one engine only."""
    return "auto" if RunDir(model.path).exists else plan.engine
