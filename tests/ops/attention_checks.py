"""What attention's backends are checked against: flash attention's rounding, written out in PyTorch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from maelm_fast import native
from maelm_fast.batch import Layout
from maelm_fast.ops import AttentionLayout, PositionBias, attention
from maelm_fast.ops.dispatch import triton_installed
from maelm_fast.ops.reference.dropout import keep_weights
from tests.ops.checks import (
    DEVICE,
    DTYPES,
    assert_as_good_as_pytorch,
    gapped_layout,
    outputs_and_gradients,
    poisoned_memory,
    seed_tensor,
    strided,
)

HEADS, DIM, POSITIONS = 3, 8, 128
gapped = functools.partial(gapped_layout, POSITIONS)
kernel = pytest.mark.skipif(not triton_installed(), reason="triton is not installed")
compiled = pytest.mark.skipif(
    DEVICE != "cpu" or not native.has("attention", "cpu"),
    reason=native.why_not("cpu") if DEVICE == "cpu" else "the compiled attention is for the CPU",
)
GPU_DTYPES = DTYPES if DEVICE == "cpu" else DTYPES[1:]  # on a GPU the kernel takes bf16 and fp16
NAMES = ("out", "grad_q", "grad_k", "grad_v", "grad_line")


def inputs(queries: Layout, keys: Layout, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    rows = (queries.num_tokens, keys.num_tokens, keys.num_tokens)
    tensors = [torch.randn(n, HEADS, DIM, dtype=dtype) for n in rows]
    return [*tensors, torch.randn(HEADS, 2 * POSITIONS - 1, dtype=dtype)]


def whole(q: Tensor, k: Tensor, v: Tensor, queries: Layout, keys: Layout, line: Tensor | None) -> Tensor:
    """All pairs of all sequences at once, other sequences masked out."""
    owner_q = torch.repeat_interleave(torch.arange(len(queries.lengths)), torch.tensor(queries.lengths))
    owner_k = torch.repeat_interleave(torch.arange(len(keys.lengths)), torch.tensor(keys.lengths))
    scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
    if line is not None:
        scores = scores + line[:, keys.positions[None, :].long() - queries.positions[:, None].long() + POSITIONS - 1]
    scores = scores.masked_fill(owner_q[:, None] != owner_k[None, :], float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), v)


def on_device(layout: Layout) -> Layout:
    return layout.to(DEVICE)


class Flash(torch.autograd.Function):
    """What flash attention rounds, in PyTorch, one sequence: products at q's dtype, softmax in fp32, and a backward
    pass that has the rounded output to go by. bias: (heads, Lq, Lk) fp32. keep: the same shape, 0 or 1 / (1 - p)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, keep: Tensor, scale: float) -> Tensor:
        weights = (torch.einsum("qhd,khd->hqk", q, k).float() * scale + bias).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", (weights * keep).to(q.dtype), v)
        ctx.save_for_backward(q, k, v, weights, keep, out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, weights, keep, out = ctx.saved_tensors
        delta = (grad.float() * out.float()).sum(-1).t()[:, :, None]
        scores = weights * (torch.einsum("qhd,khd->hqk", grad, v).float() * keep - delta)
        grad_q = torch.einsum("hqk,khd->qhd", scores.to(q.dtype), k) * ctx.scale
        grad_k = torch.einsum("hqk,qhd->khd", scores.to(q.dtype), q) * ctx.scale
        grad_v = torch.einsum("hqk,qhd->khd", (weights * keep).to(q.dtype), grad)
        return grad_q, grad_k, grad_v, scores, None, None


def flash(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, bias: PositionBias | None, p: float) -> Tensor:
    outputs, start = [], 0
    places = layout.queries.positions.split(layout.queries.lengths), layout.keys.positions.split(layout.keys.lengths)
    rows = q.split(layout.queries.lengths), k.split(layout.keys.lengths), v.split(layout.keys.lengths)
    for q_s, k_s, v_s, q_at, k_at in zip(*rows, *places, strict=True):
        spread, keep = torch.zeros(2, q.shape[1], len(q_s), len(k_s), device=q.device)
        if bias is not None:
            distance = (k_at[None, :] - q_at[:, None]).long().clamp(-bias.reach, bias.reach) + bias.reach
            spread = bias.line[:, distance]
        numbers = torch.arange(start, start + len(q_s), device=q.device)
        kept = keep_weights(numbers, q.shape[1], len(k_s), p, seed_tensor(), 7) if p else torch.ones_like(keep)
        outputs.append(Flash.apply(q_s, k_s, v_s, spread, kept / (1 - p), q.shape[-1] ** -0.5))
        start += len(q_s)
    return torch.cat(outputs)


def check_kernel(
    queries: Layout,
    keys: Layout | None,
    reach: int,
    dtype: torch.dtype,
    p: float = 0.0,
    dim: int = 16,
    step: int = 0,
    backend: str = "triton",
    window: bool = False,
    own_rounding: bool = False,
    positions: int = POSITIONS,
) -> None:
    """Outputs and every gradient in memory full of NaN, against float64, within twice the error of flash attention
    written in PyTorch at that dtype.

    reach: of the line; 0 for no bias. step: strided inputs. window: distances of the reach and beyond are excluded."""
    layout = AttentionLayout(on_device(queries), None if keys is None else on_device(keys))
    draw = torch.Generator().manual_seed(queries.num_tokens + dim)
    counts = (queries.num_tokens, *(layout.keys.num_tokens,) * 2)
    tensors = [torch.randn(n, HEADS, dim, generator=draw).to(DEVICE, dtype) for n in counts]
    if reach:
        tensors.append(torch.randn(HEADS, 2 * reach + 1, generator=draw).to(DEVICE))
    if step:
        tensors = [strided(t, step) for t in tensors[:3]] + tensors[3:]

    def call(backend: str, q: Tensor, k: Tensor, v: Tensor, line: Tensor | None = None) -> Tensor:
        bias = PositionBias(line, positions) if line is not None else None
        if bias is not None and window:
            bias = bias.within(reach - 1, reach - 1)
        if backend == "flash":
            return flash(q, k, v, layout, bias, p)
        seed = seed_tensor() if p else None
        return attention(q, k, v, layout, bias, dropout_p=p, seed=seed, place=7, backend=backend)

    with poisoned_memory():
        actual = outputs_and_gradients(lambda *t: call(backend, *t), tensors)
    at_dtype = outputs_and_gradients(lambda *t: call("flash", *t), tensors)
    exact = outputs_and_gradients(lambda *t: call("reference", *t), [t.double() for t in tensors])
    for name, *triple in zip(NAMES, actual, at_dtype, exact, strict=False):
        try:
            assert_as_good_as_pytorch(*triple, own_rounding=own_rounding)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


EVERY_BACKEND = ["grouped", "reference", pytest.param("native", marks=compiled), pytest.param("triton", marks=kernel)]
BACKEND_AND_DTYPE = [
    ("grouped", torch.float32),
    ("reference", torch.float32),
    pytest.param("native", torch.float32, marks=compiled),
    pytest.param("native", torch.bfloat16, marks=compiled),  # by products of its own, where the CPU has them
    pytest.param("triton", torch.bfloat16, marks=kernel),
]
SKIPPING = BACKEND_AND_DTYPE[2:]
