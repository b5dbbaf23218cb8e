"""A filled template as token ids, exactly as running text would be cut.

The text before and the text behind [MASK] are tokenised by themselves, so that "It was [MASK]." has the tokens of
"It was great." around it: the label word brings its own leading space, and what follows it is not moved away from it.
An input that is too long loses text from the end of its longer text; the template and [MASK] stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maelm_fast.config import require
from maelm_fast.errors import UserError
from maelm_fast.paper.prompting.templates import Field, Halves, Part, Template, parse
from maelm_fast.text import Inputs, TextTokenizer


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
