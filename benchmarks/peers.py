"""What the benchmarks compare with: Hugging Face's masked language models, built and fed as a knowledgeable user would.

RobertaForMaskedLM has our dimensions, and a copy of our weights for the gate. ModernBertForMaskedLM is another
architecture altogether: rotary positions, GeGLU, no biases, pre-LN, attention within a window of 128 in two layers of
three, a vocabulary of 50,368. Nothing it computes can be compared with ours but its speed: there is no gate for it, and
an equal speed would say nothing about equal quality.

Their classes, their default attention (sdpa; ModernBERT on a GPU: flash_attention_2 where flash-attn is installed), no
attention_mask where there is no padding (an all-ones mask would only be inspected and dropped), labels of -100 outside
the masked positions. Both heads score every position: that is what the classes do.

RoBERTa numbers positions from padding_idx + 1, so rows 0 and 1 of its position table are unused and row p + 2 is
position p; its token type table has one row, which is zero in a copy of our weights.

transformers is imported when a model is built: whoever has it not can still list what would run.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.padded import padded
from maelm_fast.batch import PackedBatch
from maelm_fast.config import ModelConfig, RunConfig
from maelm_fast.model.maelm import MaeLm
from maelm_fast.presets import base, change

PAD_ID = 1  # RoBERTa's; token ids fed to it must not contain it, or its positions shift
_OFFSET = PAD_ID + 1
_WINDOW, _GLOBAL_EVERY = 128, 3  # ModernBERT's default: a token sees 64 to either side, but all in layers 0, 3, 6, ...


def modernbert_base() -> RunConfig:
    """ModernBERT-base's dimensions, as published; its feed-forward layer has two inputs of ffn_size, for GeGLU."""
    dimensions = {"vocab_size": 50_368, "max_positions": 8_192, "num_layers": 22, "ffn_size": 1_152, "dropout": 0.0}
    return change(base(), model={**dimensions, "decoder": "none", "relative_bias": "none"})


def hugging_face_roberta(config: ModelConfig, attention: str = "sdpa") -> nn.Module:
    """RobertaForMaskedLM of our dimensions and dropout; our relative bias has no counterpart in it. attention: sdpa,
    which it takes by itself, eager, or flash_attention_2; ImportError where that is not installed."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    options: Any = {"attn_implementation": attention}
    return RobertaForMaskedLM(
        RobertaConfig(
            **options,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            intermediate_size=config.ffn_size,
            max_position_embeddings=config.max_positions + _OFFSET,
            type_vocab_size=1,
            layer_norm_eps=config.layer_norm_eps,
            hidden_dropout_prob=config.dropout,
            attention_probs_dropout_prob=config.dropout,
            pad_token_id=PAD_ID,
        )
    )


def modernbert(config: ModelConfig, device: str) -> nn.Module:
    """ModernBertForMaskedLM of these dimensions and dropout, the published configuration otherwise, random weights."""
    from transformers import AutoModelForMaskedLM, ModernBertConfig

    flash = device == "cuda" and find_spec("flash_attn") is not None
    theirs = ModernBertConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        intermediate_size=config.ffn_size,
        max_position_embeddings=config.max_positions,
        embedding_dropout=config.dropout,
        attention_dropout=config.dropout,
        mlp_dropout=config.dropout,
        pad_token_id=PAD_ID,
    )
    model: nn.Module = AutoModelForMaskedLM.from_config(
        theirs, attn_implementation="flash_attention_2" if flash else "sdpa"
    )
    return model


def modernbert_flops(config: ModelConfig, lengths: Sequence[int]) -> int:
    """Of a forward and backward pass: of the pairs within the windows, and of a head at every position."""
    d, reach = config.hidden_size, _WINDOW // 2
    num_global = -(-config.num_layers // _GLOBAL_EVERY)
    total = 0
    for n in lengths:
        near = sum(min(i, reach) + 1 + min(n - 1 - i, reach) for i in range(n))
        pairs = num_global * n * n + (config.num_layers - num_global) * near
        layers = config.num_layers * 2 * n * (4 * d * d + 3 * d * config.ffn_size)
        total += layers + 4 * pairs * d + 2 * n * d * (d + config.vocab_size)
    return 3 * total


def hugging_face_inputs(batch: PackedBatch) -> dict[str, Tensor]:
    """input_ids, labels and, where sequences differ in length, attention_mask, (S, L) int64, of a standard-MLM batch on
    the host."""
    labels = torch.full((batch.counts.original,), -100)
    labels[batch.masked_index.long()] = batch.labels.long()
    ids, real = padded(batch.ids, batch.visible.lengths, pad=PAD_ID)
    inputs = {"input_ids": ids, "labels": padded(labels, batch.visible.lengths, pad=-100)[0]}
    return inputs if bool(real.all()) else {**inputs, "attention_mask": real.long()}


@torch.no_grad()
def copy_weights(ours: MaeLm, theirs: Any) -> None:
    """Gives `theirs`, a RobertaForMaskedLM, the weights of `ours`, which must have no decoder and no relative bias."""
    encoder, head = ours.encoder, ours.head
    block: Any
    embeddings = theirs.roberta.embeddings
    vocab = ours.config.vocab_size
    embeddings.word_embeddings.weight.copy_(encoder.token_table[:vocab])
    embeddings.position_embeddings.weight.zero_()
    embeddings.position_embeddings.weight[_OFFSET:].copy_(encoder.position_table)
    embeddings.token_type_embeddings.weight.zero_()
    embeddings.LayerNorm.load_state_dict(encoder.embedding_norm.state_dict())
    for block, layer in zip(encoder.blocks, theirs.roberta.encoder.layer, strict=True):
        projections = (layer.attention.self.query, layer.attention.self.key, layer.attention.self.value)
        weights, biases = block.attention.qkv.weight.chunk(3), block.attention.qkv.bias.chunk(3)
        for projection, weight, bias in zip(projections, weights, biases, strict=True):
            projection.weight.copy_(weight)
            projection.bias.copy_(bias)
        layer.attention.output.dense.load_state_dict(block.attention.out.state_dict())
        layer.attention.output.LayerNorm.load_state_dict(block.attention_norm.state_dict())
        layer.intermediate.dense.load_state_dict(block.ffn_in.state_dict())
        layer.output.dense.load_state_dict(block.ffn_out.state_dict())
        layer.output.LayerNorm.load_state_dict(block.ffn_norm.state_dict())
    theirs.lm_head.dense.load_state_dict(head.dense.state_dict())
    theirs.lm_head.layer_norm.load_state_dict(head.norm.state_dict())
    theirs.lm_head.decoder.bias.copy_(head.vocabulary_bias[:vocab])
