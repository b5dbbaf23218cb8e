"""Questions and passages as the windows that an extractive reader sees, and answers as rows of them.

A passage longer than a window is read in several that overlap: the next one starts `stride` tokens on, as far as
there are more tokens (as released; in Hugging Face tokenizers `stride` is the overlap instead). Every window has the
whole question. Offsets are in characters of the passage as the file has it, before the tokenizer's normalisation, so
that a span of tokens is always a piece of the original text.

Shapes: Q questions, W windows, n tokens of a passage.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maelm_fast.config import require
from maelm_fast.finetuning.examples import Answer, SpanExamples
from maelm_fast.text import Inputs, Pieces, TextTokenizer


@dataclass(frozen=True)
class Passage:
    """A context's tokens, without special ones.

    ids: (n,) int32. starts, ends: (n,) int64, characters of the context; a token reaches to the next one's start, so
    that what the tokenizer composes into the token before (an accent of its own) or drops stays with it.
    """

    ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    def span(self, answer: Answer) -> tuple[int, int]:
        """(first, last): the fewest tokens that cover the answer, white space around it aside."""
        start = answer.start + len(answer.text) - len(answer.text.lstrip())
        end = answer.start + len(answer.text.rstrip())
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.starts, end, side="left")) - 1
        return first, last


@dataclass(frozen=True)
class Windows:
    """All windows of a split, question by question, each one's from left to right.

    inputs: the windows' tokens, special ones included; `cut` and `cut_tokens` are those of questions, `longest` is of
    the longest question and passage together. passage: (Q,) int64, place in `passages`, of which equal ones share one.
    question: (W,) int64, place of the question in `examples`. begin: (W,) row of a window's first passage token.
    first, count: (W,) that token's place in the passage, and how many the window has. targets: (W, 2) rows of the
    answer's first and last token, or (0, 0), [CLS], if there is none or it is not whole in this window.
    """

    examples: SpanExamples
    inputs: Inputs
    passages: list[Passage]
    passage: NDArray[np.int64]
    question: NDArray[np.int64]
    begin: NDArray[np.int64]
    first: NDArray[np.int64]
    count: NDArray[np.int64]
    targets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.question)

    def passage_of(self, question: int) -> Passage:
        return self.passages[int(self.passage[question])]

    def text(self, question: int, first: int, last: int) -> str:
        """The characters of tokens first .. last of a question's passage, without white space around them."""
        passage = self.passage_of(question)
        return self.examples.contexts[question][passage.starts[first] : passage.ends[last]].strip()

    def report(self) -> dict[str, int]:
        """Counts for the report: what was cut, and what answers cannot be learnt or found as they are written."""
        answered = np.array([bool(answers) for answers in self.examples.answers], dtype=bool)
        reached = np.zeros(len(self.examples), dtype=bool)
        reached[self.question[self.targets[:, 1] > 0]] = True
        return {
            **self.inputs.truncation,
            "inputs": len(self.examples),
            "windows": len(self),
            "answers_in_no_window": int((answered & ~reached).sum()),
            "answers_not_whole_tokens": sum(
                self.text(i, *self.passage_of(i).span(answer)) != answer.text.strip()
                for i, answers in enumerate(self.examples.answers)
                if (answer := first_answer(answers)) is not None
            ),
        }

    def max_context(self) -> NDArray[np.bool_]:
        """For every passage token of every window, in their order, whether this is the window to take it from: the one
        that shows most of both of its sides (BERT's rule: the smaller side, plus 0.01 of the window's length; the
        earlier window if equal)."""
        ends = np.cumsum(self.count)
        best = np.ones(int(ends[-1]), dtype=bool)
        boundaries = np.searchsorted(self.question, np.arange(len(self.examples) + 1))
        for low, high in itertools.pairwise(boundaries):
            if high - low < 2:
                continue
            first, count = self.first[low:high, None], self.count[low:high, None]
            place = np.arange(first[-1, 0] + count[-1, 0])  # every token of the passage
            score = np.minimum(place - first, first + count - 1 - place) + 0.01 * count
            inside = (place >= first) & (place < first + count)
            winner = np.where(inside, score, -np.inf).argmax(axis=0)
            best[ends[low] - self.count[low] : ends[high - 1]] = (winner == np.arange(high - low)[:, None])[inside]
        return best


def cut_windows(
    examples: SpanExamples, tokenizer: TextTokenizer, size: int, step: int, question_length: int
) -> Windows:
    """Tokenises each question and each distinct passage, and cuts the passages into windows.

    size: tokens of a window at most, special ones included. step: tokens between two windows' starts; windows without
    room for as many follow each other without a gap (released code). question_length: longer questions are cut.
    The target is the first answer; in training data there is one. Raises UserError, naming the question, if a window
    has no room for its passage, or if the passage has no tokens.
    """
    contexts = {context: place for place, context in enumerate(dict.fromkeys(examples.contexts))}
    pieces = tokenizer.tokenize_with_offsets(list(contexts))
    passages = [_passage(part, context) for part, context in zip(pieces, contexts, strict=True)]
    passage_of = np.array([contexts[context] for context in examples.contexts], dtype=np.int64)
    ids: list[NDArray[np.int32]] = []
    types: list[NDArray[np.int32]] | None = [] if tokenizer.pair.second_type else None
    places: list[tuple[int, int, int, int]] = []  # question, begin, first, count
    targets: list[tuple[int, int]] = []
    cut = cut_tokens = longest = 0
    for i, question in enumerate(tokenizer.tokenize(examples.questions)):
        passage, answer = passages[passage_of[i]], first_answer(examples.answers[i])
        kept, total = question[:question_length], len(passage.ids)
        cut += len(question) > len(kept)
        cut_tokens += len(question) - len(kept)
        longest = max(longest, tokenizer.pair.added + len(question) + total)
        room = size - tokenizer.pair.added - len(kept)
        require(total > 0, f"question '{examples.ids[i]}': its passage has no tokens: mend or remove the row")
        require(
            room > 0,
            f"question '{examples.ids[i]}' leaves no room for its passage: it has {len(kept)} of the {size} tokens of "
            f"a window, special tokens {tokenizer.pair.added}: raise --max-length or lower --question-length",
        )
        begin = tokenizer.second_start(len(kept))
        answer_first, answer_last = passage.span(answer) if answer is not None else (-1, -1)
        for first in range(0, max(total - room, 0) + min(room, step), min(room, step)):
            count = min(room, total - first)
            ids.append(tokenizer.join(kept, passage.ids[first : first + count]))
            if types is not None:
                types.append(tokenizer.token_types(len(kept), count))
            places.append((i, begin, first, count))
            whole = first <= answer_first and answer_last < first + count
            shift = begin - first
            targets.append((answer_first + shift, answer_last + shift) if whole else (0, 0))
    columns = np.array(places, dtype=np.int64).T
    return Windows(
        examples=examples,
        inputs=Inputs(ids, types, cut, cut_tokens, longest),
        passages=passages,
        passage=passage_of,
        question=columns[0],
        begin=columns[1],
        first=columns[2],
        count=columns[3],
        targets=np.array(targets, dtype=np.int64),
    )


def _passage(pieces: Pieces, context: str) -> Passage:
    starts, ends = np.array(pieces.offsets.T, dtype=np.int64, order="C")
    if len(starts):
        starts[0], ends[-1] = 0, len(context)
        ends[:-1] = np.maximum(ends[:-1], starts[1:])
    return Passage(pieces.ids, starts, ends)


def first_answer(answers: tuple[Answer, ...]) -> Answer | None:
    """The first that its context has; training data has one at most."""
    return next((answer for answer in answers if answer.start >= 0), None)
