"""Full training steps, side by side: forward, backward, clip, fused AdamW, on the same token ids, in one process.

    python -m benchmarks.train_step --list
    python -m benchmarks.train_step --models base --peers hf,hf_compiled,modernbert,padded --rates 0.15,0.3,0.4 --out F

A case is one mask rate, one dropout, with or without relative bias, full sequences or documents. The contestants enter
it one by one, in the order in which they are named:

1. Gate (gates.py), in another process: who computes something else than it should is not timed.
2. Memory: on a GPU torch's peak over what was held before; on a CPU the growth of the peak resident set of a process
   that is the contestant's alone.
3. Parts: steps taken apart by the clock (data, forward, backward, optimizer), on a fresh batch each, on which a
   compiled model must not be compiled again; then steps under the profiler, by class of kernel.
4. On a GPU a warm-up turn, and a row with its speed: what is known should the run be cut off.

When all are in, they take turns, A B C A B C ..., so that a slow minute of the machine hits all of them, and each has
its row. A ratio is the median of the rounds' ratios, not the ratio of medians. On a CPU the ratio of CPU seconds is
given too: other work on the machine disturbs it less than the clock.

Who cannot run, wherever it fails, has a row with the reason, and the others go on; the exit status is 1 if one of ours
failed, or a gate. Every contestant trains on the same batch again and again while it is timed, which changes no timing;
masks are drawn once, outside the clock.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch._dynamo.utils

from benchmarks.contestants import (
    ACCUMULATED,
    GRAPH,
    MICRO_BATCHES,
    PEERS,
    Contestant,
    Settings,
    Turn,
    model_flops,
    sees_mask,
    split,
)
from benchmarks.gates import gate
from benchmarks.measure import (
    Apart,
    Joules,
    alone,
    append_rows,
    environment,
    quartiles,
    reason,
    release,
    resident_bytes,
    transformers_version,
)
from benchmarks.report_step import case_tables
from benchmarks.rows import COMPILED, PHASES, Case, Row
from benchmarks.shares import shares
from maelm_fast import native, presets
from maelm_fast.config import MaskingConfig, RuntimeConfig, require
from maelm_fast.errors import UserError
from maelm_fast.model.flops import peak_flops
from maelm_fast.training.hardware import choose_precision

WARMUP_TURNS = {"cpu": 0, "cuda": 1}  # after two steps: the first one's loss is reported
PART_STEPS = {"cpu": 3, "cuda": 5}
PROFILED_STEPS = 2
ROUNDS = 5
BATCH = {"cpu": 4, "cuda": 256}
OTHERS_SHOWN = 5


def peak_memory_mb(name: str, settings: Settings) -> float:
    """Megabytes (2**20 bytes) that two steps need on a CPU, weights and optimiser included. Runs in a process of its
    own."""
    before = resident_bytes("VmRSS")
    contestant = Contestant(name, settings)
    for _ in range(2):
        contestant.step()
    return (resident_bytes("VmHWM") - before) / 2**20


@dataclass
class Record:
    """What was measured of a contestant. gate: what was compared. graphs: what torch.compile made of the model in its
    first step; recompiles: what it made after that. turns: see Turn. other: the largest shares
    of the class other, by name. failed: why it has no further turn."""

    contestant: Contestant
    gate: dict[str, float]
    memory: float
    first_loss: float
    graphs: int
    recompiles: int = 0
    turns: list[Turn] = field(default_factory=list)
    joules: float | None = None
    seconds: dict[str, float] | None = None
    kernels: dict[str, float] | None = None
    other: dict[str, float] | None = None
    failed: str | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Nothing shall be compiled in here."""
        before = compiled_graphs()
        yield
        self.recompiles += compiled_graphs() - before


def compiled_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def entered(name: str, settings: Settings, apart: Apart, profiled: bool) -> Record:
    """A contestant that has passed its gate, warm, with all that is measured of it alone."""
    passed = apart(gate, name, settings)
    on_gpu = settings.device == "cuda"
    memory = 0.0 if on_gpu else alone(peak_memory_mb, name, settings)
    before = compiled_graphs()
    if on_gpu:
        release()
        torch.cuda.reset_peak_memory_stats()
        memory = -torch.cuda.memory_allocated() / 2**20
    contestant = Contestant(name, settings)
    record = Record(contestant, passed, memory, contestant.step().item(), compiled_graphs() - before)
    with record.watched():
        if on_gpu:
            contestant.step()
            record.memory += torch.cuda.max_memory_allocated() / 2**20
        record.turns = [contestant.turn() for _ in range(WARMUP_TURNS[settings.device])]
        record.seconds = seconds_by_part(contestant) if contestant.whole is None else None
        if profiled:
            _profile(record, settings.device)
    return record


def _profile(record: Record, device: str) -> None:
    """A step's time does not hang on a profiler that cannot run here."""
    one = record.contestant
    try:
        record.kernels, rest = shares(one.step, device, PROFILED_STEPS, one.compiled)
        record.other = {key: round(rest[key], 4) for key in list(rest)[:OTHERS_SHOWN]}
    except RuntimeError as error:
        print(f"{one.name}: not profiled: {reason(error)}")


def take_turns(records: Sequence[Record], device: str, rounds: int) -> None:
    joules = Joules(device)
    gc.collect()
    gc.disable()
    for record in [*records] * rounds:
        if record.failed is not None:
            continue
        before = joules()
        try:
            with record.watched():
                record.turns.append(record.contestant.turn())
        except Exception as error:
            record.failed = reason(error)
        after = joules()
        if before is not None and after is not None:
            record.joules = (record.joules or 0.0) + after - before
    gc.enable()


def seconds_by_part(contestant: Contestant) -> dict[str, float]:
    """Medians, of steps on fresh batches, the device awaited after each part."""
    device = contestant.settings.device

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    taken = []
    for epoch in range(1, PART_STEPS[device] + 1):
        clock = [now()]
        contestant.fresh(epoch)
        clock.append(now())
        loss = contestant.forward()
        clock.append(now())
        loss.backward()
        clock.append(now())
        contestant.update()
        clock.append(now())
        taken.append([after - before for before, after in itertools.pairwise(clock)])
    medians = (statistics.median(part) for part in zip(*taken, strict=True))
    return {phase: round(seconds, 6) for phase, seconds in zip(PHASES, medians, strict=True)}


def compare(
    names: Sequence[str], settings: Settings, rounds: int, apart: Apart, profiled: bool = True
) -> Iterator[dict[str, Any]]:
    """Rows as they become known: of each contestant that it cannot run, or how fast it is alone; then what it is beside
    the others, which counts instead."""
    if settings.device == "cpu" and (host := native.host()) is not None:
        host.keep_freed_memory()  # as a run does; every contestant has the gain
    torch._dynamo.reset()  # what was compiled for an earlier case counts towards the limit of recompilations
    machine = environment(settings.device)
    shared = machine | {  # the date tells the cases of a run apart: not to the second
        "date": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "transformers": transformers_version(),
        "precision": settings.precision,
        "batch": settings.batch,
        "seq": settings.seq,
        "rate": settings.rate,
        "lengths": settings.lengths,
    }

    def row(name: str, skipped: str | None, passed: dict[str, float] | None, fields: dict[str, Any]) -> dict[str, Any]:
        config = settings.model_config(name)
        return (
            shared
            | {
                "model": name,
                "compiled": name.endswith(COMPILED),
                "dropout": config.dropout,
                "bias": config.relative_bias,
                "rounds": 0,
                "skipped": skipped,
                "gate": passed,
            }
            | dict.fromkeys(MEASURED)
            | fields
        )

    def failed(name: str, why: str) -> dict[str, Any]:
        return row(name, why, None, {})

    records: list[Record] = []
    for name in names:
        try:
            record = entered(name, settings, apart, profiled)
        except Exception as error:
            yield failed(name, reason(error))
        else:
            records.append(record)
            if record.turns:
                yield row(name, None, record.gate, measured(record, [], machine["device"]))
                record.turns = []
        release()
    take_turns(records, settings.device, rounds)
    whole = [record for record in records if record.failed is None]
    for record in records:
        name = record.contestant.name
        if record.failed is not None:
            yield failed(name, record.failed)
        else:
            yield row(name, None, record.gate, measured(record, whole, machine["device"]))


MEASURED = (
    "rounds",
    "tokens_per_s",
    "step_ms",
    "ratios",
    "cpu_ratios",
    "mflop_per_token",
    "tflop_per_s",
    "mfu",
    "peak_memory_mb",
    "first_loss",
    "seconds",
    "kernels",
    "other",
    "joules_per_mtoken",
    "graphs",
    "recompiles",
)


def measured(record: Record, records: Sequence[Record], device_name: str) -> dict[str, Any]:
    """The fields MEASURED, beside these others."""
    own, settings = record.contestant, record.contestant.settings

    def ratios(clock: Literal["seconds", "cpu_seconds"]) -> dict[str, dict[str, float]]:
        others = [other for other in records if other is not record]
        return {
            other.contestant.name: quartiles(
                [
                    getattr(theirs, clock) / getattr(mine, clock)
                    for theirs, mine in zip(other.turns, record.turns, strict=True)
                ]
            )
            for other in others
        }

    speed = quartiles([own.tokens / turn.seconds for turn in record.turns])
    every = [1000 * seconds for turn in record.turns for seconds in turn.steps]
    flops = own.flops / own.tokens * speed["median"]
    peak = peak_flops(device_name) if settings.precision == "bf16" else None
    timed_tokens = own.tokens * len(record.turns) * own.steps_of_a_turn
    values = (
        len(record.turns),
        speed,
        {
            "p50": round(statistics.median(every), 3),
            "p99": round(float(np.quantile(every, 0.99)), 3),
            "steps": len(every),
        },
        ratios("seconds"),
        ratios("cpu_seconds") if settings.device == "cpu" else None,
        round(own.flops / own.tokens / 1e6, 1),
        round(flops / 1e12, 4),
        round(flops / peak, 4) if peak else None,
        round(record.memory),
        round(record.first_loss, 5),
        record.seconds,
        record.kernels,
        record.other,
        None if record.joules is None else round(record.joules / timed_tokens * 1e6, 1),
        record.graphs if own.compiled else None,
        record.recompiles if own.compiled else None,
    )
    return dict(zip(MEASURED, values, strict=True))


def is_wrong(row: dict[str, Any]) -> bool:
    """Whether the row is of a failure that nobody should live with: a gate's, or one of ours where memory sufficed."""
    why = row["skipped"]
    return why is not None and (
        why.startswith("gate:") or (split(row["model"])[0] not in PEERS and not why.startswith("out of memory"))
    )


def shown(rows: Sequence[Row]) -> Iterator[str]:
    """The report's tables of these rows, and what it leaves out."""
    yield from (table.text() for table in case_tables(Case({row["model"]: row for row in rows})))
    for row in rows:
        if row["skipped"] is not None:
            continue
        loss = f"{row['model']}: loss {row['first_loss']:.5f}, p50 {row['step_ms']['p50']:,.1f} ms"
        most = [f"{name} {share:.1%}" for name, share in (row["other"] or {}).items()]
        yield ", ".join([loss, *(["most of other: " + ", ".join(most)] if most else [])])


def label(settings: Settings) -> str:
    bias = "bias" if settings.bias else "no bias"
    return f"{settings.rate:.0%} masked, dropout {settings.dropout:g}, {bias}, {settings.lengths}"


def listing(names: Sequence[str], settings: Settings) -> Iterator[str]:
    """What would be timed, and how large it is."""
    lengths = settings.sequence_lengths()
    yield f"{label(settings)}: {len(lengths)} x {min(lengths)} to {max(lengths)}, {sum(lengths)} tokens"
    on_host = replace(settings, device="cpu")
    for name in names:
        kind, config = split(name)[0], settings.model_config(name)
        batch = on_host.packed(config.vocab_size, sees_mask(kind, config))
        flops = model_flops(kind, config, batch)
        counts = batch.counts
        yield (
            f"  {name:22} {counts.original} tokens, {counts.masked} masked, {flops / 1e12:.4f} TFLOP a step, "
            f"{flops / counts.original / 1e6:.1f} MFLOP a token"
        )


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_step", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--models",
        default="base,base_cross,roberta_base",
        help=f"presets, by commas; with {COMPILED} behind it, as torch.compile makes it, with "
        f"{ACCUMULATED} in {MICRO_BATCHES} micro-batches, with {GRAPH} as a CUDA graph",
    )
    peers = "; ".join(f"{name}: {what}" for name, what in PEERS.items())
    parser.add_argument("--peers", default="hf,padded", help=f"likewise; an empty string for none. {peers}")
    parser.add_argument("--rates", default="0.15", help="mask rates, separated by commas")
    parser.add_argument("--dropouts", default="0.1,0", help="for every contestant, separated by commas")
    parser.add_argument("--biases", help="off,on: relative position bias of our models; on where there is dropout")
    parser.add_argument("--lengths", default="full", help="full,documents")
    parser.add_argument("--batch", type=int, help="sequences")
    parser.add_argument("--seq", type=int, default=512, help="tokens of the longest sequence")
    parser.add_argument("--precision", choices=["auto", "bf16", "fp32"], default="auto", help="auto: as a run chooses")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--no-profile", action="store_true", help="leave out the time by class of kernel")
    parser.add_argument("--list", action="store_true", help="name every case and contestant with sizes; run nothing")
    parser.add_argument("--out", type=Path, help="JSONL file that the rows are appended to")
    return parser


def numbers(text: str, option: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise UserError(f"{option}: numbers separated by commas, not {text}") from None


def names_of(options: argparse.Namespace) -> list[str]:
    models, peers = ([name for name in text.split(",") if name] for text in (options.models, options.peers))
    unknown = [name for name in peers if split(name)[0] not in PEERS]
    require(
        not unknown, f"unknown peer {', '.join(unknown)}; there are: {', '.join(PEERS)}, with or without {COMPILED}"
    )
    unknown = [name for name in models if split(name)[0] in PEERS]
    require(not unknown, f"--models takes presets; {', '.join(unknown)} belongs to --peers")
    require(bool(models), "--models names no preset")
    require(len({*models, *peers}) == len(models + peers), "a contestant is named twice")
    return models + peers


def cases(options: argparse.Namespace, names: Sequence[str]) -> list[Settings]:
    """UserError for what no contestant can be."""
    ours = [kind for kind, _ in map(split, names) if kind not in PEERS]
    with_decoder = [name for name in ours if presets.get(name).model.decoder == "self"]
    precision = choose_precision(RuntimeConfig(precision=options.precision), torch.device(options.device))
    shared = Settings(
        batch=BATCH[options.device] if options.batch is None else options.batch,
        seq=options.seq,
        precision=precision,
        device=options.device,
        shape=(with_decoder or ours)[0],
    )
    biases = options.biases.split(",") if options.biases else []
    require(set(biases) <= {"off", "on"}, f"--biases: off and on, separated by commas, not {options.biases}")
    settings = [
        replace(shared, lengths=lengths, rate=rate, dropout=dropout, bias=bias == "on")
        for lengths in options.lengths.split(",")
        for rate in numbers(options.rates, "--rates")
        for dropout in numbers(options.dropouts, "--dropouts")
        for bias in biases or ["on" if dropout else "off"]
    ]
    for case in settings:
        MaskingConfig(rate=case.rate)
        for name in names:
            case.model_config(name)
    return settings


def run(options: argparse.Namespace) -> int:
    """The exit status."""
    require(options.rounds >= 1, f"--rounds must be at least 1, not {options.rounds}")
    names = names_of(options)
    settings = cases(options, names)
    if options.list:
        print("\n".join(line for case in settings for line in listing(names, case)))
        return 0
    require(options.device == "cpu" or torch.cuda.is_available(), "no CUDA device is visible")
    apart, wrong = Apart(), False
    for case in settings:
        rows: dict[str, dict[str, Any]] = {}
        for row in compare(names, case, options.rounds, apart, profiled=not options.no_profile):
            if not rows:
                print(
                    f"{row['device']}, {row['threads']} threads, load {row['load']}, torch {row['torch']}, "
                    f"transformers {row['transformers']}, commit {row['commit']}"
                )
                print(
                    f"{label(case)}; {case.batch} x {case.seq} tokens, {case.precision}, {options.rounds} rounds; "
                    f"median [quartiles]; tokens are original tokens"
                )
            if row["model"] not in rows:
                speed = row["tokens_per_s"]
                known = f"{speed['median']:.0f} tokens/s alone" if speed else "ready"
                print(f"  {row['model']}: {row['skipped'] or known}", flush=True)
            if options.out:
                append_rows(options.out, [row])
            rows[row["model"]] = row
        print("\n".join(shown(list(rows.values()))), flush=True)
        wrong = wrong or any(is_wrong(row) for row in rows.values())
    apart.close()
    return 1 if wrong else 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser_of().parse_args(arguments)
    try:
        return run(options)
    except UserError as error:
        print(f"python -m benchmarks.train_step: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
