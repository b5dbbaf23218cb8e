"""Pretrained networks and the heads they were pretrained with, as one kind of module: prompts in, scores of [MASK] out.

    run of ours, MAE-LM     the whole pretraining network; [MASK] never enters the encoder, the decoder handles it
    run of ours, MLM        [MASK] enters the encoder
    Hugging Face directory  its class for masked language modelling, padded; or, with engine packed, on our kernels

Of a run that was pretrained with a share of the [MASK]s shown to the encoder (masking.shown), the encoder sees a
prompt's one [MASK] if it saw at least half of them in pretraining (ours: the paper prompts MAE-LM only).

Shapes: S prompts with one [MASK] each, T tokens of all, V tokens of the vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from maelm_fast.analysis.huggingface import longest_input, quiet
from maelm_fast.batch import PackedBatch, pack_tokens
from maelm_fast.config import ModelConfig, require
from maelm_fast.errors import UserError
from maelm_fast.export.from_huggingface import read_checkpoint
from maelm_fast.export.huggingface import CODE
from maelm_fast.finetuning.batches import TokenBatch
from maelm_fast.finetuning.encoders import (
    LOCAL,
    Engine,
    check_vocabulary,
    dropout_seed_tensor,
    padded,
    padded_places,
    read_tokenizer,
    require_transformers,
    seeded,
    set_dropout,
    transformers_errors,
)
from maelm_fast.finetuning.text import TextTokenizer
from maelm_fast.model.maelm import MaeLm
from maelm_fast.training.rundir import RunDir, load_run


class MaskedLm(nn.Module, ABC):
    """Its two kinds: PackedMaskedLm, TransformersMaskedLm.

    name: of its directory. max_length: tokens of a prompt at most. step: of a run of ours, the checkpoint's. mask_in:
    what handles [MASK], "encoder" or "decoder"."""

    engine: Literal["packed", "transformers"]
    max_length: int
    mask_in: Literal["encoder", "decoder"] = "encoder"

    def __init__(self, tokenizer: TextTokenizer, name: str, step: int | None) -> None:
        super().__init__()
        if tokenizer.mask_id is None:
            raise UserError(f"{name}: its tokenizer has no mask token, so that nothing can be asked")
        self.mask_id = tokenizer.mask_id
        self.tokenizer, self.name, self.step = tokenizer, name, step

    @abstractmethod
    def forward(self, batch: TokenBatch, dropout_seed: Tensor | int | None = None) -> Tensor:
        """(S, V) scores of each prompt's [MASK]. dropout_seed: as a TextEncoder's."""


class PackedMaskedLm(MaskedLm):
    """Our network on our ops."""

    engine = "packed"

    def __init__(self, network: MaeLm, tokenizer: TextTokenizer, name: str, step: int | None, sees_mask: bool) -> None:
        super().__init__(tokenizer, name, step)
        self.network, self.sees_mask = network, sees_mask
        self.max_length = network.config.max_positions
        self.mask_in = "encoder" if sees_mask else "decoder"

    def forward(self, batch: TokenBatch, dropout_seed: Tensor | int | None = None) -> Tensor:
        network = self.network
        seed = None
        if self.training and network.config.dropout:
            seed = dropout_seed_tensor(dropout_seed, batch.ids.device)
        states = network.predicted_states(packed_prompts(batch, network.mask_id, self.sees_mask), seed)
        return network.head.logits(states, network.encoder.token_table)


def packed_prompts(batch: TokenBatch, mask_id: int, encoder_sees_mask: bool) -> PackedBatch:
    """Prompts, each with one [MASK], as data.masking.pack_masked packs them, but where the batch is: with one in each,
    every length is known to the host."""
    ids, lengths = batch.ids, batch.layout.lengths
    masked = ids == mask_id
    in_encoder, visible = torch.ones_like(masked), lengths
    if not encoder_sees_mask:
        in_encoder, visible = ~masked, tuple(n - 1 for n in lengths)
    return pack_tokens(ids, ids, batch.layout, masked, in_encoder, visible, (1,) * len(lengths))


class TransformersMaskedLm(MaskedLm):
    """A masked language model of the transformers library, given prompts padded on the right. Its dropout draws from
    PyTorch's generator, which dropout_seed sets as it does a TransformersEncoder's."""

    engine = "transformers"

    def __init__(self, network: Any, tokenizer: TextTokenizer, name: str) -> None:
        super().__init__(tokenizer, name, None)
        self.network = network
        self.max_length = longest_input(network)
        self._mask: tuple[Tensor, Tensor] | None = None
        if (projection := network.get_output_embeddings()) is not None:
            projection.register_forward_pre_hook(self._masked_only)

    def forward(self, batch: TokenBatch, dropout_seed: Tensor | int | None = None) -> Tensor:
        layout = batch.layout
        shape = (len(layout.lengths), layout.max_seqlen)
        places = padded_places(layout)
        ids = padded(batch.ids, places, shape, self.tokenizer.pad_id)
        attended = padded(torch.ones_like(batch.ids), places, shape, 0)
        columns = torch.eq(ids, self.mask_id).int().argmax(dim=1)
        self._mask = torch.arange(shape[0], device=ids.device), columns
        seed = dropout_seed if self.training and isinstance(dropout_seed, int) else None
        with seeded(seed, ids.device):
            logits: Tensor = self.network(input_ids=ids, attention_mask=attended).logits
        return logits[:, 0] if logits.shape[1] == 1 else logits[self._mask]

    def _masked_only(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Keeps the projection to the vocabulary to [MASK]: of all tokens it takes as long as some layers, and its
        output is gigabytes."""
        assert self._mask is not None
        return (inputs[0][self._mask].unsqueeze(1), *inputs[1:])


def load_masked_lm(
    path: str | Path, *, step: int | None = None, engine: Engine = "auto", dropout: float = 0.1
) -> MaskedLm:
    """A network on the CPU, fp32, in evaluation mode, from a run directory of ours or a local Hugging Face one.

    step, engine, dropout: as load_encoder's. Raises UserError if the directory is neither, or if the model has no head
    that could fill in [MASK]."""
    path = Path(path)
    require(path.is_dir(), f"{path}: no such directory; give a run directory or a local Hugging Face one")
    if RunDir(path).exists:
        require(engine != "transformers", f"{path}: a run of ours has no transformers class; export it first")
        return _of_run(path, step, dropout)
    require((path / "config.json").exists(), f"{path}: neither a run directory (config.yaml) nor a Hugging Face one")
    require(step is None, f"{path}: a Hugging Face directory has one checkpoint: leave out --step")
    require(
        not (path / CODE.name).exists(),
        f"{path}: an export in our own format, which needs code of the directory to run; prompt the run directory "
        "instead",
    )
    return _of_checkpoint(path, dropout) if engine == "packed" else _of_transformers(path, dropout)


def _of_run(path: Path, step: int | None, dropout: float) -> PackedMaskedLm:
    run = load_run(path, step)
    name, masking = path.resolve().name, run.config.masking
    require(masking.policy != "random", f"{name}: pretrained with random tokens in the place of [MASK]: it knows none")
    require(
        not run.model.predicts_all,
        f"{name}: a causal_cross decoder predicts a token from all that come before it; it cannot fill in [MASK]",
    )
    network = MaeLm(replace(run.config.model, dropout=dropout), run.vocabulary.mask_id)
    network.load_state_dict(run.model.state_dict())
    return PackedMaskedLm(network.eval(), TextTokenizer.of_run(run.tokenizer), name, run.step, run.encoder_reads_mask)


def _of_checkpoint(path: Path, dropout: float) -> PackedMaskedLm:
    initial = read_checkpoint(path)
    require("head.dense.weight" in initial.state, f"{path}: {_NO_HEAD}")
    tokenizer = read_tokenizer(path, token_types=1)
    check_vocabulary(path, tokenizer, initial.model_fields["vocab_size"])
    network = MaeLm(ModelConfig(**initial.model_fields, decoder="none", dropout=dropout), tokenizer.mask_id)
    network.load_state_dict(initial.state)
    return PackedMaskedLm(network.eval(), tokenizer, path.resolve().name, None, sees_mask=True)


_NO_HEAD = (
    "an encoder without the head that fills in [MASK] (exports of a MAE-LM in a stock format leave out its decoder and "
    "head): prompt the run directory, or give a checkpoint saved as ...ForMaskedLM"
)


def _of_transformers(path: Path, dropout: float) -> TransformersMaskedLm:
    transformers = require_transformers()
    with quiet(), transformers_errors(path):
        config = transformers.AutoConfig.from_pretrained(path, **LOCAL)
        set_dropout(path, config, dropout)
        network, loading = transformers.AutoModelForMaskedLM.from_pretrained(
            path, config=config, dtype=torch.float32, output_loading_info=True, **LOCAL
        )
    require(not loading["missing_keys"], f"{path}: {_NO_HEAD}")
    tokenizer = read_tokenizer(path, token_types=1)
    check_vocabulary(path, tokenizer, network.get_input_embeddings().weight.shape[0])
    return TransformersMaskedLm(network.eval(), tokenizer, path.resolve().name)
