"""The model against a padded computation written out in plain PyTorch, and what it must never see or do."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maelm_fast.batch import PackedBatch
from maelm_fast.config import MaskingConfig, ModelConfig
from maelm_fast.data.masking import Vocabulary, pack
from maelm_fast.model.block import Block
from maelm_fast.model.maelm import MaeLm
from maelm_fast.ops import PositionBias

VOCABULARY = Vocabulary(100, 99, (0, 1, 2, 3, 99))
SMALL = ModelConfig(
    vocab_size=100,
    max_positions=512,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    ffn_size=24,
    decoder_layers=2,
    dropout=0.0,
)
DECODERS = ["self", "cross", "none"]


def build(**changes: object) -> MaeLm:
    """A float64 model whose biases and norms are random too, so that every parameter matters."""
    torch.manual_seed(1)
    config = replace(SMALL, **changes)  # type: ignore[arg-type]
    model = MaeLm(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def batch_for(model: MaeLm, lengths: list[int], rate: float = 0.3, seed: int = 0, policy: str = "mask") -> PackedBatch:
    draw = np.random.default_rng(5)
    rows = [np.concatenate([[0], draw.integers(4, 99, n - 1)]) for n in lengths]
    masking = MaskingConfig(rate=rate, policy=policy)  # type: ignore[arg-type]
    n = len(lengths)
    return pack(rows, np.arange(n), np.zeros(n, int), masking, VOCABULARY, seed, model.encoder_sees_mask)


def spread(bias: PositionBias, n: int) -> Tensor:
    """(heads, n, n)"""
    distance = torch.arange(n)[None, :] - torch.arange(n)[:, None]
    return bias.line[:, distance.clamp(-bias.reach, bias.reach) + bias.reach]


def padded_block(block: Block, x: Tensor, memory: Tensor, bias: Tensor | None, absent: Tensor) -> Tensor:
    """One post-LN layer on one sequence, x (Lq, d) attending to memory (Lk, d) but not where absent (Lk,)."""
    d, (heads, head_dim) = x.shape[-1], block.attention.heads
    w, b = block.attention.qkv.weight.split(d), block.attention.qkv.bias.split(d)
    q, k, v = (F.linear(t, w_, b_).view(len(t), heads, -1) for t, w_, b_ in zip((x, memory, memory), w, b, strict=True))
    scores = torch.einsum("qhd,khd->hqk", q, k) / head_dim**0.5
    if bias is not None:
        scores = scores + bias
    weights = scores.masked_fill(absent, float("-inf")).softmax(-1)
    mixed = block.attention.out(torch.einsum("hqk,khd->qhd", weights, v).reshape(x.shape))
    x = block.attention_norm(x + mixed)
    return block.ffn_norm(x + block.ffn_out(F.gelu(block.ffn_in(x))))


def padded_loss(model: MaeLm, batch: PackedBatch) -> Tensor:
    """The same loss by the released code's way of computing: each sequence at full length, masked positions kept in
    place and excluded as keys, every slot through every decoder layer."""
    config, encoder, losses = model.config, model.encoder, []
    starts = np.cumsum([0, *batch.decoder_lengths])
    v_starts = np.cumsum([0, *batch.lengths])
    for s, n in enumerate(batch.decoder_lengths):
        slots = slice(starts[s], starts[s + 1])
        here = (batch.masked_index >= starts[s]) & (batch.masked_index < starts[s + 1])
        masked = (batch.masked_index[here] - int(starts[s])).long()
        places = batch.visible_positions[v_starts[s] : v_starts[s + 1]].long()
        ids = torch.zeros(n, dtype=torch.long)
        ids[places] = batch.visible_ids[v_starts[s] : v_starts[s + 1]].long()
        absent = torch.ones(n, dtype=torch.bool)
        absent[places] = False
        x = encoder.embedding_norm(encoder.token_table[ids] + encoder.position_table[:n])
        bias = spread(encoder.relative_bias(), n) if encoder.relative_bias is not None else None
        if not absent.all():
            for block in encoder.blocks:
                x = padded_block(block, x, x, bias, absent)
        if model.decoder is not None:
            decoder = model.decoder
            removed = (batch.source[slots] == -1)[:, None]
            encoded = x
            x = torch.where(removed, encoder.token_table[model.mask_id], x) + decoder.position_table[:n]
            x = decoder.embedding_norm(x)
            bias = spread(decoder.relative_bias(), n) if decoder.relative_bias is not None else None
            nothing = torch.zeros(n, dtype=torch.bool)
            for block in decoder.blocks:
                if config.decoder == "self":
                    x = padded_block(block, x, x, bias, nothing)
                elif not absent.all():
                    x = padded_block(block, x, encoded, bias, absent)
        h = model.head.norm(F.gelu(model.head.dense(x[masked])))
        logits = (h @ encoder.token_table.T + model.head.vocabulary_bias)[:, : config.vocab_size]
        losses.append(F.cross_entropy(logits, batch.labels[here].long(), reduction="sum"))
    return torch.stack(losses).sum()


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("bias", ["none", "t5", "released"])
@pytest.mark.parametrize("lengths", [[512, 1, 77, 33, 256, 2], [40] * 4], ids=["documents", "full"])
def test_packed_equals_padded(decoder: str, bias: str, lengths: list[int]) -> None:
    model = build(decoder=decoder, relative_bias=bias, decoder_relative_bias=bias == "t5" and decoder != "none")
    batch = batch_for(model, lengths)
    loss, _ = model(batch)
    expected = padded_loss(model, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=0)
    parameters = dict(model.named_parameters())
    mine = torch.autograd.grad(loss, list(parameters.values()))
    theirs = torch.autograd.grad(expected, list(parameters.values()))
    for name, a, b in zip(parameters, mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("decoder", DECODERS)
def test_packed_equals_padded_with_the_bert_policy(decoder: str) -> None:
    model = build(decoder=decoder)
    batch = batch_for(model, [60, 20], rate=0.5, policy="bert")
    torch.testing.assert_close(model(batch)[0], padded_loss(model, batch), rtol=1e-11, atol=0)


@pytest.mark.parametrize("decoder", ["self", "cross"])
def test_nothing_of_a_masked_token_reaches_the_encoder(decoder: str) -> None:
    """Other tokens at the masked places change the labels and nothing else; and the encoder's output gives no gradient
    to the rows of tokens that are only masked, nor to [MASK]."""
    model = build(decoder=decoder)
    draw = np.random.default_rng(0)
    rows = [draw.integers(4, 60, 50) for _ in range(3)]
    keys = (np.arange(3), np.zeros(3, int), MaskingConfig(rate=0.3), VOCABULARY, 0, False)
    batch = pack(rows, *keys)
    whole, masked = np.concatenate(rows), batch.masked_index.numpy()
    whole[masked] = 60 + np.arange(len(masked)) % 30
    other = pack(np.split(whole, 3), *keys)
    assert not torch.equal(batch.labels, other.labels)
    for name in ("visible_ids", "visible_positions", "source", "decoder_positions", "masked_index"):
        assert torch.equal(getattr(batch, name), getattr(other, name))
    assert torch.equal(model.masked_states(batch), model.masked_states(other))
    out = model.encoder(other.visible_ids, other.visible)
    (grad,) = torch.autograd.grad(out.pow(2).sum(), model.encoder.token_table)
    assert (grad[60:] == 0).all()
    assert grad[:60].abs().sum() > 0


def test_standard_mlm_does_feed_mask_to_the_encoder() -> None:
    """The counter-test: without a decoder [MASK]'s row gets a gradient from the encoder's output."""
    model = build(decoder="none")
    batch = batch_for(model, [50])
    out = model.encoder(batch.visible_ids, batch.visible)
    (grad,) = torch.autograd.grad(out.pow(2).sum(), model.encoder.token_table)
    assert grad[99].abs().sum() > 0


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_repeated_batch_is_learned(decoder: str) -> None:
    config = replace(SMALL, decoder=decoder, hidden_size=64, num_heads=4, ffn_size=128, dropout=0.0)  # type: ignore[arg-type]
    model = MaeLm(config)
    batch = batch_for(model, [48] * 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        loss, correct = model(batch)
        optimizer.zero_grad()
        (loss / batch.counts.masked).backward()
        optimizer.step()
    assert float(loss) / batch.counts.masked < 0.05
    assert int(correct) == batch.counts.masked


@pytest.mark.parametrize("decoder", DECODERS)
def test_all_masked_and_one_token_sequences(decoder: str) -> None:
    model = build(decoder=decoder)
    batch = batch_for(model, [1, 2, 1], rate=0.9)
    loss, _ = model(batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert batch.lengths == ((1, 2, 1) if decoder == "none" else (0, 0, 0))


def test_dropout_is_a_function_of_its_seed_and_off_in_evaluation() -> None:
    model = build(dropout=0.2).train()
    batch = batch_for(model, [40] * 3)
    losses = [float(model(batch, dropout_seed=s)[0]) for s in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    model.eval()
    assert float(model(batch, dropout_seed=1)[0]) == float(model(batch, dropout_seed=2)[0])


def test_default_dropout_seed_follows_torch_manual_seed() -> None:
    model = build(dropout=0.2).train()
    batch = batch_for(model, [40] * 3)
    torch.manual_seed(3)
    first = [float(model(batch)[0]) for _ in range(2)]
    torch.manual_seed(3)
    assert [float(model(batch)[0]) for _ in range(2)] == first
    assert first[0] != first[1]


def test_the_decoder_has_no_dropout() -> None:
    model = build(dropout=0.5).train()
    batch = batch_for(model, [40])
    encoded = torch.randn(batch.counts.visible, 16, dtype=torch.float64)
    mask = model.encoder.token_table[99]
    assert model.decoder is not None
    assert torch.equal(model.decoder(encoded, batch, mask), model.decoder(encoded, batch, mask))


def test_autocast_keeps_fp32_parameters_and_a_finite_loss() -> None:
    model = MaeLm(replace(SMALL, dropout=0.1)).train()
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
    out = model.encoder(batch.visible_ids, batch.visible, layers=layers)
    assert len(layers) == SMALL.num_layers + 1
    assert torch.equal(layers[-1], out)


def test_sinusoidal_tables_on_request() -> None:
    model = MaeLm(replace(SMALL, position_init="sinusoidal", hidden_size=64))
    table = model.encoder.position_table
    assert float(table.detach().std()) == pytest.approx(0.02, rel=0.1)
    again = MaeLm(replace(SMALL, position_init="sinusoidal", hidden_size=64)).encoder.position_table
    assert torch.equal(table, again)
