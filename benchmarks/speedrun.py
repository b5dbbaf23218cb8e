"""Time to quality: CPU seconds of training until the validation loss is good enough, and the loss in the end.

    python -m benchmarks.speedrun tiny --seeds 0,1,2,3,4 --out benchmarks/results/speedrun_tiny.jsonl
    python -m benchmarks.speedrun cpu --corpus DIR --store STORE --entries fast --seeds 0 --out FILE --keep RUNS
    python -m benchmarks.speedrun tiny --out FILE --plot curves.png     # draws the rows in FILE, runs nothing
    python -m benchmarks.speedrun --list

A track is data, a model's size, a target and entries: recipes, that is configurations of `maelm-fast pretrain`.
A seed decides the order of the samples, the masks and the sequences that are validated on, for all entries alike, and
validation always masks 15%, whatever an entry trains at. An entry is a run: the trainer's own loop, but for its
effective ranks, with one checkpoint, at the end, if it is to be kept (to fine-tune the encoder, or to fill in masks;
it does not count in the time). One thread; time is the process's CPU time without that of validation, since other work
on a machine disturbs the clock more (yet it does disturb CPU time too: updates to the target are beside it).

On one machine the losses of a seed are always the same, so that two commits compare exactly.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.measure import append_rows, environment
from benchmarks.rows import Row, grouped, newest_rows, read_file
from maelm_fast import presets
from maelm_fast.config import RunConfig
from maelm_fast.data.prepare import PrepareConfig, prepare
from maelm_fast.data.token_store import TokenStore
from maelm_fast.errors import UserError, unknown
from maelm_fast.paper import scales
from maelm_fast.reporting import figure_of, grid, look, require_matplotlib
from maelm_fast.training.hardware import choose_precision
from maelm_fast.training.parallel import Processes
from maelm_fast.training.rundir import RunDir, RunRecord, vocabulary_of
from maelm_fast.training.trainer import Trainer, build_model

VALIDATION_RATE = 0.15
FIRST = {"mae": "paper", "mlm": "mlm_paper"}
"""The entry that the others of its kind are compared with."""


class Entry(NamedTuple):
    about: str
    config: RunConfig


@dataclass(frozen=True)
class Track:
    about: str
    target: float
    """Nats."""
    seq_len: int
    vocab_size: int
    entries: dict[str, Entry]


def _tracks() -> dict[str, Track]:
    falling, muon = {"rate": 0.4, "rate_end": 0.15}, {"name": "muon", "muon_lr": 2e-3}
    tiny = presets.get("tiny")

    def fast(preset: str, updates: int) -> RunConfig:
        return presets.change(presets.get(preset), optim={"max_steps": updates, "warmup_steps": updates // 10})

    cpu = scales.get("cpu").settings["base"].config
    cpu_fast = presets.as_fast(presets.change(cpu, optim={"max_steps": 4_000, "warmup_steps": 400}), 6e-3, 5e-3)
    return {
        "tiny": Track(
            "the embedded corpus, 3 layers of 128, updates of 32 x 64 tokens",
            target=3.80,
            seq_len=64,
            vocab_size=1024,
            entries={
                "paper": Entry("AdamW, 15% masked: tiny", tiny),
                "masks": Entry("AdamW, 40% to 15% masked", presets.change(tiny, masking=falling)),
                "muon": Entry("Muon, 15% masked", presets.change(tiny, optim=muon)),
                "both": Entry("Muon, 40% to 15% masked", presets.change(tiny, masking=falling, optim=muon)),
                "fast": Entry("Muon, 40% to 15% masked, higher rates: tiny_fast", fast("tiny_fast", 1_600)),
                "mlm_paper": Entry("AdamW, 15% masked: roberta_tiny", presets.get("roberta_tiny")),
                "mlm_fast": Entry("Muon, 40% to 15% masked: roberta_tiny_fast", fast("roberta_tiny_fast", 1_600)),
            },
        ),
        "cpu": Track(
            "Wikipedia and novels, 4 layers of 128, updates of 64 x 128 tokens",
            target=3.20,
            seq_len=128,
            vocab_size=4096,
            entries={
                "paper": Entry("AdamW, 15% masked", cpu),
                "fast": Entry("Muon, 40% to 15% masked", cpu_fast),
                "mlm_paper": Entry("AdamW, 15% masked", presets.as_roberta(cpu)),
                "mlm_fast": Entry("Muon, 40% to 15% masked", presets.as_roberta(cpu_fast)),
            },
        ),
    }


TRACKS = _tracks()


class Timed(Trainer):
    """A run that notes its validation losses and the CPU time of its training. It saves its end, if `keeps`."""

    def __init__(self, *arguments: Any, keeps: bool) -> None:
        super().__init__(*arguments)
        self.keeps = keeps
        self.masker = self.masker.at_rate(VALIDATION_RATE)
        self.curve: list[tuple[int, float, float]] = []
        """Updates, CPU seconds, nats."""
        self.seconds, self.since = 0.0, time.process_time()

    def evaluate(self) -> None:
        self.seconds += time.process_time() - self.since
        super().evaluate()
        loss = [row["val_loss"] for row in self.run.metrics() if row["kind"] == "validation"][-1]
        self.curve.append((self.progress.step, round(self.seconds, 2), round(loss, 4)))
        self.since = time.process_time()

    def save(self) -> None:
        if self.keeps and self.progress.step == self.steps:
            super().save()


def timed(config: RunConfig, store: Path, name: str = "", keep: Path | None = None) -> Timed:
    """The run, done; `config` has the store's vocabulary. keep: its directory, `name` what its config.yaml names it."""
    train, validation = TokenStore.open(store, "train"), TokenStore.open(store, "validation")
    vocabulary, processes = vocabulary_of(train.tokenizer()), Processes(torch.device("cpu"))
    model, precision = build_model(config, vocabulary), choose_precision(config.runtime, processes.device)
    with tempfile.TemporaryDirectory() as scratch:
        place = RunDir(keep or scratch)
        if keep:
            keep.mkdir(parents=True)
            place.write_config(RunRecord(name, str(store), train.manifest.fingerprint, None), config)
            shutil.copy(store / "tokenizer.json", place.tokenizer_file)
        run = Timed(place, config, model, train, validation, vocabulary, processes, precision, keeps=keep is not None)
        run.train()
    return run


def measure(track: str, name: str, seed: int, store: Path, every: int, keep: Path | None = None) -> Row:
    """The row of an entry's run. every: updates between validations; keep: where its run directory goes."""
    this, manifest = TRACKS[track], TokenStore.open(store, "train").manifest
    config = presets.change(
        replace(this.entries[name].config, seed=seed),
        model={"vocab_size": manifest.vocab_size},
        runtime={"device": "cpu", "workers": 0, "eval_every": every},
        metrics={"rank_every": 0},
    )
    run = timed(config, store, name, keep)
    reached = next(((step, seconds) for step, seconds, loss in run.curve if loss <= this.target), None)
    return {
        **environment("cpu"),
        "track": track,
        "entry": name,
        "kind": "mlm" if run.model.encoder_sees_mask else "mae",
        "recipe": this.entries[name].about,
        "precision": run.precision,
        "data": manifest.fingerprint,
        "seed": seed,
        "updates": config.optim.max_steps,
        "tokens": run.progress.tokens,
        "target": this.target,
        "updates_to_target": reached and reached[0],
        "cpu_seconds_to_target": reached and reached[1],
        "cpu_seconds": run.curve[-1][1],
        "loss": run.curve[-1][2],
        "curve": run.curve,
    }


def data_of(track: str, store: Path, corpus: Path | None) -> Path:
    """The track's token store, which is prepared if it is not there."""
    this = TRACKS[track]
    if not store.exists():
        inputs, validation = ("embedded",), tuple[str, ...]()
        if corpus is not None:
            inputs, validation = (f"{corpus}/*-train*.txt*",), (f"{corpus}/*-validation*.txt*",)
        elif track != "tiny":
            raise UserError(f"{track} needs --corpus DIR, with its *-train*.txt* and *-validation*.txt* files")
        prepare(
            PrepareConfig(
                inputs=inputs,
                validation_inputs=validation,
                out=store,
                vocab_size=this.vocab_size,
                seq_len=this.seq_len,
                validation=0.02,
            ),
            print,
        )
    return store


@dataclass(frozen=True)
class Summary:
    """An entry over its seeds."""

    name: str
    rows: list[Row]
    p_seconds: float | None
    """Of Welch's t-test against the first entry of its kind, two-sided; None for that one, or where one has too few
    runs that reach the target."""
    p_loss: float | None

    @property
    def seconds(self) -> list[float]:
        return [row["cpu_seconds_to_target"] for row in self.rows if row["cpu_seconds_to_target"] is not None]

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows]


def summaries(rows: Sequence[Row]) -> list[list[Summary]]:
    """By track, machine, precision and data; of every entry and seed the newest row."""
    newest = newest_rows(rows, ["track", "entry", "seed", "device", "precision", "data"])
    return [
        [_summary(name, its, entries) for (name,), its in entries.items()]
        for group in grouped(newest, "track", "device", "precision", "data").values()
        for entries in [grouped(sorted(group, key=_place), "entry")]
    ]


def _place(row: Row) -> tuple[int, int]:
    entries = list(TRACKS[row["track"]].entries)
    return entries.index(row["entry"]) if row["entry"] in entries else len(entries), row["seed"]


def _summary(name: str, rows: list[Row], entries: Mapping[tuple[Any, ...], list[Row]]) -> Summary:
    first = FIRST[rows[0]["kind"]]
    mine = Summary(name, rows, None, None)
    if name == first or (first,) not in entries:
        return mine
    other = Summary(first, entries[(first,)], None, None)
    return replace(mine, p_seconds=welch(mine.seconds, other.seconds), p_loss=welch(mine.losses, other.losses))


def welch(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Two-sided p of equal means, the variances not being equal; None of fewer than two numbers each."""
    if min(len(a), len(b)) < 2:
        return None
    from scipy.stats import ttest_ind

    return float(ttest_ind(a, b, equal_var=False).pvalue)


def plot(rows: Sequence[Row], out: Path) -> None:
    """Validation loss over CPU seconds: each seed a thin line, each entry's median over seeds a thick one."""
    require_matplotlib()
    groups = summaries(rows)
    figure = figure_of(8.5, 5.2 * len(groups))
    for axis, group in zip(figure.subplots(len(groups), 1, squeeze=False)[:, 0], groups, strict=True):
        first = group[0].rows[0]
        for i, entry in enumerate(group):
            color = look(i)["color"]
            curves = [row["curve"] for row in entry.rows]
            for curve in curves:
                axis.plot(*zip(*((s, loss) for _, s, loss in curve), strict=True), color=color, lw=0.6, alpha=0.4)
            points = list(zip(*curves, strict=True))
            xs = [statistics.median(s for _, s, _ in point) for point in points]
            ys = [statistics.median(loss for _, _, loss in point) for point in points]
            label = f"{entry.name}: {entry.rows[0]['recipe']}"
            axis.plot(xs, ys, lw=2, label=label, markevery=max(len(xs) // 8, 1), markersize=5, **look(i))
        axis.axhline(first["target"], color="#555555", lw=1, ls="--")
        axis.text(axis.get_xlim()[1], first["target"], f"{first['target']:.2f} ", ha="right", va="bottom", fontsize=9)
        axis.set_xlabel("CPU seconds of training, one core")
        axis.set_ylabel("validation loss at 15% masked, nats")
        axis.set_title(f"{first['track']}: {TRACKS[first['track']].about}", fontsize=10, loc="left")
        axis.legend(frameon=False, fontsize=9)
        grid(axis)
    figure.savefig(out)


def listing() -> str:
    lines = []
    for name, track in TRACKS.items():
        lines.append(f"{name}: {track.about}; to {track.target:.2f} nats")
        lines += [
            f"  {name:12} {one.config.optim.max_steps:>6,} updates  {one.about}" for name, one in track.entries.items()
        ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speedrun", description=__doc__.splitlines()[0])
    parser.add_argument("track", nargs="?", metavar="TRACK", help=", ".join(TRACKS))
    parser.add_argument("--list", action="store_true", help="tracks and entries")
    parser.add_argument("--entries", help="names, comma-separated; default: all")
    parser.add_argument("--seeds", default="0", help="comma-separated; default: 0")
    parser.add_argument("--store", type=Path, help="token store of the track, made if it is not there")
    parser.add_argument("--corpus", type=Path, help="directory of the text to make it of; tiny: the embedded corpus")
    parser.add_argument("--every", type=int, default=50, help="updates between validations; default: 50")
    parser.add_argument("--out", type=Path, help="JSON lines that rows are added to")
    parser.add_argument("--keep", type=Path, metavar="RUNS", help="directory that the runs are kept in, as ENTRY-SEED")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rows in --out; runs nothing")
    options = parser.parse_args(arguments)
    try:
        return speedrun(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def speedrun(options: argparse.Namespace) -> int:
    if options.list:
        print(listing())
        return 0
    if options.track not in TRACKS:
        raise unknown("track", str(options.track), TRACKS)
    track = TRACKS[options.track]
    if options.plot:
        if options.out is None:
            raise UserError("--plot draws the rows in --out FILE: name it")
        plot([row for row in read_file(options.out, "speedrun") if row["track"] == options.track], options.plot)
        return 0
    names = options.entries.split(",") if options.entries else list(track.entries)
    for name in names:
        if name not in track.entries:
            raise unknown("entry", name, track.entries)
    try:
        seeds = [int(seed) for seed in options.seeds.split(",")]
    except ValueError:
        raise UserError(f"--seeds are whole numbers, comma-separated, not {options.seeds}") from None
    kept = {(name, seed): options.keep and options.keep / f"{name}-{seed}" for name in names for seed in seeds}
    if there := [str(path) for path in kept.values() if path and path.exists()]:
        raise UserError(f"{there[0]} is there already: name another --keep, or remove it")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        store = data_of(options.track, options.store or Path(scratch) / "store", options.corpus)
        for seed in seeds:
            for name in names:
                row = measure(options.track, name, seed, store, options.every, kept[name, seed])
                if options.out:
                    append_rows(options.out, [row])
                reached = row["cpu_seconds_to_target"]
                print(
                    f"{name}, seed {seed}: {row['target']:.2f} nats after "
                    + ("-" if reached is None else f"{row['updates_to_target']:,} updates, {reached:.1f} CPU s")
                    + f"; {row['loss']:.3f} nats after {row['updates']:,} updates, {row['cpu_seconds']:.1f} CPU s",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
