"""Text to a token store: the job behind `maelm-fast data prepare`.

1. Documents are read as a stream and cut into chunks of a few megabytes: always the same ones.
2. A tokenizer is trained on the training split, unless one is given.
3. Processes tokenise the chunks; each chunk's tokens go to a file of their own.
4. The files are gone through in order: tokens are cut into samples, samples written to shards, the manifest last.

All of it happens in `<out>.partial`, which is renamed at the end; `<out>.lock` is held meanwhile. A run that was killed
goes on after the last finished chunk; the store's bytes depend neither on that nor on the number of processes. Disk:
twice the tokens, for a while.

A store, or a run to resume, is known by its options and by what its input files hold: their SHA-256 is taken at the
start. A file that is where it was, with its size and time, is not read again for that; one that is elsewhere or has
another time is, and is the same if its name, size and SHA-256 are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from maelm_fast.config import require
from maelm_fast.data.corpus import Document
from maelm_fast.data.files import checksum_of_given, sync, writing, written_aside
from maelm_fast.data.readers import expand_inputs, identify, read_documents
from maelm_fast.data.samples import Chunk, cut_blocks, cut_documents
from maelm_fast.data.token_store import (
    MANIFEST_FILE,
    STORE_VERSION,
    TOKENIZER_FILE,
    Manifest,
    Split,
    SplitWriter,
)
from maelm_fast.data.tokenizer import (
    MIN_VOCAB_SIZE,
    encode_in_parallel,
    is_cased,
    load_tokenizer,
    special_ids,
    special_names,
    tokenizer_hash,
    train_tokenizer,
)
from maelm_fast.errors import UserError
from maelm_fast.work import lock

CHUNKS = "chunks"
VALIDATION_INPUTS = "validation_inputs"
INPUT_KEYS = ("inputs", VALIDATION_INPUTS)
"""Of a plan: what `identify` says of each source, and the SHA-256 of files."""
PLAN_FILE = "plan.json"
TELL_BYTES = 1 << 30
"""Inputs of so many bytes take long enough to read for a checksum that it is said."""
CHUNK_CHARS = 1 << 22
TOKENIZER_CHARS = 1 << 29
"""Text that the tokenizer is trained on, at most: memory must hold it, and more hardly changes a vocabulary (ours)."""
MIN_SEQ_LEN, MAX_SEQ_LEN = 8, 65_536
MAX_VOCAB_SIZE = 1 << 24
REPORT_SECONDS = 10.0

Log = Callable[[str], None]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Text to a token store. The same command resumes one that was killed."""

    inputs: tuple[str, ...]
    """File, directory or glob (.txt .md .rst .jsonl .json .csv, also .xz .gz .zst; .parquet), hf:NAME[:CONFIG] (Hugging
    Face dataset, split train), or 'embedded' (text found on this machine). In text an empty line ends a document."""
    out: Path
    """The store to make, a directory."""
    tokenizer: Path | None = None
    """Use this tokenizer.json, train none."""
    vocab_size: int | None = None
    """Of the tokenizer that is trained (default: 32,768, or 64,000 when cased: the paper's base and base++)."""
    cased: bool = False
    """Keep upper case."""
    sample_mode: Literal["full", "document"] = "full"
    """full: all documents end to end, cut into samples of exactly seq_len. document: whole lines of one document, at
    most seq_len (the released code's complete_doc)."""
    seq_len: int = 512
    """Tokens of a sample, <s> included."""
    validation: float = 0.01
    """Share of the documents for validation, chosen by a hash of their text."""
    validation_inputs: tuple[str, ...] = ()
    """Validate on these instead of a share."""
    text_field: str = "text"
    """Field or column that holds the text."""
    seed: int = 0
    """Decides which documents these are."""
    workers: int = dataclasses.field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Tokenising processes (default: one per core); 1 works in this process. With more, a script needs its
    `if __name__ == "__main__":`."""

    def __post_init__(self) -> None:
        require(
            MIN_SEQ_LEN <= self.seq_len <= MAX_SEQ_LEN,
            f"seq_len must lie between {MIN_SEQ_LEN} and {MAX_SEQ_LEN}, not {self.seq_len}",
        )
        require(
            self.vocab_size is None or MIN_VOCAB_SIZE <= self.vocab_size <= MAX_VOCAB_SIZE,
            f"vocab_size must lie between {MIN_VOCAB_SIZE} (bytes and special tokens) and {MAX_VOCAB_SIZE}, "
            f"not {self.vocab_size}",
        )
        require(0.0 < self.validation < 1.0, f"validation must lie between 0 and 1, not {self.validation}")
        require(self.workers >= 1, f"workers must be at least 1, not {self.workers}")
        require(0 <= self.seed < 2**63, f"seed must lie in [0, 2**63), not {self.seed}")
        require(self.sample_mode in ("full", "document"), f"sample_mode is full or document, not {self.sample_mode}")
        require(
            self.tokenizer is None or (self.vocab_size is None and not self.cased),
            "a tokenizer is given, which fixes its size and case: remove vocab_size and cased",
        )


@dataclass(frozen=True)
class _Job:
    """A checked configuration: inputs expanded, tokenizer loaded, and the plan that identifies the result."""

    config: PrepareConfig
    sources: tuple[str, ...]
    validation_sources: tuple[str, ...]
    tokenizer: Tokenizer | None
    plan: dict[str, Any]

    @property
    def partial(self) -> Path:
        return self.config.out.with_name(self.config.out.name + ".partial")

    @property
    def chunk_files(self) -> list[Path]:
        return sorted((self.partial / CHUNKS).glob("*.npz"))

    def in_validation(self, document: Document) -> bool:
        """By the text alone: the same document is on the same side wherever it stands, and all its copies are."""
        if self.validation_sources:
            return False  # those of the validation sources are not asked about
        key = self.config.seed.to_bytes(8, "little")
        digest = hashlib.blake2b("\n".join(document).encode(), digest_size=8, key=key).digest()
        return int.from_bytes(digest, "little") < self.config.validation * 2**64


def prepare(config: PrepareConfig, log: Log = logger.info) -> Manifest:
    """Makes the store `config.out`, or finds it made, and returns its manifest. `log` is given lines on the progress.

    Raises UserError on bad input, if `out` holds something else, or if it cannot be written.
    """
    job = _plan(config)
    if config.out.exists():
        return _finished(job, log)
    # the readers turn their OSErrors into UserErrors, so that what is left is about writing
    remedy = "choose another --out; the same command resumes where this one stopped"
    with writing(job.partial, remedy), lock(job.partial.with_suffix(".lock"), remove=True) as ours:
        require(ours, f"{job.partial} is being written by another run: wait for it, or stop it")
        if config.out.exists():  # that run has ended meanwhile
            return _finished(job, log)
        job.partial.mkdir(parents=True, exist_ok=True)
        return _prepare_alone(job, log)


def _plan(config: PrepareConfig) -> _Job:
    sources = expand_inputs(config.inputs)
    validation_sources = expand_inputs(config.validation_inputs) if config.validation_inputs else ()
    if both := {os.path.abspath(s) for s in sources} & {os.path.abspath(s) for s in validation_sources}:
        raise UserError(f"{min(both)} is an input and a validation input: remove it from one of them")
    given = load_tokenizer(config.tokenizer) if config.tokenizer else None
    if given:
        size, largest = given.get_vocab_size(), max(given.get_vocab().values())
        require(largest < size, f"{config.tokenizer} has {size} tokens and an id {largest}: ids must leave no gaps")
    plan = {
        "inputs": [identify(source) for source in sources],
        "validation_inputs": [identify(source) for source in validation_sources],
        "validation": None if validation_sources else config.validation,
        "tokenizer_sha256": tokenizer_hash(given) if given else None,
        "vocab_size": None if given else config.vocab_size or (64_000 if config.cased else 32_768),
        "cased": None if given else config.cased,
        "sample_mode": config.sample_mode,
        "seq_len": config.seq_len,
        "text_field": config.text_field,
        "seed": config.seed,
        "store_version": STORE_VERSION,
    }
    return _Job(config, sources, validation_sources, given, plan)


def _finished(job: _Job, log: Log) -> Manifest:
    out = job.config.out
    require((out / MANIFEST_FILE).is_file(), f"{out} exists and is not a token store: choose another --out")
    manifest = Manifest.read(out)
    changed = _difference(manifest.options, job.plan, log)
    require(not changed, f"{out} was prepared differently ({changed}): remove it or choose another --out")
    log(f"{out} is already prepared")
    return manifest


def _prepare_alone(job: _Job, log: Log) -> Manifest:
    plan = _begin_or_go_on(job, log)
    partial, out = job.partial, job.config.out
    if not (partial / MANIFEST_FILE).exists():
        try:
            tokenizer = _make_tokenizer(job, log)
            _tokenise(job, job.sources, "inputs", log)
            _tokenise(job, job.validation_sources, VALIDATION_INPUTS, log)
            manifest = _assemble(job, tokenizer, plan)
            _require_unchanged(job)
            manifest.write(partial)
        except UserError:
            if not job.chunk_files:  # nothing that would be missed
                shutil.rmtree(partial)
            raise
    shutil.rmtree(partial / CHUNKS, ignore_errors=True)
    sync(partial)
    os.rename(partial, out)
    sync(out.parent)
    return Manifest.read(out)


# What an earlier run left


def _begin_or_go_on(job: _Job, log: Log) -> dict[str, Any]:
    """The plan of the run that began, which has the checksums of the inputs."""
    partial, chunks = job.partial, job.partial / CHUNKS
    finished = len(job.chunk_files)
    begun = _begun_plan(partial)
    if begun is not None:
        changed = _difference(begun, job.plan, log)
        if not changed:
            log(f"going on in {partial}: {finished} chunks are done")
            return begun
        if finished or (partial / MANIFEST_FILE).exists():
            raise UserError(f"{partial} was begun differently ({changed}): remove it or choose another --out")
        for leftover in partial.glob(TOKENIZER_FILE + "*"):  # also one that was not written to its end
            leftover.unlink()
    foreign = [path.name for path in partial.iterdir() if path != chunks]
    require(not foreign, f"{partial} holds {', '.join(foreign)}: remove it or choose another --out")
    plan = _with_checksums(job.plan, log)
    chunks.mkdir(exist_ok=True)
    with written_aside(chunks / PLAN_FILE) as file:
        file.write(json.dumps(plan, indent=2).encode())
    return plan


def _begun_plan(partial: Path) -> dict[str, Any] | None:
    if (partial / MANIFEST_FILE).exists():
        return Manifest.read(partial).options
    if (partial / CHUNKS / PLAN_FILE).exists():
        plan: dict[str, Any] = json.loads((partial / CHUNKS / PLAN_FILE).read_bytes())
        return plan
    return None


def _with_checksums(plan: dict[str, Any], log: Log) -> dict[str, Any]:
    size = sum(entry.get("bytes", 0) for key in INPUT_KEYS for entry in plan[key])
    if size >= TELL_BYTES:
        log(f"checksums of the inputs: {size / 1e9:,.1f} GB")
    for key in INPUT_KEYS:
        entries = [{**e, "sha256": checksum_of_given(Path(e["source"]))} if "bytes" in e else e for e in plan[key]]
        plan = {**plan, key: entries}
    return plan


def _difference(old: dict[str, Any], new: dict[str, Any], log: Log) -> str:
    """The options that differ. `old` was recorded; `new` is the plan of this run, still without checksums."""

    def same(key: str) -> bool:
        if key not in INPUT_KEYS or len(old.get(key, ())) != len(new[key]):
            return bool(old.get(key) == new[key])
        return all(_same_input(*entries, log) for entries in zip(old[key], new[key], strict=True))

    return ", ".join(key for key in new if not same(key))


def _same_input(old: dict[str, Any], new: dict[str, Any], log: Log) -> bool:
    if all(old.get(key) == value for key, value in new.items()):
        return True
    if "sha256" not in old or old["bytes"] != new.get("bytes"):
        return False
    source = Path(new["source"])
    if source.name != Path(old["source"]).name:
        return False
    log(f"{source} is not where or not from when it was: comparing its checksum")
    return bool(checksum_of_given(source) == old["sha256"])


def _require_unchanged(job: _Job) -> None:
    """What was read is what the checksums are of."""
    entries = [entry for key in INPUT_KEYS for entry in job.plan[key]]
    for source, entry in zip(job.sources + job.validation_sources, entries, strict=True):
        require(
            identify(source) == entry,
            f"{source} changed while it was read: remove {job.partial} and run the same command again",
        )


# Tokenizer and tokens


def _make_tokenizer(job: _Job, log: Log) -> Tokenizer:
    """The tokenizer of an interrupted run, the one given, or a new one; it is in the store from here on."""
    path = job.partial / TOKENIZER_FILE
    if path.exists():
        return load_tokenizer(path)
    tokenizer = job.tokenizer
    if tokenizer is None:
        wanted = job.plan["vocab_size"]
        documents = read_documents(job.sources, job.config.text_field)
        sample = training_sample((d for d in documents if not job.in_validation(d)), TOKENIZER_CHARS)
        log(f"training a tokenizer of {wanted:,} tokens on {sum(map(_chars, sample)) / 1e6:,.1f} million characters")
        tokenizer = train_tokenizer(itertools.chain.from_iterable(sample), wanted, job.config.cased)
        if (size := tokenizer.get_vocab_size()) < wanted:
            log(f"the text gives a tokenizer of only {size:,} tokens")
    with written_aside(path) as file:
        file.write(tokenizer.to_str(pretty=True).encode())
    return tokenizer


def training_sample(documents: Iterable[Document], max_chars: int) -> list[Document]:
    """All documents if they have at most max_chars characters, else those whose hash is under a threshold that halves
    until the rest fits: a choice that depends on the documents only."""
    threshold = 1 << 64
    kept: list[tuple[int, Document]] = []
    size = 0
    for document in documents:
        digest = hashlib.blake2b("\n".join(document).encode(), digest_size=8, person=b"tokenizer").digest()
        if (rank := int.from_bytes(digest, "little")) < threshold:
            kept.append((rank, document))
            size += _chars(document)
        while size > max_chars:
            threshold //= 2
            kept = [item for item in kept if item[0] < threshold]
            size = sum(_chars(document) for _, document in kept)
    return [document for _, document in kept]


def _chars(document: Document) -> int:
    return sum(map(len, document))


def _tokenise(job: _Job, sources: tuple[str, ...], origin: str, log: Log) -> None:
    """Leaves chunks/<origin>-000000.npz and so on, from the first that an earlier run has not left."""
    if not sources:
        return
    finished = len(list((job.partial / CHUNKS).glob(f"{origin}-*.npz")))
    begun = reported = time.monotonic()
    text_bytes = 0
    texts = itertools.islice(_chunks(read_documents(sources, job.config.text_field)), finished, None)
    workers = job.config.workers
    with contextlib.closing(encode_in_parallel(texts, job.partial / TOKENIZER_FILE, workers)) as encoded:
        for index, (documents, tokens, document_tokens) in enumerate(encoded, start=finished):
            chunk = Chunk(
                tokens,
                document_tokens,
                document_lines=np.array([len(document) for document in documents]),
                document_bytes=np.array([len("".join(document).encode()) for document in documents]),
                in_validation=np.array([origin == VALIDATION_INPUTS or job.in_validation(text) for text in documents]),
            )
            with written_aside(job.partial / CHUNKS / f"{origin}-{index:06d}.npz") as file:
                np.savez(file, **chunk._asdict())
            text_bytes += int(chunk.document_bytes.sum())
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                log(f"tokenised {_rate(text_bytes, reported - begun)}")
    log(f"tokenised {_rate(text_bytes, time.monotonic() - begun)}")


def _rate(text_bytes: int, seconds: float) -> str:
    return f"{text_bytes / 1e6:,.1f} MB in {seconds:.1f} s ({text_bytes / 1e6 / max(seconds, 1e-9):.2f} MB/s)"


def _chunks(documents: Iterable[Document]) -> Iterator[tuple[Document, ...]]:
    chunk: list[Document] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += _chars(document)
        if size >= CHUNK_CHARS:
            yield tuple(chunk)
            chunk, size = [], 0
    if chunk:
        yield tuple(chunk)


def _read_chunk(path: Path) -> Chunk:
    try:
        with np.load(path) as arrays:
            return Chunk(**arrays)
    except (zipfile.BadZipFile, ValueError, TypeError, EOFError):
        raise UserError(f"{path} is damaged: remove it and all later ones, and run the same command again") from None


# Shards


def _assemble(job: _Job, tokenizer: Tokenizer, plan: dict[str, Any]) -> Manifest:
    """Writes the shards of both splits and describes them. Raises UserError if a split has no sample."""
    return Manifest(
        version=STORE_VERSION,
        tokenizer_sha256=tokenizer_hash(tokenizer),
        vocab_size=tokenizer.get_vocab_size(),
        cased=is_cased(tokenizer),
        special_tokens={name: special_ids(tokenizer)[role] for role, name in special_names(tokenizer).items()},
        seq_len=job.config.seq_len,
        sample_mode=job.config.sample_mode,
        splits={name: _write_split(job, name, tokenizer) for name in ("train", "validation")},
        options=plan,
    )


def _write_split(job: _Job, name: str, tokenizer: Tokenizer) -> Split:
    cut = cut_blocks if job.config.sample_mode == "full" else cut_documents
    ids = special_ids(tokenizer)
    writer = SplitWriter(job.partial, name, tokenizer.get_vocab_size())
    text = np.zeros(3, dtype=np.int64)
    dropped_tokens = split_lines = 0

    def parts() -> Iterator[Chunk]:
        for path in job.chunk_files:
            part = _read_chunk(path).part(name == "validation")
            text[:] += len(part.document_tokens), part.document_lines.sum(), part.document_bytes.sum()
            yield part

    for samples in cut(parts(), job.config.seq_len, ids["bos"], ids["eos"]):
        writer.add(samples.tokens, samples.lengths)
        dropped_tokens += samples.dropped_tokens
        split_lines += samples.split_lines
    writer.close()
    documents, lines, text_bytes = text.tolist()
    if not writer.shards:
        shutil.rmtree(job.partial / CHUNKS)  # with these options every run would end here
        raise UserError(
            f"the {name} split has {documents} documents and {dropped_tokens} tokens, too few for a sample of "
            f"{job.config.seq_len}: give more text, a smaller --seq-len, a "
            f"{'larger' if name == 'validation' else 'smaller'} --validation share (now {job.config.validation}) or "
            f"--validation-input"
        )
    return Split(
        samples=sum(shard.samples for shard in writer.shards),
        tokens=sum(shard.tokens for shard in writer.shards),
        unigram_nats=_entropy(writer.token_counts),
        shards=tuple(writer.shards),
        documents=documents,
        lines=lines,
        text_bytes=text_bytes,
        dropped_tokens=dropped_tokens,
        split_lines=split_lines,
    )


def _entropy(counts: np.ndarray) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
