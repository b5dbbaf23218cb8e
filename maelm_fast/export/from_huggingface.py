"""Weights of a RoBERTa, BERT or MPNet checkpoint under our names, to start pretraining or fine-tuning from; and of the
encoder in a directory that `export` wrote in our own format.

    initial = read_checkpoint("roberta-base/")          # a local directory; nothing is downloaded
    model = MaeLm(adapt(config, initial))               # adapt, load_initial: maelm_fast.training.initial
    fresh = load_initial(model, initial)                # what the checkpoint does not have: the decoder

The files are read as they are, without transformers. What differs from ours: queries, keys and values are separate;
RoBERTa and MPNet count positions from 2 on; RoBERTa and BERT add a token type, whose row 0 is added to our positions.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from maelm_fast.config import TABLE_MULTIPLE, ModelConfig, require
from maelm_fast.errors import UserError
from maelm_fast.model.maelm import MaeLm
from maelm_fast.training.initial import Initial

_ATTENTION = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
}
_FEED_FORWARD = {"ffn_in": "intermediate.dense", "ffn_out": "output.dense", "ffn_norm": "output.LayerNorm"}
_LM_HEAD = {
    "dense": "lm_head.dense",
    "norm": "lm_head.layer_norm",
    "bias": "lm_head.bias",
    "decoder": "lm_head.decoder",
}


@dataclass(frozen=True)
class Family:
    """How a Hugging Face architecture names and lays out what we have. layer, head: our name to theirs."""

    layer: dict[str, str]
    head: dict[str, str]
    first_position: int
    """Row of the position table where a sequence's first token is."""
    token_types: bool
    relative_bias: str | None = None


FAMILIES = {
    "roberta": Family(_ATTENTION | _FEED_FORWARD, _LM_HEAD, 2, token_types=True),
    "bert": Family(
        _ATTENTION | _FEED_FORWARD,
        {
            "dense": "cls.predictions.transform.dense",
            "norm": "cls.predictions.transform.LayerNorm",
            "bias": "cls.predictions.bias",
            "decoder": "cls.predictions.decoder",
        },
        0,
        token_types=True,
    ),
    "mpnet": Family(
        {
            "q": "attention.attn.q",
            "k": "attention.attn.k",
            "v": "attention.attn.v",
            "attention.out": "attention.attn.o",
            "attention_norm": "attention.LayerNorm",
            **_FEED_FORWARD,
        },
        _LM_HEAD,
        2,
        token_types=False,
        relative_bias="encoder.relative_attention_bias.weight",
    ),
}

CONFIG_NAMES = {
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "ffn_size": "intermediate_size",
}
"""A configuration's sizes, ours to every architecture's. RoBERTa and MPNet count first_position among the positions."""

OWN = "maelm"
"""model_type of our own format (modeling_maelm.py)."""
OWN_NAMES = {"token_table": "token_embedding.weight", "position_table": "position_embedding.weight"}
"""The encoder's parameters that have other names there."""
OWN_NETWORK = {
    **{f"encoder.{ours}": f"encoder.{theirs}" for ours, theirs in OWN_NAMES.items()},
    "decoder.position_table": "decoder.position_embedding.weight",
    "head.vocabulary_bias": "head.projection.bias",
}
"""The same of the whole network, MaeLmForMaskedLM."""
PADDED = ("encoder.token_table", "head.vocabulary_bias")
"""Ours that have padding rows, which no other architecture has."""


def read_fields(path: str | Path) -> dict[str, Any]:
    """What a checkpoint's config.json fixes of ModelConfig. UserError if our encoder cannot hold it exactly."""
    path = Path(path)
    return _model_fields(path, _read_config(path / "config.json"))


def read_checkpoint(path: str | Path) -> Initial:
    """Reads config.json, model.safetensors (or pytorch_model.bin, without running code in it) and, for the vocabulary,
    tokenizer.json of a directory. Weights come out in fp32; the LM head is among them if the checkpoint has one, but of
    our own format the encoder alone is read.

    Raises UserError if that is no checkpoint of a supported architecture, or one our encoder cannot hold exactly."""
    path = Path(path)
    require(path.is_dir(), f"{path}: not a directory; give a local directory with config.json and model.safetensors")
    data = _read_config(path / "config.json")
    kind = data["model_type"]
    fields = _model_fields(path, data)
    tensors = read_weights(path)
    has_head = any(name.startswith(("lm_head.", "cls.predictions.")) for name in tensors)
    try:
        state = _own_encoder(tensors) if kind == OWN else _translate(tensors, kind, fields, has_head)
    except KeyError as missing:
        raise UserError(f"{path}: the checkpoint has no tensor {missing}; it is no complete {kind} encoder") from None
    except RuntimeError as error:
        raise UserError(f"{path}: a tensor's shape does not fit config.json ({str(error).splitlines()[0]})") from None
    _check_shapes(path, state, fields, has_head)
    return Initial(fields, state, _vocabulary(path / "tokenizer.json"), str(path))


def _read_config(file: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file.parent}: no config.json; give the directory of a Hugging Face checkpoint") from None
    except (OSError, ValueError):
        raise UserError(f"{file}: cannot be read as JSON") from None
    require(isinstance(data, dict), f"{file}: not the configuration of a model")
    kind, known = data.get("model_type"), ", ".join((*FAMILIES, OWN))
    require(kind in FAMILIES or kind == OWN, f"{file}: model_type {kind!r} is not supported; supported: {known}")
    activation, positions = data.get("hidden_act", "gelu"), data.get("position_embedding_type", "absolute")
    require(activation == "gelu", f"{file}: hidden_act is {activation!r}; our blocks compute 'gelu' (exact) only")
    require(
        positions == "absolute",
        f"{file}: position_embedding_type is {positions!r}; only 'absolute' has a counterpart in our encoder",
    )
    for flag in ("is_decoder", "add_cross_attention", "is_encoder_decoder"):
        require(not data.get(flag), f"{file}: {flag} is set; only encoders can be read")
    return data


def _model_fields(path: Path, data: dict[str, Any]) -> dict[str, Any]:
    for theirs in CONFIG_NAMES.values():
        value = data.get(theirs)
        require(
            isinstance(value, int) and value > 0,
            f"{path / 'config.json'}: {theirs} must be a positive number, not {value}",
        )
    fields = {ours: data[theirs] for ours, theirs in CONFIG_NAMES.items()}
    if data["model_type"] == OWN:
        own = ("layer_norm_eps", "relative_bias", "relative_buckets", "relative_max_distance")
        for name in own:
            require(
                name in data, f"{path / 'config.json'}: {name} is missing; it is no configuration that export wrote"
            )
        return fields | {name: data[name] for name in own}
    family = FAMILIES[data["model_type"]]
    fields["max_positions"] -= family.first_position
    fields["layer_norm_eps"] = data.get("layer_norm_eps", 1e-12)  # what all three classes take if the file is silent
    fields["relative_bias"] = "none"
    if family.relative_bias:
        buckets = data.get("relative_attention_num_buckets", 32)
        require(
            buckets == 32,
            f"{path / 'config.json'}: relative_attention_num_buckets is {buckets}, but MPNet's buckets are fixed at 32",
        )
        fields |= {"relative_bias": "t5", "relative_buckets": 32, "relative_max_distance": 128}
    elif family.first_position and data.get("pad_token_id", 1) != 1:
        raise UserError(f"{path / 'config.json'}: pad_token_id is {data['pad_token_id']}; RoBERTa's own, 1, is needed")
    return fields


def read_weights(path: Path) -> dict[str, Tensor]:
    """A checkpoint's tensors as they are. UserError if they cannot be read, or not without running code."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    safe, pickled = path / "model.safetensors", path / "pytorch_model.bin"
    if safe.exists():
        try:
            return load_file(safe)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{safe}: cannot be read ({error})") from None
    sharded = any(path.glob("*.index.json"))
    require(not sharded, f"{path}: the weights are split over several files; save them again as one model.safetensors")
    require(pickled.exists(), f"{path}: neither model.safetensors nor pytorch_model.bin is there")
    try:
        tensors = torch.load(pickled, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError):
        raise UserError(f"{pickled}: damaged or not only tensors; save the model again as model.safetensors") from None
    plain = isinstance(tensors, dict) and all(isinstance(tensor, Tensor) for tensor in tensors.values())
    require(plain, f"{pickled}: not a table of tensors; save the model again as model.safetensors")
    return dict(tensors)


def _vocabulary(file: Path) -> dict[str, int] | None:
    if not file.exists():
        return None
    try:
        return Tokenizer.from_file(str(file)).get_vocab()
    except Exception:  # the library raises bare Exception
        raise UserError(f"{file}: not a tokenizer.json of the tokenizers library; mend or remove it") from None


def _translate(tensors: dict[str, Tensor], kind: str, fields: dict[str, Any], has_head: bool) -> dict[str, Tensor]:
    """Their tensors under our names. KeyError names a missing one."""
    family = FAMILIES[kind]
    old_names = {".gamma": ".weight", ".beta": ".bias"}  # LayerNorms of checkpoints converted from TensorFlow
    for old, new in old_names.items():
        tensors = {name.removesuffix(old) + new if name.endswith(old) else name: t for name, t in tensors.items()}
    prefix = f"{kind}." if any(name.startswith(f"{kind}.") for name in tensors) else ""
    used = set()

    def take(name: str) -> Tensor:
        used.add(name)
        return tensors[name].float()

    state = {
        "encoder.token_table": take(f"{prefix}embeddings.word_embeddings.weight"),
        "encoder.position_table": take(f"{prefix}embeddings.position_embeddings.weight")[family.first_position :],
    }
    if family.token_types:
        types = take(f"{prefix}embeddings.token_type_embeddings.weight")
        state["encoder.position_table"] = state["encoder.position_table"] + types[0]
    for part in ("weight", "bias"):
        state[f"encoder.embedding_norm.{part}"] = take(f"{prefix}embeddings.LayerNorm.{part}")
    if family.relative_bias:
        state["encoder.relative_bias.weight"] = take(prefix + family.relative_bias)
    for i in range(fields["num_layers"]):
        state |= _layer(family, f"encoder.blocks.{i}.", f"{prefix}encoder.layer.{i}.", take)
    left = {name for name in tensors if name.startswith((f"{prefix}embeddings.", f"{prefix}encoder."))} - used
    for name in sorted(left - {f"{prefix}embeddings.position_ids", f"{prefix}embeddings.token_type_ids"}):
        raise UserError(f"the checkpoint's tensor {name} has no place in our encoder; it is no plain {kind} model")
    if has_head:
        state |= _head(tensors, family, take, state["encoder.token_table"])
    for name in state.keys() & set(PADDED):
        state[name] = _with_padding_rows(state[name])
    return state


def _with_padding_rows(t: Tensor) -> Tensor:
    return torch.cat([t, t.new_zeros(-t.shape[0] % TABLE_MULTIPLE, *t.shape[1:])])


def _own_encoder(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The encoder of our own format, alone or in a class with a head. KeyError names a missing tensor."""
    prefix = "encoder." if any(name.startswith("encoder.") for name in tensors) else ""
    state = {f"encoder.{ours}": tensors[prefix + theirs].float() for ours, theirs in OWN_NAMES.items()}
    for name, tensor in tensors.items():
        ours = name.removeprefix(prefix)
        if ours.startswith(("embedding_norm.", "blocks.", "relative_bias.weight")) and name.startswith(prefix):
            state[f"encoder.{ours}"] = tensor.float()
    state["encoder.token_table"] = _with_padding_rows(state["encoder.token_table"])
    return state


def own_network(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of MaeLmForMaskedLM under the names of MaeLm; mapping.own_state's way back."""
    ours = {theirs: ours for ours, theirs in OWN_NETWORK.items()}
    kept = [name for name in tensors if name != "head.projection.weight" and not name.endswith(".buckets")]
    state = {ours.get(name, name): tensors[name] for name in kept}
    return state | {name: _with_padding_rows(state[name]) for name in state.keys() & set(PADDED)}


def _layer(family: Family, ours: str, theirs: str, take: Callable[[str], Tensor]) -> dict[str, Tensor]:
    state = {}
    for part in ("weight", "bias"):
        state[f"{ours}attention.qkv.{part}"] = torch.cat([take(f"{theirs}{family.layer[x]}.{part}") for x in "qkv"])
        for name in ("attention.out", "attention_norm", "ffn_in", "ffn_out", "ffn_norm"):
            state[f"{ours}{name}.{part}"] = take(f"{theirs}{family.layer[name]}.{part}")
    return state


def _head(
    tensors: dict[str, Tensor], family: Family, take: Callable[[str], Tensor], table: Tensor
) -> dict[str, Tensor]:
    names = family.head
    projection = tensors.get(f"{names['decoder']}.weight", table)
    require(
        torch.equal(projection.float(), table),
        f"the LM head's {names['decoder']}.weight is not the token table; our head is tied to it: save the model "
        "without its head",
    )
    state = {f"head.{n}.{part}": take(f"{names[n]}.{part}") for n in ("dense", "norm") for part in ("weight", "bias")}
    bias = names["bias"] if names["bias"] in tensors else f"{names['decoder']}.bias"
    return state | {"head.vocabulary_bias": take(bias)}


def _check_shapes(path: Path, state: dict[str, Tensor], fields: dict[str, Any], has_head: bool) -> None:
    with torch.device("meta"):
        expected = MaeLm(ModelConfig(**fields, decoder="none")).state_dict()
    for name, tensor in expected.items():
        if name.startswith("head.") and not has_head:
            continue
        require(name in state, f"{path}: the checkpoint has no tensor for {name}; it is no complete encoder")
        found = tuple(state[name].shape)
        require(
            found == tuple(tensor.shape),
            f"{path}: config.json does not fit the weights: {name} has shape {found}, not {tuple(tensor.shape)}",
        )
