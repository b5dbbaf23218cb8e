"""Labelled examples of a task from a directory or the hub, every row checked: the first fault is one line and the end.

Nothing is left out or mended silently. Whatever is not the task's plain official data, and every answer whose place was
wrong, is in TaskData.notes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maelm_fast.config import require
from maelm_fast.data.order import subset
from maelm_fast.errors import UserError
from maelm_fast.finetuning.sources import TRAIN, find_tables, listed
from maelm_fast.finetuning.tables import Table
from maelm_fast.finetuning.tasks import Task, with_labels, with_range

_WHOLE = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)")
_AS_FLOAT = re.compile(r"([+-]?\d+)\.0*")  # a whole number as it is written after its column had become floats
_LARGEST = float(np.finfo(np.float32).max)  # scores are kept in fp32


@dataclass(frozen=True)
class Examples:
    """One split of a classification or regression task."""

    task: Task
    split: str
    source: str
    """The file or files, or the dataset."""
    ids: list[str]
    texts: tuple[list[str], ...]
    """One list of n strings for each of the task's text columns."""
    labels: NDArray
    """(n,) int64 classes, or float32 raw scores."""

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, indices: NDArray[np.int64] | Sequence[int]) -> Examples:
        places = np.asarray(indices, np.int64)
        return replace(
            self,
            ids=[self.ids[i] for i in places],
            texts=tuple([column[i] for i in places] for column in self.texts),
            labels=self.labels[places],
        )


@dataclass(frozen=True)
class Answer:
    text: str
    start: int
    """In characters of the context, which has `text` there; -1 for a validation answer its context does not have."""


@dataclass(frozen=True)
class SpanExamples:
    """One split of a SQuAD-like task."""

    task: Task
    split: str
    source: str
    ids: list[str]
    questions: list[str]
    contexts: list[str]
    titles: list[str]
    answers: list[tuple[Answer, ...]]
    """() is unanswerable."""

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, indices: NDArray[np.int64] | Sequence[int]) -> SpanExamples:
        places = np.asarray(indices, np.int64)
        return replace(
            self,
            ids=[self.ids[i] for i in places],
            questions=[self.questions[i] for i in places],
            contexts=[self.contexts[i] for i in places],
            titles=[self.titles[i] for i in places],
            answers=[self.answers[i] for i in places],
        )


@dataclass(frozen=True)
class TaskData:
    task: Task
    """With the classes, or the range of scores, that the training file has."""
    train: Examples | SpanExamples
    validation: dict[str, Examples | SpanExamples]
    """By split, in the task's order; the first selects."""
    notes: tuple[str, ...]
    """What was taken from where, what is missing or not official, what was left out or repaired, with counts."""


def read_task(
    task: Task, data: str, train: Sequence[str] = (), validation: Sequence[str] = (), limit: int | None = None
) -> TaskData:
    """A task's training and validation examples.

    data: a directory that holds the files, or <task name>/ with them (.parquet, .jsonl, .json, .csv, .tsv, the last two
    with a line of column names); "hub", or "hub:owner/name[:configuration]", through `datasets`. A split is the file
    named as it ("train.parquet"; "dev" for "validation"), or else the only one whose name starts so, which is noted.
    train, validation: files of the directory, or any paths (of the hub: names of splits), when these are not plain;
    several are put one after the other, except that a task with two validation splits takes each file for the split
    its name starts with. limit: that many of the training examples, a fixed pseudo-random choice.
    A directory may lack a validation split other than the first, which is noted. Raises UserError on the first fault.
    """
    require(limit is None or limit >= 1, f"--limit is a number of training examples, at least 1, not {limit}")
    tables, notes = find_tables(task, data, train, validation)
    notes += [note for split in tables.values() for table in split for note in table.notes]
    allowed = task.label_range
    task = _complete(task, tables, notes)
    examples = {split: _examples(task, split, parts, allowed, notes) for split, parts in tables.items()}
    for split, official in task.official:
        if split in examples and len(examples[split]) != official:
            notes.append(
                f"{split}: {len(examples[split]):,} examples where the official split has {official:,}: "
                f"results do not compare with published ones"
            )
    trained = examples.pop(TRAIN)
    if limit is not None and limit < len(trained):
        notes.append(f"train: {limit:,} of its {len(trained):,} examples, a fixed random choice (--limit)")
        trained = trained.take(subset(limit, len(trained)))
    for split, part in {TRAIN: trained, **examples}.items():
        if isinstance(part, Examples) and task.kind == "classification":
            counts = np.bincount(part.labels, minlength=len(task.labels))
            if absent := [name for name, count in zip(task.labels, counts, strict=True) if not count]:
                notes.append(f"{split}: no example of class {listed(absent)}")
    return TaskData(task, trained, examples, tuple(notes))


def _complete(task: Task, tables: dict[str, list[Table]], notes: list[str]) -> Task:
    """A task of the user's own with the classes or the range of scores that its training file has."""
    if task.kind == "classification" and not task.labels:
        column = task.label_column
        described = {names for table in tables[TRAIN] if (names := table.class_names.get(column))}
        require(len(described) <= 1, f"the training files describe different classes in '{column}': write them alike")
        found = {
            _class_name(value, table.class_names.get(column), table, row)
            for table in tables[TRAIN]
            for row, value in enumerate(table.columns[column])
        }
        numbers = [name for name in found if _NUMBER.fullmatch(name)]
        whole = all(_WHOLE.fullmatch(name) for name in found)
        require(
            len(numbers) < len(found) or whole,
            f"the labels in column '{column}' of {tables[TRAIN][0].source} are numbers with fractions "
            f"({listed(numbers[:3])}): use --task regression, or give the classes names",
        )
        names = described.pop() if described else tuple(sorted(found, key=int if whole else None))
        notes.append(f"{len(names)} classes in column '{column}' of the training data: {listed(names)}")
        return with_labels(task, names)
    if task.kind == "regression" and task.label_range is None:
        scores = [
            _score(value, table, row, None)
            for table in tables[TRAIN]
            for row, value in enumerate(table.columns[task.label_column])
        ]
        low, high = min(scores), max(scores)
        require(
            low < high,
            f"every label in column '{task.label_column}' of {tables[TRAIN][0].source} is {low:g}: "
            f"there is nothing to learn; name another column with --label-column",
        )
        notes.append(f"scores in column '{task.label_column}' of the training data range from {low:g} to {high:g}")
        return with_range(task, (low, high))
    return task


def _examples(
    task: Task, split: str, tables: list[Table], allowed: tuple[float, float] | None, notes: list[str]
) -> Examples | SpanExamples:
    """allowed: the range of scores if it was given and not found in the training data."""
    ids = _ids(task, split, tables, notes)
    texts = tuple([text for table in tables for text in _texts(task, column, table)] for column in task.text_columns)
    source = ", ".join(table.source for table in tables)
    if task.kind == "spans":
        titles = [str(title or "") for table in tables for title in table.columns.get("title", [""] * len(table))]
        contexts = {context: context for context in texts[1]}  # questions of a passage share one string
        return SpanExamples(
            task=task,
            split=split,
            source=source,
            ids=ids,
            questions=texts[0],
            contexts=[contexts[context] for context in texts[1]],
            titles=titles,
            answers=_answers(task, split, tables, texts[1], notes),
        )
    _require_texts(task, split, tables, texts, notes)
    if task.kind == "regression":
        scores = [
            _score(value, table, row, allowed)
            for table in tables
            for row, value in enumerate(table.columns[task.label_column])
        ]
        labels: NDArray = np.array(scores, np.float32)
    else:
        labels = np.concatenate([_classes(task, table) for table in tables])
    return Examples(task, split, source, ids, texts, labels)


def _ids(task: Task, split: str, tables: list[Table], notes: list[str]) -> list[str]:
    """Names of the rows: the id (idx) column, or numbers from 0; with the file's where several were put together, but
    for ids of questions, which are their own."""
    ids: list[str] = []
    files = [Path(table.source).name for table in tables]
    if len(set(files)) < len(files):
        files = [table.source for table in tables]
    for table, file in zip(tables, files, strict=True):
        column = next((name for name in ("id", "idx") if name in table.columns), None)
        names = [str(value) for value in table.columns[column] if value not in (None, "")] if column else []
        own = len(set(names)) == len(table)
        if not own and column:
            repeated, count = Counter(names).most_common(1)[0] if names else ("", 0)
            require(
                count < 2 or not task.official,
                f"{table.source}: {count} rows have the {column} '{repeated}': each needs its own",
            )
            notes.append(
                f"{split}: column '{column}' of {table.source} {'repeats' if count > 1 else 'lacks'} values, "
                f"so rows go by their numbers from 0"
            )
        if not own:
            names = [str(i) for i in range(len(table))]
        single = len(tables) == 1 or (own and task.kind == "spans")
        ids += names if single else [f"{file}:{name}" for name in names]
    if len(set(ids)) < len(ids):
        repeated = Counter(ids).most_common(1)[0][0]
        raise UserError(f"{split}: id '{repeated}' occurs in two of its files: remove one of these rows, or files")
    return ids


def _texts(task: Task, column: str, table: Table) -> list[str]:
    """The column, checked to hold text; only questions and passages are checked not to be empty."""
    values = table.columns[column]
    for row, value in enumerate(values):
        if not isinstance(value, str):
            kind = "null" if value is None else f"{type(value).__name__} {str(value)[:40]}"
            raise UserError(f"{table.where(row)}: '{column}' is not text but {kind}: mend or remove the row")
        if task.kind == "spans" and not value.strip():
            raise UserError(f"{table.where(row)}: '{column}' is empty: mend or remove the row")
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise UserError(
                    f"{table.where(row)}: '{column}' holds half a surrogate pair: mend or remove the row"
                ) from None
    return values


def _require_texts(task: Task, split: str, tables: list[Table], texts: tuple[list[str], ...], notes: list[str]) -> None:
    places = [(table, row) for table in tables for row in range(len(table))]
    half_empty = 0
    for (table, row), row_texts in zip(places, zip(*texts, strict=True), strict=True):
        empty = [column for column, text in zip(task.text_columns, row_texts, strict=True) if not text.strip()]
        if not empty:
            continue
        tolerated = task.may_be_empty and len(empty) < len(row_texts)
        require(tolerated, f"{table.where(row)}: '{empty[0]}' is empty: mend or remove the row")
        half_empty += 1
    if half_empty:
        notes.append(
            f"{split}: {half_empty:,} of {len(places):,} rows have an empty text and are read as they are, "
            f"as the official data has some"
        )


def _class_name(value: Any, described: tuple[str, ...] | None, table: Table, row: int) -> str:
    """A label as a class's name, or as the digits of its id. described: the names that the file gives to ids."""
    where = table.where(row)
    _require_label(value, where)
    if isinstance(value, float) and value.is_integer():  # integers with nulls among them become floats in pandas
        value = int(value)
    if not isinstance(value, (str, int)):
        raise UserError(
            f"{where}: label {str(value)[:40]} is a {type(value).__name__}: classes are names or whole numbers"
        )
    if isinstance(value, str) and (whole := _AS_FLOAT.fullmatch(value.strip())):
        value = whole[1]
    if described and isinstance(value, int) and 0 <= value < len(described):
        return described[value]
    return str(value).strip()


def _require_label(value: Any, where: str) -> None:
    absent = value is None or (isinstance(value, float) and math.isnan(value))
    if absent or (isinstance(value, str) and not value.strip()):
        raise UserError(f"{where} has no label: label or remove the row")


def _classes(task: Task, table: Table) -> NDArray[np.int64]:
    """(n,) ids of the classes: of their names, or ids as they stand unless names are numbers themselves."""
    ids = {name: i for i, name in enumerate(task.labels)}
    by_id = not any(_WHOLE.fullmatch(name) for name in task.labels)
    if by_id:
        ids |= {str(i): i for i in range(len(task.labels))}
    described = table.class_names.get(task.label_column)
    labels = np.empty(len(table), np.int64)
    for row, value in enumerate(table.columns[task.label_column]):
        name = _class_name(value, described, table, row)
        if name not in ids:
            require(
                not (task.official and name == "-1"),
                f"{table.where(row)}: label -1 stands for a hidden one (test labels are not public): "
                f"use a split that has labels",
            )
            raise UserError(
                f"{table.where(row)}: unknown label '{name[:40]}': the classes are {listed(task.labels)}"
                + (f", or their ids from 0 to {len(task.labels) - 1}" if by_id else "")
            )
        labels[row] = ids[name]
    return labels


def _score(value: Any, table: Table, row: int, allowed: tuple[float, float] | None) -> float:
    where = table.where(row)
    _require_label(value, where)
    try:
        score = float("no number" if isinstance(value, bool) else value)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{where}: label '{str(value)[:40]}' is not a number: mend or remove the row") from None
    require(abs(score) <= _LARGEST, f"{where}: label {score} is not finite in fp32: mend or remove the row")
    if allowed is not None:
        hidden = ": -1 stands for a hidden label, use a split that has labels" if score == -1 else ": mend the row"
        require(
            allowed[0] <= score <= allowed[1],
            f"{where}: label {score:g} lies outside {allowed[0]:g} to {allowed[1]:g}{hidden}",
        )
    return score


def _answers(
    task: Task, split: str, tables: list[Table], contexts: list[str], notes: list[str]
) -> list[tuple[Answer, ...]]:
    places = [(table, row) for table in tables for row in range(len(table))]
    moved = missing = 0
    result = []
    for (table, row), context in zip(places, contexts, strict=True):
        answers = []
        for text, stated in _answer_pairs(table.columns[task.label_column][row], table.where(row)):
            start = stated if stated >= 0 and context.startswith(text, stated) else context.find(text)
            require(
                start >= 0 or split != TRAIN,
                f"{table.where(row)}: the passage lacks the answer '{text[:60]}': mend or remove the row",
            )
            missing += start < 0
            moved += 0 <= start != stated
            answers.append(Answer(text, start))
        result.append(tuple(answers))
    given = sum(len(answers) for answers in result)
    if moved:
        notes.append(
            f"{split}: {moved:,} of {given:,} answers are not at their offset; their first occurrence is taken"
        )
    if missing:
        notes.append(
            f"{split}: {missing:,} of {given:,} answers do not occur in their passage; only their text is scored"
        )
    return result


def _answer_pairs(value: Any, where: str) -> list[tuple[str, int]]:
    """(text, start) of {"text": [...], "answer_start": [...]}, as on the hub, or [{"text", "answer_start"}, ...]."""
    try:
        if isinstance(value, dict):
            pairs = list(zip(value["text"], value["answer_start"], strict=True))
        elif isinstance(value, list):
            pairs = [(answer["text"], answer["answer_start"]) for answer in value]
        else:
            raise TypeError("an empty field of a csv file is no list")
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f'{where}: the answers are not as in SQuAD: write {{"text": [...], "answer_start": [...]}}, empty lists '
            f"for an unanswerable question"
        ) from None
    for text, start in pairs:
        require(isinstance(text, str) and bool(text.strip()), f"{where}: an answer is empty: mend or remove the row")
        require(
            type(start) is int, f"{where}: answer_start of '{text[:60]}' is no whole number: mend or remove the row"
        )
    return pairs
