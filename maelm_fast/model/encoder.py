"""The encoder: what remains after pretraining. It reads packed tokens at their original positions, or, if they are to
be misaligned, at their places among the tokens it reads, which the device counts by itself."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from maelm_fast import ops
from maelm_fast.batch import Layout
from maelm_fast.config import ModelConfig
from maelm_fast.model.block import Block, Dropout, position_table
from maelm_fast.model.position_bias import RelativeBias
from maelm_fast.ops import AttentionLayout


class Encoder(nn.Module):
    """Token and position embedding, LayerNorm, dropout, then the blocks with their shared relative bias."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout_p = config.dropout
        self.aligned = config.positions == "aligned"
        self.token_table = nn.Parameter(torch.empty(config.table_size, config.hidden_size))
        self.position_table = position_table(config)
        self.embedding_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.relative_bias = RelativeBias(config, config.relative_bias) if config.relative_bias != "none" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))

    def forward(
        self,
        ids: Tensor,
        layout: Layout,
        *,
        dropout_seed: Tensor | None = None,
        last: tuple[Tensor, Layout] | None = None,
        layers: list[Tensor] | None = None,
    ) -> Tensor:
        """ids: (T,) int32. Returns (T, d).

        dropout_seed: one int64 on the device, needed in training mode if the model has dropout. last: the rows (Tq,)
        int32 that the last layer computes, and their layout; the result is then (Tq, d). layers: a list to which the
        embedding output and every block's output are appended."""
        if not self.aligned:
            layout = replace(layout, positions=consecutive_positions(layout))
        dropout = Dropout(self.dropout_p if self.training else 0.0, dropout_seed)
        norm = self.embedding_norm
        x = ops.embed_packed(
            ids,
            layout.positions,
            self.token_table,
            self.position_table,
            norm.weight,
            norm.bias,
            eps=norm.eps,
            **dropout.at(0).arguments,
        )
        bias = self.relative_bias() if self.relative_bias is not None else None
        everyone = AttentionLayout(layout)
        residual = x
        if layers is not None:
            layers.append(x)
        for i, block in enumerate(self.blocks):
            if last is not None and i == len(self.blocks) - 1:
                chosen = AttentionLayout(last[1], layout)
                x, residual = block(x, residual, chosen, bias, dropout.at(1, i), rows=last[0])
            else:
                x, residual = block(x, residual, everyone, bias, dropout.at(1, i))
            if layers is not None:
                layers.append(x)
        return x


def consecutive_positions(layout: Layout) -> Tensor:
    """(T,) int32: 0, 1, 2, ... in each sequence."""
    rows = torch.arange(layout.num_tokens, dtype=torch.int32, device=layout.cu_seqlens.device)
    sequence = torch.searchsorted(layout.cu_seqlens[1:], rows, right=True)
    return rows - layout.cu_seqlens[sequence]
