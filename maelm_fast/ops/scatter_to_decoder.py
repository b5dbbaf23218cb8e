"""scatter_to_decoder(): the decoder's input. Its kernels are compiled (csrc/ops), for the CPU and for CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maelm_fast.ops import dispatch
from maelm_fast.ops.reference.scatter_to_decoder import scatter_to_decoder as reference
from maelm_fast.ops.registration import describe

CUDA_WIDTH = 4096
"""Widest row the CUDA kernels take."""


def scatter_to_decoder(
    encoder_out: Tensor,
    source: Tensor,
    mask_embedding: Tensor,
    positions: Tensor,
    position_table: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    backend: str | None = None,
) -> Tensor:
    """layer_norm(where(source >= 0, encoder_out[source], mask_embedding) + position_table[positions]).

    encoder_out: (T, d). source: (N,) int32 or int64, an encoder row or -1 for the [MASK] embedding, each row at most
    once. positions: (N,) int32 or int64. mask_embedding: (d,). position_table: (P, d). weight, bias: (d,). The
    parameters may be fp32 beside bf16 or fp16 rows; gradients have the dtype of what they belong to, and their sums are
    taken in fp32. Returns (N, d) in encoder_out's dtype.

    Raises UserError when the named backend does not exist or cannot run. On the CPU, indices out of range and rows
    named twice raise a RuntimeError; on CUDA they are the caller's duty, since looking would make the host wait."""
    tensors = (encoder_out, mask_embedding, position_table, weight, bias)
    name = dispatch.pick(
        "scatter_to_decoder",
        backend,
        encoder_out.device,
        {"native": lambda: _native_reasons(*tensors), "reference": dispatch.always},
    )
    if name == "native":
        out, _, _ = torch.ops.maelm_fast.scatter_to_decoder_native_fwd(
            encoder_out, source, mask_embedding, positions, position_table, weight, bias, eps
        )
        return out  # type: ignore[no-any-return]
    return reference(encoder_out, source, mask_embedding, positions, position_table, weight, bias, eps=eps)


def _native_reasons(*tensors: Tensor) -> list[str]:
    reasons = dispatch.native_reasons("scatter_to_decoder", *tensors)
    width = tensors[0].shape[-1]
    if tensors[0].is_cuda and width > CUDA_WIDTH:
        reasons.append(f"width {width} (on CUDA it takes up to {CUDA_WIDTH})")
    return reasons


def _fake_fwd(
    encoder_out: Tensor,
    source: Tensor,
    mask_embedding: Tensor,
    positions: Tensor,
    position_table: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    slots = source.shape[0]
    moments = encoder_out.new_empty(slots, dtype=torch.float32)
    return encoder_out.new_empty(slots, encoder_out.shape[1]), moments, torch.empty_like(moments)


def _fake_bwd(
    grad_out: Tensor,
    encoder_out: Tensor,
    source: Tensor,
    mask_embedding: Tensor,
    positions: Tensor,
    position_table: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    deterministic: bool,
) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in (encoder_out, mask_embedding, position_table, weight, bias))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(*inputs[:-1], mean, rstd)


def _backward(ctx: Any, grad_out: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    run = torch.ops.maelm_fast.scatter_to_decoder_native_bwd
    encoder, mask, table, weight, bias = run(grad_out, *ctx.saved_tensors, deterministic)
    return encoder, None, mask, None, table, weight, bias


describe("scatter_to_decoder_native_fwd", _fake_fwd, _setup_context, _backward)
describe("scatter_to_decoder_native_bwd", _fake_bwd)
