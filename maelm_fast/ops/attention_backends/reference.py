"""Plain PyTorch (ops/reference/attention.py), one sequence after another: what the other backends are compared with."""

from __future__ import annotations

from torch import Tensor

from maelm_fast.ops.attention_inputs import Call
from maelm_fast.ops.reference.attention import attention


def why_not(call: Call) -> list[str]:
    return []


def run(call: Call) -> Tensor:
    return attention(
        call.q,
        call.k,
        call.v,
        call.layout.queries,
        call.layout.keys,
        None if call.bias is None else call.bias.line,
        scale=call.scale,
        dropout_p=call.dropout_p,
        seed=call.seed,
        place=call.place,
    )
