"""Scores of SQuAD 2.0, as its official scorer (evaluate-v2.0.py) gives them.

A question is scored by exact match and by F1 of words, after normalisation and against the best of its answers; one
without answers is right if the prediction is empty. Two sets of numbers, kept apart because mixing them is the usual
mistake: `exact`, `f1`, `HasAns_*` and `NoAns_*` at a fixed threshold on the odds of "no answer", and `best_*` at the
threshold that serves the questions scored best, which is tuned on them.

Ours, where the official scorer leaves a result without meaning: questions of equal odds are blanked together (its scan
stops between them, where no threshold lies), the threshold that blanks everything is below all odds, and a question
without a prediction is an error.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from maelm_fast.config import require
from maelm_fast.finetuning.examples import SpanExamples

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ROUNDING = 1e-9  # sums of F1 that differ by less are equal
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation, the articles a, an, the, and white space beyond single blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(gold: list[str], predicted: list[str]) -> float:
    """Harmonic mean of precision and recall of the words, each as often as it occurs; 1 if both are empty, 0 if one."""
    if not gold or not predicted:
        return float(gold == predicted)
    common = sum((Counter(gold) & Counter(predicted)).values())
    return 2.0 * common / (len(gold) + len(predicted))


def question_scores(
    texts: Mapping[str, str], examples: SpanExamples
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(exact, F1) of every question in the order of `examples`, each (n,) in 0..1, if no prediction is blanked."""
    exacts, f1s = np.empty(len(examples)), np.empty(len(examples))
    for i, (identity, answers) in enumerate(zip(examples.ids, examples.answers, strict=True)):
        predicted = normalise(texts[identity])
        golds = {gold for answer in answers if (gold := normalise(answer.text))} or {""}
        exacts[i] = predicted in golds
        f1s[i] = max(f1(gold.split(), predicted.split()) for gold in golds)
    return exacts, f1s


def squad_scores(
    texts: Mapping[str, str], null_odds: Mapping[str, float], examples: SpanExamples, threshold: float = 0.0
) -> dict[str, float]:
    """Percentages at a fixed and at the best threshold, and counts.

    texts: by question id, the best answer there is, "" for none. null_odds: by question id, how much "no answer" is
    preferred to it; above a threshold the text is taken as "". threshold: the fixed one; 0 (ours) lets the model's own
    preference decide, where odds are a difference of logits (released code: 1).
    Keys: exact, f1, total; HasAns_ and NoAns_exact, _f1, _total, each kind only if there are such questions;
    best_exact, best_exact_thresh, best_f1, best_f1_thresh. Raises UserError if a question has no prediction or odds
    that are not a number.
    """
    require(len(examples) > 0, "there are no questions to score: give a file that has some")
    for identity in examples.ids:
        require(
            identity in texts and identity in null_odds,
            f"no prediction for question {identity}: predict every question of {examples.source}",
        )
    odds = np.array([null_odds[identity] for identity in examples.ids], np.float64)
    require(
        bool((odds > -np.inf).all()),
        "odds of 'no answer' are not a number: the model that predicted them has diverged; lower the learning rate",
    )
    answerable = np.array([bool(answers) for answers in examples.answers])
    raw = dict(zip(("exact", "f1"), question_scores(texts, examples), strict=True))
    at_threshold = {name: np.where(odds > threshold, ~answerable, score) for name, score in raw.items()}
    result: dict[str, float] = {}
    for prefix, rows in (("", np.ones_like(answerable)), ("HasAns_", answerable), ("NoAns_", ~answerable)):
        if rows.any():
            result |= {f"{prefix}{name}": 100.0 * float(score[rows].mean()) for name, score in at_threshold.items()}
            result[f"{prefix}total"] = int(rows.sum())
    texted = np.array([bool(texts[identity]) for identity in examples.ids])
    for name, score in raw.items():
        # As the official scan has it, any text loses the point of an unanswerable question, even one that normalises to
        # nothing and is right at a fixed threshold.
        gains = np.where(answerable, score, np.where(texted, -1.0, 0.0))
        result[f"best_{name}"], result[f"best_{name}_thresh"] = _best_threshold(gains, odds, int((~answerable).sum()))
    return result


def _best_threshold(gains: NDArray[np.float64], odds: NDArray[np.float64], blank: int) -> tuple[float, float]:
    """(mean score in percent, threshold) of the best cut of the questions sorted by odds; the lowest if several.

    gains: (n,) what giving a question its text adds to `blank`, the points for giving none at all. Questions of equal
    odds are cut together.
    """
    order = np.argsort(odds, kind="stable")
    gained = np.cumsum(gains[order])
    cuts = np.flatnonzero(np.append(np.diff(odds[order]) > 0, True))  # the last of every odds
    best = cuts[np.argmax(gained[cuts] > gained[cuts].max() - _ROUNDING)]
    if gained[best] > _ROUNDING:
        return 100.0 * float(blank + gained[best]) / len(gains), float(odds[order[best]])
    lowest = float(odds[order[0]])
    return 100.0 * blank / len(gains), 0.0 if lowest > 0 else float(np.nextafter(lowest, -np.inf))
