"""The compiled attention for the CPU (csrc/ops/attention.cpp): scores stay in the core's caches, forward and backward.

It computes in fp32; bf16 and fp16 are widened and rounded at its edges. The bias is looked up by distance as it goes,
so nothing is written out for all pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from maelm_fast.ops import dispatch
from maelm_fast.ops.registration import Direction, register

if TYPE_CHECKING:
    from maelm_fast.ops.attention import AttentionLayout, PositionBias

HEAD_DIMS = (16, 32, 64, 128)


def reasons(q: Tensor, k: Tensor, v: Tensor) -> list[str]:
    found = dispatch.native_reasons("attention", q, k, v)
    if q.shape[-1] not in HEAD_DIMS:
        found.append(f"head_dim {q.shape[-1]} (it takes {', '.join(map(str, HEAD_DIMS[:-1]))} and {HEAD_DIMS[-1]})")
    return found


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout,
    bias: PositionBias | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    place: int,
) -> Tensor:
    queries, keys = layout.queries, layout.keys
    out: Tensor = torch.ops.maelm_fast.attention_native_fwd(
        q, k, v, bias.line if bias is not None else None, queries.cu_seqlens, keys.cu_seqlens, queries.positions,
        keys.positions, scale, dropout_p, seed, place,
    )[0]  # fmt: skip
    return out


def _fake_fwd(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _fake_bwd(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, line: Tensor | None,
    q_starts: Tensor, k_starts: Tensor, q_positions: Tensor, k_positions: Tensor, line_gradient: bool, *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grad_line = line.new_empty(line.shape) if line is not None and line_gradient else q.new_empty(0)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), grad_line


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, line, *starts_and_positions, scale, dropout_p, seed, place = inputs
    lse = output[1]
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, lse, line, *starts_and_positions, seed)
    ctx.numbers = (scale, dropout_p, place)


def _differentiate(backward: Any, ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Any, ...]:
    *tensors, seed = ctx.saved_tensors
    scale, dropout_p, place = ctx.numbers
    wanted = ctx.needs_input_grad[3]
    grad_q, grad_k, grad_v, grad_line = backward(grad_out, *tensors, wanted, scale, dropout_p, seed, place)
    return grad_q, grad_k, grad_v, grad_line if wanted else None, *(None,) * 8


register("attention", Direction("", None, _fake_fwd), Direction("", None, _fake_bwd), _setup_context, _differentiate)
