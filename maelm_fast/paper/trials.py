"""Fine-tunes and prompts encoders, one trial after another: the work of sweeps, of prompting and of experiments.

    OUT/states/   where a trial that was stopped goes on from; gone when it is finished

A tokenised task depends on the tokenizer alone, so that seeds, checkpoints and models share it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from maelm_fast.config import require
from maelm_fast.encoders import TextEncoder
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.examples import TaskData
from maelm_fast.finetuning.fingerprint import Origin, digest
from maelm_fast.finetuning.job import make_problem
from maelm_fast.finetuning.problem import Problem
from maelm_fast.finetuning.run import Result, train
from maelm_fast.stop import Stop


class Trials:
    """out: the directory of all."""

    def __init__(self, out: Path) -> None:
        self.states = out / "states"
        self._problems: dict[tuple[Any, ...], Problem] = {}
        self._loaded: tuple[Any, TextEncoder] | None = None

    def finetune(
        self, encoder: TextEncoder, data: TaskData, config: FinetuneConfig, key: str, stop: Stop, keep_best: bool = True
    ) -> tuple[Result, nn.Module, Problem]:
        """key: the trial's, which its state is known by. Result and model are `train`'s."""
        lengths = (config.max_length, config.question_length, config.stride, config.answer_length)
        problem = self.tokenised(lambda: make_problem(data, encoder, config), encoder, data, lengths)
        result, model, _ = train(problem, encoder, config, resume=self.states / key, keep_best=keep_best, stop=stop)
        return result, model, problem

    def finished(self, key: str) -> None:
        shutil.rmtree(self.states / key, ignore_errors=True)

    def tokenised(
        self, make: Callable[[], Problem], encoder: TextEncoder, data: TaskData, kind: tuple[Any, ...]
    ) -> Problem:
        """kind: what else than tokenizer and data it depends on."""
        tokenizer = encoder.tokenizer
        forms = digest(tokenizer.backend.to_str()), tokenizer.single, tokenizer.pair
        place = (*forms, encoder.max_length, data.fingerprint, *kind)
        if place not in self._problems:
            self._problems[place] = make()
        return self._problems[place]

    def encoder(self, model: Origin, dropout: float, head: bool) -> TextEncoder:
        """The last one is kept: the next trial mostly has it too."""
        place = (model, dropout, head)
        if self._loaded is None or self._loaded[0] != place:
            self._loaded = None  # two models at once may be more than the memory holds
            self._loaded = place, model.load(dropout, head=head)
        return self._loaded[1]


def require_labels(models: Sequence[Origin]) -> None:
    """Raises UserError if two have the same."""
    labels = [model.label for model in models]
    for label in labels:
        require(labels.count(label) == 1, f"two models are called '{label}': name them as --model LABEL=DIR")
