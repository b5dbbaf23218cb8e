"""Plain PyTorch reference of the masked-token loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def masked_logits(hidden: Tensor, table: Tensor, bias: Tensor, vocab_size: int) -> Tensor:
    """(M, vocab_size) scores of hidden (M, d) against the tied table (V, d); rows past vocab_size only pad it."""
    if vocab_size == table.shape[0]:  # slicing nothing off would still cost the backward pass a table of zeros
        return F.linear(hidden, table, bias)
    return F.linear(hidden, table[:vocab_size], bias[:vocab_size])


def masked_cross_entropy(
    hidden: Tensor, table: Tensor, bias: Tensor, labels: Tensor, *, vocab_size: int, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(F.cross_entropy(logits, labels, reduction="sum") + z_loss * logits.logsumexp(-1).square().sum(),
    (logits.argmax(-1) == labels).sum()), softmax in fp32.

    hidden: (M, d). table: (V, d) with V >= vocab_size. bias: (V,). labels: (M,) int32. Both results are 0-d: the loss
    in nats, fp32 (fp64 for fp64 input), and the number of correct predictions, int64. M may be 0."""
    logits = masked_logits(hidden, table, bias, vocab_size)
    wide = logits if logits.element_size() >= 4 else logits.float()
    loss = F.cross_entropy(wide, labels.long(), reduction="sum")
    if z_loss:
        loss = loss + z_loss * wide.logsumexp(-1).square().sum()
    with torch.no_grad():
        correct = (logits.argmax(dim=-1) == labels).sum()
    return loss, correct
