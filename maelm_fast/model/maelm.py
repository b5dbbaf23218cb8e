"""MaeLm: encoder without [MASK], decoder, tied head. With `decoder="none"` it is the RoBERTa baseline, same blocks.

A step:

    model = MaeLm(presets.get("base").model)
    loss_sum, correct = model(batch)                 # batch: PackedBatch
    (loss_sum / model.predicted_tokens(batch.counts)).backward()
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maelm_fast import ops
from maelm_fast.batch import PackedBatch, TokenCounts
from maelm_fast.config import ModelConfig, require
from maelm_fast.model.block import init_weights
from maelm_fast.model.decoder import CausalDecoder, CrossDecoder, SelfDecoder
from maelm_fast.model.encoder import Encoder
from maelm_fast.model.linear import Linear

_DECODERS: dict[str, type[SelfDecoder] | type[CrossDecoder] | type[CausalDecoder]] = {
    "self": SelfDecoder,
    "self_cross": SelfDecoder,
    "cross": CrossDecoder,
    "causal_cross": CausalDecoder,
}


class Head(nn.Module):
    """dense, GELU, LayerNorm, a linear layer if the decoder has another width than the token table (released code: no
    bias), then the tied token table and a vocabulary bias; predicted tokens only."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.hidden_size if config.decoder == "none" else config.decoder_config.hidden_size
        self.vocab_size = config.vocab_size
        self.dense = Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.out = Linear(width, config.hidden_size, bias=False) if width != config.hidden_size else None
        self.vocabulary_bias = nn.Parameter(torch.empty(config.table_size))

    def transform(self, x: Tensor) -> Tensor:
        x = ops.layer_norm(F.gelu(self.dense(x)), self.norm.weight, self.norm.bias, self.norm.eps)
        return x if self.out is None else self.out(x)

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
        self.decoder = _DECODERS[config.decoder](config) if config.decoder != "none" else None
        self.head = Head(config)
        init_weights(self, config)

    @property
    def encoder_sees_mask(self) -> bool:
        """Whether batches for this model leave [MASK] in the encoder's row."""
        return self.decoder is None

    @property
    def predicts_all(self) -> bool:
        """Whether every token is predicted, not the masked ones only."""
        return self.config.decoder == "causal_cross"

    def predicted_tokens(self, counts: TokenCounts) -> int:
        """How many tokens the loss of a batch with these counts is the sum over: the masked ones, or all."""
        return counts.original if self.predicts_all else counts.masked

    def labels(self, batch: PackedBatch) -> Tensor:
        """(predicted_tokens,) int32: the tokens to predict."""
        return batch.original_ids if self.predicts_all else batch.labels

    def predicted_states(self, batch: PackedBatch, dropout_seed: Tensor | None = None) -> Tensor:
        """(predicted_tokens, decoder's width): what the head reads, one row per predicted token."""
        if self.decoder is None:
            last = (batch.masked_index, batch.masked)
            return self.encoder(batch.ids, batch.visible, dropout_seed=dropout_seed, last=last)  # type: ignore[no-any-return]
        encoded = self.encoder(batch.ids, batch.visible, dropout_seed=dropout_seed)
        return self.decoder(encoded, batch, self.encoder.token_table, self.mask_id)  # type: ignore[no-any-return]

    def forward(self, batch: PackedBatch, dropout_seed: Tensor | int | None = None) -> tuple[Tensor, Tensor]:
        """(loss, correct): sum of the predicted tokens' losses in nats, 0-d fp32, and how many were right, 0-d int64.

        dropout_seed: one int64, a tensor on the device where a captured graph is to be replayed with others; if None,
        from PyTorch's default generator. Divide the loss by the sum of predicted_tokens over the whole update, its
        micro-batches and ranks."""
        states = self.predicted_states(batch, self._seed(dropout_seed, batch.ids.device))
        return self.head.loss(states, self.encoder.token_table, self.labels(batch))

    def _seed(self, seed: Tensor | int | None, device: torch.device) -> Tensor | None:
        if not (self.training and self.config.dropout):
            return None
        if seed is None:
            return torch.randint(2**62, (), device=device)
        return seed if isinstance(seed, Tensor) else torch.full((), seed, dtype=torch.int64, device=device)

    def logits(self, batch: PackedBatch) -> Tensor:
        """(M, vocab_size) scores of the masked tokens. UserError if the decoder reads the tokens before them too: of a
        text to fill in, these are not all known."""
        require(
            not self.predicts_all,
            "a causal_cross decoder predicts a token from all that come before it; it cannot fill in [MASK]",
        )
        return self.head.logits(self.predicted_states(batch), self.encoder.token_table)
