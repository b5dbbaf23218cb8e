"""Table 7 for any models and tasks, as units: a model, a task, a mode and, unless it is zero-shot, a draw."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from maelm_fast import work
from maelm_fast.config import to_dict
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.examples import TaskData
from maelm_fast.finetuning.fingerprint import Origin, deciding, digest
from maelm_fast.paper.prompting.fewshot import FewShotConfig
from maelm_fast.paper.prompting.templates import Template

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
class Unit(work.Unit):
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
