"""MaeLm as a transformers model, to be pretrained in other loops; and exports in our own format without remote code.

    config = MaeLmConfig.from_preset("base", tokenizer=tokenizer)
    model = MaeLmForPreTraining(config)
    loss = model(**PackedMaskingCollator(tokenizer)(rows)).loss

Importing this registers the classes of maelm_fast/export/modeling_maelm.py with transformers' Auto classes. Those read
padded sequences and are what is saved, always: MaeLmForPreTraining, which reads packed ones, writes the directory that
`maelm-fast export --format own` writes, and reads it.
"""
# ruff: noqa: RUF012 (the class attributes are declared, and mutable, in PreTrainedModel)

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from maelm_fast import presets
from maelm_fast.batch import from_kwargs
from maelm_fast.config import require
from maelm_fast.data.tokenizer import special_ids
from maelm_fast.errors import UserError
from maelm_fast.export import modeling_maelm
from maelm_fast.export.from_huggingface import own_network
from maelm_fast.export.mapping import OWN_CLASSES, own_fields, own_holds, own_model_config, own_state
from maelm_fast.export.modeling_maelm import MaeLmForMaskedLM
from maelm_fast.model.flops import training_flops
from maelm_fast.model.maelm import MaeLm


class MaeLmConfig(modeling_maelm.MaeLmConfig):
    """The configuration of modeling_maelm.py, which says what its fields mean; and of a preset of ours.

    position_init and relative_init, of ModelConfig, matter to new models only."""

    def __init__(self, *, position_init: str = "normal", relative_init: str = "normal", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.position_init, self.relative_init = position_init, relative_init

    @classmethod
    def from_preset(cls, name: str, *, tokenizer: Any, **changes: Any) -> Self:
        """The network of `presets.get(name)` for a tokenizer of transformers, or of the tokenizers library.

        changes: fields of maelm_fast.config.ModelConfig, such as max_positions=128. Raises UserError if there is no
        such preset, a field cannot be what it is given, the tokenizer lacks a special token, or the network is one that
        the classes here do not have (some ablations): `maelm-fast pretrain` has them all."""
        special, size = _vocabulary(tokenizer)
        try:
            model = replace(presets.get(name).model, vocab_size=size, **changes)
        except TypeError as error:
            raise UserError(
                f"from_preset: {str(error).partition(' ')[2]}; fields of ModelConfig can be given"
            ) from None
        require(
            own_holds(model),
            f"preset {name}: its decoder or positions are no part of the transformers classes; maelm-fast pretrain "
            "trains it",
        )
        return cls(**own_fields(model, special), position_init=model.position_init, relative_init=model.relative_init)


def _vocabulary(tokenizer: Any) -> tuple[dict[str, int], int]:
    """Role to id of the special tokens, and the number of tokens."""
    if isinstance(tokenizer, Tokenizer):
        return special_ids(tokenizer), tokenizer.get_vocab_size()
    instead = {"bos": "cls_token_id", "eos": "sep_token_id"}  # BERT's and its kin have these alone
    ids: dict[str, int] = {}
    for role in ("bos", "pad", "eos", "mask"):
        for name in (f"{role}_token_id", instead.get(role, "")):
            found = getattr(tokenizer, name, None)
            if role not in ids and found is not None:
                ids[role] = found
        require(role in ids, f"the tokenizer ({type(tokenizer).__name__}) lacks a special token: {role}")
    return ids, len(tokenizer)


@dataclass
class MaeLmForPreTrainingOutput(ModelOutput):
    """loss: 0-d fp32. correct, predicted: 0-d int64, how many of the masked tokens were predicted, and how many there
    were."""

    loss: Tensor | None = None
    correct: Tensor | None = None
    predicted: Tensor | None = None


class MaeLmForPreTraining(PreTrainedModel):
    """maelm_fast.model.maelm.MaeLm, as `self.maelm`, with what transformers' Trainer expects of a model.

    It is saved as MaeLmForMaskedLM, which AutoModel and AutoModelForMaskedLM load; the code of that class lies beside
    the weights, so that they load where this package is not installed, too. Gradient checkpointing is not supported:
    packed rows and a head on masked tokens alone already leave little to save."""

    config_class = MaeLmConfig
    config: MaeLmConfig
    base_model_prefix = "maelm"
    main_input_name = "source"  # one entry per token, masked or not, which is what trainers count
    accepts_loss_kwargs = True
    supports_gradient_checkpointing = False
    _no_split_modules = ["Block"]

    def __init__(self, config: MaeLmConfig) -> None:
        super().__init__(config)
        self.maelm = MaeLm(own_model_config(config), config.mask_token_id)
        self.post_init()

    @classmethod
    def from_preset(cls, name: str, *, tokenizer: Any, **changes: Any) -> Self:
        """A new model, random weights, of MaeLmConfig.from_preset."""
        return cls(MaeLmConfig.from_preset(name, tokenizer=tokenizer, **changes))

    @property
    def encoder_sees_mask(self) -> bool:
        """What a PackedMaskingCollator has to be told; False but for models without decoder."""
        return self.maelm.encoder_sees_mask

    def forward(
        self,
        *,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        dropout_seed: Tensor | int | None = None,
        return_dict: bool | None = None,
        **packed: Any,
    ) -> MaeLmForPreTrainingOutput | tuple[Tensor, ...]:
        """labels, packed: a batch as PackedMaskingCollator and maelm_fast.batch.to_kwargs make it.

        The loss is the mean over the batch's masked tokens, in nats; with num_items_in_batch, their sum over that
        number, so that the batches of an update add up to its mean. dropout_seed: as of MaeLm.forward; by default from
        PyTorch's generator. Raises UserError for a row longer than the model's positions, and if the model has no
        decoder and the batch's encoder row no [MASK]."""
        batch = from_kwargs(labels=labels, **packed)
        require(
            not self.encoder_sees_mask or batch.visible.lengths == batch.decoder.lengths,
            "this model has no decoder, so that its encoder must read [MASK]: make the batches with "
            "PackedMaskingCollator(..., encoder_sees_mask=True)",
        )
        most = self.config.max_position_embeddings
        require(
            batch.decoder.max_seqlen <= most,
            f"a row of {batch.decoder.max_seqlen} tokens, where the model has {most} positions: cut the rows, or give "
            "from_preset max_positions",
        )
        loss, correct = self.maelm(batch, dropout_seed)
        predicted = torch.full_like(correct, batch.counts.masked)
        total = predicted.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        output = MaeLmForPreTrainingOutput(loss=loss / total, correct=correct, predicted=predicted)
        return output.to_tuple() if return_dict is False else output

    def _init_weights(self, module: torch.nn.Module) -> None:
        """MaeLm draws its own."""

    def get_input_embeddings(self) -> torch.nn.Module:
        """There is no such module: the table is a parameter. This is the error that transformers looks for."""
        raise NotImplementedError("the vocabulary's size is fixed: give from_preset the tokenizer that you mean to use")

    def floating_point_ops(self, input_dict: Mapping[str, Any], exclude_embeddings: bool = True) -> int:
        """Forward and backward of one batch, counted from its lengths (maelm_fast.model.flops)."""
        return training_flops(
            self.maelm.config, *(input_dict[f"{row}_lengths"] for row in ("visible", "decoder", "masked"))
        )

    def for_masked_lm(self, state_dict: Mapping[str, Tensor] | None = None) -> MaeLmForMaskedLM:
        """The same network over padded sequences; its tensors are this model's, or the state dict's of this model."""
        ours = {
            name.removeprefix("maelm."): t
            for name, t in (self.state_dict() if state_dict is None else state_dict).items()
        }
        with torch.device("meta"):
            whole = MaeLmForMaskedLM(copy.deepcopy(self.config))
        whole.load_state_dict(own_state(self.maelm, ours), assign=True)
        return whole

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """As of every transformers model; in the class MaeLmForMaskedLM. state_dict: this model's."""
        self.for_masked_lm(state_dict).save_pretrained(save_directory, is_main_process, None, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As of every transformers model, of what save_pretrained or `maelm-fast export --format own` wrote. Raises
        UserError for a model of another type."""
        if "config" not in kwargs:
            kind = MaeLmConfig.get_config_dict(pretrained_model_name_or_path, **kwargs)[0].get("model_type")
            require(
                kind == MaeLmConfig.model_type,
                f"{pretrained_model_name_or_path}: model_type {kind!r}, and MaeLmForPreTraining reads 'maelm' only; to "
                "start from another encoder's weights there is maelm-fast pretrain --init-from",
            )
        found = MaeLmForMaskedLM.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        whole, *information = found if isinstance(found, tuple) else (found,)
        model = cls(MaeLmConfig.from_dict(whole.config.to_dict())).train(whole.training)
        torch.nn.Module.to(model, whole.device, whole.dtype)
        model.load_state_dict(whole.state_dict())
        return (model, *information) if information else model

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Of this model's names, or of those in the files that save_pretrained wrote."""
        if not any(name.startswith("maelm.") for name in state_dict):
            state_dict = {f"maelm.{name}": tensor for name, tensor in own_network(state_dict).items()}
        return super().load_state_dict(state_dict, strict, assign)


def register() -> None:
    """Makes the Auto classes know model_type "maelm". It changes nothing about other models."""
    transformers.AutoConfig.register(MaeLmConfig.model_type, MaeLmConfig, exist_ok=True)
    for auto, name in OWN_CLASSES.items():
        if auto != "AutoConfig":
            getattr(transformers, auto).register(MaeLmConfig, getattr(modeling_maelm, name), exist_ok=True)
    transformers.AutoModelForPreTraining.register(MaeLmConfig, MaeLmForPreTraining, exist_ok=True)


register()
