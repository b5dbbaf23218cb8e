"""Tables of everything but training steps: a function of the newest rows that belong into one table, for each format of
result file that has tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.goals import (
    ATTENTION_GOAL,
    ATTENTION_STRETCH,
    COPY_SHARE_GOAL,
    FINETUNE_GOAL,
    FLEX_GOAL,
    LOADER_GOAL,
    PATCH_GOALS,
    RUN_GOAL,
    SPEEDRUN_GOALS,
    judged,
    place,
)
from benchmarks.report_step import LABELS
from benchmarks.rows import FORMATS, GPU, Row, grouped, regularisation
from benchmarks.shares import CLASSES
from benchmarks.tables import (
    Table,
    batch,
    counted,
    field,
    machine,
    machines,
    number,
    run,
    runs,
    span,
    spread,
)
from benchmarks.tracks import TRACKS
from maelm_fast import reporting

TRAINERS = {
    "ours": "ours, packed",
    "hf": "Hugging Face Trainer, batches padded to their longest",
    "hf_grouped": "Hugging Face Trainer, batches of like length",
}
PATCHED = {
    "patched": "patched",
    "attention": "attention `maelm` by name alone",
    "sdpa": "as it comes, sdpa attention",
    "eager": "as it comes, eager attention",
    "flash_attention_2": "as it comes, flash attention",
}
STOCK = ("sdpa", "eager", "flash_attention_2")
FIRST = {"mae": "paper", "mlm": "mlm_paper"}  # the entry that others of its kind are compared with
SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def tables(format_: str, rows: Sequence[Row]) -> Iterator[Table]:
    """Of all rows of a format, the host's code last; of a table without rows nothing."""
    for group in sorted(FORMATS[format_].tables(rows), key=lambda group: group[0].get("phase") == "host"):
        made = TABLES[format_](group)
        if made.rows:
            yield made


def ops_table(rows: Sequence[Row]) -> Table:
    """Of one size and dtype; the host code has neither."""
    device, sequences, length, width, dtype = (rows[0].get(name) for name in FORMATS["ops"].table)
    on_gpu = place(rows[0]) == "gpu"
    others = [row for row in rows if row["contestant"] not in ("pytorch", "numpy")]
    plain = sorted({row["op"] for row in rows} - {row["op"] for row in others})

    def ratio(phase: str) -> Callable[[Sequence[Row]], str]:
        return lambda own: spread({row["phase"]: row["ratio"] for row in own}.get(phase))

    def shares(own: Sequence[Row]) -> list[float]:
        return [row["copy_share"] for row in own if row.get("copy_share") is not None]

    def runs_on(own: Sequence[Row]) -> str:
        return (own[0].get("backend") or "") if own[0]["contestant"] == "ours" else str(own[0]["contestant"])

    def goal(own: Sequence[Row]) -> str:
        judge = on_gpu and own[0]["contestant"] == "ours" and shares(own)
        return judged("", min(shares(own)), COPY_SHARE_GOAL) if judge else ""

    title, command = f"Host code, {device}", f"python -m benchmarks.ops --device {'cuda' if on_gpu else 'cpu'}"
    if dtype:
        title = f"Times plain PyTorch, {device}, {dtype}, {sequences} x {length} tokens, width {width}"
        command += f" --dtype {SHORT_DTYPES.get(dtype, dtype)} --sequences {sequences} --length {length}"
        command += f" --width {width}"
    notes = [f"{machines(rows)}; median [quartiles]; `{command}`."]
    notes += [f"Plain PyTorch is what runs: {', '.join(plain)}."] if plain else []
    columns = {
        "op": lambda own: own[0]["op"],
        "runs on": runs_on,
        "forward": ratio("forward"),
        "forward and backward": ratio("forward+backward"),
        "times NumPy": ratio("host"),
        "of copy bandwidth": lambda own: ", ".join(f"{share:.0%}" for share in shares(own)),
        "gives": lambda own: own[0].get("note", ""),
        "goal": goal,
        "run": lambda own: run(own[0]),
    }
    return Table(title, grouped(others, "op", "contestant", "backend", "date").values(), columns, notes)


def attention_table(rows: Sequence[Row]) -> Table:
    device = rows[0]["device"]
    on_gpu = device.startswith(GPU)
    setting = ("case", "tokens", "dtype", "bias", "dropout")
    both: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row["phase"] == "fwd+bwd":
            both.setdefault(tuple(row[name] for name in setting), {})[row["contestant"]] = row

    def ms(phase: str) -> Callable[[Sequence[Row]], str]:
        return lambda own: spread({row["phase"]: row["ms"] for row in own}.get(phase))

    def whole(own: Sequence[Row]) -> Row | None:
        return next((row for row in own if row["phase"] == "fwd+bwd"), None)

    def goal(own: Sequence[Row]) -> str:
        row = own[0]
        judge = on_gpu and row["case"] == "kept" and row["bias"] and row["contestant"] == "ours" and whole(own)
        return attention_goals(both[tuple(row[name] for name in setting)]) if judge else ""

    yardstick = next((row["yardstick"] for row in rows if row["yardstick"]), "the yardstick")
    columns = {
        "case": lambda own: f"{own[0]['case']}, {own[0]['tokens']:,} tokens, {own[0]['dtype']}",
        "setting": lambda own: f"{'bias' if own[0]['bias'] else 'no bias'}, dropout {own[0]['dropout']:g}",
        "contestant": lambda own: own[0]["contestant"],
        "fwd ms": ms("fwd"),
        "fwd+bwd ms": ms("fwd+bwd"),
        "once a step ms": ms("once"),
        "TFLOP/s": lambda own: f"{row['tflop_per_s']['median']:.3g}" if (row := whole(own)) else "-",
        f"times {yardstick}": lambda own: spread(row["ratio"] if (row := whole(own)) else None),
        "goal": goal,
    }
    notes = [
        f"{machines(rows)}, {runs(rows)}; TFLOP/s and ratio of forward and backward together; median [quartiles]; "
        f"`python -m benchmarks.attention --device {'cuda' if on_gpu else 'cpu'}`."
    ]
    cases = grouped(rows, *setting).values()
    contestants = [own for case in cases for own in grouped(case, "contestant").values()]
    return Table(f"Attention, {device}", contestants, columns, notes)


def attention_goals(both: Mapping[str, Row]) -> str:
    """both: forward and backward, by contestant."""
    own, flex = both["ours"], both.get("flex")
    over_flex = flex["ms"]["median"] / own["ms"]["median"] if flex else None
    plain = judged("plain varlen ", own["ratio"] and own["ratio"]["median"], ATTENTION_GOAL, ATTENTION_STRETCH)
    return f"{plain}; {judged('flex ', over_flex, FLEX_GOAL)}"


def projection_table(rows: Sequence[Row]) -> Table:
    """What no machine has measured, from the least to the largest share that products are taken to reach."""
    first = rows[0]
    columns: dict[str, Callable[[Row], str]] = {
        "model": lambda row: LABELS.get(row["model"], f"`{row['model']}`"),
        "setting": lambda row: regularisation(row["dropout"], row["bias"]),
        "tokens/s": lambda row: " to ".join(f"{speed:,}" for speed in row["tokens_per_s"]),
        "MFU": lambda row: " to ".join(f"{mfu:.1%}" for mfu in row["mfu"]),
    }
    for kind in CLASSES:
        columns[f"{kind} ms"] = lambda row, kind=kind: span(row["ms"].get(kind, ()), ".3g")  # type: ignore[misc]
    least, largest = first["products"]
    notes = [
        f"Counted work over what the device can do; products at {least:g} to {largest:g} of "
        f"the peak; {run(rows[-1])}; `python -m benchmarks.projection`."
    ]
    shape = f"{first['precision']}, {batch(first)}, {first['rate']:.0%} masked"
    return Table(f"Projection, not a measurement: {first['device']}, {shape}", rows, columns, notes)


def loader_table(rows: Sequence[Row]) -> Table:
    """The larger micro-batch; loader processes on the largest store of a mode only."""
    shown = []
    for of_mode in grouped(rows, "mode").values():
        largest, most = (max(row[name] for row in of_mode) for name in ("store_bytes", "micro_batch"))
        for row in of_mode:
            if row["micro_batch"] == most and (row["workers"] == 0 or row["store_bytes"] == largest):
                shown.append(row | {"millions": {k: v / 1e6 for k, v in row["tokens_per_s_per_core"].items()}})
    columns = {
        "store": lambda row: f"{row['mode']}, {row['store_bytes'] / 1e6:,.0f} MB",
        "masks": field("masks"),
        "micro-batch": field("micro_batch", "g"),
        "loader processes": field("workers", "g"),
        "M tokens/s and core": lambda row: spread(row["millions"], ".1f"),
        "fill": lambda row: f"{row['fill']['all']:.1%}",
        "own MB": lambda row: number(row["rss_anon_mb"], ",.0f"),
        "disk reads": lambda row: number(row["major_faults"], "g"),
        "goal": lambda row: judged("", row["millions"]["median"], LOADER_GOAL),
        "run": run,
    }
    notes = [f"{machines(rows)}; median [quartiles]; `python -m benchmarks.loader`."]
    return Table(f"Loader, {rows[0]['device']}", shown, columns, notes)


def finetune_table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    over = next(row for row in rows if row["contestant"] == "ours")["ratios"]

    def goal(row: Row) -> str:
        judge = row["contestant"] == "hf" and "hf" in over and place(row) == "cpu"
        return judged("", over["hf"]["median"], FINETUNE_GOAL) if judge else ""

    columns = {
        "": lambda row: TRAINERS[row["contestant"]],
        "examples/s": lambda row: spread(row["examples_per_s"], ",.0f"),
        "ours over it": lambda row: spread(over.get(row["contestant"])),
        f"{first['metric']} on the development set": lambda row: reporting.over_seeds(row["results"]),
        "goal": goal,
    }
    shape = f"{first['layers']} layers of {first['hidden_size']}"
    notes = [
        f"{machine(first)}, {run(first)}; {first['examples']:,} examples of {first['mean_length']} tokens on "
        f"average, batches of {first['batch']}, dropout {first['dropout']:g}; {first['rounds']} rounds in "
        f"turns, median [quartiles]; results: median [least, largest] of the rounds, each with its own seed; "
        f"`python -m benchmarks.finetune --data DIR`."
    ]
    return Table(
        f"Fine-tuning, {first['device']}, {first['precision']}, {shape}, {first['task']}", rows, columns, notes
    )


def pretraining_table(rows: Sequence[Row]) -> Table:
    columns = {
        "preset": lambda row: f"`{row['model']}`, {batch(row)}",
        "loader processes": field("workers"),
        "tokens/s of the run": lambda row: spread(row["tokens_per_s"], ",.0f"),
        "over the bare step": lambda row: spread(row["ratio"], ".3f"),
        "in CPU seconds": lambda row: spread(row["cpu_ratio"], ".3f"),
        "goal": lambda row: judged("", row["cpu_ratio" if place(row) == "cpu" else "ratio"]["median"], RUN_GOAL),
        "run": run,
    }
    notes = [f"{machines(rows)}, load {rows[0]['load']}; median [quartiles]; `python -m benchmarks.pretraining`."]
    return Table(f"A run of `maelm-fast pretrain`, {rows[0]['device']}, {rows[0]['precision']}", rows, columns, notes)


def patch_table(rows: Sequence[Row]) -> Table:
    """The goal is over the faster of the attentions that transformers has."""
    first = rows[0]
    patched = {row["mix"]: row for row in rows if row["contestant"] == "patched"}

    def goal(row: Row) -> str:
        if row["contestant"] != "patched" or place(row) != "cpu":
            return ""
        over = [row["ratios"][name]["median"] for name in STOCK if name in row["ratios"]]
        return judged("over the faster stock ", min(over, default=None), PATCH_GOALS[row["mix"]])

    def batches(row: Row) -> str:
        return f"{row['mix']}: {row['batch']} of {row['mean_length']:.0f} tokens, {row['padding']:.0%} padding"

    columns = {
        "batches": batches,
        "": lambda row: PATCHED[row["contestant"]],
        "tokens/s": lambda row: spread(row["tokens_per_s"], ",.0f"),
        "patched over it": lambda row: spread(patched[row["mix"]]["ratios"].get(row["contestant"])),
        "in CPU seconds": lambda row: spread((patched[row["mix"]]["cpu_ratios"] or {}).get(row["contestant"])),
        "goal": goal,
    }
    shape = f"{first['layers']} layers of {first['hidden_size']}"
    notes = [
        f"{machines(rows)}, transformers {first['transformers']}, load {first['load']}, {run(first)}; "
        f"real texts, dropout {first['dropout']:g}; {counted(first['rounds'], 'round')} in turns, median [quartiles]; "
        f"`python -m benchmarks.patch --data TEXTS`."
    ]
    title = f"Hugging Face RoBERTa patched, {first['device']}, {first['precision']}, {shape}"
    return Table(title, [row for own in grouped(rows, "mix").values() for row in own], columns, notes)


def executed_table(rows: Sequence[Row]) -> Table:
    """One for all versions of Triton: counts of PTX, no times."""

    def name(row: Row) -> str:
        extra = f"{', bias' if row['bias'] else ''}{', dropout' if row['dropout'] else ''}"
        return f"{row['kernel']}, {row['shape']}{extra}, per {row['unit']}"

    columns: dict[str, Callable[[Row], str]] = {
        "kernel, shape, unit": name,
        "Triton": field("triton"),
        "instructions": lambda row: f"{sum(row['instructions'].values()):.1f}",
    }
    for kind in sorted({kind for row in rows for kind in row["instructions"]}):
        columns[kind] = lambda row, kind=kind: number(row["instructions"].get(kind), ".3g")  # type: ignore[misc]
    columns["wavefronts over ideal"] = lambda row: number(row["wavefronts"], ".2f")
    columns["sectors a request"] = lambda row: number(row["sectors"], ".1f")
    notes = [
        "Counts, not times: PTX instructions of a thread for each unit, sm_80, on a CPU; one sequence "
        f"of 435 visible tokens of 512, bf16; {runs(rows)}; `python -m benchmarks.executed`."
    ]
    cases = grouped(rows, "kernel", "shape", "dropout", "bias", "unit").values()
    newest_first = [row for case in cases for row in sorted(case, key=field("triton"), reverse=True)]
    return Table("", newest_first, columns, notes)


@dataclass(frozen=True)
class Summary:
    """An entry over its seeds."""

    name: str
    rows: list[Row]
    p_seconds: float | None
    """Of Welch's t-test against the first entry of its kind, two-sided; None for that one, or where one has too few
    runs that reach the target."""
    p_loss: float | None

    @property
    def seconds(self) -> list[float]:
        return [row["cpu_seconds_to_target"] for row in self.rows if row["cpu_seconds_to_target"] is not None]

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows]


def summaries(rows: Sequence[Row]) -> list[Summary]:
    """Of the rows of one table, in the order of the track's entries."""
    entries = grouped(sorted(rows, key=_place), "entry")
    return [_summary(name, its, entries) for (name,), its in entries.items()]


def _place(row: Row) -> tuple[int, int]:
    entries = list(TRACKS[row["track"]].entries)
    return entries.index(row["entry"]) if row["entry"] in entries else len(entries), row["seed"]


def _summary(name: str, rows: list[Row], entries: Mapping[tuple[Any, ...], list[Row]]) -> Summary:
    first = FIRST[rows[0]["kind"]]
    mine = Summary(name, rows, None, None)
    if name == first or (first,) not in entries:
        return mine
    other = Summary(first, entries[(first,)], None, None)
    return replace(mine, p_seconds=welch(mine.seconds, other.seconds), p_loss=welch(mine.losses, other.losses))


def welch(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Two-sided p of equal means, the variances not being equal; None of fewer than two numbers each."""
    if min(len(a), len(b)) < 2:
        return None
    from scipy.stats import ttest_ind

    return float(ttest_ind(a, b, equal_var=False).pvalue)


def speedrun_table(rows: Sequence[Row]) -> Table:
    entries = summaries(rows)
    first = entries[0].rows[0]

    def updates(entry: Summary) -> list[float]:
        return [row["updates_to_target"] for row in entry.rows if row["updates_to_target"]]

    def seconds(entry: Summary) -> str:
        missed = len(entry.rows) - len(updates(entry))
        return reporting.over_seeds(entry.seconds, 0) + (f", {missed} never" if missed else "")

    columns = {
        "entry": lambda entry: f"`{entry.name}`",
        "recipe": lambda entry: entry.rows[0]["recipe"],
        "seeds": lambda entry: str(len(entry.rows)),
        f"CPU s to {first['target']:.2f} nats": seconds,
        "updates to it": lambda entry: reporting.over_seeds(updates(entry), 0),
        "p": lambda entry: number(entry.p_seconds, ".1g"),
        "nats in the end": lambda entry: f"{reporting.over_seeds(entry.losses, 3)} after {entry.rows[0]['updates']:,}",
        "p of them": lambda entry: number(entry.p_loss, ".1g"),
        "goal": speedrun_goal,
    }
    ran = sorted({run(row) for row in rows})
    notes = [
        f"{machine(first)}, {first['precision']}; {TRACKS[first['track']].about}; median [least, largest] of the "
        f"seeds; p: Welch's t-test against {' or '.join(f'`{name}`' for name in FIRST.values())}, whichever is of "
        f"its kind; {ran[0]}{' to ' + ran[-1] if len(ran) > 1 else ''}; "
        f"`python -m benchmarks.speedrun {first['track']}`."
    ]
    return Table(f"Time to quality, {first['track']}", entries, columns, notes)


def speedrun_goal(entry: Summary) -> str:
    """Of an entry that is a whole recipe, not one change of another."""
    row = entry.rows[0]
    seconds, loss = SPEEDRUN_GOALS.get((row["track"], row["kind"]), (None, None))
    if "fast" not in entry.name:
        return ""
    reached = statistics.median(entry.seconds) if len(entry.seconds) == len(entry.rows) else None
    verdicts = [judged("", reached, seconds, at_most=True)] if seconds else []
    verdicts += [judged("nats ", statistics.median(entry.losses), loss, at_most=True)] if loss else []
    return "; ".join(verdicts)


TABLES: dict[str, Callable[[Sequence[Row]], Table]] = {
    "pretraining": pretraining_table,
    "patch": patch_table,
    "finetune": finetune_table,
    "ops": ops_table,
    "attention": attention_table,
    "loader": loader_table,
    "projection": projection_table,
    "speedrun": speedrun_table,
    "executed": executed_table,
}
