"""`maelm-fast prompt TASK... --model DIR --data DIR --out OUT`: zero-shot and few-shot results, as the paper's Table 7.

Started again, by hand or beside itself, the command goes on with what is not finished; see
maelm_fast/finetuning/prompting/run.py for the files.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maelm_fast.cli.common import OneLineParser
from maelm_fast.cli.sweep import parse_model
from maelm_fast.config import require
from maelm_fast.errors import UserError
from maelm_fast.finetuning import tasks
from maelm_fast.finetuning.examples import Examples, read_task
from maelm_fast.finetuning.metrics import require_scikit_learn
from maelm_fast.finetuning.tasks import Task
from maelm_fast.paper.printed import TABLE_7
from maelm_fast.paper.prompting.fewshot import (
    GRID_BATCH_SIZES,
    GRID_LRS,
    SPLIT_SEEDS,
    FewShotConfig,
    base_config,
)
from maelm_fast.paper.prompting.masked_lm import load_masked_lm
from maelm_fast.paper.prompting.report import DATA, REPORT, write_report
from maelm_fast.paper.prompting.run import MODES, Mode, Plan, Question, check, engine_of, make_question, run_plan
from maelm_fast.paper.prompting.templates import TEMPLATES, template_for
from maelm_fast.paper.prompting.tokens import Prompts, label_ids, shown
from maelm_fast.paper.sweep_report import PrintedRow
from maelm_fast.stop import Stopped


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    require(bool(options.show) or bool(options.out), "--out is needed: a directory for results")
    require_scikit_learn()
    plan = _plan(options)
    if options.show:
        _show(plan, options.show)
        return 0
    about = check(plan)
    out, printed = Path(options.out), {mode: _printed(mode) for mode in plan.modes}
    stopped = None
    try:
        run_plan(plan, out, _progress())
    except Stopped as stop:
        stopped = stop
    print("\n" + write_report(plan, out, about, printed) + "\n")
    print(f"{out / REPORT}, {out / DATA}")
    if stopped is not None:
        print("stopped; the same command goes on")
        raise stopped
    return 0


def _progress(seconds: float = 10.0) -> Callable[[dict[str, Any]], None]:
    last = time.monotonic()

    def watch(row: dict[str, Any]) -> None:
        nonlocal last
        if row["kind"] == "train" and time.monotonic() - last >= seconds:
            last = time.monotonic()
            print(f"  update {row['step']:,} of {row['steps']:,}, {row['examples_per_s']:.1f} examples/s", flush=True)

    return watch


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="maelm-fast prompt",
        description="Asks pretrained networks, decoder and head included, GLUE's tasks as clozes (label words at "
        "[MASK]): without training, or after training on a few examples per label; and, to compare, a classification "
        "head on the encoder with the same few examples. Table 7 of the paper; templates and settings of Gao et al. "
        "(2021).",
        epilog="Exit code: 0; 2 for bad input; 143 or 130 if stopped by SIGTERM or SIGINT.",
    )
    add = parser.add_argument
    add("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TEMPLATES)}; 'glue' is all of them")
    add("--model", action="append", required=True, metavar="[LABEL=]DIR[@STEP]", help="a run directory of ours (newest "
        "checkpoint, or STEP's) or a Hugging Face masked language model; may be given again: a row each")  # fmt: skip
    add("--data", required=True, metavar="DIR", help="a directory with TASK/ or its files in it, or hub")
    add("--out", metavar="OUT", help=f"{REPORT}, {DATA}, predictions, and the ledger by which the command goes on")
    add("--mode", default="all", metavar="MODE[,MODE]", help=f"of {', '.join(MODES)}, or all (default)")
    add("--show", type=int, metavar="N", help="print the prompts of N test examples as the model sees them, and stop")
    add("--template", metavar="TEXT", help="of the one TASK, for example '{1} It was {mask}.'; {1-}: without its last "
        "punctuation mark, {2l}: first letter in lower case")  # fmt: skip
    add("--label-words", metavar="A,B", help="of the one TASK, in the order of its classes; a regression task's are "
        "those of its low and its high end")  # fmt: skip
    few, defaults = parser.add_argument_group("few-shot"), FewShotConfig()
    few.add_argument("--shots", type=int, default=defaults.shots, metavar="K",
                     help="examples per label, and as many others to choose by (default: 16)")  # fmt: skip
    seeds = ", ".join(map(str, SPLIT_SEEDS))
    few.add_argument("--splits", type=int, default=len(SPLIT_SEEDS), metavar="N",
                     help=f"draws, with seeds {seeds}, 101, 102, ... (default: 5)")  # fmt: skip
    few.add_argument("--lr", metavar="X[,X]", help="learning rates, each tried on every draw (default: 1e-5)")
    few.add_argument("--batch-size", metavar="N[,N]", help="likewise (default: 8)")
    rates, sizes = ", ".join(f"{lr:g}" for lr in GRID_LRS), ", ".join(map(str, GRID_BATCH_SIZES))
    few.add_argument("--grid", action="store_true", help=f"Gao et al.'s: learning rates {rates}, batches {sizes}")
    few.add_argument("--steps", type=int, default=defaults.steps, help="updates (default: 1000)")
    few.add_argument("--evaluate-every", type=int, default=defaults.evaluate_every, metavar="N",
                     help="updates between evaluations on the examples to choose by (default: 100)")  # fmt: skip
    few.add_argument("--dropout", type=float, default=0.1, help="(default: 0.1)")
    add("--max-length", type=int, default=512, help="tokens of an input; a longer one's texts are cut, its template "
        "stays (default: 512, or what the model takes)")  # fmt: skip
    add("--limit", type=int, metavar="N", help="test examples per split: a fixed pseudo-random subset")
    add("--engine", choices=("auto", "packed", "transformers"), default="auto", help="for Hugging Face directories: "
        "their own model (auto), or our kernels (packed)")  # fmt: skip
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--precision", choices=("auto", "bf16", "fp32"), default="auto")
    add("--train", nargs="+", action="extend", default=[], metavar="FILE", help="of the one TASK, if not DIR/train.*")
    add("--validation", nargs="+", action="extend", default=[], metavar="FILE", help="of the one TASK: the test")
    own = parser.add_argument_group("a task of your own, instead of TASK, with --template and --label-words")
    own.add_argument("--task", choices=("classification", "regression"))
    own.add_argument("--text-columns", metavar="A[,B]")
    own.add_argument("--label-column", metavar="NAME")
    return parser


def _plan(options: argparse.Namespace) -> Plan:
    for name in ("show", "limit"):
        value = getattr(options, name)
        require(value is None or value >= 1, f"--{name} must be at least 1, not {value}")
    require(options.splits >= 1, f"--splits must be at least 1, not {options.splits}")
    modes = _modes(options.mode)
    chosen = _tasks(options)
    few = FewShotConfig(
        shots=options.shots,
        steps=options.steps,
        evaluate_every=options.evaluate_every,
        **_cells(options),
    )
    base = base_config(
        dropout=options.dropout, max_length=options.max_length, device=options.device, precision=options.precision
    )
    models = tuple(parse_model(text) for text in options.model)
    seeds = (*SPLIT_SEEDS, *range(101, 101 + options.splits))[: options.splits]
    questions = tuple(_question(task, options) for task in chosen)
    return Plan(models, questions, modes, few, seeds, base, options.engine)


def _modes(text: str) -> tuple[Mode, ...]:
    names = MODES if text == "all" else tuple(text.split(","))
    for name in names:
        require(name in MODES, f"unknown --mode '{name}': use {', '.join(MODES)}, or all")
    return tuple(mode for mode in MODES if mode in names)


def _tasks(options: argparse.Namespace) -> list[Task]:
    own = (options.task, options.text_columns, options.label_column)
    if any(own):
        require(not options.tasks, "a task by name and --task exclude each other")
        require(all(own), "a task of your own needs --task, --text-columns and --label-column")
        return [tasks.custom(options.task, options.text_columns.split(","), options.label_column)]
    require(bool(options.tasks), f"name a task: {', '.join(TEMPLATES)}, or 'glue' for all of these")
    names = list(dict.fromkeys(n for name in options.tasks for n in (TEMPLATES if name == "glue" else (name,))))
    found = [tasks.get(name) for name in names]
    for option in ("template", "label_words", "train", "validation"):
        require(
            len(found) == 1 or not getattr(options, option),
            f"--{option.replace('_', '-')} is for one task: name one task",
        )
    return found


def _cells(options: argparse.Namespace) -> dict[str, Any]:
    require(
        not (options.grid and (options.lr or options.batch_size)),
        "--grid is a choice of learning rates and batch sizes: leave out --lr and --batch-size",
    )
    if options.grid:
        return {"lrs": GRID_LRS, "batch_sizes": GRID_BATCH_SIZES}
    cells: dict[str, Any] = {}
    if options.lr:
        cells["lrs"] = _numbers("--lr", options.lr, float)
    if options.batch_size:
        cells["batch_sizes"] = _numbers("--batch-size", options.batch_size, int)
    return cells


def _numbers(option: str, text: str, kind: type) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"{option} takes numbers with commas between them, not '{text}'") from None


def _question(task: Task, options: argparse.Namespace) -> Question:
    words = options.label_words.split(",") if options.label_words else None
    if task.labels or task.kind != "classification":
        template_for(task, options.template, words)  # before the data is read, which may take long
    data = read_task(task, options.data, options.train, options.validation)
    return make_question(data, template_for(data.task, options.template, words), options.limit)


def _printed(mode: Mode) -> list[PrintedRow]:
    rows = TABLE_7.groups[MODES.index(mode)][1]
    return [(row[0], dict(zip(TABLE_7.columns[1:], row[1:], strict=True))) for row in rows]


def _show(plan: Plan, count: int) -> None:
    """Per model and task the tokens, special ones included, of the first test examples."""
    for model in plan.models:
        lm = load_masked_lm(model.path, step=model.step, engine=engine_of(plan, model))
        for question in plan.questions:
            task, template = question.data.task, question.template
            ids = label_ids(lm.tokenizer, template, len(task.text_columns))
            words = zip(template.words, shown(lm.tokenizer, ids).split(), strict=True)
            print(f"{model.label}, {task.title}: {template.text}   {', '.join(f'{n}: {word}' for n, word in words)}")
            examples = next(iter(question.data.validation.values()))
            assert isinstance(examples, Examples)
            few = examples.take(range(min(count, len(examples))))
            longest = min(plan.base.max_length, lm.max_length)
            prompts = Prompts(lm.tokenizer, template).encode(few.texts, longest)
            for row, label in zip(prompts.ids, few.labels, strict=True):
                name = task.labels[label] if task.kind == "classification" else f"{label:g}"
                print(f"  {name}: {shown(lm.tokenizer, row)}")
