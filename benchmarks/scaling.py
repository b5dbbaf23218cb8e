"""How a training step's time and memory grow: one axis at a time around a base point, each point's model on one batch.

    python -m benchmarks.scaling --out scaling.jsonl --plot scaling.png
    python -m benchmarks.scaling --axes batch,width --models mae --quick
    python -m benchmarks.scaling --from scaling.jsonl --plot scaling.png

1. Memory: of two steps, weights and optimiser state included. On a CPU each point alone in a fresh process, growth of
   the peak resident set; on a GPU torch's peak over what was held before.
2. Time: forward, backward, clip, fused AdamW. All points and models of an axis take turns, in another order each round,
   so that a machine that slows down does not look like a cost that grows.
3. Exponent: of the line through log x and log time, beside that of the model FLOPs over the same points; its first and
   last local exponents show whether it is a line. Intervals are 95%, from resampling the rounds: noise of the clock,
   not lack of fit.
4. Terms: the update (clip, AdamW) is timed within every step; the rest is fitted for each model over the points of all
   axes by a sum of cost x amount, no cost below zero, the amounts counted from the configuration (scaling_fits.TERMS).
   This gives each term's share of the time at either end of an axis. One axis alone cannot tell the terms apart (in
   `batch` gemm, attention and elementwise grow alike); then no shares are given. Shares are no better than the fit's
   relative error, which stands beside the rates.

Why an exponent differs from that of the FLOPs, and where the terms show it:
- below it, growing towards it: optimizer and overhead do not grow with tokens (`batch`, `seq_fixed_batch`), and
  overhead grows with nothing but layers. Their shares fall from the first end to the last.
- below it in `width`: elementwise work grows as the width, the products as its square. In `layers` and `vocab`
  everything that the axis leaves alone is in the FLOPs as well (decoder, head, blocks), so little remains.
- above it in both sequence axes: a FLOP of attention takes longer than one of a product (softmax, bias and dropout of
  every pair are not in the count), and its share grows with the length.
- what no term shows is in the relative error, and in an exponent of the terms that differs from the measured one:
  products that run at another rate when they are small, and a cache that no longer holds a layer. On a GPU that waits
  for the host, time is the larger of the two, not their sum: a floor that overhead fits only roughly.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.contestants import Contestant, Settings
from benchmarks.measure import append_rows, environment, quartiles, resident_bytes
from benchmarks.scaling_fits import Row, fit_lines, fits
from benchmarks.scaling_plot import check_plot, plot
from maelm_fast.config import ModelConfig, RuntimeConfig, require
from maelm_fast.errors import UserError
from maelm_fast.model.flops import training_flops
from maelm_fast.training.hardware import choose_precision

MODELS = {"mae": "base", "roberta": "roberta_base"}
AXES = {
    "seq": "sequence length, same number of tokens",
    "seq_fixed_batch": "sequence length, same number of sequences",
    "batch": "sequences",
    "width": "width (heads of 64, feed-forward 4x)",
    "layers": "encoder layers",
    "vocab": "vocabulary",
}
ROUNDS, QUICK_ROUNDS = 5, 2
TURN_SECONDS = 0.3  # a turn is as many steps as this takes, at least one
TOO_LONG = 30.0  # seconds of a step; such a point is skipped


@dataclass(frozen=True)
class Point:
    batch: int
    seq: int
    changes: Mapping[str, int]

    def settings(self, device: str, precision: str) -> Settings:
        return Settings(batch=self.batch, seq=self.seq, device=device, precision=precision, changes=dict(self.changes))

    def __str__(self) -> str:
        return ", ".join(f"{name} {n}" for name, n in {"batch": self.batch, "seq": self.seq, **self.changes}.items())


@dataclass(frozen=True)
class Sweep:
    """The base point, ModelConfig fields that differ from the preset's included, and each axis's values around it."""

    base: Point
    values: Mapping[str, tuple[int, ...]]

    def point(self, axis: str, x: int) -> Point:
        base, tokens = self.base, self.base.batch * self.base.seq
        if axis == "seq":
            return Point(tokens // x, x, base.changes)
        if axis == "seq_fixed_batch":
            return Point(base.batch, x, base.changes)
        if axis == "batch":
            return Point(x, base.seq, base.changes)
        if axis == "width":
            changes = {"hidden_size": x, "num_heads": x // 64, "ffn_size": 4 * x}
        else:
            changes = {"num_layers" if axis == "layers" else "vocab_size": x}
        return Point(base.batch, base.seq, {**base.changes, **changes})


# The middle of every axis is the base point. All points have position tables for the longest sequence.
SMALL = {
    "max_positions": 2048, "hidden_size": 256, "num_heads": 4, "ffn_size": 1024, "num_layers": 4, "decoder_layers": 2,
    "vocab_size": 8192,
}  # fmt: skip
SMALLEST = Point(
    1, 64, {"max_positions": 64, "hidden_size": 64, "num_heads": 1, "ffn_size": 256, "num_layers": 1, "vocab_size": 512}
)
SWEEPS = {
    "cpu": Sweep(
        Point(batch=4, seq=512, changes=SMALL),
        {
            "seq": (128, 256, 512, 1024, 2048),
            "seq_fixed_batch": (128, 256, 512, 1024, 2048),
            "batch": (1, 2, 4, 8, 16),
            "width": (128, 192, 256, 384, 512),
            "layers": (1, 2, 4, 8, 16),
            "vocab": (2048, 4096, 8192, 16384, 32768),
        },
    ),
    "cuda": Sweep(
        Point(batch=32, seq=512, changes={"max_positions": 2048}),
        {
            "seq": (128, 256, 512, 1024, 2048),
            "seq_fixed_batch": (128, 256, 512, 1024, 2048),
            "batch": (8, 16, 32, 64, 128),
            "width": (384, 512, 768, 1024, 1536),
            "layers": (4, 8, 12, 18, 24),
            "vocab": (8192, 16384, 32768, 65536, 131072),
        },
    ),
}


def amounts(contestant: Contestant) -> dict[str, int]:
    """Of each of TERMS in a step."""
    config, batch = contestant.config, contestant.batch
    n, n_all, m = batch.lengths
    attention = attention_flops(config, n, n_all, m)
    full, last = (n_all, m) if config.decoder == "none" else (n, n)
    rows = (config.num_layers - 1) * sum(full) + sum(last)
    blocks = config.num_layers
    if config.decoder != "none":
        rows += (config.decoder_layers - 1) * sum(n_all) + sum(m)
        blocks += config.decoder_layers
    return {
        "gemm": contestant.flops - attention,
        "attention": attention,
        "elementwise": rows * (2 * config.hidden_size + config.ffn_size) + sum(m) * config.vocab_size,
        "overhead": blocks + 1,
    }


def attention_flops(config: ModelConfig, visible: Sequence[int], original: Sequence[int], masked: Sequence[int]) -> int:
    """The part of training_flops that grows with the square of the lengths; the rest grows with them."""
    once = training_flops(config, visible, original, masked)
    twice = training_flops(config, *([2 * n for n in lengths] for lengths in (visible, original, masked)))
    return (twice - 2 * once) // 2


@dataclass
class Entrant:
    """A model at a point, ready to be timed: its second step took `seconds`, and `peak_memory_mb` is known."""

    model: str
    x: int
    point: Point
    contestant: Contestant
    seconds: float
    peak_memory_mb: float
    turns: list[tuple[float, float, float]]

    @property
    def device(self) -> str:
        return self.contestant.settings.device

    def turn(self) -> None:
        """Notes seconds, seconds of the update, and CPU seconds, each per step."""
        steps = max(1, math.ceil(TURN_SECONDS / self.seconds))
        busy = time.process_time()
        seconds, update = (_steps_cuda if self.device == "cuda" else _steps)(self.contestant, steps)
        self.turns.append((seconds / steps, update / steps, (time.process_time() - busy) / steps))

    def row(self, axis: str) -> Row:
        contestant, config = self.contestant, self.contestant.config
        seconds, update, cpu_seconds = zip(*self.turns, strict=True)
        return {
            "kind": "point", "axis": axis, "x": self.x, "model": self.model, "preset": contestant.name,
            "changes": dict(self.point.changes), "batch": self.point.batch, "seq": self.point.seq,
            "precision": contestant.settings.precision, "dropout": config.dropout, "bias": config.relative_bias,
            "tokens": contestant.tokens, "flops": contestant.flops, "amounts": amounts(contestant),
            "parameters": sum(parameter.numel() for parameter in contestant.model.parameters()),
            "rounds": len(seconds), "seconds": fine_quartiles(seconds), "update_seconds": fine_quartiles(update),
            "cpu_seconds": fine_quartiles(cpu_seconds) if self.device == "cpu" else None,
            "peak_memory_mb": round(self.peak_memory_mb), "round_seconds": [round(s, 7) for s in seconds],
            "round_update_seconds": [round(s, 7) for s in update],
        }  # fmt: skip


def fine_quartiles(seconds: Sequence[float]) -> dict[str, float]:
    """To a tenth of a microsecond."""
    return {name: round(ms / 1000, 7) for name, ms in quartiles([1000 * s for s in seconds]).items()}


def _steps(contestant: Contestant, steps: int) -> tuple[float, float]:
    """Seconds of so many steps, and of their updates."""
    update, began = 0.0, time.perf_counter()
    for _ in range(steps):
        contestant.forward().backward()
        middle = time.perf_counter()
        contestant.update()
        update += time.perf_counter() - middle
    return time.perf_counter() - began, update


def _steps_cuda(contestant: Contestant, steps: int) -> tuple[float, float]:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(steps)]
    for start, middle, end in events:
        start.record()
        contestant.forward().backward()
        middle.record()
        contestant.update()
        end.record()
    torch.cuda.synchronize()
    update = sum(middle.elapsed_time(end) for _, middle, end in events)
    return float(events[0][0].elapsed_time(events[-1][2])) / 1000, float(update) / 1000


def alone_mb(name: str, settings: Settings) -> float:
    """Megabytes (2**20 bytes) that two steps need on a CPU. The processes are forked from one that has done nothing but
    load the libraries, which would take longer than the steps."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.contestants", "torch._dynamo"])  # AdamW imports the latter
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_growth_mb, name, settings).result()


def _growth_mb(name: str, settings: Settings) -> float:
    """What a small model's step has already touched of the libraries is not counted."""
    Contestant(name, SMALLEST.settings("cpu", settings.precision)).step()
    before = resident_bytes("VmRSS")
    contestant = Contestant(name, settings)
    for _ in range(2):
        contestant.step()
    return (resident_bytes("VmHWM") - before) / 2**20


class Skipped(Exception):
    """The message says why."""


def entrant(model: str, x: int, point: Point, settings: Settings, memory: dict[tuple[str, str], float]) -> Entrant:
    """Warmed up by two steps. memory: peaks in MB by model and point, added to. Skipped if it cannot be timed."""
    key = (model, str(point))
    try:
        if settings.device == "cpu" and key not in memory:
            memory[key] = alone_mb(MODELS[model], settings)
        if settings.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        contestant = Contestant(MODELS[model], settings)
        for _ in range(2):
            began = time.perf_counter()
            contestant.step()
            if settings.device == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
        if settings.device == "cuda":
            memory[key] = (torch.cuda.max_memory_allocated() - held) / 2**20
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        raise Skipped("out of memory") from None
    if seconds > TOO_LONG:
        raise Skipped(f"a step takes {seconds:.0f} s")
    return Entrant(model, x, point, contestant, seconds, memory[key], [])


def lacks_memory(error: Exception) -> bool:
    """BrokenProcessPool: Linux killed the process that was measured alone."""
    kinds = (MemoryError, BrokenProcessPool, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


def measured(
    axis: str, xs: Sequence[int], models: Sequence[str], device: str, rounds: int, memory: dict[tuple[str, str], float]
) -> tuple[list[Row], list[str]]:
    """A row per point and model; what was skipped, and why."""
    precision = choose_precision(RuntimeConfig(), torch.device(device))
    gc.collect()  # what is left of the axis before would be freed in the middle of a memory measurement
    entrants, skipped = [], []
    for x, model in itertools.product(xs, models):
        point = SWEEPS[device].point(axis, x)
        try:
            entrants.append(entrant(model, x, point, point.settings(device, precision), memory))
        except Skipped as reason:
            skipped.append(f"{model} at {point}: {reason}")
    order, shuffle = list(entrants), random.Random(0).shuffle
    gc.disable()
    try:
        for _ in range(rounds):
            shuffle(order)
            for one in order:
                one.turn()
    finally:
        gc.enable()
    return [one.row(axis) for one in entrants], skipped


def point_table(rows: Iterable[Row]) -> Iterator[str]:
    yield (
        f"  {'model':9}{'x':>8}{'batch':>7}{'seq':>6}{'seconds':>30}{'tokens/s':>11}{'GFLOP/s':>11}{'update':>8}"
        f"{'peak MB':>9}"
    )
    for row in rows:
        seconds = row["seconds"]
        spread = f"{seconds['median']:.4f} [{seconds['q1']:.4f}, {seconds['q3']:.4f}]"
        yield (
            f"  {row['model']:9}{row['x']:8}{row['batch']:7}{row['seq']:6}{spread:>30}"
            f"{row['tokens'] / seconds['median']:11.0f}{row['flops'] / seconds['median'] / 1e9:11.1f}"
            f"{row['update_seconds']['median'] / seconds['median']:8.1%}{row['peak_memory_mb']:9}"
        )


def read(path: Path, axes: Sequence[str] | None, models: Sequence[str]) -> list[Row]:
    """The points of a result file: of each axis the last run's, all of the last row's device."""
    try:
        every = [json.loads(line) for line in path.read_text().splitlines()]
        points = [row for row in every if row["kind"] == "point"]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError):
        raise UserError(f"{path} does not hold rows of benchmarks.scaling") from None
    runs: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in points:
        if row["device"] == points[-1]["device"] and row["model"] in models:
            runs[row["axis"]][row["date"]].append(row)
    chosen = list(runs) if axes is None else list(axes)
    missing = [axis for axis in chosen if axis not in runs]
    require(bool(runs) and not missing, f"{path} has no points of {', '.join(missing) or 'any axis'} and these models")
    return [row for axis in chosen for row in runs[axis][max(runs[axis])]]


def known(text: str, names: Iterable[str], what: str) -> list[str]:
    """The names in `text`, separated by commas."""
    chosen = list(dict.fromkeys(text.split(",")))
    unknown = [name for name in chosen if name not in names]
    require(not unknown, f"unknown {what} '{', '.join(unknown)}'; there are: {', '.join(names)}")
    return chosen


def sweep(options: argparse.Namespace, axes: Sequence[str] | None, models: Sequence[str]) -> list[Row]:
    """Measures, prints and writes the points, axis by axis."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    machine = environment(device)
    print(f"{machine['device']}, {machine['threads']} threads, load {machine['load']}, torch {machine['torch']}, "
          f"commit {machine['commit']}")  # fmt: skip
    print(f"base point: {SWEEPS[device].base}; {rounds} rounds, median [quartiles]")
    rows: list[Row] = []
    memory: dict[tuple[str, str], float] = {}
    for axis in axes or AXES:
        xs = SWEEPS[device].values[axis]
        if options.quick:
            xs = (xs[0], xs[len(xs) // 2], xs[-1])
        print(f"{axis}: {AXES[axis]}")
        points, skipped = measured(axis, xs, models, device, rounds, memory)
        print("\n".join([*point_table(points), *(f"  skipped: {line}" for line in skipped)]), flush=True)
        points = [machine | row for row in points]
        rows += points
        if options.out:
            append_rows(options.out, points)
    return rows


def run(options: argparse.Namespace) -> None:
    axes = None if options.axes is None else known(options.axes, AXES, "axis")
    models = known(options.models, MODELS, "model")
    require(options.rounds is None or options.rounds >= 1, "--rounds must be at least 1")
    if options.plot:
        check_plot(options.plot)
    if options.source:
        require(not (options.quick or options.rounds or options.out), "--from measures nothing: leave out --quick, "
                "--rounds and --out")  # fmt: skip
        rows = read(options.source, axes, models)
    else:
        rows = sweep(options, axes, models)
    require(bool(rows), "every point was skipped; nothing was measured")
    found = fits(rows)
    print("\n".join(line for row in found for line in fit_lines(row)))
    if options.out:
        machine = {name: rows[-1][name] for name in ("date", "commit", "device", "threads", "load", "torch")}
        append_rows(options.out, (machine | row for row in found))
    if options.plot:
        plot(rows, found, AXES, options.plot)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__.splitlines()[0])
    parser.add_argument("--axes", help=f"separated by commas; default all: {','.join(AXES)}")
    parser.add_argument("--models", default=",".join(MODELS), help="separated by commas")
    parser.add_argument("--quick", action="store_true", help="the ends and the middle of every axis, two rounds")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--plot", type=Path, help="picture to draw, in the format of its ending")
    parser.add_argument("--out", type=Path, help="JSONL file that the rows are appended to")
    parser.add_argument("--from", type=Path, dest="source", help="draw the points of this JSONL file; measure nothing")
    options = parser.parse_args(arguments)
    try:
        run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
