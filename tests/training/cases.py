"""What torchrun starts for test_parallel.py: runs, one after another, in one group of processes.

python -m torch.distributed.run --nproc-per-node N tests/training/cases.py PLAN.json

A plan is a timeout and a list of cases: the arguments of `pretrain`, a strategy, what is to go wrong where. Beside each
run, RUN.seen holds a line for every micro-batch that a process began: update, place in it, digest of its tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from maelm_fast.config import ParallelConfig, RuntimeConfig
from maelm_fast.errors import UserError
from maelm_fast.stop import Stopped
from maelm_fast.training import job
from maelm_fast.training.parallel import Processes, processes
from maelm_fast.training.trainer import MaeLm, Trainer
from tests.training.test_run import config


def seen_file(run: str | Path) -> Path:
    return Path(f"{run}.seen")


def seen(run: str | Path) -> list[str]:
    """In the order of updates and places."""
    return sorted(seen_file(run).read_text().splitlines())


class Watched(contextlib.ExitStack):
    """Inside, Trainer.update notes what it is given, and goes wrong as the case says: {"hang": [rank, update]}. Where
    there is a file RUN.until, it is held before the update whose number that says, unless it is asked to stop."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self.file, self.until = seen_file(case["out"]), Path(f"{case['out']}.until")
        self.wrong = {what: tuple(place) for what, place in case.get("wrong", {}).items()}
        self.place = (-1, -1)
        self._update, self._forward = Trainer.update, MaeLm.forward
        self.callback(setattr, Trainer, "update", self._update)
        self.callback(setattr, MaeLm, "forward", self._forward)

        def update(trainer: Trainer, batches: Any) -> Any:
            return self.update(trainer, batches)

        def forward(model: MaeLm, *args: Any, **named: Any) -> Any:
            return self.forward(model, *args, **named)

        Trainer.update, MaeLm.forward = update, forward  # type: ignore[method-assign]

    def update(self, trainer: Trainer, micro_batches: Any) -> Any:
        step, group = trainer.progress.step, trainer.processes
        self.place = group.rank, step
        while self.until.exists() and step == int(self.until.read_text()) and not trainer.signals():
            time.sleep(0.01)
        lines = ""
        for i, batch in enumerate(micro_batches):
            if batch.decoder.lengths:
                content = b"".join(tensor.numpy().tobytes() for tensor in batch.tensors)
                lines += f"{step} {group.rank + i * group.world} {hashlib.sha256(content).hexdigest()}\n"
        with open(self.file, "ab", buffering=0) as file:
            file.write(lines.encode())  # at once, since others write it too
        for what, place in self.wrong.items():
            if place == self.place and what in WRONG and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
                WRONG[what]()
        return self._update(trainer, micro_batches)

    def forward(self, model: MaeLm, *args: Any, **named: Any) -> Any:
        loss, correct = self._forward(model, *args, **named)
        bad = model.training and self.wrong.get("nan") == self.place
        return loss * float("nan") if bad else loss, correct


def damaged() -> None:
    raise UserError("a damaged shard")


def crash() -> None:
    raise ZeroDivisionError("a mistake of ours")


WRONG = {
    "stop": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(900),
    "raise": damaged,
    "crash": crash,
}


def run(group: Processes, case: dict[str, Any]) -> None:
    group.strategy, out = case["strategy"], case["out"]
    with Watched(case):
        try:
            job.pretrain(config(**case["sections"]), case["store"], out)
        except Stopped as stopped:
            said = f"rank {group.rank} stopped after {stopped.step} with status {stopped.code}\n"
            sys.stdout.write(said)  # at once: print may write the line and its end apart, between those of others
            sys.stdout.flush()


def main(plan: str) -> int:
    timeout_s, cases = json.loads(Path(plan).read_text())
    runtime = RuntimeConfig(device="cpu", parallel=ParallelConfig(timeout_s=timeout_s))
    try:
        with processes(runtime) as group:
            job.processes = lambda *_: contextlib.nullcontext(group)  # type: ignore[assignment]  # one for all runs
            for case in cases:
                run(group, case)
    except UserError as error:
        print(f"error: {error}", flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
