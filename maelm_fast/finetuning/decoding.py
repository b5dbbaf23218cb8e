"""From start and end logits to one answer per question, for all questions at once, and what went wrong with them.

The rules are the released code's, which are BERT's: an answer starts and ends among the 20 best starts and ends of a
window ([CLS] counts as one of them), starts in the window that shows most of its surroundings, and has at most
`answer_length` tokens. The null score is the least over a question's windows of [CLS]'s start + end; null odds are the
null score less the best answer's. The best answer is always given: blanking it is a matter of the threshold.

Ours: if no pair among the 20 x 20 is legal (released: the answer "empty" with score 0), the best that starts among the
20 and ends anywhere, or is one token of the 20 ends, is taken, and failing that the best single token; and an answer
neither starts nor ends in white space that is a token of its own.

Shapes: Q questions, W windows, P passage tokens of all windows together, T all tokens of all windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maelm_fast.finetuning.examples import SpanExamples
from maelm_fast.finetuning.squad import question_scores
from maelm_fast.finetuning.windows import Windows

N_BEST = 20
_OUTSIDER = 1e9  # more than any logit; in float64 it leaves seven digits behind the point


@dataclass(frozen=True)
class Decoded:
    """texts: Q best answers that are not null. starts: (Q,) int64, where they are searched from in the context, in
    characters. null_odds: (Q,) float64; above the threshold, the question counts as unanswerable."""

    texts: list[str]
    starts: NDArray[np.int64]
    null_odds: NDArray[np.float64]


def decode(windows: Windows, logits: NDArray[np.float32], answer_length: int, n_best: int = N_BEST) -> Decoded:
    """logits: (T, 2), start and end, of the windows' tokens in their order, finite."""
    lengths = np.array(windows.inputs.lengths)
    cls_rows = np.cumsum(lengths) - lengths
    cls_logits = logits[cls_rows].astype(np.float64)  # (W, 2)
    ends = np.cumsum(windows.count)
    window = np.repeat(np.arange(len(windows)), windows.count)  # (P,)
    place = np.arange(len(window)) - (ends - windows.count)[window]
    passage_logits = logits[cls_rows[window] + windows.begin[window] + place].astype(np.float64)  # (P, 2)

    blank = _blank(windows)
    scores = passage_logits.copy()
    for column in (0, 1):
        rank = _rank(passage_logits[:, column], windows.count) + (cls_logits[window, column] >= scores[:, column])
        scores[rank >= n_best, column] -= _OUTSIDER
        scores[blank, column] = -np.inf
    scores[~windows.max_context(), 0] = -np.inf

    best, best_length = scores.sum(axis=1), np.zeros(len(window), dtype=np.int64)  # (P,) by start; length less one
    starts = np.flatnonzero(scores[:, 0] > -_OUTSIDER / 2)
    for length in range(1, answer_length):
        starts = starts[starts + length < ends[window[starts]]]
        total = scores[starts, 0] + scores[starts + length, 1]
        better = total > best[starts]
        best[starts[better]], best_length[starts[better]] = total[better], length

    question = windows.question[window]
    everyone = np.arange(len(windows.examples))
    highest = np.maximum.reduceat(best, np.searchsorted(question, everyone))
    candidates = np.flatnonzero(best == highest[question])
    _, earliest = np.unique(question[candidates], return_index=True)
    start = candidates[earliest]  # (Q,)
    end = start + best_length[start]
    null = np.minimum.reduceat(cls_logits.sum(1), np.searchsorted(windows.question, everyone))
    first = windows.first[window[start]] + place[start]
    spans = list(enumerate(zip(first, first + best_length[start], strict=True)))
    return Decoded(
        texts=[windows.text(i, a, b) for i, (a, b) in spans],
        starts=np.array([windows.passage_of(i).starts[a] for i, (a, _) in spans]),
        null_odds=null - passage_logits[start, 0] - passage_logits[end, 1],
    )


def _blank(windows: Windows) -> NDArray[np.bool_]:
    """(P,) whether a passage token is nothing but white space."""
    of_passage: list[NDArray[np.bool_]] = [np.empty(0, dtype=bool)] * len(windows.passages)
    for context, place in dict(zip(windows.examples.contexts, windows.passage, strict=True)).items():
        passage = windows.passages[place]
        pieces = zip(passage.starts.tolist(), passage.ends.tolist(), strict=True)
        of_passage[place] = np.array([not context[start:end].strip() for start, end in pieces], dtype=bool)
    parts = zip(windows.passage[windows.question], windows.first, windows.count, strict=True)
    return np.concatenate([of_passage[place][first : first + count] for place, first, count in parts])


def _rank(values: NDArray, counts: NDArray) -> NDArray[np.int64]:
    """(P,) how many of the window's passage tokens are better; of equal ones the earlier is. Window by window, which is
    ten times as fast as sorting all together."""
    rank = np.empty(len(values), dtype=np.int64)
    for end, count in zip(np.cumsum(counts).tolist(), counts.tolist(), strict=True):
        order = np.argsort(-values[end - count : end], kind="stable")
        rank[end - count : end][order] = np.arange(count)
    return rank


def error_examples(
    examples: SpanExamples, decoded: Decoded, threshold: float, limit: int = 10, around: int = 80
) -> dict[str, Any]:
    """How many questions went which way at the threshold, and the worst of each kind of error, with the context
    `around` the place, in characters.

    false_answers: unanswerable, answered, surest first. wrong_spans: answered by other words than any of the answers,
    by rising F1. missed: answerable, not answered, surest first.
    """
    kinds: dict[str, list[tuple[float, float, int]]] = {
        name: [] for name in ("right_answers", "wrong_spans", "missed", "right_refusals", "false_answers")
    }
    exacts, f1s = question_scores(dict(zip(examples.ids, decoded.texts, strict=True)), examples)
    for i, (answers, odds) in enumerate(zip(examples.answers, decoded.null_odds, strict=True)):
        refused = odds > threshold
        if not answers:
            kinds["right_refusals" if refused else "false_answers"].append((0.0, odds, i))
        elif refused:
            kinds["missed"].append((0.0, -odds, i))
        elif exacts[i]:
            kinds["right_answers"].append((0.0, odds, i))
        else:
            kinds["wrong_spans"].append((f1s[i], odds, i))
    return {
        "threshold": threshold,
        "counts": {name: len(rows) for name, rows in kinds.items()},
        **{
            name: [_described(examples, decoded, i, around) for _, _, i in sorted(kinds[name])[:limit]]
            for name in ("false_answers", "wrong_spans", "missed")
        },
    }


def _described(examples: SpanExamples, decoded: Decoded, i: int, around: int) -> dict[str, Any]:
    context = examples.contexts[i]
    found = context.find(decoded.texts[i], int(decoded.starts[i]))
    return {
        "id": examples.ids[i],
        "title": examples.titles[i],
        "question": examples.questions[i],
        "answers": gold_texts(examples, i),
        "text": decoded.texts[i],
        "null_odds": float(decoded.null_odds[i]),
        "around_text": _excerpt(context, found, found + len(decoded.texts[i]), around),
    }


def gold_texts(examples: SpanExamples, question: int) -> list[str]:
    """The different answers, in the file's order; [] is unanswerable."""
    return list(dict.fromkeys(answer.text for answer in examples.answers[question]))


def _excerpt(context: str, start: int, end: int, around: int) -> str:
    """With the piece in [[ ]], cut to `around` characters on both sides."""
    before = context[max(0, start - around) : start]
    after = context[end : end + around]
    left = "..." if start > around else ""
    right = "..." if end + around < len(context) else ""
    return f"{left}{before}[[{context[start:end]}]]{after}{right}"
