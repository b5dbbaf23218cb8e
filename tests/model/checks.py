"""The model written out in plain PyTorch, one sequence at a time and padded, and batches with masked tokens shown."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from maelm_fast.batch import PackedBatch, layout_of
from maelm_fast.config import MaskingConfig, ModelConfig
from maelm_fast.data.masking import pack
from maelm_fast.masking import Masker, Vocabulary
from maelm_fast.model.block import Attention, Block
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
    return pack(rows, np.arange(n), np.zeros(n, int), Masker(masking, VOCABULARY, seed, model.encoder_sees_mask))


def show(batch: PackedBatch, share: float, random: bool = False) -> PackedBatch:
    """The batch with that share of each sequence's masked tokens back in the encoder's row, as [MASK] or as random
    tokens. batch: none of them is in it yet."""
    draw = np.random.default_rng(6)
    shown = batch.source.numpy() >= 0
    for here in np.split(batch.masked_index.numpy(), np.cumsum(batch.masked.lengths)[:-1]):
        shown[draw.permutation(here)[: int(share * len(here) + 0.5)]] = True
    ids = batch.original_ids.clone()
    masked = batch.masked_index.long()
    ids[masked] = torch.from_numpy(draw.integers(4, 99, len(masked))).int() if random else VOCABULARY.mask_id
    lengths = [int(part.sum()) for part in np.split(shown, np.cumsum(batch.decoder.lengths)[:-1])]
    kept = torch.from_numpy(shown)
    return replace(
        batch,
        ids=ids[kept],
        source=torch.where(kept, kept.cumsum(0) - 1, -1).int(),
        visible=layout_of(lengths, batch.decoder.positions[kept]),
    )


def spread(bias: PositionBias, positions: Tensor) -> Tensor:
    """(heads, n, n)"""
    distance = positions[None, :] - positions[:, None]
    return bias.line[:, distance.clamp(-bias.reach, bias.reach) + bias.reach]


def padded_attention(attention: Attention, x: Tensor, memory: Tensor, bias: Tensor | None, blocked: Tensor) -> Tensor:
    """x: (Lq, d), attending to memory, (Lk, d), but not where blocked, (Lk,) or (Lq, Lk)."""
    d, (heads, head_dim) = x.shape[-1], attention.heads
    w, b = attention.qkv.weight.split(d), attention.qkv.bias.split(d)
    q, k, v = (F.linear(t, w_, b_).view(len(t), heads, -1) for t, w_, b_ in zip((x, memory, memory), w, b, strict=True))
    if blocked.all():
        return attention.out(torch.zeros_like(x))
    scores = torch.einsum("qhd,khd->hqk", q, k) / head_dim**0.5
    if bias is not None:
        scores = scores + bias
    weights = scores.masked_fill(blocked, float("-inf")).softmax(-1)
    return attention.out(torch.einsum("hqk,khd->qhd", weights, v).reshape(x.shape))


def padded_block(
    block: Block,
    x: Tensor,
    memory: Tensor,
    bias: Tensor | None,
    blocked: Tensor,
    cross: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """One post-LN layer on one sequence. cross: what its cross-attention attends to, and where not."""
    x = block.attention_norm(x + padded_attention(block.attention, x, memory, bias, blocked))
    if cross is not None:
        x = block.cross_attention_norm(x + padded_attention(block.cross_attention, x, cross[0], None, cross[1]))
    return block.ffn_norm(x + block.ffn_out(F.gelu(block.ffn_in(x))))


def padded_loss(model: MaeLm, batch: PackedBatch) -> Tensor:
    """The same loss by the released code's way of computing: each sequence at full length, masked positions kept in
    place and excluded as keys, every slot through every decoder layer, [MASK] filled in before any projection."""
    starts, v_starts = np.cumsum([0, *batch.decoder.lengths]), np.cumsum([0, *batch.visible.lengths])
    losses = []
    for s in range(len(batch.decoder.lengths)):
        slots, rows = slice(starts[s], starts[s + 1]), slice(v_starts[s], v_starts[s + 1])
        here = (batch.masked_index >= starts[s]) & (batch.masked_index < starts[s + 1])
        masked = (batch.masked_index[here] - int(starts[s])).long()
        places, ids = batch.visible.positions[rows].long(), batch.ids[rows].long()
        losses.append(_sequence_loss(model, batch.source[slots], places, ids, masked, batch.labels[here].long()))
    return torch.stack(losses).sum()


def _sequence_loss(
    model: MaeLm, source: Tensor, places: Tensor, shown: Tensor, masked: Tensor, labels: Tensor
) -> Tensor:
    config, encoder, n = model.config, model.encoder, len(source)
    ids = torch.zeros(n, dtype=torch.long)
    ids[places] = shown
    absent = torch.ones(n, dtype=torch.bool)
    absent[places] = False
    positions = torch.arange(n)
    numbers = positions.clone()
    if config.positions == "misaligned":
        numbers[places] = torch.arange(len(places))
    x = encoder.embedding_norm(encoder.token_table[ids] + encoder.position_table[numbers])
    bias = spread(encoder.relative_bias(), numbers) if encoder.relative_bias is not None else None
    if not absent.all():
        for block in encoder.blocks:
            x = padded_block(block, x, x, bias, absent)
    predicted = masked
    if model.decoder is not None:
        decoder = model.decoder
        project = decoder.projection if decoder.projection is not None else torch.nn.Identity()
        memory, mask_embedding = project(x), encoder.token_table[model.mask_id]
        blocked = torch.zeros(n, n, dtype=torch.bool)
        if config.decoder == "causal_cross":
            original = ids.clone()
            original[masked] = labels
            x = torch.cat([mask_embedding[None], encoder.token_table[original[:-1]]])
            blocked = positions[None, :] > positions[:, None]
            predicted, labels = positions, original
        else:
            filled = source == -1
            filled[masked] |= config.decoder_resets_mask
            x = torch.where(filled[:, None], mask_embedding, x)
        x = decoder.embedding_norm(project(x) + decoder.position_table[:n])
        bias = spread(decoder.relative_bias(), positions) if decoder.relative_bias is not None else None
        for block in decoder.blocks:
            if config.decoder == "cross":
                x = padded_block(block, x, memory, bias, absent)
            else:
                cross = (memory, absent) if config.decoder != "self" else None
                x = padded_block(block, x, x, bias, blocked, cross)
    h = model.head.norm(F.gelu(model.head.dense(x[predicted])))
    h = h if model.head.out is None else model.head.out(h)
    logits = (h @ encoder.token_table.T + model.head.vocabulary_bias)[:, : config.vocab_size]
    return F.cross_entropy(logits, labels, reduction="sum")


def assert_packed_equals_padded(model: MaeLm, batch: PackedBatch) -> None:
    """Loss and the gradient of every parameter."""
    loss, expected = model(batch)[0], padded_loss(model, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=0)
    parameters = dict(model.named_parameters())
    mine = torch.autograd.grad(loss, list(parameters.values()))
    theirs = torch.autograd.grad(expected, list(parameters.values()))
    for name, a, b in zip(parameters, mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")
