"""Effective ranks of a Hugging Face encoder: RoBERTa, BERT, MPNet, ModernBERT, any masked language model of a local
directory, read by transformers. Nothing is downloaded and no code of the directory is run.

The text may come from a token store, whose samples are turned back into text first (in lower case if its tokenizer is
uncased), or from a file or the embedded corpus. It is cut by the model's own tokenizer, line after line with the
separator after each, into sequences of equal length. 15% of the tokens that are not special are masked, with the same
masks at every call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from maelm_fast.analysis.effective_rank import SEES_MASK, TAU, RankReport, Watch, check_taus, effective_ranks
from maelm_fast.analysis.inputs import from_text_encoder
from maelm_fast.batch import PackedBatch
from maelm_fast.config import MaskingConfig, require
from maelm_fast.data.masking import pack
from maelm_fast.data.order import permutation
from maelm_fast.data.readers import HUB_PREFIX, expand_inputs, read_documents
from maelm_fast.data.token_store import MANIFEST_FILE, TokenStore
from maelm_fast.data.tokenizer import special_ids
from maelm_fast.encoders import TextEncoder, load_encoder
from maelm_fast.masking import VALIDATION_EPOCH, Masker, Vocabulary

MASKING = MaskingConfig(rate=0.15, special_tokens=False)
LONGEST = 512  # tokens of a sequence, if the model takes as many: the paper's
BATCH = 32  # sequences a forward pass


def load_checkpoint(path: str | Path, device: torch.device) -> TextEncoder:
    """Raises UserError if the directory holds no encoder with a tokenizer that has a mask token."""
    encoder = load_encoder(path, engine="transformers")
    require(
        encoder.tokenizer.mask_id is not None,
        f"{path}: its tokenizer has no mask token, so that no input can be masked",
    )
    return encoder.to(device)


def vocabulary_of_checkpoint(encoder: TextEncoder) -> Vocabulary:
    assert encoder.tokenizer.mask_id is not None
    special = encoder.tokenizer.source.all_special_ids
    return Vocabulary(encoder.vocab_size, encoder.tokenizer.mask_id, tuple(sorted(special)))


def text_lines(source: str) -> Generator[str, None, None]:
    """Lines of text of a token store's validation split, of a file (.txt, .jsonl, .parquet), or 'embedded'."""
    require(not source.startswith(HUB_PREFIX), f"{source} would be downloaded: give a store, a file, or 'embedded'")
    if (Path(source) / MANIFEST_FILE).exists():
        yield from _lines_of_store(TokenStore(source, "validation"))
        return
    require(not Path(source).is_dir(), f"{source} is a directory but not a token store: give a store or a file")
    for document in read_documents(expand_inputs([source])):
        yield from document


def _lines_of_store(store: TokenStore) -> Iterator[str]:
    """Samples drawn from all of the split; a line that two samples share is two lines here."""
    tokenizer = store.tokenizer()
    eos = special_ids(tokenizer)["eos"]
    for sample in permutation(np.arange(len(store)), len(store), 0, VALIDATION_EPOCH).tolist():
        ids = store[sample].astype(np.int64)
        for line in np.split(ids, np.flatnonzero(ids == eos) + 1):
            if text := tokenizer.decode(line.tolist()).strip():
                yield text


def sequences(encoder: TextEncoder, source: str, count: int, length: int) -> list[NDArray[np.int64]]:
    """The first `count` sequences of `length` tokens, special ones included, or as many as the text makes."""
    tokenizer = encoder.tokenizer.source
    first = [tokenizer.cls_token_id] if tokenizer.cls_token_id is not None else []
    last = [tokenizer.sep_token_id] if tokenizer.sep_token_id is not None else []
    found: list[NDArray[np.int64]] = []
    pending: list[int] = []
    body = length - len(first) - len(last)
    with contextlib.closing(text_lines(source)) as lines:
        for line in lines:
            # "<mask>" in the text is six characters; the length of a line is no fault
            pending += tokenizer(line, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
            pending += last
            while len(pending) >= body and len(found) < count:
                found.append(np.array([*first, *pending[:body], *last]))
                pending = pending[body:]
            if len(found) == count:
                break
    require(bool(found), f"{source} holds fewer than {body} tokens, which is not one sequence: give more text")
    return found


def measure_checkpoint(
    encoder: TextEncoder,
    source: str,
    taus: Sequence[float] = (TAU,),
    samples: int = 2048,
    length: int = LONGEST,
    watch: Watch | None = None,
) -> RankReport:
    """Effective ranks of a checkpoint on `samples` sequences of `length` tokens (fewer if it takes fewer)."""
    check_taus(taus)
    require(samples > 0, f"samples must be positive, not {samples}")
    require(length >= 8, f"a sequence must have at least 8 tokens, not {length}")
    rows = sequences(encoder, source, samples, min(length, encoder.max_length))
    vocabulary, device = vocabulary_of_checkpoint(encoder), next(encoder.parameters()).device
    batches = _batches(vocabulary, rows)
    total = -(-len(rows) // BATCH)
    shown = batches if watch is None else watch(batches, total)
    inputs = effective_ranks(from_text_encoder(encoder), shown, vocabulary.mask_id, SEES_MASK, taus, device)
    return RankReport(
        name=encoder.name,
        step=None,
        encoder_sees_mask=True,
        hidden_size=encoder.hidden_size,
        taus=list(taus),
        centred=False,
        data=source,
        samples=len(rows),
        mask_rate=MASKING.rate,
        mask_policy=MASKING.policy,
        inputs=inputs,
    )


def _batches(vocabulary: Vocabulary, rows: list[NDArray[np.int64]]) -> Iterator[PackedBatch]:
    masker = Masker(MASKING, vocabulary, 0, encoder_sees_mask=True)
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        samples = np.arange(start, start + len(part))
        epochs = np.full(len(part), VALIDATION_EPOCH)
        yield pack(part, samples, epochs, masker)
