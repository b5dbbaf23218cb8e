"""Runs as load_run gives them, without training: random weights, large where a wrong mapping would otherwise hide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from maelm_fast.config import MaskingConfig, ModelConfig, RunConfig
from maelm_fast.data.tokenizer import train_tokenizer
from maelm_fast.model.maelm import MaeLm
from maelm_fast.training.rundir import LoadedRun, RunRecord, vocabulary_of


def _roughen(module: nn.Module) -> None:
    """No LayerNorm is the identity, no bias zero, and the relative bias decides who attends to whom."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name.lower():
                parameter.normal_(1.0 if name.endswith("weight") else 0.0, 0.5)
            elif "relative" in name:
                parameter.normal_(0.0, 2.0)
            else:
                parameter.normal_(0.0, 0.3)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """The models are tiny: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def roughen() -> Callable[[nn.Module], None]:
    return _roughen


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return train_tokenizer(["the quick brown fox", "jumps over the lazy dog"] * 3, 290, cased=False)


@pytest.fixture(scope="session")
def make_run(tokenizer: Any) -> Callable[..., LoadedRun]:
    """make_run(masking, **fields of ModelConfig). 140 positions reach beyond the last bucket of 32/128."""
    base = ModelConfig(
        vocab_size=tokenizer.get_vocab_size(),
        max_positions=140,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        ffn_size=48,
        decoder_layers=2,
    )

    def make(masking: MaskingConfig = MaskingConfig(), **fields: Any) -> LoadedRun:
        torch.manual_seed(0)
        model = MaeLm(replace(base, **fields)).eval()
        _roughen(model)
        record = RunRecord("base", "stores/books", "fingerprint", None)
        return LoadedRun(
            model, tokenizer, vocabulary_of(tokenizer), RunConfig(model=model.config, masking=masking), record, 10
        )

    return make
