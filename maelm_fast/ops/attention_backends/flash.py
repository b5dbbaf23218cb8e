"""flash-attn 2: plain attention over packed rows. Its backward adds up dq in any order unless it is told not to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maelm_fast.ops.attention_backends.common import dense_rows, package_reasons, varlen_reasons

if TYPE_CHECKING:
    from maelm_fast.ops.attention import AttentionLayout, PositionBias


def reasons(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, bias: PositionBias | None, dropout_p: float
) -> list[str]:
    return package_reasons("flash-attn", "flash_attn", _load, varlen_reasons(q, k, v, bias, dropout_p))


def attention(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, bias: PositionBias | None, scale: float
) -> Tensor:
    """A query without keys gives 0, as it does here."""
    from flash_attn import flash_attn_varlen_func

    out: Tensor = flash_attn_varlen_func(
        *dense_rows(q, k, v), layout.queries.cu_seqlens, layout.keys.cu_seqlens, layout.queries.max_seqlen,
        layout.keys.max_seqlen, dropout_p=0.0, softmax_scale=scale,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return out


def _load() -> None:
    from flash_attn import flash_attn_varlen_func  # noqa: F401
