"""Does the units of a prompting plan, each finished by itself and written down.

OUT/ledger.jsonl   a row per finished unit (work.py)
OUT/states/        where the training in hand goes on from
OUT/predictions/   a file per unit, a row per test example
OUT/results.csv, OUT/PROMPTS.md   (report.py)
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maelm_fast import work
from maelm_fast.data.files import writing
from maelm_fast.errors import UserError
from maelm_fast.finetuning.examples import Examples
from maelm_fast.paper.prompting.fewshot import draw
from maelm_fast.paper.prompting.plan import Plan, Unit
from maelm_fast.paper.prompting.templates import label_ids, shown
from maelm_fast.paper.trials import Trials, load, require_labels
from maelm_fast.stop import StopSignals
from maelm_fast.training.files import write_text


def check(plan: Plan) -> dict[str, dict[str, Any]]:
    """Loads every model once, looks up every label word and draws every draw, so that whatever is wrong is said before
    anything is trained. Returns, by the model's label, its engine, what handles its [MASK] and what the label words of
    each task are to it. Raises UserError."""
    require_labels(plan.models)
    for question in plan.questions:
        for seed in plan.seeds if set(plan.modes) != {"zero-shot"} else ():
            assert isinstance(question.data.train, Examples)
            draw(question.data.train, plan.few.shots, seed)
    found: dict[str, dict[str, Any]] = {}
    for model in plan.models:
        encoder = load(model, plan.base, "head" if set(plan.modes) == {"head"} else "prompt")
        about = found[model.label] = {"engine": encoder.engine, "mask_in": encoder.mask_in, "label_tokens": {}}
        for question in plan.questions if encoder.mask_in else ():
            try:
                ids = label_ids(encoder.tokenizer, question.template)
            except UserError as error:
                raise UserError(f"{model.label}, {question.name}: {error}") from None
            tokens = shown(encoder.tokenizer, ids).split()
            about["label_tokens"][question.name] = dict(zip(question.template.words, tokens, strict=True))
    return found


def run_plan(plan: Plan, out: Path) -> None:
    """Works until every unit is finished, by this process or another.

    Raises Stopped after SIGTERM or SIGINT, UserError if a unit fails; what was finished before stays finished."""
    work.work(plan.units, _Worker(Trials(out), out), out, keep_going=False)


@dataclass
class _Worker(work.Worker[Unit]):
    trials: Trials
    out: Path

    def do(self, unit: Unit, stop: StopSignals) -> dict[str, Any]:
        started = time.perf_counter()
        result, predictions = self.trials.prompt(unit, stop)
        path = self.out / "predictions" / unit.predictions
        with writing(path, "the same command resumes"):
            path.parent.mkdir(exist_ok=True)
            write_text(path, "".join(json.dumps(row) + "\n" for row in predictions))
        return {**result, "seconds": time.perf_counter() - started}

    def after(self, unit: Unit, row: dict[str, Any]) -> str:
        result, metric = row["result"], unit.question.data.task.metric
        values = ", ".join(f"{split} {found[metric]:.1f}" for split, found in result["test"].items())
        return f"{values}, {result['seconds']:.0f} s"
