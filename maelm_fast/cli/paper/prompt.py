"""`maelm-fast paper prompt TASK... --model DIR --data DIR --out OUT`: zero-shot and few-shot, as Table 7.

Started again, by hand or beside itself, the command resumes what is not finished; see
maelm_fast/paper/prompting/run.py for the files.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from maelm_fast.cli.common import option, parse
from maelm_fast.cli.finetune import TaskOptions
from maelm_fast.cli.paper.sweep import parse_model
from maelm_fast.config import require
from maelm_fast.encoders import Engine
from maelm_fast.errors import UserError
from maelm_fast.finetuning.config import FinetuneConfig
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
from maelm_fast.paper.prompting.plan import MODES, Mode, Plan, Question, make_question
from maelm_fast.paper.prompting.report import REPORT, write_report
from maelm_fast.paper.prompting.run import check, run_plan
from maelm_fast.paper.prompting.templates import TEMPLATES, Prompts, label_ids, shown, template_for
from maelm_fast.paper.sweep_report import PrintedRow
from maelm_fast.paper.trials import load
from maelm_fast.reporting import RESULTS
from maelm_fast.stop import Stopped

EXAMPLES = """
    maelm-fast paper prompt sst2 mrpc --model runs/base --data glue/ --out prompts
    maelm-fast paper prompt sst2 --model runs/base --data glue/ --show 3
    maelm-fast paper prompt glue --model runs/base --model runs/roberta_base --data glue/ --out prompts --mode zero-shot
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Asks pretrained networks, decoder and head included, GLUE's tasks as clozes (label words at [MASK]): without
    training, or after training on a few examples per label; and, to compare, a classification head on the encoder with
    the same few examples. Table 7 of the paper; templates and settings of Gao et al. (2021).

    Exit code: 0; 2 for bad input; 143 or 130 if stopped by SIGTERM or SIGINT."""

    tasks: tuple[str, ...] = option(
        (), positional=True, metavar="TASK", help=f"Of {', '.join(TEMPLATES)}; 'glue' is all of them."
    )
    model: tuple[str, ...] = option(metavar="[LABEL=]DIR[@STEP]")
    """A run directory of ours (newest checkpoint, or STEP's) or a Hugging Face masked language model; a row each."""
    data: str
    """A directory with TASK/ or its files in it, or hub."""
    out: Path | None = option(None, help=f"{REPORT}, {RESULTS}, predictions, and the ledger to go on from.")
    mode: str = option("all", metavar="MODE[,MODE]", help=f"Of {', '.join(MODES)}, or all.")
    show: int | None = None
    """Print the prompts of so many test examples as the model sees them, and stop."""
    template: str | None = option(None, more=True)
    """Of the one TASK, for example '{1} It was {mask}.'; {1-}: without its last punctuation mark, {2l}: first letter in
    lower case."""
    label_words: str | None = option(None, more=True, metavar="A,B")
    """Of the one TASK, in the order of its classes; a regression task's are those of its low and its high end."""
    shots: int = FewShotConfig.shots
    """Few-shot: examples per label, and as many others to choose by."""
    splits: int = option(
        len(SPLIT_SEEDS),
        more=True,
        help=f"Few-shot: draws, with seeds {', '.join(map(str, SPLIT_SEEDS))}, 101, 102, ...",
    )
    lr: str = option(",".join(map(str, FewShotConfig.lrs)), metavar="X[,X]")
    """Few-shot: learning rates, each tried on every draw."""
    batch_size: str = option(",".join(map(str, FewShotConfig.batch_sizes)), metavar="N[,N]")
    """Few-shot: likewise."""
    grid: bool = option(
        False,
        more=True,
        help="Few-shot: Gao et al.'s grid: learning rates "
        f"{', '.join(f'{lr:g}' for lr in GRID_LRS)}, batches {', '.join(map(str, GRID_BATCH_SIZES))}.",
    )
    steps: int = option(FewShotConfig.steps, more=True)
    """Few-shot: optimiser updates."""
    evaluate_every: int = option(FewShotConfig.evaluate_every, more=True)
    """Few-shot: steps between evaluations on the examples to choose by."""
    dropout: float = option(FinetuneConfig.dropout, more=True)
    """Few-shot."""
    max_length: int = option(512, more=True)
    """Tokens of an input; a longer one's texts are cut, its template stays."""
    limit: int | None = None
    """Test examples per split: a fixed pseudo-random subset."""
    engine: Engine = option("auto", more=True)
    """For Hugging Face directories: their own model (auto), or our kernels (packed)."""
    device: Literal["auto", "cpu", "cuda"] = option("auto", more=True)
    precision: Literal["auto", "bf16", "fp32"] = option("auto", more=True)


def main(argv: list[str]) -> int:
    options, own = parse("paper prompt", argv, Options, TaskOptions, examples=EXAMPLES)
    require(bool(options.show) or options.out is not None, "--out is needed: a directory for results")
    require_scikit_learn()
    plan = _plan(options, own)
    if options.show:
        _show(plan, options.show)
        return 0
    about = check(plan)
    out, printed = options.out, {mode: _printed(mode) for mode in plan.modes}
    try:
        run_plan(plan, out, _progress())
    except Stopped:
        print(f"\n{write_report(plan, out, about, printed)}\n\n{out / REPORT}, {RESULTS}")
        print("stopped; the same command resumes")
        raise
    print(f"\n{write_report(plan, out, about, printed)}\n\n{out / REPORT}, {RESULTS}")
    return 0


def _progress(seconds: float = 10.0) -> Callable[[dict[str, Any]], None]:
    last = time.monotonic()

    def watch(row: dict[str, Any]) -> None:
        nonlocal last
        if row["kind"] == "train" and time.monotonic() - last >= seconds:
            last = time.monotonic()
            print(f"  step {row['step']:,} of {row['steps']:,}, {row['examples_per_s']:.1f} examples/s", flush=True)

    return watch


def _plan(options: Options, own: TaskOptions) -> Plan:
    for name in ("show", "limit"):
        value = getattr(options, name)
        require(value is None or value >= 1, f"--{name} must be at least 1, not {value}")
    require(options.splits >= 1, f"--splits must be at least 1, not {options.splits}")
    modes = _modes(options.mode)
    chosen = own.chosen(options.tasks, tuple(TEMPLATES))
    for name in ("template", "label_words"):
        of_one = f"--{name.replace('_', '-')} is for one task: name one task"
        require(len(chosen) == 1 or not getattr(options, name), of_one)
    few = FewShotConfig(
        shots=options.shots,
        steps=options.steps,
        evaluate_every=options.evaluate_every,
        **_cells(options),
    )
    base = base_config(
        dropout=options.dropout, max_length=options.max_length, device=options.device, precision=options.precision
    )
    models = tuple(parse_model(text, options.engine) for text in options.model)
    seeds = (*SPLIT_SEEDS, *range(101, 101 + options.splits))[: options.splits]
    questions = tuple(_question(task, options, own) for task in chosen)
    return Plan(models, questions, modes, few, seeds, base)


def _modes(text: str) -> tuple[Mode, ...]:
    names = MODES if text == "all" else tuple(text.split(","))
    for name in names:
        require(name in MODES, f"unknown --mode '{name}': use {', '.join(MODES)}, or all")
    return tuple(mode for mode in MODES if mode in names)


def _cells(options: Options) -> dict[str, Any]:
    if options.grid:
        given = (options.lr, options.batch_size) != (Options.lr, Options.batch_size)
        require(not given, "--grid is a choice of learning rates and batch sizes: leave out --lr and --batch-size")
        return {"lrs": GRID_LRS, "batch_sizes": GRID_BATCH_SIZES}
    sizes = _numbers("--batch-size", options.batch_size, int)
    return {"lrs": _numbers("--lr", options.lr, float), "batch_sizes": sizes}


def _numbers(option: str, text: str, kind: type) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"{option} takes numbers with commas between them, not '{text}'") from None


def _question(task: Task, options: Options, own: TaskOptions) -> Question:
    words = options.label_words.split(",") if options.label_words else None
    if task.labels or task.kind != "classification":
        template_for(task, options.template, words)  # before the data is read, which may take long
    data = read_task(task, options.data, own.train, own.validation)
    return make_question(data, template_for(data.task, options.template, words), options.limit)


def _printed(mode: Mode) -> list[PrintedRow]:
    rows = TABLE_7.groups[MODES.index(mode)][1]
    return [(row[0], dict(zip(TABLE_7.columns[1:], row[1:], strict=True))) for row in rows]


def _show(plan: Plan, count: int) -> None:
    """Per model and task the tokens, special ones included, of the first test examples."""
    for model in plan.models:
        lm = load(model, plan.base)
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
