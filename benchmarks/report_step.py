"""Tables of training steps, and the words and numbers that all tables are made of. A table is made once, and printed
as text or as markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.classes import CLASSES
from benchmarks.goals import (
    ATTENTIONS,
    GOALS,
    over,
    place,
)
from benchmarks.rows import (
    COMPILED,
    PHASES,
    SETTING,
    Case,
    Row,
    when,
)
from maelm_fast import reporting

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
PEERS = ("hf", "hf_eager", "hf_flash", "modernbert", "padded")
OVER = ("hf", "hf_compiled", "padded", "roberta_base")  # whom the tables compare with
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
