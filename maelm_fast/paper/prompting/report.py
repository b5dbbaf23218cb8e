"""results.csv, a row per number of every finished draw, and PROMPTS.md, the paper's Table 7 with these models in it.

Over draws a cell is the mean with the standard deviation (of the draws, not an estimate beyond them) in parentheses,
as there. AVG counts MNLI once, as the mean of its two splits.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from maelm_fast.data.files import writing
from maelm_fast.finetuning.examples import Examples
from maelm_fast.finetuning.metrics import guessed
from maelm_fast.finetuning.report import task_table
from maelm_fast.paper.prompting.plan import Mode, Plan, Unit
from maelm_fast.paper.prompting.templates import TEMPLATES
from maelm_fast.paper.scores import AVERAGE, averages, columns, filled
from maelm_fast.paper.sweep_report import PrintedRow
from maelm_fast.reporting import NONE, frame, measured, over_draws, table, where, write_results
from maelm_fast.training.files import write_text
from maelm_fast.work import Ledger, lock

REPORT = "PROMPTS.md"
HEADINGS: dict[Mode, str] = {
    "zero-shot": "Zero-shot prompting: label words at [MASK], no training",
    "head": "Head-based few-shot fine-tuning: a classification head, {shots} examples per label",
    "prompt": "Prompt-based few-shot fine-tuning: the template and its label words, {shots} examples per label",
}
_METRIC = {"f1": " (F1)", "matthews": " (Matthews)", "pearson": " (Pearson)"}
_MAJORITY = "majority class"
Found = list[tuple[Unit, dict[str, Any]]]


def write_report(
    plan: Plan, out: Path, about: dict[str, dict[str, Any]], printed: dict[Mode, list[PrintedRow]] | None = None
) -> str:
    """Writes both files from the ledger, and returns the tables. about: `check`'s. printed: the paper's own rows.

    Raises UserError if they cannot be written."""
    with lock(out / "locks" / "report.lock", wait=True):  # held from the ledger on: the last to write has seen the most
        results, _ = Ledger(out).ended()
        found = [(unit, results[unit.identity]) for unit in plan.units if unit.identity in results]
        rows = _rows(plan, found, about)
        tables = _tables(plan, rows, printed or {})
        with writing(out, "the same command resumes"):
            write_results(out, rows)
            write_text(out / REPORT, "\n".join([*tables, *_explained(plan, found, about)]).rstrip() + "\n")
    return "\n".join(tables).rstrip()


def _rows(plan: Plan, found: Found, about: dict[str, dict[str, Any]]) -> Any:
    """A row for every metric of every finished unit's test, and of the majority class or the mean score, whose model is
    "majority class" and whose mode is empty. label_tokens: what the model was asked to choose from at [MASK]."""
    rows: list[dict[str, Any]] = []
    for question in plan.questions:
        train: Any = question.data.train
        floor = {split: guessed(train, cast(Examples, test)) for split, test in question.data.validation.items()}
        rows += measured({"model": _MAJORITY, "task": question.name}, floor)
    for unit, result in found:
        tokens = about[unit.model.label]["label_tokens"].get(unit.question.name, {})
        base: dict[str, Any] = {
            "model": unit.model.label,
            "task": unit.question.name,
            "mode": unit.mode,
            "draw": unit.seed,
        }
        base |= {"label_tokens": " ".join(f"{name}={token}" for name, token in tokens.items()) or None}
        base |= {name: value for name, value in result.items() if isinstance(value, str | int | float)}
        rows += measured({**base, "predictions": f"predictions/{unit.predictions}"}, result["test"])
    return frame(rows, ("model", "task", "mode", "draw", "split", "metric", "value"))


def _tables(plan: Plan, rows: Any, printed: dict[Mode, list[PrintedRow]]) -> list[str]:
    tasks = [question.data.task for question in plan.questions]
    layout = [column for column in columns(tasks) if column.task or len(tasks) > 1]
    complete = {task.name for task in tasks} >= TEMPLATES.keys()
    average = AVERAGE if complete else f"{AVERAGE} of {len(tasks)}"
    header = [f"{c.header}{_METRIC.get(c.metric, '')}" if c.task else average for c in layout]
    lines = ["# Prompting and few-shot learning", ""]
    for mode in plan.modes:
        of_mode, wanted = where(rows, mode=mode), 1 if mode == "zero-shot" else len(plan.seeds)

        def shown(values: Sequence[float], wanted: int = wanted) -> str:
            return over_draws(values) + (f" [{len(values)} of {wanted} draws]" if len(values) < wanted else "")

        body = [[_MAJORITY, *filled(rows, layout, [_MAJORITY], over_draws)[0]]]
        labels = [model.label for model in plan.models]
        means = averages(of_mode, {task.name: task.metric for task in tasks}, statistics.fmean)
        found = zip(labels, filled(of_mode, layout, labels, shown, means), strict=True)
        body += [[label, *cells] for label, cells in found]
        for name, values in printed.get(mode, []):
            cells = [values.get(c.header, NONE) if c.task or complete else NONE for c in layout]
            body.append([f"*{name}, as printed in the paper*", *cells])
        lines += [f"## {HEADINGS[mode].format(shots=plan.few.shots)}", "", *table(["Model", *header], body)]
    return lines


def _explained(plan: Plan, found: Found, about: dict[str, dict[str, Any]]) -> list[str]:
    few, rows = plan.few, []
    for question in plan.questions:
        words = ", ".join(f"{name}: {word}" for name, word in question.template.words.items())
        rows.append([question.data.task.title, f"`{question.template.text}`", words])
    lines = ["## Templates", "", *table(["Task", "Template", "Label words"], rows)]
    for label, model in about.items():
        lines.append(
            f"- {label}: {model['engine']}" + (f", [MASK] in the {model['mask_in']}" if model["mask_in"] else "")
        )
    lines += ["", "## How this was measured", ""]
    if set(plan.modes) != {"zero-shot"}:
        choice = f"with learning rate {few.lrs[0]:g} and batch {few.batch_sizes[0]}"
        if (pairs := len(few.lrs) * len(few.batch_sizes)) > 1:
            rates, batches = ", ".join(f"{lr:g}" for lr in few.lrs), ", ".join(map(str, few.batch_sizes))
            choice = f"with each of {pairs} pairs of learning rate ({rates}) and batch ({batches}), of which the "
            choice += "draw's development examples choose"
        seeds = ", ".join(map(str, plan.seeds))
        lines += [
            f"- Few-shot: {len(plan.seeds)} draws (seeds {seeds}) of {few.shots} examples per label to train on and as "
            f"many others to choose by, from the training file; {few.steps:,} steps {choice}; the best of the "
            f"evaluations every {few.evaluate_every} steps is tested. The draws are this program's, not the files of "
            "Gao et al. (2021), so that numbers compare with theirs on average only.",
        ]
    lines += [
        "- The test is the task's validation split. MRPC and QQP are scored by F1 and STS-B by Pearson's correlation, "
        "as in Gao et al., whose RoBERTa rows the paper's Table 7 shows; elsewhere it has accuracy and Spearman's.",
    ]
    if missing := len(plan.units) - len(found):
        lines += [f"- {missing} of {len(plan.units)} units are not finished yet."]
    truncation = {unit.question.name: result["test_truncation"] for unit, result in reversed(found)}
    return [*lines, "", "## Tasks", "", *task_table((question.data for question in plan.questions), truncation)]
