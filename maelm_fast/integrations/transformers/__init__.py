"""transformers: importing this registers the attention named `maelm`. The rest is imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

import maelm_fast.integrations.transformers.attention  # noqa: F401  registers

_PLACES: dict[str, str] = {}
"""Public name -> the module of this package that has it."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
