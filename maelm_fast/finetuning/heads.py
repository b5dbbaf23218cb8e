"""What fine-tuning puts on an encoder (released code): a classifier of the first token, or the two ends of an answer.

Dropout of a head is drawn as the encoder's is, from one seed a step. Shapes: S inputs, T tokens of all, d hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from maelm_fast import ops
from maelm_fast.encoders import TextEncoder, TokenBatch, dropout_seed_tensor, seeded
from maelm_fast.model.block import Dropout

_PLACE = 2  # the encoder's dropout has places 0 and 1


class SequenceHead(nn.Module):
    """dropout -> dense d -> d -> tanh -> dropout -> linear, PyTorch's default initialisation."""

    def __init__(self, hidden_size: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.dropout_p = dropout
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.out = nn.Linear(hidden_size, outputs)

    def forward(self, first: Tensor, dropout_seed: Tensor | None = None) -> Tensor:
        """first: (S, d). dropout_seed: one int64 on the device, needed in training mode. Returns (S, outputs) fp32."""
        dropout = Dropout(self.dropout_p if self.training else 0.0, dropout_seed)
        x = ops.dropout(first, dropout.p, dropout.seed, dropout.at(_PLACE, 0).place)
        x = torch.tanh(self.dense(x))
        x = ops.dropout(x, dropout.p, dropout.seed, dropout.at(_PLACE, 1).place)
        return _unrounded(self.out, x)


def _unrounded(out: nn.Linear, x: Tensor) -> Tensor:
    """out(x) in fp32 also under autocast: with bf16's 8 bits the logits of two span ends are often equal."""
    with torch.autocast(x.device.type, enabled=False):
        logits: Tensor = out(x.float() if x.element_size() < 4 else x)
    return logits


class SequenceModel(nn.Module):
    """An encoder and a SequenceHead. outputs: classes, or 1 for a score. dropout: the head's; the encoder has its own.
    seed: of the head's initialisation; from PyTorch's default generator if None."""

    def __init__(self, encoder: TextEncoder, outputs: int, dropout: float = 0.1, seed: int | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        with seeded(seed):
            self.head = SequenceHead(encoder.hidden_size, outputs, dropout)

    def forward(self, batch: TokenBatch, dropout_seed: Tensor | int | None = None) -> Tensor:
        """Logits, (S, outputs) fp32. dropout_seed: an int, or one int64 on the device; from PyTorch's default generator
        if None. In evaluation mode it is not used."""
        first = self.encoder(batch, first_only=True, dropout_seed=dropout_seed)
        seed = dropout_seed_tensor(dropout_seed, first.device) if self.training else None
        logits: Tensor = self.head(first, seed)
        return logits


class SpanModel(nn.Module):
    """An encoder and a linear layer d -> 2 (start, end), weights N(0, 0.02), zero biases. seed: as SequenceModel's."""

    def __init__(self, encoder: TextEncoder, seed: int | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        with seeded(seed):
            out = nn.Linear(encoder.hidden_size, 2)
            nn.init.normal_(out.weight, std=0.02)
        nn.init.zeros_(out.bias)
        self.head = nn.ModuleDict({"out": out})

    def forward(self, batch: TokenBatch, dropout_seed: Tensor | int | None = None) -> Tensor:
        """Start and end logits of every token, (T, 2) fp32. dropout_seed: as SequenceModel's."""
        out: Any = self.head["out"]
        return _unrounded(out, self.encoder(batch, dropout_seed=dropout_seed))
