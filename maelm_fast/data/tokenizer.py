"""The byte-level BPE tokenizer: training, loading, and documents to token ids, in one process or many.

Ids follow RoBERTa: <s> 0, <pad> 1, </s> 2, <unk> 3, <mask> last. All 256 bytes are in the alphabet, so nothing is ever
unknown. A word has the same token at the start of a line as in its middle: a space is put before every line, and the
decoder takes it away again. `<mask>` and the like in a corpus are plain characters there, not special tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from maelm_fast.config import require
from maelm_fast.data.corpus import Document
from maelm_fast.errors import UserError
from maelm_fast.stop import end_with_parent

BOS, PAD, EOS, UNK = 0, 1, 2, 3
"""Ids in the tokenizers trained here."""
LEADING_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
MASK_TOKEN = "<mask>"
ROLES = ("bos", "pad", "eos", "unk", "mask")
SPECIAL_NAMES = (
    (*LEADING_SPECIALS, MASK_TOKEN),  # ours and RoBERTa's
    ("<s>", "<pad>", "</s>", "[UNK]", "<mask>"),  # MPNet's
    ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"),  # BERT's
)
"""Names of the special tokens, in the order of ROLES, that a tokenizer made elsewhere may have."""
MIN_VOCAB_SIZE = 256 + len(LEADING_SPECIALS) + 1
MIN_PAIR_COUNT = 2


def train_tokenizer(texts: Iterable[str], vocab_size: int, cased: bool) -> Tokenizer:
    """Learns a byte-level BPE from lines of text. vocab_size counts the five special tokens and the 256 bytes.

    The same texts in the same order give the same tokenizer. A corpus with too few different words gives a smaller one:
    compare `get_vocab_size()`. Raises UserError if vocab_size is below 261.
    """
    require(vocab_size >= MIN_VOCAB_SIZE, f"vocab_size must be at least {MIN_VOCAB_SIZE}, not {vocab_size}")
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    nfc = normalizers.NFC()
    tokenizer.normalizer = nfc if cased else normalizers.Sequence([nfc, normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=MIN_PAIR_COUNT,
        special_tokens=list(LEADING_SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(MASK_TOKEN, lstrip=True, special=True, normalized=False)])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", EOS), ("<s>", BOS), trim_offsets=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Reads a tokenizer.json. Truncation and padding, if the file asks for them, are switched off.

    Raises UserError if the file is missing, is no tokenizer, or lacks a special token.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"tokenizer {path} cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is not a tokenizer.json of the tokenizers library: {reason}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    try:
        special_names(tokenizer)
    except UserError as error:
        raise UserError(f"tokenizer {path}: {error}") from None
    return tokenizer


def special_names(tokenizer: Tokenizer) -> dict[str, str]:
    """Role (bos, pad, eos, unk, mask) to the token that has it. UserError if it has none of SPECIAL_NAMES."""
    for names in SPECIAL_NAMES:
        if all(tokenizer.token_to_id(name) is not None for name in names):
            return dict(zip(ROLES, names, strict=True))
    raise UserError(f"it lacks special tokens: {', '.join(SPECIAL_NAMES[0])}, or BERT's; train one with 'data prepare'")


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Role to id of the special tokens."""
    vocabulary = tokenizer.get_vocab()
    return {role: vocabulary[name] for role, name in special_names(tokenizer).items()}


def with_mask_in_text(tokenizer: Tokenizer) -> Tokenizer:
    """A copy for texts in which <mask> stands for a token: what follows it is cut as in running text.

    Byte-level BPE puts its space before every stretch of text between special tokens, so that "<mask>." would end in
    a lone space, which no text holds; here it does so at the start only. Texts without <mask> are cut as before."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    cut = copy.pre_tokenizer
    if isinstance(cut, pre_tokenizers.ByteLevel) and cut.add_prefix_space:
        at_start = pre_tokenizers.Metaspace(replacement=" ", prepend_scheme="first", split=False)
        cut.add_prefix_space = False
        copy.pre_tokenizer = pre_tokenizers.Sequence([at_start, cut])
    return copy


def is_cased(tokenizer: Tokenizer) -> bool:
    return tokenizer.encode("A", add_special_tokens=False).ids != tokenizer.encode("a", add_special_tokens=False).ids


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """SHA-256, in hex, of the tokenizer as JSON with sorted keys, so that the layout of its file does not count."""
    canonical = json.dumps(json.loads(tokenizer.to_str()), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def encode_documents(tokenizer: Tokenizer, documents: Sequence[Document]) -> tuple[np.ndarray, np.ndarray]:
    """All documents' tokens in a row, (N,) of `token_dtype`, and every document's number of tokens, (D,) int64.

    Each line is encoded by itself and ended by the eos token, </s>, which occurs nowhere else.
    """
    lines = list(itertools.chain.from_iterable(documents))
    before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = True  # "</s>" in the text is four characters, not the end of a line
    line_ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(lines, add_special_tokens=False)]
    tokenizer.encode_special_tokens = before
    line_ends = np.cumsum([len(ids) + 1 for ids in line_ids], dtype=np.int64)
    size = int(line_ends[-1]) if lines else 0
    tokens = np.full(size, special_ids(tokenizer)["eos"], dtype=token_dtype(tokenizer.get_vocab_size()))
    is_text = np.ones(size, dtype=bool)
    is_text[line_ends - 1] = False
    tokens[is_text] = np.fromiter(itertools.chain.from_iterable(line_ids), dtype=tokens.dtype, count=size - len(lines))
    document_ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    boundaries = np.concatenate([[0], line_ends])[np.concatenate([[0], document_ends])]
    return tokens, np.diff(boundaries)


def encode_in_parallel(
    chunks: Iterable[Sequence[Document]], tokenizer_path: Path, workers: int
) -> Generator[tuple[Sequence[Document], np.ndarray, np.ndarray], None, None]:
    """Each chunk of documents, in order, with what `encode_documents` makes of it.

    workers: processes; 1 works in this one. Close the generator if it is left early, so that they end. Raises UserError
    if one of them dies.
    """
    if workers == 1:
        tokenizer = load_tokenizer(tokenizer_path)
        for chunk in chunks:
            yield chunk, *encode_documents(tokenizer, chunk)
        return
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, spawn, _start_worker, (tokenizer_path,))
    waiting: deque[tuple[Sequence[Document], Future[tuple[np.ndarray, np.ndarray]]]] = deque()
    try:
        for chunk in chunks:
            waiting.append((chunk, pool.submit(_encode_in_worker, chunk)))
            if len(waiting) > 2 * workers:  # reading is faster than tokenising: it must not fill the memory
                first, encoded = waiting.popleft()
                yield first, *encoded.result()
        for first, encoded in waiting:
            yield first, *encoded.result()
    except BrokenProcessPool:
        raise UserError("a tokenising process died, perhaps for lack of memory: use fewer --workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


_of_worker: dict[str, Tokenizer] = {}


def _start_worker(tokenizer_path: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process
    _of_worker["tokenizer"] = load_tokenizer(tokenizer_path)


def _encode_in_worker(chunk: Sequence[Document]) -> tuple[np.ndarray, np.ndarray]:
    return encode_documents(_of_worker["tokenizer"], chunk)
