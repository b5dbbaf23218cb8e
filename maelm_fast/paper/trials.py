"""Fine-tunes and prompts encoders, one trial after another: the work of sweeps, of prompting and of experiments.

    OUT/states/   where a trial that was stopped goes on from; gone when it is finished

A tokenised task depends on the tokenizer alone, so that seeds, checkpoints and models share it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from maelm_fast.config import require
from maelm_fast.encoders import TextEncoder
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.examples import TaskData
from maelm_fast.finetuning.fingerprint import Origin, digest
from maelm_fast.finetuning.job import make_problem
from maelm_fast.finetuning.problem import Problem, SentenceProblem
from maelm_fast.finetuning.run import Result, device_of, train
from maelm_fast.paper.prompting.cloze import ClozeProblem
from maelm_fast.paper.prompting.fewshot import few_shot
from maelm_fast.paper.prompting.plan import Unit
from maelm_fast.stop import Stop
from maelm_fast.training.hardware import device_name


class Trials:
    """out: the directory of all."""

    def __init__(self, out: Path) -> None:
        self.states = out / "states"
        self._problems: dict[tuple[Any, ...], Problem] = {}
        self._asked: tuple[Any, TextEncoder] | None = None

    def finetune(
        self, encoder: TextEncoder, data: TaskData, config: FinetuneConfig, key: str, stop: Stop, keep_best: bool = True
    ) -> tuple[Result, nn.Module, Problem]:
        """key: the trial's, which its state is known by. Result and model are `train`'s."""
        lengths = (config.max_length, config.question_length, config.stride, config.answer_length)
        problem = self._tokenised(lambda: make_problem(data, encoder, config), encoder, data, lengths)
        result, model, _ = train(problem, encoder, config, resume=self.states / key, keep_best=keep_best, stop=stop)
        return result, model, problem

    def finished(self, key: str) -> None:
        shutil.rmtree(self.states / key, ignore_errors=True)

    def prompt(self, unit: Unit, stop: Stop) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """(what the ledger keeps, a prediction per test example)."""
        plan, question, data = unit.plan, unit.question, unit.question.data
        encoder, (device, precision) = self._encoder(unit), device_of(plan.base)

        def make(part: TaskData, config: FinetuneConfig) -> SentenceProblem:
            if encoder.mask_in is not None:
                return ClozeProblem(part, encoder, question.template, config)
            return SentenceProblem(part, encoder, config)

        untrained = replace(data, train=data.train.take([]))
        template = (question.template.text, *question.template.words.values()) if encoder.mask_in else ()
        kind = (*template, plan.base.max_length)
        test = self._tokenised(lambda: make(untrained, plan.base), encoder, data, kind)
        result: dict[str, Any] = {"engine": encoder.engine, "device": device_name(device), "precision": precision}
        if unit.seed is None:
            model = test.model(encoder, plan.base).to(device)
        else:
            state = self.states / unit.config
            found, model = few_shot(data, encoder, make, plan.few, plan.base, unit.seed, resume=state, stop=stop)
            result |= found
        evaluation = test.evaluate(model, device, precision)
        truncation = {split: test.truncation[split] for split in data.validation}
        result |= {"test": evaluation.metrics, "test_truncation": truncation, **evaluation.details}
        return result, evaluation.predictions

    def _tokenised(
        self, make: Callable[[], Problem], encoder: TextEncoder, data: TaskData, kind: tuple[Any, ...]
    ) -> Problem:
        """kind: what else than tokenizer and data it depends on."""
        tokenizer = encoder.tokenizer
        forms = digest(tokenizer.backend.to_str()), tokenizer.single, tokenizer.pair
        place = (*forms, encoder.max_length, data.fingerprint, *kind)
        if place not in self._problems:
            self._problems[place] = make()
        return self._problems[place]

    def _encoder(self, unit: Unit) -> TextEncoder:
        """The last one is kept: the next unit mostly has it too."""
        place = (unit.model, unit.mode == "head")
        if self._asked is None or self._asked[0] != place:
            self._asked = None  # two models at once may be more than the memory holds
            self._asked = place, load(unit.model, unit.plan.base, unit.mode)
        return self._asked[1]


def load(model: Origin, base: FinetuneConfig, mode: str = "prompt") -> TextEncoder:
    """With what it was pretrained with, unless the mode puts a head of its own on it."""
    return model.load(base.dropout, head=mode != "head")


def require_labels(models: Sequence[Origin]) -> None:
    """Raises UserError if two have the same."""
    labels = [model.label for model in models]
    for label in labels:
        require(labels.count(label) == 1, f"two models are called '{label}': name them as --model LABEL=DIR")
