"""results.csv, a row per number of every finished draw, and PROMPTS.md, the paper's Table 7 with these models in it.

Over draws a cell is the mean with the standard deviation (of the draws, not an estimate beyond them) in parentheses,
as there. AVG counts MNLI once, as the mean of its two splits.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maelm_fast.errors import UserError
from maelm_fast.finetuning.examples import Examples
from maelm_fast.finetuning.metrics import guessed
from maelm_fast.paper.catalogue import GLUE
from maelm_fast.paper.prompting.plan import STAGE, Mode, Plan, Question, Unit
from maelm_fast.paper.prompting.templates import TEMPLATES
from maelm_fast.paper.scores import AVERAGE, averages
from maelm_fast.paper.sweep_report import PrintedRow
from maelm_fast.reporting import NONE, frame, measured, number, over_draws, per_group, table, where, write_results
from maelm_fast.training.files import write_text
from maelm_fast.work import Ledger, lock

REPORT = "PROMPTS.md"
HEADINGS: dict[Mode, str] = {
    "zero-shot": "Zero-shot prompting: label words at [MASK], no training",
    "head": "Head-based few-shot fine-tuning: a classification head, {shots} examples per label",
    "prompt": "Prompt-based few-shot fine-tuning: the template and its label words, {shots} examples per label",
}
_SHOWN = {"f1": "F1", "matthews": "Matthews", "pearson": "Pearson", "spearman": "Spearman"}
Found = list[tuple[Unit, dict[str, Any]]]


def write_report(
    plan: Plan, out: Path, about: dict[str, dict[str, Any]], printed: dict[Mode, list[PrintedRow]] | None = None
) -> str:
    """Writes both files from the ledger, and returns the tables. about: `check`'s. printed: the paper's own rows.

    Raises UserError if they cannot be written."""
    with lock(out / "locks" / "report.lock", wait=True):  # held from the ledger on: the last to write has seen the most
        found = _finished(plan, out)
        rows = _rows(plan, found, about)
        tables = _tables(plan, rows, printed or {})
        try:
            write_results(out, rows)
            write_text(out / REPORT, "\n".join([*tables, *_explained(plan, found, about)]).rstrip() + "\n")
        except OSError as error:
            raise UserError(f"cannot write in {out}: {error.strerror}; the same command resumes") from None
    return "\n".join(tables).rstrip()


def _finished(plan: Plan, out: Path) -> Found:
    rows = {(row["key"], row["config"]): row for row in Ledger(out).rows() if row["stage"] == STAGE and "result" in row}
    return [(unit, rows[unit.title, unit.config]["result"]) for unit in plan.units if (unit.title, unit.config) in rows]


def _rows(plan: Plan, found: Found, about: dict[str, dict[str, Any]]) -> Any:
    """A row for every metric of every finished unit's test, and of the majority class or the mean score, whose model is
    "majority class" and whose mode is empty. label_tokens: what the model was asked to choose from at [MASK]."""
    rows: list[dict[str, Any]] = []
    for question in plan.questions:
        rows += measured({"model": "majority class", "task": question.name}, _majority(question))
    for unit, result in found:
        tokens = about[unit.model.label]["label_tokens"].get(unit.question.name)
        base: dict[str, Any] = {
            "model": unit.model.label,
            "task": unit.question.name,
            "mode": unit.mode,
            "draw": unit.seed,
        }
        base |= {"label_tokens": " ".join(f"{name}={token}" for name, token in tokens.items()) if tokens else None}
        base |= {name: value for name, value in result.items() if isinstance(value, str | int | float)}
        base |= {"predictions": f"predictions/{unit.predictions}"}
        rows += measured(base, result["test"])
    return frame(rows, ("model", "task", "mode", "draw", "split", "metric", "value"))


def _tables(plan: Plan, rows: Any, printed: dict[Mode, list[PrintedRow]]) -> list[str]:
    order = {name: place for place, name in enumerate(GLUE)}  # the paper's; tasks of the user's own behind
    questions = sorted(plan.questions, key=lambda question: order.get(question.name, len(order)))
    complete = {question.name for question in questions} >= TEMPLATES.keys()
    average = [AVERAGE if complete else f"{AVERAGE} of {len(questions)}"] if len(questions) > 1 else []
    lines = ["# Prompting and few-shot learning", ""]
    for mode in plan.modes:
        wanted = 1 if mode == "zero-shot" else len(plan.seeds)
        of_mode = where(rows, mode=mode)
        body = [["majority class", *_cells(where(rows, model="majority class"), questions, 1), *("" for _ in average)]]
        metrics = {question.name: question.data.task.metric for question in questions}
        means = averages(of_mode, metrics, statistics.fmean)
        for model in plan.models:
            cells = _cells(where(of_mode, model=model.label), questions, wanted)
            body.append([model.label, *cells, *(number(means.get(model.label)) for _ in average)])
        for name, values in printed.get(mode, []):
            own = [_printed(question, values) for question in questions]
            last = [values[AVERAGE] if complete else "" for _ in average]
            body.append([f"*{name}, as printed in the paper*", *own, *last])
        lines += [f"## {HEADINGS[mode].format(shots=plan.few.shots)}", ""]
        lines += table(["Model", *map(_column, questions), *average], body)
    return lines


def _column(question: Question) -> str:
    task = question.data.task
    title = "MNLI-(m/mm)" if task.name == "mnli" and len(question.data.validation) == 2 else task.title
    return title + (f" ({_SHOWN.get(task.metric, task.metric)})" if task.metric != "accuracy" else "")


def _printed(question: Question, values: Mapping[str, str]) -> str:
    """The paper has MNLI's two splits in one column."""
    if question.data.task.title == "MNLI":
        return "/".join(values["MNLI-(m/mm)"].split("/")[: len(question.data.validation)])
    return values.get(question.data.task.title, NONE)


def _cells(rows: Any, questions: Sequence[Question], wanted: int) -> list[str]:
    """Of one model: the mean over the draws, and how many of the wanted ones there are."""
    found, cells = per_group(rows, "task", "split", "metric"), []
    for question in questions:
        data = question.data
        splits = [found.get((question.name, split, data.task.metric), []) for split in data.validation]
        partly = f" [{len(splits[0])} of {wanted} draws]" if 0 < len(splits[0]) < wanted else ""
        cells.append("/".join(map(over_draws, splits)) + partly)
    return cells


def _majority(question: Question) -> dict[str, dict[str, float]]:
    """Table 7's metric by test split: the training file's most frequent class, or its mean score, for all."""
    train, metric, found = question.data.train, question.data.task.metric, {}
    for split, examples in question.data.validation.items():
        assert isinstance(train, Examples)
        assert isinstance(examples, Examples)
        found[split] = {metric: guessed(train, examples)[metric]}
    return found


def _explained(plan: Plan, found: Found, about: dict[str, dict[str, Any]]) -> list[str]:
    lines, few, rows = ["## Templates", ""], plan.few, []
    for question in plan.questions:
        words = ", ".join(f"{name}: {word}" for name, word in question.template.words.items())
        rows.append([question.data.task.title, f"`{question.template.text}`", words])
    lines += table(["Task", "Template", "Label words"], rows)
    for label, model in about.items():
        handled = f", [MASK] in the {model['mask_in']}" if model["mask_in"] else ""
        lines.append(f"- {label}: {model['engine']}{handled}")
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
    lines += [f"- {question.data.task.title}: {note}" for question in plan.questions for note in question.data.notes]
    cut = (
        f"- {unit.model.label} {unit.question.name} {unit.mode}, {split}: {part['cut']} of {part['inputs']} inputs "
        f"were cut ({part['cut_tokens']} tokens); the longest had {part['longest']}"
        for unit, result in found
        for split, part in result["test_truncation"].items()
        if part["cut"]
    )
    lines += dict.fromkeys(cut)  # said once, since it does not depend on the draw
    for unit, result in found:
        for split, matrix in result.get("confusion", {}).items():
            names = unit.question.data.task.labels
            given = [name for i, name in enumerate(names) if any(row[i] for row in matrix)]
            if len(given) == 1:
                lines += [f"- {unit.title}, {split}: the model answers '{given[0]}' to everything"]
    if missing := len(plan.units) - len(found):
        lines += [f"- {missing} of {len(plan.units)} units are not finished yet."]
    return lines
