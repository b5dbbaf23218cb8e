"""Loss and gradient of rows of logits: the part of masked_cross_entropy that is not a matrix product.

One program a row, two passes over it: the first finds maximum and sum of exponentials together, the second writes the
gradient over the logits. The row is read twice, the second time mostly from the L2 cache, and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maelm_fast.kernels.common import FUSED


@triton.jit(do_not_specialize=["vocab_size"])
def _masked_cross_entropy_kernel(
    logits,  # (rows, width), scores without bias; with GRAD the loss's gradient by them takes their place
    bias,  # (width,)
    labels,  # (rows,) int32
    losses,  # (rows,) fp32, out
    hits,  # (rows,) int32, out: 1 where the label is the first of the highest scores
    vocab_size,  # columns from here to width are padding: outside the softmax, gradient 0
    width,
    z_loss,
    GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    label = tl.load(labels + row)
    known = (label >= 0) & (label < vocab_size)  # another label costs an infinite loss, not a stray read
    at_label = tl.load(logits + label, mask=known, other=float("-inf")).to(tl.float32)
    at_label += tl.load(bias + label, mask=known, other=0.0).to(tl.float32)
    highest = float("-inf")
    total = tl.zeros((BLOCK,), tl.float32)
    beaten = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        score = tl.load(logits + column, mask=column < width, other=0.0).to(tl.float32)
        score += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
        score = tl.where(column < vocab_size, score, float("-inf"))
        before = highest
        highest = tl.maximum(before, tl.max(score, 0))
        total = total * tl.exp(before - highest) + tl.exp(score - highest)
        beaten |= ((score > at_label) | ((score == at_label) & (column < label))).to(tl.int32)
    lse = highest + tl.log(tl.sum(total, 0))
    tl.store(losses + row, lse - at_label + z_loss * lse * lse)
    tl.store(hits + row, 1 - tl.max(beaten, 0))
    if GRAD:
        scale = 1.0 + 2.0 * z_loss * lse
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            score = tl.load(logits + column, mask=column < width, other=0.0).to(tl.float32)
            score += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
            grad = tl.where(column < vocab_size, tl.exp(score - lse) * scale, 0.0)
            grad -= (column == label).to(tl.float32)
            tl.store(logits + column, grad.to(logits.dtype.element_ty), mask=column < width)


def loss_rows_(
    logits: Tensor, bias: Tensor, labels: Tensor, vocab_size: int, z_loss: float, grad: bool
) -> tuple[Tensor, Tensor]:
    """Loss and hit of each row; with `grad`, the loss's gradient by the logits is written over them.

    logits: (n, V), contiguous, without bias. bias: (V,). labels: (n,) int32. Returns (n,) fp32 in nats, (n,) int32."""
    rows, width = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    hits = torch.empty(rows, dtype=torch.int32, device=logits.device)
    block = min(2048, triton.next_power_of_2(width))
    launch = {"BLOCK": block, "num_warps": max(1, block // 256), **FUSED}  # eight columns a thread
    with torch.cuda.device_of(logits):
        _masked_cross_entropy_kernel[(rows,)](
            logits, bias, labels, losses, hits, vocab_size, width, z_loss, GRAD=grad, **launch
        )
    return losses, hits
