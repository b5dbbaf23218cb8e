"""Full training steps, side by side: forward, backward, clip, fused AdamW, on the same token ids, in one process.

    python -m benchmarks.train_step --list
    python -m benchmarks.train_step --models base --peers hf,hf_compiled,modernbert,padded --rates 0.15,0.3,0.4 --out F

A case is one mask rate, one dropout, with or without relative bias, full sequences or documents. Of each:

1. Gate: what computes the same must have the same loss on the same weights and batch: our RoBERTa and Hugging Face's,
   ours and the padded one, a compiled model and the model itself. No timing otherwise.
2. Memory: each contestant alone in a fresh process (CUDA: torch's peak; CPU: growth of the peak resident set).
3. Time: the contestants take turns, A B C A B C ..., so that a slow minute of the machine hits all of them. A ratio is
   the median of the rounds' ratios, not the ratio of medians. On a CPU the ratio of CPU seconds is given too: other
   work on the machine disturbs it less than the clock.
4. Parts: steps taken apart by the clock (data, forward, backward, optimizer), on a fresh batch each, on which a
   compiled model must not be compiled again; then steps under the profiler, by class of kernel.

What cannot run is skipped, with the reason. Every contestant trains on the same batch again and again while it is
timed, which changes no timing; masks are drawn once, outside the clock.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils

from benchmarks.classes import CLASSES
from benchmarks.contestants import PEERS, STEPS_PER_TURN, Contestant, Settings, model_flops, sees_mask
from benchmarks.measure import alone, append_rows, environment, quartiles, resident_bytes
from benchmarks.padded import PaddedMaeLm, padded_inputs
from benchmarks.peers import copy_weights, hugging_face_inputs, hugging_face_roberta
from benchmarks.rows import COMPILED, PHASES
from benchmarks.shares import shares
from maelm_fast import native, presets
from maelm_fast.config import MaskingConfig, RuntimeConfig, require
from maelm_fast.errors import UserError
from maelm_fast.model.flops import peak_flops
from maelm_fast.model.maelm import MaeLm
from maelm_fast.training.hardware import choose_precision, cpu_has_bf16

GATE_TOLERANCE = 1e-5  # relative difference of two fp32 losses summed in different orders
GATE_SEQUENCES = 8  # at most
WARMUP_TURNS = {"cpu": 0, "cuda": 1}  # after a first step, whose loss is reported
PART_STEPS = {"cpu": 3, "cuda": 10}
PROFILED_STEPS = 2
ROUNDS = 5
BATCH = {"cpu": 4, "cuda": 32}
OTHERS_SHOWN = 5
Skipped = dict[str, str]  # the reason, by name


def reason(name: str, error: Exception) -> str:
    """Why a contestant cannot run, in a line. Our own models may only run out of memory: else the error is raised."""
    out_of_memory = isinstance(error, torch.OutOfMemoryError)
    if name.removesuffix(COMPILED) == name not in PEERS and not out_of_memory:
        raise error
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{'out of memory' if out_of_memory else type(error).__name__}: {text}"


@contextlib.contextmanager
def skipping(name: str, skipped: Skipped) -> Iterator[None]:
    try:
        yield
    except (ImportError, UserError, RuntimeError, ValueError) as error:  # packages and compilers refuse in many ways
        skipped[name] = reason(name, error)


def gate(names: Sequence[str], settings: Settings) -> tuple[dict[str, float], Skipped]:
    """Losses in fp32 without dropout, and who could not compute one. SystemExit if two that must agree do not, or one
    is not a number. hf and the padded model compute theirs with our weights as well, and ours stand beside them."""
    plain = replace(settings, dropout=0.0, precision="fp32", batch=min(settings.batch, GATE_SEQUENCES))
    kinds = {name.removesuffix(COMPILED) for name in names}
    values: dict[str, float] = {}
    skipped: Skipped = {}

    def agree(one: str, other: str) -> None:
        if not abs(values[one] / values[other] - 1) <= GATE_TOLERANCE:  # no number fails too
            raise SystemExit(f"gate: {one} and {other} disagree, nothing is timed: {values}")

    for kind, compared in (("hf", _hf_gate), ("padded", _padded_gate)):
        if kind in kinds:
            with skipping(kind, skipped):
                values[f"{kind}, our weights"], values[f"ours, as {kind}"] = compared(plain)
                agree(f"{kind}, our weights", f"ours, as {kind}")
    for name in dict.fromkeys(name for named in names for name in (named.removesuffix(COMPILED), named)):
        kind, compiled = name.removesuffix(COMPILED), name.endswith(COMPILED)
        if kind in skipped:
            skipped[name] = skipped[kind]
            continue
        # What is compiled for a step knows of the backward pass.
        with skipping(name, skipped), torch.set_grad_enabled(compiled):
            values[name] = Contestant(name, plain).loss().item()
            agree(name, kind)
    return values, {name: why for name, why in skipped.items() if name in names}


def _hf_gate(settings: Settings) -> tuple[float, float]:
    config = settings.model_config("hf")
    torch.manual_seed(0)
    ours, theirs = MaeLm(config).to(settings.device), hugging_face_roberta(config).to(settings.device)
    copy_weights(ours, theirs)
    batch = settings.packed(config.vocab_size, encoder_sees_mask=True)
    inputs = hugging_face_inputs(batch.to("cpu"))
    with torch.no_grad():
        loss = theirs(**{name: tensor.to(settings.device) for name, tensor in inputs.items()}).loss.item()
        return loss, ours(batch)[0].item() / batch.counts.masked


def _padded_gate(settings: Settings) -> tuple[float, float]:
    torch.manual_seed(0)
    ours = MaeLm(settings.model_config("padded"))
    theirs = PaddedMaeLm(ours).to(settings.device)
    batch = settings.packed(ours.config.vocab_size, encoder_sees_mask=False)
    inputs = padded_inputs(batch.to("cpu")).to(settings.device)
    with torch.no_grad():
        return theirs(inputs).item(), ours(batch)[0].item() / batch.counts.masked


def peak_memory_mb(name: str, settings: Settings) -> float:
    """Megabytes (2**20 bytes) that two steps need, weights and optimiser included. Runs in a process of its own."""
    before = 0 if settings.device == "cuda" else resident_bytes("VmRSS")
    contestant = Contestant(name, settings)
    for _ in range(2):
        contestant.step()
    if settings.device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return (resident_bytes("VmHWM") - before) / 2**20


class Joules:
    """A GPU's energy counter, where the driver can be asked for it; the time between two readings is to be seconds."""

    def __init__(self, device: str) -> None:
        self._read: Callable[[], float] | None = None
        if device != "cuda":
            return
        with contextlib.suppress(Exception):  # no pynvml, no driver, no permission: there is no such figure then
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
            pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
            self._read = lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000

    def __call__(self) -> float | None:
        return None if self._read is None else self._read()


@dataclass
class Record:
    """What was measured of a contestant. graphs: what torch.compile made of the model in its first step; recompiles:
    what it made after that. turns: seconds and CPU seconds of a step. rest: each name's share of the class other."""

    contestant: Contestant
    first_loss: float
    graphs: int
    recompiles: int = 0
    turns: list[tuple[float, float]] = field(default_factory=list)
    joules: float | None = None
    seconds: dict[str, float] | None = None
    kernels: dict[str, float] | None = None
    rest: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Nothing shall be compiled in here."""
        before = compiled_graphs()
        yield
        self.recompiles += compiled_graphs() - before


def compiled_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def entered(name: str, settings: Settings) -> Record:
    """A contestant, warm."""
    before = compiled_graphs()
    contestant = Contestant(name, settings)
    record = Record(contestant, contestant.step().item(), compiled_graphs() - before)
    with record.watched():
        for _ in range(WARMUP_TURNS[settings.device]):
            contestant.turn()
    return record


def take_turns(records: Sequence[Record], device: str, rounds: int) -> None:
    joules = Joules(device)
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for record in records:
            before = joules()
            with record.watched():
                record.turns.append(record.contestant.turn())
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
    names: Sequence[str], settings: Settings, rounds: int, profiled: bool = True
) -> tuple[list[dict[str, Any]], list[Record]]:
    """A row per contestant, those that could not run included, and what the rows were made from."""
    losses, skipped = alone(gate, names, settings)
    memory: dict[str, float] = {}
    for name in names:
        if name not in skipped:
            with skipping(name, skipped):
                memory[name] = alone(peak_memory_mb, name, settings)
    if settings.device == "cpu" and (host := native.host()) is not None:
        host.keep_freed_memory()  # as a run does; every contestant has the gain
    torch._dynamo.reset()  # what was compiled for an earlier case counts towards the limit of recompilations
    records: list[Record] = []
    for name in memory:
        with skipping(name, skipped):
            records.append(entered(name, settings))
    take_turns(records, settings.device, rounds)
    for record in records:
        with record.watched():
            record.seconds = seconds_by_part(record.contestant)
            if profiled:
                step, compiled = record.contestant.step, record.contestant.compiled
                record.kernels, record.rest = shares(step, settings.device, PROFILED_STEPS, compiled)
    machine = environment(settings.device)
    shared = machine | {  # the date tells the cases of a run apart: not to the second
        "date": datetime.now(UTC).isoformat(timespec="milliseconds"), "transformers": transformers_version(),
        "precision": settings.precision, "batch": settings.batch, "seq": settings.seq, "rate": settings.rate,
        "lengths": settings.lengths,
    }  # fmt: skip
    measured = {record.contestant.name: row_of(record, records, memory, machine["device"]) for record in records}
    rows = []
    for name in names:
        config = settings.model_config(name)
        told = {
            "model": name, "compiled": name.endswith(COMPILED), "dropout": config.dropout,
            "bias": config.relative_bias, "rounds": rounds, "skipped": skipped.get(name), "gate": losses,
        }  # fmt: skip
        rows.append({**shared, **told, **measured.get(name, dict.fromkeys(MEASURED))})
    return rows, records


MEASURED = (
    "tokens_per_s", "ratios", "cpu_ratios", "mflop_per_token", "tflop_per_s", "mfu", "peak_memory_mb", "first_loss",
    "seconds", "kernels", "joules_per_mtoken", "graphs", "recompiles",
)  # fmt: skip


def row_of(record: Record, records: Sequence[Record], memory: Mapping[str, float], device_name: str) -> dict[str, Any]:
    """The fields MEASURED."""
    own, settings = record.contestant, record.contestant.settings

    def ratios(clock: int) -> dict[str, dict[str, float]]:
        others = [other for other in records if other is not record]
        return {
            other.contestant.name: quartiles(
                [theirs[clock] / mine[clock] for theirs, mine in zip(other.turns, record.turns, strict=True)]
            )
            for other in others
        }

    speed = quartiles([own.tokens / seconds for seconds, _ in record.turns])
    flops = own.flops / own.tokens * speed["median"]
    peak = peak_flops(device_name) if settings.precision == "bf16" else None
    timed_tokens = own.tokens * len(record.turns) * STEPS_PER_TURN[settings.device]
    values = (
        speed, ratios(0), ratios(1) if settings.device == "cpu" else None, round(own.flops / own.tokens / 1e6, 1),
        round(flops / 1e12, 4), round(flops / peak, 4) if peak else None, round(memory[own.name]),
        round(record.first_loss, 5), record.seconds, record.kernels,
        None if record.joules is None else round(record.joules / timed_tokens * 1e6, 1),
        record.graphs if own.compiled else None, record.recompiles if own.compiled else None,
    )  # fmt: skip
    return dict(zip(MEASURED, values, strict=True))


def transformers_version() -> str | None:
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None


def spread(value: dict[str, float] | None, form: str) -> str:
    return "-" if value is None else f"{value['median']:{form}} [{value['q1']:{form}}, {value['q3']:{form}}]"


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Speeds, beside Hugging Face's model if it ran, else beside the first that did; then parts and classes."""
    ran = [row for row in rows if row["skipped"] is None]
    if ran:
        over = "hf" if any(row["model"] == "hf" for row in ran) else ran[0]["model"]
        head = ("tokens/s", f"over {over}", "in CPU time", "TFLOP/s", "MFU", "peak MB", "J/Mtoken", "graphs",
                "recompiles", "loss")  # fmt: skip
        widths = (28, 22, 20, 9, 7, 9, 10, 7, 11, 10)
        yield _line("", zip(head, widths, strict=True))
        for row in ran:
            cells = [
                spread(row["tokens_per_s"], ".1f"), spread(row["ratios"].get(over), ".2f"),
                spread((row["cpu_ratios"] or {}).get(over), ".2f"), f"{row['tflop_per_s']:.3f}",
                *(row[name] for name in ("mfu", "peak_memory_mb", "joules_per_mtoken", "graphs", "recompiles")),
                f"{row['first_loss']:.5f}",
            ]  # fmt: skip
            yield _line(row["model"], zip(cells, widths, strict=True))
        yield _line("ms of a step; share", ((name, 11) for name in (*PHASES, *CLASSES)))
        for row in ran:
            cells = [f"{row['seconds'][name] * 1000:.2f}" for name in PHASES]
            cells += [f"{row['kernels'][name]:.1%}" for name in CLASSES] if row["kernels"] else []
            yield _line(row["model"], ((cell, 11) for cell in cells))
    yield from (f"  skipped: {row['model']}: {row['skipped']}" for row in rows if row["skipped"] is not None)


def _line(name: str, cells: Iterable[tuple[Any, int]]) -> str:
    return f"  {name:24}" + "".join(f"{'-' if value is None else value:>{width}}" for value, width in cells)


def label(settings: Settings) -> str:
    bias = "bias" if settings.bias else "no bias"
    return f"{settings.rate:.0%} masked, dropout {settings.dropout:g}, {bias}, {settings.lengths}"


def listing(names: Sequence[str], settings: Settings) -> Iterator[str]:
    """What would be timed, and how large it is."""
    lengths = settings.sequence_lengths()
    yield f"{label(settings)}: {len(lengths)} x {min(lengths)} to {max(lengths)}, {sum(lengths)} tokens"
    on_host = replace(settings, device="cpu")
    for name in names:
        kind, config = name.removesuffix(COMPILED), settings.model_config(name)
        batch = on_host.packed(config.vocab_size, sees_mask(kind, config))
        flops = model_flops(kind, config, batch)
        counts = batch.counts
        yield (f"  {name:22} {counts.original} tokens, {counts.masked} masked, {flops / 1e12:.4f} TFLOP a step, "
               f"{flops / counts.original / 1e6:.1f} MFLOP a token")  # fmt: skip


def cpu_note(device: str) -> str | None:
    if device == "cuda" or cpu_has_bf16():
        return None
    return "this CPU has no bf16 matrix instructions; fp32 is the precision to train in here, for every contestant"


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_step", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", default="base,base_cross,roberta_base",
                        help=f"presets, by commas; with {COMPILED} behind it, as torch.compile makes it")  # fmt: skip
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
    unknown = [name for name in peers if name.removesuffix(COMPILED) not in PEERS]
    require(
        not unknown, f"unknown peer {', '.join(unknown)}; there are: {', '.join(PEERS)}, with or without {COMPILED}"
    )
    unknown = [name for name in models if name.removesuffix(COMPILED) in PEERS]
    require(not unknown, f"--models takes presets; {', '.join(unknown)} belongs to --peers")
    require(bool(models), "--models names no preset")
    require(len({*models, *peers}) == len(models + peers), "a contestant is named twice")
    return models + peers


def cases(options: argparse.Namespace, names: Sequence[str]) -> list[Settings]:
    """UserError for what no contestant can be."""
    ours = [name.removesuffix(COMPILED) for name in names if name.removesuffix(COMPILED) not in PEERS]
    with_decoder = [name for name in ours if presets.get(name).model.decoder == "self"]
    precision = choose_precision(RuntimeConfig(precision=options.precision), torch.device(options.device))
    shared = Settings(
        batch=BATCH[options.device] if options.batch is None else options.batch, seq=options.seq, precision=precision,
        device=options.device, shape=(with_decoder or ours)[0],
    )  # fmt: skip
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


def run(options: argparse.Namespace) -> None:
    require(options.rounds >= 1, f"--rounds must be at least 1, not {options.rounds}")
    names = names_of(options)
    settings = cases(options, names)
    if options.list:
        print("\n".join(line for case in settings for line in listing(names, case)))
        return
    require(options.device == "cpu" or torch.cuda.is_available(), "no CUDA device is visible")
    if note := cpu_note(options.device):
        print(note)
    for case in settings:
        rows, records = compare(names, case, options.rounds, profiled=not options.no_profile)
        shared = rows[0]
        print(f"{shared['device']}, {shared['threads']} threads, load {shared['load']}, torch {shared['torch']}, "
              f"transformers {shared['transformers']}, commit {shared['commit']}")  # fmt: skip
        print(f"{label(case)}; {case.batch} x {case.seq} tokens, {case.precision}, {options.rounds} rounds; "
              f"median [quartiles]; tokens are original tokens")  # fmt: skip
        print("\n".join(table(rows)))
        for record in records:
            most = ", ".join(f"{name} {share:.1%}" for name, share in list(record.rest.items())[:OTHERS_SHOWN])
            if most:
                print(f"  {record.contestant.name}, most of other: {most}")
        sys.stdout.flush()
        if options.out:
            append_rows(options.out, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser_of().parse_args(arguments)
    try:
        run(options)
    except UserError as error:
        print(f"python -m benchmarks.train_step: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
