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
_FIELD = re.compile(r"\{(mask|([12])(-?)(l?))\}")
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
    check_text(template.text, len(task.text_columns))
    return replace(template, words={name: template.words[name] for name in classes})


def check_text(text: str, texts: int) -> None:
    """Raises UserError for unknown fields, and unless {mask} and each of the example's `texts` texts are there once."""
    said, wanted = f"--template '{text}'", [str(i + 1) for i in range(texts)]
    there = " and ".join(f"{{{name}}}" for name in wanted)
    fields: list[str] = []
    for piece in re.findall(r"\{[^{}]*\}?|\}", text):
        field = _FIELD.fullmatch(piece)
        fields.append((field[2] or field[1]) if field else piece)
        require(
            fields[-1] in (*wanted, "mask"),
            f"{said}: unknown field {piece}; there are {{mask}}, {there}, and {{1-}} (without its last punctuation "
            "mark), {1l} (first letter in lower case)",
        )
    require(fields.count("mask") == 1, f"{said} needs {{mask}} once, where the label word belongs")
    require(len(fields) == texts + 1 and {*fields} >= {*wanted}, f"{said} needs each text of the example once: {there}")


@dataclass(frozen=True)
class Prompts:
    """A tokenizer of texts (TextTokenizer) as one of filled templates."""

    tokenizer: TextTokenizer
    template: Template

    def encode(self, texts: tuple[list[str], ...], max_length: int) -> Inputs:
        """texts: one list of n strings for each text of the template. An input is [CLS] ... [MASK] ... [SEP].

        Raises UserError if not even the template fits into max_length tokens."""
        halves, rows = _halves(self.template), list(zip(*texts, strict=True))
        ids = _tokenise(self.tokenizer, halves, rows)
        longest = max(map(len, ids), default=0)
        cut = cut_tokens = 0
        for i, row in enumerate(ids):
            if len(row) > max_length:
                ids[i] = _shortened(self.tokenizer, halves, rows[i], max_length)
                cut, cut_tokens = cut + 1, cut_tokens + len(row) - len(ids[i])
        return Inputs(ids, None, cut, cut_tokens, longest)


def label_ids(tokenizer: TextTokenizer, template: Template) -> list[int]:
    """The token of each label word, in the template's order: of the word as it is written, else in lower case.

    Raises UserError if a word is more than one token, or two classes have the same one."""
    before, _ = _halves(template)
    spaced = before.endswith(" ")
    if not before:
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


def _halves(template: Template) -> tuple[str, str]:
    """What stands before the mask, and behind it."""
    before, behind = template.text.split("{mask}")
    return before, behind


def _tokenise(
    tokenizer: TextTokenizer, halves: tuple[str, str], rows: Sequence[Sequence[str]]
) -> list[NDArray[np.int32]]:
    before = tokenizer.tokenize([_filled(halves[0], row) for row in rows])
    behind = tokenizer.tokenize([_filled(halves[1], row).rstrip() for row in rows], as_is=True)
    mask = np.array([tokenizer.mask_id], dtype=np.int32)
    return [tokenizer.join(np.concatenate([a, mask, b])) for a, b in zip(before, behind, strict=True)]


def _filled(half: str, row: Sequence[str]) -> str:
    """Line breaks in a text become spaces: in pretraining the end of a line is a token."""

    def value(field: re.Match[str]) -> str:
        text = " ".join(row[int(field[2]) - 1].splitlines()).strip()
        if field[3] and text.endswith(tuple(_LAST_PUNCTUATION)):
            text = text[:-1].rstrip()
        return text[:1].lower() + text[1:] if field[4] else text

    return _FIELD.sub(value, half)


def _shortened(
    tokenizer: TextTokenizer, halves: tuple[str, str], row: Sequence[str], max_length: int
) -> NDArray[np.int32]:
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
