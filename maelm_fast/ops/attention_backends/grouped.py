"""Attention over packed rows with nothing but PyTorch: sequences of like length are stacked and computed together.

The portable path, and a CPU's where the compiled attention (native.py) is not there or cannot run. Full sequences with
a fixed mask count all have one length and form one group without a copy. Others are padded, within a group, to the
longest of at most 64 tokens' difference.

Without bias and dropout a group is one call of scaled_dot_product_attention. With either, PyTorch would keep several
(group, heads, Lq, Lk) tensors for the backward pass; here a chunk of sequences that fits in the cache is finished
before the next begins, its weights are computed again in the backward pass, and dropout draws its mask from the seed.

Shapes: G sequences of a group, H heads, Lq and Lk padded lengths, D head_dim, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from maelm_fast.batch import Layout
from maelm_fast.errors import UserError
from maelm_fast.ops import dispatch
from maelm_fast.ops.attention_inputs import Call, PositionBias
from maelm_fast.ops.reference.dropout import keep_weights
from maelm_fast.ops.registration import describe, native_reason

_BUCKET = 64  # lengths that differ by less share a group
_CHUNK_BYTES = 16 << 20  # scores computed at a time: what a last-level cache holds


@dataclass(frozen=True)
class Group:
    """Sequences computed together. rows_*: (G, L) int64 rows, or None where the group is the whole row in order.
    key_valid: (G, Lk) bool, or None if no key is padding. distance: (G, Lq, Lk) int64, key minus query position."""

    shape: tuple[int, int, int]
    query_rows: Tensor | None
    query_valid: Tensor | None
    key_rows: Tensor | None
    key_valid: Tensor | None
    query_positions: Tensor
    key_positions: Tensor

    @cached_property
    def distance(self) -> Tensor:
        return self.key_positions[:, None, :] - self.query_positions[:, :, None]

    @cached_property
    def numbered_rows(self) -> Tensor:
        """(G, Lq) packed rows of the queries."""
        count, lq, _ = self.shape
        if self.query_rows is not None:
            return self.query_rows
        return torch.arange(count * lq, device=self.query_positions.device).view(count, lq)


class Bias(NamedTuple):
    """A position bias written out for a group."""

    values: Tensor
    """(H, G, Lq, Lk)"""
    alone: Tensor
    """(H, G, Lq) bool: queries all of whose keys it excludes with -inf."""


class Grouping:
    """The groups of one (queries, keys) pair of layouts. Made once per batch and kept on the layout."""

    def __init__(self, queries: Layout, keys: Layout) -> None:
        self.queries, self.keys = queries, keys

    @cached_property
    def groups(self) -> list[Group]:
        pairs = list(zip(self.queries.lengths, self.keys.lengths, strict=True))
        if len(set(pairs)) == 1 and min(pairs[0]) > 0:
            return [self._group(list(range(len(pairs))), whole=True)]
        members: dict[tuple[int, int], list[int]] = {}
        for s, (lq, lk) in enumerate(pairs):
            if lq and lk:
                members.setdefault((-(-lq // _BUCKET), -(-lk // _BUCKET)), []).append(s)
        return [self._group(sequences, whole=False) for sequences in members.values()]

    def _group(self, sequences: list[int], whole: bool) -> Group:
        q_rows, q_valid = _rows(self.queries, sequences)
        k_rows, k_valid = _rows(self.keys, sequences)
        return Group(
            shape=(len(sequences), q_rows.shape[1], k_rows.shape[1]),
            query_rows=None if whole else q_rows,
            query_valid=q_valid,
            key_rows=None if whole else k_rows,
            key_valid=k_valid,
            query_positions=self.queries.positions.long()[q_rows],
            key_positions=self.keys.positions.long()[k_rows],
        )


def _rows(layout: Layout, sequences: list[int]) -> tuple[Tensor, Tensor | None]:
    """(G, L) rows of the sequences, padded with each one's first row, and where they are real (None: everywhere)."""
    device = layout.positions.device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UserError(
            "attention: a CUDA graph cannot record backend 'grouped', whose rows come from the host; use "
            "runtime.precision=bf16, which kernels take, or runtime.cuda_graph=false"
        )
    lengths = torch.tensor([layout.lengths[s] for s in sequences])
    starts = torch.tensor(_starts(layout.lengths))[sequences]
    steps = torch.arange(int(lengths.max()))[None, :]
    valid = steps < lengths[:, None]
    rows = starts[:, None] + torch.where(valid, steps, 0)
    return rows.to(device), None if bool(valid.all()) else valid.to(device)


def _starts(lengths: tuple[int, ...]) -> list[int]:
    starts, total = [], 0
    for n in lengths:
        starts.append(total)
        total += n
    return starts


def why_not(call: Call) -> list[str]:
    return []


def run(call: Call) -> Tensor:
    layout, bias = call.layout, call.bias
    grouping: Grouping = layout.keep("grouping", lambda: Grouping(layout.queries, layout.keys))
    groups = grouping.groups
    biases = [None] * len(groups) if bias is None else spread(bias, grouping)
    if len(groups) == 1 and groups[0].query_rows is None:
        return _group_attention(call, groups[0], biases[0]).reshape(call.q.shape)
    result = call.q.new_zeros(call.q.shape)
    for group, group_bias in zip(groups, biases, strict=True):
        out = _group_attention(call, group, group_bias)
        assert group.query_rows is not None
        rows = group.query_rows
        if group.query_valid is not None:
            rows, out = rows[group.query_valid], out[group.query_valid]
        result = result.index_put((rows.reshape(-1),), out.reshape(-1, *call.q.shape[1:]).to(call.q.dtype))
    return result


def spread(bias: PositionBias, grouping: Grouping) -> list[Bias]:
    """The bias written out for each group; kept, since all layers use the same."""
    line = bias.line.float() if bias.line.element_size() < 4 else bias.line

    def written_out(group: Group) -> Bias:
        values: Tensor = SpreadLine.apply(line, group.distance)
        excluded = values.detach().isneginf()
        if group.key_valid is not None:
            excluded = excluded | ~group.key_valid[:, None, :]
        return Bias(values, excluded.all(-1))

    biases: list[Bias] = bias.keep(grouping, lambda: [written_out(group) for group in grouping.groups])
    return biases


def _group_attention(call: Call, group: Group, bias: Bias | None) -> Tensor:
    """(G, Lq, H, D); rows of padded queries hold nothing of use."""
    count, lq, lk = group.shape
    heads, dim = call.q.shape[1:]
    q = call.q.view(count, lq, heads, dim) if group.query_rows is None else call.q[group.query_rows]
    k, v = (x.view(count, lk, heads, dim) if group.key_rows is None else x[group.key_rows] for x in (call.k, call.v))
    if bias is None and call.dropout_p == 0.0:
        mask = None if group.key_valid is None else group.key_valid[:, None, None, :]
        batch = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return F.scaled_dot_product_attention(*batch, mask, scale=call.scale).transpose(1, 2)
    rows = group.numbered_rows if call.dropout_p else None
    values, alone = (None, None) if bias is None else (bias.values, bias.alone)
    masks = (group.key_valid, alone, rows)
    out: Tensor = ChunkedAttention.apply(q, k, v, values, *masks, call.scale, call.dropout_p, call.seed, call.place)
    return out


class ChunkedAttention(torch.autograd.Function):
    """Attention with bias and dropout, a chunk of sequences at a time, nothing of size Lq x Lk kept.

    Dropout's 1 / (1 - p) is applied to the output and to its gradient, which are smaller than the weights."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        key_valid: Tensor | None,
        alone: Tensor | None,
        rows: Tensor | None,
        scale: float,
        dropout_p: float,
        seed: Tensor | None,
        place: int,
    ) -> Tensor:
        """bias, alone: a Bias. rows: (G, Lq), the queries' packed rows, which dropout's mask depends on."""
        ctx.save_for_backward(q, k, v, bias, key_valid, alone, rows, seed)
        ctx.scale, ctx.dropout_p, ctx.place = scale, dropout_p, place
        out = torch.empty_like(q)
        with torch.autocast(q.device.type, enabled=False):
            for chunk in _chunks(q, k):
                q_c, k_c, v_c = (_heads_first(x, chunk) for x in (q, k, v))
                weights = _weights(q_c, k_c, bias, key_valid, alone, chunk, scale)
                if rows is not None:
                    weights.mul_(_keep(weights, rows[chunk], dropout_p, seed, place))
                mixed = _without(weights @ v_c, alone, chunk)
                out[chunk] = mixed.mul_(1.0 / (1.0 - dropout_p)).permute(1, 2, 0, 3)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, bias, key_valid, alone, rows, seed = ctx.saved_tensors
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        grad_bias = torch.empty_like(bias) if bias is not None and ctx.needs_input_grad[3] else None
        with torch.autocast(q.device.type, enabled=False):
            for chunk in _chunks(q, k):
                q_c, k_c, v_c, g_c = (_heads_first(x, chunk) for x in (q, k, v, grad_out))
                g_c = _without(g_c * (1.0 / (1.0 - ctx.dropout_p)), alone, chunk)
                weights = _weights(q_c, k_c, bias, key_valid, alone, chunk, ctx.scale)
                grad = g_c @ v_c.transpose(-1, -2)
                dropped = weights
                if rows is not None:
                    keep = _keep(weights, rows[chunk], ctx.dropout_p, seed, ctx.place)
                    grad.mul_(keep)
                    dropped = keep.mul_(weights)
                grad_v[chunk] = (dropped.transpose(-1, -2) @ g_c).permute(1, 2, 0, 3)
                grad = torch._softmax_backward_data(grad, weights, -1, weights.dtype)
                if grad_bias is not None:
                    grad_bias[:, chunk] = grad
                grad_q[chunk] = (grad @ k_c).mul_(ctx.scale).permute(1, 2, 0, 3)
                grad_k[chunk] = (grad.transpose(-1, -2) @ q_c).mul_(ctx.scale).permute(1, 2, 0, 3)
        return grad_q, grad_k, grad_v, grad_bias, None, None, None, None, None, None, None


def _chunks(q: Tensor, k: Tensor) -> list[slice]:
    count, lq, heads, _ = q.shape
    step = max(1, _CHUNK_BYTES // (4 * heads * lq * k.shape[1]))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _heads_first(x: Tensor, chunk: slice) -> Tensor:
    """(G, L, H, D) -> contiguous (H, c, L, D) in the dtype to compute in: on a CPU fp32, as bf16 products are slow."""
    dtype = torch.promote_types(x.dtype, torch.float32) if x.device.type == "cpu" else x.dtype
    return x[chunk].permute(2, 0, 1, 3).to(dtype).contiguous()


def _weights(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    key_valid: Tensor | None,
    alone: Tensor | None,
    chunk: slice,
    scale: float,
) -> Tensor:
    """softmax(q k^T * scale + bias): (H, c, Lq, Lk). Finite for queries that are alone, whose rows are not used."""
    scores = (q * scale) @ k.transpose(-1, -2)
    if bias is not None:
        scores.add_(bias[:, chunk])
    if key_valid is not None:
        scores.masked_fill_(~key_valid[chunk][None, :, None, :], float("-inf"))
    if alone is not None:
        scores[..., 0].masked_fill_(alone[:, chunk], 0.0)
    weights: Tensor = scores.softmax(dim=-1)
    return weights


def _without(rows: Tensor, alone: Tensor | None, chunk: slice) -> Tensor:
    """rows (H, c, Lq, D), in place: 0 for queries that are alone."""
    return rows if alone is None else rows.masked_fill_(alone[:, chunk, :, None], 0.0)


def _keep(like: Tensor, rows: Tensor, p: float, seed: Tensor | None, place: int) -> Tensor:
    """The mask of weights (H, c, Lq, Lk) of the queries with packed rows (c, Lq)."""
    if seed is None:
        raise ValueError("dropout needs a seed")
    heads, columns = like.shape[0], like.shape[-1]
    if not native_reason("keep_weights", like.device.type):
        dtype = like.dtype if like.dtype in dispatch.FLOATS else torch.float32
        draw = torch.ops.maelm_fast.keep_weights_native_fwd
        keep: Tensor = draw(rows.reshape(-1), heads, columns, p, seed, place, dtype)
        return keep.view(like.shape).to(like.dtype)
    return keep_weights(rows, heads, columns, p, seed, place, like.dtype)


class SpreadLine(torch.autograd.Function):
    """line (H, 2R+1) -> bias (H, G, Lq, Lk) at each pair's distance, at most R. Its gradient is summed in float64."""

    @staticmethod
    def forward(ctx: Any, line: Tensor, distance: Tensor) -> Tensor:
        reach = line.shape[1] // 2
        index = (distance.clamp(-reach, reach) + reach).reshape(-1)
        ctx.save_for_backward(index)
        ctx.width, ctx.dtype = line.shape[1], line.dtype
        return line.index_select(1, index).view(line.shape[0], *distance.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        heads = [torch.bincount(index, weights=g.reshape(-1).double(), minlength=ctx.width) for g in grad]
        return torch.stack(heads).to(ctx.dtype), None


def _fake_keep_weights(
    rows: Tensor, heads: int, columns: int, p: float, seed: Tensor, place: int, dtype: torch.dtype
) -> Tensor:
    return rows.new_empty((heads, rows.shape[0], columns), dtype=dtype)


describe("keep_weights_native_fwd", _fake_keep_weights)
