"""torch.nn.attention.varlen: flash-attn 2 as PyTorch ships it; from 2.14 on it may choose cuDNN by itself.

Asked of what is installed, not of its version: the module came with 2.10, its `scale` with 2.11.
"""

from __future__ import annotations

import importlib.util
import inspect

import torch
from torch import Tensor

from maelm_fast.ops.attention_backends.common import dense_rows, varlen_reasons
from maelm_fast.ops.attention_inputs import Call


def why_not(call: Call) -> list[str]:
    found = varlen_reasons(call)
    if 0 in call.layout.queries.lengths or 0 in call.layout.keys.lengths:
        found.append("a sequence is empty (cuDNN, which it may choose, is not known to take one)")
    return found or _lacking()


def run(call: Call) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    queries, keys = call.layout.queries, call.layout.keys
    q, k, v = dense_rows(call)
    boundaries = (queries.cu_seqlens, keys.cu_seqlens, queries.max_seqlen, keys.max_seqlen)
    out = varlen_attn(q, k, v, *boundaries, scale=call.scale)
    assert isinstance(out, Tensor)  # a pair only where the log-sum-exp is asked for
    return out


def _lacking() -> list[str]:
    """What this torch lacks; looked up once, since importing the module is slow."""
    global _lack  # noqa: PLW0603
    if _lack is None:
        _lack = []
        if importlib.util.find_spec("torch.nn.attention.varlen") is None:
            _lack.append(f"torch {torch.__version__} has no torch.nn.attention.varlen (2.11 has)")
        else:
            from torch.nn.attention.varlen import varlen_attn

            if "scale" not in inspect.signature(varlen_attn).parameters:
                _lack.append(f"varlen_attn of torch {torch.__version__} takes no scale (that of 2.11 does)")
    return _lack


_lack: list[str] | None = None
