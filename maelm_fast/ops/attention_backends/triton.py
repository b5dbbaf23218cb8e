"""Our Triton kernels (kernels/attention.py): the only ones with a bias by distance and with dropout from a seed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from maelm_fast.ops import dispatch
from maelm_fast.ops.attention_inputs import Call, PositionBias
from maelm_fast.ops.registration import custom_op, describe
from maelm_fast.ops.row_sums import keep_row_sums
from maelm_fast.ops.stacked import apart, gradients_of, stacked_of

if TYPE_CHECKING:
    from maelm_fast.kernels.attention import Packed

LOG2E = 1.4426950408889634
SUMMED_DIM = 64
"""Head dim up to which the kernels sum their gradients' rows: for wider ones ptxas would spill, as with a window."""


def why_not(call: Call) -> list[str]:
    q, k, v = call.q, call.k, call.v
    reasons = dispatch.triton_reasons(q, k, v)
    if q.device.type == "cuda" and q.dtype == torch.float32:
        reasons.append("dtype float32 (it takes bf16 and fp16)")
    if not q.dtype == k.dtype == v.dtype:
        reasons.append("q, k and v differ in dtype")
    if q.shape[-1] > 128:
        reasons.append(f"head_dim {q.shape[-1]} (at most 128)")
    return reasons


def run(call: Call) -> Tensor:
    line = lookup = None
    if call.bias is not None and call.bias.reach > 0:  # one bias for every distance changes nothing
        line, lookup = call.bias.line, lookup_of(call.bias)
    queries, keys = call.layout.queries, call.layout.keys
    out: Tensor = torch.ops.maelm_fast.attention_triton_fwd(
        call.q,
        call.k,
        call.v,
        line,
        lookup,
        queries.cu_seqlens,
        keys.cu_seqlens,
        queries.positions,
        keys.positions,
        *_tiles(call),
        call.scale,
        call.dropout_p,
        call.seed,
        call.place,
        line is not None and call.bias is not None and call.bias.bounded,
    )[0]
    return out


def lookup_of(bias: PositionBias) -> Tensor:
    """(heads, 3P) fp32 for the kernel: the bias times log2(e) of each distance from 1-P to P-1, then -inf, which an
    absent key is given by a position that is too large."""

    def make() -> Tensor:
        distance = torch.arange(2 * bias.positions - 1, device=bias.line.device) - (bias.positions - 1)
        line = bias.line.detach().float()[:, distance.clamp(-bias.reach, bias.reach) + bias.reach]
        return F.pad(line * LOG2E, (0, bias.positions + 1), value=float("-inf")).contiguous()

    lookup: Tensor = bias.keep("triton lookup", make)
    return lookup


def _tiles(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """The query tiles of the forward kernel and of dq, the key tiles of dkv."""
    from maelm_fast.kernels.attention_tiles import tile_lists

    layout, dim, device = call.layout, call.q.shape[-1], call.q.device
    tiles: tuple[Tensor, Tensor, Tensor] = layout.keep(
        ("triton tiles", dim), lambda: tile_lists(layout.queries.lengths, layout.keys.lengths, dim, device)
    )
    return tiles


def _packed(*tensors: Tensor) -> Packed:
    from maelm_fast.kernels.attention import Packed

    return Packed(*tensors)


def _reach(line: Tensor | None) -> int:
    return line.shape[1] // 2 if line is not None else 0


@custom_op("attention_triton_fwd")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    line: Tensor | None,
    lookup: Tensor | None,
    q_starts: Tensor,
    k_starts: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    fwd_tiles: Tensor,
    dq_tiles: Tensor,
    dkv_tiles: Tensor,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    place: int,
    bounded: bool,
) -> tuple[Tensor, Tensor]:
    """The result and the log of the softmax's denominator, (heads, Tq) fp32."""
    from maelm_fast.kernels.attention import attention_fwd

    packed = _packed(q_starts, k_starts, q_positions, k_positions, fwd_tiles, dq_tiles, dkv_tiles)
    return attention_fwd(q, k, v, lookup, _reach(line), packed, scale, dropout_p, seed, place, bounded)


@custom_op("attention_triton_bwd")
def _backward_op(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    line: Tensor | None,
    lookup: Tensor | None,
    line_gradient: bool,
    q_starts: Tensor,
    k_starts: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    fwd_tiles: Tensor,
    dq_tiles: Tensor,
    dkv_tiles: Tensor,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    place: int,
    bounded: bool,
    stacked: int,
    summed: bool,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Gradients of q, k, v, the last `stacked` of them in one tensor; if asked for, of the line; if `summed`, the sums
    over the rows of q's, k's and v's, (3, heads, head_dim) fp32. What is not asked for has no elements."""
    from maelm_fast.kernels.attention import attention_bwd

    packed = _packed(q_starts, k_starts, q_positions, k_positions, fwd_tiles, dq_tiles, dkv_tiles)
    numbers = (scale, dropout_p, seed, place, bounded)
    gradients = gradients_of(q, k, v, stacked)
    inputs = (grad_out, grad_lse, q, k, v, out, lse, lookup, _reach(line), line_gradient, packed)
    grad_line, sums = attention_bwd(*inputs, *numbers, gradients=apart(gradients), summed=summed)
    grad_line = q.new_empty(0) if grad_line is None or line is None else grad_line.to(line.dtype)
    return gradients, grad_line, q.new_empty(0, dtype=torch.float32) if sums is None else sums


def _fake_fwd(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _fake_bwd(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    line: Tensor | None,
    lookup: Tensor | None,
    line_gradient: bool,
    *others: Any,
) -> tuple[list[Tensor], Tensor, Tensor]:
    grad_line = line.new_empty(line.shape) if line is not None and line_gradient else q.new_empty(0)
    *_, stacked, summed = others
    sums = q.new_empty((3, *q.shape[1:]) if summed else (0,), dtype=torch.float32)
    return gradients_of(q, k, v, stacked), grad_line, sums


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, line, lookup, *layout, scale, dropout_p, seed, place, bounded = inputs
    ctx.save_for_backward(q, k, v, *output, line, lookup, *layout, seed)
    ctx.numbers = (scale, dropout_p, place, bounded)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, line, lookup, *layout, seed = ctx.saved_tensors
    scale, dropout_p, place, bounded = ctx.numbers
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    wanted = line is not None and ctx.needs_input_grad[3]
    narrow = q.shape[-1] <= SUMMED_DIM and not bounded
    summed = narrow and grad_lse is None and not torch.compiler.is_compiling()
    numbers = (scale, dropout_p, seed, place, bounded, stacked_of(q, k, v), summed)
    gradients, grad_line, sums = torch.ops.maelm_fast.attention_triton_bwd(
        grad_out, grad_lse, q, k, v, out, lse, line, lookup, wanted, *layout, *numbers
    )
    each = apart(gradients)
    if summed:
        for gradient, its in zip(each, sums, strict=True):
            keep_row_sums(gradient, its)
    return (*each, grad_line if wanted else None)


describe("attention_triton_fwd", _fake_fwd, _setup_context, _backward)
describe("attention_triton_bwd", _fake_bwd)
