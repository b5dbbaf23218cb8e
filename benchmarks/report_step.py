"""Tables of training steps: of every case, and the headline of the top README."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks.cost import NOTE, dollars, kilowatt_hours
from benchmarks.goals import ATTENTIONS, GOALS, over, place
from benchmarks.rows import COMPILED, PHASES, SETTING, Case, Row, when
from benchmarks.shares import CLASSES
from benchmarks.tables import Columns, Table, batch, counted, machine, number, run, spread

LABELS = {
    "base": "`base` (MAE-LM)",
    "base_cross": "`base_cross` (MAE-LM, cross-attention decoder)",
    "roberta_base": "`roberta_base` (same blocks, [MASK] in the encoder)",
    "base_accumulated": "`base`, an update of 8 micro-batches",
    "base_graph": "`base`, an update as one CUDA graph",
    "hf": "Hugging Face `RobertaForMaskedLM`",
    "hf_eager": "Hugging Face `RobertaForMaskedLM`, eager attention",
    "hf_flash": "Hugging Face `RobertaForMaskedLM`, flash attention",
    "padded": "MAE-LM padded, bias written out",
}
PEERS = ("hf", "hf_eager", "hf_flash", "padded")
OVER = ("hf", "hf_compiled", "padded", "roberta_base")  # whom the tables compare with
MORE = "Equal losses on equal weights come first; all settings: [benchmarks/](benchmarks/README.md)."
NO_GPU = "No row was measured on a GPU."


def label(case: Case, row: Row) -> str:
    kind = row["model"].removesuffix(COMPILED)
    words = [LABELS.get(kind, f"`{kind}`")]
    words += ["torch.compile"] if kind != row["model"] else []
    words += ["no relative bias"] if row["bias"] != case.bias else []
    words += [f"dropout {row['dropout']:g}"] if row["dropout"] != case.dropout else []
    return ", ".join(words)


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

    def ratio(other: str) -> Callable[[Row], str]:
        return lambda row: "1" if row["model"] == other else spread(over(row, other))

    def goals(row: Row) -> str:
        return "; ".join(goal.verdict(row) for goal in GOALS if goal.applies(row, case.dropout, case.bias))

    def cpu_ratio(row: Row) -> str:
        return "-" if row["model"] in ATTENTIONS["hf"] else spread(over(row, "hf", "cpu_ratios"))

    def energy(row: Row) -> str:
        joules = row["joules_per_mtoken"]
        return "-" if joules is None else f"{kilowatt_hours(joules):.2f}"

    first = case.shared
    title = (
        f"{first['device']}, {first['precision']}, {batch(first)}, {first['rate']:.0%} masked, {case.regularisation}"
    )
    speed: Columns = {
        "model": lambda row: label(case, row),
        "tokens/s": lambda row: spread(row["tokens_per_s"], ",.0f"),
        **{f"over {other}": ratio(other) for other in OVER},
        "over hf, CPU seconds": cpu_ratio,
        "MFU": lambda row: number(row["mfu"], ".1%"),
        "peak MB": lambda row: number(row["peak_memory_mb"], ",.0f"),
        "J per 1M tokens": lambda row: number(row["joules_per_mtoken"], ",.0f"),
        "$ per 1B tokens": lambda row: number(dollars(row["device"], row["tokens_per_s"]["median"]), ".2f"),
        "kWh per 1B tokens": energy,
        "recompiles": lambda row: number(row["recompiles"], "g"),
        "goal": goals,
    }
    skipped = [f"Not run: {name}, {row['skipped']}." for name, row in case.rows.items() if row["skipped"] is not None]
    timed = case.timed.values()
    priced = [f"Prices: {NOTE}."] if case.on_gpu else []
    yield Table(title, timed, speed, [conditions(case), *priced, *skipped])

    def ms(phase: str) -> Callable[[Row], str]:
        return lambda row: f"{1000 * row['seconds'][phase]:,.1f}" if phase in (row["seconds"] or {}) else "-"

    def share(kind: str) -> Callable[[Row], str]:
        return lambda row: number((row["kernels"] or {}).get(kind), ".0%")

    parts: Columns = {
        "where a step's time goes": speed["model"],
        **{f"{phase} ms": ms(phase) for phase in PHASES},
        **{kind: share(kind) for kind in CLASSES},
    }
    table = Table("", timed, parts)
    if len(table.header) > 1:
        yield table


def is_quiet(row: Row) -> bool:
    """Whether a CPU had no more to do than the benchmark: what was timed beside other work is no headline."""
    return place(row) == "gpu" or bool(row["load"] <= row["threads"] + 0.5)


def headline_tables(cases: Sequence[Case]) -> Iterator[Table]:
    """Of each GPU and of one CPU the newest quiet case with the paper's dropout and bias, and the one alike without
    both, if that was quiet too; in bf16 if there is one, in which peers are fastest as well."""
    settings = {case.setting: case for case in cases}
    newest: dict[str, Case] = {}
    for case in sorted(cases, key=lambda case: (case.shared["precision"] == "bf16", when(case.shared))):
        row = case.shared
        setting = (case.dropout, case.bias, row["seq"], row["rate"], row["lengths"])
        if setting == (0.1, "t5", 512, 0.15, "full") and is_quiet(row):
            newest[row["device"] if case.on_gpu else "cpu"] = case
    for _, case in sorted(newest.items(), key=lambda item: (not item[1].on_gpu, item[0])):
        plain = settings.get((*(case.shared[name] for name in SETTING), -0.0, "none"))
        yield headline(case, plain if plain and is_quiet(plain.shared) else None)


def headline(case: Case, plain: Case | None) -> Table:
    """Ratios are over the faster of Hugging Face's attentions. plain: without dropout and bias."""
    theirs = [name for name in ATTENTIONS["hf"] if name in case.timed]
    best = max(theirs, key=lambda name: float(case.timed[name]["tokens_per_s"]["median"]), default="")

    def ratio(row: Row) -> str:
        if row["model"] == best:
            return "1"
        ours = over(row, "hf")
        return f"**{ours['median']:.2f}x** [{ours['q1']:.2f}, {ours['q3']:.2f}]" if ours else "-"

    def plain_ratio(row: Row) -> str:
        bare = plain.timed.get(row["model"]) if plain and row["model"] not in ATTENTIONS["hf"] else None
        return spread(over(bare, "hf") if bare else None)

    def gigabytes(row: Row) -> str:
        return "-" if row["peak_memory_mb"] is None else f"{row['peak_memory_mb'] / 1024:.1f} GB"

    columns: Columns = {
        f"one training step, sequences of 512, {case.shared['device']}": lambda row: label(case, row),
        "tokens/s": lambda row: spread(row["tokens_per_s"], ",.0f"),
        "over Hugging Face": ratio,
        "peak memory": gigabytes,
        "over Hugging Face without dropout and bias": plain_ratio,
    }
    notes = [conditions(case), MORE]
    if plain:
        notes.insert(1, f"Last column: dropout 0, no bias, {run(plain.shared)}, load {plain.shared['load']}.")
    return Table("", case.timed.values(), columns, notes)
