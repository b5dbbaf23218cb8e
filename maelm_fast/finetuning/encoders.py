"""Pretrained encoders, ours and Hugging Face ones, as one kind of module over packed tokens.

    encoder = load_encoder("runs/base")                  # a run of ours: packed, on our kernels
    encoder = load_encoder("roberta-base/")              # transformers' own class, padded to the longest of a batch
    encoder = load_encoder("roberta-base/", engine="packed")     # the same weights on our kernels

A Hugging Face checkpoint read by the packed engine has its token type row added to its positions: the same function,
but one parameter less to train. Nothing is downloaded, and no code of a directory is run.

Shapes: T tokens in a packed row, S inputs of at most L tokens, d hidden size.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from maelm_fast.analysis.huggingface import TOKENIZER_FILES, longest_input, quiet
from maelm_fast.batch import Layout
from maelm_fast.config import ModelConfig, require
from maelm_fast.data.tokenizer import load_tokenizer
from maelm_fast.errors import UserError
from maelm_fast.export.from_huggingface import OWN, read_checkpoint, read_fields
from maelm_fast.finetuning.batches import TokenBatch
from maelm_fast.finetuning.text import TextTokenizer
from maelm_fast.model.encoder import Encoder, consecutive_positions
from maelm_fast.model.maelm import MaeLm
from maelm_fast.training.rundir import RunDir, load_run, vocabulary_of
from maelm_fast.training.trainer import build_model as build_pretraining_model

Engine = Literal["auto", "packed", "transformers"]
ENGINES = ("auto", "packed", "transformers")
_DROPOUTS = (
    "hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "embedding_dropout", "mlp_dropout",
    "hidden_dropout", "dropout",
)  # fmt: skip


class TextEncoder(nn.Module, ABC):
    """What fine-tuning needs of an encoder. Its two kinds: PackedEncoder, TransformersEncoder.

    name: of its directory. max_length: tokens of an input at most, special ones included. step: of a run of ours, the
    checkpoint's. random_init: whether its weights are fresh ones."""

    engine: Literal["packed", "transformers"]
    hidden_size: int
    max_length: int
    dropout_p: float

    def __init__(self, tokenizer: TextTokenizer, name: str, step: int | None, random_init: bool) -> None:
        super().__init__()
        self.tokenizer, self.name, self.step, self.random_init = tokenizer, name, step, random_init

    @abstractmethod
    def forward(
        self,
        batch: TokenBatch,
        *,
        first_only: bool = False,
        layers: list[Tensor] | None = None,
        dropout_seed: Tensor | int | None = None,
    ) -> Tensor:
        """Each token's vector, (T, d), or each input's first one's, (S, d), if first_only.

        layers: a list to which the embedding output and every layer's output, (T, d), are appended; not with
        first_only. dropout_seed: an int, or one int64 on the device, that dropout in training mode is a function of;
        from PyTorch's default generator if None."""


class PackedEncoder(TextEncoder):
    """Our encoder on our ops: no padding, and for the first tokens alone a last layer that computes nothing else."""

    engine = "packed"

    def __init__(
        self,
        encoder: Encoder,
        config: ModelConfig,
        tokenizer: TextTokenizer,
        name: str,
        step: int | None = None,
        random_init: bool = False,
    ) -> None:
        super().__init__(tokenizer, name, step, random_init)
        self.encoder = encoder
        self.config = config
        self.hidden_size, self.max_length, self.dropout_p = config.hidden_size, config.max_positions, config.dropout

    def forward(
        self,
        batch: TokenBatch,
        *,
        first_only: bool = False,
        layers: list[Tensor] | None = None,
        dropout_seed: Tensor | int | None = None,
    ) -> Tensor:
        require(not (first_only and layers is not None), "layers are of all tokens: not with first_only")
        require(
            batch.token_types is None,
            f"{self.name}: engine packed has no token types, by which this model tells two texts apart; use engine "
            "transformers",
        )
        seed = None
        if self.training and self.dropout_p:
            seed = dropout_seed_tensor(dropout_seed, batch.ids.device)
        last = first_tokens(batch.layout) if first_only else None
        out: Tensor = self.encoder(batch.ids, batch.layout, dropout_seed=seed, last=last, layers=layers)
        return out


def first_tokens(layout: Layout) -> tuple[Tensor, Layout]:
    """The rows (S,) int32 of each sequence's first token, none of them empty, and their layout."""
    rows = layout.cu_seqlens[:-1]
    count = len(layout.lengths)
    starts = torch.arange(count + 1, dtype=torch.int32, device=rows.device)
    return rows, Layout(starts, layout.positions.index_select(0, rows), (1,) * count)


def dropout_seed_tensor(seed: Tensor | int | None, device: torch.device) -> Tensor:
    """One int64 on the device; from PyTorch's default generator if None."""
    if seed is None:
        return torch.randint(2**62, (), device=device)
    return seed if isinstance(seed, Tensor) else torch.full((), seed, dtype=torch.int64, device=device)


class TransformersEncoder(TextEncoder):
    """A model of the transformers library, given inputs padded on the right to the longest of the batch.

    Its dropout draws from PyTorch's generator, which dropout_seed sets for the call if it is an int; a tensor does not,
    since a GPU's would have to be waited for, and the generator is then as the caller set it."""

    engine = "transformers"

    def __init__(
        self,
        model: Any,
        tokenizer: TextTokenizer,
        name: str,
        dropout: float,
        random_init: bool = False,
    ) -> None:
        super().__init__(tokenizer, name, None, random_init)
        self.model = model
        self.hidden_size, self.max_length, self.dropout_p = model.config.hidden_size, longest_input(model), dropout

    def forward(
        self,
        batch: TokenBatch,
        *,
        first_only: bool = False,
        layers: list[Tensor] | None = None,
        dropout_seed: Tensor | int | None = None,
    ) -> Tensor:
        require(not (first_only and layers is not None), "layers are of all tokens: not with first_only")
        places = padded_places(batch.layout)
        inputs = padded_inputs(batch, places, self.tokenizer.pad_id)
        seed = dropout_seed if self.training and isinstance(dropout_seed, int) else None
        with seeded(seed, batch.ids.device):
            output = self.model(**inputs, output_hidden_states=layers is not None)
        hidden: Tensor = output.last_hidden_state
        if first_only:
            return hidden[:, 0]
        if layers is not None:
            layers.extend(layer.flatten(0, 1).index_select(0, places) for layer in output.hidden_states)
        return hidden.flatten(0, 1).index_select(0, places)


def padded_places(layout: Layout) -> Tensor:
    """(T,) int64: where each row of the packed ones is when all sequences have been padded on the right to the longest
    and lie one after another."""
    starts = layout.cu_seqlens
    sequences = torch.arange(len(layout.lengths), device=starts.device)
    sequence = torch.repeat_interleave(sequences, starts.diff(), output_size=layout.num_tokens)
    return sequence * layout.max_seqlen + consecutive_positions(layout)


def padded(values: Tensor, places: Tensor, shape: tuple[int, int], filling: int) -> Tensor:
    """(S, L) int64 from packed values (T,) and their padded_places. shape: (S, L)."""
    flat = torch.full((shape[0] * shape[1],), filling, dtype=torch.int64, device=values.device)
    return flat.index_copy(0, places, values.long()).view(shape)


def padded_inputs(batch: TokenBatch, places: Tensor, pad_id: int) -> dict[str, Tensor]:
    """What a model of transformers is called with. places: padded_places of the batch's layout."""
    shape = (len(batch.layout.lengths), batch.layout.max_seqlen)
    inputs = {
        "input_ids": padded(batch.ids, places, shape, pad_id),
        "attention_mask": padded(torch.ones_like(batch.ids), places, shape, 0),
    }
    if batch.token_types is not None:
        inputs["token_type_ids"] = padded(batch.token_types, places, shape, 0)
    return inputs


@contextlib.contextmanager
def seeded(seed: int | None, device: torch.device | None = None) -> Iterator[None]:
    """PyTorch's generator of the CPU and of `device` as `seed` sets them; afterwards as they were. Nothing is done if
    seed is None."""
    if seed is None:
        yield
        return
    gpus = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would set every GPU's, which nothing sets back
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(seed)
        yield


def load_encoder(
    path: str | Path,
    *,
    step: int | None = None,
    engine: Engine = "auto",
    dropout: float = 0.1,
    random_init: bool = False,
    seed: int = 0,
) -> TextEncoder:
    """An encoder on the CPU, fp32, in evaluation mode, from a run directory of ours or a local Hugging Face one.

    step: of a run, the checkpoint; by default the newest whole one. engine: auto is packed for our runs and for what
    `export` wrote in our own format, and transformers for other directories. dropout: of the encoder, instead of what
    it was pretrained with. random_init: the same architecture and tokenizer with the weights that pretraining starts
    from, drawn from `seed`.

    Raises UserError if the directory is neither, if the engine cannot hold the model, or if transformers is missing."""
    path = Path(path)
    require(engine in ENGINES, f"unknown engine '{engine}'; there are: {', '.join(ENGINES)}")
    require(path.is_dir(), f"{path}: no such directory; give a run directory or a local Hugging Face one")
    if (path / "config.yaml").exists():
        require(
            engine != "transformers",
            f"{path}: a run of ours has no transformers class; export it first (maelm-fast export), then give "
            "the exported directory",
        )
        return _of_run(path, step, dropout, random_init, seed)
    require((path / "config.json").exists(), f"{path}: neither a run directory (config.yaml) nor a Hugging Face one")
    require(step is None, f"{path}: a Hugging Face directory has one checkpoint: leave out the step")
    own = is_own_export(path)
    if engine == "packed" or (engine == "auto" and own):
        return _packed_checkpoint(path, dropout, random_init, seed)
    require(
        not own,
        f"{path}: exported in our own format, which needs code of the directory to run in transformers; use engine "
        "packed, or export to roberta or mpnet",
    )
    return _transformers_checkpoint(path, dropout, random_init, seed)


def _of_run(path: Path, step: int | None, dropout: float, random_init: bool, seed: int) -> PackedEncoder:
    name = path.resolve().name
    if random_init:
        require(step is None, "a random initialisation has no step: leave out one of the two")
        run = RunDir(path)
        _, config = run.read_config()
        tokenizer = load_tokenizer(run.tokenizer_file)
        config = replace(config, seed=seed, model=replace(config.model, dropout=dropout))
        encoder = build_pretraining_model(config, vocabulary_of(tokenizer)).encoder.eval()
        return PackedEncoder(encoder, config.model, TextTokenizer.of_run(tokenizer), name, None, True)
    loaded = load_run(path, step)
    encoder = loaded.model.encoder
    encoder.dropout_p = dropout
    model = replace(loaded.config.model, dropout=dropout)
    return PackedEncoder(encoder, model, TextTokenizer.of_run(loaded.tokenizer), name, loaded.step)


def _packed_checkpoint(path: Path, dropout: float, random_init: bool, seed: int) -> PackedEncoder:
    config = ModelConfig(**read_fields(path), decoder="none", dropout=dropout)
    if random_init:
        with seeded(seed):
            encoder = MaeLm(config).encoder
    else:
        encoder = Encoder(config)
        prefix = "encoder."
        state = read_checkpoint(path).state
        encoder.load_state_dict({k.removeprefix(prefix): t for k, t in state.items() if k.startswith(prefix)})
    tokenizer = read_tokenizer(path, int(_read_config(path).get("type_vocab_size") or 1))
    check_vocabulary(path, tokenizer, config.vocab_size)
    return PackedEncoder(encoder.eval(), config, tokenizer, path.resolve().name, None, random_init)


def _transformers_checkpoint(path: Path, dropout: float, random_init: bool, seed: int) -> TransformersEncoder:
    transformers = require_transformers()
    with quiet(), transformers_errors(path):
        config = transformers.AutoConfig.from_pretrained(path, **LOCAL)
    _check_kind(path, config)
    set_dropout(path, config, dropout)
    if random_init:
        with seeded(seed):
            model = new_model(config)
    else:
        with quiet(), transformers_errors(path):
            model, loading = transformers.AutoModel.from_pretrained(
                path, config=config, dtype=torch.float32, output_loading_info=True, **_without_pooler(config), **LOCAL
            )
        missing = sorted(loading["missing_keys"])
        require(
            not missing,
            f"{path}: the weights lack {len(missing)} tensors of the encoder, {', '.join(missing[:3])} among them: it "
            "is no complete checkpoint of what config.json says",
        )
    tokenizer = read_tokenizer(path, int(getattr(config, "type_vocab_size", None) or 1))
    check_vocabulary(path, tokenizer, model.get_input_embeddings().weight.shape[0])
    return TransformersEncoder(model.eval(), tokenizer, path.resolve().name, dropout, random_init)


LOCAL = {"local_files_only": True, "trust_remote_code": False}


def require_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UserError("Hugging Face directories need transformers: pip install transformers") from None
    return transformers


def read_tokenizer(path: Path, token_types: int) -> TextTokenizer:
    """The tokenizer of a Hugging Face directory. token_types: how many its model has."""
    transformers = require_transformers()
    require(
        any(any(path.glob(pattern)) for pattern in TOKENIZER_FILES),  # transformers would make an empty one
        f"{path}: no tokenizer beside the model; save its tokenizer into the same directory",
    )
    with quiet(), transformers_errors(path):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **LOCAL)
    return TextTokenizer.of_transformers(tokenizer, str(path), token_types)


def new_model(config: Any) -> Any:
    """transformers' encoder class for a configuration, without pooler, with random weights in fp32."""
    transformers = require_transformers()
    return transformers.AutoModel.from_config(config, dtype=torch.float32, **_without_pooler(config))


def _without_pooler(config: Any) -> dict[str, bool]:
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


def is_own_export(path: Path) -> bool:
    """Whether `export` wrote the directory in our own format."""
    return _read_config(path).get("model_type") == OWN


def _read_config(path: Path) -> dict[str, Any]:
    try:
        data = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        data = None
    if not isinstance(data, dict):
        raise UserError(f"{path / 'config.json'}: not the configuration of a Hugging Face model")
    return data


def _check_kind(path: Path, config: Any) -> None:
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


def check_vocabulary(path: Path, tokenizer: TextTokenizer, rows: int) -> None:
    require(
        tokenizer.vocab_size <= rows,
        f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the model's table {rows}: they do not belong "
        "together",
    )
