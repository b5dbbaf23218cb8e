"""xformers' memory-efficient attention with a block-diagonal mask.

No bias: its kernels take packed sequences or a bias, never both. One dense bias over all pairs of a packed row would
have the square of the batch's tokens, nearly all of them masked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maelm_fast.ops.attention_backends.common import dense_rows, package_reasons, varlen_reasons
from maelm_fast.ops.attention_inputs import AttentionLayout, Call


def why_not(call: Call) -> list[str]:
    others = varlen_reasons(call)
    if 0 in call.layout.queries.lengths or 0 in call.layout.keys.lengths:
        others.append("a sequence is empty (not all of its kernels are known to take one)")
    if torch.are_deterministic_algorithms_enabled():
        others.append("its backward pass has no deterministic mode")
    return package_reasons("xformers", "xformers", _load, others)


def run(call: Call) -> Tensor:
    from xformers.ops import memory_efficient_attention

    batch = (x[None] for x in dense_rows(call))  # (1, tokens, heads, head_dim)
    out: Tensor = memory_efficient_attention(*batch, attn_bias=_mask(call.layout), scale=call.scale)
    return out[0]


def _mask(layout: AttentionLayout) -> Any:
    """On the current CUDA device. Making it copies the lengths there."""
    from xformers.ops.fmha.attn_bias import BlockDiagonalMask

    lengths = (list(layout.queries.lengths), list(layout.keys.lengths))
    return layout.keep("xformers mask", lambda: BlockDiagonalMask.from_seqlens(*lengths))


def _load() -> None:
    from xformers.ops import memory_efficient_attention  # noqa: F401
    from xformers.ops.fmha.attn_bias import BlockDiagonalMask  # noqa: F401
