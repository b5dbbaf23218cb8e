"""MaeLm: encoder without [MASK], decoder, tied head. With `decoder="none"` it is the RoBERTa baseline, same blocks.

A step:

    model = MaeLm(presets.get("base").model)
    loss_sum, correct = model(batch)                 # batch: PackedBatch
    (loss_sum / batch.counts.masked).backward()
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maelm_fast import ops
from maelm_fast.batch import PackedBatch
from maelm_fast.config import ModelConfig
from maelm_fast.model.block import init_weights
from maelm_fast.model.decoder import CrossDecoder, SelfDecoder
from maelm_fast.model.encoder import Encoder


class Head(nn.Module):
    """dense, GELU, LayerNorm, then the tied token table and a vocabulary bias; masked tokens only."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.vocabulary_bias = nn.Parameter(torch.empty(config.table_size))

    def transform(self, x: Tensor) -> Tensor:
        return ops.layer_norm(F.gelu(self.dense(x)), self.norm.weight, self.norm.bias, self.norm.eps)

    def loss(self, x: Tensor, table: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return ops.masked_cross_entropy(
            self.transform(x), table, self.vocabulary_bias, labels, vocab_size=self.vocab_size
        )

    def logits(self, x: Tensor, table: Tensor) -> Tensor:
        return ops.masked_logits(self.transform(x), table, self.vocabulary_bias, self.vocab_size)


class MaeLm(nn.Module):
    """A masked language model whose encoder never sees [MASK] (unless there is no decoder).

    The [MASK] embedding is the last token's row of the tied table (released code), so `<mask>` must be the vocabulary's
    last token unless `mask_id` says otherwise."""

    def __init__(self, config: ModelConfig, mask_id: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.mask_id = config.vocab_size - 1 if mask_id is None else mask_id
        self.encoder = Encoder(config)
        self.decoder: SelfDecoder | CrossDecoder | None = None
        if config.decoder != "none":
            self.decoder = SelfDecoder(config) if config.decoder == "self" else CrossDecoder(config)
        self.head = Head(config)
        init_weights(self, config)

    @property
    def encoder_sees_mask(self) -> bool:
        """Whether batches for this model leave [MASK] in the encoder's row."""
        return self.decoder is None

    def masked_states(self, batch: PackedBatch, dropout_seed: Tensor | None = None) -> Tensor:
        """(M, d): what the head reads, one row per masked token."""
        if self.decoder is None:
            last = (batch.masked_index, batch.masked)
            return self.encoder(batch.visible_ids, batch.visible, dropout_seed=dropout_seed, last=last)  # type: ignore[no-any-return]
        encoded = self.encoder(batch.visible_ids, batch.visible, dropout_seed=dropout_seed)
        return self.decoder(encoded, batch, self.encoder.token_table[self.mask_id])  # type: ignore[no-any-return]

    def forward(self, batch: PackedBatch, dropout_seed: Tensor | int | None = None) -> tuple[Tensor, Tensor]:
        """(loss, correct): sum of the masked tokens' losses in nats, 0-d fp32, and how many were predicted, 0-d int64.

        dropout_seed: one int64, a tensor on the device where a captured graph is to be replayed with others; if None,
        from PyTorch's default generator. Divide the loss by the number of masked tokens of the
        whole update, over micro-batches and ranks."""
        states = self.masked_states(batch, self._seed(dropout_seed, batch.visible_ids.device))
        return self.head.loss(states, self.encoder.token_table, batch.labels)

    def _seed(self, seed: Tensor | int | None, device: torch.device) -> Tensor | None:
        if not (self.training and self.config.dropout):
            return None
        if seed is None:
            return torch.randint(2**62, (), device=device)
        return seed if isinstance(seed, Tensor) else torch.full((), seed, dtype=torch.int64, device=device)

    def logits(self, batch: PackedBatch) -> Tensor:
        """(M, vocab_size) scores of the masked tokens."""
        return self.head.logits(self.masked_states(batch), self.encoder.token_table)
