"""Exports: every format equals our model, a wrong one is noticed, and what cannot be right is refused."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from maelm_fast import presets
from maelm_fast.analysis.fill import encode, fill
from maelm_fast.batch import layout_of
from maelm_fast.cli import export as command
from maelm_fast.config import ModelConfig
from maelm_fast.errors import UserError
from maelm_fast.export import huggingface, mapping
from maelm_fast.export.huggingface import choose_format, export, fitting_format
from maelm_fast.model.position_bias import bucket
from maelm_fast.training.rundir import LoadedRun

transformers = pytest.importorskip("transformers")
MakeRun = Callable[..., LoadedRun]
RELEASED = {"relative_bias": "released"}
NO_BIAS = {"relative_bias": "none"}
WIDE = {"relative_buckets": 64}


@pytest.fixture(scope="module")
def own(make_run: MakeRun, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedRun, Path]:
    run, path = make_run(**RELEASED), tmp_path_factory.mktemp("exports") / "own"
    export(run, path)
    return run, path


@pytest.mark.parametrize(
    ("asked", "fields", "written"),
    [
        ("auto", {}, ("mpnet", "MPNetModel")),
        ("auto", {"decoder": "none"}, ("mpnet", "MPNetForMaskedLM")),
        ("auto", NO_BIAS, ("roberta", "RobertaModel")),
        ("auto", NO_BIAS | {"decoder": "none", "layer_norm_eps": 1e-3}, ("roberta", "RobertaForMaskedLM")),
        ("auto", WIDE, ("own", "MaeLmForMaskedLM")),
        ("auto", RELEASED | {"decoder": "cross"}, ("own", "MaeLmForMaskedLM")),
        ("own", NO_BIAS | {"decoder_relative_bias": True}, ("own", "MaeLmForMaskedLM")),
        ("own", {"decoder": "cross", "decoder_relative_bias": True}, ("own", "MaeLmForMaskedLM")),
        ("own", {"decoder": "none", "max_positions": 1}, ("own", "MaeLmForMaskedLM")),
        ("layoutlmv3", WIDE | {"relative_max_distance": 100}, ("layoutlmv3", "LayoutLMv3Model")),
        ("layoutlmv3", {"num_heads": 4, "decoder": "none"}, ("layoutlmv3", "LayoutLMv3Model")),
    ],
)
def test_every_format_equals_our_model(
    make_run: MakeRun, tmp_path: Path, asked: str, fields: dict[str, Any], written: tuple[str, str]
) -> None:
    report = export(make_run(**fields), tmp_path / "out", asked)
    assert (report.format, report.architecture) == written
    assert report.differences.layers == 3
    assert report.differences.hidden < 1e-6
    assert (report.differences.logits is not None) == written[1].endswith("ForMaskedLM")
    assert (report.differences.logits or 0.0) < 1e-6
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [written[1]]
    assert {"model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"} <= set(report.files)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("format", "fields"), [("mpnet", {}), ("roberta", NO_BIAS), ("layoutlmv3", WIDE), ("own", {}), ("own", NO_BIAS)]
)
def test_what_fine_tunes_the_export_has_the_dropout_of_pretraining(
    make_run: MakeRun, tmp_path: Path, format: str, fields: dict[str, Any]
) -> None:
    """Which equal hidden states do not show: they are computed without."""
    export(make_run(dropout=0.25, init_std=0.03, **fields), tmp_path / "out", format)
    model = transformers.AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=True, local_files_only=True)
    assert (model.config.hidden_dropout_prob, model.config.attention_probs_dropout_prob) == (0.25, 0.25)
    modules = [module for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert {module.p for module in modules} == {0.25}
    assert model.config.initializer_range == 0.03
    if format == "own":  # whose attention has no such module
        applied: list[Any] = []
        hooks = [module.register_forward_hook(lambda *_: applied.append(None)) for module in modules]
        model(torch.randint(3, 280, (2, 20)))
        assert len(applied) == 1 + 2 * model.config.num_hidden_layers
        for hook in hooks:
            hook.remove()
        for module in modules:
            module.p = 0.0
        ids = torch.randint(3, 280, (2, 20))
        assert torch.equal(model.eval()(ids)[0], model(ids)[0])
        assert not torch.allclose(model.train()(ids)[0], model(ids)[0], atol=1e-2)


def test_dropout_of_the_own_class_beside_its_encoder(own: tuple[LoadedRun, Path]) -> None:
    """None in the decoder, as in pretraining; a classifier's before both of its layers."""
    options = {"trust_remote_code": True, "local_files_only": True}
    decoder = transformers.AutoModelForMaskedLM.from_pretrained(own[1], **options).train().decoder
    assert {module.p for module in decoder.modules() if isinstance(module, torch.nn.Dropout)} == {0.0}
    assert {block.attention.dropout_p for block in decoder.blocks} == {0.0}
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(own[1], **options)
    applied: list[Any] = []
    classifier.dropout.register_forward_hook(lambda *_: applied.append(None))
    classifier.train()(torch.randint(3, 280, (2, 6)))
    assert len(applied) == 2


def test_the_special_tokens_keep_their_ids() -> None:
    special = {"bos": 5, "pad": 6, "eos": 7, "mask": 8}
    config = ModelConfig(hidden_size=32, num_heads=2)
    for written in (mapping.own_fields(config, special), mapping.stock_fields(config, "mpnet", special)):
        assert [written[f"{name}_token_id"] for name in ("bos", "pad", "eos")] == [5, 6, 7]
    assert mapping.own_fields(config, special)["mask_token_id"] == 8


@pytest.mark.parametrize("name", presets.variants())
@pytest.mark.parametrize("format", ["auto", "own"])
def test_every_ablation_exports_its_encoder(make_run: MakeRun, tmp_path: Path, format: str, name: str) -> None:
    """And with `own`, the decoder and head of those that the file beside the weights can compute."""
    plain = make_run()
    config = presets.variant(plain.config, name)
    model = {f.name: getattr(config.model, f.name) for f in fields(ModelConfig)}
    made = make_run(masking=config.masking, **model)
    report = export(made, tmp_path / "out", format)
    whole = name in ("mlm", "no_relative", "cross", "decoder_2_layers", "decoder_6_layers", "bert_masking", "mask40")
    if format == "own":
        assert report.architecture == ("MaeLmForMaskedLM" if whole else "MaeLmModel")
        card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
        assert ('pipeline("fill-mask"' in card) == whole
        auto = json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"]
        assert ("AutoModelForMaskedLM" in auto) == whole
    assert report.differences.layers == 3
    assert report.differences.hidden < 1e-6


@pytest.mark.parametrize(
    ("format", "fields", "words"),
    [
        ("mpnet", NO_BIAS, "the model has none: use roberta"),
        ("mpnet", RELEASED, "released: use own"),
        ("mpnet", WIDE, "the model has 64 up to 128: use own or layoutlmv3"),
        ("mpnet", {"relative_max_distance": 256}, "the model has 32 up to 256: use own or layoutlmv3"),
        ("roberta", {}, "the model has one: use mpnet"),
        ("roberta", WIDE, "the model has one: use own"),
        ("roberta", RELEASED, "the model has one: use own"),
        ("layoutlmv3", NO_BIAS, "the model has none: use roberta"),
        ("layoutlmv3", RELEASED, "released: use own"),
        ("layoutlmv3", {"hidden_size": 33, "num_heads": 3}, "even model.hidden_size: use own"),
        ("bert", {}, "unknown format 'bert'"),
    ],
)
def test_what_would_be_wrong_is_refused(format: str, fields: dict[str, Any], words: str) -> None:
    config = replace(ModelConfig(hidden_size=32, num_heads=2), **fields)
    with pytest.raises(UserError, match=words) as error:
        choose_format(config, format)
    assert "\n" not in str(error.value)


def test_stock_formats_need_the_padding_where_they_count_positions_from() -> None:
    config = ModelConfig(hidden_size=32, num_heads=2)
    found = [fitting_format(config, 1), fitting_format(config, 0), fitting_format(config, 0, "own")]
    assert found == ["mpnet", "own", "own"]
    with pytest.raises(UserError, match="mpnet needs a tokenizer whose padding has id 1: use own"):
        fitting_format(config, 0, "mpnet")


def _shift_positions(state: dict[str, Any]) -> None:
    name = "embeddings.position_embeddings.weight"
    state[name] = state[name].roll(1, 0)


def _change_one_element(name: str) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        state[name] = state[name].clone()
        state[name].view(-1)[-1] += 1e-3

    return change


@pytest.mark.parametrize(
    "spoil",
    [
        _shift_positions,
        _change_one_element("encoder.layer.1.output.LayerNorm.bias"),
        _change_one_element("encoder.layer.0.attention.attn.k.weight"),
        _change_one_element("encoder.relative_attention_bias.weight"),  # distances beyond 90 only
        lambda state: state.update({k: v * float("nan") for k, v in state.items() if "word" in k}),
    ],
)
def test_a_wrong_export_is_noticed_and_leaves_nothing(
    make_run: MakeRun, tmp_path: Path, spoil: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = huggingface.stock_state

    def wrong(*arguments: Any) -> dict[str, Any]:
        state = right(*arguments)
        spoil(state)
        return state

    monkeypatch.setattr(huggingface, "stock_state", wrong)
    with pytest.raises(UserError, match="differs from the run's: hidden states by"):
        export(make_run(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["head.norm.weight", "head.projection.bias", "decoder.blocks.1.ffn_in.weight"])
def test_a_wrong_head_or_decoder_is_noticed(
    make_run: MakeRun, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = huggingface.own_state

    def wrong(model: Any) -> dict[str, Any]:
        state = right(model)
        _change_one_element(name)(state)
        return state

    monkeypatch.setattr(huggingface, "own_state", wrong)
    with pytest.raises(UserError, match="scores by"):
        export(make_run(), tmp_path / "out", "own")
    assert not list(tmp_path.iterdir())


def test_a_wrong_epsilon_is_noticed(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = huggingface.stock_fields
    monkeypatch.setattr(huggingface, "stock_fields", lambda *a: right(*a) | {"layer_norm_eps": 1e-12})
    with pytest.raises(UserError, match="hidden states"):
        export(make_run(layer_norm_eps=1e-3), tmp_path / "out")


def test_a_wrong_tokenizer_is_noticed(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = huggingface.write_tokenizer

    def wrong(library: Any, tokenizer: Any, longest: int, out: Path) -> None:
        right(library, tokenizer, longest, out)
        file = out / "tokenizer.json"
        file.write_text(file.read_text().replace('"Lowercase"', '"NFC"'))

    monkeypatch.setattr(huggingface, "write_tokenizer", wrong)
    with pytest.raises(UserError, match="tokenizer, read back, encodes"):
        export(make_run(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_export_leaves_nothing(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface, "compare_model", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export(make_run(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_existing_files_are_kept_and_an_empty_directory_is_used(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for taken in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(UserError, match=f"{taken}: exists already"):
            export(make_run(), taken)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert export(make_run(), tmp_path / "empty").out == tmp_path / "empty"
    with pytest.raises(UserError, match="nothing was exported"):
        export(make_run(), tmp_path / "notes.txt" / "below")


def test_transformers_missing(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match="pip install transformers"):
        export(make_run(), tmp_path / "out")


def test_another_tokenizer_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it is not this run's tokenizer"):
        export(make_run(vocab_size=400), tmp_path / "out")


def test_nothing_goes_to_the_network(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("network")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    for format in ("own", "mpnet"):
        export(make_run(), tmp_path / format, format)


def test_the_tokenizer_is_what_fine_tuning_scripts_expect(own: tuple[LoadedRun, Path]) -> None:
    run, path = own
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    assert isinstance(tokenizer, transformers.PreTrainedTokenizerFast)
    assert tokenizer.model_max_length == 140
    assert len(tokenizer) == run.config.model.vocab_size
    assert (tokenizer.cls_token_id, tokenizer.pad_token_id, tokenizer.sep_token_id) == (0, 1, 2)
    assert tokenizer.mask_token_id == len(tokenizer) - 1 == run.model.mask_id
    batch = tokenizer(["The fox", "dog"], ["over", "jumps over the dog"], padding=True, return_tensors="pt")
    assert set(batch) == {"input_ids", "attention_mask"}
    assert tokenizer("the", "dog")["input_ids"] == run.tokenizer.encode("the", "dog").ids


def test_own_class_in_fp32(own: tuple[LoadedRun, Path]) -> None:
    run, path = own
    theirs = transformers.AutoModel.from_pretrained(path, trust_remote_code=True, local_files_only=True)
    assert torch.equal(theirs.relative_bias.buckets, run.model.encoder.relative_bias.buckets)
    ids = torch.randint(3, 280, (2, 140))
    layers: list[torch.Tensor] = []
    with torch.no_grad():
        run.model.encoder(ids.flatten().int(), layout_of([140, 140]), layers=layers)
        output = theirs(ids, output_hidden_states=True)
        explicit = theirs(ids, position_ids=torch.arange(140)[None].expand(2, -1))[0]
    assert torch.allclose(output.last_hidden_state, explicit, atol=1e-5)
    for a, b in zip(layers, output.hidden_states, strict=True):
        assert (a - b.flatten(0, 1)).abs().max() <= 1e-5 * a.abs().max()
    with pytest.raises(ValueError, match="at most 140"):
        theirs(torch.ones(1, 141, dtype=torch.long))


def test_fill_mask_answers_as_our_model_does(own: tuple[LoadedRun, Path]) -> None:
    run, path = own
    options = {"trust_remote_code": True, "local_files_only": True}
    model = transformers.AutoModelForMaskedLM.from_pretrained(path, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, **options)
    answers = transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer)("the quick <mask> fox")
    ids = torch.tensor([run.tokenizer.encode("the quick <mask> fox").ids])
    with torch.no_grad():
        logits = model(ids).logits[ids == run.model.mask_id]
        hidden = ids.clone()
        hidden[ids == run.model.mask_id] = 7  # a token in its place would be seen, [MASK] is not
        assert not torch.allclose(model(hidden).logits[ids == run.model.mask_id], logits, atol=1e-2)
        loss = model(ids, labels=torch.where(ids == run.model.mask_id, 5, -100)).loss
    assert answers[0]["token"] == int(logits.argmax())
    assert torch.allclose(loss, torch.nn.functional.cross_entropy(logits, torch.tensor([5])))


def test_fill_mask_reads_what_fill_reads(own: tuple[LoadedRun, Path]) -> None:
    """Punctuation behind <mask>, too: the pipeline's answers and their probabilities are those of `maelm-fast fill`."""
    run, path = own
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    options = {"trust_remote_code": True, "local_files_only": True}
    model = transformers.AutoModelForMaskedLM.from_pretrained(path, **options)
    pipeline = transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer)
    texts = ["the quick <mask>.", "<mask>, the fox", "over <mask> lazy dog"]
    for text, (expected,) in zip(texts, fill(run, texts), strict=True):
        assert tokenizer(text)["input_ids"] == encode(run.tokenizer, text)
        found = [(answer["token"], pytest.approx(answer["score"], abs=1e-5)) for answer in pipeline(text)]
        assert [(candidate.token_id, candidate.probability) for candidate in expected] == found


def test_own_class_fine_tunes(own: tuple[LoadedRun, Path]) -> None:
    _, path = own
    options = {"trust_remote_code": True, "local_files_only": True}
    ids = torch.randint(3, 280, (2, 6))
    right = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    left, left_ids = right.flip(1), torch.stack([ids[0], ids[1].roll(2)])

    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(path, num_labels=3, **options)
    logits = classifier.eval()(ids, right).logits
    assert torch.allclose(classifier(left_ids, left).logits, logits, atol=1e-5)
    assert not torch.allclose(classifier(left_ids, right).logits, logits, atol=1e-4)
    classifier.train()(ids, right, labels=torch.tensor([0, 2])).loss.backward()
    assert classifier.encoder.relative_bias.weight.grad.abs().sum() > 0

    regression = transformers.AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, **options).eval()
    targets = torch.tensor([0.5, 0.1])
    output = regression(ids, right, labels=targets)
    assert torch.allclose(output.loss, (output.logits.squeeze(1) - targets).square().mean())

    several = transformers.AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=3, problem_type="multi_label_classification", **options
    ).eval()
    output = several(ids, right, labels=(flags := torch.tensor([[1, 0, 1], [0, 0, 1]])))
    expected = -torch.where(flags.bool(), output.logits.sigmoid(), 1 - output.logits.sigmoid()).log().mean()
    assert torch.allclose(output.loss, expected)

    tagger = transformers.AutoModelForTokenClassification.from_pretrained(path, num_labels=4, **options).eval()
    tags = torch.tensor([[0, 3, -100, 1, 2, -100], [1, 1, 0, 2, -100, -100]])
    output = tagger(ids, right, labels=tags)
    expected = torch.nn.functional.cross_entropy(output.logits[tags >= 0], tags[tags >= 0])
    assert torch.allclose(output.loss, expected)
    assert torch.allclose(tagger(left_ids, left).logits[left.bool()], output.logits[right.bool()], atol=1e-5)

    answering = transformers.AutoModelForQuestionAnswering.from_pretrained(path, **options).eval()
    output = answering(ids, right, start_positions=torch.tensor([1, 900]), end_positions=torch.tensor([2, 900]))
    expected = -(output.start_logits.log_softmax(-1)[0, 1] + output.end_logits.log_softmax(-1)[0, 2]) / 2
    assert torch.allclose(output.loss, expected)
    assert output.start_logits[1, 4:].max() < output.start_logits[1, :4].min()


def test_own_class_survives_saving_and_a_larger_vocabulary(own: tuple[LoadedRun, Path], tmp_path: Path) -> None:
    run, path = own
    options = {"trust_remote_code": True, "local_files_only": True}
    model = transformers.AutoModelForMaskedLM.from_pretrained(path, **options)
    ids = torch.randint(3, 280, (1, 9))
    ids[0, 4] = run.model.mask_id
    before = model(ids).logits
    model.resize_token_embeddings(run.config.model.vocab_size + 5)
    model.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "again", **options)
    after = again(ids).logits
    assert after.shape[-1] == run.config.model.vocab_size + 5
    assert torch.allclose(after[..., :-5], before, atol=1e-6)


def test_the_shipped_bucket_rules_are_ours() -> None:
    from maelm_fast.export import modeling_maelm

    settings = {(m.relative_buckets, m.relative_max_distance) for m in (presets.get(n).model for n in presets.names())}
    for buckets, furthest in settings | {(8, 20), (12, 50)}:
        for rule in ("t5", "released"):
            for distance in range(-600, 601, 7):
                theirs = modeling_maelm.bucket(distance, rule, buckets, furthest)
                assert theirs == bucket(distance, rule, buckets, furthest), (distance, rule, buckets, furthest)


def test_command(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("maelm_fast.training.rundir.load_run", lambda path, step: replace(make_run(), step=step or 10))
    assert command.main([str(tmp_path / "run"), "--step", "7"]) == 0
    out = tmp_path / "run" / "export" / "mpnet-step_7"
    assert f"written: {out} (format mpnet, MPNetModel, step 7)" in capsys.readouterr().out
    assert (out / "model.safetensors").exists()
    for argv, words in (
        ([str(tmp_path), "--to", "hf"], "unknown option '--to'"),
        ([str(tmp_path), "--format", "onnx"], "--format takes one of auto,"),
        ([str(tmp_path), "--format", "roberta"], "use mpnet"),
    ):
        with pytest.raises(UserError, match=words):
            command.main(argv)
