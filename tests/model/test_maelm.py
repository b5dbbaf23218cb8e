"""The model against a padded computation written out in plain PyTorch, and what it must never see or do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maelm_fast import ops
from maelm_fast.config import MaskingConfig
from maelm_fast.data.masking import pack
from maelm_fast.masking import Masker
from maelm_fast.model.maelm import MaeLm
from tests.batches import assert_same_batch
from tests.model.checks import SMALL, VOCABULARY, assert_packed_equals_padded, batch_for, build

DECODERS = ["self", "cross", "self_cross", "causal_cross", "none"]


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("bias", ["none", "t5", "released"])
@pytest.mark.parametrize("lengths", [[512, 1, 77, 33, 256, 2], [40] * 4], ids=["documents", "full"])
def test_packed_equals_padded(decoder: str, bias: str, lengths: list[int]) -> None:
    model = build(decoder=decoder, relative_bias=bias, decoder_relative_bias=bias == "t5" and decoder != "none")
    batch = batch_for(model, lengths)
    assert_packed_equals_padded(model, batch)


@pytest.mark.parametrize("decoder", DECODERS)
def test_packed_equals_padded_with_the_bert_policy(decoder: str) -> None:
    model = build(decoder=decoder)
    assert_packed_equals_padded(model, batch_for(model, [60, 20], rate=0.5, policy="bert"))


@pytest.mark.parametrize("decoder", ["self", "cross"])
def test_nothing_of_a_masked_token_reaches_the_encoder(decoder: str) -> None:
    """Other tokens at the masked places change the labels and nothing else; and the encoder's output gives no gradient
    to the rows of tokens that are only masked, nor to [MASK]."""
    model = build(decoder=decoder)
    draw = np.random.default_rng(0)
    rows = [draw.integers(4, 60, 50) for _ in range(3)]
    keys = np.arange(3), np.zeros(3, int), Masker(MaskingConfig(rate=0.3), VOCABULARY, 0, False)
    batch = pack(rows, *keys)
    whole, masked = np.concatenate(rows), batch.masked_index.numpy()
    whole[masked] = 60 + np.arange(len(masked)) % 30
    other = pack(np.split(whole, 3), *keys)
    assert not torch.equal(batch.labels, other.labels)
    assert_same_batch(replace(batch, labels=other.labels), other)
    assert torch.equal(model.predicted_states(batch), model.predicted_states(other))
    out = model.encoder(other.ids, other.visible)
    (grad,) = torch.autograd.grad(out.pow(2).sum(), model.encoder.token_table)
    assert (grad[60:] == 0).all()
    assert grad[:60].abs().sum() > 0


def test_standard_mlm_does_feed_mask_to_the_encoder() -> None:
    """The counter-test: without a decoder [MASK]'s row gets a gradient from the encoder's output."""
    model = build(decoder="none")
    batch = batch_for(model, [50])
    out = model.encoder(batch.ids, batch.visible)
    (grad,) = torch.autograd.grad(out.pow(2).sum(), model.encoder.token_table)
    assert grad[99].abs().sum() > 0


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_repeated_batch_is_learned(decoder: str) -> None:
    config = replace(SMALL, decoder=decoder, num_layers=1, decoder_layers=1, hidden_size=32)  # type: ignore[arg-type]
    model = MaeLm(config)
    batch = batch_for(model, [24] * 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    predicted = model.predicted_tokens(batch.counts)
    for _ in range(60):
        loss, correct = model(batch)
        optimizer.zero_grad()
        (loss / predicted).backward()
        optimizer.step()
    assert float(loss.detach()) / predicted < 0.05
    assert int(correct) == predicted


@pytest.mark.parametrize("decoder", DECODERS)
def test_all_masked_and_one_token_sequences(decoder: str) -> None:
    model = build(decoder=decoder)
    batch = batch_for(model, [1, 2, 1], rate=0.9)
    loss, _ = model(batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert batch.visible.lengths == ((1, 2, 1) if decoder == "none" else (0, 0, 0))


def test_dropout_is_a_function_of_its_seed_and_off_in_evaluation() -> None:
    model = build(dropout=0.2).train()
    batch = batch_for(model, [40] * 3)
    losses = [model(batch, dropout_seed=s)[0].item() for s in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    model.eval()
    assert float(model(batch, dropout_seed=1)[0]) == float(model(batch, dropout_seed=2)[0])


@pytest.mark.parametrize("decoder", ["self", "none"])
def test_every_site_of_the_encoder_has_dropout_of_its_own(decoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding, in each layer attention's weights and both sublayers' outputs; else their masks would agree."""
    drawn: list[tuple[str, int]] = []

    def spied(name: str) -> Callable[..., Tensor]:
        op = getattr(ops, name)

        def call(*arguments: Any, **named: Any) -> Tensor:
            if named["dropout_p"]:
                assert named["dropout_p"] == 0.2
                drawn.append((name, named["place"]))
            return op(*arguments, **named)  # type: ignore[no-any-return]

        return call

    for name in ("embed_packed", "attention", "add_norm_twice"):
        monkeypatch.setattr(ops, name, spied(name))
    model = build(decoder=decoder, dropout=0.2).train()
    model(batch_for(model, [20, 7]), dropout_seed=1)
    layer = ["attention", "add_norm_twice", "add_norm_twice"]
    assert [name for name, _ in drawn] == ["embed_packed", *layer * SMALL.num_layers]
    assert len({place for _, place in drawn}) == len(drawn)


def test_default_dropout_seed_follows_torch_manual_seed() -> None:
    model = build(dropout=0.2).train()
    batch = batch_for(model, [40] * 3)
    torch.manual_seed(3)
    first = [float(model(batch)[0]) for _ in range(2)]
    torch.manual_seed(3)
    assert [float(model(batch)[0]) for _ in range(2)] == first
    assert first[0] != first[1]


@pytest.mark.parametrize("decoder", DECODERS[:-1])
def test_the_decoder_has_no_dropout(decoder: str) -> None:
    model = build(decoder=decoder, dropout=0.5).train()
    batch = batch_for(model, [40])
    encoded = torch.randn(batch.counts.visible, 16, dtype=torch.float64)
    assert model.decoder is not None
    once, again = (model.decoder(encoded, batch, model.encoder.token_table, 99) for _ in range(2))
    assert torch.equal(once, again)


@pytest.mark.parametrize("fields", [{}, *({"decoder": d, "decoder_hidden_size": 24} for d in DECODERS[:-1])])
def test_autocast_keeps_fp32_parameters_and_a_finite_loss(fields: dict[str, Any]) -> None:
    model = MaeLm(replace(SMALL, dropout=0.1, **fields)).train()
    batch = batch_for(model, [40, 13, 1])
    exact = float(copy.deepcopy(model).double().eval()(batch)[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = model.eval()(batch)
    loss.backward()
    assert float(loss) == pytest.approx(exact, rel=2e-2)
    assert loss.dtype == torch.float32
    assert all(p.dtype == torch.float32 and p.grad is not None for p in model.parameters())


def test_logits_and_loss_agree() -> None:
    model = build()
    batch = batch_for(model, [30, 12])
    logits = model.logits(batch)
    assert logits.shape == (batch.counts.masked, 100)
    torch.testing.assert_close(F.cross_entropy(logits, batch.labels.long(), reduction="sum"), model(batch)[0])


def test_layers_are_handed_out() -> None:
    model = build()
    batch = batch_for(model, [30])
    layers: list[Tensor] = []
    out = model.encoder(batch.ids, batch.visible, layers=layers)
    assert len(layers) == SMALL.num_layers + 1
    assert torch.equal(layers[-1], out)


def test_initial_weights() -> None:
    """N(0, init_std) for what multiplies and what is looked up; norms are the identity, biases zero."""
    model = MaeLm(replace(SMALL, hidden_size=64, ffn_size=64, init_std=0.05))
    for name, parameter in model.named_parameters():
        if "norm" in name or (name.endswith("bias") and "relative" not in name):
            assert (parameter == (1.0 if name.endswith("norm.weight") else 0.0)).all(), name
        else:
            assert float(parameter.detach().std()) == pytest.approx(0.05, rel=0.25), name
            assert abs(float(parameter.detach().mean())) < 0.02, name


def test_sinusoidal_tables_on_request() -> None:
    model = MaeLm(replace(SMALL, position_init="sinusoidal", hidden_size=64))
    table = model.encoder.position_table
    assert float(table.detach().std()) == pytest.approx(0.02, rel=0.1)
    again = MaeLm(replace(SMALL, position_init="sinusoidal", hidden_size=64)).encoder.position_table
    assert torch.equal(table, again)
