"""Fills every <mask> of a text with a pretrained model: the whole of it, decoder and head included.

A text is given to the model in the form of pretraining: <s>, its lines, </s> after each. Tokens behind a <mask> are cut
as they would be in running text ("<mask>." ends in the token "."); the tokenizer by itself puts a space there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from maelm_fast.config import require
from maelm_fast.data.masking import pack_masked
from maelm_fast.data.tokenizer import special_ids, special_names, with_mask_in_text
from maelm_fast.errors import UserError
from maelm_fast.training.rundir import LoadedRun

_WORD_START = "Ġ"  # how byte-level BPE writes a leading space


@dataclass(frozen=True)
class Candidate:
    """One token for one <mask>. token: its text, with a leading space if it starts a word."""

    token: str
    token_id: int
    probability: float


@torch.no_grad()
def fill(run: LoadedRun, texts: list[str], top: int = 5) -> list[list[list[Candidate]]]:
    """For each text and each <mask> in it, in order, the `top` likeliest tokens, best first.

    Every <mask> is predicted with the others still masked. All texts go through the model together. The encoder reads
    <mask> if it read at least half of them in pretraining. Raises UserError, naming the text, if one is empty, without
    <mask>, or longer than the model's position table, and for a model that was pretrained without <mask>."""
    require(top > 0, f"top must be positive, not {top}")
    masking = run.config.masking
    require(masking.policy != "random", "this model was pretrained with random tokens in the place of <mask>")
    sequences = _sequences(run, texts)
    batch = pack_masked(sequences, run.vocabulary, run.encoder_reads_mask)
    batch = batch.to(run.model.encoder.token_table.device)
    probabilities = run.model.logits(batch).float().softmax(dim=-1)
    best = probabilities.topk(min(top, probabilities.shape[-1]), dim=-1)
    rows = [
        [Candidate(_text_of(run.tokenizer, int(i)), int(i), float(p)) for i, p in zip(ids, values, strict=True)]
        for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    per_text = iter(rows)
    return [[next(per_text) for _ in range(count)] for count in batch.masked.lengths]


def best_text(run: LoadedRun, text: str, candidates: list[list[Candidate]]) -> str:
    """The text as the tokenizer spells it (an uncased one in lower case), with each <mask>'s best candidate."""
    ids = encode(run.tokenizer, text)
    best = iter(candidates)
    filled = [next(best)[0].token_id if token == run.vocabulary.mask_id else token for token in ids]
    return str(run.tokenizer.decode(filled))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text with <mask> or [MASK], in the form of a pretraining sample."""
    text = text.replace("[MASK]", "<mask>").replace("<mask>", special_names(tokenizer)["mask"])
    tokenizer, special = with_mask_in_text(tokenizer), special_ids(tokenizer)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    encoded = [tokenizer.encode(line, add_special_tokens=False).ids for line in lines]
    return [special["bos"], *(i for ids in encoded for i in (*ids, special["eos"]))]


def _sequences(run: LoadedRun, texts: list[str]) -> list[np.ndarray]:
    require(bool(texts), "no text to fill")
    limit, sequences, mask = run.config.model.max_positions, [], special_names(run.tokenizer)["mask"]
    for number, text in enumerate(texts, 1):
        name = "the text" if len(texts) == 1 else f"text {number}"
        require(bool(text.strip()), f"{name} is empty")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{name} is not valid UTF-8") from None
        ids = encode(run.tokenizer, text)
        require(
            run.vocabulary.mask_id in ids,
            f"{name} has no {mask}: write {mask} where a token is to be filled in",
        )
        require(
            len(ids) <= limit,
            f"{name} has {len(ids)} tokens with <s> and </s>, this model takes at most {limit}: shorten it",
        )
        sequences.append(np.array(ids))
    return sequences


def _text_of(tokenizer: Any, token_id: int) -> str:
    """Decoding strips one leading space, which is put back where the token has one."""
    text: str = tokenizer.decode([token_id], skip_special_tokens=False)
    return f" {text}" if tokenizer.id_to_token(token_id).startswith(_WORD_START) else text
