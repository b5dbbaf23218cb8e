"""The compiled attention for the CPU (csrc/ops/attention.cpp): scores stay in the core's caches, forward and backward.

It computes in fp32; bf16 and fp16 are widened and rounded at its edges. On a CPU with AVX-512's bf16 products it
multiplies bf16 tensors as they are (attention_bf16.cpp), with fp32 sums, and computes in fp32 between two products. The
bias is looked up by distance as it goes, so nothing is written out for all pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maelm_fast.ops import dispatch
from maelm_fast.ops.attention_inputs import Call
from maelm_fast.ops.registration import describe
from maelm_fast.ops.stacked import apart, gradients_of, stacked_of

HEAD_DIMS = (16, 32, 64, 128)


def why_not(call: Call) -> list[str]:
    found = dispatch.native_reasons("attention", call.q, call.k, call.v)
    if call.q.shape[-1] not in HEAD_DIMS:
        known = f"{', '.join(map(str, HEAD_DIMS[:-1]))} and {HEAD_DIMS[-1]}"
        found.append(f"head_dim {call.q.shape[-1]} (it takes {known})")
    return found


def run(call: Call) -> Tensor:
    queries, keys = call.layout.queries, call.layout.keys
    line = None if call.bias is None else call.bias.line
    layout = (queries.cu_seqlens, keys.cu_seqlens, queries.positions, keys.positions)
    numbers = (call.scale, call.dropout_p, call.seed, call.place)
    out: Tensor = torch.ops.maelm_fast.attention_native_fwd(call.q, call.k, call.v, line, *layout, *numbers)[0]
    return out


def _fake_fwd(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _fake_bwd(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    line: Tensor | None,
    q_starts: Tensor,
    k_starts: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    line_gradient: bool,
    *numbers: Any,
) -> tuple[list[Tensor], Tensor]:
    grad_line = line.new_empty(line.shape) if line is not None and line_gradient else q.new_empty(0)
    return gradients_of(q, k, v, numbers[-1]), grad_line


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, line, *starts_and_positions, scale, dropout_p, seed, place = inputs
    lse = output[1]
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, lse, line, *starts_and_positions, seed)
    ctx.numbers = (scale, dropout_p, place)


def _backward(ctx: Any, grad_out: Tensor, _: None) -> tuple[Tensor | None, ...]:
    *tensors, seed = ctx.saved_tensors
    scale, dropout_p, place = ctx.numbers
    wanted = ctx.needs_input_grad[3]
    gradients, grad_line = torch.ops.maelm_fast.attention_native_bwd(
        grad_out, *tensors, wanted, scale, dropout_p, seed, place, stacked_of(*tensors[:3])
    )
    return (*apart(gradients), grad_line if wanted else None)


describe("attention_native_fwd", _fake_fwd, _setup_context, _backward)
describe("attention_native_bwd", _fake_bwd)
