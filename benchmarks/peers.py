"""What the benchmarks compare with: Hugging Face's RoBERTa, built and fed as a knowledgeable user would.

RobertaForMaskedLM has our dimensions, and a copy of our weights for the gate. It has its class's attention (sdpa), or
the one that is asked for, no attention_mask where there is no padding (an all-ones mask would only be inspected and
dropped), labels of -100 outside the masked positions. Its head scores every position: that is what the class does.

RoBERTa numbers positions from padding_idx + 1, so rows 0 and 1 of its position table are unused and row p + 2 is
position p; its token type table has one row, which is zero in a copy of our weights.

transformers is imported when a model is built: whoever has it not can still list what would run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.padded import padded
from maelm_fast.batch import PackedBatch
from maelm_fast.config import ModelConfig
from maelm_fast.model.maelm import MaeLm

PAD_ID = 1  # RoBERTa's; token ids fed to it must not contain it, or its positions shift
_OFFSET = PAD_ID + 1


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
