"""A fine-tuned model as a directory that transformers loads, and that we load again.

    saved = save(model, task, Path("sst2-model"))
    model = load_finetuned("sst2-model")                # AutoModelForSequenceClassification loads the directory too

format     class in config.json                      when
roberta,   stock RoBERTa or MPNet                    a packed encoder that one of them holds (export.choose_format);
mpnet                                                their heads are ours
own        our network as remote code                any other packed encoder
stock      the encoder's own class for the task      a transformers encoder whose class, read back, puts out what our
                                                     head does: of RoBERTa and BERT and their kin it does
plain      none: no class of transformers holds it   any other (ModernBERT's, DistilBERT's and ELECTRA's classifiers are
                                                     other functions); there is no config.json, so that no class takes
                                                     the directory for its own and puts a random head on it

Whatever the format, finetuned.json says what load_finetuned needs, and what was written has been read back and its
outputs compared with the model's before the directory is there. A regression's output is the raw score in the
directory (of STS-B 0 to 5), the scaled one in our model.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, processors
from torch import Tensor

from maelm_fast.config import require
from maelm_fast.data.tokenizer import special_ids, special_names
from maelm_fast.encoders import (
    PackedEncoder,
    TextEncoder,
    TokenBatch,
    TransformersEncoder,
    load_encoder,
    padded_inputs,
    padded_places,
    read_tokenizer,
)
from maelm_fast.errors import UserError
from maelm_fast.export.compare import remote_code_removed
from maelm_fast.export.from_huggingface import read_weights
from maelm_fast.export.huggingface import fitting_format, require_new, write_tokenizer
from maelm_fast.export.library import new_model, quiet, require_transformers, transformers_errors
from maelm_fast.export.mapping import own_encoder_state, own_fields, stock_encoder_state, stock_fields
from maelm_fast.finetuning.heads import SequenceModel, SpanModel
from maelm_fast.finetuning.problem import token_batch
from maelm_fast.finetuning.run import on_host
from maelm_fast.finetuning.tasks import Task
from maelm_fast.ops.dispatch import REFERENCE, backends
from maelm_fast.text import Inputs, TextTokenizer
from maelm_fast.training.files import damage, write_directory, write_json

Model = SequenceModel | SpanModel
FINETUNED = "finetuned.json"
WEIGHTS = "model.safetensors"
VERSION = 1
TOLERANCE = 1e-5
LONGEST = 192  # tokens of the longest input that is compared: beyond the last bucket of the relative bias
_PREFIXES = {"roberta": "Roberta", "mpnet": "MPNet", "own": "MaeLm"}
_KINDS = {True: "ForQuestionAnswering", False: "ForSequenceClassification"}
_HEADS = (
    ("classifier.dense", "classifier.out_proj"),
    ("{base}.pooler.dense", "classifier"),
    ("{base}.pooler", "classifier"),
    ("dense", "classifier"),
)
"""Where a classifier may have our head's two layers: RoBERTa and MPNet; BERT, in the pooler; ALBERT; own format."""
_PROBES = ["Once, upon a time.", "two  spaces\tand ÅNGSTRÖM, 中文 🙂", "a <mask> b [MASK] </s>", "x"]


@dataclass(frozen=True)
class Saved:
    """What was written. architecture: the class in config.json, None in format plain. difference: largest one of a
    logit, in float64, between the model and what was read back. note: who can load it, in a sentence."""

    out: Path
    format: str
    architecture: str | None
    difference: float
    note: str


def save(model: Model, task: Task, out: Path) -> Saved:
    """Writes weights, tokenizer, finetuned.json and README.md to `out`, which must be new or empty.

    `out` is complete, and its model read back puts out what `model` does, or it is not there; else UserError, as also
    if transformers is missing or `out` cannot be written. The model may be on any device and is not changed."""
    transformers = require_transformers()
    require_new(out)
    exact = copy.deepcopy(model).cpu().double().eval()
    saved: list[Saved] = []

    def fill(aside: Path) -> None:
        saved.append(_save(transformers, model, exact, task, out, aside))
        _check_tokenizer(model.encoder.tokenizer, aside)
        (aside / "README.md").write_text(_card(saved[0], model, task), encoding="utf-8")

    try:
        with quiet(), backends(REFERENCE):
            write_directory(out, fill)
    except OSError as error:
        raise UserError(f"{error.filename or out}: {error.strerror or error}; nothing was saved") from None
    return saved[0]


def load_finetuned(path: str | Path) -> Model:
    """The model that `save` wrote, on the CPU, fp32, in evaluation mode; its tokenizer is model.encoder.tokenizer.
    Raises UserError if the directory is none of `save`'s or is damaged."""
    path = Path(path)
    record = _read_record(path)
    if fault := damage(path):
        raise UserError(f"{path}: damaged: {fault}; fine-tune again, or copy it again")
    return _load(path, record)


def _load(path: Path, record: dict[str, Any]) -> Model:
    task = _task(record)
    if record["format"] == "plain":
        encoder: TextEncoder = _plain_encoder(path, record)
    else:
        encoder = load_encoder(path, engine=record["engine"], dropout=record["dropout"])
        encoder.name = record["name"]
    model = _new_model(encoder, task, record["head_dropout"])
    tensors = read_weights(path)
    if record["format"] == "plain":
        model.load_state_dict(tensors)
    else:
        state = {
            f"{ours}.{part}": tensors[f"{theirs}.{part}"].float()
            for ours, theirs in record["head"].items()
            for part in ("weight", "bias")
        }
        model.head.load_state_dict(_scaled(state, task, back=True))
    return model.eval()


def _plain_encoder(path: Path, record: dict[str, Any]) -> TransformersEncoder:
    transformers = require_transformers()
    with quiet(), transformers_errors(path):
        model = new_model(transformers.AutoConfig.for_model(**record["encoder"]))
    tokenizer = read_tokenizer(path, int(record["encoder"].get("type_vocab_size") or 1))
    return TransformersEncoder(model, tokenizer, record["name"], record["dropout"])


def _new_model(encoder: TextEncoder, task: Task, dropout: float) -> Model:
    return SpanModel(encoder) if task.kind == "spans" else SequenceModel(encoder, task.outputs, dropout)


def _save(transformers: Any, model: Model, exact: Model, task: Task, out: Path, aside: Path) -> Saved:
    """In the class that there is for the task, if it is the same function; else, of transformers' own encoders, in
    format plain."""
    encoder, kind, format = model.encoder, _KINDS[task.kind == "spans"], "stock"
    if isinstance(encoder, PackedEncoder):
        format = fitting_format(encoder.config, encoder.tokenizer.pad_id)
        fields = _task_fields(task) | {"classifier_dropout": _head_dropout(model)}
        theirs, base, state = _of_packed(transformers, encoder, format, kind, fields)
        _write_tokenizer(transformers, encoder, aside)
    else:
        theirs, base, state = _of_transformers(transformers, encoder, kind, _task_fields(task))
        encoder.tokenizer.source.save_pretrained(aside)
    reason = "transformers has no class of this encoder with this head"
    if theirs is not None and (names := _fit(theirs, base, state, model, task)) is not None:
        architecture = type(theirs).__name__
        theirs.save_pretrained(aside)
        _write_record(aside, model, task, format, names)
        difference = _compare(transformers, exact, task, aside, remote_code=format == "own")
        if difference <= TOLERANCE:
            note = f"AutoModel{kind} loads it, as {architecture}."
            if format == "own":
                note = f"AutoModel{kind} loads it with trust_remote_code=True; its code is modeling_maelm.py."
            return Saved(out, format, architecture, difference, note)
        reason = f"{architecture} computes something else from the same weights (logits differ by {difference:.1e})"
        (aside / "config.json").unlink()
    require(format == "stock", f"the saved model, read back, is not the fine-tuned one: {reason}; nothing was saved")
    save_file(on_host(model), aside / WEIGHTS)
    _write_record(aside, model, task, "plain", {})
    again = _load(aside, _read_record(aside)).double()
    with torch.inference_mode():
        difference = _largest([exact(batch) - again(batch) for batch in _batches(exact)])
    require(difference <= TOLERANCE, f"the saved model, read back, differs by {difference:.1e}; nothing was saved")
    note = f"AutoModel{kind} cannot load it: {reason}. maelm_fast.finetuning.saving.load_finetuned loads it."
    return Saved(out, "plain", None, difference, note)


_Theirs = tuple[Any, str, dict[str, Tensor]]
"""A model of a class with a head, None if there is no class; the name of its encoder; the encoder's weights."""


def _of_packed(transformers: Any, encoder: PackedEncoder, format: str, kind: str, fields: dict[str, Any]) -> _Theirs:
    tokenizer, config = encoder.tokenizer, encoder.config
    special: Any = {
        "bos": tokenizer.cls_id,
        "pad": tokenizer.pad_id,
        "eos": tokenizer.sep_id,
        "mask": tokenizer.mask_id,
    }
    if format == "own":
        from maelm_fast.export import modeling_maelm as library

        base, state = "encoder", own_encoder_state(encoder.encoder, config.vocab_size)
        fields |= own_fields(config, special, False)
    else:
        library, base, state = transformers, format, stock_encoder_state(encoder.encoder, config, format)
        fields |= stock_fields(config, format, special)
    prefix = _PREFIXES[format]
    return getattr(library, prefix + kind)(getattr(library, f"{prefix}Config")(**fields)), base, state


def _of_transformers(transformers: Any, encoder: Any, kind: str, fields: dict[str, Any]) -> _Theirs:
    auto, config = getattr(transformers, f"AutoModel{kind}"), copy.deepcopy(encoder.model.config)
    if type(config) not in auto._model_mapping:
        return None, "", {}
    config.update(fields)
    theirs = auto.from_config(config, dtype=torch.float32)
    return theirs, theirs.base_model_prefix, encoder.model.state_dict()


def _fit(theirs: Any, base: str, state: dict[str, Tensor], model: Model, task: Task) -> dict[str, str] | None:
    """Puts our weights in, and says where our head's layers are in it; None if they do not fit."""
    own = theirs.state_dict()
    heads = [{"out": "qa_outputs"}]
    if task.kind != "spans":
        heads = [{"dense": dense.format(base=base), "out": last} for dense, last in _HEADS]
    for names in heads:
        whole = {f"{base}.{name}": tensor for name, tensor in state.items()} | _head_state(model, task, names)
        if {name: t.shape for name, t in whole.items()} == {name: t.shape for name, t in own.items()}:
            theirs.load_state_dict(whole)
            return names
    return None


def _head_state(model: Model, task: Task, names: dict[str, str]) -> dict[str, Tensor]:
    """The head's tensors under the names of another class, with raw scores for a regression."""
    state = {name: tensor.detach().cpu() for name, tensor in model.head.state_dict().items()}
    scaled = _scaled(state, task)
    return {
        f"{theirs}.{part}": scaled[f"{ours}.{part}"] for ours, theirs in names.items() for part in ("weight", "bias")
    }


def _scaled(state: dict[str, Tensor], task: Task, back: bool = False) -> dict[str, Tensor]:
    """The head's tensors with the raw score as output, from those with the scaled one; `back`: the other way."""
    if task.label_range is None:
        return state
    low, high = task.label_range
    weight, bias = state["out.weight"], state["out.bias"]
    if back:
        return state | {"out.weight": weight / (high - low), "out.bias": (bias - low) / (high - low)}
    return state | {"out.weight": weight * (high - low), "out.bias": bias * (high - low) + low}


def _task_fields(task: Task) -> dict[str, Any]:
    """What the configuration of a class for the task says of its outputs."""
    if task.kind == "spans":
        return {}
    regression = task.kind == "regression"
    labels = (task.label_column,) if regression else task.labels
    return {
        "id2label": dict(enumerate(labels)),
        "label2id": {name: i for i, name in enumerate(labels)},
        "problem_type": "regression" if regression else "single_label_classification",
    }


def _head_dropout(model: Model) -> float:
    return model.head.dropout_p if isinstance(model, SequenceModel) else model.encoder.dropout_p


def _write_record(aside: Path, model: Model, task: Task, format: str, names: dict[str, str]) -> None:
    encoder: Any = model.encoder
    record = {
        "version": VERSION,
        "format": format,
        "engine": encoder.engine,
        "name": encoder.name,
        "task": dataclasses.asdict(task),
        "dropout": encoder.dropout_p,
        "head_dropout": _head_dropout(model),
        "head": names,
    }
    if format == "plain":
        record["encoder"] = encoder.model.config.to_dict()
    write_json(aside / FINETUNED, record)


def _read_record(path: Path) -> dict[str, Any]:
    file = path / FINETUNED
    require(path.is_dir(), f"{path}: no such directory; give one with a fine-tuned model in it")
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        version = record["version"]
    except FileNotFoundError:
        raise UserError(f"{path}: no {FINETUNED}: not the directory of a model that was fine-tuned here") from None
    except (OSError, ValueError, LookupError, TypeError):
        raise UserError(f"{file}: not the record of a fine-tuned model") from None
    require(version == VERSION, f"{file}: version {version}, this release reads {VERSION}: use the one that wrote it")
    return dict(record)


def _task(record: dict[str, Any]) -> Task:
    def tupled(value: Any) -> Any:
        return tuple(tupled(part) for part in value) if isinstance(value, list) else value

    known = {field.name for field in dataclasses.fields(Task)}
    return Task(**{name: tupled(value) for name, value in record["task"].items() if name in known})


def _write_tokenizer(transformers: Any, encoder: PackedEncoder, aside: Path) -> None:
    """A run's tokenizer is written so that it puts the special tokens where ours does, which is RoBERTa's form."""
    source = encoder.tokenizer.source
    if not isinstance(source, Tokenizer):
        source.save_pretrained(aside)
        return
    source, names, ids = Tokenizer.from_str(source.to_str()), special_names(source), special_ids(source)
    eos, bos = ((names[role], ids[role]) for role in ("eos", "bos"))
    source.post_processor = processors.RobertaProcessing(eos, bos, trim_offsets=True)
    write_tokenizer(transformers, source, encoder.config.max_positions, aside)


def _check_tokenizer(tokenizer: TextTokenizer, aside: Path) -> None:
    again = read_tokenizer(aside, 1 + tokenizer.pair.second_type)
    for texts in ((_PROBES,), (_PROBES, _PROBES[::-1])):
        ours, theirs = (t.encode(texts, 512) for t in (tokenizer, again))
        same = all(np.array_equal(a, b) for a, b in zip(ours.ids, theirs.ids, strict=True))
        require(same, "the saved tokenizer, read back, encodes texts differently; nothing was saved")


def _compare(transformers: Any, exact: Model, task: Task, path: Path, remote_code: bool) -> float:
    """Largest difference of a logit between our model (float64) and the directory's as transformers reads it."""
    auto = getattr(transformers, "AutoModel" + _KINDS[task.kind == "spans"])
    options = {"local_files_only": True, "trust_remote_code": remote_code, "dtype": torch.float64}
    differences = []
    with torch.inference_mode(), remote_code_removed():
        theirs = auto.from_pretrained(path, **options).eval()
        for batch in _batches(exact):
            ours = exact(batch)
            if task.label_range is not None:
                low, high = task.label_range
                ours = ours * (high - low) + low
            differences.append(ours - _logits(theirs, batch, exact.encoder.tokenizer.pad_id))
    return _largest(differences)


def _largest(differences: list[Tensor]) -> float:
    """NaN if there is one."""
    return float(torch.cat([difference.flatten() for difference in differences]).abs().max())


def _logits(theirs: Any, batch: TokenBatch, pad_id: int) -> Tensor:
    """Of a padded model, as ours puts them out: (S, outputs), or (T, 2)."""
    places = padded_places(batch.layout)
    output = theirs(**padded_inputs(batch, places, pad_id))
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], dim=-1).flatten(0, 1)[places]
    logits: Tensor = output.logits
    return logits


def _batches(model: Model) -> list[TokenBatch]:
    """Random inputs of one token to many, and with token types, if there are any."""
    generator, tokenizer = np.random.default_rng(0), model.encoder.tokenizer
    ordinary = np.setdiff1d(np.arange(tokenizer.vocab_size), [tokenizer.pad_id]).astype(np.int32)
    lengths = [1, 5, min(LONGEST, model.encoder.max_length)]
    ids = [generator.choice(ordinary, n) for n in lengths]
    batches = [Inputs(ids, None, 0, 0, 0)]
    if tokenizer.pair.second_type and isinstance(model.encoder, TransformersEncoder):
        batches.append(Inputs(ids, [(np.arange(n) > n // 2).astype(np.int32) for n in lengths], 0, 0, 0))
    return [token_batch(inputs, range(len(inputs))) for inputs in batches]


def _card(saved: Saved, model: Model, task: Task) -> str:
    encoder = model.encoder
    source = encoder.name if encoder.step is None else f"{encoder.name}, step {encoder.step}"
    if encoder.random_init:
        source = f"{encoder.name}, with random weights instead of pretrained ones"
    outputs = {
        "classification": "the classes' logits: " + ", ".join(task.labels),
        "regression": "the raw score",
        "spans": "logits of where an answer starts and ends; of the first token, that there is none",
    }[task.kind]
    tag = {"classification": "text-classification", "regression": "text-classification", "spans": "question-answering"}
    library = "" if saved.architecture is None else "library_name: transformers\n"
    return f"""---
{library}pipeline_tag: {tag[task.kind]}
tags: [maelm_fast]
---

{source}, fine-tuned with maelm_fast for {task.title}. {saved.note}

Input: {" and ".join(f"`{name}`" for name in task.text_columns)}. Output: {outputs}.
"""
