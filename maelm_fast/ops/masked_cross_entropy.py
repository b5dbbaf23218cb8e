"""masked_cross_entropy(): tied projection, softmax loss and all gradients, a chunk of rows at a time.

The gradients are made in the forward pass, where a chunk's logits exist: they are written over the logits, and two
matrix products take them to the inputs. The whole (M, V) never exists, and the backward pass only scales. The chunk
loop is one for all backends; what differs is who turns logits into gradients, a Triton kernel, compiled code or plain
PyTorch, and who multiplies: native does it with linear()'s products.

As long as native's logits are few it keeps them for the backward pass instead, which makes their gradient with its
scale: the table's is then written once, and neither kept nor scaled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maelm_fast.errors import UserError
from maelm_fast.ops import dispatch
from maelm_fast.ops.linear import compute_dtype, native_reasons
from maelm_fast.ops.reference import masked_cross_entropy as reference
from maelm_fast.ops.registration import custom_op, describe

LOGITS_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}
"""Logits that exist at once. Larger chunks add to the table's gradient less often; on a CPU fresh memory costs time."""
KEPT_BYTES = 2 * LOGITS_BYTES["cpu"]
"""Logits that native keeps from the forward pass to the backward pass: about what a table's gradient takes."""


def masked_cross_entropy(
    hidden: Tensor,
    table: Tensor,
    bias: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    z_loss: float = 0.0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """logits = F.linear(hidden, table[:vocab_size], bias[:vocab_size])
    (F.cross_entropy(logits, labels, reduction="sum") + z_loss * logits.logsumexp(-1).square().sum(),
    (logits.argmax(-1) == labels).sum())

    hidden: (M, d), M may be 0. table: (V, d); its rows from vocab_size on only pad it: they are never predicted and
    their gradient is 0. bias: (V,). labels: (M,) int32 in [0, vocab_size), which is the caller's duty: another label
    gives an infinite loss (triton) or an error of PyTorch's. z_loss: weight of the squared log of the softmax's
    denominator. Returns the loss in nats, 0-d fp32 (fp64 for fp64), and the correct predictions, 0-d int64.

    Under autocast the products run in its dtype, as F.linear's do, but an fp32 table gets its gradient in fp32. At most
    256 MiB of logits exist at once on a GPU, 64 MiB on a CPU, and from the forward pass to the backward pass the
    gradients, which include one fp32 table; instead of these the native backend keeps up to 128 MiB of logits.

    backend: "triton", "native" (bf16 on some CPUs), "chunked" (plain PyTorch, any device), "reference" or "auto".
    Raises UserError if the named one cannot run or the shapes do not fit together."""
    rows, width = hidden.shape[0], table.shape[0]
    if labels.shape != (rows,) or bias.shape != (width,) or not 0 < vocab_size <= width:
        shapes = ", ".join(f"{tuple(t.shape)}" for t in (hidden, table, bias, labels))
        raise UserError(
            f"masked_cross_entropy: hidden, table, bias and labels of shape {shapes} and vocab_size {vocab_size} "
            "do not fit together"
        )
    name = dispatch.pick(
        "masked_cross_entropy",
        backend,
        hidden.device,
        {
            "triton": lambda: dispatch.triton_reasons(hidden, table, bias),
            "native": lambda: native_reasons("loss_rows", hidden, table, bias),
            "chunked": dispatch.always,
            "reference": dispatch.always,
        },
    )
    if name == "reference":
        return reference.masked_cross_entropy(hidden, table, bias, labels, vocab_size=vocab_size, z_loss=z_loss)
    if name == "native" and rows * width * torch.bfloat16.itemsize <= KEPT_BYTES:
        logits = torch.ops.maelm_fast.linear_native_fwd(hidden.to(torch.bfloat16), table, bias)
        losses, hits, _ = torch.ops.maelm_fast.loss_rows_native_fwd(logits, labels, vocab_size, float(z_loss))
        return losses.sum(), hits.sum()
    grad = torch.is_grad_enabled() and (hidden.requires_grad or table.requires_grad or bias.requires_grad)
    loss, correct, *_ = _forward(
        hidden, table, bias, labels, vocab_size, float(z_loss), compute_dtype(hidden), grad, name
    )
    return loss, correct


def _chunk_rows(rows: int, row_bytes: int, device: str) -> int:
    """Rows a chunk: chunks of equal size, as few as the memory allows, in steps of 128 (the tiles of the products)."""
    most = max(1, LOGITS_BYTES.get(device, LOGITS_BYTES["cpu"]) // row_bytes)
    even = -(-rows // max(1, -(-rows // most)))
    return max(1, min(most, -(-even // 128) * 128))


def _add_product(total: Tensor, a: Tensor, b: Tensor, fresh: bool) -> None:
    """total = a @ b if fresh, else total += a @ b. A total wider than a and b gets the unrounded product."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=0 if fresh else 1, out=total)
    elif total.is_cuda and fresh:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    elif total.is_cuda:
        total.add_(torch.mm(a, b, out_dtype=total.dtype))  # addmm refuses a wider addend in some versions
    elif fresh:
        total.copy_(torch.mm(a, b))
    else:
        total.add_(torch.mm(a, b))


def _plain_loss_rows_(
    logits: Tensor, bias: Tensor, labels: Tensor, vocab_size: int, z_loss: float, grad: bool
) -> tuple[Tensor, Tensor]:
    """kernels.masked_cross_entropy.loss_rows_ in PyTorch: in place where the logits are wide, else in an fp32 copy."""
    scores = logits[:, :vocab_size]
    wide = scores if scores.element_size() >= 4 else scores.float()
    wide += bias[:vocab_size]
    label = labels.long()[:, None]
    at_label = wide.gather(1, label)
    highest, first = wide.max(dim=1, keepdim=True)
    wide.sub_(highest).exp_()
    total = wide.sum(1, keepdim=True)
    lse = highest + total.log()
    if grad:
        wide *= (1.0 + 2.0 * z_loss * lse) / total
        wide.scatter_add_(1, label, wide.new_full((), -1.0).expand_as(label))
        if wide is not scores:
            scores.copy_(wide)
        logits[:, vocab_size:] = 0.0
    return lse - at_label + z_loss * lse.square(), first == label


def _fake(
    hidden: Tensor,
    table: Tensor,
    bias: Tensor,
    labels: Tensor,
    vocab_size: int,
    z_loss: float,
    dtype: torch.dtype,
    grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The results, unwritten: loss, correct, and the gradients of hidden, table and bias (empty without `grad`)."""
    wide, device = torch.promote_types(dtype, torch.float32), hidden.device
    return (
        torch.empty((), dtype=wide, device=device),
        torch.empty((), dtype=torch.int64, device=device),
        torch.empty(hidden.shape if grad else (0,), dtype=dtype, device=device),
        torch.empty(table.shape if grad else (0,), dtype=wide, device=device),
        torch.empty(bias.shape if grad else (0,), dtype=wide, device=device),
    )


@custom_op("masked_cross_entropy_fwd")
def _forward(
    hidden: Tensor,
    table: Tensor,
    bias: Tensor,
    labels: Tensor,
    vocab_size: int,
    z_loss: float,
    dtype: torch.dtype,
    grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    loss_rows_ = _plain_loss_rows_
    if backend == "triton":
        from maelm_fast.kernels.masked_cross_entropy import loss_rows_
    rows, width = hidden.shape[0], table.shape[0]
    results = _fake(hidden, table, bias, labels, vocab_size, z_loss, dtype, grad, backend)
    loss, correct, grad_hidden, grad_table, grad_bias = results
    for zeroed in (loss, correct, grad_bias):
        zeroed.zero_()
    if rows == 0:
        grad_table.zero_()
    native = backend == "native"  # its products take the table as it is
    hidden, bias, labels = hidden.to(dtype), bias.contiguous(), labels.int().contiguous()
    table = table if native else table.to(dtype)
    step = _chunk_rows(rows, width * dtype.itemsize, hidden.device.type)
    logits = torch.empty(0 if native else min(rows, step), width, dtype=dtype, device=hidden.device)
    for start in range(0, rows, step):
        part = slice(start, min(rows, start + step))
        x = hidden[part]
        if native:
            chunk = torch.ops.maelm_fast.linear_native_fwd(x, table, bias)
            losses, hits, lse = torch.ops.maelm_fast.loss_rows_native_fwd(chunk, labels[part], vocab_size, z_loss)
        else:
            chunk = torch.mm(x, table.t(), out=logits[: part.stop - start])
            losses, hits = loss_rows_(chunk, bias, labels[part], vocab_size, z_loss, grad)
        loss += losses.sum()
        correct += hits.sum()
        if not grad:
            continue
        if native:
            one = torch.ones_like(losses)
            chunk = torch.ops.maelm_fast.loss_rows_native_bwd(one, chunk, labels[part], lse, vocab_size, z_loss)
            grad_hidden[part], of_table, of_bias = torch.ops.maelm_fast.linear_native_bwd(chunk, x, table, True, True)
            grad_table = of_table if start == 0 else grad_table.add_(of_table)
            grad_bias += of_bias
        else:
            torch.mm(chunk, table, out=grad_hidden[part])
            _add_product(grad_table, chunk.t(), x, fresh=start == 0)
            grad_bias += chunk.sum(0, dtype=grad_bias.dtype)
    return loss, correct, grad_hidden, grad_table, grad_bias


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[2:])
    ctx.dtypes = [t.dtype for t in inputs[:3]]


def _backward(ctx: Any, grad_loss: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    """The gradients of hidden, table and bias, times grad_loss; not in a narrow dtype, which would round grad_loss."""
    wanted = zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad, strict=False)
    return tuple((g.to(grad_loss.dtype) * grad_loss).to(dtype) if needed else None for g, dtype, needed in wanted)


describe("masked_cross_entropy_fwd", _fake, _setup_context, _backward)


def _fake_rows(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    losses, lse = (logits.new_empty(rows, dtype=torch.float32) for _ in range(2))
    return losses, logits.new_empty(rows, dtype=torch.bool), lse


def _keep_logits(ctx: Any, inputs: tuple[Tensor, Tensor, int, float], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, labels, *ctx.numbers = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(logits, labels, output[2])


def _logits_gradient(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor]:
    return (torch.ops.maelm_fast.loss_rows_native_bwd(grad, *ctx.saved_tensors, *ctx.numbers),)


describe("loss_rows_native_fwd", _fake_rows, _keep_logits, _logits_gradient)
describe("loss_rows_native_bwd", lambda grad, logits, *_: torch.empty_like(logits))
