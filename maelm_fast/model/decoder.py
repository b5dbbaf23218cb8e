"""The decoders, used in pretraining only. Neither has dropout; each returns the masked slots alone.

SelfDecoder (the paper's): every slot of the original sequences, [MASK] embeddings where tokens were removed,
bidirectional self-attention; its last layer computes masked slots only. CrossDecoder (Table 2, "cross-attention"):
the masked slots alone, which attend to the encoder's outputs and to nothing else.
"""

from __future__ import annotations

from torch import Tensor, nn

from maelm_fast import ops
from maelm_fast.batch import PackedBatch
from maelm_fast.config import ModelConfig
from maelm_fast.model.block import Block, position_table
from maelm_fast.model.position_bias import RelativeBias
from maelm_fast.ops import AttentionLayout, PositionBias


class Decoder(nn.Module):
    """What both decoders hold: a position table of their own, a LayerNorm, blocks, a relative bias on request."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.position_table = position_table(config)
        self.embedding_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        rule = "t5" if config.relative_bias == "none" else config.relative_bias
        self.relative_bias = RelativeBias(config, rule) if config.decoder_relative_bias else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.decoder_layers))

    def _input(self, encoded: Tensor, source: Tensor, positions: Tensor, mask_embedding: Tensor) -> Tensor:
        norm = self.embedding_norm
        return ops.scatter_to_decoder(
            encoded, source, mask_embedding, positions, self.position_table, norm.weight, norm.bias, eps=norm.eps
        )

    def _bias(self) -> PositionBias | None:
        return self.relative_bias() if self.relative_bias is not None else None


class SelfDecoder(Decoder):
    def forward(self, encoded: Tensor, batch: PackedBatch, mask_embedding: Tensor) -> Tensor:
        """encoded: (T, d). mask_embedding: (d,). Returns (M, d), one row per masked token."""
        x = self._input(encoded, batch.source, batch.decoder_positions, mask_embedding)
        bias, everyone = self._bias(), AttentionLayout(batch.decoder)
        for block in self.blocks[:-1]:
            x = block(x, everyone, bias)
        last: Tensor = self.blocks[-1](x, AttentionLayout(batch.masked, batch.decoder), bias, rows=batch.masked_index)
        return last


class CrossDecoder(Decoder):
    def forward(self, encoded: Tensor, batch: PackedBatch, mask_embedding: Tensor) -> Tensor:
        """encoded: (T, d). mask_embedding: (d,). Returns (M, d), one row per masked token.

        A masked token that the encoder saw as a random or unchanged one (BERT policy) starts from its encoder row."""
        masked = batch.masked
        source = batch.source.index_select(0, batch.masked_index)
        x = self._input(encoded, source, masked.positions, mask_embedding)
        bias, layout = self._bias(), AttentionLayout(masked, batch.visible)
        for block in self.blocks:
            x = block(x, layout, bias, memory=encoded)
        return x
