"""What a run costs beside its updates: tokens/s of `maelm-fast pretrain`'s own loop, with loader, log and display, over
those of the bare step that benchmarks.train_step times.

    python -m benchmarks.pretraining --preset base --batch 4 --rounds 5

The run halts after each turn of updates, and the bare step, a model of its own, has a turn of as many: A B A B ... in
one process. Evaluation, saving and effective ranks are left out, as a run's tokens/s leave them out. A ratio is the
median of the rounds' ratios, by the clock and by CPU seconds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.contestants import Contestant, Settings
from benchmarks.loader import VOCABULARY_SIZE, vocabulary_of, write_store
from benchmarks.measure import environment, quartiles, times_base
from benchmarks.program import Parser, count, precision_of, recorded, start
from benchmarks.rows import Row
from maelm_fast import presets
from maelm_fast.batch import PackedBatch
from maelm_fast.data.token_store import TokenStore
from maelm_fast.training.parallel import Processes
from maelm_fast.training.rundir import RunDir
from maelm_fast.training.trainer import Trainer, build_model

UPDATES = {"cpu": 1, "cuda": 8}  # of a turn


class Halting(Trainer):
    """A run that lets the bare step have its turns. run, bare: (seconds, CPU seconds) of each turn, the first ones, in
    which all is new, left out."""

    def __init__(self, *arguments: Any, bare: Contestant) -> None:
        super().__init__(*arguments)
        self.contestant, self.turn = bare, UPDATES[self.device.type]
        self.taken: dict[str, list[tuple[float, float]]] = {"run": [], "bare": []}

    def updates(self) -> Iterator[list[PackedBatch]]:
        began = self.now()
        for done, inputs in enumerate(super().updates(), start=1):
            yield inputs  # and the loop makes an update of it
            if done % self.turn == 0:
                halted = self.now()
                for _ in range(self.turn):
                    self.contestant.step()
                goes_on = self.now()
                if done > self.turn:
                    self.taken["run"].append((halted[0] - began[0], halted[1] - began[1]))
                    self.taken["bare"].append((goes_on[0] - halted[0], goes_on[1] - halted[1]))
                began = self.now()

    def evaluate(self) -> None:
        """Not timed, as saving is not: both come at the end."""

    def save(self) -> None:
        pass

    def now(self) -> tuple[float, float]:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()


def measured(preset: str, settings: Settings, workers: int, rounds: int) -> Row:
    device = settings.device
    updates = (rounds + 1) * UPDATES[device] + 1  # after the last of them the loop does not come back
    changes = {**settings.changes, "vocab_size": VOCABULARY_SIZE}
    config = presets.change(
        presets.get(preset),
        model=changes,
        optim={"batch_size": settings.batch, "max_steps": updates, "warmup_steps": 1},
        runtime={"device": device, "precision": settings.precision, "workers": workers}
        | {"micro_batch_size": settings.batch, "eval_every": updates, "save_every": updates},
        metrics={"rank_every": 0},
    )
    bare = Contestant(preset, Settings(**{**vars(settings), "changes": changes}))
    with tempfile.TemporaryDirectory() as scratch:
        write_store(Path(scratch) / "store", "full", 4 * updates * settings.batch * settings.seq, settings.seq)
        store = TokenStore.open(Path(scratch) / "store")
        vocabulary, run = vocabulary_of(store), RunDir(Path(scratch) / "run")
        run.path.mkdir()
        model, processes = build_model(config, vocabulary), Processes(torch.device(device))
        trainer = Halting(run, config, model, store, store, vocabulary, processes, settings.precision, bare=bare)
        trainer.train()
    clock, busy = ({name: [turn[i] for turn in turns] for name, turns in trainer.taken.items()} for i in range(2))
    tokens = UPDATES[device] * settings.batch * settings.seq
    return environment(device) | {
        "model": preset,
        "precision": settings.precision,
        "batch": settings.batch,
        "seq": settings.seq,
        "workers": workers,
        "rounds": rounds,
        "tokens_per_s": quartiles([tokens / seconds for seconds in clock["run"]]),
        "ratio": times_base(clock, "run", "bare"),
        "cpu_ratio": times_base(busy, "run", "bare"),
    }


def run(options: argparse.Namespace) -> None:
    precision = precision_of(options)
    settings = Settings(batch=options.batch, seq=options.seq, device=options.device, precision=precision)
    recorded("pretraining", [measured(options.preset, settings, options.workers, options.rounds)], options.out)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("pretraining", __doc__, rounds=5, device="auto", precision=True)
    parser.add_argument("--preset", default="base")
    parser.add_argument("--batch", type=count, default=4, help="sequences of an update")
    parser.add_argument("--seq", type=count, default=512, help="tokens of a sequence")
    parser.add_argument("--workers", type=int, default=0, help="loader processes")
    return start(parser, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
