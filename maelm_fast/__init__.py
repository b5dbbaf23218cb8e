"""maelm_fast: pretraining of text encoders by masked language modelling in which [MASK] never enters the encoder.

Importing this package imports nothing else: no torch, no optional dependency. Each name below is imported when it is
first used. Nothing of another library is changed until you ask for it.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "MaeLm",
    "MaeLmForPreTraining",
    "MaskedTokenDataset",
    "PackedMaskingCollator",
    "TokenStore",
    "load",
    "ops",
    "patch",
    "presets",
    "pretrain",
    "unpatch",
]

if TYPE_CHECKING:  # for type checkers and editors, which do not run the function below
    from maelm_fast import ops, presets
    from maelm_fast.data.token_store import TokenStore
    from maelm_fast.encoders import load_encoder as load
    from maelm_fast.integrations.transformers.collator import MaskedTokenDataset, PackedMaskingCollator
    from maelm_fast.integrations.transformers.modeling import MaeLmForPreTraining
    from maelm_fast.integrations.transformers.patch import patch, unpatch
    from maelm_fast.model.maelm import MaeLm
    from maelm_fast.training.job import pretrain
else:
    _WHERE = {
        "MaeLm": "model.maelm:MaeLm",
        "MaeLmForPreTraining": "integrations.transformers.modeling:MaeLmForPreTraining",
        "MaskedTokenDataset": "integrations.transformers.collator:MaskedTokenDataset",
        "PackedMaskingCollator": "integrations.transformers.collator:PackedMaskingCollator",
        "TokenStore": "data.token_store:TokenStore",
        "load": "encoders:load_encoder",
        "ops": "ops",
        "patch": "integrations.transformers.patch:patch",
        "presets": "presets",
        "pretrain": "training.job:pretrain",
        "unpatch": "integrations.transformers.patch:unpatch",
    }

    def __getattr__(name):
        if name not in _WHERE:
            raise AttributeError(f"module 'maelm_fast' has no attribute '{name}'")
        import importlib

        module, _, attribute = _WHERE[name].partition(":")
        try:
            found = importlib.import_module(f"maelm_fast.{module}")
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package in ("", "maelm_fast"):
                raise
            raise ImportError(f"maelm_fast.{name} needs {package}: pip install {package}") from None
        globals()[name] = value = getattr(found, attribute) if attribute else found
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
