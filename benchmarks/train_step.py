"""Full training steps, side by side: forward, backward, clip, fused AdamW, on the same token ids, in one process.

    python -m benchmarks.train_step --list
    python -m benchmarks.train_step --models base --peers hf,hf_compiled,padded --rates 0.15,0.3,0.4 --out F

A case is one mask rate, one dropout, with or without relative bias, full sequences or documents. The contestants enter
it one by one, in the order in which they are named:

1. Gate (gates.py), in another process: who computes something else than it should is not timed.
2. Memory: on a GPU torch's peak over what was held before; on a CPU the growth of the peak resident set of a process
   that is the contestant's alone.
3. A warm-up turn.
4. Parts, unless --no-profile: steps taken apart by the clock (data, forward, backward, optimizer), on a fresh batch
   each, on which a compiled model must not be compiled again; then steps under the profiler, by class of kernel.
5. A row with the speed of its warm-up.

When all are in, they take turns, A B C A B C ..., so that a slow minute of the machine hits all of them. After every
round each has its row of the rounds so far, which takes the place of the one before: a run that is cut off leaves what
it knew. A ratio is the median of the rounds' ratios, not the ratio of medians. On a CPU the ratio of CPU seconds is
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
from typing import Any

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
    environment,
    load,
    quartiles,
    ratios,
    reason,
    release,
    resident_bytes,
    transformers_version,
)
from benchmarks.program import Parser, count, precision_of, recorded, several, start
from benchmarks.report_step import case_tables
from benchmarks.rows import COMPILED, PHASES, Case, Row
from benchmarks.shares import shares
from maelm_fast import native, presets
from maelm_fast.config import MaskingConfig, require
from maelm_fast.model.flops import peak_flops

PART_STEPS = {"cpu": 3, "cuda": 5}
PROFILED_STEPS = 2
ROUNDS = 5
BATCH = {"cpu": 4, "cuda": 256}
OTHERS_SHOWN = 5
AGAIN = ("date", "model")  # a later row alike in these takes an earlier one's place


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
        record.turns = [contestant.turn()]
        if profiled:
            record.seconds = seconds_by_part(contestant) if contestant.whole is None else None
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


def take_turns(records: Sequence[Record], joules: Joules) -> None:
    """One round."""
    gc.collect()
    gc.disable()
    for record in records:
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
) -> Iterator[Row]:
    """Rows as they become known: of each contestant that it cannot run, or how fast its warm-up was; then after each
    round what it is beside the others, which counts instead."""
    if settings.device == "cpu" and (host := native.host()) is not None:
        host.keep_freed_memory()  # as a run does; every contestant has the gain
    torch._dynamo.reset()  # what was compiled for an earlier case counts towards the limit of recompilations
    shared: Row = environment(settings.device) | {  # the date tells the cases of a run apart: not to the second
        "date": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "transformers": transformers_version(),
        **{name: getattr(settings, name) for name in ("precision", "batch", "seq", "rate", "lengths")},
    }

    def row(name: str, skipped: str | None, **fields: Any) -> Row:
        config = settings.model_config(name)
        about = {"compiled": name.endswith(COMPILED), "dropout": config.dropout, "bias": config.relative_bias}
        shared["load"] = max(shared["load"], load())  # other work may begin at any time
        return shared | {"model": name, **about, "skipped": skipped} | fields

    records: list[Record] = []
    for name in names:
        began = time.perf_counter()
        try:
            record = entered(name, settings, apart, profiled)
        except Exception as error:
            yield row(name, reason(error))
        else:
            records.append(record)
            yield row(name, None, **measured(record, [record], shared["device"]))
            print(f"  {name} is warm after {time.perf_counter() - began:.0f} s")
        release()
    one_round = sum(record.turns[0].seconds * record.contestant.steps_of_a_turn for record in records)
    print(f"a round takes about {one_round:.1f} s, {rounds} of them {rounds * one_round:.0f} s", flush=True)
    for record in records:
        record.turns = []
    joules = Joules(settings.device)
    for _ in range(rounds):
        take_turns(records, joules)
        whole = [record for record in records if record.failed is None]
        for record in records:
            fields = {} if record.failed else measured(record, whole, shared["device"])
            yield row(record.contestant.name, record.failed, **fields)


def measured(record: Record, records: Sequence[Record], device_name: str) -> Row:
    """Of one among these."""
    own, settings = record.contestant, record.contestant.settings
    clock = {one.contestant.name: [turn.seconds for turn in one.turns] for one in records}
    busy = {one.contestant.name: [turn.cpu_seconds for turn in one.turns] for one in records}
    speed = quartiles([own.tokens / turn.seconds for turn in record.turns])
    every = [1000 * seconds for turn in record.turns for seconds in turn.steps]
    flops = own.flops / own.tokens * speed["median"]
    peak = peak_flops(device_name) if settings.precision == "bf16" else None
    timed_tokens = own.tokens * len(record.turns) * own.steps_of_a_turn
    return {
        "gate": record.gate,
        "rounds": len(record.turns),
        "tokens_per_s": speed,
        "step_ms": {
            "p50": round(statistics.median(every), 3),
            "p99": round(float(np.quantile(every, 0.99)), 3),
            "steps": len(every),
        },
        "ratios": ratios(clock, own.name, inverse=True),
        "cpu_ratios": ratios(busy, own.name, inverse=True) if settings.device == "cpu" else None,
        "mflop_per_token": round(own.flops / own.tokens / 1e6, 1),
        "tflop_per_s": round(flops / 1e12, 4),
        "mfu": round(flops / peak, 4) if peak else None,
        "peak_memory_mb": round(record.memory),
        "first_loss": round(record.first_loss, 5),
        "seconds": record.seconds,
        "kernels": record.kernels,
        "other": record.other,
        "joules_per_mtoken": None if record.joules is None else round(record.joules / timed_tokens * 1e6, 1),
        "graphs": record.graphs if own.compiled else None,
        "recompiles": record.recompiles if own.compiled else None,
    }


def is_wrong(row: dict[str, Any]) -> bool:
    """Whether the row is of a failure that nobody should live with: a gate's, or one of ours where memory sufficed."""
    why = row["skipped"]
    return why is not None and (
        why.startswith("gate:") or (split(row["model"])[0] not in PEERS and not why.startswith("out of memory"))
    )


def shown(rows: Sequence[Row]) -> Iterator[str]:
    """The report's tables of the rows of a case, and what it leaves out."""
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


def parser_of() -> Parser:
    parser = Parser("train_step", __doc__, rounds=ROUNDS, device="auto", precision=True)
    add = parser.add_argument
    variants = (
        f"with {COMPILED} behind it, as torch.compile makes it, with {ACCUMULATED} in {MICRO_BATCHES} micro-batches"
    )
    ours = ["base", "base_cross", "roberta_base"]
    add("--models", type=several(), default=ours, help=f"presets, by commas; {variants}, with {GRAPH} as a CUDA graph")
    peers = "; ".join(f"{name}: {what}" for name, what in PEERS.items())
    add("--peers", type=several(), default=["hf", "padded"], help=f"likewise; an empty string for none. {peers}")
    add("--rates", type=several(of=float), default=[0.15], help="mask rates, separated by commas")
    add("--dropouts", type=several(of=float), default=[0.1, 0.0], help="for every contestant, separated by commas")
    biases = "relative position bias of our models; on where there is dropout"
    add("--biases", type=several("off", "on"), help=f"off,on: {biases}")
    add("--lengths", type=several("full", "documents"), default=["full"], help="full,documents")
    add("--batch", type=count, help="sequences")
    add("--seq", type=count, default=512, help="tokens of the longest sequence")
    add("--no-profile", action="store_true", help="leave out where a step's time goes, which takes 6 steps")
    add("--list", action="store_true", help="name every case and contestant with sizes; run nothing")
    return parser


def names_of(options: argparse.Namespace) -> list[str]:
    models, peers = options.models, options.peers
    unknown = [name for name in peers if split(name)[0] not in PEERS]
    require(
        not unknown, f"unknown peer {', '.join(unknown)}; there are: {', '.join(PEERS)}, with or without {COMPILED}"
    )
    unknown = [name for name in models if split(name)[0] in PEERS]
    require(not unknown, f"--models takes presets; {', '.join(unknown)} belongs to --peers")
    require(bool(models), "--models names no preset")
    require(len({*models, *peers}) == len(models + peers), "a contestant is named twice")
    return [*models, *peers]


def cases(options: argparse.Namespace, names: Sequence[str]) -> list[Settings]:
    """UserError for what no contestant can be."""
    ours = [kind for kind, _ in map(split, names) if kind not in PEERS]
    with_decoder = [name for name in ours if presets.get(name).model.decoder == "self"]
    shared = Settings(
        batch=options.batch or BATCH[options.device],
        seq=options.seq,
        precision=precision_of(options),
        device=options.device,
        shape=(with_decoder or ours)[0],
    )
    settings = [
        replace(shared, lengths=lengths, rate=rate, dropout=dropout, bias=bias == "on")
        for lengths in options.lengths
        for rate in options.rates
        for dropout in options.dropouts
        for bias in options.biases or ["on" if dropout else "off"]
    ]
    for case in settings:
        MaskingConfig(rate=case.rate)
        for name in names:
            case.model_config(name)
    return settings


def run(options: argparse.Namespace) -> int:
    """The exit status."""
    names = names_of(options)
    settings = cases(options, names)
    if options.list:
        print("\n".join(line for case in settings for line in listing(names, case)))
        return 0
    apart, wrong = Apart(), False
    for case in settings:
        about = f"{case.batch} x {case.seq} tokens, {case.precision}"
        print(f"{label(case)}; {about}, rows after each of {options.rounds} rounds")
        made = compare(names, case, options.rounds, apart, profiled=not options.no_profile)
        rows = {row["model"]: row for row in recorded("train_step", made, options.out, AGAIN)}
        print("\n".join(shown(list(rows.values()))), flush=True)
        wrong = wrong or any(is_wrong(row) for row in rows.values())
    apart.close()
    return int(wrong)


def main(arguments: Sequence[str] | None = None) -> int:
    return start(parser_of(), run, arguments)


if __name__ == "__main__":
    sys.exit(main())
