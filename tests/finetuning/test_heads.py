"""Heads on encoders: the same loss and gradients as the stock classes of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maelm_fast import ops
from maelm_fast.encoders import PackedEncoder, TokenBatch, load_encoder
from maelm_fast.export.huggingface import export
from maelm_fast.finetuning.heads import SequenceModel, SpanModel
from maelm_fast.finetuning.problem import token_batch
from maelm_fast.text import TextTokenizer
from tests.finetuning import small

TEXTS = (["the fox", "a lazy dog jumps over", "is"], ["over and over", "the dog", "a fox?"])


def packed(dropout: float = 0.1, **fields: Any) -> PackedEncoder:
    run = small.loaded_run(dropout=dropout, **fields)
    return PackedEncoder(run.model.encoder, run.config.model, TextTokenizer.of_run(run.tokenizer), "run")


def batch_for(encoder: PackedEncoder) -> TokenBatch:
    return token_batch(encoder.tokenizer.encode(TEXTS, 60), range(3))


def test_a_classifier_s_initialisation_follows_from_its_seed() -> None:
    encoder = packed()
    model = SequenceModel(encoder, 3, seed=5)
    torch.manual_seed(5)
    dense, out = torch.nn.Linear(32, 32), torch.nn.Linear(32, 3)  # PyTorch's defaults
    assert torch.equal(model.head.dense.weight, dense.weight)
    assert torch.equal(model.head.out.bias, out.bias)
    torch.manual_seed(5)
    assert torch.equal(SequenceModel(encoder, 3).head.dense.weight, dense.weight)
    spans = SpanModel(encoder, seed=5)
    assert spans.head.out.bias.abs().max() == 0
    assert 0.01 < spans.head.out.weight.std() < 0.03


def test_dropout_of_a_classifier() -> None:
    """By hand: what is dropped before the first and the last layer is the op's, at places that the encoder has not."""
    model = SequenceModel(packed(0.0), 3, dropout=0.5, seed=0).train()
    batch = batch_for(model.encoder)  # type: ignore[arg-type]
    first, again, other = (model(batch, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert torch.equal(model(batch, torch.tensor(1)), first)
    model.eval()
    states = model.encoder(batch)[batch.layout.cu_seqlens[:-1].long()]
    assert torch.allclose(model(batch, 1), model.head.out(torch.tanh(model.head.dense(states))), atol=1e-6)
    states = torch.ones(2000, 32)
    head = model.head.train()
    torch.nn.init.eye_(head.dense.weight)
    torch.nn.init.zeros_(head.dense.bias)
    torch.nn.init.eye_(head.out.weight)
    torch.nn.init.zeros_(head.out.bias)
    out = head(states, torch.tensor(3))  # a number is kept twice, doubled before tanh and after it, or is 0
    kept = 2 * torch.tanh(torch.tensor(2.0))
    assert torch.all((out - kept).abs().lt(1e-6) | (out == 0))
    assert 0.23 < out.ne(0).float().mean() < 0.27


def test_a_classifier_s_dropout_has_places_that_the_encoder_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[int] = []

    def spied(name: str) -> Callable[..., Tensor]:
        op = getattr(ops, name)

        def call(*arguments: Any, **named: Any) -> Tensor:
            places.append(named["place"] if "place" in named else arguments[3])
            return op(*arguments, **named)  # type: ignore[no-any-return]

        return call

    for name in ("embed_packed", "attention", "add_norm", "dropout"):
        monkeypatch.setattr(ops, name, spied(name))
    model = SequenceModel(packed(0.1), 3, dropout=0.1, seed=0).train()
    model(batch_for(model.encoder), 1)  # type: ignore[arg-type]
    assert len(set(places)) == len(places) > 2 + 1


@pytest.mark.parametrize("kind", ["sequence", "spans"])
def test_logits_are_fp32_under_autocast_and_gradients_reach_everything(kind: str) -> None:
    encoder = packed()
    model = SequenceModel(encoder, 2) if kind == "sequence" else SpanModel(encoder)
    batch = batch_for(encoder)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.train()(batch, 3)
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())  # the last product is not rounded to bf16 either
    assert logits.shape == ((3, 2) if kind == "sequence" else (batch.ids.shape[0], 2))
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize(("format", "fields"), [("mpnet", {}), ("roberta", {"relative_bias": "none"})])
def test_a_step_equals_the_stock_classifier_s(tmp_path: Path, format: str, fields: dict[str, Any]) -> None:
    """Loss and gradients without dropout: packed, padded through our head, and transformers' own class and loss."""
    import transformers

    export(small.loaded_run(**fields), tmp_path / "model")
    encoders = [load_encoder(tmp_path / "model", engine=e, dropout=0.0) for e in ("packed", "transformers")]
    models = [SequenceModel(encoder, 3, dropout=0.0, seed=1).train() for encoder in encoders]
    labels = torch.tensor([2, 0, 1])
    for model in models:
        batch = token_batch(model.encoder.tokenizer.encode(TEXTS, 60), range(3))  # type: ignore[union-attr]
        F.cross_entropy(model(batch), labels).backward()
    names = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=3, **names)
    head = models[0].head
    theirs.classifier.dense.load_state_dict(head.dense.state_dict())
    theirs.classifier.out_proj.load_state_dict(head.out.state_dict())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    inputs = tokenizer(*TEXTS, padding=True, return_tensors="pt")
    theirs.train()(**inputs, labels=labels).loss.backward()

    def close(a: torch.Tensor, b: torch.Tensor) -> None:
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)

    expected = theirs.classifier.dense.weight.grad
    for model in models:
        close(model.head.dense.weight.grad, expected)
        close(model.head.out.bias.grad, theirs.classifier.out_proj.bias.grad)
    stock = dict(getattr(theirs, format).named_parameters())
    for name, parameter in models[1].encoder.model.named_parameters():  # type: ignore[union-attr, operator]
        close(parameter.grad, stock[name].grad)
    ours = models[0].encoder.encoder
    vocabulary = stock["embeddings.word_embeddings.weight"].grad
    close(ours.token_table.grad[: len(vocabulary)], vocabulary)  # type: ignore[union-attr, index]
    close(ours.blocks[1].ffn_in.weight.grad, stock["encoder.layer.1.intermediate.dense.weight"].grad)  # type: ignore
    positions = stock["embeddings.position_embeddings.weight"].grad[2:]
    close(ours.position_table.grad, positions)  # type: ignore[union-attr, arg-type]
