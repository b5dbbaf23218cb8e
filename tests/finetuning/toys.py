"""Tasks that can be learnt in seconds, and a run directory to learn them with, untrained."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from maelm_fast import presets
from maelm_fast.data.tokenizer import train_tokenizer
from maelm_fast.encoders import PackedEncoder
from maelm_fast.finetuning import tasks
from maelm_fast.finetuning.examples import Examples, TaskData
from maelm_fast.model.maelm import MaeLm
from maelm_fast.text import TextTokenizer
from maelm_fast.training.rundir import LoadedRun, RunRecord, vocabulary_of
from tests.finetuning.small import run_directory

FILLERS = "red green blue pink grey brown black white".split()
Row = tuple[tuple[str, ...], Any]


def order_rows(draw: random.Random) -> Row:
    """Which of two words comes first; the words of both classes are the same."""
    words = [*draw.sample(FILLERS, 4), "alpha", "omega"]
    draw.shuffle(words)
    return (" ".join(words),), int(words.index("alpha") < words.index("omega"))


def content_rows(draw: random.Random) -> Row:
    label = draw.randrange(2)
    words = [*draw.choices(FILLERS, k=draw.randint(2, 9)), ("bad", "good")[label]]
    draw.shuffle(words)
    return (" ".join(words),), label


def pair_rows(draw: random.Random) -> Row:
    """Whether "good" is in the first text or in the second; their words together do not tell."""
    label = draw.randrange(2)
    texts = [" ".join([*draw.choices(FILLERS, k=draw.randint(1, 4)), word]) for word in ("good", "bad")]
    return (texts[0], texts[1]) if label else (texts[1], texts[0]), label


def score_rows(draw: random.Random) -> Row:
    """How many of the words are "good"."""
    count = draw.randint(0, 5)
    words = ["good"] * count + draw.choices(FILLERS, k=draw.randint(1, 4))
    draw.shuffle(words)
    return (" ".join(words),), float(count)


def make_rows(make: Callable[[random.Random], Row], count: int, seed: int) -> list[Row]:
    draw = random.Random(seed)
    return [make(draw) for _ in range(count)]


def examples(task: tasks.Task, split: str, rows: list[Row]) -> Examples:
    kind = np.float32 if task.kind == "regression" else np.int64
    texts = tuple([row[0][i] for row in rows] for i in range(len(task.text_columns)))
    ids = [str(i) for i in range(len(rows))]
    return Examples(task, split, f"{split}.jsonl", ids, texts, np.array([row[1] for row in rows], kind))


def toy(make: Callable[[random.Random], Row], train: int = 400, validation: int = 120) -> TaskData:
    if make is score_rows:
        task = tasks.with_range(tasks.custom("regression", ["a"], "y"), (0.0, 5.0))
    else:
        columns = ["a", "b"] if make is pair_rows else ["a"]
        task = tasks.with_labels(tasks.custom("classification", columns, "y"), ("no", "yes"))
    return TaskData(
        task,
        examples(task, "train", make_rows(make, train, 1)),
        {"validation": examples(task, "validation", make_rows(make, validation, 2))},
        (),
    )


def tokenizer() -> Any:
    return train_tokenizer([" ".join([*FILLERS, "alpha omega good bad"])] * 20, 330, cased=False)


def tiny_model(vocab: int, **fields: Any) -> Any:
    smaller = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "ffn_size": 64, "max_positions": 32}
    return presets.change(presets.get("tiny"), model={"vocab_size": vocab, "dropout": 0.0, **smaller, **fields})


def tiny_encoder(**fields: Any) -> PackedEncoder:
    """Random, in memory."""
    bpe = tokenizer()
    config = tiny_model(bpe.get_vocab_size(), **fields).model
    network = MaeLm(config, mask_id=vocabulary_of(bpe).mask_id)
    return PackedEncoder(network.encoder.eval(), config, TextTokenizer.of_run(bpe), "toy")


def make_run(path: Path, **fields: Any) -> Path:
    """A run directory with an untrained checkpoint at step 5."""
    bpe = tokenizer()
    config = tiny_model(bpe.get_vocab_size(), **fields)
    vocabulary, record = vocabulary_of(bpe), RunRecord("tiny", "store", "fingerprint", None)
    return run_directory(path, LoadedRun(MaeLm(config.model, vocabulary.mask_id), bpe, vocabulary, config, record, 5))


def write_files(directory: Path, data: TaskData) -> Path:
    """As a user would have them."""
    directory.mkdir(parents=True, exist_ok=True)
    for split in (data.train, *data.validation.values()):
        assert isinstance(split, Examples)
        rows = zip(zip(*split.texts, strict=True), split.labels.tolist(), strict=True)
        lines = [
            json.dumps({**dict(zip(data.task.text_columns, texts, strict=True)), data.task.label_column: label})
            for texts, label in rows
        ]
        (directory / f"{split.split}.jsonl").write_text("\n".join(lines) + "\n")
    return directory
