"""The transformers library as it is called here, to read directories of encoders: nothing is downloaded, no code of a
directory is run, nothing is printed, and what goes wrong is one line."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from maelm_fast.config import require
from maelm_fast.errors import UserError

LONGEST = 512
"""Tokens of an input, of a model that names no limit."""
LOCAL = {"local_files_only": True, "trust_remote_code": False}


_DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "attention_dropout",
    "embedding_dropout",
    "mlp_dropout",
    "hidden_dropout",
    "dropout",
)


def require_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UserError("Hugging Face directories need transformers: pip install transformers") from None
    return transformers


def new_model(config: Any) -> Any:
    """transformers' encoder class for a configuration, without pooler, with random weights in fp32."""
    transformers = require_transformers()
    return transformers.AutoModel.from_config(config, dtype=torch.float32, **without_pooler(config))


def without_pooler(config: Any) -> dict[str, bool]:
    transformers = require_transformers()
    kind = transformers.AutoModel._model_mapping[type(config)]
    return {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(kind.__init__).parameters else {}


@contextlib.contextmanager
def transformers_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of a dozen kinds, some of them of other libraries
        reason = " ".join(str(error).split()) or error.__class__.__name__
        raise UserError(f"{path}: transformers cannot load it ({reason[:200]})") from None


def longest_input(model: nn.Module) -> int:
    """Tokens it takes at most. RoBERTa's kin number positions from behind the padding token's."""
    limit = int(getattr(model.config, "max_position_embeddings", LONGEST))
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            limit -= module.padding_idx + 1  # type: ignore[operator]
    return limit


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and remarks on heads that are not used."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def read_config(path: Path) -> dict[str, Any]:
    try:
        data = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        data = None
    if not isinstance(data, dict):
        raise UserError(f"{path / 'config.json'}: not the configuration of a Hugging Face model")
    return data


def check_kind(path: Path, config: Any) -> None:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    kind = config.model_type
    causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    decodes = causal or config.is_encoder_decoder or getattr(config, "is_decoder", False)
    require(
        not decodes,
        f"{path}: model_type '{kind}' is no bidirectional encoder; RoBERTa, BERT, MPNet, ModernBERT and the like are",
    )


def set_dropout(path: Path, config: Any, dropout: float) -> None:
    known = [name for name in _DROPOUTS if hasattr(config, name)]
    require(
        bool(known),
        f"{path}: model_type '{config.model_type}' has none of the dropout fields that are known here, so that its "
        f"dropout cannot be set; known: {', '.join(_DROPOUTS)}",
    )
    for name in known:
        setattr(config, name, dropout)
