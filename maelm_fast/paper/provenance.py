"""How an experiment's numbers came about: what is missing, how this scale differs from the paper, runs, tasks, data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from maelm_fast import presets
from maelm_fast.data.token_store import Manifest
from maelm_fast.finetuning.report import task_table
from maelm_fast.finetuning.tables import listed
from maelm_fast.paper.plan import differences
from maelm_fast.paper.results import Results
from maelm_fast.reporting import short_number, table


def missing(results: Results) -> list[str]:
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
            lines.append(f"- Not finished: {cell.title}{what}. The same command resumes.")
    return [*lines, ""] if lines else []


def _without_places(sentence: str, results: Results) -> str:
    """The directories of --tasks by their names alone: the rest says where they were on one machine."""
    found = results.plan.found
    for place in map(Path, found.sources if found is not None else ()):
        if place.is_dir() and place.name:  # not hub, not "."
            sentence = sentence.replace(str(place), place.name)
    return sentence


def differs(results: Results) -> list[str]:
    plan = results.plan
    lines = [*(f"- {note}" for note in plan.experiment.notes)]
    lines.append(f"- Pretraining seeds: {plan.seeds}. The paper gives medians over five seeds of fine-tuning.")
    lines.append("- Corpus: see Data. The paper's are Wikipedia and BookCorpus (16 GB); 160 GB for base++ and large++.")
    lines += [f"- {sentence}" for sentence in _downstream_differs(results)]
    lines.append("")
    for setting in dict.fromkeys(row.setting for row in plan.rows):
        fields = differences(presets.get(setting), plan.mae_lm(setting))
        if fields:
            lines += table(
                [f"MAE-LM, {setting}", "the paper's", "here"],
                ([name, plain(paper), plain(here)] for name, paper, here in fields),
            )
    return lines


def _downstream_differs(results: Results) -> list[str]:
    """How fine-tuning or prompting here differs from the paper's."""
    plan, amount = results.plan, results.plan.scale.downstream
    if plan.found is None:
        return []
    lines = []
    if amount.train_limit or amount.validation_limit:
        lines.append(
            f"At most {amount.train_limit:,} training and {amount.validation_limit:,} validation examples of "
            f"a task, half as many of SQuAD: see Tasks."
        )
    if plan.experiment.use == "prompting":
        few = amount.few
        lines.append(
            f"Few-shot: {few.shots} examples per label, {amount.draws} draws, {few.steps:,} updates, learning "
            f"rates {_numbers(few.lrs)}, batches {_numbers(few.batch_sizes)}. Gao et al.: 16, 5, 1,000, the "
            f"best of 1e-05, 2e-05, 5e-05 and of 2, 4, 8. The draws are not theirs."
        )
        return lines
    for setting in dict.fromkeys(row.setting for row in plan.rows):
        grid = plan.scale.settings[setting].grid
        sizes = ", ".join(f"{task.title} {grid.size(task)}" for task in plan.tasks)
        lines.append(
            f"Fine-tuning, {setting}: grid {grid.name} ({grid.about}); cells: {sizes}; seeds: {amount.seeds}. "
            f"The paper: the best cell of its Tables 4 and 5, 5 seeds."
        )
        alike: dict[str, list[str]] = {}
        for task in plan.tasks:
            fields = ", ".join(f"{name} {_numbers(values)}" for name, values in grid.values(task).items())
            alike.setdefault(fields, []).append(task.title)
        lines += [f"{', '.join(titles)}: {fields}." for fields, titles in alike.items()]
    return lines


def _numbers(values: tuple[Any, ...]) -> str:
    return " or ".join(f"{value:g}" if isinstance(value, float) else plain(value) for value in values)


def runs(results: Results, run_names: dict[str, str]) -> list[str]:
    header = "model|seed|updates|original tokens|training time, s|tokens/s|machine|commit|run".split("|")
    rows = []
    for cell in results.plan.cells:
        if (r := results.pretraining(cell)) is not None:
            commit = (r["commit"] or "unknown")[:10] + ("+" if str(r["commit"]).endswith("+") else "")
            machine = f"{r['device']}, {r['precision']}, {r['threads']} threads, torch {r['torch']}"
            speed = [f"{r['step']:,}", short_number(r["tokens"]), f"{r['seconds']:,.1f}"]
            speed += [f"{r['tokens'] / r['seconds']:,.0f}", machine, commit, f"runs/{run_names[cell.key]}"]
            rows.append([cell.row.title, str(cell.config.seed), *speed])
    note = "Training time leaves out evaluation and saving; the machine may have had other work."
    return [*table(header, rows), note, ""] if rows else []


def tasks(results: Results) -> list[str]:
    """All runs of a plan cut alike, unless their models differ in length."""
    found, truncation = results.plan.found, dict[str, dict[str, Any]]()
    for unit, stage in ((unit, results.stage(cell, unit.stage)) for cell in results.plan.cells for unit in cell.units):
        if stage is not None:
            truncation.setdefault(unit.task, stage.get("truncation") or stage.get("test_truncation") or {})
    return task_table(found.data.values(), truncation) if found is not None else []


def data(manifests: dict[str, Manifest]) -> list[str]:
    header = "store|vocabulary|samples of|training tokens|validation tokens|unigram entropy|text|fingerprint".split("|")
    rows = []
    for path, m in manifests.items():
        tokens = [short_number(m.splits[split].tokens) for split in ("train", "validation")]
        # files without their directory, which says where they were on one machine; the store's manifest has it
        texts = [Path(e["source"]).name if "bytes" in e else str(e["source"]) for e in m.options["inputs"]]
        sizes = [f"{m.vocab_size:,}", f"{m.seq_len} at most", *tokens, f"{m.unigram_nats:.3f} nats"]
        rows.append([Path(path).name, *sizes, listed(texts), m.fingerprint[:12]])
    return table(header, rows)


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
