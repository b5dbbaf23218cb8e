"""How texts become token ids: one tokenizer class for our runs and for Hugging Face directories.

A text's lines are stripped and joined by one space, whatever the tokenizer (ours: pretraining and the released
preprocessing read lines). Special tokens' names in a text are plain characters. The form of an input is the released
code's for a run of ours, [CLS] a [SEP] and [CLS] a [SEP] [SEP] b [SEP], and the tokenizer's own otherwise, found by
asking it: RoBERTa's and MPNet's are the same, BERT's has one [SEP] between and token types.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer, pre_tokenizers

from maelm_fast.config import require
from maelm_fast.data.tokenizer import special_ids
from maelm_fast.errors import UserError

_AT_ONCE = 2048  # texts given to the library, whose encodings take a hundred bytes a token


@dataclass(frozen=True)
class Inputs:
    """Token ids of examples, special tokens included.

    ids: one int32 array per example. token_types: likewise, 0 or 1 for each token; None if all are 0. cut: how many
    examples were longer than allowed, and cut_tokens, how many of their tokens are left out. longest: tokens of the
    longest example before it was cut; 0 if there are none."""

    ids: list[NDArray[np.int32]]
    token_types: list[NDArray[np.int32]] | None
    cut: int
    cut_tokens: int
    longest: int

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.ids]

    @property
    def truncation(self) -> dict[str, int]:
        """What was cut, for reports."""
        return {"inputs": len(self), "cut": self.cut, "cut_tokens": self.cut_tokens, "longest": self.longest}


@dataclass(frozen=True)
class Form:
    """The special tokens before the first text, between it and a second, and at the end. second_type: token type of the
    second text and the end."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    end: tuple[int, ...]
    second_type: int = 0

    @property
    def added(self) -> int:
        return len(self.before) + len(self.between) + len(self.end)


@dataclass(frozen=True)
class Pieces:
    """A text's tokens without special ones. ids: (n,) int32. offsets: (n, 2) int32, the characters of the text, as it
    was given, that each token stands for."""

    ids: NDArray[np.int32]
    offsets: NDArray[np.int32]


class TextTokenizer:
    """Make one with `of_run` or `of_transformers`.

    cls_id, pad_id, sep_id, mask_id: ids of the special tokens; the last two are None if there is none. vocab_size: how
    many tokens it has. single, pair: the forms of an input. source: what it was made from, a `tokenizers.Tokenizer` or
    one of transformers."""

    def __init__(
        self,
        backend: Tokenizer,
        single: Form,
        pair: Form,
        special: dict[str, int | None],
        source: Any,
    ) -> None:
        self.backend = _plain(backend)
        self.single, self.pair, self.source = single, pair, source
        self.cls_id = single.before[0]
        self.sep_id, self.mask_id = special["sep"], special["mask"]
        self.pad_id = special["pad"] or 0
        self.vocab_size = self.backend.get_vocab_size()

    @classmethod
    def of_run(cls, tokenizer: Tokenizer) -> TextTokenizer:
        """Of a pretraining run. UserError if it lacks special tokens."""
        ids = special_ids(tokenizer)
        bos, eos = ids["bos"], ids["eos"]
        special: dict[str, int | None] = {"sep": eos, "pad": ids["pad"], "mask": ids["mask"]}
        return cls(tokenizer, Form((bos,), (), (eos,)), Form((bos,), (eos, eos), (eos,)), special, tokenizer)

    @classmethod
    def of_transformers(cls, tokenizer: Any, name: str, token_types: int = 1) -> TextTokenizer:
        """Of a Hugging Face directory `name`. token_types: how many the model has. UserError if it is not backed by the
        tokenizers library, or puts no special token before an input."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise UserError(f"{name}: its tokenizer is not one of the tokenizers library: save it as tokenizer.json")
        backend = _plain(backend)
        single, pair = form_of(backend, 1), form_of(backend, 2)
        require(
            bool(single.before and pair.before),
            f"{name}: its tokenizer puts no token before a text, and the first token is what a classifier reads",
        )
        if token_types < 2:
            pair = Form(pair.before, pair.between, pair.end)
        special = {
            "sep": tokenizer.sep_token_id,
            "pad": tokenizer.pad_token_id,
            "mask": tokenizer.mask_token_id,
        }
        return cls(backend, single, pair, special, tokenizer)

    def encode(self, texts: tuple[list[str], ...], max_length: int) -> Inputs:
        """Inputs of examples with one text each or two. Those of more than max_length tokens are cut at the end of the
        longer text until both are equally long, then of both."""
        form = self.single if len(texts) == 1 else self.pair
        room = max_length - form.added
        require(room >= len(texts), f"max_length {max_length} has no room for text beside {form.added} special tokens")
        columns = [self.tokenize(column) for column in texts]
        ids: list[NDArray[np.int32]] = []
        types: list[NDArray[np.int32]] | None = [] if form.second_type and len(texts) == 2 else None
        cut = cut_tokens = longest = 0
        for parts in zip(*columns, strict=True):
            kept = _fit([len(part) for part in parts], room)
            total = sum(len(part) for part in parts)
            longest = max(longest, total + form.added)
            if total > room:
                cut += 1
                cut_tokens += total - room
            ids.append(self.join(*(part[:n] for part, n in zip(parts, kept, strict=True))))
            if types is not None:
                types.append(self.token_types(*kept))
        return Inputs(ids, types, cut, cut_tokens, longest)

    def tokenize(self, texts: Sequence[str], *, as_is: bool = False) -> list[NDArray[np.int32]]:
        """Each text's tokens without special ones, int32. as_is: of texts that are parts of a longer one, nothing is
        stripped or joined, and no space is put before them where the tokenizer would."""
        backend = self._running if as_is else self.backend
        cleaned = texts if as_is else [_clean(text) for text in texts]
        return [np.asarray(encoding.ids, dtype=np.int32) for encoding in _encode(backend, cleaned, offsets=False)]

    def tokenize_with_offsets(self, texts: Sequence[str]) -> list[Pieces]:
        """Each text's tokens without special ones, and where they stand in it."""
        encodings = _encode(self.backend, [_clean(text) for text in texts], offsets=True)
        return [
            Pieces(
                np.asarray(encoding.ids, dtype=np.int32),
                _original_offsets(text, np.asarray(encoding.offsets, dtype=np.int32).reshape(-1, 2)),
            )
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def join(self, first: NDArray[np.int32], second: NDArray[np.int32] | None = None) -> NDArray[np.int32]:
        """One input, int32, from the tokens of one text or two."""
        if second is None:
            return np.concatenate([self.single.before, first, self.single.end]).astype(np.int32)
        form = self.pair
        return np.concatenate([form.before, first, form.between, second, form.end]).astype(np.int32)

    def token_types(self, first: int, second: int) -> NDArray[np.int32]:
        """Of a pair's input with so many tokens of each text: what is between belongs to the first (BERT)."""
        start = self.second_start(first)
        types = np.zeros(start + second + len(self.pair.end), dtype=np.int32)
        types[start:] = self.pair.second_type
        return types

    def second_start(self, first: int) -> int:
        """Index in a pair's input of the second text's first token, if the first text has `first` tokens."""
        return len(self.pair.before) + first + len(self.pair.between)

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=True))

    @cached_property
    def _running(self) -> Tokenizer:
        """Without the space that byte-level BPE and SentencePiece put before a text; XLM-R's tokenizer, which cuts at
        spaces first, puts it before every word whatever it is told."""
        backend = _plain(self.backend)
        parts = backend.pre_tokenizer
        if isinstance(parts, pre_tokenizers.Sequence):
            parts = next(iter(parts), parts)  # in our exports it puts the space (with_mask_in_text)
        if isinstance(parts, pre_tokenizers.ByteLevel):
            parts.add_prefix_space = False
        elif isinstance(parts, pre_tokenizers.Metaspace):
            parts.prepend_scheme = "never"
        return backend


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    """A copy that neither cuts nor pads, and for which "</s>" in a text is four characters."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.no_truncation()
    copy.no_padding()
    copy.encode_special_tokens = True
    return copy


def form_of(tokenizer: Tokenizer, texts: int) -> Form:
    """Where the tokenizer itself puts special tokens around one text or two."""
    encoding = tokenizer.encode("a") if texts == 1 else tokenizer.encode("a", "a")
    ids, types, owners = encoding.ids, encoding.type_ids, encoding.sequence_ids
    first = [i for i, owner in enumerate(owners) if owner == 0]
    second = [i for i, owner in enumerate(owners) if owner == 1]
    last = second or first
    between = ids[first[-1] + 1 : second[0]] if second else []
    second_type = types[second[0]] if second else 0
    return Form(tuple(ids[: first[0]]), tuple(between), tuple(ids[last[-1] + 1 :]), second_type)


def _encode(backend: Tokenizer, texts: Sequence[str], offsets: bool) -> Iterator[Encoding]:
    encode = backend.encode_batch if offsets else backend.encode_batch_fast
    for start in range(0, len(texts), _AT_ONCE):
        try:
            yield from encode(list(texts[start : start + _AT_ONCE]), add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            raise UserError("a text is not valid Unicode (half of a surrogate pair): mend the file") from None


def _fit(lengths: list[int], room: int) -> list[int]:
    """How many tokens of each text are kept: the longer one is cut first; an odd place goes to the first."""
    if sum(lengths) <= room:
        return lengths
    if len(lengths) == 1:
        return [room]
    first, second = lengths
    if min(first, second) <= room // 2:
        return [first, room - first] if first <= second else [room - second, second]
    return [room - room // 2, room // 2]


def _clean(text: str) -> str:
    lines = text.splitlines()
    return text.strip() if len(lines) < 2 else " ".join(line for part in lines if (line := part.strip()))


def _original_offsets(text: str, offsets: NDArray[np.int32]) -> NDArray[np.int32]:
    """Offsets in the cleaned text to offsets in the text."""
    starts, cleaned_starts = [0], [0]
    position = cleaned = 0
    for line in text.splitlines(keepends=True):
        if stripped := line.strip():
            starts.append(position + line.index(stripped))
            cleaned_starts.append(cleaned)
            cleaned += len(stripped) + 1
        position += len(line)
    shift = np.asarray(starts, dtype=np.int32) - np.asarray(cleaned_starts, dtype=np.int32)
    begin = np.searchsorted(cleaned_starts, offsets[:, 0], side="right") - 1
    end = np.searchsorted(cleaned_starts, np.maximum(offsets[:, 1] - 1, offsets[:, 0]), side="right") - 1
    return offsets + np.stack([shift[begin], shift[end]], axis=1)
