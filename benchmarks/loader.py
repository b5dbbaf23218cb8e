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
them: with any, it measured the disk too. Memory is that of the process after its last turn; file-mapped pages are the
page cache seen through the mapping, which the system takes back when it needs them: that they grow with the store is no
growth of memory. The split of time comes from a profile in CPU time, whose own cost weighs on what is done in Python.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import pstats
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

from benchmarks.measure import alone, append_rows, environment, quartiles
from maelm_fast import native
from maelm_fast.batch import PackedBatch
from maelm_fast.config import MaskingConfig, require
from maelm_fast.data.loader import TrainingBatches, training_updates
from maelm_fast.data.masking import pack_plain
from maelm_fast.data.packing import best_fit, best_fit_numpy, spread_numpy
from maelm_fast.data.samples import Chunk, cut_documents
from maelm_fast.data.token_store import BATCH_TOKENS, STORE_VERSION, Manifest, Split, SplitWriter, TokenStore
from maelm_fast.data.tokenizer import BOS, EOS, PAD, SPECIAL_NAMES, UNK
from maelm_fast.data.update import Update
from maelm_fast.errors import UserError
from maelm_fast.masking import Masker, Vocabulary

SEQ_LEN, VOCABULARY_SIZE, SEED = 512, 32768, 0
SPECIAL = dict(zip(SPECIAL_NAMES[0], (BOS, PAD, EOS, UNK, VOCABULARY_SIZE - 1), strict=True))
MEAN_DOCUMENT, SPREAD, MEAN_LINE = 5.5, 1.0, 25  # of the logarithm of a document's tokens; of a line's tokens
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
MASKS = ("host", "device")
WARM_UP = 3  # updates
FILL_UPDATES = 20
STAGES = {
    "order": ("samples",),
    "read": ("sample_lengths", "read"),
    "pack decision": ("placed",),
    "masks": ("pack_update",),  # drawn, and all packed
    "int32": ("check_ids", "of"),  # where the masks are left to the device
    "assembling": ("micro_batches",),
}


@dataclass(frozen=True)
class Setting:
    """batch: sequences of an update. updates: of a round."""

    batch: int
    micro_batches: tuple[int, ...]
    workers: tuple[int, ...]
    updates: int
    rounds: int

    def batches(self, store: TokenStore, masks: str, micro_batch: int) -> TrainingBatches:
        manifest = store.manifest
        special = manifest.special_tokens
        mask_id = next(special[names[-1]] for names in SPECIAL_NAMES if names[-1] in special)
        vocabulary = Vocabulary(manifest.vocab_size, mask_id, tuple(sorted(special.values())))
        masker = Masker(MaskingConfig(), vocabulary, SEED, encoder_sees_mask=False)
        return TrainingBatches(store, masker, self.batch, micro_batch, mask_on_device=masks == "device")

    def cases(self) -> list[tuple[str, int]]:
        """Masks and micro-batch size of each."""
        return list(itertools.product(MASKS, self.micro_batches))


def write_store(path: Path, mode: str, size: int) -> None:
    """A store of about `size` bytes of uint16 tokens, at least one sample. The same record batch again and again: what
    a sample holds does not matter."""
    path.mkdir()
    draw = np.random.default_rng(0)
    wanted = max(size // 2, SEQ_LEN)
    tokens, lengths = _record_batch(draw, mode)
    writer = SplitWriter(path, "train", VOCABULARY_SIZE)
    samples = written = 0
    while written < wanted:
        ends = np.cumsum(lengths)
        count = max(1, int(np.searchsorted(ends, wanted - written, side="right")))
        writer.add(tokens[: ends[count - 1]], lengths[:count])
        samples, written = samples + count, written + int(ends[count - 1])
        if wanted - written < SEQ_LEN:
            break
    writer.close()
    split = Split(samples, written, 0.0, tuple(writer.shards), 0, 0, 0, 0, 0)
    Manifest(STORE_VERSION, "", VOCABULARY_SIZE, False, SPECIAL, SEQ_LEN, mode, {"train": split}, {}).write(path)


def _record_batch(draw: np.random.Generator, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, lengths of the samples): a record batch, or a little less."""
    tokens = draw.integers(UNK + 1, VOCABULARY_SIZE - 1, BATCH_TOKENS).astype(np.uint16)
    if mode == "full":
        return tokens, np.full(BATCH_TOKENS // SEQ_LEN, SEQ_LEN)
    documents = np.exp(draw.normal(MEAN_DOCUMENT, SPREAD, BATCH_TOKENS // 200)).astype(np.int64) + 2
    documents = documents[: int(np.searchsorted(np.cumsum(documents), BATCH_TOKENS * 99 // 100))]
    tokens = tokens[: documents.sum()]
    tokens[draw.random(len(tokens)) < 1 / MEAN_LINE] = EOS
    tokens[np.cumsum(documents) - 1] = EOS
    unused = np.zeros(len(documents), np.int64)
    (cut,) = cut_documents([Chunk(tokens, documents, unused, unused, unused.astype(bool))], SEQ_LEN)
    return cut.tokens, cut.lengths


def measured(path: Path, name: str, setting: Setting) -> list[dict[str, Any]]:
    """A row per case and number of loader processes, of one store."""
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
        "implementation": "Python" if native.host() is None else "C++",
        "rounds": setting.rounds,
        "updates_a_round": setting.updates,
    }
    made = {case: setting.batches(store, *case) for case in setting.cases()}
    rows = []
    if 0 in setting.workers:
        turns = alone_in_turns(list(made.values()), setting)
        memory = resident()
        for (case, batches), turn in zip(made.items(), turns, strict=True):
            rows.append({"case": case, "workers": 0, **turn, **memory, "time": split_of_time(batches, setting)})
    for workers, case in itertools.product([n for n in setting.workers if n], made):
        rows.append({"case": case, "workers": workers, **with_workers(made[case], workers, setting), **resident()})
    filled = {case: fill(batches) for case, batches in made.items()}
    return [
        common | {"masks": row["case"][0], "micro_batch": row["case"][1], "fill": filled[row.pop("case")]} | row
        for row in rows
    ]


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
            raise SystemExit("gate: the loader's micro-batches are not the reference's; nothing is timed")


def _same(a: Any, b: PackedBatch) -> bool:
    return a.lengths == b.lengths and all(torch.equal(x, y) for x, y in zip(a.tensors, b.tensors, strict=True))


def alone_in_turns(contestants: Sequence[TrainingBatches], setting: Setting) -> list[dict[str, Any]]:
    """Without loader processes, on this core."""
    for batches in contestants:
        for _ in training_updates(batches, 0, WARM_UP, 0, pin_memory=False):
            pass
    taken: list[list[tuple[float, float, int]]] = [[] for _ in contestants]
    first = WARM_UP
    for _ in range(setting.rounds):
        for batches, turns in zip(contestants, taken, strict=True):
            faults, began, cpu = major_faults(), time.perf_counter(), time.process_time()
            tokens = sum(map(original, training_updates(batches, first, first + setting.updates, 0, pin_memory=False)))
            turns.append(
                (tokens / (time.perf_counter() - began), tokens / (time.process_time() - cpu), major_faults() - faults)
            )
        first += setting.updates
    rows = []
    for turns in taken:
        by_clock, by_cpu, faults_of = zip(*turns, strict=True)
        rows.append(
            {
                "tokens_per_s": quartiles(by_clock),
                "tokens_per_s_per_core": quartiles(by_clock),
                "tokens_per_cpu_s": quartiles(by_cpu),
                "major_faults": sum(faults_of),
                "pinned": False,
            }
        )
    return rows


def with_workers(batches: TrainingBatches, workers: int, setting: Setting) -> dict[str, Any]:
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
        speeds.append(tokens / (time.perf_counter() - began))
    return {
        "tokens_per_s": quartiles(speeds),
        "tokens_per_s_per_core": quartiles([s / workers for s in speeds]),
        "tokens_per_cpu_s": None,
        "major_faults": None,
        "pinned": pinned,
        "time": None,
    }


def original(update: Update) -> int:
    return sum(sum(b.decoder.lengths if isinstance(b, PackedBatch) else b.lengths) for b in update.micro_batches())


def fill(batches: TrainingBatches) -> dict[str, float]:
    """Tokens over the room of the micro-batches. all, but_last: of micro_batch full samples each; even: of the update's
    fullest. best_fit: had the samples been packed by best fit, and all its micro-batches but the last one opened."""
    tokens, room, but_last, even, fitted, fitted_but_last = [], [], [], [], [], []
    budget = batches.micro_batch_tokens
    for update in range(FILL_UPDATES):
        lengths = batches.store.sample_lengths(batches.samples(update)[0])
        order, counts = batches.placed(lengths)
        used = np.add.reduceat(lengths[order], np.cumsum([0, *counts[:-1]]))
        tokens.append(int(used.sum()))
        room.append(len(used) * budget)
        even.append(len(used) * int(used.max()))
        but_last.append((int(used[:-1].sum()), (len(used) - 1) * budget))
        bins, count = best_fit(lengths, budget)
        fitted.append(count * budget)
        fitted_but_last.append((int(lengths[bins < count - 1].sum()), (count - 1) * budget))
    return {
        "all": _share(sum(tokens), sum(room)),
        "but_last": _share(*map(sum, zip(*but_last, strict=True))),
        "even": _share(sum(tokens), sum(even)),
        "best_fit": _share(sum(tokens), sum(fitted)),
        "best_fit_but_last": _share(*map(sum, zip(*fitted_but_last, strict=True))),
    }


def _share(part: int, whole: int) -> float:
    """An update of one micro-batch has nothing but its last."""
    return round(part / whole, 4) if whole else 1.0


def split_of_time(batches: TrainingBatches, setting: Setting) -> dict[str, float]:
    """Share of each stage, by cumulative time."""
    profile = cProfile.Profile(time.process_time)
    profile.enable()
    for update in range(WARM_UP, WARM_UP + setting.updates):
        batches[update]
    profile.disable()
    # check_ids is also a part of pack_update
    stages = {
        stage: names for stage, names in STAGES.items() if stage != ("masks" if batches.mask_on_device else "int32")
    }
    stats: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = vars(pstats.Stats(profile))["stats"]
    ours = {name: figures[3] for (file, _, name), figures in stats.items() if "maelm_fast/data" in file}
    shares = {
        stage: sum(ours.get(name, 0.0) for name in names) / ours["__getitem__"] for stage, names in stages.items()
    }
    return {stage: round(share, 3) for stage, share in {**shares, "other": 1 - sum(shares.values())}.items()}


def resident() -> dict[str, float | None]:
    """MB of this process: anonymous memory; and the rest, files mapped and memory shared with loader processes."""
    rollup = Path("/proc/self/smaps_rollup")
    if not rollup.exists():
        return {"rss_anon_mb": None, "rss_file_mb": None}
    found = {name: int(size) / 1024 for name, size in re.findall(r"^(\w+): +(\d+) kB", rollup.read_text(), re.M)}
    return {
        "rss_anon_mb": round(found["Anonymous"], 1),
        "rss_file_mb": round(found["Rss"] - found["Anonymous"], 1),
    }


def major_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def rows_of(path: Path, name: str, setting: Setting) -> list[dict[str, Any]]:
    alone(gate, path, setting)  # on its own: the reference's memory is not the loader's
    rows: list[dict[str, Any]] = alone(measured, path, name, setting)
    return rows


def synthetic_rows(scratch: Path, modes: Sequence[str], size: int, setting: Setting) -> Iterator[list[dict[str, Any]]]:
    free = shutil.disk_usage(scratch).free
    require(free > 1.1 * size, f"a store of {size / 1e9:g} GB needs more room than {scratch} has: {free / 1e9:.1f} GB")
    for mode in modes:
        with tempfile.TemporaryDirectory(dir=scratch, prefix="loader-") as folder:
            path = Path(folder) / "store"
            write_store(path, mode, size)
            yield rows_of(path, "synthetic", setting)


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        speed, by_cpu, filled, split = (
            row[name] for name in ("tokens_per_s_per_core", "tokens_per_cpu_s", "fill", "time")
        )
        spread_of = f"{speed['median'] / 1e6:8.1f} [{speed['q1'] / 1e6:.1f}, {speed['q3'] / 1e6:.1f}]"
        stages = " ".join(f"{stage} {share:.0%}" for stage, share in split.items()) if split else ""
        cpu = f"{by_cpu['median'] / 1e6:.1f}" if by_cpu else "-"
        anon, file = row["rss_anon_mb"], row["rss_file_mb"]
        memory = "-" if anon is None else f"{anon:.0f} + {file:.0f}"
        faults = row["major_faults"]
        lines.append(
            f"  {row['masks']:8}{row['micro_batch']:>6}{row['workers']:>9}  {spread_of:28}{cpu:>8}"
            f"{filled['all']:>8.2%}{filled['even']:>8.2%}{memory:>14}{'-' if faults is None else faults:>6}  {stages}"
        )
    return "\n".join(lines)


HEADING = (
    "M tokens/s a core; MB of memory\n"
    f"  {'masks':8}{'micro':>6}{'workers':>9}  {'by the clock [quartiles]':28}{'by CPU':>8}{'fill':>8}{'even':>8}"
    f"{'anon + file':>14}{'disk':>6}  time"
)


def bytes_of(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(KB|MB|GB)", text)
    size = int(float(found[1]) * UNITS[found[2]]) if found else 0
    require(size > 0, f"--sizes: '{text}' is not a size like 10MB or 1.5GB")
    return size


def numbers(text: str, option: str, least: int) -> tuple[int, ...]:
    parts = text.split(",")
    require(
        all(part.isdigit() and int(part) >= least for part in parts),
        f"{option}: '{text}' is not a list of whole numbers of at least {least}, separated by commas",
    )
    return tuple(map(int, parts))


def run(options: argparse.Namespace) -> None:
    for name in ("batch", "updates", "rounds"):
        require(getattr(options, name) >= 1, f"--{name} must be at least 1")
    micro_batches = numbers(options.micro_batches, "--micro-batches", 1)
    workers = numbers(options.workers, "--workers", 0)
    sizes = [bytes_of(text) for text in options.sizes.split(",")]
    modes = options.modes.split(",")
    require(set(modes) <= {"full", "document"}, f"--modes: '{options.modes}'; there are full and document")
    require(options.scratch.is_dir(), f"--scratch: {options.scratch} is not a directory")
    setting = Setting(options.batch, micro_batches, workers, options.updates, options.rounds)
    torch.set_num_threads(1)
    machine = environment("cuda" if torch.cuda.is_available() else "cpu")
    print(
        f"{machine['device']}, one thread a process, load {machine['load']}, torch {machine['torch']}, "
        f"commit {machine['commit']}"
    )
    print(f"updates of {setting.batch} samples, {setting.updates} a round, {setting.rounds} rounds\n{HEADING}")
    if options.store is not None:
        TokenStore.open(options.store)  # says here what is wrong with it
        results: Iterator[list[dict[str, Any]]] = iter([rows_of(options.store, options.store.name, setting)])
    else:
        results = itertools.chain.from_iterable(synthetic_rows(options.scratch, modes, size, setting) for size in sizes)
    for rows in results:
        first = rows[0]
        print(
            f"{first['mode']}, {first['store_bytes'] / 1e6:,.0f} MB, {first['samples']:,} samples of on average "
            f"{first['tokens'] / first['samples']:.0f} tokens, {first['implementation']}"
        )
        print(table(rows), flush=True)
        if options.out:
            append_rows(options.out, (machine | row for row in rows))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loader", description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="10MB,100MB,1GB", help="of synthetic stores, separated by commas")
    parser.add_argument("--modes", default="full,document", help="of synthetic stores")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="where they are written")
    parser.add_argument("--store", type=Path, help="measure this prepared store instead")
    parser.add_argument("--batch", type=int, default=2048, help="samples an update")
    parser.add_argument("--micro-batches", default="256,32", help="full samples' worth of tokens in a micro-batch")
    parser.add_argument("--workers", default="0,1,2", help="loader processes; 0: in the process itself, one core")
    parser.add_argument("--updates", type=int, default=10, help="a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="JSONL file that the rows are appended to")
    try:
        run(parser.parse_args(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
