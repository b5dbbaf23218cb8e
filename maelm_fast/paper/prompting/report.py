"""prompts.json, all that was found, and PROMPTS.md, the paper's Table 7 with these models in it.

Over draws a cell is the mean with the standard deviation (of the draws, not an estimate beyond them) in parentheses,
as there. AVG counts MNLI once, as the mean of its two splits.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maelm_fast.config import to_dict
from maelm_fast.errors import UserError
from maelm_fast.finetuning.examples import Examples
from maelm_fast.finetuning.markdown import NONE, over_draws, table
from maelm_fast.finetuning.metrics import evaluate
from maelm_fast.paper.prompting.run import STAGE, Mode, Plan, Question, Unit
from maelm_fast.paper.prompting.templates import TEMPLATES
from maelm_fast.paper.sweep import Model
from maelm_fast.paper.sweep_report import GLUE, PrintedRow
from maelm_fast.training.files import write_json, write_text
from maelm_fast.work import Ledger, lock

REPORT, DATA = "PROMPTS.md", "prompts.json"
HEADINGS: dict[Mode, str] = {
    "zero-shot": "Zero-shot prompting: label words at [MASK], no training",
    "head": "Head-based few-shot fine-tuning: a classification head, {shots} examples per label",
    "prompt": "Prompt-based few-shot fine-tuning: the template and its label words, {shots} examples per label",
}
_SHOWN = {"f1": "F1", "matthews": "Matthews", "pearson": "Pearson", "spearman": "Spearman"}


def write_report(
    plan: Plan, out: Path, about: dict[str, dict[str, Any]], printed: dict[Mode, list[PrintedRow]] | None = None
) -> str:
    """Writes both files from the ledger, and returns the tables. about: `check`'s. printed: the paper's own rows.

    Raises UserError if they cannot be written."""
    with lock(out / "locks" / "report.lock", wait=True):  # held from the ledger on: the last to write has seen the most
        results = _results(plan, out)
        tables = _tables(plan, results, printed or {})
        try:
            write_json(out / DATA, _data(plan, results, about))
            write_text(out / REPORT, "\n".join([*tables, *_explained(plan, results, about)]).rstrip() + "\n")
        except OSError as error:
            raise UserError(f"cannot write in {out}: {error.strerror}; the same command goes on") from None
    return "\n".join(tables).rstrip()


Found = list[tuple[Unit, dict[str, Any]]]


def _results(plan: Plan, out: Path) -> Found:
    rows = {(row["key"], row["config"]): row for row in Ledger(out).rows() if row["stage"] == STAGE and "result" in row}
    return [(unit, rows[unit.key, unit.config]["result"]) for unit in plan.units if (unit.key, unit.config) in rows]


def _values(results: Found, model: Model, mode: Mode, question: Question, split: str) -> list[float]:
    """One per finished draw."""
    metric = question.data.task.metric
    return [
        result["test"][split][metric]
        for unit, result in results
        if (unit.model, unit.mode, unit.question) == (model, mode, question)
    ]


def _tables(plan: Plan, results: Found, printed: dict[Mode, list[PrintedRow]]) -> list[str]:
    questions = sorted(plan.questions, key=lambda question: _place(question.name))
    columns = [_column(question) for question in questions]
    complete = {question.name for question in questions} >= TEMPLATES.keys()
    average = ["AVG" if complete else f"AVG of {len(questions)}"] if len(questions) > 1 else []
    lines = ["# Prompting and few-shot learning", ""]
    for mode in plan.modes:
        lines += [f"## {HEADINGS[mode].format(shots=plan.few.shots)}", ""]
        rows = [["majority class", *(_majority_cell(question) for question in questions), *("" for _ in average)]]
        for model in plan.models:
            cells = [_cell(plan, results, model, mode, question) for question in questions]
            rows.append([model.label, *cells, *(_average(results, model, mode, questions) for _ in average)])
        for name, values in printed.get(mode, []):
            own = [_printed(question, values) for question in questions]
            rows.append(
                [f"*{name}, as printed in the paper*", *own, *(values["AVG"] if complete else "" for _ in average)]
            )
        lines += table(["Model", *columns, *average], rows)
    return lines


def _place(name: str) -> int:
    """The paper's order; tasks of the user's own behind."""
    return GLUE.index(name) if name in GLUE else len(GLUE)


def _column(question: Question) -> str:
    task = question.data.task
    title = "MNLI-(m/mm)" if task.name == "mnli" and len(question.data.validation) == 2 else task.title
    return title + (f" ({_SHOWN.get(task.metric, task.metric)})" if task.metric != "accuracy" else "")


def _printed(question: Question, values: Mapping[str, str]) -> str:
    """The paper has MNLI's two splits in one column."""
    title = question.data.task.title
    if title == "MNLI":
        return "/".join(values["MNLI-(m/mm)"].split("/")[: len(question.data.validation)])
    return values.get(title, NONE)


def _cell(plan: Plan, results: Found, model: Model, mode: Mode, question: Question) -> str:
    splits = [_values(results, model, mode, question, split) for split in question.data.validation]
    done = len(splits[0])
    wanted = 1 if mode == "zero-shot" else len(plan.seeds)
    partly = f" [{done} of {wanted} draws]" if 0 < done < wanted else ""
    return "/".join(over_draws(values, 1) for values in splits) + partly


def _average(results: Found, model: Model, mode: Mode, questions: Sequence[Question]) -> str:
    means = []
    for question in questions:
        splits = [_values(results, model, mode, question, split) for split in question.data.validation]
        if not all(splits):
            return NONE
        means.append(statistics.fmean(statistics.fmean(values) for values in splits))
    return f"{statistics.fmean(means):.1f}"


def _majority(question: Question) -> dict[str, float]:
    """By test split: the training file's most frequent class, or its mean score, for every example."""
    task, train = question.data.task, question.data.train
    assert isinstance(train, Examples)
    found = {}
    for split, examples in question.data.validation.items():
        assert isinstance(examples, Examples)
        if task.kind == "regression":
            guesses = np.full(len(examples), train.labels.mean(), dtype=np.float32)
        else:
            guesses = np.full(len(examples), np.bincount(train.labels).argmax())
        found[split] = evaluate(task, guesses, examples.labels)[task.metric]
    return found


def _majority_cell(question: Question) -> str:
    return "/".join(f"{value:.1f}" for value in _majority(question).values())


def _data(plan: Plan, results: Found, about: dict[str, dict[str, Any]]) -> dict[str, Any]:
    tasks = {}
    for question in plan.questions:
        task = question.data.task
        tasks[task.name] = {
            "template": question.template.text,
            "label_words": question.template.words,
            "metric": task.metric,
            "test_examples": {split: len(examples) for split, examples in question.data.validation.items()},
            "training_pool": len(question.data.train),
            "majority": _majority(question),
            "notes": list(question.data.notes),
        }
    rows = [
        {"model": unit.model.label, "task": unit.question.name, "mode": unit.mode, "draw": unit.seed, **result,
         "predictions": f"predictions/{unit.predictions}"}
        for unit, result in results
    ]  # fmt: skip
    summary = []
    for mode in plan.modes:
        for model in plan.models:
            for question in plan.questions:
                for split in question.data.validation:
                    if values := _values(results, model, mode, question, split):
                        summary.append(
                            {"model": model.label, "task": question.name, "mode": mode, "split": split,
                             "metric": question.data.task.metric, "draws": len(values),
                             "mean": statistics.fmean(values), "standard_deviation": statistics.pstdev(values)}
                        )  # fmt: skip
    return {
        "modes": list(plan.modes),
        "few_shot": to_dict(plan.few),
        "draws": list(plan.seeds),
        "config": to_dict(plan.base),
        "models": about,
        "tasks": tasks,
        "units": len(plan.units),
        "finished": len(results),
        "summary": summary,
        "results": rows,
    }


def _explained(plan: Plan, results: Found, about: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["## Templates", ""]
    rows = []
    for question in plan.questions:
        words = ", ".join(f"{name}: {word}" for name, word in question.template.words.items())
        rows.append([question.data.task.title, f"`{question.template.text}`", words])
    lines += table(["Task", "Template", "Label words"], rows)
    for label, model in about.items():
        handled = f", [MASK] in the {model['mask_in']}" if "mask_in" in model else ""
        lines.append(f"- {label}: {model['engine']}{handled}")
    lines += ["", "## How this was measured", ""]
    few = plan.few
    if set(plan.modes) != {"zero-shot"}:
        pairs = [f"learning rate {lr:g} and batch {size}" for lr in few.lrs for size in few.batch_sizes]
        choice = f"with {pairs[0]}" if len(pairs) == 1 else (
            f"with each of {len(pairs)} pairs of learning rate ({', '.join(f'{lr:g}' for lr in few.lrs)}) and batch "
            f"({', '.join(map(str, few.batch_sizes))}), of which the draw's development examples choose"
        )  # fmt: skip
        seeds = ", ".join(map(str, plan.seeds))
        lines += [
            f"- Few-shot: {len(plan.seeds)} draws (seeds {seeds}) of {few.shots} examples per label to train on and as "
            f"many others to choose by, from the training file; {few.steps:,} updates {choice}; the best of the "
            f"evaluations every {few.evaluate_every} updates is tested. The draws are this program's, not the files of "
            "Gao et al. (2021), so that numbers compare with theirs on average only.",
        ]
    lines += [
        "- The test is the task's validation split. MRPC and QQP are scored by F1 and STS-B by Pearson's correlation, "
        "as in Gao et al., whose RoBERTa rows the paper's Table 7 shows; elsewhere it has accuracy and Spearman's.",
    ]
    lines += [f"- {question.data.task.title}: {note}" for question in plan.questions for note in question.data.notes]
    lines += _cut(results)
    for unit, result in results:
        for split, matrix in result.get("confusion", {}).items():
            names = unit.question.data.task.labels
            given = [name for i, name in enumerate(names) if any(row[i] for row in matrix)]
            if len(given) == 1:
                lines += [f"- {unit.key}, {split}: the model answers '{given[0]}' to everything"]
    missing = len(plan.units) - len(results)
    if missing:
        lines += [f"- {missing} of {len(plan.units)} units are not finished yet."]
    return lines


def _cut(results: Found) -> list[str]:
    """How many test inputs were cut: said once, since it does not depend on the draw."""
    lines = [
        f"- {unit.model.label} {unit.question.name} {unit.mode}, {split}: {part['cut']} of {part['inputs']} inputs "
        f"were cut ({part['cut_tokens']} tokens); the longest had {part['longest']}"
        for unit, result in results
        for split, part in result["test_truncation"].items()
        if part["cut"]
    ]
    return list(dict.fromkeys(lines))
