"""REPORT.md of an experiment: the paper's values beside ours, what is missing, and how this scale differs.

Over seeds a number is the median, with [least, largest]. Everything in it comes from the ledger and the plan.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from maelm_fast import presets
from maelm_fast.analysis.plots import short_number
from maelm_fast.data.token_store import Manifest
from maelm_fast.finetuning.markdown import NONE, over_seeds, table
from maelm_fast.finetuning.sources import listed
from maelm_fast.paper import printed
from maelm_fast.paper.catalogue import Row
from maelm_fast.paper.plan import differences
from maelm_fast.paper.results import REAL, Results, predicts_all, pretraining_input
from maelm_fast.paper.scores import (
    average_name,
    checkpoints,
    fine_tuned,
    glue_tasks,
    prompted,
    rank_cells,
    ranks_after,
    squad_em,
    task_list,
)

FIGURE = "figure.png"
_MISSING = "missing"
_LAYER_INPUTS = {
    "with_mask": "with [MASK]",
    REAL: "without [MASK]: all tokens real",
    "mask_positions": "[MASK] positions alone",
    "visible": "visible tokens, as in pretraining",
}


def report(results: Results, manifests: dict[str, Manifest], run_names: dict[str, str]) -> str:
    """manifests: of the token stores, by path. run_names: the run directories' names, by the cell's key."""
    plan = results.plan
    lines = []
    if plan.scale.meaningless:
        lines += [f"**Scale {plan.scale.name}: tiny models, hardly trained. This shows that every part runs; the "
                  f"results mean nothing.**", ""]  # fmt: skip
    lines += [f"# {plan.experiment.title}", "", f"Scale `{plan.scale.name}`: {plan.scale.about}.", ""]
    lines += [f"![{plan.experiment.title}]({FIGURE})", ""]
    lines += _RESULTS[plan.experiment.name](results)
    lines += _section("What is missing", _missing(results))
    lines += _section("How this differs from the paper", _differs(results))
    lines += _section("Runs", _runs(results, run_names))
    lines += _section("Tasks", task_list(results))
    lines += _section("Data", _data(manifests))
    return "\n".join(lines).rstrip() + "\n"


def _section(heading: str, lines: list[str]) -> list[str]:
    return [f"## {heading}", "", *lines] if lines else []


# Results, by the form of the paper's figure or table


def _by_layer(results: Results) -> list[str]:
    lines = [
        "0.9-effective rank by layer (0: the embedding output), not centred. The paper's values are only drawn.",
        "",
    ]
    rows = []
    depth = 0
    for row in results.plan.rows:
        for name, label in _LAYER_INPUTS.items():
            seeds = results.layers(row, name) if name in _shown(row) else []
            if seeds:
                depth = len(seeds[0])
                rows.append([row.label, label, *rank_cells(seeds)])
    if not rows:
        return [*lines, "Nothing is measured yet.", ""]
    rows += ranks_after(results) if results.plan.tasks else []
    lines += table(["model", "input", *map(str, range(depth))], rows)
    return lines + _losses(results)


def _shown(row: Row) -> tuple[str, ...]:
    """MAE-LM is not shown [MASK] in the paper's figures."""
    return (REAL, "visible") if not row.variants else ("with_mask", REAL, "mask_positions")


def _losses(results: Results) -> list[str]:
    header = ["model", "validation loss, nats per masked token", "accuracy", "below unigram entropy by"]
    return table(header, ([row.label, *_loss_cells(results, row)] for row in results.plan.rows))


def _loss_cells(results: Results, row: Row) -> list[str]:
    losses, unigram = results.of_row(row, "val_loss"), results.of_row(row, "unigram_nats")
    accuracy = [100 * a for a in results.of_row(row, "val_accuracy")]
    below = [u - loss for u, loss in zip(unigram, losses, strict=True)]
    return [over_seeds(losses, 3), over_seeds(accuracy, 1) + (" %" if accuracy else ""), over_seeds(below, 3)]


def _rank_cells(results: Results, row: Row) -> list[str]:
    """Of the last layer: real tokens, the input of pretraining, and the width."""
    config = results.plan.of_row(row)[0].config
    name = pretraining_input(config)
    own = over_seeds(results.last_layer(row, name), 0) if name else NONE
    return [over_seeds(results.last_layer(row, REAL), 0), own, str(config.model.hidden_size)]


_MEASURED = ("validation loss", "accuracy", "below unigram by", "rank, all tokens real", "rank, input of pretraining",
             "width")  # fmt: skip


def _fig4(results: Results) -> list[str]:
    plan = results.plan
    header, cells = ["delta", "here", *_MEASURED], []
    glue, squad = glue_tasks(results), any(task.kind == "spans" for task in plan.tasks)
    header += [average_name(results)] if glue else []
    header += ["SQuAD EM"] if squad else []
    for row in plan.rows:
        mean = results.average(plan.of_row(row), glue)
        cells.append([row.label, _here(results, row), *_loss_cells(results, row), *_rank_cells(results, row)])
        cells[-1] += [NONE if mean is None else f"{mean:.1f}"] if glue else []
        cells[-1] += [over_seeds(squad_em(results, plan.of_row(row)), 1)] if squad else []
    columns = printed.TABLE_1.columns[1:]
    return [*_explained(), *table(header, cells), *(fine_tuned(results, columns) if plan.tasks else [])]


def _fig3(results: Results) -> list[str]:
    lines = checkpoints(results) if results.plan.tasks else []
    for row in results.plan.rows:
        for cell in results.plan.of_row(row):
            lines += [f"{row.label}, seed {cell.config.seed}:", ""]
            header = ["updates", "original tokens", "training time, s", "validation loss", "rank, all tokens real"]
            lines += table(
                header,
                (
                    [f"{point['step']:,}", short_number(point["tokens"]), f"{point['seconds']:,.1f}",
                     f"{point['val_loss']:.3f}", NONE if point["rank"] is None else str(point["rank"])]
                    for point in results.curve(cell)
                ),
            )  # fmt: skip
    return lines


def _table_2(results: Results) -> list[str]:
    plan, glue = results.plan, glue_tasks(results)
    ours = f"{average_name(results)}, ours" if glue else "GLUE, ours"
    header, cells = ["group", "setting", "here", "GLUE, paper", ours, *_MEASURED], []
    for row in plan.rows:
        mean = results.average(plan.of_row(row), glue)
        score = NONE if mean is None else f"{mean:.1f}"
        cells.append([row.group, row.label, _here(results, row), row.printed, score if glue else _MISSING,
                      *_loss_cells(results, row), *_rank_cells(results, row)])  # fmt: skip
    everything = any(predicts_all(cell.config) for cell in results.plan.cells)
    note = "\\* This model predicts every token from those before it: its loss cannot be compared with the others'."
    lines = [*_explained(), *table(header, cells), *([note, ""] if everything else [])]
    return lines + (fine_tuned(results, printed.TABLE_1.columns[1:-2]) if glue else [])


def _explained() -> list[str]:
    return ["Loss: nats per masked token of the validation split, the same masks for every row of a seed. Rank: "
            "0.9-effective rank of the encoder's last layer.", ""]  # fmt: skip


def _here(results: Results, row: Row) -> str:
    """The row's configuration by the fields that differ from MAE-LM at this scale."""
    plan = results.plan
    changed = differences(plan.mae_lm(row.setting), plan.of_row(row)[0].config)
    fields = [f"{name}={_plain(now)}" for name, _, now in changed]
    if not fields:
        return "MAE-LM" if not row.variants else "as MAE-LM at this scale"
    return ", ".join(fields) + (" \\*" if predicts_all(plan.of_row(row)[0].config) else "")


def _paper_table(results: Results) -> list[str]:
    table_7 = results.plan.experiment.table
    assert table_7 is not None
    lines = []
    for heading, rows in table_7.groups:
        lines += [f"The paper, {heading}:", "", *table(table_7.columns, rows)]
    ours = ([row.group, row.label, _here(results, row), *_loss_cells(results, row), *_rank_cells(results, row)]
            for row in results.plan.rows)  # fmt: skip
    lines += ["Ours. " + _explained()[0], "", *table(["setting", "model", "here", *_MEASURED], ours)]
    columns = table_7.columns[1:]
    lines += ["Ours, in the paper's columns:", ""]
    if results.plan.experiment.use == "prompting" and results.plan.tasks:
        return lines + prompted(results, columns)
    if results.plan.tasks:
        return lines + fine_tuned(results, columns)
    unfilled = ([row.group, row.label, *[_MISSING] * len(columns)] for row in results.plan.rows)
    return lines + table(["setting", *table_7.columns], unfilled)


_RESULTS = {
    "fig1": _by_layer,
    "fig3": _fig3,
    "fig4": _fig4,
    "fig5": _by_layer,
    "fig6": _by_layer,
    "table1": _paper_table,
    "table2": _table_2,
    "table6": _paper_table,
    "table7": _paper_table,
}


# The rest


def _missing(results: Results) -> list[str]:
    plan = results.plan
    lines = [f"- {_without_places(sentence, results)}" for sentence in plan.missing]
    if plan.left_out:
        rows = ", ".join(f"{row.label} ({row.setting})" for row in plan.left_out)
        lines.append(f"- Left out at this scale: {rows}. The paper's setting of those rows is run by --scale full.")
    if plan.not_asked_for:
        lines.append(f"- Not asked for (`--rows`): {'; '.join(row.label for row in plan.not_asked_for)}.")
    lines += [f"- Failed: {cell.title}, {stage}: {error}" for cell, stage, error in results.errors()]
    for one, other in results.equal_losses():
        lines.append(
            f"- Not to be trusted: {one.row.title} and {other.row.title}, seed {one.config.seed}, have the same "
            f"validation loss to the last bit, so what sets them apart had no effect."
        )
    failed = {cell.key for cell, _, _ in results.errors()}
    untrained = {cell.key for cell in results.unfinished(units=False)}
    for cell in results.unfinished():
        if cell.key not in failed:
            done = [results.stage(cell, unit.stage) is not None for unit in cell.units]
            what = f", {sum(done)} of {len(done)} runs on tasks done" if cell.key not in untrained else ""
            lines.append(f"- Not finished: {cell.title}{what}. The same command goes on.")
    return [*lines, ""] if lines else []


def _without_places(sentence: str, results: Results) -> str:
    """The directories of --tasks by their names alone: the rest says where they were on one machine."""
    found = results.plan.found
    for place in map(Path, found.sources if found is not None else ()):
        if place.is_dir() and place.name:  # not hub, not "."
            sentence = sentence.replace(str(place), place.name)
    return sentence


def _differs(results: Results) -> list[str]:
    plan = results.plan
    lines = [*(f"- {note}" for note in plan.experiment.notes)]
    lines.append(f"- Pretraining seeds: {plan.seeds}. The paper gives medians over five seeds of fine-tuning.")
    lines.append("- Corpus: see Data. The paper's are Wikipedia and BookCorpus (16 GB); 160 GB for base++ and large++.")
    lines += [f"- {sentence}" for sentence in _downstream_differs(results)]
    lines.append("")
    for setting in dict.fromkeys(row.setting for row in plan.rows):
        fields = differences(presets.get(setting), plan.mae_lm(setting))
        if fields:
            lines += table([f"MAE-LM, {setting}", "the paper's", "here"],
                           ([name, _plain(paper), _plain(here)] for name, paper, here in fields))  # fmt: skip
    return lines


def _downstream_differs(results: Results) -> list[str]:
    """How fine-tuning or prompting here differs from the paper's."""
    plan, amount = results.plan, results.plan.scale.downstream
    if plan.found is None:
        return []
    lines = []
    if amount.train_limit or amount.validation_limit:
        lines.append(f"At most {amount.train_limit:,} training and {amount.validation_limit:,} validation examples of "
                     f"a task, half as many of SQuAD: see Tasks.")  # fmt: skip
    if plan.experiment.use == "prompting":
        few = amount.few
        lines.append(f"Few-shot: {few.shots} examples per label, {amount.draws} draws, {few.steps:,} updates, learning "
                     f"rates {_numbers(few.lrs)}, batches {_numbers(few.batch_sizes)}. Gao et al.: 16, 5, 1,000, the "
                     f"best of 1e-05, 2e-05, 5e-05 and of 2, 4, 8. The draws are not theirs.")  # fmt: skip
        return lines
    for setting in dict.fromkeys(row.setting for row in plan.rows):
        grid = plan.scale.settings[setting].grid
        sizes = ", ".join(f"{task.title} {grid.size(task)}" for task in plan.tasks)
        lines.append(f"Fine-tuning, {setting}: grid {grid.name} ({grid.about}); cells: {sizes}; seeds: {amount.seeds}. "
                     f"The paper: the best cell of its Tables 4 and 5, 5 seeds.")  # fmt: skip
        alike: dict[str, list[str]] = {}
        for task in plan.tasks:
            fields = ", ".join(f"{name} {_numbers(values)}" for name, values in grid.values(task).items())
            alike.setdefault(fields, []).append(task.title)
        lines += [f"{', '.join(titles)}: {fields}." for fields, titles in alike.items()]
    return lines


def _numbers(values: tuple[Any, ...]) -> str:
    return " or ".join(f"{value:g}" if isinstance(value, float) else _plain(value) for value in values)


def _runs(results: Results, run_names: dict[str, str]) -> list[str]:
    header = ["model", "seed", "updates", "original tokens", "training time, s", "tokens/s", "machine", "commit", "run"]
    rows = []
    for cell in results.plan.cells:
        r = results.pretraining(cell)
        if r is not None:
            machine = f"{r['device']}, {r['precision']}, {r['threads']} threads, torch {r['torch']}"
            rows.append([cell.row.title, str(cell.config.seed), f"{r['step']:,}", short_number(r["tokens"]),
                         f"{r['seconds']:,.1f}", f"{r['tokens'] / r['seconds']:,.0f}", machine,
                         (r["commit"] or "unknown")[:10] + ("+" if str(r["commit"]).endswith("+") else ""),
                         f"runs/{run_names[cell.key]}"])  # fmt: skip
    note = "Training time leaves out evaluation and saving; the machine may have had other work."
    return [*table(header, rows), note, ""] if rows else []


def _data(manifests: dict[str, Manifest]) -> list[str]:
    header = ["store", "vocabulary", "samples of", "training tokens", "validation tokens", "unigram entropy", "text",
              "fingerprint"]  # fmt: skip
    rows = [
        [Path(path).name, f"{m.vocab_size:,}", f"{m.seq_len} at most", short_number(m.splits["train"].tokens),
         short_number(m.splits["validation"].tokens), f"{m.unigram_nats:.3f} nats",
         listed([_source_name(entry) for entry in m.options["inputs"]]), m.fingerprint[:12]]
        for path, m in manifests.items()
    ]  # fmt: skip
    return table(header, rows)


def _source_name(entry: dict[str, Any]) -> str:
    """Without a file's directory, which says where it was on one machine; the store's manifest has it."""
    return Path(entry["source"]).name if "bytes" in entry else str(entry["source"])


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
