"""Tokenised documents to samples, by array operations: no loop over tokens.

A document's lines are each ended by </s> (eos), and <s> (bos) is put before every sample. The two ways of cutting
differ in whether a sample may run on into the next document.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from maelm_fast.data.tokenizer import BOS, EOS


class Chunk(NamedTuple):
    """D tokenised documents, as they lie in a chunk file."""

    tokens: np.ndarray
    """(N,) uint16 or uint32, every line ended by </s>."""
    document_tokens: np.ndarray
    """(D,) int64, as the next two."""
    document_lines: np.ndarray
    document_bytes: np.ndarray
    in_validation: np.ndarray
    """(D,) bool."""

    def part(self, validation: bool) -> Chunk:
        """One split's documents."""
        chosen = self.in_validation == validation
        tokens = self.tokens[np.repeat(chosen, self.document_tokens)]
        return Chunk(tokens, *(array[chosen] for array in self[1:]))


class Cut(NamedTuple):
    """Samples in a row, <s> before each, and what had to be done to get them."""

    tokens: np.ndarray
    lengths: np.ndarray
    dropped_tokens: int = 0
    split_lines: int = 0


def cut_blocks(chunks: Iterable[Chunk], seq_len: int, bos: int = BOS, eos: int = EOS) -> Iterator[Cut]:
    """All documents as one stream, in samples of exactly seq_len tokens; the last Cut tells what is left over."""
    size = seq_len - 1
    rest = None
    for chunk in chunks:
        stream = chunk.tokens if rest is None else np.concatenate([rest, chunk.tokens])
        used = len(stream) // size * size
        yield _with_bos(stream[:used], np.full(used // size, size), bos)
        rest = stream[used:]
    if rest is not None:
        yield Cut(rest[:0], np.empty(0, np.int64), dropped_tokens=len(rest))


def cut_documents(chunks: Iterable[Chunk], seq_len: int, bos: int = BOS, eos: int = EOS) -> Iterator[Cut]:
    """Whole lines of one document, as many as fit in seq_len with <s>: the released code's complete_doc, but for lines
    longer than that: it keeps a random part of them, here they are cut into consecutive pieces, packed like lines.
    A sample of one token besides <s> is dropped, as there."""
    size = seq_len - 1
    for chunk in chunks:
        line_ends = np.flatnonzero(chunk.tokens == eos) + 1
        line_lengths = np.diff(line_ends, prepend=0)
        pieces = -(-line_lengths // size)
        piece_lengths = np.full(pieces.sum(), size)
        piece_lengths[np.cumsum(pieces) - 1] = line_lengths - (pieces - 1) * size
        lengths = _pack(piece_lengths, np.cumsum(chunk.document_tokens), size)
        kept = lengths > 1
        samples = _with_bos(chunk.tokens[np.repeat(kept, lengths)], lengths[kept], bos)
        yield samples._replace(dropped_tokens=int((~kept).sum()), split_lines=int((pieces > 1).sum()))


def _pack(piece_lengths: np.ndarray, document_ends: np.ndarray, size: int) -> np.ndarray:
    """Lengths of the samples that consecutive pieces make: each takes all that fit, up to its document's end."""
    ends = np.concatenate([[0], np.cumsum(piece_lengths)])
    document_end = document_ends[np.searchsorted(document_ends, ends[:-1], side="right")]
    sample_end = np.minimum(ends[:-1] + size, document_end)
    following = (np.searchsorted(ends, sample_end, side="right") - 1).tolist()  # the piece after a sample from piece i
    firsts = [0]
    while firsts[-1] < len(following):
        firsts.append(following[firsts[-1]])
    return np.diff(ends[firsts])


def _with_bos(tokens: np.ndarray, lengths: np.ndarray, bos: int) -> Cut:
    return Cut(np.insert(tokens, np.cumsum(lengths) - lengths, bos), lengths + 1)
