"""What the adapters of other packages' attention kernels share: why such a kernel cannot serve a call."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from maelm_fast.ops.attention_inputs import Call

DROPOUT = "its dropout mask would not be a function of the seed"


def varlen_reasons(call: Call) -> list[str]:
    """What flash-attn's kernels cannot do, in whichever package they come."""
    q, k, v = call.q, call.k, call.v
    reasons = []
    if any(t.device.type != "cuda" for t in (q, k, v)):
        reasons.append("the tensors are on the CPU (it needs a GPU)")
    elif torch.cuda.get_device_properties(q.device).major < 8:
        reasons.append("the GPU is older than compute capability 8.0")
    if q.dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"dtype {str(q.dtype).removeprefix('torch.')} (it takes bf16 and fp16)")
    if not q.dtype == k.dtype == v.dtype:
        reasons.append("q, k and v differ in dtype")
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        reasons.append(f"head_dim {q.shape[-1]} (a multiple of 8, at most 256)")
    if call.bias is not None:
        reasons.append("it has no bias by distance")
    if call.dropout_p > 0.0:
        reasons.append(DROPOUT)
    return reasons


def package_reasons(package: str, module: str, load: Callable[[], None], others: list[str]) -> list[str]:
    """`others`, and why the package cannot be used. load: an import statement, which torch.compile can trace. It runs
    only if nothing else speaks against the package: it takes seconds, and fails where the package was built for another
    torch."""
    if module not in _found:
        _found[module] = importlib.util.find_spec(module) is not None
    if not _found[module]:
        return [f"{package} is not installed", *others]
    if others:
        return others
    if module not in _broken:
        try:
            load()
            _broken[module] = ""
        except Exception as error:  # an undefined symbol is an ImportError, a failed assertion is not
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            _broken[module] = f"{package} is installed but does not import: {line}"
    return [_broken[module]] if _broken[module] else []


def dense_rows(call: Call) -> list[Tensor]:
    """q, k and v, copied where the last dimension is not contiguous: these kernels refuse that."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in (call.q, call.k, call.v)]


_found: dict[str, bool] = {}
_broken: dict[str, str] = {}
