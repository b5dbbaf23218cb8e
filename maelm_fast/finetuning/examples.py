"""Labelled examples of a task from a directory or the hub, every row checked: the first fault is one line and the end.

Nothing is left out or mended silently. Whatever is not the task's plain official data, and every answer whose place was
wrong, is in TaskData.notes.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from maelm_fast.config import require
from maelm_fast.data.order import subset
from maelm_fast.errors import UserError
from maelm_fast.finetuning.tables import TRAIN, Table, find_tables, listed
from maelm_fast.finetuning.tasks import Task, with_labels, with_range

_WHOLE = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)")
_AS_FLOAT = re.compile(r"([+-]?\d+)\.0*")  # a whole number as it is written after its column had become floats
_LARGEST = float(np.finfo(np.float32).max)  # scores are kept in fp32


@dataclass(frozen=True)
class _Split:
    task: Task
    split: str
    source: str
    """The file or files, or the dataset."""
    ids: list[str]

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, indices: NDArray[np.int64] | Sequence[int]) -> Self:
        places = np.asarray(indices, np.int64)

        def taken(column: Any) -> Any:
            if isinstance(column, tuple):
                return tuple(map(taken, column))
            return column[places] if isinstance(column, np.ndarray) else [column[i] for i in places]

        columns = vars(self).keys() - {"task", "split", "source"}
        return replace(self, **{name: taken(getattr(self, name)) for name in columns})


@dataclass(frozen=True)
class Examples(_Split):
    """One split of a classification or regression task."""

    texts: tuple[list[str], ...]
    """One list of n strings for each of the task's text columns."""
    labels: NDArray
    """(n,) int64 classes, or float32 raw scores."""


@dataclass(frozen=True)
class Answer:
    text: str
    start: int
    """In characters of the context, which has `text` there; -1 for a validation answer its context does not have."""


@dataclass(frozen=True)
class SpanExamples(_Split):
    """One split of a SQuAD-like task."""

    questions: list[str]
    contexts: list[str]
    titles: list[str]
    answers: list[tuple[Answer, ...]]
    """() is unanswerable."""

    @property
    def texts(self) -> tuple[list[str], ...]:
        return self.questions, self.contexts


Split = Examples | SpanExamples


@dataclass(frozen=True)
class TaskData:
    task: Task
    """With the classes, or the range of scores, that the training file has."""
    train: Split
    validation: dict[str, Split]
    """By split, in the task's order; the first selects."""
    notes: tuple[str, ...]
    """What was taken from where, what is missing or not official, what was left out or repaired, with counts."""

    @property
    def splits(self) -> dict[str, Split]:
        """All of them, training first."""
        return {TRAIN: self.train, **self.validation}

    @cached_property
    def fingerprint(self) -> str:
        """Of the texts and labels of all splits, in order, and of how they are scored; not of where they were read
        from. 12 hexadecimal digits."""
        task = self.task
        whole = hashlib.sha256(json.dumps([task.kind, task.labels, task.metric, task.label_range]).encode())
        for name, split in self.splits.items():
            if isinstance(split, Examples):
                labels = split.labels.tolist()
            else:
                labels = [[(answer.text, answer.start) for answer in several] for several in split.answers]
            whole.update(json.dumps([name, *split.texts, labels]).encode())
        return whole.hexdigest()[:12]

    def limited(self, train: int | None = None, validation: int | None = None, why: str = "") -> TaskData:
        """At most so many examples of a split, fixed pseudo-random ones in their own order, which is noted."""
        splits, notes = self.splits, list(self.notes)
        for name, split in splits.items():
            limit = train if name == TRAIN else validation
            if limit is not None and limit < len(split):
                notes.append(f"{name}: {limit:,} of its {len(split):,} examples, a fixed random choice{why}")
                splits[name] = split.take(subset(limit, len(split)))
        return TaskData(self.task, splits.pop(TRAIN), splits, tuple(notes))


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
    read = TaskData(task, examples.pop(TRAIN), examples, tuple(notes)).limited(limit, why=" (--limit)")
    absent = []
    for split, part in read.splits.items() if task.kind == "classification" else ():
        assert isinstance(part, Examples)
        counts = np.bincount(part.labels, minlength=len(task.labels))
        if names := [name for name, count in zip(task.labels, counts, strict=True) if not count]:
            absent.append(f"{split}: no example of class {listed(names)}")
    return replace(read, notes=(*read.notes, *absent))


def _cells(tables: list[Table], column: str) -> Iterator[tuple[Table, int, Any]]:
    """(table, row, value) of a column, file after file."""
    for table in tables:
        for row, value in enumerate(table.columns[column]):
            yield table, row, value


def _complete(task: Task, tables: dict[str, list[Table]], notes: list[str]) -> Task:
    """A task of the user's own with the classes or the range of scores that its training file has."""
    column, labels = task.label_column, _cells(tables[TRAIN], task.label_column)
    if task.kind == "classification" and not task.labels:
        described = {names for table in tables[TRAIN] if (names := table.class_names.get(column))}
        require(len(described) <= 1, f"the training files describe different classes in '{column}': write them alike")
        found = {_class_name(column, *cell) for cell in labels}
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
        scores = [_score(None, *cell) for cell in labels]
        low, high = min(scores), max(scores)
        require(
            low < high,
            f"every label in column '{column}' of {tables[TRAIN][0].source} is {low:g}: "
            f"there is nothing to learn; name another column with --label-column",
        )
        notes.append(f"scores in column '{column}' of the training data range from {low:g} to {high:g}")
        return with_range(task, (low, high))
    return task


def _examples(
    task: Task, split: str, tables: list[Table], allowed: tuple[float, float] | None, notes: list[str]
) -> Split:
    """allowed: the range of scores if it was given and not found in the training data."""
    ids = _ids(task, split, tables, notes)
    texts = _texts(task, split, tables, notes)
    source, cells = ", ".join(table.source for table in tables), _cells(tables, task.label_column)
    if task.kind == "spans":
        titles = [str(title or "") for table in tables for title in table.columns.get("title", [""] * len(table))]
        contexts = {context: context for context in texts[1]}  # questions of a passage share one string
        shared = [contexts[context] for context in texts[1]]
        return SpanExamples(task, split, source, ids, texts[0], shared, titles, _answers(split, cells, shared, notes))
    if task.kind == "regression":
        labels: NDArray = np.array([_score(allowed, *cell) for cell in cells], np.float32)
    else:
        labels = _classes(task, cells)
    return Examples(task, split, source, ids, texts, labels)


def _ids(task: Task, split: str, tables: list[Table], notes: list[str]) -> list[str]:
    """Names of the rows: the id (idx) column, if each has one of its own; else numbers from 0."""
    columns = (table.columns.get("id", table.columns.get("idx", [""] * len(table))) for table in tables)
    ids = ["" if value is None else str(value) for column in columns for value in column]
    repeated, times = Counter(ids).most_common(1)[0]
    if times == 1 and "" not in ids:
        return ids
    require(
        task.kind != "spans" or not repeated or times == 1, f"{split}: {times} rows have the id '{repeated}': keep one"
    )
    if any(ids):
        notes.append(f"{split}: not every row has an id of its own, so rows go by their numbers from 0")
    return [str(i) for i in range(len(ids))]


def _texts(task: Task, split: str, tables: list[Table], notes: list[str]) -> tuple[list[str], ...]:
    """The text columns, checked to hold text; which some tasks have pairs without."""
    texts = tuple([_text(column, *cell) for cell in _cells(tables, column)] for column in task.text_columns)
    half_empty = 0
    for (table, row, _), row_texts in zip(_cells(tables, task.label_column), zip(*texts, strict=True), strict=True):
        if empty := [column for column, text in zip(task.text_columns, row_texts, strict=True) if not text.strip()]:
            tolerated = task.may_be_empty and len(empty) < len(row_texts)
            require(tolerated, f"{table.where(row)}: '{empty[0]}' is empty: mend or remove the row")
            half_empty += 1
    if half_empty:
        notes.append(
            f"{split}: {half_empty:,} of {len(texts[0]):,} rows have an empty text and are read as they are, "
            f"as the official data has some"
        )
    return texts


def _text(column: str, table: Table, row: int, value: Any) -> str:
    if not isinstance(value, str):
        kind = "null" if value is None else f"{type(value).__name__} {str(value)[:40]}"
        raise UserError(f"{table.where(row)}: '{column}' is not text but {kind}: mend or remove the row")
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError:
        raise UserError(f"{table.where(row)}: '{column}' holds half a surrogate pair: mend or remove the row") from None
    return value


def _class_name(column: str, table: Table, row: int, value: Any) -> str:
    """A label as a class's name, or as the digits of its id: the name, where the file gives names to ids."""
    where, described = table.where(row), table.class_names.get(column, ())
    _require_label(value, where)
    if isinstance(value, float) and value.is_integer():  # integers with nulls among them become floats in pandas
        value = int(value)
    if not isinstance(value, (str, int)):
        raise UserError(
            f"{where}: label {str(value)[:40]} is a {type(value).__name__}: classes are names or whole numbers"
        )
    if isinstance(value, str) and (whole := _AS_FLOAT.fullmatch(value.strip())):
        value = whole[1]
    if isinstance(value, int) and 0 <= value < len(described):
        return described[value]
    return str(value).strip()


def _require_label(value: Any, where: str) -> None:
    absent = value is None or (isinstance(value, float) and math.isnan(value))
    if absent or (isinstance(value, str) and not value.strip()):
        raise UserError(f"{where} has no label: label or remove the row")


def _classes(task: Task, cells: Iterable[tuple[Table, int, Any]]) -> NDArray[np.int64]:
    """(n,) ids of the classes: of their names, or ids as they stand unless names are numbers themselves."""
    ids = {name: i for i, name in enumerate(task.labels)}
    by_id = not any(_WHOLE.fullmatch(name) for name in task.labels)
    if by_id:
        ids |= {str(i): i for i in range(len(task.labels))}
    labels = []
    for table, row, value in cells:
        name = _class_name(task.label_column, table, row, value)
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
        labels.append(ids[name])
    return np.array(labels, np.int64)


def _score(allowed: tuple[float, float] | None, table: Table, row: int, value: Any) -> float:
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
    split: str, cells: Iterable[tuple[Table, int, Any]], contexts: list[str], notes: list[str]
) -> list[tuple[Answer, ...]]:
    moved = missing = 0
    result = []
    for (table, row, value), context in zip(cells, contexts, strict=True):
        answers = []
        for text, stated in _answer_pairs(value, table.where(row)):
            start = stated if stated >= 0 and context.startswith(text, stated) else context.find(text)
            require(
                start >= 0 or split != TRAIN,
                f"{table.where(row)}: the passage lacks the answer '{text[:60]}': mend or remove the row",
            )
            missing += start < 0
            moved += 0 <= start != stated
            answers.append(Answer(text, start))
        result.append(tuple(answers))
    given = sum(map(len, result))
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
