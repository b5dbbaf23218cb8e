"""Fixtures shared by all tests. Text is generated: no test reads data from outside the repository."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests are small: more threads, in child processes too, only wait

import pytest
import torch
from safetensors.torch import save_file

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel module is imported

from maelm_fast import presets
from maelm_fast.data.prepare import PrepareConfig, prepare
from maelm_fast.data.token_store import TokenStore
from maelm_fast.model.maelm import MaeLm
from maelm_fast.training.files import write_directory
from maelm_fast.training.rundir import RunDir, RunRecord

MakeRun = Callable[..., RunDir]
WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend
""".split()


def generated_text(documents: int, seed: int = 0) -> str:
    """Paragraphs of words that depend on the word before, so that context predicts something."""
    draw = random.Random(seed)
    follow = {word: [draw.choice(WORDS) for _ in range(3)] for word in WORDS}
    blocks = []
    for _ in range(documents):
        lines, word = [], draw.choice(WORDS)
        for _ in range(draw.randint(1, 5)):
            words = []
            for _ in range(draw.randint(3, 40)):
                words.append(word)
                word = draw.choice(follow[word])
            lines.append(" ".join(words).capitalize() + ".")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(generated_text(400), encoding="utf-8")
    return path


def _store(text: Path, out: Path, mode: str) -> Path:
    prepare(
        PrepareConfig(
            inputs=(str(text),), out=out, vocab_size=300, seq_len=32, sample_mode=mode, validation=0.1, workers=1
        ),
        log=lambda _: None,
    )
    return out


@pytest.fixture(scope="session")
def store(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token store of full blocks of 32."""
    return _store(text_file, tmp_path_factory.mktemp("stores") / "full", "full")


@pytest.fixture(scope="session")
def document_store(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token store of documents of at most 32 tokens: samples of many lengths."""
    return _store(text_file, tmp_path_factory.mktemp("stores") / "document", "document")


@pytest.fixture
def make_run(store: Path, tmp_path: Path) -> MakeRun:
    """A run directory without a training run: configuration, tokenizer, an untrained checkpoint."""

    def make(name: str = "run", preset: str = "tiny", step: int = 20, **model: object) -> RunDir:
        manifest = TokenStore(store, "validation").manifest
        smaller = {"vocab_size": manifest.vocab_size, "max_positions": 32, "hidden_size": 16, "num_layers": 2}
        config = presets.change(
            presets.get(preset),
            model={**smaller, "num_heads": 2, "ffn_size": 32, **model},
            runtime={"micro_batch_size": 8, "device": "cpu"},
        )
        run = RunDir(tmp_path / name)
        run.path.mkdir()
        run.write_config(RunRecord(preset, str(store), manifest.fingerprint, None), config)
        shutil.copy(store / "tokenizer.json", run.tokenizer_file)
        network = MaeLm(config.model)
        run.checkpoints.mkdir()
        write_directory(
            run.checkpoint(step), lambda aside: save_file(dict(network.state_dict()), aside / "model.safetensors")
        )
        return run

    return make


@pytest.fixture
def write_metrics() -> Callable[..., None]:
    """Made-up metrics for such a run."""

    def write(run: RunDir, updates: int = 200, evaluate_every: int = 50, floor: float = 3.0) -> None:
        rows = []
        for step in range(1, updates + 1):
            loss = floor + 3.0 * math.exp(-step / updates * 4) + 0.1 * math.sin(step * 1.7)
            row = {"kind": "train", "step": step, "tokens": step * 2048, "loss": loss, "accuracy": 0.1, "lr": 1e-3}
            rows.append(row)
            if evaluate_every and step % evaluate_every == 0:
                result = {"val_loss": loss, "val_perplexity": math.exp(loss), "val_accuracy": 0.5 - 0.08 * loss}
                place = {"kind": "validation", "step": step, "tokens": step * 2048}
                rows.append({**place, **result, "unigram_nats": 5.3})
        run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    return write
