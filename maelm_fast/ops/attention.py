"""attention(): packed sequences, original positions, an optional bias by distance."""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor

from maelm_fast.errors import UserError
from maelm_fast.ops import dispatch
from maelm_fast.ops.attention_backends import (
    flash,
    flex,
    grouped,
    native,
    reference,
    torch_varlen,
    triton,
    xformers,
)
from maelm_fast.ops.attention_inputs import AttentionLayout, Call, PositionBias
from maelm_fast.ops.reference.dropout import check_dropout


class Backend(Protocol):
    """A module of attention_backends/."""

    def why_not(self, call: Call) -> list[str]:
        """The reasons it cannot serve this call; none if it can."""

    def run(self, call: Call) -> Tensor: ...


BACKENDS: dict[str, Backend] = {
    "flash": flash,
    "torch": torch_varlen,
    "triton": triton,
    "xformers": xformers,
    "flex": flex,
    "native": native,
    "grouped": grouped,
    "reference": reference,
}
"""Fastest first."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout,
    bias: PositionBias | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    place: int = 0,
    backend: str | None = None,
) -> Tensor:
    """For every sequence: F.dropout(softmax(q k^T * scale + bias[key_position - query_position]), dropout_p) v.

    q: (Tq, heads, head_dim). k, v: (Tk, heads, head_dim), the dtype of q. scale: 1 / sqrt(head_dim) unless told.
    dropout_p: dropout on the attention weights, its mask a function of seed (one int64 on the device) and place
    (reference/dropout.py). A query without keys, or whose keys all have a bias of -inf, gives 0 and passes no gradient
    on. Returns (Tq, heads, head_dim). The gradients are the same in every run; flash, torch, xformers and flex promise
    that only under torch.use_deterministic_algorithms.

    Raises UserError for shapes that do not fit, a dropout without seed, or a named backend that cannot run. With a
    bias, positions outside [0, bias.positions) raise a RuntimeError on the CPU; on CUDA they are the caller's duty,
    since looking would make the host wait."""
    _check(q, k, v, layout, bias)
    check_dropout(dropout_p, seed)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    call = Call(q, k, v, layout, bias, scale, dropout_p, seed, place)
    able = {name: functools.partial(module.why_not, call) for name, module in BACKENDS.items()}
    name = dispatch.pick("attention", backend, q.device, able)
    if bias is not None and q.device.type == "cpu":
        layout.keep(("positions below", bias.positions), lambda: _check_positions(layout, bias.positions))
    return _nothing(call) if call.is_empty else BACKENDS[name].run(call)


def _nothing(call: Call) -> Tensor:
    """Zeros that depend on every input: a parameter behind them gets a gradient of zeros, not none, for which DDP, on a
    process whose micro-batch is empty, would wait."""
    inputs = [call.q, call.k, call.v] + ([] if call.bias is None else [call.bias.line])
    zero = torch.stack([rows[:0].sum().to(call.q.dtype) for rows in inputs]).sum()
    return torch.zeros_like(call.q) + zero


def _check(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, bias: PositionBias | None) -> None:
    fits = q.dim() == 3 and k.shape == v.shape and k.shape[1:] == q.shape[1:]
    if not fits or q.shape[0] != layout.queries.num_tokens or k.shape[0] != layout.keys.num_tokens:
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        raise UserError(
            f"attention: q must be ({layout.queries.num_tokens}, heads, head_dim), k and v "
            f"({layout.keys.num_tokens}, heads, head_dim); they are {shapes}"
        )
    if bias is not None and bias.line.shape[0] != q.shape[1]:
        raise UserError(f"attention: the bias has {bias.line.shape[0]} heads, q has {q.shape[1]}")


def _check_positions(layout: AttentionLayout, most: int) -> None:
    for positions in (layout.queries.positions, layout.keys.positions):
        inside = ((positions >= 0) & (positions < most)).all()
        torch._assert_async(inside, f"attention: with a bias, positions must lie in [0, {most})")
