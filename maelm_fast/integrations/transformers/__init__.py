"""For transformers' models and loops. The names below are imported when they are first used, transformers with those
that need it. Importing maelm_fast.integrations.transformers.attention registers the attention `maelm`, importing
maelm_fast.integrations.transformers.modeling registers MAE-LM's classes.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "MaeLmConfig": "modeling",
    "MaeLmForPreTraining": "modeling",
    "MaskedTokenDataset": "collator",
    "PackedMaskingCollator": "collator",
}
"""Public name -> the module of this package that has it."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
