"""What a task is, as data: columns, classes, metrics, sizes. GLUE's eight, SQuAD 2.0, and tasks of the user's own.

Names of columns and the order of classes are the hub's (nyu-mll/glue, rajpurkar/squad_v2), so that its files can be
read as they are and a published model's outputs mean the same. WNLI is left out, as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from maelm_fast.config import require
from maelm_fast.errors import UserError, unknown

Kind = Literal["classification", "regression", "spans"]
Group = Literal["small", "large", "squad"]

BINARY_METRICS = ("accuracy", "f1", "macro_f1", "matthews")
CLASS_METRICS = ("accuracy", "macro_f1", "matthews")
REGRESSION_METRICS = ("spearman", "pearson")
SPAN_METRICS = (
    *("exact", "f1", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1"),
    *("best_exact", "best_f1"),
)


@dataclass(frozen=True)
class Task:
    name: str
    """What the user types: "sst2"."""
    title: str
    """As in the paper's tables: "SST-2"."""
    kind: Kind
    text_columns: tuple[str, ...]
    """One or two; spans: ("question", "context")."""
    label_column: str
    labels: tuple[str, ...]
    """Names of the classes, by id; () for regression and spans, and for a task of the user's own until its training
    file has been read (TaskData.task has them)."""
    metrics: tuple[str, ...]
    """All that are computed, in percent; more is better."""
    metric: str
    """The one that chooses the best checkpoint and that tables show (paper: accuracy, also for MRPC and QQP; Matthews'
    correlation for CoLA, Spearman's for STS-B). SQuAD 2.0: best_f1, as published searches of this model family do;
    which threshold the paper's F1 has is not known."""
    validation: tuple[str, ...] = ("validation",)
    """Splits to evaluate on; the first selects."""
    label_range: tuple[float, float] | None = None
    """Regression: scaled to 0..1 for training (released code: STS-B's scores are divided by 5)."""
    hub: tuple[str, str | None] | None = None
    """(dataset, configuration)."""
    group: Group = "small"
    """Which of the paper's grids (Tables 4 and 5) it is searched with."""
    official: tuple[tuple[str, int], ...] = ()
    """(split, examples) of the official data: other counts are noted, for such results do not compare."""
    may_be_empty: bool = False
    """One text of a pair may be empty: so it is in a few rows of the official QQP."""

    @property
    def outputs(self) -> int:
        """Numbers the head puts out for an input; for spans, for a token."""
        return {"classification": len(self.labels), "regression": 1, "spans": 2}[self.kind]

    def scale(self, scores: ArrayLike) -> NDArray[np.float32]:
        """Raw scores of a regression task to targets: label_range becomes 0..1."""
        low, high = self._range()
        return ((np.asarray(scores, np.float64) - low) / (high - low)).astype(np.float32)

    def unscale(self, outputs: ArrayLike) -> NDArray[np.float32]:
        """The inverse of `scale`: a model's outputs to raw scores."""
        low, high = self._range()
        return (np.asarray(outputs, np.float64) * (high - low) + low).astype(np.float32)

    def _range(self) -> tuple[float, float]:
        if self.label_range is None:
            raise ValueError(f"{self.name} has no label range")
        return self.label_range


def _task(
    name: str,
    title: str,
    columns: str,
    official: tuple[int, ...],
    labels: str = "",
    metrics: tuple[str, ...] = ("accuracy",),
    validation: tuple[str, ...] = ("validation",),
    **more: Any,
) -> Task:
    """A task of GLUE, unless `more` says otherwise."""
    fields: dict[str, Any] = {
        "kind": "classification",
        "text_columns": tuple(columns.split()),
        "label_column": "label",
        "labels": tuple(labels.split()),
        "metric": metrics[0],
        "hub": ("nyu-mll/glue", name),
        "official": tuple(zip(("train", *validation), official, strict=True)),
    }
    fields |= more
    return Task(name, title, metrics=metrics, validation=validation, **fields)


_BOTH, _HALVES = ("accuracy", "f1"), ("validation_matched", "validation_mismatched")
_PAIR, _ENTAILMENT = "sentence1 sentence2", "entailment not_entailment"
_ALL = (
    _task(
        *("mnli", "MNLI", "premise hypothesis", (392702, 9815, 9832), "entailment neutral contradiction"),
        validation=_HALVES,
        group="large",
    ),
    _task(
        *("qqp", "QQP", "question1 question2", (363846, 40430), "not_duplicate duplicate", _BOTH),
        group="large",
        may_be_empty=True,
    ),
    _task("qnli", "QNLI", "question sentence", (104743, 5463), _ENTAILMENT, group="large"),
    _task("sst2", "SST-2", "sentence", (67349, 872), "negative positive", group="large"),
    _task("cola", "CoLA", "sentence", (8551, 1043), "unacceptable acceptable", ("matthews", "accuracy")),
    _task("rte", "RTE", _PAIR, (2490, 277), _ENTAILMENT),
    _task("mrpc", "MRPC", _PAIR, (3668, 408), "not_equivalent equivalent", _BOTH),
    _task(
        *("stsb", "STS-B", _PAIR, (5749, 1500)),
        metrics=REGRESSION_METRICS,
        kind="regression",
        label_range=(0.0, 5.0),
    ),
    _task(
        *("squad_v2", "SQuAD 2.0", "question context", (130319, 11873)),
        metrics=SPAN_METRICS,
        kind="spans",
        label_column="answers",
        metric="best_f1",
        hub=("rajpurkar/squad_v2", None),
        group="squad",
    ),
)
TASKS = {task.name: task for task in _ALL}


def get(name: str) -> Task:
    """The task of that name. Raises UserError that lists the known ones."""
    if name not in TASKS:
        own = "; for files of your own: --task classification|regression with --text-columns and --label-column"
        raise UserError(f"{unknown('task', name, TASKS)}{own}")
    return TASKS[name]


def custom(
    kind: Literal["classification", "regression"], text_columns: Sequence[str], label_column: str, name: str = "custom"
) -> Task:
    """A task of the user's own, for files with named columns; the training file's classes, or range of scores, are its.

    Its own metric is accuracy or Spearman's correlation. f1 is that of the second of two classes, macro_f1 the mean
    over any number of them. Raises UserError for columns that make no sense."""
    # A sweep's table would set its numbers beside the paper's.
    require(name not in TASKS, f"--name {name} is the name of another task: choose one of your own")
    require(
        kind in ("classification", "regression"),
        f"--task is classification or regression, not '{kind}'; SQuAD-like: task squad_v2",
    )
    columns = tuple(text_columns)
    require(
        len(columns) in (1, 2) and all(columns),
        f"--text-columns names one column or two with a comma between them, not '{','.join(columns)}'",
    )
    require(len(set(columns)) == len(columns), f"--text-columns names '{columns[0]}' twice: name two columns")
    require(bool(label_column), "--label-column is empty: name the column that holds the labels")
    require(label_column not in columns, f"--label-column '{label_column}' is also a text column: name another")
    metrics = BINARY_METRICS if kind == "classification" else REGRESSION_METRICS
    return Task(name, name, kind, columns, label_column, (), metrics, metrics[0])


def with_labels(task: Task, labels: Sequence[str]) -> Task:
    """A classification task with its classes, and the metrics that so many classes have. Raises UserError."""
    names = tuple(labels)
    require(len(set(names)) == len(names), "a class is named twice: every class needs a name of its own")
    require(len(names) >= 2, f"one class ('{''.join(names)}') leaves nothing to learn: at least two are needed")
    return replace(task, labels=names, metrics=BINARY_METRICS if len(names) == 2 else CLASS_METRICS)


def with_range(task: Task, label_range: tuple[float, float]) -> Task:
    """A regression task with its range of scores. Raises UserError."""
    low, high = label_range
    require(
        math.isfinite(low) and math.isfinite(high) and low < high,
        f"the scores of a regression task range from a lower to a higher number, not from {low} to {high}",
    )
    return replace(task, label_range=(float(low), float(high)))
