"""Predicted time of a training step, kernel by kernel: FLOPs and bytes counted, divided by what the device can do.

    python -m benchmarks.roofline
    python -m benchmarks.roofline --device h200 --models base --dropout 0.1 --bias --by op
    python -m benchmarks.roofline --measure --device cpu --batch 4 --out benchmarks/results/ceilings_cpu.jsonl

Launches follow one another; each takes the longest of its limits (products, bytes, a function, instruction slots) and
nothing for the launch itself. The shares of the ceilings that are assumed are printed with the result. What no GPU rows
stand behind is called a projection. Where a step of the same model and setting was measured on the device
(benchmarks/results/train_step_*.jsonl), it stands beside.

Attention on a GPU: PyTorch's or flash-attn's kernels at the rate that was observed for them; ours by the slowest of
matrix units, exponentials and instruction slots, counted in kernels/README.md for 435 kept of 512 positions, and of
that the share which FlashAttention-2 reaches of such a limit. On a CPU: the compiled one (csrc/ops/attention.cpp) at
the rate measured on sequences of that very shape; without the extension, and in bf16, there is no prediction.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks import ceilings
from benchmarks.ceilings import CARDS, DEVICE_NAMES, FRESH_ABOVE, Card, Measured
from benchmarks.classes import CLASSES
from benchmarks.cost import Cost, Elements, Product, Scores, Step, count, masked_lengths, parameters, peak_memory, saved
from benchmarks.goals import GOALS
from benchmarks.measure import append_rows, environment
from benchmarks.rows import Row, read_lines
from maelm_fast import presets
from maelm_fast.config import ModelConfig
from maelm_fast.errors import UserError
from maelm_fast.model.flops import training_flops

RESULTS = Path(__file__).parent / "results"
BATCH = {"cpu": 4, "cuda": 256}
ROUNDS = {"cpu": 3, "cuda": 7}
PRECISION = {"cpu": "fp32", "cuda": "bf16"}
GIGABYTE = 1e9


@dataclass(frozen=True)
class Share:
    """What part of a ceiling is taken to be reached, and why."""

    share: float
    reason: str


PRODUCTS = {
    "a100": Share(0.75, "assumed: 235 TFLOP/s; whole steps of this width reach 174 (llm.c)"),
    "h100": Share(0.66, "assumed: 650 TFLOP/s; 8192^3 reaches 769-798 on an H200, observed elsewhere"),
    "h200": Share(0.66, "assumed: 650 TFLOP/s; 8192^3 reaches 769-798, observed elsewhere"),
}
COPY = {
    "a100": Share(0.83, "assumed: a copy at 1.7 TB/s"),
    "h100": Share(0.90, "assumed: as on the H200"),
    "h200": Share(0.90, "a copy at 4.3 TB/s, observed elsewhere"),
}
OF_COPY = Share(0.75, "design goal for row kernels; apex's LayerNorm reached 75-81% of an A100's data sheet")
ATTENTION = {
    80: Share(0.42, "FlashAttention-2, head 64, 512: 132 of 312 TFLOP/s with 7 products, observed elsewhere"),
    90: Share(0.22, "FlashAttention-2, head 64, 512: 215 of 989 TFLOP/s with 7 products, observed elsewhere"),
}
OURS = {
    80: Share(0.42, "no GPU has run it: assumed as FlashAttention-2's share of the matrix units"),
    90: Share(0.35, "no GPU has run it: assumed as FlashAttention-2's share of our plain kernels' slots: 0.34 of 0.97"),
}
MEASURED = Share(1.0, "measured; products at the step's own shapes")

# Instructions a score of kernels/attention.py, by architecture and kernel: plain, with bias, more in a near tile, more
# with dropout (kernels/README.md, counted in the binaries).
INSTRUCTIONS = {
    80: {"fwd": (13.6, 15.2, 5.1, 8.7), "dq": (15.0, 20.4, 17.1, 8.6), "dkv": (18.7, 20.9, 3.5, 17.5)},
    90: {"fwd": (12.1, 14.4, 5.2, 8.5), "dq": (14.6, 19.3, 18.8, 7.8), "dkv": (16.9, 19.4, 3.8, 17.1)},
}
NEAR = {"fwd": 0.69, "dq": 0.50, "dkv": 0.50}  # share of the scores in near tiles, 435 kept of 512
OUR_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
ISSUES = 128  # a clock and multiprocessor: 4 warps of 32
EXPONENTIALS = 16  # a clock and multiprocessor
MATRIX_FLOPS = {80: 2048, 90: 4096}  # dense bf16, a clock and multiprocessor


@dataclass(frozen=True)
class Line:
    """A cost with its predicted time: seconds of all its launches, and the limit that binds."""

    cost: Cost
    seconds: float
    limit: str


@dataclass(frozen=True)
class Device:
    """What times are taken from: a card's data sheet, rates measured on the device, or both."""

    name: str
    card: Card | None
    measured: Measured | None

    @property
    def kind(self) -> str:
        return "cuda" if self.card else "cpu"

    @property
    def bandwidth(self) -> float:
        if self.measured:
            return self.measured.copy
        assert self.card is not None
        return self.card.bandwidth * COPY[self.name].share

    def line(self, cost: Cost) -> Line:
        moved = self.bandwidth * (OF_COPY.share if self.card else 1.0)
        limits = {"bytes": cost.bytes / moved}
        if self.kind == "cpu" and self.measured:
            if cost.kind == "optimizer":
                limits = {"bytes in place": cost.bytes / self.measured.in_place}
            elif cost.written > FRESH_ABOVE:
                limits["fresh memory"] = cost.read / moved + cost.written / self.measured.fresh
        work = cost.work
        if isinstance(work, Product):
            limits["products"] = cost.flops / self.product_rate(work)
        elif isinstance(work, Elements) and self.measured:
            if work.function not in self.measured.functions:
                settings = "--models, --seq, --rate, --dropout and --bias"
                raise UserError(f"no measured rate of {work.function}; run --measure with the same {settings}")
            name = work.function if isinstance(work.function, str) else "measured attention rate"
            limits[name] = work.number / self.measured.functions[work.function]
        elif isinstance(work, Scores) and self.card:
            limits |= attention_limits(work, cost.flops, self.card)
        limit = max(limits, key=lambda name: limits[name])
        return Line(cost, limits[limit] * cost.launches, limit)

    def product_rate(self, product: Product) -> float:
        if self.measured:
            return self.measured.rate(product)
        assert self.card is not None
        return self.card.peak * PRODUCTS[self.name].share

    def shares(self) -> Iterator[tuple[str, str, Share]]:
        """What each ceiling is and which share of it is assumed."""
        if self.measured:
            yield "products", f"{self.measured.square / 1e12:.4g} TFLOP/s at a large square", MEASURED
            yield "bytes", f"{self.measured.copy / GIGABYTE:.4g} GB/s, a copy", OF_COPY if self.card else MEASURED
            if self.kind == "cpu":
                fresh, in_place = (rate / GIGABYTE for rate in (self.measured.fresh, self.measured.in_place))
                yield "fresh memory", f"{fresh:.4g} GB/s, for results above 32 MiB", MEASURED
                yield "bytes in place", f"{in_place:.4g} GB/s, for the optimiser", MEASURED
            functions = self.measured.functions
            for name in functions:
                if isinstance(name, str):
                    yield name, f"{functions[name] / 1e9:.3g} billion elements/s in cache", MEASURED
            if pairs := [functions[name] / 1e6 for name in functions if not isinstance(name, str)]:
                yield "attention", f"{min(pairs):.3g} to {max(pairs):.3g} million pairs/s, by shape", MEASURED
        elif self.card:
            yield "products", f"{self.card.peak / 1e12:.0f} TFLOP/s, data sheet", PRODUCTS[self.name]
            yield "copy", f"{self.card.bandwidth / GIGABYTE:.0f} GB/s, data sheet", COPY[self.name]
            yield "bytes", f"{self.bandwidth / GIGABYTE:.0f} GB/s, the copy", OF_COPY
        if self.card:
            yield "attention, PyTorch's", f"{self.card.peak / 1e12:.0f} TFLOP/s, data sheet", ATTENTION[self.card.arch]
            yield "attention, ours", "kernels/README.md's counts, clocks a score", OURS[self.card.arch]


def attention_limits(work: Scores, flops: int, card: Card) -> dict[str, float]:
    if work.kernel.startswith("varlen"):
        return {"observed attention rate": flops / (card.peak * ATTENTION[card.arch].share)}
    plain, biased, near, dropped = INSTRUCTIONS[card.arch][work.kernel]
    instructions = biased + NEAR[work.kernel] * near if work.bias else plain
    if work.dropout:
        instructions += dropped
    clocks = {
        "matrix units": OUR_PRODUCTS[work.kernel] * 2 * work.head_dim / MATRIX_FLOPS[card.arch],
        "exponentials": 1 / EXPONENTIALS,
        "instruction slots": instructions / ISSUES,
    }
    available = card.multiprocessors * card.clock * OURS[card.arch].share
    return {name: work.pairs * each / available for name, each in clocks.items()}


@dataclass(frozen=True)
class Prediction:
    """A step of one model on one device."""

    model: str
    step: Step
    device: Device
    lines: list[Line]

    @property
    def seconds(self) -> float:
        return sum(line.seconds for line in self.lines)

    @property
    def tokens_per_s(self) -> float:
        return sum(self.step.lengths.original) / self.seconds

    @property
    def model_flops(self) -> int:
        return training_flops(self.step.config, *self.step.lengths)

    @property
    def mfu(self) -> float | None:
        """None where there is no published peak."""
        return self.model_flops / self.seconds / self.device.card.peak if self.device.card else None

    def grouped(self, by: str) -> dict[str, list[Line]]:
        """By class, in the order of CLASSES, every one of them; or by part, op and phase."""
        groups: dict[str, list[Line]] = {kind: [] for kind in CLASSES} if by == "class" else {}
        for line in self.lines:
            cost = line.cost
            name = cost.kind if by == "class" else f"{cost.part} {cost.op}, {cost.phase}"
            groups.setdefault(name, []).append(line)
        return groups


def predict(model: str, step: Step, device: Device) -> Prediction:
    return Prediction(model, step, device, [device.line(cost) for cost in count(step)])


def binding(lines: Sequence[Line]) -> str:
    """The limits that take at least a tenth of the time, the longest first, with their shares."""
    total = sum(line.seconds for line in lines)
    if not total:
        return "-"
    shares: dict[str, float] = {}
    for line in lines:
        shares[line.limit] = shares.get(line.limit, 0.0) + line.seconds / total
    first = sorted(shares, key=lambda name: -shares[name])
    return ", ".join(f"{name} {shares[name]:.0%}" for name in first if shares[name] >= 0.1)


def model_config(model: str, dropout: float, bias: bool) -> ModelConfig:
    config = presets.get(model)
    rule = config.model.relative_bias if config.model.relative_bias != "none" else "t5"
    return presets.change(config, model={"dropout": dropout, "relative_bias": rule if bias else "none"}).model


def measured_row(prediction: Prediction, rate: float, paths: Sequence[Path]) -> Row | None:
    """The newest row of this model and setting on this device, sequences at full length."""
    step, device = prediction.step, prediction.device
    begins = DEVICE_NAMES.get(device.name) or (device.measured.machine["device"] if device.measured else None)
    lengths = step.lengths.original
    wanted = {
        "model": prediction.model, "batch": len(lengths), "seq": max(lengths), "rate": rate,
        "dropout": step.config.dropout, "bias": step.config.relative_bias, "precision": step.precision,
    }  # fmt: skip
    found = [
        row
        for path in paths
        for _, row in read_lines(path, path.name)
        if begins is not None
        and str(row.get("device")).startswith(begins)
        and all(row.get(name) == value for name, value in wanted.items())
        and row.get("lengths", "full") == "full"
        and row.get("tokens_per_s")
        and (device.card or not device.measured or row.get("threads") == device.measured.machine["threads"])
    ]
    return max(found, key=lambda row: row["date"], default=None)


def report(prediction: Prediction, row: Row | None, by: str, goals: str) -> Iterator[str]:
    """row: the measured one. goals: those of this setting, in words."""
    step, lines = prediction.step, prediction.lines
    lengths = step.lengths
    gpu_rows = prediction.device.measured is not None or row is not None
    label = "" if prediction.device.card is None or gpu_rows else "projection: "
    yield (
        f"{label}{prediction.model}, {len(lengths.original)} x {max(lengths.original)} tokens, "
        f"{sum(lengths.masked) / sum(lengths.original):.0%} masked, {step.precision}, dropout {step.config.dropout:g}, "
        f"{'no bias' if step.config.relative_bias == 'none' else step.config.relative_bias + ' bias'}"
    )
    tokens = sum(lengths.original)
    real = 1000 * tokens / row["tokens_per_s"]["median"] if row else None
    shares = row.get("kernels") if row else None
    width = 12 if by == "class" else 56
    yield (
        f"  {by:{width}}{'launches':>9}{'TFLOP':>11}{'GB':>10}{'ms':>11}{'share':>7}"
        + (f"{'measured ms':>13}{'gap':>7}" if real else "")
        + "  limits"
    )
    for name, group in [*prediction.grouped(by).items(), ("total", lines)]:
        seconds = sum(line.seconds for line in group)
        text = (
            f"  {name:{width}}{sum(x.cost.launches for x in group):9}"
            f"{sum(x.cost.flops * x.cost.launches for x in group) / 1e12:11.4f}"
            f"{sum(x.cost.bytes * x.cost.launches for x in group) / GIGABYTE:10.3f}"
            f"{1000 * seconds:11.2f}{seconds / prediction.seconds:7.1%}"
        )
        if real:
            taken = real if name == "total" else shares[name] * real if shares and name in shares else None
            gap = f"{taken / (1000 * seconds) - 1:+7.0%}" if taken is not None and seconds else f"{'-':>7}"
            text += (f"{taken:13.2f}" if taken is not None else f"{'-':>13}") + gap
        yield f"{text}  {binding(group)}"
    yield _summary(prediction, row) + goals
    yield _memory(step, prediction.device)


def _summary(prediction: Prediction, row: Row | None) -> str:
    mfu = prediction.mfu
    text = f"  {prediction.tokens_per_s:,.0f} tokens/s"
    if mfu is not None:
        text += f", MFU {mfu:.1%}"
    elif prediction.device.measured:
        rate = prediction.model_flops / prediction.seconds
        text += f", {rate / prediction.device.measured.square:.0%} of the large square product's rate"
    if row:
        speed = row["tokens_per_s"]
        text += (
            f"; measured {speed['median']:,.1f} [{speed['q1']:,.1f}, {speed['q3']:,.1f}], "
            f"{speed['median'] / prediction.tokens_per_s:.2f} of the prediction ({row['commit']}, {row['date'][:10]})"
        )
    return text


def _memory(step: Step, device: Device) -> str:
    kept, tokens = saved(step), sum(step.lengths.original)
    weights = kept.pop("weights in bf16", 0) + kept.pop("gradients made by the loss")
    activations, size = sum(kept.values()), parameters(step.config)
    text = (
        f"  memory: {activations / tokens:,.0f} bytes of activations a token, {activations / GIGABYTE:.2f} GB; "
        f"bf16 weights and the loss's gradients {weights / GIGABYTE:.2f} GB; "
        f"{size / 1e6:.1f}M parameters, 12 bytes each; predicted peak {peak_memory(step) / GIGABYTE:.1f} GB"
    )
    return text + (f" of {device.card.memory}" if device.card else "")


def goals_of(row: Row, measure: str) -> str:
    """The goals for a predicted row, in words; "" if there is none."""
    found = [goal for goal in GOALS if goal.measure == measure and goal.applies(row, row["dropout"], row["bias"])]
    return "".join(f"; goal {g.least:,g}" + (f", stretch {g.stretch:,g}" if g.stretch else "") for g in found)


def ratios(rows: Sequence[Row]) -> Iterator[str]:
    """Of a device's predicted rows: MAE-LM over our own RoBERTa."""
    speeds = {row["model"]: row["tokens_per_s"] for row in rows}
    for row in rows:
        if row["model"] in ("base", "base_cross") and "roberta_base" in speeds:
            ratio = row["tokens_per_s"] / speeds["roberta_base"]
            yield f"  {row['model']} over roberta_base: {ratio:.3f} tokens/s{goals_of(row, 'roberta_base')}"


def result_row(prediction: Prediction, row: Row | None, rate: float) -> Row:
    step, device = prediction.step, prediction.device
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": environment("cpu")["commit"],
        "device": DEVICE_NAMES.get(device.name) or (device.measured.machine["device"] if device.measured else ""),
        "projection": device.card is not None and device.measured is None and row is None,
        "model": prediction.model, "batch": len(step.lengths.original), "seq": max(step.lengths.original), "rate": rate,
        "dropout": step.config.dropout, "bias": step.config.relative_bias, "precision": step.precision,
        "ceilings": device.measured.machine if device.measured else "data sheet and observed elsewhere",
        "tokens_per_s": round(prediction.tokens_per_s, 1), "mfu": round(prediction.mfu, 4) if prediction.mfu else None,
        "ms": {k: round(1000 * sum(x.seconds for x in g), 3) for k, g in prediction.grouped("class").items()},
        "measured_tokens_per_s": row["tokens_per_s"] if row else None,
    }  # fmt: skip


def introduction(device: Device) -> Iterator[str]:
    if device.measured:
        m = device.measured.machine
        yield f"{m['device']}, {m['threads']} threads: ceilings measured {m['date'][:10]} with torch {m['torch']}"
    elif device.card:
        yield f"{device.card.name}: no measured ceilings; published and observed elsewhere"
    yield f"  {'ceiling':22}{'what':52}{'share':>6}  source or reason"
    for name, what, share in device.shares():
        yield f"  {name:22}{what:52}{share.share:6.2f}  {share.reason}"


def ceilings_path(kind: str) -> Path:
    return RESULTS / f"ceilings_{kind}.jsonl"


def device_of(name: str, precision: str, path: Path | None) -> Device:
    """path: measured ceilings; None takes those in the results, if there are any. Raises UserError if a named file
    holds none, and on a CPU without any."""
    card = CARDS.get(name)
    kind = "cuda" if card else "cpu"
    given = path or ceilings_path(kind)
    if path and not path.is_file():
        raise UserError(f"no file {path}; --measure --out {path} makes it")
    measured = ceilings.load(given, precision, DEVICE_NAMES.get(name, "")) if given.is_file() else None
    needed = ("copy", "square") if card else ("copy", "square", "fresh", "in_place")
    if measured is not None and (lacking := [field for field in needed if not getattr(measured, field)]):
        raise UserError(f"{given}: the {precision} rows lack {', '.join(lacking)}; run --measure again")
    if measured is None and (path or card is None):
        raise UserError(f"{given} has no {precision} ceilings of {DEVICE_NAMES.get(name, 'a CPU')}; run --measure")
    return Device(name, card, measured)


def names_of(chosen: str | None) -> list[str]:
    if chosen:
        return [chosen]
    return ["a100", "h200", *(["cpu"] if ceilings_path("cpu").is_file() else [])]


def steps(options: argparse.Namespace, kind: str) -> Iterator[tuple[str, Step]]:
    batch = options.batch or BATCH[kind]
    precision = options.precision or PRECISION[kind]
    if kind == "cuda" and precision != "bf16":
        raise UserError("a GPU's step is predicted in bf16 only: the peaks and the attention kernels' rates are bf16's")
    for model in options.models.split(","):
        config = model_config(model, options.dropout, options.bias)
        if options.seq > config.max_positions:
            raise UserError(f"--seq {options.seq} is more than {model}'s {config.max_positions} positions")
        lengths = masked_lengths(config, [options.seq] * batch, options.rate)
        yield model, Step(config, lengths, precision, kind)


def run_measure(options: argparse.Namespace) -> None:
    kind = "cpu" if options.device == "cpu" else "cuda"
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is visible; --device cpu measures the CPU")
    todo = list(steps(options, kind))
    costs = [cost for _, step in todo for cost in count(step)]
    rows = ceilings.measure(costs, todo[0][1].precision, kind, options.rounds or ROUNDS[kind])
    print(f"{rows[0]['device']}, {rows[0]['threads']} threads, load {rows[0]['load']}, commit {rows[0]['commit']}; "
          f"{rows[0]['rounds']} rounds, median [quartiles] of FLOP/s, bytes/s, elements/s or pairs/s, "
          "in billions")  # fmt: skip
    for row in rows:
        what = row["shape"] if isinstance(row["shape"], str) else " ".join(map(str, row["shape"] or ()))
        rate = {name: value / 1e9 for name, value in row["per_s"].items()}
        print(f"  {row['ceiling']:10}{what:40}{rate['median']:12.2f} [{rate['q1']:.2f}, {rate['q3']:.2f}]")
    if options.out:
        append_rows(options.out, rows)


def run_predict(options: argparse.Namespace) -> None:
    paths = [options.measured] if options.measured else sorted(RESULTS.glob("train_step_*.jsonl"))
    if options.measured and not options.measured.is_file():
        raise UserError(f"no file {options.measured}")
    rows: list[Row] = []
    for name in names_of(options.device):
        kind = "cpu" if name == "cpu" else "cuda"
        try:
            device = device_of(name, options.precision or PRECISION[kind], options.ceilings)
            predictions = [predict(model, step, device) for model, step in steps(options, kind)]
        except UserError as error:
            if kind == "cuda" or options.device:
                raise
            print(f"cpu, not predicted: {error}")
            continue
        print("\n".join(introduction(device)))
        for prediction in predictions:
            row = measured_row(prediction, options.rate, paths)
            rows.append(result_row(prediction, row, options.rate))
            print("\n".join(report(prediction, row, options.by, goals_of(rows[-1], "tokens_per_s"))))
            products = {c.work for c in count(prediction.step) if isinstance(c.work, Product)}
            if device.measured and not device.measured.exact(products):
                print("  some products were not measured at this shape: the nearest one's rate is taken")
        print("\n".join(ratios(rows[-len(predictions) :])))
    if options.out:
        append_rows(options.out, rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=[*CARDS, "cpu"], help="default: a100, h200, and cpu if it was measured so; "
                        "with --measure: cuda, or cpu if named")  # fmt: skip
    parser.add_argument("--models", default="base,base_cross,roberta_base", help="presets, separated by commas")
    parser.add_argument("--batch", type=int, help="sequences; default 256, on a CPU 4")
    parser.add_argument("--seq", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--rate", type=float, default=0.15, help="mask rate")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--bias", action=argparse.BooleanOptionalAction, default=False, help="relative position bias")
    parser.add_argument("--precision", choices=["bf16", "fp32"], help="default: bf16, on a CPU fp32")
    parser.add_argument("--by", choices=["class", "op"], default="class", help="what a line of the table is")
    parser.add_argument("--measure", action="store_true", help="measure this machine's ceilings at the steps' shapes")
    parser.add_argument("--rounds", type=int, help="of --measure")
    parser.add_argument("--ceilings", type=Path, help="JSONL file of measured ceilings; default: those in results")
    parser.add_argument("--measured", type=Path, help="JSONL file of train_step; default: all in results")
    parser.add_argument("--out", type=Path, help="JSONL file that the rows are appended to")
    options = parser.parse_args(arguments)
    if not 0.0 < options.rate < 1.0:
        parser.error(f"--rate must lie between 0 and 1, not {options.rate}")
    if min(1 if x is None else x for x in (options.batch, options.seq, options.rounds)) < 1:
        parser.error("--batch, --seq and --rounds must be at least 1")
    if options.ceilings and not (options.device and not options.measure):
        parser.error("--ceilings needs --device and goes without --measure")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        run_measure(options) if options.measure else run_predict(options)
    except UserError as error:
        print(f"python -m benchmarks.roofline: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
