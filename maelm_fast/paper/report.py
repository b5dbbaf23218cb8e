"""What an experiment leaves in its directory: REPORT.md, figure.png, and results.csv, the rows that both are made of.

REPORT.md has the paper's values beside ours, what is missing, and how this scale differs. Fine-tuned: medians over all
seeds, of pretraining and of fine-tuning, with [least, largest], at the best evaluation on the development data, as in
the paper. Prompted: mean and standard deviation over the draws, as in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from maelm_fast.data.files import writing
from maelm_fast.data.token_store import Manifest
from maelm_fast.finetuning.tasks import Task
from maelm_fast.paper import printed, provenance
from maelm_fast.paper.catalogue import Row
from maelm_fast.paper.downstream import Prompting, label_words
from maelm_fast.paper.figures import draw
from maelm_fast.paper.plan import differences
from maelm_fast.paper.prompting.run import METRICS, MODES
from maelm_fast.paper.results import (
    RANDOM,
    REAL,
    Results,
    passes,
    predicts_all,
    pretraining_input,
    untrained,
)
from maelm_fast.paper.scores import AVERAGE, Column, column, filled, own_scores
from maelm_fast.reporting import NONE, number, over_draws, over_seeds, short_number, table, where, write_results
from maelm_fast.training.files import write_text

REPORT, FIGURE = "REPORT.md", "figure.png"
_MISSING = "missing"
_LAYER_INPUTS = {
    "with_mask": "with [MASK]",
    REAL: "without [MASK]: all tokens real",
    "mask_positions": "[MASK] positions alone",
    "visible": "visible tokens, as in pretraining",
}
_BASELINES = {
    "majority": "majority class, mean, no answer",
    "mean": "majority class, mean, no answer",
    "no answer": "majority class, mean, no answer",
    "length": "lengths of the texts",
    "overlap": "words the texts share",
    "first sentence": "first sentence",
}


def write_report(results: Results, out: Path, manifests: dict[str, Manifest], run_names: dict[str, str]) -> None:
    """All files of this module's list. manifests: of the token stores, by path. run_names: the run directories' names,
    by the cell's key. Raises UserError if they cannot be written."""
    with writing(out, "the same command resumes"):
        out.mkdir(parents=True, exist_ok=True)
        draw(results, out / FIGURE)
        write_results(out, results.rows)
        write_text(out / REPORT, report(results, manifests, run_names))


def report(results: Results, manifests: dict[str, Manifest], run_names: dict[str, str]) -> str:
    """REPORT.md."""
    plan = results.plan
    lines = []
    if plan.scale.meaningless:
        nothing = "tiny models, hardly trained. This shows that every part runs; the results mean nothing."
        lines += [f"**Scale {plan.scale.name}: {nothing}**", ""]
    lines += [f"# {plan.experiment.title}", "", f"Scale `{plan.scale.name}`: {plan.scale.about}.", ""]
    lines += [f"![{plan.experiment.title}]({FIGURE})", ""]
    lines += _RESULTS.get(plan.experiment.name, _paper_table)(results)
    sections = {
        "What is missing": provenance.missing(results),
        "How this differs from the paper": provenance.differs(results),
        "Runs": provenance.runs(results, run_names),
        "Tasks": provenance.tasks(results),
        "Data": provenance.data(manifests),
    }
    for heading, section in sections.items():
        lines += [f"## {heading}", "", *section] if section else []
    return "\n".join(lines).rstrip() + "\n"


# Pretraining


def _by_layer(results: Results) -> list[str]:
    plan, rows, depth = results.plan, [], 0
    lines = [
        "0.9-effective rank by layer (0: the embedding output), not centred. The paper's values are only drawn.",
        "",
    ]
    for row in plan.rows:  # MAE-LM is not shown [MASK] in the paper's figures
        for name in (REAL, "visible") if not row.variants else ("with_mask", REAL, "mask_positions"):
            if seeds := results.layers(row, name):
                depth = len(seeds[0])
                rows.append([row.label, _LAYER_INPUTS[name], *rank_cells(seeds)])
    if not rows:
        return [*lines, "Nothing is measured yet.", ""]
    for row in plan.rows if plan.tasks else ():  # Figure 5(b)
        for when in ("before fine-tuning", "after fine-tuning"):
            if seeds := results.finetuned_layers(row, plan.tasks[0], when):
                rows.append([row.label, f"{plan.tasks[0].title}'s development inputs, {when}", *rank_cells(seeds)])
    header = ["model", "validation loss, nats per masked token", "accuracy", "below unigram entropy by"]
    losses = table(header, ([row.label, *_losses(results, row)] for row in plan.rows))
    return [*lines, *table(["model", "input", *map(str, range(depth))], rows), *losses]


def rank_cells(seeds: Sequence[Sequence[int]]) -> list[str]:
    """Of every layer the median, and [least, largest] where the seeds differ."""
    cells = []
    for layer in zip(*seeds, strict=True):
        spread = f" [{min(layer)}, {max(layer)}]" if len(set(layer)) > 1 else ""
        cells.append(f"{median(layer):g}{spread}")
    return cells


def _losses(results: Results, row: Row) -> list[str]:
    losses, unigram = results.of_row(row, "val_loss"), results.of_row(row, "unigram_nats")
    accuracy = [100 * a for a in results.of_row(row, "val_accuracy")]
    below = [u - loss for u, loss in zip(unigram, losses, strict=True)]
    return [over_seeds(losses, 3), over_seeds(accuracy) + (" %" if accuracy else ""), over_seeds(below, 3)]


_EXPLAINED = (
    "Loss: nats per masked token of the validation split, the same masks for every row of a seed. Rank: 0.9-effective "
    "rank of the encoder's last layer."
)
_MEASURED = (
    *("validation loss", "accuracy", "below unigram by"),
    *("rank, all tokens real", "rank, input of pretraining", "width"),
)


def _measured(results: Results, row: Row) -> list[str]:
    """Losses; the ranks of the last layer on real tokens and on the input of pretraining; the width."""
    config = results.plan.of_row(row)[0].config
    name = pretraining_input(config)
    own = over_seeds(results.last_layer(row, name), 0) if name else NONE
    real = over_seeds(results.last_layer(row, REAL), 0)
    return [*_losses(results, row), real, own, str(config.model.hidden_size)]


def _here(results: Results, row: Row) -> str:
    """The row's configuration by the fields that differ from MAE-LM at this scale."""
    config = results.plan.of_row(row)[0].config
    changed = differences(results.plan.mae_lm(row.setting), config)
    fields = [f"{name}={provenance.plain(now)}" for name, _, now in changed]
    if not fields:
        return "MAE-LM" if not row.variants else "as MAE-LM at this scale"
    return ", ".join(fields) + (" \\*" if predicts_all(config) else "")


# The figures and tables with more than that


def _fig4(results: Results) -> list[str]:
    plan, squad = results.plan, column("SQuAD EM", results.plan.tasks)
    columns = [Column(AVERAGE, None)] if results.glue else []
    columns += [squad] if squad.task else []
    scores = filled(results.finetuned, columns, [row.title for row in plan.rows], over_seeds, results.means())
    header = ["delta", "here", *_MEASURED]
    header += [results.average_name if one.header == AVERAGE else one.header for one in columns]
    body = (
        [row.label, _here(results, row), *_measured(results, row), *cells]
        for row, cells in zip(plan.rows, scores, strict=True)
    )
    return [_EXPLAINED, "", *table(header, body), *_fine_tuned(results, printed.TABLE_1.columns[1:])]


def _table_2(results: Results) -> list[str]:
    plan, glue, average = results.plan, results.glue, results.means()
    ours = f"{results.average_name}, ours" if glue else "GLUE, ours"
    header, body = ["group", "setting", "here", "GLUE, paper", ours, *_MEASURED], []
    for row in plan.rows:
        score = number(average.get(row.title)) if glue else _MISSING
        body.append([row.group, row.label, _here(results, row), row.printed, score, *_measured(results, row)])
    everything = any(predicts_all(cell.config) for cell in plan.cells)
    note = "\\* This model predicts every token from those before it: its loss cannot be compared with the others'."
    lines = [_EXPLAINED, "", *table(header, body), *([note, ""] if everything else [])]
    return lines + (_fine_tuned(results, printed.TABLE_1.columns[1:-2]) if glue else [])


def _paper_table(results: Results) -> list[str]:
    plan, lines = results.plan, []
    paper = plan.experiment.table
    assert paper is not None
    for heading, rows in paper.groups:
        lines += [f"The paper, {heading}:", "", *table(paper.columns, rows)]
    ours = ([row.group, row.label, _here(results, row), *_measured(results, row)] for row in plan.rows)
    lines += [f"Ours. {_EXPLAINED}", "", *table(["setting", "model", "here", *_MEASURED], ours)]
    lines += ["Ours, in the paper's columns:", ""]
    headers = paper.columns[1:]
    if not plan.tasks:
        unfilled = ([row.group, row.label, *[_MISSING] * len(headers)] for row in plan.rows)
        return lines + table(["setting", *paper.columns], unfilled)
    return lines + (_prompted if plan.experiment.use == "prompting" else _fine_tuned)(results, headers)


def _fine_tuned(results: Results, headers: Sequence[str]) -> list[str]:
    """A table in the paper's columns: the models, the untrained encoder, what needs no encoder."""
    plan = results.plan
    if not plan.tasks:
        return []
    columns = [column(header, plan.tasks) for header in headers]
    who = [(row.group, row.label, row.title) for row in plan.rows]
    who += [(cell.row.group or cell.row.setting, RANDOM, untrained(cell)) for cell in plan.controls]
    cells = filled(results.finetuned, columns, [title for *_, title in who], over_seeds, results.means())
    body = [[group, label, *line] for (group, label, _), line in zip(who, cells, strict=True)]
    explained = (
        "Medians over the seeds, [least, largest], on development data, at the best of the evaluations during "
        "fine-tuning; accuracy, but Matthews' correlation of CoLA and Spearman's of STS-B; SQuAD 2.0 at the "
        "threshold that is best on the same data."
    )
    return [explained, "", *table(_header(results, headers), [*body, *_without_encoder(results, columns)])]


def _header(results: Results, headers: Sequence[str]) -> list[str]:
    average = results.average_name if results.glue else AVERAGE
    return ["setting", "model", *(average if header == AVERAGE else header for header in headers)]


def _without_encoder(results: Results, columns: Sequence[Column]) -> list[list[str]]:
    rows = where(results.rows, kind="baseline")
    names = list(dict.fromkeys(_BASELINES.values()))
    cells = filled(rows.assign(model=rows["model"].map(_BASELINES)), columns, names, lambda values: number(values[0]))
    lines = zip(names, cells, strict=True)
    return [["no encoder", name, *line] for name, line in lines if any(cell != NONE for cell in line)]


def _prompted(results: Results, headers: Sequence[str]) -> list[str]:
    """Table 7's three blocks."""
    plan, shots = results.plan, results.plan.scale.downstream.few.shots
    columns = [
        column(header, [replace(task, metric=METRICS.get(task.name, task.metric)) for task in plan.tasks])
        for header in headers
    ]
    header = _header(results, headers)
    lines = [
        "Mean over the draws of examples, standard deviation in brackets, on development data; F1 of MRPC and "
        "QQP, Pearson's correlation of STS-B, Matthews' of CoLA, accuracy of the others (as Gao et al. 2021).",
        "",
    ]
    titles = {
        "zero-shot": "zero-shot prompting",
        "head": f"head-based few-shot fine-tuning, {shots} examples per label",
        "prompt": f"prompt-based few-shot fine-tuning, {shots} examples per label",
    }
    for mode in MODES:
        rows, models = where(results.rows, kind=mode), [row.title for row in plan.rows]
        cells = filled(rows, columns, models, over_draws, results.means(mode))
        body = ([row.group, row.label, *line] for row, line in zip(plan.rows, cells, strict=True))
        lines += [f"Ours, {titles[mode]}:", "", *table(header, body)]
    lines += ["Without an encoder, from all training examples:", ""]
    lines += table(header, _without_encoder(results, columns))
    for task in plan.tasks:
        used, paper = _label_words(results, task), label_words(task.name)[0]
        if used and used != paper:
            lines.append(f"- {task.title}: label words {'/'.join(used)}; {'/'.join(paper)} are not single tokens here.")
    return [*lines, ""]


def _label_words(results: Results, task: Task) -> tuple[str, ...]:
    """Those that the first model was asked with."""
    for cell in results.plan.cells:
        for unit in cell.units:
            zero_shot = isinstance(unit, Prompting) and (unit.task, unit.mode) == (task.name, "zero-shot")
            if zero_shot and (found := results.stage(cell, unit.stage)):
                return tuple(found["label_words"])
    return ()


def _fig3(results: Results) -> list[str]:
    lines = checkpoints(results) if results.plan.tasks else []
    header = ["updates", "original tokens", "training time, s", "validation loss", "rank, all tokens real"]
    for cell in results.plan.cells:
        body = (
            [
                f"{at['step']:,}",
                short_number(at["tokens"]),
                number(at["seconds"]),
                number(at["val_loss"], 3),
                number(at["rank"], 0),
            ]
            for at in results.curve(cell)
        )
        lines += [f"{cell.row.label}, seed {cell.config.seed}:", "", *table(header, body)]
    return lines


def checkpoints(results: Results) -> list[str]:
    """Figure 3: the models' checkpoints after fine-tuning, and where the last passes the first one's end."""
    task, rows = results.plan.tasks[0], results.plan.rows
    curves = [{point["step"]: point for point in results.accuracy_curve(row, task)} for row in rows]
    tokens = {step: point["tokens"] for curve in curves for step, point in curve.items()}
    if not tokens:
        return [f"No checkpoint is fine-tuned on {task.title} yet.", ""]
    header = ["updates", "original tokens"]
    for row in rows:
        header += [f"{row.label}: training time, s", f"{row.label}: {task.title} {task.metric}"]
    body = []
    for step in sorted(tokens):
        body.append([f"{step:,}", short_number(tokens[step])])
        for curve in curves:
            point = curve.get(step)
            body[-1] += [number(point["seconds"]), over_seeds(point["seeds"])] if point else [NONE, NONE]
    of = f"{task.metric} on {task.validation[0]}, median over the seeds, [least, largest]."
    lines = [f"After fine-tuning every checkpoint on {task.title}: {of}", "", *table(header, body)]
    return [*lines, *_passing(results, task), *_without_pretraining(results, task)]


def _passing(results: Results, task: Task) -> list[str]:
    mlm, mae_lm = results.plan.rows
    final = results.end(mlm, task)
    if final is None or results.end(mae_lm, task) is None:
        return []
    curve = results.accuracy_curve(mae_lm, task)
    what = f"{mlm.label}'s last {task.metric}, {final['score']:.1f}"
    tokens, seconds = (passes(curve, final["score"], key) for key in ("tokens", "seconds"))
    if tokens is None or seconds is None:
        return [f"{mae_lm.label} does not reach {what}, at any checkpoint here.", ""]
    return [
        f"{mae_lm.label} reaches {what}, after {short_number(tokens)} tokens and {seconds:,.1f} s of training, by "
        f"straight lines between the checkpoints; {mlm.label} had {short_number(final['tokens'])} tokens and "
        f"{final['seconds']:,.1f} s.",
        "",
    ]


def _without_pretraining(results: Results, task: Task) -> list[str]:
    parts = [f"{RANDOM} {over_seeds(results.control(cell, task))}" for cell in results.plan.controls]
    floors = own_scores(where(results.rows, kind="baseline"), task)
    parts += [f"{name} {number(value)}" for name, value in zip(floors["model"], floors["value"], strict=True)]
    return [f"Without pretraining: {', '.join(parts)}.", ""] if parts else []


_RESULTS = {"fig1": _by_layer, "fig3": _fig3, "fig4": _fig4, "fig5": _by_layer, "fig6": _by_layer, "table2": _table_2}
