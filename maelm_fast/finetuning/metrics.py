"""Metrics of classification and regression tasks, and what can be had without a model: the baselines of reports.

Everything is in percent, as in the paper's tables. scikit-learn and scipy are optional and loaded on use. SQuAD's
scores are in squad.py.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maelm_fast.errors import UserError
from maelm_fast.finetuning.examples import Examples, SpanExamples, TaskData
from maelm_fast.finetuning.squad import squad_scores
from maelm_fast.finetuning.tasks import Task

_WORD = re.compile(r"\w+")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s")


def require_scikit_learn() -> None:
    """Raises UserError with the remedy if scikit-learn or scipy is not installed."""
    try:
        import scipy  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError:
        raise UserError("fine-tuning needs scikit-learn and scipy: pip install scikit-learn scipy") from None


def evaluate(task: Task, predictions: NDArray, labels: NDArray) -> dict[str, float]:
    """The task's metrics in percent, 100 perfect.

    predictions, labels: (n,) ids of classes, or raw scores. f1 is that of class 1 of two, macro_f1 the mean over the
    classes. A correlation (Matthews, Spearman, Pearson) is 0 where it has no value: predictions or labels that are all
    alike, or predictions that are not finite. Raises ValueError for shapes that do not agree, UserError without
    scikit-learn.
    """
    if predictions.shape != labels.shape or predictions.ndim != 1 or not len(labels):
        raise ValueError(f"predictions {predictions.shape} and labels {labels.shape} must be two rows of one length")
    require_scikit_learn()
    return {name: 100.0 * _metric(name, task, predictions, labels) for name in task.metrics}


def confusion(task: Task, predictions: NDArray, labels: NDArray) -> NDArray[np.int64]:
    """(classes, classes) counts; a row is a true class, a column a predicted one."""
    classes = len(task.labels)
    counts = np.bincount(labels * classes + predictions, minlength=classes * classes)
    return counts.astype(np.int64).reshape(classes, classes)


def _metric(name: str, task: Task, predictions: NDArray, labels: NDArray) -> float:
    if name in ("spearman", "pearson"):
        return _correlation(name, predictions.astype(np.float64), labels.astype(np.float64))
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    if name == "accuracy":
        return float(accuracy_score(labels, predictions))
    if name == "matthews":
        return float(matthews_corrcoef(labels, predictions))
    kind: Any = {"average": "macro", "labels": range(len(task.labels))} if name == "macro_f1" else {"pos_label": 1}
    return float(f1_score(labels, predictions, zero_division=0, **kind))


def _correlation(name: str, predictions: NDArray, labels: NDArray) -> float:
    from scipy.stats import pearsonr, spearmanr

    if not np.isfinite(predictions).all() or np.ptp(predictions) == 0 or np.ptp(labels) == 0:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nearly constant predictions: their correlation is what it is
        value = (spearmanr if name == "spearman" else pearsonr)(predictions, labels).statistic
    return float(value) if np.isfinite(value) else 0.0


def baselines(data: TaskData, split: str | None = None) -> dict[str, dict[str, float]]:
    """Metrics, as `evaluate` or `squad_scores` gives them, of predicting without reading; by the name of the baseline.

    Classification: "majority" class of the training data; "length", a logistic regression on the numbers of words and
    characters; for pairs "overlap", one on the words that both texts have and the ratio of their lengths. Regression:
    "mean", and the other two as linear regressions. SQuAD: "no answer", and "first sentence" of the passage.
    split: of the validation splits, the first if not given.
    """
    validation = data.validation[split or next(iter(data.validation))]
    if isinstance(validation, SpanExamples):
        return _span_baselines(validation)
    require_scikit_learn()
    if not isinstance(data.train, Examples):
        raise ValueError("training and validation examples are of different kinds")
    fitted = {"length": _lengths}
    if len(data.task.text_columns) == 2:
        fitted["overlap"] = _overlap
    result = {"majority" if data.task.kind == "classification" else "mean": guessed(data.train, validation)}
    for name, features in fitted.items():
        predictions = _fit(data.task, features(data.train), data.train.labels, features(validation))
        result[name] = evaluate(data.task, predictions, validation.labels)
    return result


def guessed(train: Examples, validation: Examples) -> dict[str, float]:
    """Metrics of the training data's most frequent class, or mean score, for all."""
    classes = train.task.kind == "classification"
    guess = np.bincount(train.labels).argmax() if classes else train.labels.mean()
    return evaluate(train.task, np.full(len(validation), guess), validation.labels)


def _fit(task: Task, features: NDArray, labels: NDArray, wanted: NDArray) -> NDArray:
    """Predictions for `wanted` of a (logistic) regression on standardised features."""
    from sklearn.linear_model import LinearRegression, LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if len(np.unique(labels)) == 1:
        return np.full(len(wanted), labels[0])
    regression: Any = LogisticRegression(max_iter=200) if task.kind == "classification" else LinearRegression()
    predictions: NDArray = make_pipeline(StandardScaler(), regression).fit(features, labels).predict(wanted)
    return predictions


def _lengths(examples: Examples) -> NDArray:
    """(n, 4 per text): words and characters, and their logarithms."""
    counts = [[len(text.split()) for text in column] for column in examples.texts]
    counts += [[len(text) for text in column] for column in examples.texts]
    values = np.array(counts, np.float64).T
    return np.concatenate([values, np.log1p(values)], axis=1)


def _overlap(examples: Examples) -> NDArray:
    """(n, 4): the shares of either text's words that the other has, of all words that both have, ratio of lengths."""
    rows = np.empty((len(examples), 4))
    for i, (first, second) in enumerate(zip(*examples.texts, strict=True)):
        a, b = set(_WORD.findall(first.lower())), set(_WORD.findall(second.lower()))
        both = len(a & b)
        rows[i] = (
            both / max(len(a), 1),
            both / max(len(b), 1),
            both / max(len(a | b), 1),
            np.log((1 + len(first)) / (1 + len(second))),
        )
    return rows


def _span_baselines(validation: SpanExamples) -> dict[str, dict[str, float]]:
    """Nothing is known of how sure they are, so that the best threshold's scores are the fixed one's."""
    first = [_SENTENCE_END.split(context.strip(), maxsplit=1)[0] for context in validation.contexts]
    result = {}
    for name, texts in (("no answer", [""] * len(first)), ("first sentence", first)):
        scores = squad_scores(
            dict(zip(validation.ids, texts, strict=True)), dict.fromkeys(validation.ids, 0.0), validation
        )
        kept = {key: value for key, value in scores.items() if not key.startswith("best_")}
        result[name] = kept | {"best_exact": scores["exact"], "best_f1": scores["f1"]}
    return result
