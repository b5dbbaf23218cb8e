"""How a training step's time and memory grow: one axis at a time around a base point, drawn beside the model FLOPs.

    python -m benchmarks.scaling --out benchmarks/results/scaling_cpu.jsonl
    python -m benchmarks.scaling --axes batch width --rounds 2 --out scaling.jsonl
    python -m benchmarks.scaling --plot docs/scaling-cpu.png --from benchmarks/results/scaling_cpu.jsonl

All points and models of an axis take turns, in another order each round, so that a machine that slows down does not
look like a cost that grows. Memory is measured alone in a fresh process.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.contestants import Contestant, Settings
from benchmarks.measure import alone, append_rows, environment, quartiles
from benchmarks.rows import Row, newest_rows, read_lines
from benchmarks.train_step import peak_memory_mb
from maelm_fast.config import RuntimeConfig, require
from maelm_fast.errors import UserError
from maelm_fast.reporting import COLOURS, MARKERS, require_matplotlib
from maelm_fast.training.hardware import choose_precision

MODELS = {"base": "MAE-LM", "roberta_base": "RoBERTa"}
AXES = {
    "seq": "sequence length, same number of tokens",
    "seq_fixed_batch": "sequence length, same number of sequences",
    "batch": "sequences",
    "width": "width (heads of 64, feed-forward 4x)",
    "layers": "encoder layers",
    "vocab": "vocabulary",
}
LENGTHS = (128, 256, 512, 1024, 2048)
SMALL = {
    "hidden_size": 256,
    "num_heads": 4,
    "ffn_size": 1024,
    "num_layers": 4,
    "decoder_layers": 2,
    "vocab_size": 8192,
}
# By device: sequences of 512 at the base point, what differs from the preset there, and the axes' values around it.
SWEEPS: dict[str, tuple[int, dict[str, int], dict[str, tuple[int, ...]]]] = {
    "cpu": (
        4,
        SMALL,
        {
            "seq": LENGTHS,
            "seq_fixed_batch": LENGTHS,
            "batch": (1, 2, 4, 8, 16),
            "width": (128, 192, 256, 384, 512),
            "layers": (1, 2, 4, 8, 16),
            "vocab": (2048, 4096, 8192, 16384, 32768),
        },
    ),
    "cuda": (
        32,
        {},
        {
            "seq": LENGTHS,
            "seq_fixed_batch": LENGTHS,
            "batch": (8, 16, 32, 64, 128),
            "width": (384, 512, 768, 1024, 1536),
            "layers": (4, 8, 12, 18, 24),
            "vocab": (8192, 16384, 32768, 65536, 131072),
        },
    ),
}


def settings_at(axis: str, x: int, device: str) -> Settings:
    batch, seq, (_, changes, values) = SWEEPS[device][0], 512, SWEEPS[device]
    longest = max(values["seq"])  # all points have position tables for it
    changes = {**changes, "max_positions": longest}
    if axis.startswith("seq"):
        batch, seq = (batch * seq // x if axis == "seq" else batch), x
    elif axis == "batch":
        batch = x
    elif axis == "width":
        changes |= {"hidden_size": x, "num_heads": x // 64, "ffn_size": 4 * x}
    else:
        changes["num_layers" if axis == "layers" else "vocab_size"] = x
    precision = choose_precision(RuntimeConfig(), torch.device(device))
    return Settings(batch=batch, seq=seq, device=device, precision=precision, changes=changes)


def measured(axis: str, models: Sequence[str], device: str, rounds: int) -> Iterator[Row]:
    """A row per point and model; one that does not fit into memory says so."""
    entrants: list[tuple[Row, Contestant, list[float]]] = []
    for x, model in itertools.product(SWEEPS[device][2][axis], models):
        settings = settings_at(axis, x, device)
        row = {
            "axis": axis,
            "x": x,
            "model": model,
            "batch": settings.batch,
            "seq": settings.seq,
            "precision": settings.precision,
            "changes": dict(settings.changes),
        }
        try:
            memory = alone(peak_memory_mb, model, settings)
            contestant = Contestant(model, settings)
            contestant.turn()
        except (RuntimeError, MemoryError) as error:
            yield row | {"skipped": (str(error).strip().splitlines() or [type(error).__name__])[0]}
            continue
        row |= {"tokens": contestant.tokens, "flops": contestant.flops, "peak_memory_mb": round(memory)}
        entrants.append((row, contestant, []))
    order, shuffle = list(entrants), random.Random(0).shuffle
    gc.collect()
    for _ in range(rounds):
        shuffle(order)
        for _, contestant, taken in order:
            taken.append(contestant.turn()[0])
    for row, _, taken in entrants:
        yield row | {"skipped": None, "rounds": rounds, "ms": quartiles([1000 * s for s in taken])}


def plot(rows: Sequence[Row], out: Path) -> None:
    """Seconds with quartiles, and dashed how the model FLOPs grow from the middle point; below, peak memory."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes = list(dict.fromkeys(row["axis"] for row in rows))
    columns, bands = min(3, len(axes)), math.ceil(len(axes) / 3)
    figure = Figure(figsize=(1 + 4.4 * columns, 0.9 + 5.2 * bands), dpi=130, layout="constrained", facecolor="white")
    grid = figure.subplots(2 * bands, columns, squeeze=False, height_ratios=[3, 1.5] * bands)
    for panel in grid.ravel()[2 * len(axes) :]:
        panel.set_visible(False)
    for i, axis in enumerate(axes):
        above, below = grid[2 * (i // columns), i % columns], grid[2 * (i // columns) + 1, i % columns]
        for place, (model, label) in enumerate(MODELS.items()):
            own = [row for row in rows if (row["axis"], row["model"]) == (axis, model)]
            if own:
                _draw(above, below, own, {"color": COLOURS[place], "marker": MARKERS[place]}, label)
        for panel in (above, below):
            low, high = panel.get_ylim()
            room = max(1.0, 8 * low / high) ** 0.5  # what hardly grows looks flat
            panel.set_ylim(low / room, high * room)
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            panel.yaxis.set_minor_formatter(NullFormatter())
        above.set_title(AXES[axis], size=11)
        above.set_ylabel("ms per step")
        below.set_ylabel("peak MB")
        below.set_xlabel(axis.removesuffix("_fixed_batch"))
        above.legend(loc="upper left", fontsize=8.5, frameon=False)
    first = rows[0]
    figure.suptitle(
        f"One training step: {first['device']}, {first['precision']}, {first['rounds']} rounds; median, "
        "quartiles; dashed: growth of the model FLOPs from the middle point",
        size=11,
    )
    figure.savefig(out)


def _draw(above: Any, below: Any, rows: Sequence[Row], style: dict[str, str], label: str) -> None:
    x, flops = ([row[name] for row in rows] for name in ("x", "flops"))
    low, ms, high = ([row["ms"][name] for row in rows] for name in ("q1", "median", "q3"))
    spread = [[m - a for m, a in zip(ms, low, strict=True)], [b - m for m, b in zip(ms, high, strict=True)]]
    above.errorbar(x, ms, spread, capsize=3, linewidth=1.2, label=label, **style)
    middle = len(x) // 2
    above.plot(x, [ms[middle] * f / flops[middle] for f in flops], "--", linewidth=1.2, color=style["color"])
    below.plot(x, [row["peak_memory_mb"] for row in rows], linewidth=1.2, markersize=4.5, **style)
    for panel in (above, below):
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(x, [str(value) for value in x])
        panel.grid(True, color="#dddddd", linewidth=0.7)


def run(options: argparse.Namespace) -> None:
    if options.plot:
        require_matplotlib()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[Row] = []
    for axis in options.axes if options.source is None else ():
        for row in measured(axis, options.models, device, options.rounds):
            rows.append(environment(device) | row)
            print(
                {name: row.get(name) for name in ("axis", "x", "model", "ms", "peak_memory_mb", "skipped")}, flush=True
            )
            if options.out:
                append_rows(options.out, rows[-1:])
    if options.source is not None:
        rows = newest_rows([row for _, row in read_lines(options.source, str(options.source))], ["axis", "x", "model"])
    if options.plot:
        rows = [row for row in rows if row["skipped"] is None and row["axis"] in options.axes]
        require(bool(rows), "there is no point to draw")
        plot(rows, options.plot)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__.splitlines()[0])
    parser.add_argument("--axes", nargs="+", choices=list(AXES), default=list(AXES))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
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
