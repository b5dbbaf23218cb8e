"""Which implementation of an op runs: the one that is named, or, for "auto", the fastest one that can.

A named backend runs or raises with every reason it cannot. The names: `triton` (kernels/), `native` (csrc/ops, compiled
C++ and CUDA), `reference` (ops/reference, plain PyTorch, anywhere).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from maelm_fast.config import BackendConfig
from maelm_fast.errors import UserError
from maelm_fast.ops.registration import native_reason

Reasons = Callable[[], list[str]]
log = logging.getLogger(__name__)
REFERENCE = BackendConfig(**{op.name: "reference" for op in dataclasses.fields(BackendConfig)})  # type: ignore[arg-type]
"""Plain PyTorch for every op."""
_default = BackendConfig()
picked: dict[tuple[str, str], str] = {}
"""(op, kind of device) -> what "auto" took last."""
_logged: set[tuple[str, str, str]] = set()


def set_backends(config: BackendConfig) -> None:
    """Make `config` what ops called without `backend=` use, in the whole process."""
    global _default  # noqa: PLW0603
    _default = config


@contextlib.contextmanager
def backends(config: BackendConfig | None = None, **names: str) -> Iterator[None]:
    """Within the block, ops called without `backend=` use these: `with ops.backends(add_norm="reference"): ...`"""
    before = _default
    set_backends(dataclasses.replace(before if config is None else config, **names))  # type: ignore[arg-type]
    try:
        yield
    finally:
        set_backends(before)


def pick(op: str, asked: str | None, device: torch.device, able: Mapping[str, Reasons]) -> str:
    """The backend that runs this call.

    asked: a name, "auto", or None for the process's choice. able: for each backend of the op, fastest first, a function
    that returns the reasons it cannot serve this call. Raises UserError with the reasons when the named one cannot."""
    name: str = getattr(_default, op) if asked is None else asked
    if name == "auto":
        kind = device.type
        only_named = ("triton", "flex") if kind != "cuda" else ()  # interpreted, and eager: both very slow
        name = next(b for b, reasons in able.items() if b not in only_named and not reasons())
        if not torch.compiler.is_compiling() and picked.get((op, kind)) != name:
            picked[op, kind] = name
            if (op, name, kind) not in _logged:
                _logged.add((op, name, kind))
                log.info("%s on %s: %s", op, kind, name)
        return name
    if name not in able:
        raise UserError(f"{op}: no backend '{name}'; there are: auto, {', '.join(able)}")
    if reasons := able[name]():
        raise UserError(f"{op}: backend '{name}' cannot run: {'; '.join(reasons)}")
    return name


def always() -> list[str]:
    """The reference's reasons: none."""
    return []


def triton_reasons(*tensors: Tensor) -> list[str]:
    """Why a Triton kernel cannot take these tensors."""
    reasons = []
    if not triton_installed():
        reasons.append("triton is not installed")
    if any(t.device.type != "cuda" for t in tensors) and not interpreted():
        reasons.append("the tensors are on the CPU, where kernels run only under TRITON_INTERPRET=1")
    return reasons + _dtype_reasons(tensors)


def native_reasons(op: str, *tensors: Tensor) -> list[str]:
    """Why the compiled extension cannot take these tensors."""
    if reason := native_reason(op, tensors[0].device.type):
        return [reason]
    return _dtype_reasons(tensors)


def _dtype_reasons(tensors: tuple[Tensor, ...]) -> list[str]:
    wrong = {str(t.dtype).removeprefix("torch.") for t in tensors if t.dtype not in FLOATS and t.is_floating_point()}
    return [f"dtype {', '.join(sorted(wrong))} (it takes fp32, bf16 and fp16)"] if wrong else []


FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_installed() -> bool:
    return _TRITON


_TRITON = importlib.util.find_spec("triton") is not None  # now, since torch.compile cannot trace it
