"""Fine-tuned models on disk: what transformers loads puts out what ours does, and so does what we load."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maelm_fast.encoders import PackedEncoder, TextEncoder, load_encoder
from maelm_fast.errors import UserError
from maelm_fast.finetuning import saving
from maelm_fast.finetuning.heads import SequenceModel, SpanModel
from maelm_fast.finetuning.problem import token_batch
from maelm_fast.finetuning.saving import load_finetuned, save
from maelm_fast.finetuning.tasks import get
from maelm_fast.text import TextTokenizer
from tests.finetuning import small

TEXTS = (["the fox", "a lazy dog jumps over", "is"], ["over and over", "the dog", "a fox?"])
FORMATS = {"mpnet": {}, "roberta": {"relative_bias": "none"}, "own": {"relative_bias": "released"}}
CLASSES = {"mpnet": "MPNet", "roberta": "Roberta", "own": "MaeLm"}


def packed(**fields: Any) -> PackedEncoder:
    run = small.loaded_run(**fields)
    return PackedEncoder(run.model.encoder, run.config.model, TextTokenizer.of_run(run.tokenizer), "run", 10)


def model_for(encoder: TextEncoder, name: str) -> SequenceModel | SpanModel:
    task = get(name)
    return SpanModel(encoder, 1) if task.kind == "spans" else SequenceModel(encoder, task.outputs, 0.2, 1)


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    inputs = model.encoder.tokenizer.encode(TEXTS, 60)
    logits: torch.Tensor = model.eval()(token_batch(inputs, range(3)))
    return logits


@torch.no_grad()
def stock_logits(path: Path, task: str) -> torch.Tensor:
    """As a user of transformers gets them from texts."""
    import transformers

    options = {"local_files_only": True, "trust_remote_code": (path / "modeling_maelm.py").exists()}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    auto = transformers.AutoModelForSequenceClassification
    if get(task).kind == "spans":
        auto = transformers.AutoModelForQuestionAnswering
    model = auto.from_pretrained(path, **options).eval()
    types = getattr(model.config, "type_vocab_size", 1) > 1
    inputs = tokenizer(*TEXTS, padding=True, return_tensors="pt", return_token_type_ids=types)
    output = model(**inputs)
    if get(task).kind == "spans":
        both = torch.stack([output.start_logits, output.end_logits], -1)
        return both[inputs["attention_mask"].bool()]
    assert model.config.id2label == (dict(enumerate(get(task).labels)) or {0: "label"})
    logits: torch.Tensor = output.logits
    return logits


@pytest.mark.parametrize("task", ["mnli", "stsb", "squad_v2"])
@pytest.mark.parametrize("format", FORMATS)
def test_stock_classes_and_we_load_it(tmp_path: Path, format: str, task: str) -> None:
    model = model_for(packed(**FORMATS[format]), task)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    saved = save(model, get(task), tmp_path / "out")
    kind = "QuestionAnswering" if task == "squad_v2" else "SequenceClassification"
    assert (saved.format, saved.architecture) == (format, f"{CLASSES[format]}For{kind}")
    assert saved.difference < 1e-6
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    expected = logits_of(model)
    raw = expected * 5 if task == "stsb" else expected  # STS-B: from 0..1 to the score, which starts at 0
    torch.testing.assert_close(stock_logits(tmp_path / "out", task), raw, atol=2e-5, rtol=1e-5)
    again = load_finetuned(tmp_path / "out")
    torch.testing.assert_close(logits_of(again), expected, atol=1e-6, rtol=1e-6)
    assert saving._task(saving._read_record(tmp_path / "out")) == get(task)
    assert (again.encoder.engine, again.encoder.name, again.encoder.dropout_p) == ("packed", "run", 0.1)
    if task != "squad_v2":
        assert again.head.dropout_p == 0.2
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    problem = {"mnli": "single_label_classification", "stsb": "regression", "squad_v2": None}
    assert config.get("problem_type") == problem[task]


def test_a_scale_that_does_not_start_at_zero(tmp_path: Path) -> None:
    task, model = replace(get("stsb"), label_range=(-2.0, 3.0)), model_for(packed(), "stsb")
    save(model, task, tmp_path / "out")
    expected = logits_of(model)
    torch.testing.assert_close(stock_logits(tmp_path / "out", "stsb"), expected * 5 - 2, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(logits_of(load_finetuned(tmp_path / "out")), expected, atol=1e-6, rtol=1e-6)
    assert np.allclose(task.unscale(expected.numpy()), stock_logits(tmp_path / "out", "stsb"), atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "task", "format"),
    [
        ("Bert", "mnli", "stock"),
        ("Bert", "squad_v2", "stock"),
        ("Albert", "stsb", "stock"),
        ("Electra", "mnli", "plain"),  # the names of our head, another function
        ("Electra", "squad_v2", "stock"),
        ("ModernBert", "stsb", "plain"),
    ],
)
def test_hugging_face_encoders(tmp_path: Path, kind: str, task: str, format: str) -> None:
    special = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    path = small.bert_directory(tmp_path / "hub", kind, **special if kind == "ModernBert" else {"embedding_size": 32})
    encoder = load_encoder(path, dropout=0.3)
    model = model_for(encoder, task)
    saved = save(model, get(task), tmp_path / "out")
    assert saved.format == format
    expected = logits_of(model)
    again = load_finetuned(tmp_path / "out")
    torch.testing.assert_close(logits_of(again), expected, atol=1e-6, rtol=1e-6)
    assert (again.encoder.engine, again.encoder.dropout_p) == ("transformers", 0.3)
    if format == "plain":
        assert saved.architecture is None
        assert "cannot load it" in saved.note
        assert saved.note in (tmp_path / "out" / "README.md").read_text()
        assert not (tmp_path / "out" / "config.json").exists()
    else:
        raw = expected * 5 if task == "stsb" else expected
        torch.testing.assert_close(stock_logits(tmp_path / "out", task), raw, atol=1e-5, rtol=1e-5)


def test_hugging_face_weights_on_our_kernels(tmp_path: Path) -> None:
    """BERT's encoder without token types is our own format, with BERT's tokenizer."""
    path = small.bert_directory(tmp_path / "hub")
    model = model_for(load_encoder(path, engine="packed"), "sst2")
    assert save(model, get("sst2"), tmp_path / "out").format == "own"
    again = load_finetuned(tmp_path / "out")
    tokens = [m.encoder.tokenizer.encode((TEXTS[0],), 60) for m in (model, again)]  # type: ignore[union-attr]
    first, second = (m.eval()(token_batch(t, range(3))) for m, t in zip((model, again), tokens, strict=True))
    torch.testing.assert_close(first, second, atol=1e-6, rtol=1e-6)


def test_a_run_with_bert_s_tokenizer_exports_the_form_it_was_trained_with(tmp_path: Path) -> None:
    """[CLS] a [SEP] [SEP] b [SEP], though the tokenizer's own form has one [SEP] between."""
    import transformers

    run = small.loaded_run(vocab_size=len(small.WORDS))
    tokenizer = TextTokenizer.of_run(small.wordpiece().backend_tokenizer)
    encoder = PackedEncoder(run.model.encoder, run.config.model, tokenizer, "run")
    model = model_for(encoder, "mnli")
    assert save(model, get("mnli"), tmp_path / "out").format == "own"  # stock classes want 1 for padding
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("the", "fox")["input_ids"] == [2, 5, 3, 3, 6, 3]
    torch.testing.assert_close(logits_of(load_finetuned(tmp_path / "out")), logits_of(model), atol=1e-6, rtol=1e-6)


def test_a_wrong_file_is_noticed_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_for(packed(), "mnli")
    right = saving._head_state

    def wrong(*arguments: Any) -> dict[str, torch.Tensor]:
        state = right(*arguments)
        return state | {"classifier.out_proj.bias": state["classifier.out_proj.bias"] + 1e-3}

    monkeypatch.setattr(saving, "_head_state", wrong)
    with pytest.raises(UserError, match=r"is not the fine-tuned one: .*logits differ by 1\.0e-03"):
        save(model, get("mnli"), tmp_path / "out")
    monkeypatch.setattr(saving, "_head_state", right)
    monkeypatch.setattr(saving, "write_tokenizer", lambda *_: small.wordpiece().save_pretrained(_[-1]))
    with pytest.raises(UserError, match="tokenizer, read back"):
        save(model, get("mnli"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_saved_or_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_for(packed(), "mnli")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        save(model, get("mnli"), tmp_path / "taken")
    for path, words in ((tmp_path / "absent", "no such directory"), (tmp_path / "taken", "no finetuned.json")):
        with pytest.raises(UserError, match=words):
            load_finetuned(path)
    out = save(model, get("mnli"), tmp_path / "out").out
    record = (out / "finetuned.json").read_text()
    for text, words in (("{}", "not the record"), (record.replace('"version": 1', '"version": 9'), "version 9")):
        (out / "finetuned.json").write_text(text)
        with pytest.raises(UserError, match=words):
            load_finetuned(out)
    (out / "finetuned.json").write_text(record)
    weights = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    with pytest.raises(UserError, match=r"damaged: model.safetensors does not match"):
        load_finetuned(out)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match="pip install transformers"):
        save(model, get("mnli"), tmp_path / "other")
