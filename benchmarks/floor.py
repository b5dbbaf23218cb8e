"""Ratios that shall not fall: ours over what it replaces, in CPU seconds of one thread of one process, in turns.

    python -m benchmarks.floor                            # against benchmarks/floors.json; exit code 1 below a floor
    python -m benchmarks.floor --save before.json         # what is measured, less a fifth, as other floors
    python -m benchmarks.floor --floors before.json

The ops forward and backward against plain PyTorch, the host's code against NumPy, a step of `tiny` against the padded
one, a run of `maelm-fast pretrain` against its bare step. Who fails its gate has no ratio: that is below any floor. CPU
seconds of work that alternates hardly depend on what else the machine does; yet a floor belongs to a kind of machine,
which its file names.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks import ops
from benchmarks.contestants import Contestant, Settings
from benchmarks.measure import environment, reason, times_base, turns
from benchmarks.pretraining import measured
from benchmarks.program import Parser, start
from benchmarks.registry import ENTRIES, Entry, Setting
from benchmarks.tables import spread
from maelm_fast.config import require
from maelm_fast.errors import UserError

FLOORS = Path(__file__).with_name("floors.json")
SETTING = Setting(sequences=4, length=256, vocab=8192)
STEP = Settings(batch=8, seq=64, shape="tiny", dropout=0.1, bias=True)
LESS = 0.8  # of what was measured is the floor that is saved
Ratio = dict[str, float] | None


def of_op(entry: Entry, rounds: int) -> Ratio:
    """1 where plain PyTorch is what runs."""
    ops.gate(entry, SETTING)
    made, _ = ops.contestants(entry, SETTING)
    taken, _ = turns({one.name: one.both for one in made}, "cpu", rounds, time.process_time)
    return times_base(taken, made[0].name, "pytorch")


def of_host(case: ops.HostCase, rounds: int) -> Ratio:
    taken, _ = turns({"ours": case.ours, "numpy": case.numpy}, "cpu", rounds, time.process_time)
    return times_base(taken, "ours", "numpy")


def of_step(rounds: int) -> Ratio:
    calls = {name: Contestant(name, STEP).step for name in ("tiny", "padded")}
    taken, _ = turns(calls, "cpu", rounds, time.process_time)
    return times_base(taken, "tiny", "padded")


def of_run(rounds: int) -> Ratio:
    ratio: Ratio = measured("tiny", STEP, 0, 5 * rounds)["cpu_ratio"]
    return ratio


def cases() -> Iterator[tuple[str, Callable[[int], Ratio]]]:
    for name, entry in ENTRIES.items():
        if entry.gradients:
            yield name, partial(of_op, entry)
    for case in ops.host_cases():
        yield case.name, partial(of_host, case)
    yield "tiny over padded", of_step
    yield "a run over its step", of_run


def read(path: Path) -> dict[str, float]:
    try:
        floors = json.loads(path.read_text(encoding="utf-8"))["floors"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: no floors can be read: {type(error).__name__}: {error}") from None
    return dict(floors)


def run(options: argparse.Namespace) -> int:
    floors = read(options.floors) if options.save is None else {}
    torch.set_num_threads(1)
    saved, below = {}, 0
    for name, ratio_of in cases():
        try:
            ratio = ratio_of(options.rounds)
        except Exception as error:
            ratio = None
            print(f"{name}: {reason(error)}")
        median, floor = ratio["median"] if ratio else 0.0, floors.get(name, 0.0)
        below += median < floor or ratio is None
        verdict = "BELOW ITS FLOOR" if median < floor or ratio is None else ""
        print(f"{name:28}{spread(ratio, '.3f'):>24}  floor {floor:.3f}  {verdict}".rstrip(), flush=True)
        saved[name] = round(LESS * median, 3)
    if unknown := floors.keys() - saved.keys():
        raise UserError(f"{options.floors}: nothing is called {', '.join(sorted(unknown))}; remove it")
    if options.save:
        require(not below, "what fails has no floor: nothing is saved")
        machine = environment("cpu")
        about = {name: machine[name] for name in ("date", "commit", "device", "torch")}
        options.save.write_text(json.dumps(about | {"floors": saved}, indent=1) + "\n", encoding="utf-8")
    return int(below > 0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("floor", __doc__, rounds=9, out=False)
    parser.add_argument("--floors", type=Path, default=FLOORS, help="default: benchmarks/floors.json")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write floors instead")
    return start(parser, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
