"""Our configuration and parameters as the Hugging Face classes want them. Names of stock classes: from_huggingface.

What differs from ours: vocabulary tables have no padding rows; RoBERTa and MPNet count positions from 2 on, so two rows
of zeros come first; token types and LayoutLMv3's boxes add zeros; queries, keys and values are separate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from maelm_fast.config import ModelConfig, RunConfig, require
from maelm_fast.export.from_huggingface import CONFIG_NAMES, FAMILIES, OWN_NAMES, OWN_NETWORK, PADDED, Family
from maelm_fast.model.encoder import Encoder
from maelm_fast.model.maelm import MaeLm

OWN_CLASSES = {
    "AutoConfig": "MaeLmConfig",
    "AutoModel": "MaeLmModel",
    "AutoModelForMaskedLM": "MaeLmForMaskedLM",
    "AutoModelForSequenceClassification": "MaeLmForSequenceClassification",
    "AutoModelForTokenClassification": "MaeLmForTokenClassification",
    "AutoModelForQuestionAnswering": "MaeLmForQuestionAnswering",
}
"""Which class of modeling_maelm.py each Auto class finds."""
_SAME_NAME = ("relative_bias", "relative_buckets", "relative_max_distance", "decoder_layers", "decoder_relative_bias")
"""Fields of ModelConfig that MaeLmConfig has, too."""


def _common_fields(config: ModelConfig, special: dict[str, int]) -> dict[str, Any]:
    return {
        **{theirs: getattr(config, ours) for ours, theirs in CONFIG_NAMES.items()},
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.dropout,
        "layer_norm_eps": config.layer_norm_eps,
        "initializer_range": config.init_std,
        "bos_token_id": special["bos"],
        "pad_token_id": special["pad"],
        "eos_token_id": special["eos"],
    }


def own_holds_all(run: RunConfig) -> bool:
    """Whether MaeLmForMaskedLM computes what was pretrained. It never shows the encoder a masked token; of a run that
    did there is the encoder to export."""
    hidden = run.masking.shown == 0.0 and run.masking.policy != "random"
    return own_holds(run.model) and (hidden or run.model.decoder == "none")


def own_holds(model: ModelConfig) -> bool:
    """Whether MaeLmForMaskedLM has this network: it has not all of the ablations' decoders and positions."""
    if model.decoder == "none":
        return True
    same_size = model.decoder_config == replace(model, decoder_hidden_size=None, decoder_num_heads=None)
    return model.decoder in ("self", "cross") and same_size and model.positions == "aligned"


def own_fields(config: ModelConfig, special: dict[str, int], whole: bool = True) -> dict[str, Any]:
    """Arguments of MaeLmConfig. special: role to id (tokenizer.special_ids). whole: with decoder and head.

    auto_map says which class each AutoModel finds in the code beside it."""
    classes = dict(OWN_CLASSES)
    if not whole:
        del classes["AutoModelForMaskedLM"]
    return {
        **_common_fields(config, special),
        **{name: getattr(config, name) for name in _SAME_NAME},
        "decoder_kind": config.decoder if whole else "none",
        "mask_token_id": special["mask"],
        "auto_map": {auto: f"modeling_maelm.{name}" for auto, name in classes.items()},
    }


def own_model_config(config: Any) -> ModelConfig:
    """What a MaeLmConfig says of the network; own_fields' way back. UserError if it says what cannot be."""
    require(
        config.hidden_dropout_prob == config.attention_probs_dropout_prob,
        f"hidden_dropout_prob {config.hidden_dropout_prob} and attention_probs_dropout_prob "
        f"{config.attention_probs_dropout_prob} differ, and the model in pretraining has one rate for both",
    )
    init = {name: getattr(config, name) for name in ("position_init", "relative_init") if hasattr(config, name)}
    return ModelConfig(
        **init,
        **{ours: getattr(config, theirs) for ours, theirs in CONFIG_NAMES.items()},
        **{name: getattr(config, name) for name in (*_SAME_NAME, "layer_norm_eps")},
        decoder=config.decoder_kind,
        dropout=config.hidden_dropout_prob,
        init_std=config.initializer_range,
    )


def own_state(model: MaeLm, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """For MaeLmForMaskedLM: our parameters, and the bucket tables, which we do not store and it does. state: the
    model's state dict, where it is known already (gathered from several processes, say)."""
    theirs, vocab = {}, model.config.vocab_size
    for name, tensor in (*(model.state_dict() if state is None else state).items(), *model.named_buffers()):
        theirs[OWN_NETWORK.get(name, name)] = tensor[:vocab] if name in PADDED else tensor
    return theirs | {"head.projection.weight": theirs["encoder.token_embedding.weight"]}


def own_encoder_state(encoder: Encoder, vocab_size: int) -> dict[str, Tensor]:
    """For MaeLmModel."""
    return {
        OWN_NAMES.get(name, name): tensor[:vocab_size] if name == "token_table" else tensor
        for name, tensor in (*encoder.state_dict().items(), *encoder.named_buffers())
    }


def stock_fields(config: ModelConfig, format: str, special: dict[str, int]) -> dict[str, Any]:
    """Arguments of the stock configuration class."""
    fields = _common_fields(config, special)
    fields["max_position_embeddings"] += _family(format).first_position
    if format == "mpnet":
        fields["relative_attention_num_buckets"] = config.relative_buckets
    else:
        fields["type_vocab_size"] = 1
    if format == "layoutlmv3":
        coordinate, shape = _box_widths(config)
        fields |= {
            "has_relative_attention_bias": True,
            "rel_pos_bins": config.relative_buckets,
            "max_rel_pos": config.relative_max_distance,
            "has_spatial_attention_bias": False,
            "visual_embed": False,
            "max_2d_position_embeddings": 1,
            "coordinate_size": coordinate,
            "shape_size": shape,
        }
    return fields


def _box_widths(config: ModelConfig) -> tuple[int, int]:
    """LayoutLMv3's coordinate_size and shape_size: four of the one and two of the other fill the hidden size."""
    coordinate = -(-config.hidden_size // 6)
    return coordinate, config.hidden_size // 2 - 2 * coordinate


def _family(format: str) -> Family:
    return FAMILIES["roberta" if format == "layoutlmv3" else format]  # LayoutLMv3 took RoBERTa's names


def stock_state(model: MaeLm, format: str, prefix: str) -> dict[str, Tensor]:
    """Our tensors under the names of a stock class. prefix: of the encoder's names if there is a head, else empty."""
    config = model.config
    state = stock_encoder_state(model.encoder, config, format)
    if not prefix:
        return state
    head, names = model.head, _family(format).head
    vocabulary_bias = head.vocabulary_bias.detach()[: config.vocab_size]
    return {
        **{prefix + name: tensor for name, tensor in state.items()},
        **_parts(names["dense"], head.dense),
        **_parts(names["norm"], head.norm),
        names["bias"]: vocabulary_bias,
        f"{names['decoder']}.bias": vocabulary_bias,
        f"{names['decoder']}.weight": state["embeddings.word_embeddings.weight"],
    }


def stock_encoder_state(encoder: Encoder, config: ModelConfig, format: str) -> dict[str, Tensor]:
    """An encoder's tensors under the names of a stock class, without prefix."""
    family = _family(format)
    positions, table = encoder.position_table.detach(), encoder.token_table.detach()[: config.vocab_size]
    unused = positions.new_zeros(family.first_position, config.hidden_size)
    state = {
        "embeddings.word_embeddings.weight": table,
        "embeddings.position_embeddings.weight": torch.cat([unused, positions]),
        **_parts("embeddings.LayerNorm", encoder.embedding_norm),
    }
    if family.token_types:
        state["embeddings.token_type_embeddings.weight"] = table.new_zeros(1, config.hidden_size)
    if encoder.relative_bias is not None:
        bias = encoder.relative_bias.weight.detach()
        if format == "layoutlmv3":  # which divides the bias, too, by the root of the head's width
            state["encoder.rel_pos_bias.weight"] = bias.t().contiguous() * config.head_dim**0.5
        else:
            state["encoder.relative_attention_bias.weight"] = bias
    if format == "layoutlmv3":
        coordinate, shape = _box_widths(config)
        for axis, width in (("x", coordinate), ("y", coordinate), ("h", shape), ("w", shape)):
            state[f"embeddings.{axis}_position_embeddings.weight"] = table.new_zeros(1, width)
    for i, block in enumerate(encoder.blocks):
        theirs = f"encoder.layer.{i}."
        for name in ("attention.out", "attention_norm", "ffn_in", "ffn_out", "ffn_norm"):
            state |= _parts(theirs + family.layer[name], block.get_submodule(name))
        qkv: Any = block.get_submodule("attention.qkv")
        for part in ("weight", "bias"):
            for name, tensor in zip("qkv", getattr(qkv, part).detach().chunk(3), strict=True):
                state[f"{theirs}{family.layer[name]}.{part}"] = tensor
    return state


def _parts(theirs: str, module: torch.nn.Module) -> dict[str, Tensor]:
    return {f"{theirs}.{part}": tensor for part, tensor in module.state_dict().items()}
