"""Time to quality: CPU seconds of training until the validation loss is good enough, and the loss in the end.

    python -m benchmarks.speedrun tiny --seeds 0,1,2,3,4 --out benchmarks/results/speedrun_tiny.jsonl
    python -m benchmarks.speedrun cpu --corpus DIR --store STORE --entries fast --seeds 0 --out FILE --keep RUNS
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
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import environment
from benchmarks.program import Parser, count, recorded, several, start
from benchmarks.rows import Row
from benchmarks.tracks import TRACKS
from maelm_fast import presets
from maelm_fast.config import RunConfig
from maelm_fast.data.prepare import PrepareConfig, prepare
from maelm_fast.data.token_store import TokenStore
from maelm_fast.errors import UserError, unknown
from maelm_fast.training.hardware import choose_precision
from maelm_fast.training.parallel import Processes
from maelm_fast.training.rundir import RunDir, RunRecord, vocabulary_of
from maelm_fast.training.trainer import Trainer, build_model

VALIDATION_RATE = 0.15


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


def listing() -> str:
    lines = []
    for name, track in TRACKS.items():
        lines.append(f"{name}: {track.about}; to {track.target:.2f} nats")
        lines += [
            f"  {name:12} {one.config.optim.max_steps:>6,} updates  {one.about}" for name, one in track.entries.items()
        ]
    return "\n".join(lines)


def run(options: argparse.Namespace) -> None:
    if options.list:
        return print(listing())
    if options.track not in TRACKS:
        raise unknown("track", str(options.track), TRACKS)
    entries = TRACKS[options.track].entries
    names = options.entries or list(entries)
    for name in names:
        if name not in entries:
            raise unknown("entry", name, entries)
    asked = {(name, seed): options.keep and options.keep / f"{name}-{seed}" for seed in options.seeds for name in names}
    if there := [str(path) for path in asked.values() if path and path.exists()]:
        raise UserError(f"{there[0]} is there already: name another --keep, or remove it")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        store = data_of(options.track, options.store or Path(scratch) / "store", options.corpus)
        rows = (measure(options.track, *one, store, options.every, keep) for one, keep in asked.items())
        recorded("speedrun", rows, options.out)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("speedrun", __doc__)
    add = parser.add_argument
    add("track", nargs="?", metavar="TRACK", help=", ".join(TRACKS))
    add("--list", action="store_true", help="tracks and entries")
    add("--entries", type=several(), help="names, separated by commas; default: all")
    add("--seeds", type=several(of=int), default=[0], help="separated by commas; default: 0")
    add("--store", type=Path, help="token store of the track, made if it is not there")
    add("--corpus", type=Path, help="directory of the text to make it of; tiny: the embedded corpus")
    add("--every", type=count, default=50, help="updates between validations; default: 50")
    add("--keep", type=Path, metavar="RUNS", help="directory that the runs are kept in, as ENTRY-SEED")
    return start(parser, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
