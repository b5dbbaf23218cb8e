"""PyTorch's FlexAttention: sequences by a block mask, the bias as score modification. A comparison, and the way to a
bias on a GPU that the Triton kernel does not serve.

The bias line's gradient comes through the tensor that the score modification captures; on a GPU it is added up with
atomics, in any order. On a CPU there is no backward pass, and the scores are written out whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maelm_fast.batch import Layout
from maelm_fast.ops import dispatch
from maelm_fast.ops.attention_backends.common import DROPOUT, dense_rows
from maelm_fast.ops.attention_inputs import AttentionLayout, Call, PositionBias

_BLOCK = 128  # rows and keys of a block of the mask: FlexAttention's own choice


def why_not(call: Call) -> list[str]:
    q, k, v = call.q, call.k, call.v
    found = []
    if not q.dtype == k.dtype == v.dtype:
        found.append("q, k and v differ in dtype")
    if call.dropout_p > 0.0:
        found.append(DROPOUT)
    if q.device.type != "cuda":
        if any(t.requires_grad for t in (q, k, v)):
            found.append("FlexAttention has no backward pass on a CPU")
        return found
    if not dispatch.triton_installed():
        found.append("triton is not installed")
    if q.dtype not in dispatch.FLOATS:
        found.append(f"dtype {str(q.dtype).removeprefix('torch.')} (it takes fp32, bf16 and fp16)")
    if q.shape[-1] < 16:
        found.append(f"head_dim {q.shape[-1]} (at least 16)")
    if call.bias is not None and torch.are_deterministic_algorithms_enabled():
        found.append("its bias gradient has no deterministic mode")
    return found


def run(call: Call) -> Tensor:
    """A query without keys gives 0."""
    from torch.nn.attention.flex_attention import flex_attention

    layout = call.layout
    traced = call.q.device.type != "cuda" or torch.compiler.is_compiling()
    kernel: Any = flex_attention if traced else _compiled(flex_attention)
    modification = None if call.bias is None else _score_mod(call.bias, layout)
    mask = layout.keep("flex mask", lambda: block_mask(layout.queries, layout.keys))
    batch = (x.transpose(0, 1)[None] for x in dense_rows(call))  # (1, heads, tokens, head_dim)
    out: Tensor = kernel(*batch, score_mod=modification, block_mask=mask, scale=call.scale)
    return out[0].transpose(0, 1)


def _score_mod(bias: PositionBias, layout: AttentionLayout) -> Callable[..., Tensor]:
    line = bias.line.float() if bias.line.element_size() < 4 else bias.line
    reach, q_positions, k_positions = bias.reach, layout.queries.positions, layout.keys.positions

    def add_bias(score: Tensor, _: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = k_positions[key] - q_positions[query]
        return score + line[head, distance.clamp(-reach, reach) + reach]

    return add_bias


def block_mask(queries: Layout, keys: Layout) -> Any:
    """Same-sequence pairs. Which blocks hold some, and which hold nothing else, follows from the sequences of a block's
    first and last row; create_block_mask would write out all pairs of the packed row first."""
    from torch.nn.attention.flex_attention import BlockMask

    q_owner, k_owner = _owners(queries), _owners(keys)
    q_first, q_last, q_alone = _blocks(q_owner)
    k_first, k_last, k_alone = _blocks(k_owner)
    some = (q_first[:, None] <= k_last[None, :]) & (k_first[None, :] <= q_last[:, None])
    whole = some & q_alone[:, None] & k_alone[None, :]

    def same_sequence(_: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return q_owner[query] == k_owner[key]

    partial, full = _listed(some & ~whole), _listed(whole)
    sizes = (queries.num_tokens, keys.num_tokens)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=_BLOCK, mask_mod=same_sequence, seq_lengths=sizes)


def _owners(layout: Layout) -> Tensor:
    """(T,) int32: the sequence of each row."""
    rows = torch.arange(layout.num_tokens, dtype=torch.int32, device=layout.cu_seqlens.device)
    return torch.searchsorted(layout.cu_seqlens[1:], rows, right=True, out_int32=True)


def _blocks(owner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per block of rows: the first and the last one's sequence, and whether it is full and of one sequence."""
    starts = torch.arange(0, len(owner), _BLOCK, device=owner.device)
    ends = starts + _BLOCK - 1
    first, last = owner[starts], owner[ends.clamp(max=len(owner) - 1)]
    return first, last, (first == last) & (ends < len(owner))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, columns) bool -> how many are set in each row, and the columns with those that are set in front."""
    count = blocks.sum(-1, dtype=torch.int32)
    columns = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count[None, None], columns[None, None]


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    global _kernel  # noqa: PLW0603
    if _kernel is None:
        _kernel = torch.compile(function)
    return _kernel


_kernel: Callable[..., Any] | None = None
