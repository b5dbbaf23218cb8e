"""attention(): packed sequences, original positions, an optional bias by distance."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from maelm_fast.batch import Layout
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
from maelm_fast.ops.layouts import layout_from_boundaries
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
    bias, positions outside [0, bias.positions), or that do not ascend within a sequence, raise a RuntimeError on the
    CPU; on CUDA they are the caller's duty, since looking would make the host wait."""
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
    if not isinstance(layout, AttentionLayout):
        raise UserError(
            f"attention: the layout is a {type(layout).__name__}: give ops.AttentionLayout(ops.layout_from_boundaries("
            "cu_seqlens)), once for all layers, or call ops.attention_varlen"
        )
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
    itself = layout.queries is layout.keys
    for rows in (layout.queries,) if itself else (layout.queries, layout.keys):
        inside = ((rows.positions >= 0) & (rows.positions < most)).all()
        torch._assert_async(inside, f"attention: with a bias, positions must lie in [0, {most})")
        starts = torch.zeros(rows.num_tokens + 1, dtype=torch.bool, device=rows.positions.device)
        starts[rows.cu_seqlens.long()] = True
        ascend = ((rows.positions.diff() > 0) | starts[1 : rows.num_tokens]).all()
        torch._assert_async(ascend, "attention: with a bias, positions must ascend within a sequence")


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: object = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    positions: Tensor | None = None,
    positions_k: Tensor | None = None,
    bias: PositionBias | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    place: int = 0,
    backend: str | None = None,
) -> Tensor:
    """attention() with the arguments of torch.nn.attention.varlen.varlen_attn (torch 2.13), for a loop that has those.

    query: (Tq, heads, head_dim). key, value: (Tk, heads, head_dim), the dtype of query; fewer heads with enable_gqa,
    which queries then share. cu_seq_q, cu_seq_k: (S+1,) integers; None is cu_seq_q. max_q, max_k: at least the longest.
    window_size: how many positions before and after itself a query sees, -1 for all: (-1, 0) is causal attention.

    Beyond torch's: positions (Tq,), and positions_k (Tk,) of keys with boundaries of their own: bias and window go by
    them; they ascend in a sequence, and each counts from 0 unless told. bias, dropout_p, seed, place, backend:
    attention()'s. Returns (Tq, heads, head_dim).

    The host reads the boundaries, so it waits for the device: layers of one batch should share a layout
    (layout_from_boundaries, layout_from_mask) and call attention(). Raises UserError for what attention() refuses;
    lengths above max_q or max_k; return_aux, seqused_k, block_table and num_splits, which it has not; and a window
    without positions over queries and keys of unequal lengths, which torch aligns at their ends."""
    missing = {"return_aux": return_aux, "seqused_k": seqused_k, "block_table": block_table, "num_splits": num_splits}
    if found := [name for name, given in missing.items() if given is not None]:
        raise UserError(f"attention_varlen: it has no {', no '.join(found)}; use torch.nn.attention.varlen.varlen_attn")
    queries = layout_from_boundaries(cu_seq_q, positions)
    keys = queries
    if cu_seq_k is not None and cu_seq_k is not cu_seq_q:
        keys = layout_from_boundaries(cu_seq_k, positions if positions_k is None else positions_k)
    if queries.max_seqlen > max_q or keys.max_seqlen > max_k:
        longest = f"{queries.max_seqlen} queries or {keys.max_seqlen} keys"
        raise UserError(f"attention_varlen: a sequence has {longest}, above max_q {max_q} or max_k {max_k}")
    before, after = (None if size < 0 else size for size in window_size)
    if before is not None or after is not None:
        if positions is None and queries.lengths != keys.lengths:
            raise UserError("attention_varlen: a window over queries and keys of unequal lengths needs positions")
        if bias is None:
            most = max(queries.max_seqlen, keys.max_seqlen) if positions is None else _above((queries, keys))
            bias = PositionBias(torch.zeros(query.shape[1], 1, device=query.device), most)
        bias = bias.within(before, after)
    if enable_gqa and key.shape[1] and query.shape[1] % key.shape[1] == 0:
        shared = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
    numbers: dict[str, Any] = {"scale": scale, "dropout_p": dropout_p, "seed": seed, "place": place, "backend": backend}
    return attention(query, key, value, AttentionLayout(queries, keys), bias, **numbers)


def _above(layouts: tuple[Layout, ...]) -> int:
    """One above the largest position. The host reads it."""
    return 1 + max((int(layout.positions.max()) for layout in layouts if layout.num_tokens), default=0)
