"""flash-attn 2: plain attention over packed rows. Its backward adds up dq in any order unless it is told not to."""

from __future__ import annotations

import torch
from torch import Tensor

from maelm_fast.ops.attention_backends.common import dense_rows, package_reasons, varlen_reasons
from maelm_fast.ops.attention_inputs import Call


def why_not(call: Call) -> list[str]:
    return package_reasons("flash-attn", "flash_attn", _load, varlen_reasons(call))


def run(call: Call) -> Tensor:
    """A query without keys gives 0, as it does here."""
    from flash_attn import flash_attn_varlen_func

    queries, keys = call.layout.queries, call.layout.keys
    boundaries = (queries.cu_seqlens, keys.cu_seqlens, queries.max_seqlen, keys.max_seqlen)
    deterministic = torch.are_deterministic_algorithms_enabled()
    out: Tensor = flash_attn_varlen_func(
        *dense_rows(call), *boundaries, dropout_p=0.0, softmax_scale=call.scale, deterministic=deterministic
    )
    return out


def _load() -> None:
    from flash_attn import flash_attn_varlen_func  # noqa: F401
