"""`maelm-fast paper prompt TASK... --model DIR --data DIR --out OUT`: zero-shot and few-shot, as Table 7.

Started again, by hand or beside itself, the command resumes what is not finished; see
maelm_fast/paper/prompting/run.py for the files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from maelm_fast.cli.common import option, parse
from maelm_fast.cli.finetune import TaskOptions
from maelm_fast.cli.paper.sweep import parse_model
from maelm_fast.config import require
from maelm_fast.encoders import Engine
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


_GAO = [f"Gao et al.'s grid: {' '.join(f'{x:g}' for x in values)}" for values in (GRID_LRS, GRID_BATCH_SIZES)]


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
    mode: tuple[str, ...] = option((), choices=MODES, help=f"Of {', '.join(MODES)} (default: all).")
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
    lr: tuple[float, ...] = option(
        (), help=f"Few-shot: each is tried on every draw (default: {FewShotConfig.lrs[0]:g}; {_GAO[0]})."
    )
    batch_size: tuple[int, ...] = option(
        (), help=f"Few-shot: likewise (default: {FewShotConfig.batch_sizes[0]}; {_GAO[1]})."
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
    about, stopped = check(plan), None
    try:
        run_plan(plan, options.out)
    except Stopped as stop:
        stopped = stop
    print(f"\n{write_report(plan, options.out, about, _printed())}\n\n{options.out / REPORT}, {RESULTS}")
    if stopped is not None:
        print("stopped; the same command resumes")
        raise stopped
    return 0


def _plan(options: Options, own: TaskOptions) -> Plan:
    for name in ("show", "limit"):
        value = getattr(options, name)
        require(value is None or value >= 1, f"--{name} must be at least 1, not {value}")
    require(options.splits >= 1, f"--splits must be at least 1, not {options.splits}")
    chosen = own.chosen(options.tasks, tuple(TEMPLATES))
    for name in ("template", "label_words"):
        of_one = f"--{name.replace('_', '-')} is for one task: name one task"
        require(len(chosen) == 1 or not getattr(options, name), of_one)
    few = FewShotConfig(
        shots=options.shots,
        lrs=options.lr or FewShotConfig.lrs,
        batch_sizes=options.batch_size or FewShotConfig.batch_sizes,
        steps=options.steps,
        evaluate_every=options.evaluate_every,
    )
    base = base_config(
        dropout=options.dropout, max_length=options.max_length, device=options.device, precision=options.precision
    )
    models = tuple(parse_model(text, options.engine) for text in options.model)
    seeds = (*SPLIT_SEEDS, *range(101, 101 + options.splits))[: options.splits]
    questions = tuple(_question(task, options, own) for task in chosen)
    modes = tuple(mode for mode in MODES if mode in (options.mode or MODES))
    return Plan(models, questions, modes, few, seeds, base)


def _question(task: Task, options: Options, own: TaskOptions) -> Question:
    words = options.label_words.split(",") if options.label_words else None
    if task.labels or task.kind != "classification":
        template_for(task, options.template, words)  # before the data is read, which may take long
    data = read_task(task, options.data, own.train, own.validation)
    return make_question(data, template_for(data.task, options.template, words), options.limit)


def _printed() -> dict[Mode, list[PrintedRow]]:
    groups = zip(MODES, TABLE_7.groups, strict=True)
    columns = TABLE_7.columns[1:]
    return {mode: [(row[0], dict(zip(columns, row[1:], strict=True))) for row in rows] for mode, (_, rows) in groups}


def _show(plan: Plan, count: int) -> None:
    """Per model and task the tokens, special ones included, of the first test examples."""
    for model in plan.models:
        lm = load(model, plan.base)
        for question in plan.questions:
            task, template = question.data.task, question.template
            ids = label_ids(lm.tokenizer, template)
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
