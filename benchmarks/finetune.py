"""Fine-tuning: examples per second of our loop against Hugging Face Trainer, the same model, data and hyperparameters.

    python -m benchmarks.finetune --data DIR                    # SST-2 as `finetune` reads it
    python -m benchmarks.finetune --model DIR --data DIR        # a RoBERTa or MPNet directory instead of random weights

ours         finetuning.run.train, packed
hf           Trainer with DataCollatorWithPadding: each batch padded to its longest example, examples in random order
hf_grouped   the same with train_sampling_strategy="group_by_length": batches of like length, another order of examples

All start from one directory, which transformers loads as it is, with sdpa attention. Texts are tokenised beforehand
and the development set is looked at afterwards: neither is in the time. Gate: with dropout off the two models, head
included, must give the same logits, or nothing is timed. A round is a whole fine-tuning of each, with its own seed;
contestants take turns. The development results say whether the faster one learns as much: they differ by the order of
the examples, the dropout's bits and the seed of the head.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.measure import Failed, environment, quartiles, ratios, transformers_version
from benchmarks.program import Parser, count, recorded, several, start
from benchmarks.report_ops import TRAINERS
from benchmarks.rows import Row
from maelm_fast import presets
from maelm_fast.config import require
from maelm_fast.data.corpus import embedded_corpus
from maelm_fast.data.tokenizer import train_tokenizer
from maelm_fast.encoders import PackedEncoder, load_encoder, padded, padded_places, seeded
from maelm_fast.export.huggingface import export
from maelm_fast.export.library import quiet, set_dropout
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.examples import Examples, TaskData, read_task
from maelm_fast.finetuning.heads import SequenceModel
from maelm_fast.finetuning.metrics import evaluate
from maelm_fast.finetuning.problem import SentenceProblem, token_batch
from maelm_fast.finetuning.run import device_of, train
from maelm_fast.finetuning.tasks import get
from maelm_fast.training.rundir import LoadedRun, RunRecord, vocabulary_of
from maelm_fast.training.trainer import build_model

GATE = 1e-4  # largest difference of logits, which are of order 1
_TOKENIZER_LINES = 20_000


def write_model(shape: str, out: Path) -> None:
    """A RoBERTa directory with the dimensions of a preset's encoder, random weights and a tokenizer of its own."""
    config = presets.change(presets.as_roberta(presets.get(shape)), model={"relative_bias": "none"})
    lines = [line for document in embedded_corpus() for line in document][:_TOKENIZER_LINES]
    tokenizer = train_tokenizer(lines, config.model.vocab_size, cased=False)
    config = presets.change(config, model={"vocab_size": tokenizer.get_vocab_size()})
    vocabulary = vocabulary_of(tokenizer)
    model = build_model(config, vocabulary).eval()
    record = RunRecord(shape, "", "", None)
    export(LoadedRun(model, tokenizer, vocabulary, config, record, 0), out, "roberta")


@dataclass(frozen=True)
class Outcome:
    """Of one fine-tuning. predictions: of the development examples."""

    examples_per_s: float
    predictions: NDArray[np.int64]


class Comparison:
    """The directory and the task that all contestants share. config: but for the seed."""

    def __init__(self, model: Path, data: TaskData, config: FinetuneConfig) -> None:
        self.path, self.data, self.config = model, data, config
        self.device, self.precision = device_of(config)
        require(data.task.kind == "classification", "only classification tasks are compared")
        encoder = load_encoder(model, engine="packed", dropout=config.dropout)
        assert isinstance(encoder, PackedEncoder)
        self.encoder = encoder
        self.problem = SentenceProblem(data, encoder, config)
        self.validation = next(iter(self.problem.validation.values()))
        examples = next(iter(data.validation.values()))
        assert isinstance(examples, Examples)
        self.labels = examples.labels

    def run(self, name: str, seed: int) -> Outcome:
        return self._ours(seed) if name == "ours" else self._trainer(seed, grouped=name == "hf_grouped")

    def metric(self, outcome: Outcome) -> float:
        return evaluate(self.data.task, outcome.predictions, self.labels)[self.data.task.metric]

    def gate(self) -> float:
        """The largest difference between the two models' logits with the same weights, over 32 examples."""
        ours = SequenceModel(self.encoder, self.data.task.outputs, 0.0, seed=0).to(self.device).eval()
        theirs = self._their_model(0).to(self.device).eval()
        theirs.classifier.dense.load_state_dict(ours.head.dense.state_dict())
        theirs.classifier.out_proj.load_state_dict(ours.head.out.state_dict())
        batch = token_batch(self.validation, np.arange(min(32, len(self.validation)))).to(self.device)
        shape = (len(batch.layout.lengths), batch.layout.max_seqlen)
        places = padded_places(batch.layout)
        ids = padded(batch.ids, places, shape, self.encoder.tokenizer.pad_id)
        mask = padded(torch.ones_like(batch.ids), places, shape, 0)
        with torch.no_grad():
            difference = (ours(batch) - theirs(input_ids=ids, attention_mask=mask).logits).abs().max().item()
        if not difference < GATE:  # no number fails too
            raise Failed(f"gate: the two models differ by {difference:.1e} in their logits: nothing is timed")
        return float(difference)

    def _ours(self, seed: int) -> Outcome:
        config = replace(self.config, seed=seed, evaluations_per_epoch=1)
        result, _, evaluation = train(self.problem, self.encoder, config, keep_best=False)
        # The best evaluation's; with one evaluation an epoch and one epoch it is the last one's.
        names = self.data.task.labels
        found = np.array([names.index(row["prediction"]) for row in evaluation.predictions[: len(self.labels)]])
        return Outcome(result.examples_per_s, found)

    def _their_model(self, seed: int) -> Any:
        from transformers import AutoConfig, AutoModelForSequenceClassification

        config = AutoConfig.from_pretrained(self.path, local_files_only=True)
        set_dropout(self.path, config, self.config.dropout)
        if hasattr(config, "classifier_dropout"):  # MPNet's head has the hidden layers' dropout
            config.classifier_dropout = self.config.dropout
        config.num_labels = self.data.task.outputs
        with seeded(seed), quiet():
            return AutoModelForSequenceClassification.from_pretrained(
                self.path, config=config, dtype=torch.float32, local_files_only=True
            )

    def _trainer(self, seed: int, grouped: bool) -> Outcome:
        from transformers import AutoTokenizer, DataCollatorWithPadding, Trainer, TrainingArguments

        config, steps = self.config, -(-len(self.problem.train) // self.config.batch_size) * self.config.epochs
        tokenizer = AutoTokenizer.from_pretrained(self.path, local_files_only=True)
        assert isinstance(self.data.train, Examples)

        def rows(ids: Sequence[NDArray], labels: NDArray) -> Any:  # a list is dataset enough
            return [{"input_ids": row.tolist(), "labels": int(y)} for row, y in zip(ids, labels, strict=True)]

        with tempfile.TemporaryDirectory() as scratch:
            arguments = TrainingArguments(
                scratch,
                per_device_train_batch_size=config.batch_size,
                num_train_epochs=config.epochs,
                learning_rate=config.lr,
                warmup_steps=int(config.warmup * steps),
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_epsilon=config.eps,
                max_grad_norm=config.clip_norm,
                seed=seed,
                bf16=self.precision == "bf16",
                use_cpu=self.device.type == "cpu",
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                disable_tqdm=True,
                per_device_eval_batch_size=64,
                train_sampling_strategy="group_by_length" if grouped else "random",
            )
            trainer = Trainer(
                self._their_model(seed),
                arguments,
                DataCollatorWithPadding(tokenizer),
                rows(self.problem.train.ids, self.data.train.labels),
                processing_class=tokenizer,
            )
            with contextlib.redirect_stdout(io.StringIO()):
                began = time.perf_counter()
                with quiet():
                    trainer.train()
                seconds = time.perf_counter() - began
                trainer.args.train_sampling_strategy = "random"  # grouping would order the predictions by length too
                logits = trainer.predict(rows(self.validation.ids, self.labels)).predictions
        return Outcome(len(self.problem.train) * config.epochs / seconds, np.asarray(logits).argmax(-1))


def compare(comparison: Comparison, names: Sequence[str], rounds: int) -> Iterator[Row]:
    """A row per contestant."""
    difference = comparison.gate()
    outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
    for seed, name in itertools.product(range(rounds), names):
        outcomes[name].append(one := comparison.run(name, seed))
        print(
            f"  round {seed + 1}: {name}: {one.examples_per_s:,.1f} examples/s, {comparison.metric(one):.1f}",
            flush=True,
        )
    lengths, config = comparison.problem.train.lengths, comparison.config
    speeds = {name: [outcome.examples_per_s for outcome in found] for name, found in outcomes.items()}
    shared = environment(comparison.device.type) | {
        "date": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "transformers": transformers_version(),
        "precision": comparison.precision,
        "task": comparison.data.task.name,
        "model": comparison.path.resolve().name,
        "hidden_size": comparison.encoder.hidden_size,
        "layers": comparison.encoder.config.num_layers,
        "batch": config.batch_size,
        "examples": len(lengths),
        "epochs": config.epochs,
        "dropout": config.dropout,
        "lr": config.lr,
        "mean_length": round(statistics.mean(lengths), 2),
        "longest": max(lengths),
        "rounds": rounds,
        "gate": difference,
        "metric": comparison.data.task.metric,
    }
    for name in names:
        yield shared | {
            "contestant": name,
            "examples_per_s": quartiles(speeds[name]),
            "ratios": ratios(speeds, name),
            "results": [round(comparison.metric(outcome), 2) for outcome in outcomes[name]],
        }


def run(options: argparse.Namespace) -> None:
    names = options.contestants
    require(names[0] == "ours", f"--contestants: {', '.join(TRAINERS)}; ours comes first")
    config = FinetuneConfig(
        lr=options.lr,
        epochs=1,
        batch_size=options.batch,
        dropout=options.dropout,
        device=options.device,
        precision=options.precision,
    )
    data = read_task(get(options.task), options.data, limit=options.examples)
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or Path(scratch) / f"roberta_{options.shape}"
        if options.model is None:
            write_model(options.shape, model)
        recorded("finetune", compare(Comparison(model, data, config), names, options.rounds), options.out)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("finetune", __doc__, rounds=3, device="cpu", precision=True)
    add = parser.add_argument
    add("--shape", default="tiny", help="preset whose encoder's dimensions a model with random weights gets")
    add("--model", type=Path, help="a RoBERTa or MPNet directory instead")
    add("--task", default="sst2")
    add("--data", required=True, help="where the task's files are")
    add("--examples", type=count, default=1600, help="trained on in a round")
    add("--batch", type=count, default=32)
    add("--lr", type=float, default=3e-4)
    add("--dropout", type=float, default=0.1)
    add("--contestants", type=several(*TRAINERS), default=list(TRAINERS))
    return start(parser, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
