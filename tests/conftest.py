"""Fixtures shared by all tests. Text is generated: no test reads data from outside the repository."""

from __future__ import annotations

import os
import random
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests are small: more threads, in child processes too, only wait

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel module is imported

from maelm_fast.data.prepare import PrepareConfig, prepare

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
