"""Pretrained encoders over packed tokens, ours and Hugging Face's, with or without their masked-LM head, as one kind of
module.

    encoder = load_encoder("runs/base")                  # a run of ours: packed, on our kernels
    encoder = load_encoder("roberta-base/")              # transformers' own class, padded to the longest of a batch
    encoder = load_encoder("roberta-base/", engine="packed")     # the same weights on our kernels
    network = load_encoder("runs/base", head=True)       # with what it was pretrained with: it fills in [MASK]

A Hugging Face checkpoint read by the packed engine has its token type row added to its positions: the same function,
but one parameter less to train. Nothing is downloaded, and no code of a directory is run.

What handles [MASK] is for a run of ours the encoder if it was pretrained as MLM, else the decoder, and [MASK] never
enters the encoder. If a share of the [MASK]s was shown to it (masking.shown), it sees a prompt's one [MASK] if it saw
at least half of them in pretraining (ours: the paper prompts MAE-LM only).

Shapes: T tokens in a packed row, S inputs of at most L tokens, d hidden size, V tokens of the vocabulary.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from maelm_fast.batch import Layout, PackedBatch, pack_tokens
from maelm_fast.config import ModelConfig, require
from maelm_fast.data.tokenizer import load_tokenizer
from maelm_fast.export.from_huggingface import OWN, read_checkpoint, read_fields
from maelm_fast.export.library import (
    LOCAL,
    check_kind,
    longest_input,
    new_model,
    quiet,
    read_config,
    require_transformers,
    set_dropout,
    transformers_errors,
    without_pooler,
)
from maelm_fast.model.encoder import Encoder, consecutive_positions
from maelm_fast.model.maelm import MaeLm
from maelm_fast.text import TextTokenizer
from maelm_fast.training.rundir import RunDir, load_run, vocabulary_of
from maelm_fast.training.trainer import build_model as build_pretraining_model

Engine = Literal["auto", "packed", "transformers"]
ENGINES = get_args(Engine)
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")


@dataclass(frozen=True)
class TokenBatch:
    """S inputs in a row of T tokens. ids: (T,) int32. token_types: (T,) int32, None if all are 0."""

    ids: Tensor
    layout: Layout
    token_types: Tensor | None = None

    def to(self, device: torch.device | str) -> TokenBatch:
        """To a GPU from pinned memory, so that nothing waits."""
        types, layout = self.token_types, self.layout
        return replace(
            self,
            ids=to_device(self.ids, device),
            layout=replace(
                layout, cu_seqlens=to_device(layout.cu_seqlens, device), positions=to_device(layout.positions, device)
            ),
            token_types=None if types is None else to_device(types, device),
        )


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Without waiting for a GPU."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class TextEncoder(nn.Module, ABC):
    """Its two kinds: PackedEncoder, TransformersEncoder.

    name: of its directory. max_length: tokens of an input at most, special ones included. step: of a run of ours, the
    checkpoint's. random_init: whether its weights are fresh ones. mask_in: of one with its head, what handles [MASK];
    None without a head."""

    engine: Literal["packed", "transformers"]
    hidden_size: int
    max_length: int
    dropout_p: float
    mask_in: Literal["encoder", "decoder"] | None = None

    vocab_size: int
    """Rows of the token table."""

    def __init__(self, tokenizer: TextTokenizer, name: str, step: int | None, random_init: bool) -> None:
        super().__init__()
        self.tokenizer, self.name, self.step, self.random_init = tokenizer, name, step, random_init

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
        require(not (first_only and layers is not None), "layers are of all tokens: not with first_only")
        return self.encode(batch, first_only, layers, dropout_seed)

    @abstractmethod
    def encode(
        self, batch: TokenBatch, first_only: bool, layers: list[Tensor] | None, seed: Tensor | int | None
    ) -> Tensor:
        """What `forward` does."""

    @abstractmethod
    def fill(self, batch: TokenBatch, dropout_seed: Tensor | int | None = None) -> Tensor:
        """(S, V) scores of each input's one [MASK]; only with a head. dropout_seed: as forward's."""


class PackedEncoder(TextEncoder):
    """Our encoder on our ops: no padding, and for the first tokens alone a last layer that computes nothing else."""

    engine = "packed"

    def __init__(
        self,
        encoder: Encoder | MaeLm,
        config: ModelConfig,
        tokenizer: TextTokenizer,
        name: str,
        step: int | None = None,
        random_init: bool = False,
        sees_mask: bool = True,
    ) -> None:
        """encoder: with decoder and head if it is a MaeLm. sees_mask: whether [MASK] enters the encoder then."""
        super().__init__(tokenizer, name, step, random_init)
        if isinstance(encoder, MaeLm):
            self.network, self.sees_mask = encoder, sees_mask
            self.mask_in = "encoder" if sees_mask else "decoder"
        else:
            self.encoder = encoder
        self.config, self.vocab_size = config, config.vocab_size
        self.hidden_size, self.max_length, self.dropout_p = config.hidden_size, config.max_positions, config.dropout

    def encode(
        self, batch: TokenBatch, first_only: bool, layers: list[Tensor] | None, seed: Tensor | int | None
    ) -> Tensor:
        require(
            batch.token_types is None,
            f"{self.name}: engine packed has no token types, by which this model tells two texts apart; use engine "
            "transformers",
        )
        last = first_tokens(batch.layout) if first_only else None
        encoder = self.encoder if self.mask_in is None else self.network.encoder
        seed = self._seed(seed, batch.ids.device)
        out: Tensor = encoder(batch.ids, batch.layout, dropout_seed=seed, last=last, layers=layers)
        return out

    def fill(self, batch: TokenBatch, dropout_seed: Tensor | int | None = None) -> Tensor:
        prompts = packed_prompts(batch, self.network.mask_id, self.sees_mask)
        states = self.network.predicted_states(prompts, self._seed(dropout_seed, batch.ids.device))
        return self.network.head.logits(states, self.network.encoder.token_table)

    def _seed(self, seed: Tensor | int | None, device: torch.device) -> Tensor | None:
        return dropout_seed_tensor(seed, device) if self.training and self.dropout_p else None


def packed_prompts(batch: TokenBatch, mask_id: int, encoder_sees_mask: bool) -> PackedBatch:
    """Prompts, each with one [MASK], as data.masking.pack_masked packs them, but where the batch is: with one in each,
    every length is known to the host."""
    ids, lengths = batch.ids, batch.layout.lengths
    masked = ids == mask_id
    in_encoder, visible = torch.ones_like(masked), lengths
    if not encoder_sees_mask:
        in_encoder, visible = ~masked, tuple(n - 1 for n in lengths)
    return pack_tokens(ids, ids, batch.layout, masked, in_encoder, visible, (1,) * len(lengths))


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
        head: bool = False,
    ) -> None:
        """model: of class AutoModel, or with head AutoModelForMaskedLM."""
        super().__init__(tokenizer, name, None, random_init)
        if head:
            self.network, self.mask_in = model, "encoder"
            self._mask: tuple[Tensor, Tensor] | None = None
            if (projection := model.get_output_embeddings()) is not None:
                projection.register_forward_pre_hook(self._masked_only)
        else:
            self.model = model
        self.vocab_size = model.get_input_embeddings().weight.shape[0]
        self.hidden_size, self.max_length, self.dropout_p = model.config.hidden_size, longest_input(model), dropout

    def encode(
        self, batch: TokenBatch, first_only: bool, layers: list[Tensor] | None, seed: Tensor | int | None
    ) -> Tensor:
        model = self.model if self.mask_in is None else self.network.base_model
        places = padded_places(batch.layout)
        inputs = padded_inputs(batch, places, self.tokenizer.pad_id)
        with self._seeded(seed, batch.ids.device):
            output = model(**inputs, output_hidden_states=layers is not None)
        hidden: Tensor = output.last_hidden_state
        if first_only:
            return hidden[:, 0]
        if layers is not None:
            layers.extend(layer.flatten(0, 1).index_select(0, places) for layer in output.hidden_states)
        return hidden.flatten(0, 1).index_select(0, places)

    def fill(self, batch: TokenBatch, dropout_seed: Tensor | int | None = None) -> Tensor:
        inputs = padded_inputs(batch, padded_places(batch.layout), self.tokenizer.pad_id)
        ids = inputs["input_ids"]
        columns = torch.eq(ids, self.tokenizer.mask_id).int().argmax(dim=1)  # type: ignore[arg-type]
        self._mask = torch.arange(len(ids), device=ids.device), columns
        with self._seeded(dropout_seed, ids.device):
            logits: Tensor = self.network(**inputs).logits
        return logits[:, 0] if logits.shape[1] == 1 else logits[self._mask]

    def _seeded(self, seed: Tensor | int | None, device: torch.device) -> contextlib.AbstractContextManager[None]:
        return seeded(seed if self.training and isinstance(seed, int) else None, device)

    def _masked_only(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Keeps the projection to the vocabulary to [MASK]: of all tokens it takes as long as some layers, and its
        output is gigabytes."""
        assert self._mask is not None
        return (inputs[0][self._mask].unsqueeze(1), *inputs[1:])


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
    head: bool = False,
) -> TextEncoder:
    """An encoder on the CPU, fp32, in evaluation mode, from a run directory of ours or a local Hugging Face one.

    step: of a run, the checkpoint; by default the newest whole one. engine: auto is packed for our runs and for what
    `export` wrote in our own format, and transformers for other directories. dropout: of the encoder, instead of what
    it was pretrained with. random_init: the same architecture and tokenizer with the weights that pretraining starts
    from, drawn from `seed`. head: with the head that it was pretrained with, and a run's decoder, so that it can fill
    in [MASK]; not with random_init.

    Raises UserError if the directory is neither, if the engine cannot hold the model, if it lacks the head, or if
    transformers is missing."""
    path = Path(path)
    require(engine in ENGINES, f"unknown engine '{engine}'; there are: {', '.join(ENGINES)}")
    require(path.is_dir(), f"{path}: no such directory; give a run directory or a local Hugging Face one")
    require(not (head and random_init), "a head of random weights fills in nothing: leave out one of the two")
    if (path / "config.yaml").exists():
        require(
            engine != "transformers",
            f"{path}: a run of ours has no transformers class; export it first (maelm-fast export), then give "
            "the exported directory",
        )
        return _of_run(path, step, dropout, random_init, seed, head)
    require((path / "config.json").exists(), f"{path}: neither a run directory (config.yaml) nor a Hugging Face one")
    require(step is None, f"{path}: a Hugging Face directory has one checkpoint: leave out the step")
    own = read_config(path).get("model_type") == OWN  # what `export` wrote in our own format
    require(
        not (own and head),
        f"{path}: an export in our own format, which needs code of the directory to run; prompt the run directory "
        "instead",
    )
    if engine == "packed" or (engine == "auto" and own):
        return _packed_checkpoint(path, dropout, random_init, seed, head)
    require(
        not own,
        f"{path}: exported in our own format, which needs code of the directory to run in transformers; use engine "
        "packed, or export to roberta or mpnet",
    )
    return _transformers_checkpoint(path, dropout, random_init, seed, head)


def _of_run(path: Path, step: int | None, dropout: float, random_init: bool, seed: int, head: bool) -> PackedEncoder:
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
    texts, network = TextTokenizer.of_run(loaded.tokenizer), loaded.model
    network.encoder.dropout_p = dropout  # a decoder has none
    model = replace(loaded.config.model, dropout=dropout)
    if not head:
        return PackedEncoder(network.encoder, model, texts, name, loaded.step)
    policy = loaded.config.masking.policy
    require(policy != "random", f"{name}: pretrained with random tokens in the place of [MASK]: it knows none")
    require(
        not network.predicts_all,
        f"{name}: a causal_cross decoder predicts a token from all that come before it; it cannot fill in [MASK]",
    )
    return PackedEncoder(network.eval(), model, texts, name, loaded.step, sees_mask=loaded.encoder_reads_mask)


def _packed_checkpoint(path: Path, dropout: float, random_init: bool, seed: int, head: bool) -> PackedEncoder:
    config = ModelConfig(**read_fields(path), decoder="none", dropout=dropout)
    tokenizer = _tokenizer(path, read_config(path).get("type_vocab_size"), config.vocab_size, head)
    if random_init:
        with seeded(seed):
            encoder: Encoder | MaeLm = MaeLm(config).encoder
    else:
        encoder, state = Encoder(config), read_checkpoint(path).state
        if head:
            require("head.dense.weight" in state, f"{path}: {_NO_HEAD}")
            encoder = MaeLm(config, tokenizer.mask_id)
        else:
            state = {k.removeprefix("encoder."): t for k, t in state.items() if k.startswith("encoder.")}
        encoder.load_state_dict(state)
    return PackedEncoder(encoder.eval(), config, tokenizer, path.resolve().name, None, random_init)


_NO_HEAD = (
    "an encoder without the head that fills in [MASK] (exports of a MAE-LM in a stock format leave out its decoder and "
    "head): prompt the run directory, or give a checkpoint saved as ...ForMaskedLM"
)


def _transformers_checkpoint(
    path: Path, dropout: float, random_init: bool, seed: int, head: bool
) -> TransformersEncoder:
    transformers = require_transformers()
    with quiet(), transformers_errors(path):
        config = transformers.AutoConfig.from_pretrained(path, **LOCAL)
    if not head:
        check_kind(path, config)
    set_dropout(path, config, dropout)
    if random_init:
        with seeded(seed):
            model = new_model(config)
    else:
        kind = transformers.AutoModelForMaskedLM if head else transformers.AutoModel
        options = {} if head else without_pooler(config)
        with quiet(), transformers_errors(path):
            model, loading = kind.from_pretrained(
                path, config=config, dtype=torch.float32, output_loading_info=True, **options, **LOCAL
            )
        missing = sorted(loading["missing_keys"])
        require(not (head and missing), f"{path}: {_NO_HEAD}")
        require(
            not missing,
            f"{path}: the weights lack {len(missing)} tensors of the encoder, {', '.join(missing[:3])} among them: it "
            "is no complete checkpoint of what config.json says",
        )
    rows = model.get_input_embeddings().weight.shape[0]
    tokenizer = _tokenizer(path, getattr(config, "type_vocab_size", None), rows, head)
    return TransformersEncoder(model.eval(), tokenizer, path.resolve().name, dropout, random_init, head)


def _tokenizer(path: Path, token_types: Any, rows: int, head: bool) -> TextTokenizer:
    """A prompt is one text, whatever it was made of."""
    tokenizer = read_tokenizer(path, 1 if head else int(token_types or 1))
    require(
        tokenizer.vocab_size <= rows,
        f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the model's table {rows}: they do not belong "
        "together",
    )
    if head:
        require(
            tokenizer.mask_id is not None,
            f"{path.resolve().name}: its tokenizer has no mask token, so that nothing can be asked",
        )
    return tokenizer


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
