"""The decoders, used in pretraining only. None has dropout; each returns the predicted slots alone.

SelfDecoder (the paper's): every slot of the original sequences, [MASK] embeddings where tokens were removed,
bidirectional self-attention; its last layer computes masked slots only. With cross-attention in each layer it is
Table 2's "bi. self-attention + cross-attention". CrossDecoder ("cross-attention"): the masked slots alone, which attend
to the encoder's outputs and to nothing else. CausalDecoder ("uni. self-attention + cross-attention"): the original
tokens, shifted; it predicts all of them.

The relative bias, where asked for, is that of the block's first attention; a cross-attention after it has none, as in
T5. A decoder of another width has a linear layer in front, which encoder outputs and token embeddings pass alike
(released code; there it comes after the [MASK] embeddings are filled in, which is the same).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maelm_fast import ops
from maelm_fast.batch import PackedBatch
from maelm_fast.config import ModelConfig
from maelm_fast.model.block import Block, position_table
from maelm_fast.model.linear import Linear
from maelm_fast.model.position_bias import RelativeBias
from maelm_fast.ops import AttentionLayout, PositionBias


class Decoder(nn.Module):
    """What all decoders hold: a position table of their own, a LayerNorm, blocks, a relative bias on request."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        own = config.decoder_config
        widths = config.hidden_size, own.hidden_size
        self.projection = Linear(*widths) if widths[0] != widths[1] else None
        self.position_table = position_table(own)
        self.embedding_norm = nn.LayerNorm(own.hidden_size, eps=config.layer_norm_eps)
        rule = "t5" if config.relative_bias == "none" else config.relative_bias
        self.relative_bias = RelativeBias(own, rule) if config.decoder_relative_bias else None
        self.crosses = config.decoder in ("self_cross", "causal_cross")
        self.blocks = nn.ModuleList(Block(own, cross=self.crosses) for _ in range(config.decoder_layers))
        self.num_heads, self.resets_mask = own.num_heads, config.decoder_resets_mask

    def _project(self, rows: Tensor) -> Tensor:
        return rows if self.projection is None else self.projection(rows)

    def _input(self, rows: Tensor, source: Tensor, positions: Tensor, mask_embedding: Tensor) -> Tensor:
        """rows: (R, w), already projected. mask_embedding: (d,), not yet. Returns (N, w)."""
        norm = self.embedding_norm
        return ops.scatter_to_decoder(
            rows,
            source,
            self._project(mask_embedding),
            positions,
            self.position_table,
            norm.weight,
            norm.bias,
            eps=norm.eps,
        )

    def _bias(self) -> PositionBias | None:
        return self.relative_bias() if self.relative_bias is not None else None


class SelfDecoder(Decoder):
    def forward(self, encoded: Tensor, batch: PackedBatch, token_table: Tensor, mask_id: int) -> Tensor:
        """encoded: (T, d). token_table: (V, d). Returns (M, w), one row per masked token.

        A masked token that the encoder saw, as [MASK] or as another, starts from its encoder row, unless reset."""
        source = batch.source
        if self.resets_mask:
            source = source.index_fill(0, batch.masked_index.long(), -1)
        memory = self._project(encoded)
        x = residual = self._input(memory, source, batch.decoder.positions, token_table[mask_id])
        bias, everyone, masked = self._bias(), AttentionLayout(batch.decoder), batch.masked
        cross = (memory, AttentionLayout(batch.decoder, batch.visible)) if self.crosses else None
        for block in self.blocks[:-1]:
            x, residual = block(x, residual, everyone, bias, cross=cross)
        cross = (memory, AttentionLayout(masked, batch.visible)) if self.crosses else None
        chosen = AttentionLayout(masked, batch.decoder)
        last: tuple[Tensor, Tensor] = self.blocks[-1](x, residual, chosen, bias, rows=batch.masked_index, cross=cross)
        return last[0]


class CrossDecoder(Decoder):
    def forward(self, encoded: Tensor, batch: PackedBatch, token_table: Tensor, mask_id: int) -> Tensor:
        """encoded: (T, d). token_table: (V, d). Returns (M, w), one row per masked token, which starts as SelfDecoder's
        does."""
        masked = batch.masked
        source = batch.source.index_select(0, batch.masked_index)
        if self.resets_mask:
            source = torch.full_like(source, -1)
        memory = self._project(encoded)
        x = residual = self._input(memory, source, masked.positions, token_table[mask_id])
        bias, layout = self._bias(), AttentionLayout(masked, batch.visible)
        for block in self.blocks:
            x, residual = block(x, residual, layout, bias, memory=memory)
        return x


class CausalDecoder(Decoder):
    def forward(self, encoded: Tensor, batch: PackedBatch, token_table: Tensor, mask_id: int) -> Tensor:
        """encoded: (T, d). token_table: (V, d). Returns (N, w), one row per token of the original sequences.

        Slot i reads token i-1. The first reads [MASK], which no text holds: BART's </s> would here be the separator
        between lines as well, and the model knows no other special token."""
        slots = torch.arange(batch.source.shape[0], dtype=torch.int32, device=batch.source.device)
        source = torch.where(batch.decoder.positions == 0, -1, slots - 1).int()
        tokens = F.embedding(batch.original_ids, token_table).to(encoded.dtype)
        x = residual = self._input(self._project(tokens), source, batch.decoder.positions, token_table[mask_id])
        bias, everyone = self.causal_bias(), AttentionLayout(batch.decoder)
        cross = (self._project(encoded), AttentionLayout(batch.decoder, batch.visible))
        for block in self.blocks:
            x, residual = block(x, residual, everyone, bias, cross=cross)
        return x

    def causal_bias(self) -> PositionBias:
        """-inf for every key behind its query: causal attention on every backend that takes a bias."""
        bias = self._bias()
        if bias is None:
            positions = self.position_table.shape[0]
            reach = min(1, positions - 1)
            bias = PositionBias(self.position_table.new_zeros(self.num_heads, 2 * reach + 1), positions)
        behind = torch.arange(bias.line.shape[1], device=bias.line.device) > bias.reach
        return PositionBias(bias.line.masked_fill(behind, float("-inf")), bias.positions)
