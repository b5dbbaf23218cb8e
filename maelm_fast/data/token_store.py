"""The token store: a directory of Arrow files with a manifest, read by memory-mapping.

    manifest.json            what is in the store and how it was made
    tokenizer.json
    train-00000.arrow, ...   Arrow IPC files; each row of the column `tokens` is one sample, <s> included
    validation-00000.arrow, ...

A sample is a view of the mapped file: reading one copies nothing. `prepare.py` makes a store complete or not at all.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tokenizers import Tokenizer

from maelm_fast import native
from maelm_fast.config import require
from maelm_fast.data.files import checksum_of_given, sync, written_aside
from maelm_fast.data.tokenizer import load_tokenizer, token_dtype, tokenizer_hash
from maelm_fast.errors import UserError

STORE_VERSION = 1
MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
COLUMN = "tokens"
BATCH_TOKENS = 1 << 22
SHARD_TOKENS = 1 << 27
REMEDY = "copy the store again, or prepare it again"


@dataclass(frozen=True)
class Shard:
    name: str
    samples: int
    tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Split:
    """One split: where its samples lie, what they were made from, and what was left out."""

    samples: int
    tokens: int
    """Over all samples, the <s> before each included."""
    unigram_nats: float
    """Entropy of the tokens' distribution over the samples: no predictor blind to context has a lower loss on them."""
    shards: tuple[Shard, ...]
    documents: int
    lines: int
    text_bytes: int
    """UTF-8, line ends not counted."""
    dropped_tokens: int
    """full: the last, incomplete block. document: one-token samples."""
    split_lines: int
    """document: lines longer than a sample, cut into consecutive pieces. full: lines are cut anywhere, not counted."""


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` holds. `options` is all that decides the content, so not the number of workers."""

    version: int
    tokenizer_sha256: str
    vocab_size: int
    cased: bool
    special_tokens: dict[str, int]
    seq_len: int
    sample_mode: str
    splits: dict[str, Split]
    options: dict[str, Any]
    sha256: str = dataclasses.field(default="", compare=False)
    """Of everything else here, so that no edit goes unnoticed; "" in one made before manifests had it."""

    @property
    def unigram_nats(self) -> float:
        """The validation split's unigram entropy, in nats."""
        return self.splits["validation"].unigram_nats

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the samples and the tokenizer: equal for stores with the same content, wherever they lie."""
        content = [
            self.tokenizer_sha256,
            self.sample_mode,
            self.seq_len,
            {name: [[s.samples, s.tokens, s.sha256] for s in split.shards] for name, split in self.splits.items()},
        ]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @cached_property
    def checksum(self) -> str:
        """What `sha256` must be."""
        content = {key: value for key, value in dataclasses.asdict(self).items() if key != "sha256"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def write(self, directory: Path) -> None:
        with written_aside(directory / MANIFEST_FILE) as file:
            data = {**dataclasses.asdict(self), "sha256": self.checksum}
            file.write(json.dumps(data, indent=2).encode() + b"\n")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Raises UserError if there is no manifest, if it is damaged or if it is of another version."""
        path = directory / MANIFEST_FILE
        require(path.is_file(), f"{directory} is not a token store (no {MANIFEST_FILE}): make one with 'data prepare'")
        try:
            data = json.loads(path.read_bytes())
            version = data["version"]
        except (OSError, ValueError, LookupError, TypeError):
            raise UserError(f"{path} is damaged: prepare the store again") from None
        require(
            version == STORE_VERSION,
            f"{path} is of version {version}, this program reads version {STORE_VERSION}: prepare the store again",
        )
        try:
            for name, split in data["splits"].items():
                shards = tuple(Shard(**shard) for shard in split["shards"])
                data["splits"][name] = Split(**{**split, "shards": shards})
                outside = [shard.name for shard in shards if Path(shard.name).name != shard.name]
                require(not outside, f"{path} names a file outside the store ({outside[:1]}): prepare the store again")
            manifest = cls(**data)
        except (LookupError, TypeError, AttributeError):
            raise UserError(f"{path} is damaged: prepare the store again") from None
        right = manifest.sha256 in ("", manifest.checksum)
        require(right, f"{path} was changed after it was written (checksum): {REMEDY}")
        return manifest


class TokenStore:
    """The samples of one split. `store[i]` is a read-only 1-D array of uint16 (uint32 if there are more than 65,536
    tokens), a view of the mapped file. Can be pickled: the copy opens the files anew, as loader processes must.
    """

    def __init__(self, path: str | Path, split: str = "train") -> None:
        """Opens and checks everything except the content of the shards, which `verify` reads.

        Raises UserError if the store, the split or a shard is missing, of another version or truncated.
        """
        self.path = Path(path)
        self.split = split
        self.manifest = Manifest.read(self.path)
        splits = self.manifest.splits
        require(split in splits, f"{path} has no split '{split}': it has {', '.join(splits)}")
        self._values: list[np.ndarray] = []
        self._offsets: list[np.ndarray] = []
        for shard in splits[split].shards:
            for batch in _open_shard(self.path, shard, token_dtype(self.manifest.vocab_size)):
                self._values.append(batch.values.to_numpy())
                self._offsets.append(batch.offsets.to_numpy())
        self._starts = np.cumsum([0, *(len(offsets) - 1 for offsets in self._offsets)]).tolist()

    @classmethod
    def open(cls, path: str | Path, split: str = "train") -> TokenStore:
        return cls(path, split)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore, (self.path, self.split)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> np.ndarray:
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        batch = bisect.bisect_right(self._starts, index) - 1
        row = index - self._starts[batch]
        first, end = self._offsets[batch][row : row + 2].tolist()
        if not 0 <= first <= end <= len(self._values[batch]):
            raise self._damaged(f"sample {index} has no valid offsets")
        return self._values[batch][first:end]

    def sample_lengths(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """(S,) tokens of each of these samples, S ids in [0, len(self)). Raises UserError if the file is damaged."""
        if self._native is None:
            return np.array([len(self[i]) for i in samples.tolist()], dtype=np.int64)
        try:
            lengths: NDArray[np.int64] = self._native.lengths(samples)
        except ValueError as error:
            raise self._damaged(str(error)) from None
        return lengths

    def read(self, samples: NDArray[np.int64]) -> NDArray[np.generic]:
        """(N,) the tokens of these samples, one after another, copied; ids and errors as for `sample_lengths`."""
        if self._native is None:
            rows = [self[i] for i in samples.tolist()]
            return np.concatenate(rows or [np.empty(0, token_dtype(self.manifest.vocab_size))])
        try:
            tokens: NDArray[np.generic] = self._native.read(samples)
        except ValueError as error:
            raise self._damaged(str(error)) from None
        return tokens

    @cached_property
    def _native(self) -> Any:
        """The compiled reader; None where it was not built."""
        host = native.host()
        return None if host is None else host.Samples(list(zip(self._values, self._offsets, strict=True)))

    def _damaged(self, what: str) -> UserError:
        return UserError(f"{self.path} is damaged (split {self.split}: {what}): {REMEDY}")

    @cached_property
    def lengths(self) -> np.ndarray:
        """(len(self),) int32, tokens of every sample."""
        return np.concatenate([np.diff(offsets) for offsets in self._offsets] or [np.empty(0)]).astype(np.int32)

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    def tokenizer(self) -> Tokenizer:
        """The tokenizer the store was made with. Raises UserError if the file was replaced by another one."""
        path = self.path / TOKENIZER_FILE
        tokenizer = load_tokenizer(path)
        require(
            tokenizer_hash(tokenizer) == self.manifest.tokenizer_sha256,
            f"{path} is not the tokenizer this store was prepared with: prepare the store again",
        )
        return tokenizer

    def verify(self) -> None:
        """Reads the split's shards whole and compares their checksums. Raises UserError naming the first bad one."""
        for shard in self.manifest.splits[self.split].shards:
            verify_shard(self.path, shard)


def verify_shard(directory: Path, shard: Shard) -> None:
    """Reads a shard whole; 0.5 CPU seconds a GB, where SHA-256 has instructions. Raises UserError if it is another."""
    path = directory / shard.name
    require(checksum_of_given(path) == shard.sha256, f"{path} is damaged (checksum): {REMEDY}")


class SplitWriter:
    """Writes one split's samples into shards. Memory: one record batch."""

    def __init__(self, directory: Path, split: str, vocab_size: int) -> None:
        self.token_counts = np.zeros(vocab_size, dtype=np.int64)
        self._directory, self._split = directory, split
        self._dtype = token_dtype(vocab_size)
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []
        self._pending_tokens = 0
        self._file: pa.ipc.RecordBatchFileWriter | None = None
        self._sizes = [0, 0]
        self.shards: list[Shard] = []

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """tokens: (N,) samples in a row. lengths: (S,) tokens of each, summing to N."""
        self.token_counts += np.bincount(tokens, minlength=len(self.token_counts))
        self._pending.append((tokens, lengths))
        self._pending_tokens += len(tokens)
        if self._pending_tokens >= BATCH_TOKENS:
            self._write_batch()
            if self._sizes[1] >= SHARD_TOKENS:
                self._finish_shard()

    def close(self) -> None:
        if self._pending_tokens:
            self._write_batch()
        if self._file:
            self._finish_shard()

    def _write_batch(self) -> None:
        tokens = np.concatenate([tokens for tokens, _ in self._pending]).astype(self._dtype, copy=False)
        lengths = np.concatenate([lengths for _, lengths in self._pending])
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens))
        batch = pa.record_batch([column], names=[COLUMN])
        if self._file is None:
            self._file = pa.ipc.new_file(str(self._shard_path()), batch.schema)
        self._file.write_batch(batch)
        self._sizes = [self._sizes[0] + len(lengths), self._sizes[1] + len(tokens)]
        self._pending, self._pending_tokens = [], 0

    def _finish_shard(self) -> None:
        assert self._file is not None
        self._file.close()
        path = self._shard_path()
        sync(path)
        samples, tokens = self._sizes
        self.shards.append(Shard(path.name, samples, tokens, path.stat().st_size, checksum_of_given(path)))
        self._file, self._sizes = None, [0, 0]

    def _shard_path(self) -> Path:
        return self._directory / f"{self._split}-{len(self.shards):05d}.arrow"


def _open_shard(directory: Path, shard: Shard, dtype: np.dtype) -> list[pa.ListArray]:
    path = directory / shard.name
    require(path.is_file(), f"{path} is missing: {REMEDY}")
    size = path.stat().st_size
    require(size == shard.bytes, f"{path} has {size} bytes instead of {shard.bytes}: {REMEDY}")
    try:
        file = pa.ipc.open_file(pa.memory_map(str(path)))
        batches = [file.get_batch(i).column(COLUMN) for i in range(file.num_record_batches)]
    except (pa.ArrowException, OSError, KeyError) as error:
        raise UserError(f"{path} is damaged ({str(error).splitlines()[0]}): {REMEDY}") from None
    kind = pa.list_(pa.from_numpy_dtype(dtype))
    require(all(batch.type == kind for batch in batches), f"{path} does not hold lists of {dtype}: {REMEDY}")
    require(sum(map(len, batches)) == shard.samples, f"{path} does not hold {shard.samples} samples: {REMEDY}")
    return batches
