"""What the result files say: the newest rows of every setting, beside the goals set for them.

    python -m benchmarks.report                    # tables
    python -m benchmarks.report --plot FILE.png    # tokens/s and where a step's time goes, as a picture
    python -m benchmarks.report --write            # the tables in the READMEs
    python -m benchmarks.report --check            # exit code 1 if --write would change them

A table is made once, and printed as text or as markdown. In the READMEs only what stands between the lines
`<!-- results:NAME -->` and `<!-- /results -->` is replaced, and left alone as long as there is no row for it: every
number that is written there comes from a row.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.classes import CLASSES
from benchmarks.goals import (
    ATTENTION_GOAL,
    ATTENTION_STRETCH,
    ATTENTIONS,
    COPY_SHARE_GOAL,
    FINETUNE_GOAL,
    FLEX_GOAL,
    GOALS,
    LOADER_GOAL,
    PATCH_GOALS,
    SPEEDRUN_GOALS,
    judged,
    judged_below,
    over,
    place,
)
from benchmarks.rows import (
    COMPILED,
    GPU,
    PHASES,
    SETTING,
    Case,
    Results,
    Row,
    grouped,
    newest_rows,
    read,
    regularisation,
    when,
)
from benchmarks.speedrun import FIRST, TRACKS, Summary, summaries
from maelm_fast import reporting
from maelm_fast.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
LABELS = {
    "base": "`base` (MAE-LM)",
    "base_cross": "`base_cross` (MAE-LM, cross-attention decoder)",
    "roberta_base": "`roberta_base` (same blocks, [MASK] in the encoder)",
    "base_accumulated": "`base`, an update of 8 micro-batches",
    "base_graph": "`base`, an update as one CUDA graph",
    "hf": "Hugging Face `RobertaForMaskedLM`",
    "hf_eager": "Hugging Face `RobertaForMaskedLM`, eager attention",
    "hf_flash": "Hugging Face `RobertaForMaskedLM`, flash attention",
    "modernbert": "Hugging Face `ModernBertForMaskedLM`",
    "padded": "MAE-LM padded, bias written out",
}
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
PEERS = ("hf", "hf_eager", "hf_flash", "modernbert", "padded")
OVER = ("hf", "hf_compiled", "padded", "roberta_base")  # whom the tables compare with
REGIONS = {
    "README.md": ("headline",),
    "benchmarks/README.md": (
        "train_step",
        "patch",
        "finetune",
        "ops",
        "attention",
        "loader",
        "projection",
        "speedrun",
    ),
    "kernels/README.md": ("executed",),
}
SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
MORE = "Equal losses on equal weights come first; all settings: [benchmarks/](benchmarks/README.md)."
NO_GPU = "No row was measured on a GPU."


@dataclass
class Table:
    """Columns in which no row has anything are left out."""

    title: str
    header: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        kept = [i for i in range(len(self.header)) if i == 0 or any(row[i] not in ("", "-") for row in self.rows)]
        self.header = [self.header[i] for i in kept]
        self.rows = [[row[i] for i in kept] for row in self.rows]

    def text(self) -> str:
        cells = [self.header, *self.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.header))]
        body = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
        return "\n".join(line for line in (self.title, *body, *self.notes) if line)

    def markdown(self) -> str:
        body = "\n".join(reporting.table(self.header, self.rows)).rstrip("\n")
        notes = f"<sub>{' '.join(self.notes)}</sub>" if self.notes else ""
        return "\n\n".join(block for block in (self.title and f"**{self.title}**", body, notes) if block)


def spread(value: Mapping[str, float] | None, form: str | None = None) -> str:
    if value is None:
        return "-"
    form = form or (".2f" if value["median"] < 10 else ".1f")
    return f"{value['median']:{form}} [{value['q1']:{form}}, {value['q3']:{form}}]"


def number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def machine(row: Row) -> str:
    return f"{row['device']}, {counted(row['threads'], 'thread')}, torch {row['torch']}"


def machines(rows: Sequence[Row]) -> str:
    return "; ".join(dict.fromkeys(machine(row) for row in rows))


def run(row: Row) -> str:
    return f"{when(row):%Y-%m-%d %H:%M}, commit {row['commit']}"


def label(case: Case, row: Row) -> str:
    kind = row["model"].removesuffix(COMPILED)
    words = [LABELS.get(kind, f"`{kind}`")]
    words += ["torch.compile"] if kind != row["model"] else []
    words += ["no relative bias"] if row["bias"] != case.bias else []
    words += [f"dropout {row['dropout']:g}"] if row["dropout"] != case.dropout else []
    return ", ".join(words)


def batch(row: Row) -> str:
    documents = row.get("lengths", "full") != "full"
    return f"{row['batch']} x {row['seq']} tokens{' at most, lengths of documents' if documents else ''}"


def conditions(case: Case) -> str:
    """Of which machine, state of the code and run the numbers are, and the command that measures them again."""
    row = case.shared
    transformers = f", transformers {row['transformers']}" if row["transformers"] else ""
    return (
        f"{machine(row)}{transformers}, {row['precision']}, load {row['load']}, {run(row)}; {batch(row)}, "
        f"{row['rate']:.0%} masked, {case.regularisation}; {counted(row['rounds'], 'round')} in turns, median "
        f"[quartiles]; `{command(case)}`."
    )


def command(case: Case) -> str:
    row, names = case.shared, list(case.rows)
    peers = [name for name in names if name.removesuffix(COMPILED) in PEERS]
    return (
        f"python -m benchmarks.train_step --device {'cuda' if case.on_gpu else 'cpu'} "
        f"--models {','.join(name for name in names if name not in peers)} --peers {','.join(peers) or repr('')} "
        f"--rates {row['rate']:g} --dropouts {case.dropout:g} --biases {'off' if case.bias == 'none' else 'on'} "
        f"--lengths {row['lengths']} --batch {row['batch']} --seq {row['seq']} --precision {row['precision']} "
        f"--rounds {row['rounds']}"
    )


def case_tables(case: Case) -> Iterator[Table]:
    """Speed beside the goals, then where a step's time goes."""
    speed, split = [], []
    for name, row in case.timed.items():
        goals = [goal.verdict(row) for goal in GOALS if goal.applies(row, case.dropout, case.bias)]
        speed.append(
            [
                label(case, row),
                spread(row["tokens_per_s"], ",.0f"),
                *("1" if name == other else spread(over(row, other)) for other in OVER),
                "-" if name in ATTENTIONS["hf"] else spread(over(row, "hf", "cpu_ratios")),
                number(row["mfu"], ".1%"),
                number(row["peak_memory_mb"], ",.0f"),
                number(row["joules_per_mtoken"], ",.0f"),
                number(row["recompiles"], "g"),
                "; ".join(goals),
            ]
        )
        ms = {phase: 1000 * seconds for phase, seconds in (row["seconds"] or {}).items()}
        kernels = row["kernels"] or {}
        split.append(
            [
                label(case, row),
                *(number(ms.get(phase), ",.1f") for phase in PHASES),
                *(number(kernels.get(kind), ".0%") for kind in CLASSES),
            ]
        )
    row = case.shared
    title = f"{row['device']}, {row['precision']}, {batch(row)}, {row['rate']:.0%} masked, {case.regularisation}"
    header = [
        "model",
        "tokens/s",
        *(f"over {other}" for other in OVER),
        "over hf, CPU seconds",
        "MFU",
        "peak MB",
        "J per 1M tokens",
        "recompiles",
        "goal",
    ]
    skipped = [f"Not run: {name}, {row['skipped']}." for name, row in case.rows.items() if row["skipped"] is not None]
    yield Table(title, header, speed, [conditions(case), *skipped])
    table = Table("", ["where a step's time goes", *(f"{phase} ms" for phase in PHASES), *CLASSES], split)
    if len(table.header) > 1:
        yield table


def is_quiet(row: Row) -> bool:
    """Whether a CPU had no more to do than the benchmark: what was timed beside other work is no headline."""
    return place(row) == "gpu" or bool(row["load"] <= row["threads"] + 0.5)


def headline_tables(cases: Sequence[Case]) -> Iterator[Table]:
    """Of each device the newest quiet case with the paper's dropout and bias, and the one alike without both. Ratios
    are over the faster of Hugging Face's attentions."""
    settings = {case.setting: case for case in cases}
    newest: dict[str, Case] = {}
    for case in sorted(cases, key=lambda case: when(case.shared)):
        row = case.shared
        setting = (case.dropout, case.bias, row["seq"], row["rate"], row["lengths"])
        if setting == (0.1, "t5", 512, 0.15, "full") and is_quiet(row):
            newest[row["device"]] = case
    for device, case in sorted(newest.items(), key=lambda item: (not item[1].on_gpu, item[0])):
        row = case.shared
        plain = settings.get((*(row[name] for name in SETTING), -0.0, "none"))
        rows = []
        theirs = [name for name in ATTENTIONS["hf"] if name in case.timed]
        best = max(theirs, key=lambda name: float(case.timed[name]["tokens_per_s"]["median"]), default="")
        for name, own in case.timed.items():
            ours, bare = over(own, "hf"), plain.timed.get(name) if plain else None
            ratio = f"**{ours['median']:.2f}x** [{ours['q1']:.2f}, {ours['q3']:.2f}]" if ours else "-"
            memory = own["peak_memory_mb"]
            rows.append(
                [
                    label(case, own),
                    spread(own["tokens_per_s"], ",.0f"),
                    "1" if name == best else ratio,
                    "-" if memory is None else f"{memory / 1024:.1f} GB",
                    "-" if name in ATTENTIONS["hf"] else spread(over(bare, "hf") if bare else None),
                ]
            )
        header = [
            f"one training step, sequences of 512, {device}",
            "tokens/s",
            "over Hugging Face",
            "peak memory",
            "over Hugging Face without dropout and bias",
        ]
        notes = [conditions(case), MORE]
        if plain:
            notes.insert(1, f"Last column: dropout 0, no bias, {run(plain.shared)}, load {plain.shared['load']}.")
        yield Table("", header, rows, notes)


def ops_tables(rows: Sequence[Row]) -> Iterator[Table]:
    """A table for each size and dtype; the host code has neither."""
    setting = ("device", "sequences", "length", "width", "dtype")
    newest = newest_rows(rows, [*setting, "op", "phase"])
    newest.sort(key=lambda row: row["phase"] == "host")
    for (device, sequences, length, width, dtype), group in grouped(newest, *setting).items():
        on_gpu = place(group[0]) == "gpu"
        others = [row for row in group if row["contestant"] not in ("pytorch", "numpy")]
        cells = []
        for (op, contestant, backend, _), own in grouped(others, "op", "contestant", "backend", "date").items():
            ratios = {row["phase"]: row["ratio"] for row in own}
            shares = [row["copy_share"] for row in own if row.get("copy_share") is not None]
            ours = contestant == "ours"
            cells.append(
                [
                    op,
                    backend or "" if ours else contestant,
                    *(spread(ratios.get(phase)) for phase in ("forward", "forward+backward", "host")),
                    ", ".join(f"{share:.0%}" for share in shares),
                    own[0].get("note", ""),
                    judged("", min(shares), COPY_SHARE_GOAL) if on_gpu and ours and shares else "",
                    run(own[0]),
                ]
            )
        plain = sorted({row["op"] for row in group} - {row["op"] for row in others})
        title = f"Host code, {device}"
        command = f"python -m benchmarks.ops --device {'cuda' if on_gpu else 'cpu'}"
        if dtype:
            title = f"Times plain PyTorch, {device}, {dtype}, {sequences} x {length} tokens, width {width}"
            command += f" --dtype {SHORT_DTYPES.get(dtype, dtype)} --sequences {sequences} --length {length}"
            command += f" --width {width}"
        notes = [f"{machines(group)}; median [quartiles]; `{command}`."]
        notes += [f"Plain PyTorch is what runs: {', '.join(plain)}."] if plain else []
        header = [
            "op",
            "runs on",
            "forward",
            "forward and backward",
            "times NumPy",
            "of copy bandwidth",
            "gives",
            "goal",
            "run",
        ]
        if cells:
            yield Table(title, header, cells, notes)


def attention_tables(rows: Sequence[Row]) -> Iterator[Table]:
    setting = ("case", "tokens", "dtype", "bias", "dropout")
    newest = newest_rows(rows, ["device", *setting, "phase"])
    for (device,), on_device in grouped(newest, "device").items():
        cells = []
        for (case, tokens, dtype, bias, dropout), group in grouped(on_device, *setting).items():
            both = {row["contestant"]: row for row in group if row["phase"] == "fwd+bwd"}
            for (contestant,), own in grouped(group, "contestant").items():
                ms = {row["phase"]: row["ms"] for row in own}
                row = both.get(contestant)
                judge = device.startswith(GPU) and case == "kept" and bias and contestant == "ours" and row
                cells.append(
                    [
                        f"{case}, {tokens:,} tokens, {dtype}",
                        f"{'bias' if bias else 'no bias'}, dropout {dropout:g}",
                        contestant,
                        *(spread(ms.get(phase)) for phase in ("fwd", "bwd", "fwd+bwd", "once")),
                        f"{row['tflop_per_s']['median']:.3g}" if row else "-",
                        spread(row["ratio"] if row else None),
                        attention_goals(both) if judge else "",
                    ]
                )
        yardstick = next((row["yardstick"] for row in on_device if row["yardstick"]), "the yardstick")
        header = [
            "case",
            "setting",
            "contestant",
            "fwd ms",
            "bwd ms",
            "fwd+bwd ms",
            "once a step ms",
            "TFLOP/s",
            f"times {yardstick}",
            "goal",
        ]
        notes = [
            f"{machines(on_device)}, {'; '.join(sorted({run(row) for row in on_device}))}; TFLOP/s and ratio of "
            f"forward and backward together; median [quartiles]; `python -m benchmarks.attention --device "
            f"{'cuda' if device.startswith(GPU) else 'cpu'}`."
        ]
        longest = {row["contestant"]: row["kernel"] for row in on_device if row.get("kernel")}
        notes += [f"Most of the time: {', '.join(f'{who}: `{kernel}`' for who, kernel in longest.items())}."] * bool(
            longest
        )
        yield Table(f"Attention, {device}", header, cells, notes)


def attention_goals(both: Mapping[str, Row]) -> str:
    """both: forward and backward, by contestant."""
    own, flex = both["ours"], both.get("flex")
    over_flex = flex["ms"]["median"] / own["ms"]["median"] if flex else None
    return "; ".join(
        [
            judged("plain varlen ", own["ratio"] and own["ratio"]["median"], ATTENTION_GOAL, ATTENTION_STRETCH),
            judged("flex ", over_flex, FLEX_GOAL),
        ]
    )


def projection_tables(rows: Sequence[Row]) -> Iterator[Table]:
    """What no machine has measured, from the least to the largest share that products are taken to reach."""
    setting = ("device", "precision", "batch", "seq", "rate")
    for (device, precision, _, _, rate), group in grouped(
        newest_rows(rows, [*setting, "dropout", "bias", "model"]), *setting
    ).items():
        cells = []
        for row in group:
            speed, mfu = row["tokens_per_s"], row["mfu"]
            ms = [" to ".join(f"{x:.3g}" for x in dict.fromkeys(row["ms"][kind])) for kind in CLASSES]
            cells.append(
                [
                    LABELS.get(row["model"], f"`{row['model']}`"),
                    regularisation(row["dropout"], row["bias"]),
                    f"{speed[0]:,} to {speed[1]:,}",
                    f"{mfu[0]:.1%} to {mfu[1]:.1%}",
                    *ms,
                ]
            )
        header = ["model", "setting", "tokens/s", "MFU", *(f"{kind} ms" for kind in CLASSES)]
        least, largest = group[0]["products"]
        notes = [
            f"Counted work over what the device can do, launch by launch; products at {least:g} to {largest:g} of "
            f"the peak; {run(group[-1])}; `python -m benchmarks.projection`."
        ]
        title = f"Projection, not a measurement: {device}, {precision}, {batch(group[0])}, {rate:.0%} masked"
        yield Table(title, header, cells, notes)


def loader_tables(rows: Sequence[Row]) -> Iterator[Table]:
    """The larger micro-batch; loader processes on the largest store of a mode only."""
    store = ("device", "store", "mode", "store_bytes")
    newest = newest_rows(rows, [*store, "masks", "micro_batch", "workers"])
    for (device,), group in grouped(newest, "device").items():
        cells = []
        for (mode,), of_mode in grouped(group, "mode").items():
            largest, most = (max(row[name] for row in of_mode) for name in ("store_bytes", "micro_batch"))
            for row in of_mode:
                if row["micro_batch"] != most or (row["workers"] and row["store_bytes"] != largest):
                    continue
                millions = {name: value / 1e6 for name, value in row["tokens_per_s_per_core"].items()}
                cells.append(
                    [
                        f"{mode}, {row['store_bytes'] / 1e6:,.0f} MB",
                        row["masks"],
                        f"{row['micro_batch']:g}",
                        f"{row['workers']:g}",
                        spread(millions, ".1f"),
                        f"{row['fill']['all']:.1%}",
                        number(row["rss_anon_mb"], ",.0f"),
                        number(row["major_faults"], "g"),
                        judged("", millions["median"], LOADER_GOAL),
                        run(row),
                    ]
                )
        header = [
            "store",
            "masks",
            "micro-batch",
            "loader processes",
            "M tokens/s and core",
            "fill",
            "own MB",
            "disk reads",
            "goal",
            "run",
        ]
        notes = [f"{machines(group)}; median [quartiles]; `python -m benchmarks.loader`."]
        yield Table(f"Loader, {device}", header, cells, notes)


def finetune_tables(rows: Sequence[Row]) -> Iterator[Table]:
    setting = ("device", "task", "hidden_size", "layers", "batch", "examples", "precision", "dropout")
    for group in grouped(newest_rows(rows, setting), *setting).values():
        first, cells = group[0], list[list[str]]()
        ours = next(row for row in group if row["contestant"] == "ours")
        for row in group:
            name, results = row["contestant"], row["results"]
            over = ours["ratios"].get(name)
            judge = name == "hf" and place(row) == "cpu"
            cells.append(
                [
                    TRAINERS[name],
                    spread(row["examples_per_s"], ",.0f"),
                    spread(over),
                    f"{statistics.median(results):.1f} [{min(results):.1f}, {max(results):.1f}]",
                    judged("", over["median"], FINETUNE_GOAL) if judge and over else "",
                ]
            )
        header = ["", "examples/s", "ours over it", f"{first['metric']} on the development set", "goal"]
        task = "sentences of SST-2's lengths" if first["task"] == "custom" else first["task"]
        shape = f"{first['layers']} layers of {first['hidden_size']}"
        title = f"Fine-tuning, {first['device']}, {first['precision']}, {shape}, {task}"
        notes = [
            f"{machine(first)}, {run(first)}; {first['examples']:,} examples of {first['mean_length']} tokens on "
            f"average, batches of {first['batch']}, dropout {first['dropout']:g}; {first['rounds']} rounds in "
            f"turns, median [quartiles]; results: median [least, largest] of the rounds, each with its own seed; "
            f"`python -m benchmarks.finetune`."
        ]
        yield Table(title, header, cells, notes)


def patch_tables(rows: Sequence[Row]) -> Iterator[Table]:
    """The goal is over the faster of the attentions that transformers has."""
    setting = ("device", "precision", "layers", "hidden_size", "vocab", "dropout")
    newest = newest_rows(rows, [*setting, "mix", "batch"])
    for group in grouped(newest, *setting).values():
        cells, first = list[list[str]](), group[0]
        for mix, own in grouped(group, "mix").items():
            ours = next(row for row in own if row["contestant"] == "patched")
            over = [ours["ratios"][name]["median"] for name in STOCK if name in ours["ratios"]]
            for row in own:
                name = row["contestant"]
                texts = f"{mix[0]}: {row['batch']} of {row['mean_length']:.0f} tokens, {row['padding']:.0%} padding"
                goal = PATCH_GOALS[mix[0]] if name == "patched" and place(row) == "cpu" else None
                cells.append(
                    [
                        texts,
                        PATCHED[name],
                        spread(row["tokens_per_s"], ",.0f"),
                        spread(ours["ratios"].get(name)),
                        spread((ours["cpu_ratios"] or {}).get(name)),
                        judged("over the faster stock ", min(over, default=None), goal) if goal else "",
                    ]
                )
        header = ["batches", "", "tokens/s", "patched over it", "in CPU seconds", "goal"]
        shape = f"{first['layers']} layers of {first['hidden_size']}"
        texts = "real texts" if first["texts"] == "real" else "lengths of real texts, random tokens"
        notes = [
            f"{machines(group)}, transformers {first['transformers']}, load {first['load']}, {run(first)}; {texts}, "
            f"dropout {first['dropout']:g}; {counted(first['rounds'], 'round')} in turns, median [quartiles]; "
            f"`python -m benchmarks.patch{' --data TEXTS' if first['texts'] == 'real' else ''}`."
        ]
        title = f"Hugging Face RoBERTa patched, {first['device']}, {first['precision']}, {shape}"
        yield Table(title, header, cells, notes)


def executed_tables(rows: Sequence[Row]) -> Iterator[Table]:
    """One table for all versions of Triton: counts of PTX, no times."""
    case = ("kernel", "shape", "dropout", "bias", "unit")
    newest = newest_rows(rows, ["triton", *case])
    kinds = sorted({kind for row in newest for kind in row["instructions"]})
    cells = []
    for (kernel, shape, dropout, bias, unit), group in grouped(newest, *case).items():
        name = f"{kernel}, {shape}{', bias' if bias else ''}{', dropout' if dropout else ''}, per {unit}"
        for row in sorted(group, key=lambda row: row["triton"], reverse=True):
            instructions = row["instructions"]
            cells.append(
                [
                    name,
                    row["triton"],
                    f"{sum(instructions.values()):.1f}",
                    *(number(instructions.get(kind), ".3g") for kind in kinds),
                    number(row["wavefronts"], ".2f"),
                    number(row["sectors"], ".1f"),
                ]
            )
    header = ["kernel, shape, unit", "Triton", "instructions", *kinds, "wavefronts over ideal", "sectors a request"]
    if cells:
        notes = [
            "Counts, not times: PTX instructions of a thread for each unit, sm_80, on a CPU; one sequence "
            f"of 435 visible tokens of 512, bf16; {'; '.join(sorted({run(row) for row in newest}))}; "
            "`python -m benchmarks.executed`."
        ]
        yield Table("", header, cells, notes)


def speedrun_tables(rows: Sequence[Row]) -> Iterator[Table]:
    for group in summaries(rows):
        first = group[0].rows[0]
        seconds = f"CPU s to {first['target']:.2f} nats"
        header = ["entry", "recipe", "seeds", seconds, "updates to it", "p", "nats in the end", "p of them", "goal"]
        cells = []
        for entry in group:
            row, updates = entry.rows[0], [r["updates_to_target"] for r in entry.rows if r["updates_to_target"]]
            missed = len(entry.rows) - len(updates)
            cells.append(
                [
                    f"`{entry.name}`",
                    row["recipe"],
                    str(len(entry.rows)),
                    reporting.over_seeds(entry.seconds, 0) + (f", {missed} never" if missed else ""),
                    reporting.over_seeds(updates, 0),
                    number(entry.p_seconds, ".1g"),
                    f"{reporting.over_seeds(entry.losses, 3)} after {row['updates']:,}",
                    number(entry.p_loss, ".1g"),
                    _speedrun_goal(entry),
                ]
            )
        runs = sorted({run(row) for entry in group for row in entry.rows})
        notes = [
            f"{machine(first)}, {first['precision']}; {TRACKS[first['track']].about}; median [least, largest] of the "
            f"seeds; p: Welch's t-test against {' or '.join(f'`{name}`' for name in FIRST.values())}, whichever is of "
            f"its kind; {runs[0]}{' to ' + runs[-1] if len(runs) > 1 else ''}; "
            f"`python -m benchmarks.speedrun {first['track']}`."
        ]
        yield Table(f"Time to quality, {first['track']}", header, cells, notes)


def _speedrun_goal(entry: Summary) -> str:
    """Of an entry that is a whole recipe, not one change of another."""
    row = entry.rows[0]
    seconds, loss = SPEEDRUN_GOALS.get((row["track"], row["kind"]), (None, None))
    reached = statistics.median(entry.seconds) if len(entry.seconds) == len(entry.rows) else None
    verdicts = [judged_below("", reached, seconds)] if seconds and "fast" in entry.name else []
    verdicts += [judged_below("nats ", statistics.median(entry.losses), loss)] if loss and "fast" in entry.name else []
    return "; ".join(verdicts)


def tables(results: Results, region: str) -> list[Table]:
    """What belongs into a region; none if there is no row for it."""
    if region == "headline":
        return list(headline_tables(results.cases))
    if region == "train_step":
        return [table for case in results.cases for table in case_tables(case)]
    rows = results.rows.get(region, [])
    makers = {
        "ops": ops_tables,
        "attention": attention_tables,
        "loader": loader_tables,
        "projection": projection_tables,
        "finetune": finetune_tables,
        "patch": patch_tables,
        "executed": executed_tables,
        "speedrun": speedrun_tables,
    }
    return list(makers[region](rows))


def region_text(results: Results, region: str) -> str | None:
    """Markdown, None if there is no row for it."""
    blocks = [table.markdown() for table in tables(results, region)]
    if blocks and region in ("headline", "train_step") and not any(case.on_gpu for case in results.cases):
        blocks.append(f"<sub>{NO_GPU}</sub>")
    return "\n\n".join(blocks) or None


def rewritten(text: str, name: str, regions: Iterable[str], results: Results) -> str:
    """The file called `name`, with its regions made new."""
    for region in regions:
        opening, closing = f"<!-- results:{region} -->\n", "<!-- /results -->"
        before, found, rest = text.partition(opening)
        old, closed, after = rest.partition(closing)
        if not (found and closed) or "<!-- results:" in old:
            raise UserError(f"{name}: no lines {opening.strip()} and {closing} with the table between them")
        new = region_text(results, region)
        if new is not None:
            text = f"{before}{opening}\n{new}\n\n{closing}{after}"
    return text


def readmes(root: Path, results: Results) -> dict[str, tuple[str, str]]:
    """By name, what each README is and what it should be."""
    found = {}
    for name, regions in REGIONS.items():
        try:
            text = (root / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{name}: cannot be read: {error}") from None
        found[name] = (text, rewritten(text, name, regions, results))
    return found


def report(options: argparse.Namespace) -> int:
    results = read(options.root)
    if options.plot:
        from benchmarks.report_plot import plot

        plot(results.cases, options.plot)
    if options.check or options.write:
        stale = {name: new for name, (old, new) in readmes(options.root, results).items() if old != new}
        if options.check:
            if stale:
                print(f"{' and '.join(stale)}: not the tables of the rows; run python -m benchmarks.report --write")
            return int(bool(stale))
        for name, text in stale.items():
            (options.root / name).write_text(text, encoding="utf-8")
            print(f"{name}: written")
    elif not options.plot:
        regions = [region for name in REGIONS if name != "README.md" for region in REGIONS[name]]
        blocks = [table.text() for region in regions for table in tables(results, region)]
        blocks += [] if any(case.on_gpu for case in results.cases) else [NO_GPU]
        print("\n\n".join(blocks))
    print("\n".join(results.unused), end="\n" if results.unused else "", file=sys.stderr)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path, metavar="FILE", help="picture to draw, in the format of its ending")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="make the READMEs' tables new")
    action.add_argument("--check", action="store_true", help="exit code 1 if --write would change a README")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository; default: this one")
    options = parser.parse_args(arguments)
    try:
        return report(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
