"""Templates and label words: how a labelled example becomes a sentence with one [MASK], and its classes tokens there.

A template is a line of text with fields: {1} and {2} are the example's texts, {mask} is what the model fills in. {1-}
is the text without its last punctuation mark (Gao et al.: its last character, whatever it is), {2l} has its first
letter in lower case. The manual templates are those of Gao et al. (2021, LM-BFF), which the paper uses; spaces are as
in their code, not as printed in their table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from maelm_fast.config import require
from maelm_fast.errors import UserError
from maelm_fast.finetuning.tasks import Task
from maelm_fast.text import Inputs, TextTokenizer

POLES = ("low", "high")
"""What takes the place of the classes in a regression task: the two ends of its range."""
_FIELD = re.compile(r"\{([^{}]*)\}")
_LAST_PUNCTUATION = ".,;:!?"
_PAIR = "{1} {mask}, {2l}"
_QUESTION = "{1-}? {mask}, {2l}"


@dataclass(frozen=True)
class Template:
    """text: the line with its fields. words: class, or pole of a regression task, to its label word."""

    text: str
    words: dict[str, str]


TEMPLATES = {
    "sst2": Template("{1} It was {mask}.", {"negative": "terrible", "positive": "great"}),
    "cola": Template("{1} This is {mask}.", {"unacceptable": "incorrect", "acceptable": "correct"}),
    "mnli": Template(_QUESTION, {"entailment": "Yes", "neutral": "Maybe", "contradiction": "No"}),
    "qnli": Template(_QUESTION, {"entailment": "Yes", "not_entailment": "No"}),
    "rte": Template(_QUESTION, {"entailment": "Yes", "not_entailment": "No"}),
    "mrpc": Template(_PAIR, {"not_equivalent": "No", "equivalent": "Yes"}),
    "qqp": Template(_PAIR, {"not_duplicate": "No", "duplicate": "Yes"}),
    "stsb": Template(_PAIR, {"low": "No", "high": "Yes"}),
}


def template_for(task: Task, text: str | None = None, words: Sequence[str] | None = None) -> Template:
    """The task's template, with another text or other label words (in the order of the classes) if given.

    Raises UserError for a task that is no prompting task, that has no template of its own and is given none, and for a
    text or words that do not fit it."""
    require(task.kind != "spans", f"{task.name} is no prompting task: an answer span is not one word")
    classes = task.labels if task.kind == "classification" else POLES
    own = TEMPLATES.get(task.name)
    require(
        own is not None or (text is not None and words is not None),
        f"{task.name} has no template: give --template and --label-words",
    )
    template = own or Template("", {})
    if text is not None:
        template = replace(template, text=text)
    if words is not None:
        require(
            len(words) == len(classes),
            f"--label-words names {len(words)} words, {task.name} has {len(classes)} classes: one word for each of "
            f"{', '.join(classes)}, in this order",
        )
        template = replace(template, words=dict(zip(classes, words, strict=True)))
    if missing := [name for name in classes if not template.words.get(name, "").strip()]:
        raise UserError(
            f"{task.name}: no label word for class '{missing[0]}': give --label-words, one word for each of "
            f"{', '.join(classes)}, in this order"
        )
    parse(template.text, len(task.text_columns))
    return replace(template, words={name: template.words[name] for name in classes})


@dataclass(frozen=True)
class Field:
    """A text of the example in a template. text: 0 or 1."""

    text: int
    without_punctuation: bool = False
    lower: bool = False

    def value(self, text: str) -> str:
        """Line breaks become spaces: in pretraining the end of a line is a token."""
        text = " ".join(text.splitlines()).strip()
        if self.without_punctuation and text.endswith(tuple(_LAST_PUNCTUATION)):
            text = text[:-1].rstrip()
        return text[:1].lower() + text[1:] if self.lower else text


Part = str | Field


@dataclass(frozen=True)
class Halves:
    """A template cut at its mask: text and fields in turn."""

    before: list[Part]
    behind: list[Part]

    @property
    def spaced(self) -> bool | None:
        """Whether a space stands before the mask; None if nothing does."""
        if not self.before:
            return None
        last = self.before[-1]
        return isinstance(last, str) and last.endswith(" ")


def parse(template: str, texts: int) -> Halves:
    """Raises UserError for unknown fields, and unless {mask} and each of the example's `texts` texts are there once."""
    halves: list[list[Part]] = [[]]
    used: list[int] = []
    for place, piece in enumerate(_FIELD.split(template)):
        if place % 2 == 0:
            require("{" not in piece and "}" not in piece, f"--template '{template}': a brace without its partner")
            if piece:
                halves[-1].append(piece)
        elif piece == "mask":
            halves.append([])
        else:
            known = re.fullmatch(r"([12])(-?)(l?)", piece)
            if known is None or int(known[1]) > texts:
                raise UserError(
                    f"--template '{template}': unknown field {{{piece}}}; there are {{mask}}, {_texts(texts)}, and "
                    "{1-} (without its last punctuation mark), {1l} (first letter in lower case)"
                )
            used.append(int(known[1]) - 1)
            halves[-1].append(Field(used[-1], bool(known[2]), bool(known[3])))
    require(len(halves) == 2, f"--template '{template}' needs {{mask}} once, where the label word belongs")
    require(
        sorted(used) == list(range(texts)),
        f"--template '{template}' needs each text of the example once: {_texts(texts)}",
    )
    return Halves(halves[0], halves[1])


def _texts(texts: int) -> str:
    return " and ".join(f"{{{i + 1}}}" for i in range(texts))


@dataclass(frozen=True)
class Prompts:
    """A tokenizer of texts (TextTokenizer) as one of filled templates."""

    tokenizer: TextTokenizer
    template: Template

    def encode(self, texts: tuple[list[str], ...], max_length: int) -> Inputs:
        """texts: one list of n strings for each text of the template. An input is [CLS] ... [MASK] ... [SEP].

        Raises UserError if not even the template fits into max_length tokens."""
        halves = parse(self.template.text, len(texts))
        rows = list(zip(*texts, strict=True))
        ids = _tokenise(self.tokenizer, halves, rows)
        longest = max(map(len, ids), default=0)
        cut = cut_tokens = 0
        for i, row in enumerate(ids):
            if len(row) > max_length:
                ids[i] = _shortened(self.tokenizer, halves, rows[i], max_length)
                cut, cut_tokens = cut + 1, cut_tokens + len(row) - len(ids[i])
        return Inputs(ids, None, cut, cut_tokens, longest)


def label_ids(tokenizer: TextTokenizer, template: Template, texts: int) -> list[int]:
    """The token of each label word, in the template's order: of the word as it is written, else in lower case.

    Raises UserError if a word is more than one token, or two classes have the same one."""
    spaced = parse(template.text, texts).spaced
    if spaced is None:
        spaced = not np.array_equal(tokenizer.tokenize(["a"])[0], tokenizer.tokenize(["a"], as_is=True)[0])
    found: dict[int, str] = {}
    for name, word in template.words.items():
        forms = [" " * spaced + form for form in (word.strip(), word.strip().lower())]
        pieces = tokenizer.tokenize(forms, as_is=True)
        token = next((int(ids[0]) for ids in pieces if len(ids) == 1 and tokenizer.decode(ids).strip()), None)
        if token is None:
            raise UserError(
                f"label word '{word}' of class '{name}' is not one token of this model's vocabulary but "
                f"{shown(tokenizer, pieces[0])}: choose other words with --label-words"
            )
        require(
            token not in found,
            f"the classes '{found.get(token)}' and '{name}' have the same label word, "
            f"{tokenizer.backend.id_to_token(token)}: choose other words with --label-words",
        )
        found[token] = name
    return list(found)


def shown(tokenizer: TextTokenizer, ids: Sequence[int] | NDArray[np.int32]) -> str:
    """The tokens as the vocabulary writes them, with a space between them."""
    return " ".join(str(tokenizer.backend.id_to_token(int(i))) for i in ids)


def _tokenise(tokenizer: TextTokenizer, halves: Halves, rows: Sequence[Sequence[str]]) -> list[NDArray[np.int32]]:
    before = tokenizer.tokenize([_written(halves.before, row) for row in rows])
    behind = tokenizer.tokenize([_written(halves.behind, row).rstrip() for row in rows], as_is=True)
    mask = np.array([tokenizer.mask_id], dtype=np.int32)
    return [tokenizer.join(np.concatenate([a, mask, b])) for a, b in zip(before, behind, strict=True)]


def _written(half: list[Part], row: Sequence[str]) -> str:
    return "".join(part.value(row[part.text]) if isinstance(part, Field) else part for part in half)


def _shortened(tokenizer: TextTokenizer, halves: Halves, row: Sequence[str], max_length: int) -> NDArray[np.int32]:
    """The input with less text: as many of the last tokens of its texts, the longer one's first, as are too many are
    taken away, until it fits. Their neighbours may then be cut into other tokens, hence "until"."""
    texts = list(row)
    while len(ids := _tokenise(tokenizer, halves, [texts])[0]) > max_length:
        pieces = tokenizer.tokenize_with_offsets(texts)
        left = [len(piece.ids) for piece in pieces]
        require(
            any(left),
            f"the template alone is longer than {max_length} tokens: choose a shorter one, or a larger --max-length",
        )
        for _ in range(min(len(ids) - max_length, sum(left))):
            left[left.index(max(left))] -= 1
        texts = [
            text if kept == len(piece.ids) else text[: piece.offsets[kept, 0]]
            for text, piece, kept in zip(texts, pieces, left, strict=True)
        ]
    return ids
