"""Effective ranks of a Hugging Face encoder: RoBERTa, BERT, MPNet, ModernBERT, any masked language model of a local
directory, read by transformers. Nothing is downloaded and no code of the directory is run.

The text may come from a token store, whose samples are turned back into text first (in lower case if its tokenizer is
uncased), or from a file or the embedded corpus. It is cut by the model's own tokenizer, line after line with the
separator after each, into sequences of equal length. 15% of the tokens that are not special are masked, with the same
masks at every call.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from maelm_fast.analysis.effective_rank import SEES_MASK, TAU, RankReport, Watch, check_taus, effective_ranks
from maelm_fast.analysis.inputs import Encode, from_padded
from maelm_fast.batch import PackedBatch
from maelm_fast.config import MaskingConfig, require
from maelm_fast.data.masking import pack
from maelm_fast.data.order import permutation
from maelm_fast.data.readers import HUB_PREFIX, expand_inputs, read_documents
from maelm_fast.data.token_store import MANIFEST_FILE, TokenStore
from maelm_fast.data.tokenizer import special_ids
from maelm_fast.errors import UserError
from maelm_fast.masking import VALIDATION_EPOCH, Masker, Vocabulary

MASKING = MaskingConfig(rate=0.15, special_tokens=False)
LONGEST = 512  # tokens of a sequence, if the model takes as many: the paper's
BATCH = 32  # sequences a forward pass
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")


@dataclass(frozen=True)
class HuggingFaceEncoder:
    """A checkpoint ready to be measured. longest: tokens it takes at most, special ones included."""

    path: Path
    encode: Encode
    tokenizer: Any
    vocabulary: Vocabulary
    hidden_size: int
    longest: int
    device: torch.device


def load_encoder(path: str | Path, device: torch.device) -> HuggingFaceEncoder:
    """Raises UserError if the directory holds no masked language model with a tokenizer that has a mask token."""
    path = Path(path)
    try:
        import transformers
    except ImportError:
        raise UserError("Hugging Face checkpoints need transformers: pip install transformers") from None
    _check_directory(path)
    options = {"local_files_only": True, "trust_remote_code": False}
    with quiet():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, **options)
            model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32, **options).eval().to(device)
        except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
            raise UserError(f"{path}: transformers cannot load it ({str(error).strip().splitlines()[0]})") from None
    mask_id = tokenizer.mask_token_id
    require(mask_id is not None, f"{path}: its tokenizer has no mask token, so that no input can be masked")
    rows = model.get_input_embeddings().weight.shape[0]
    require(
        len(tokenizer) <= rows,
        f"{path}: the tokenizer has {len(tokenizer)} tokens, the model's table {rows}: they do not belong together",
    )
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    return HuggingFaceEncoder(
        path,
        from_padded(_hidden_states(model), pad_id),
        tokenizer,
        Vocabulary(rows, mask_id, tuple(sorted(tokenizer.all_special_ids))),
        model.config.hidden_size,
        longest_input(model),
        device,
    )


def _check_directory(path: Path) -> None:
    require(path.is_dir(), f"{path}: no such directory; give one that save_pretrained wrote: nothing is downloaded")
    try:
        kind = json.loads((path / "config.json").read_text(encoding="utf-8"))["model_type"]
    except FileNotFoundError:
        raise UserError(f"{path}: no config.json: not the directory of a Hugging Face checkpoint") from None
    except (OSError, ValueError, LookupError, TypeError):
        raise UserError(f"{path / 'config.json'}: not the configuration of a Hugging Face model") from None
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    known = set(MODEL_FOR_MASKED_LM_MAPPING_NAMES) - set(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    require(
        kind in known,
        f"{path}: model_type '{kind}' is no encoder pretrained with masks (decoder-only and encoder-decoder models "
        f"have no [MASK] to measure); RoBERTa, BERT, MPNet, ModernBERT and the like are",
    )
    require(
        any(any(path.glob(pattern)) for pattern in TOKENIZER_FILES),
        f"{path}: no tokenizer beside the model; save its tokenizer into the same directory",
    )


def _hidden_states(model: nn.Module) -> Any:
    def call(ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        result = model(input_ids=ids, attention_mask=attention_mask, output_hidden_states=True)
        hidden: tuple[Tensor, ...] = result.hidden_states
        return hidden

    return call


def longest_input(model: nn.Module) -> int:
    """Tokens it takes at most. RoBERTa's kin number positions from behind the padding token's."""
    limit = int(getattr(model.config, "max_position_embeddings", LONGEST))
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            limit -= module.padding_idx + 1  # type: ignore[operator]
    return limit


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and remarks on heads that are not used."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


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


def sequences(encoder: HuggingFaceEncoder, source: str, count: int, length: int) -> list[NDArray[np.int64]]:
    """The first `count` sequences of `length` tokens, special ones included, or as many as the text makes."""
    tokenizer = encoder.tokenizer
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
    encoder: HuggingFaceEncoder,
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
    rows = sequences(encoder, source, samples, min(length, encoder.longest))
    batches = _batches(encoder, rows)
    total = -(-len(rows) // BATCH)
    shown = batches if watch is None else watch(batches, total)
    inputs = effective_ranks(encoder.encode, shown, encoder.vocabulary.mask_id, SEES_MASK, taus, encoder.device)
    return RankReport(
        name=encoder.path.resolve().name,
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


def _batches(encoder: HuggingFaceEncoder, rows: list[NDArray[np.int64]]) -> Iterator[PackedBatch]:
    masker = Masker(MASKING, encoder.vocabulary, 0, encoder_sees_mask=True)
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        samples = np.arange(start, start + len(part))
        epochs = np.full(len(part), VALIDATION_EPOCH)
        yield pack(part, samples, epochs, masker)
