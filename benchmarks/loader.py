"""The data loader: original tokens per second and core, from stores of several sizes to packed micro-batches.

    python -m benchmarks.loader --scratch DIR --sizes 10MB,100MB,1GB,10GB --out benchmarks/results/loader.jsonl
    python -m benchmarks.loader --store STORE

1. A synthetic store of each mode and size is written under --scratch, one at a time, and deleted, whatever happens.
   full: every sample has 512 tokens. document: documents of log-normal length, in lines, cut as `data prepare` does.
2. Each store has a fresh process of one thread. Gate: an update must equal, bit for bit, what the reference makes
   of the same samples, or nothing is timed.
3. In that process: updates of the paper's size, masks drawn on the host or left to the device, the cases taking turns.
   Then with loader processes, one case after another: updates as they arrive, pinned where there is a GPU.

Tokens per second are by the clock; of one process also by its CPU time, which other work on the machine disturbs less.
What was just written is in the page cache. A round in which the disk was read has major page faults, and the row counts
them: with any, it measured the disk too. Memory is that of the process after its last turn, without file-mapped pages:
those are the page cache, and grow with the store.
"""

from __future__ import annotations

import argparse
import itertools
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Failed, alone, environment, quartiles
from benchmarks.program import Parser, count, recorded, several, start
from benchmarks.rows import Row
from maelm_fast.batch import PackedBatch
from maelm_fast.config import MaskingConfig, require
from maelm_fast.data.loader import TrainingBatches, training_updates
from maelm_fast.data.masking import pack_plain
from maelm_fast.data.packing import best_fit_numpy, spread_numpy
from maelm_fast.data.samples import Chunk, cut_documents
from maelm_fast.data.token_store import BATCH_TOKENS, STORE_VERSION, Manifest, Split, SplitWriter, TokenStore
from maelm_fast.data.tokenizer import BOS, EOS, PAD, SPECIAL_NAMES, UNK
from maelm_fast.data.update import Update
from maelm_fast.masking import Masker, Vocabulary

SEQ_LEN, VOCABULARY_SIZE, SEED = 512, 32768, 0
SPECIAL = dict(zip(SPECIAL_NAMES[0], (BOS, PAD, EOS, UNK, VOCABULARY_SIZE - 1), strict=True))
MEAN_DOCUMENT, SPREAD, MEAN_LINE = 5.5, 1.0, 25  # of the logarithm of a document's tokens; of a line's tokens
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
MODES, MASKS = ("full", "document"), ("host", "device")
WARM_UP = 3  # updates
FILL_UPDATES = 20


@dataclass(frozen=True)
class Setting:
    """batch: sequences of an update. updates: of a round."""

    batch: int
    micro_batches: list[int]
    workers: list[int]
    updates: int
    rounds: int

    def batches(self, store: TokenStore, masks: str, micro_batch: int) -> TrainingBatches:
        masker = Masker(MaskingConfig(), vocabulary_of(store), SEED, encoder_sees_mask=False)
        return TrainingBatches(store, masker, self.batch, micro_batch, mask_on_device=masks == "device")


def vocabulary_of(store: TokenStore) -> Vocabulary:
    special = store.manifest.special_tokens
    mask_id = next(special[names[-1]] for names in SPECIAL_NAMES if names[-1] in special)
    return Vocabulary(store.manifest.vocab_size, mask_id, tuple(sorted(special.values())))


def write_store(path: Path, mode: str, size: int, seq_len: int = SEQ_LEN) -> None:
    """A store of about `size` bytes of uint16 tokens, at least one sample. The same record batch again and again: what
    a sample holds does not matter."""
    path.mkdir()
    draw = np.random.default_rng(0)
    wanted = max(size // 2, seq_len)
    tokens, lengths = _record_batch(draw, mode, seq_len)
    writer = SplitWriter(path, "train", VOCABULARY_SIZE)
    samples = written = 0
    while written < wanted:
        ends = np.cumsum(lengths)
        count = max(1, int(np.searchsorted(ends, wanted - written, side="right")))
        writer.add(tokens[: ends[count - 1]], lengths[:count])
        samples, written = samples + count, written + int(ends[count - 1])
        if wanted - written < seq_len:
            break
    writer.close()
    split = Split(samples, written, 0.0, tuple(writer.shards), 0, 0, 0, 0, 0)
    Manifest(STORE_VERSION, "", VOCABULARY_SIZE, False, SPECIAL, seq_len, mode, {"train": split}, {}).write(path)


def _record_batch(draw: np.random.Generator, mode: str, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, lengths of the samples): a record batch, or a little less."""
    tokens = draw.integers(UNK + 1, VOCABULARY_SIZE - 1, BATCH_TOKENS).astype(np.uint16)
    if mode == "full":
        return tokens, np.full(BATCH_TOKENS // seq_len, seq_len)
    documents = np.exp(draw.normal(MEAN_DOCUMENT, SPREAD, BATCH_TOKENS // 200)).astype(np.int64) + 2
    documents = documents[: int(np.searchsorted(np.cumsum(documents), BATCH_TOKENS * 99 // 100))]
    tokens = tokens[: documents.sum()]
    tokens[draw.random(len(tokens)) < 1 / MEAN_LINE] = EOS
    tokens[np.cumsum(documents) - 1] = EOS
    unused = np.zeros(len(documents), np.int64)
    (cut,) = cut_documents([Chunk(tokens, documents, unused, unused, unused.astype(bool))], seq_len)
    return cut.tokens, cut.lengths


def measured(path: Path, name: str, setting: Setting) -> list[Row]:
    """A row per case, of masks and micro-batch size, and number of loader processes, of one store."""
    torch.set_num_threads(1)
    store = TokenStore.open(path)
    manifest, split = store.manifest, store.manifest.splits["train"]
    common = {
        "store": name,
        "mode": manifest.sample_mode,
        "store_bytes": sum(shard.bytes for shard in split.shards),
        "samples": split.samples,
        "tokens": split.tokens,
        "seq_len": manifest.seq_len,
        "batch": setting.batch,
        "rounds": setting.rounds,
        "updates_a_round": setting.updates,
    }
    made = {case: setting.batches(store, *case) for case in itertools.product(MASKS, setting.micro_batches)}
    filled = {case: fill(batches) for case, batches in made.items()}

    def row(case: tuple[str, int], workers: int, figures: Row) -> Row:
        about = {"masks": case[0], "micro_batch": case[1], "fill": filled[case], "workers": workers}
        return common | about | figures | resident()

    rows = []
    if 0 in setting.workers:
        rows += [row(case, 0, figures) for case, figures in alone_in_turns(made, setting).items()]
    for workers, case in itertools.product([n for n in setting.workers if n], made):
        rows.append(row(case, workers, with_workers(made[case], workers, setting)))
    return rows


def gate(path: Path, setting: Setting) -> None:
    """SystemExit unless the first and the last micro-batch of an update are the reference's."""
    torch.set_num_threads(1)
    store = TokenStore.open(path)
    for micro_batch in setting.micro_batches:
        on_host, on_device = (setting.batches(store, masks, micro_batch) for masks in MASKS)
        samples, epochs = on_host.samples(0)
        sequences = [store[i] for i in samples.tolist()]
        lengths = np.array([len(row) for row in sequences])
        into_bins = best_fit_numpy if store.manifest.sample_mode == "full" else spread_numpy
        bins, count = into_bins(lengths, on_host.micro_batch_tokens)
        packed, ragged = on_host[0], on_device[0]
        same = len(packed) == len(ragged) == count
        for b in {0, count - 1} if same else ():
            here = np.flatnonzero(bins == b)
            rows = [sequences[i] for i in here]
            expected = pack_plain(rows, samples[here], epochs[here], replace(on_host.masker, seed=SEED))
            same &= _same(packed[b], expected) and bool(np.array_equal(ragged[b].ids, np.concatenate(rows)))  # type: ignore[union-attr]
        if not same:
            raise Failed("gate: the loader's micro-batches are not the reference's; nothing is timed")


def _same(a: Any, b: PackedBatch) -> bool:
    return a.lengths == b.lengths and all(torch.equal(x, y) for x, y in zip(a.tensors, b.tensors, strict=True))


def alone_in_turns(contestants: dict[tuple[str, int], TrainingBatches], setting: Setting) -> dict[Any, Row]:
    """Without loader processes, on this core."""
    turns: dict[tuple[str, int], list[tuple[float, float, int]]] = {case: [] for case in contestants}
    for batches in contestants.values():
        for _ in training_updates(batches, 0, WARM_UP, 0, pin_memory=False):
            pass
    for round_, (case, batches) in itertools.product(range(setting.rounds), contestants.items()):
        first = WARM_UP + round_ * setting.updates
        faults, began, cpu = major_faults(), time.perf_counter(), time.process_time()
        tokens = sum(map(original, training_updates(batches, first, first + setting.updates, 0, pin_memory=False)))
        seconds, busy = time.perf_counter() - began, time.process_time() - cpu
        turns[case].append((tokens / seconds, tokens / busy, major_faults() - faults))
    found = {}
    for case, taken in turns.items():
        by_clock, by_cpu, faults_of = zip(*taken, strict=True)
        found[case] = {
            "tokens_per_s_per_core": quartiles(by_clock),
            "tokens_per_cpu_s": quartiles(by_cpu),
            "major_faults": sum(faults_of),
        }
    return found


def with_workers(batches: TrainingBatches, workers: int, setting: Setting) -> Row:
    """As they arrive in this process. The first updates are ready before the clock starts and do not count."""
    pinned = torch.cuda.is_available()
    warm_up = WARM_UP + 3 * workers  # what is prefetched, and one each
    updates = training_updates(batches, 0, warm_up + setting.rounds * setting.updates, workers, pinned)
    for _ in range(warm_up):
        next(updates)
    speeds = []
    for _ in range(setting.rounds):
        began = time.perf_counter()
        tokens = sum(map(original, itertools.islice(updates, setting.updates)))
        speeds.append(tokens / (time.perf_counter() - began) / workers)
    return {"tokens_per_s_per_core": quartiles(speeds), "tokens_per_cpu_s": None, "major_faults": None}


def original(update: Update) -> int:
    return sum(sum(b.decoder.lengths if isinstance(b, PackedBatch) else b.lengths) for b in update.micro_batches())


def fill(batches: TrainingBatches) -> dict[str, float]:
    """Tokens over the room of the micro-batches, of micro_batch full samples each."""
    tokens = room = 0
    for update in range(FILL_UPDATES):
        lengths = batches.store.sample_lengths(batches.samples(update)[0])
        order, counts = batches.placed(lengths)
        used = np.add.reduceat(lengths[order], np.cumsum([0, *counts[:-1]]))
        tokens += int(used.sum())
        room += len(used) * batches.micro_batch_tokens
    return {"all": round(tokens / room, 4)}


def resident() -> dict[str, float | None]:
    """MB of anonymous memory of this process."""
    rollup = Path("/proc/self/smaps_rollup")
    found = re.search(r"^Anonymous: +(\d+) kB", rollup.read_text(), re.M) if rollup.exists() else None
    return {"rss_anon_mb": round(int(found[1]) / 1024, 1) if found else None}


def major_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def rows_of(path: Path, name: str, setting: Setting) -> list[Row]:
    alone(gate, path, setting)  # on its own: the reference's memory is not the loader's
    rows: list[Row] = alone(measured, path, name, setting)
    return rows


def synthetic_rows(scratch: Path, modes: Sequence[str], sizes: Sequence[int], setting: Setting) -> Iterator[Row]:
    for size, mode in itertools.product(sizes, modes):
        free = shutil.disk_usage(scratch).free
        need = f"a store of {size / 1e9:g} GB needs more room than {scratch} has: {free / 1e9:.1f} GB"
        require(free > 1.1 * size, need)
        with tempfile.TemporaryDirectory(dir=scratch, prefix="loader-") as folder:
            path = Path(folder) / "store"
            write_store(path, mode, size)
            yield from rows_of(path, "synthetic", setting)


def bytes_of(text: str) -> int:
    """The type of an option."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(KB|MB|GB)", text)
    size = int(float(found[1]) * UNITS[found[2]]) if found else 0
    if size == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size like 10MB or 1.5GB")
    return size


def workers_of(text: str) -> int:
    """The type of an option."""
    return 0 if text == "0" else count(text)


def run(options: argparse.Namespace) -> None:
    require(options.scratch.is_dir(), f"--scratch: {options.scratch} is not a directory")
    setting = Setting(options.batch, options.micro_batches, options.workers, options.updates, options.rounds)
    torch.set_num_threads(1)
    machine = environment("cuda" if torch.cuda.is_available() else "cpu")
    if options.store is not None:
        TokenStore.open(options.store)  # says here what is wrong with it
        rows = iter(rows_of(options.store, options.store.name, setting))
    else:
        rows = synthetic_rows(options.scratch, options.modes, options.sizes, setting)
    recorded("loader", (machine | row for row in rows), options.out)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("loader", __doc__, rounds=7)
    add = parser.add_argument
    add("--sizes", type=several(of=bytes_of), default=[10**7, 10**8, 10**9], help="of synthetic stores, by commas")
    add("--modes", type=several(*MODES), default=list(MODES), help="of synthetic stores")
    add("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="where they are written")
    add("--store", type=Path, help="measure this prepared store instead")
    add("--batch", type=count, default=2048, help="samples an update")
    add("--micro-batches", type=several(of=count), default=[256, 32], help="full samples' worth of tokens in one")
    add("--workers", type=several(of=workers_of), default=[0, 1, 2], help="loader processes; 0: the process itself")
    add("--updates", type=count, default=10, help="a round")
    return start(parser, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
