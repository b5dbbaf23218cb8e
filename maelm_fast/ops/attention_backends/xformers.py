"""xformers' memory-efficient attention with a block-diagonal mask.

No bias: its kernels take packed sequences or a bias, never both. One dense bias over all pairs of a packed row would
have the square of the batch's tokens, nearly all of them masked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from maelm_fast.batch import Layout
from maelm_fast.ops.attention_backends.common import dense_rows, package_reasons, varlen_reasons

if TYPE_CHECKING:
    from maelm_fast.ops.attention import AttentionLayout, PositionBias


def reasons(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, bias: PositionBias | None, dropout_p: float
) -> list[str]:
    others = varlen_reasons(q, k, v, bias, dropout_p)
    if 0 in layout.queries.lengths or 0 in layout.keys.lengths:
        others.append("a sequence is empty (not all of its kernels are known to take one)")
    if torch.are_deterministic_algorithms_enabled():
        others.append("its backward pass has no deterministic mode")
    return package_reasons("xformers", "xformers", _load, others)


def attention(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, bias: PositionBias | None, scale: float
) -> Tensor:
    from xformers.ops import memory_efficient_attention

    batch = (x[None] for x in dense_rows(q, k, v))  # (1, tokens, heads, head_dim)
    out: Tensor = memory_efficient_attention(*batch, attn_bias=layout.block_diagonal, scale=scale)
    return out[0]


def block_diagonal(queries: Layout, keys: Layout) -> Any:
    """The mask on the current CUDA device. Making it copies the lengths there, so it is kept on the layout."""
    from xformers.ops.fmha.attn_bias import BlockDiagonalMask

    return BlockDiagonalMask.from_seqlens(list(queries.lengths), list(keys.lengths))


def _load() -> None:
    from xformers.ops import memory_efficient_attention  # noqa: F401
    from xformers.ops.fmha.attn_bias import BlockDiagonalMask  # noqa: F401
