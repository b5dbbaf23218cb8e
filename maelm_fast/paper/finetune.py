"""Does the units of downstream.py: fine-tunes or prompts the checkpoints of a cell's run, one unit at a time.

Tokenised tasks depend on the tokenizer alone, so that checkpoints, seeds and rows on one token store share them.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from maelm_fast.encoders import TextEncoder, load_encoder
from maelm_fast.errors import UserError
from maelm_fast.finetuning.fingerprint import Origin
from maelm_fast.finetuning.job import make_problem
from maelm_fast.finetuning.metrics import baselines
from maelm_fast.finetuning.problem import Problem
from maelm_fast.finetuning.report import effective_ranks
from maelm_fast.finetuning.run import device_of, train
from maelm_fast.finetuning.tasks import Task
from maelm_fast.paper.downstream import FineTuning, Found, Prompting, Unit, label_words
from maelm_fast.paper.plan import Cell
from maelm_fast.paper.prompting.fewshot import base_config
from maelm_fast.paper.prompting.run import Plan as PromptingPlan
from maelm_fast.paper.prompting.run import Worker as PromptingWorker
from maelm_fast.paper.prompting.run import make_question
from maelm_fast.paper.prompting.templates import Template, template_for
from maelm_fast.paper.prompting.tokens import label_ids
from maelm_fast.paper.sweep import make_model
from maelm_fast.stop import StopSignals
from maelm_fast.training.rundir import RunDir

_OF_THE_UNIT = ("seed", "config", "encoder", "engine")
"""Fields of a result that the unit decides."""


class Downstream:
    """out: the directory of all; what a killed unit goes on from is in its states/."""

    def __init__(self, found: Found, out: Path) -> None:
        self.found, self.out = found, out
        self._tokenised: tuple[Any, Problem] | None = None

    def do(self, unit: Unit, cell: Cell, run: RunDir, stop: StopSignals) -> dict[str, Any]:
        """The unit's result for the ledger. Raises Stopped."""
        if isinstance(unit, Prompting):
            return self._prompt(unit, cell, run, stop)
        return self._finetune(unit, cell, run, stop)

    def _finetune(self, unit: FineTuning, cell: Cell, run: RunDir, stop: StopSignals) -> dict[str, Any]:
        """metrics: of the best evaluation, by split. ranks: by layer, before and after (with the best weights), on the
        development inputs."""
        config = replace(unit.config, device=cell.config.runtime.device, precision=cell.config.runtime.precision)
        origin = Origin(str(run.path), unit.step or None, random_init=unit.step == 0)
        encoder = origin.load(config.dropout, cell.config.seed)
        problem = self._problem(unit, cell, encoder)
        state = self.out / "states" / unit.hash(cell.key)
        result, model, _ = train(problem, encoder, config, resume=state, stop=stop)
        row = {key: value for key, value in result.to_dict().items() if key not in _OF_THE_UNIT}
        if unit.ranks:
            place = device_of(config)
            ranked = {"before": encoder.to(place[0]), "after": cast(TextEncoder, model.encoder)}
            row["ranks"] = {
                when: asdict(effective_ranks(one, problem.validation_inputs, *place)) for when, one in ranked.items()
            }
        shutil.rmtree(state, ignore_errors=True)
        return row

    def _problem(self, unit: FineTuning, cell: Cell, encoder: TextEncoder) -> Problem:
        config = unit.config
        lengths = (config.max_length, config.question_length, config.stride, config.answer_length)
        key = (cell.fingerprint, encoder.max_length, unit.task, unit.data, lengths)
        if self._tokenised is None or self._tokenised[0] != key:
            self._tokenised = key, make_problem(self.found.data[unit.task], encoder, config)
        return self._tokenised[1]

    def _prompt(self, unit: Prompting, cell: Cell, run: RunDir, stop: StopSignals) -> dict[str, Any]:
        """test: metrics by validation split. metric: Table 7's, which for some tasks is not the task's own."""
        runtime, data = cell.config.runtime, self.found.data[unit.task]
        template = _template(data.task, run, unit) if unit.mode != "head" else template_for(data.task)
        question = make_question(data, template)
        seeds = () if unit.seed is None else (unit.seed,)
        base = base_config(device=runtime.device, precision=runtime.precision)
        model = make_model(cell.row.label, str(run.path), unit.step)
        plan = PromptingPlan((model,), (question,), (unit.mode,), unit.few, seeds, base)
        result, _ = PromptingWorker(plan, self.out).work(plan.units[0], stop)
        row = {key: value for key, value in result.items() if key not in ("confusion", "cells")}
        return {**row, "metric": question.data.task.metric, "label_words": list(template.words.values())}

    def baselines(self, task: str) -> dict[str, dict[str, dict[str, float]]]:
        """Split -> baseline -> metric -> value."""
        data = self.found.data[task]
        return {split: baselines(data, split) for split in data.validation}


def _template(task: Task, run: RunDir, unit: Prompting) -> Template:
    """With the first label words that the run's vocabulary has. Raises UserError for the paper's if it has none."""
    tokenizer = load_encoder(run.path, step=unit.step, head=True).tokenizer
    for words in label_words(task.name):
        template = template_for(task, words=words)
        with contextlib.suppress(UserError):
            label_ids(tokenizer, template, len(task.text_columns))
            return template
    return template_for(task)


def outcome(result: dict[str, Any]) -> str:
    """A finished unit in a line: its metric by split."""
    found = result["metrics"] if "metrics" in result else result["test"]
    values = ", ".join(f"{split} {metrics[result['metric']]:.1f}" for split, metrics in found.items())
    return f"{result['metric']}: {values}"
