"""A run's model as a Hugging Face directory, reloaded and compared with ours before it is there at all.

    report = export(load_run("runs/base"), Path("exported"))       # format "auto"

own         our network as remote code (modeling_maelm.py travels along), always exact: encoder, decoder and head; of
            the ablations whose pretraining network that code does not have, the encoder
mpnet       stock MPNet, when the bias is t5 with 32 buckets up to distance 128
roberta     stock RoBERTa, when there is no bias
layoutlmv3  stock LayoutLMv3 without boxes and images, for any t5 bias; on request only

A stock format holds the encoder; of a run without decoder it holds the LM head too, which then sits on the encoder.
The token table is written without its padding rows: one row per token of the tokenizer, which is what len(tokenizer)
and config.vocab_size are taken to mean there; a padding row would be a token that fill-mask could answer with.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from maelm_fast.config import ModelConfig, require
from maelm_fast.data.tokenizer import PAD, special_ids, special_names, with_mask_in_text
from maelm_fast.errors import UserError
from maelm_fast.export.card import About, card
from maelm_fast.export.compare import Differences, compare_model, compare_tokenizer
from maelm_fast.export.library import quiet, require_transformers
from maelm_fast.export.mapping import own_encoder_state, own_fields, own_holds_all, own_state, stock_fields, stock_state
from maelm_fast.training.files import write_directory, write_json
from maelm_fast.training.rundir import LoadedRun

FORMATS = ("auto", "own", "mpnet", "roberta", "layoutlmv3")


@dataclass(frozen=True)
class ExportReport:
    """What was written, and how far it is, read back, from ours. architecture: the class in config.json."""

    out: Path
    format: str
    architecture: str
    step: int
    files: tuple[str, ...]
    differences: Differences


def choose_format(config: ModelConfig, format: str = "auto") -> str:
    """The format "auto" stands for, or `format` itself if it can hold the model exactly. UserError if it cannot."""
    require(format in FORMATS, f"unknown format '{format}'; there are: {', '.join(FORMATS)}")
    bias, setting = config.relative_bias, (config.relative_buckets, config.relative_max_distance)
    stock = "roberta" if bias == "none" else "mpnet" if bias == "t5" and setting == (32, 128) else None
    if format == "auto":
        return stock or "own"
    advice = f"use {stock or 'own'}"
    if format == "roberta":
        require(bias == "none", f"format roberta has no relative position bias, and the model has one: {advice}")
    if format in ("mpnet", "layoutlmv3"):
        require(bias != "none", f"format {format} has a relative position bias, and the model has none: {advice}")
        require(
            bias != "released",
            f"format {format} knows the t5 bucket rule only, and the model has model.relative_bias=released: {advice}",
        )
    if format == "mpnet":
        require(
            stock == "mpnet",
            f"format mpnet has 32 buckets up to distance 128, whatever its config says, and the model has {setting[0]} "
            f"up to {setting[1]}: use own or layoutlmv3",
        )
    if format == "layoutlmv3":
        require(config.hidden_size % 2 == 0, "format layoutlmv3 needs an even model.hidden_size: use own")
    return format


def fitting_format(config: ModelConfig, pad_id: int, format: str = "auto") -> str:
    """`choose_format`, also of the tokenizer: stock classes count positions from the padding's id."""
    chosen = choose_format(config, format)
    if pad_id != PAD and chosen != "own":
        require(format == "auto", f"format {chosen} needs a tokenizer whose padding has id {PAD}: use own")
        chosen = "own"
    return chosen


def require_new(out: Path) -> None:
    require(
        not out.exists() or (out.is_dir() and not any(out.iterdir())),
        f"{out}: exists already; name another directory, or remove it first",
    )


def export(run: LoadedRun, out: Path, format: str = "auto", about: About = About()) -> ExportReport:
    """Writes config.json, model.safetensors, the tokenizer and README.md to `out`, which must be new or empty. about:
    what README.md says beside what the run itself holds.

    `out` is complete, and its model read back equals ours, or it is not there. Raises UserError if the format cannot
    hold the model, if what was written differs, if transformers is missing, or if `out` cannot be written."""
    transformers = require_transformers()
    chosen = fitting_format(run.config.model, special_ids(run.tokenizer)["pad"], format)
    tokens, rows = run.tokenizer.get_vocab_size(), run.config.model.vocab_size
    require(tokens == rows, f"the tokenizer has {tokens} tokens but the model {rows}: it is not this run's tokenizer")
    require_new(out)
    architecture, differences = "", None

    def fill(aside: Path) -> None:
        nonlocal architecture, differences
        architecture = _write_model(transformers, run, aside, chosen)
        write_tokenizer(transformers, run.tokenizer, run.config.model.max_positions, aside)
        (aside / "README.md").write_text(card(run, chosen, architecture, about), encoding="utf-8")
        compare_tokenizer(transformers, run.tokenizer, aside)
        differences = compare_model(transformers, run.model, aside, remote_code=chosen == "own")

    try:
        with quiet():
            write_directory(out, fill)
    except OSError as error:
        raise UserError(f"{error.filename or out}: {error.strerror or error}; nothing was exported") from None
    assert differences is not None
    files = tuple(sorted(file.name for file in out.iterdir()))
    return ExportReport(out, chosen, architecture, run.step, files, differences)


def _write_model(transformers: Any, run: LoadedRun, out: Path, format: str) -> str:
    """Writes config.json and model.safetensors, and returns the class they are of."""
    if format == "own":
        from maelm_fast.export.modeling_maelm import MaeLmConfig, MaeLmForMaskedLM, MaeLmModel

        whole = own_holds_all(run.config)
        own_config = MaeLmConfig(**own_fields(run.config.model, special_ids(run.tokenizer), whole))
        model: Any = MaeLmForMaskedLM(own_config) if whole else MaeLmModel(own_config)
        state = own_state(run.model) if whole else own_encoder_state(run.model.encoder, run.config.model.vocab_size)
    else:
        with_head = format != "layoutlmv3" and run.config.model.decoder == "none"
        prefix = {"mpnet": "MPNet", "roberta": "Roberta", "layoutlmv3": "LayoutLMv3"}[format]
        config = getattr(transformers, f"{prefix}Config")(
            **stock_fields(run.config.model, format, special_ids(run.tokenizer))
        )
        if with_head:
            model = getattr(transformers, f"{prefix}ForMaskedLM")(config)
        else:
            options = {} if format == "layoutlmv3" else {"add_pooling_layer": False}
            model = getattr(transformers, f"{prefix}Model")(config, **options)
        state = stock_state(run.model, format, f"{format}." if with_head else "")
    model.load_state_dict(state, strict=True)
    model.save_pretrained(out)
    return type(model).__name__


def write_tokenizer(transformers: Any, tokenizer: Tokenizer, longest: int, out: Path) -> None:
    """The tokenizer's files as AutoTokenizer reads them, what follows <mask> cut as in running text. longest: tokens of
    an input."""
    names = special_names(tokenizer)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=with_mask_in_text(tokenizer),
        model_max_length=longest,
        model_input_names=["input_ids", "attention_mask"],  # no token types
        bos_token=names["bos"],
        cls_token=names["bos"],
        pad_token=names["pad"],
        eos_token=names["eos"],
        sep_token=names["eos"],
        unk_token=names["unk"],
        mask_token=names["mask"],
    )
    theirs.save_pretrained(out)
    file = out / "tokenizer_config.json"  # the name that every version of transformers knows
    fields = json.loads(file.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    write_json(file, fields)
