"""Tables of everything but training steps: ops, attention, the loader, fine-tuning, patched models, what is counted and
projected."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.classes import CLASSES
from benchmarks.goals import (
    ATTENTION_GOAL,
    ATTENTION_STRETCH,
    COPY_SHARE_GOAL,
    FINETUNE_GOAL,
    FLEX_GOAL,
    LOADER_GOAL,
    PATCH_GOALS,
    SPEEDRUN_GOALS,
    judged,
    judged_below,
    place,
)
from benchmarks.report_step import LABELS, Table, batch, counted, machine, machines, number, run, spread
from benchmarks.rows import GPU, Row, grouped, newest_rows, regularisation
from benchmarks.speedrun import FIRST, TRACKS, Summary, summaries
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
SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


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
