"""Encoders of both engines: the same weights give the same vectors, and what cannot be loaded says so."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from maelm_fast import ops
from maelm_fast.batch import layout_of
from maelm_fast.encoders import PackedEncoder, TextEncoder, TokenBatch, TransformersEncoder, load_encoder, seeded
from maelm_fast.errors import UserError
from maelm_fast.export.huggingface import export
from maelm_fast.finetuning.problem import token_batch
from maelm_fast.model.maelm import MaeLm
from maelm_fast.training.trainer import build_model
from tests.finetuning import small

TEXTS = (["the fox", "a lazy dog jumps over " * 6, "is"], ["over and over", "the dog", "a fox?"])
FORMATS = {"mpnet": {}, "roberta": {"relative_bias": "none"}, "own": {"relative_bias": "released"}}


def batch_for(encoder: TextEncoder, texts: tuple[list[str], ...] = TEXTS) -> TokenBatch:
    inputs = encoder.tokenizer.encode(texts, encoder.max_length)
    return token_batch(inputs, range(len(inputs)))


def assert_close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("exported")
    for format, fields in FORMATS.items():
        assert export(small.loaded_run(**fields), root / format).format == format
    return {format: root / format for format in FORMATS}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.bert_directory(tmp_path_factory.mktemp("hub") / "bert", type_vocab_size=2)


def test_a_run_is_read_back(tmp_path: Path) -> None:
    run = small.loaded_run()
    path = small.run_directory(tmp_path / "run", run)
    encoder = load_encoder(path, dropout=0.25)
    assert isinstance(encoder, PackedEncoder)
    assert (encoder.engine, encoder.name, encoder.step, encoder.hidden_size, encoder.max_length) == (
        "packed",
        "run",
        10,
        32,
        140,
    )
    assert encoder.encoder.dropout_p == encoder.config.dropout == encoder.dropout_p == 0.25
    batch = batch_for(encoder)
    assert torch.equal(encoder(batch), run.model.encoder(batch.ids, batch.layout))
    assert load_encoder(path, step=10).step == 10
    for arguments, words in (
        ({"step": 3}, "no checkpoint at step 3"),
        ({"engine": "transformers"}, "export it first"),
        ({"engine": "fast"}, "unknown engine 'fast'"),
        ({"step": 10, "random_init": True}, "leave out one"),
    ):
        with pytest.raises(UserError, match=words):
            load_encoder(path, **arguments)


@pytest.mark.parametrize("format", FORMATS)
def test_both_engines_compute_the_run_s_encoder(exported: dict[str, Path], format: str) -> None:
    run = small.loaded_run(**FORMATS[format])
    automatic = load_encoder(exported[format])
    assert automatic.engine == ("packed" if format == "own" else "transformers")
    for encoder in (automatic, load_encoder(exported[format], engine="packed")):
        batch = batch_for(encoder)
        layers: list[torch.Tensor] = []
        expected: list[torch.Tensor] = []
        run.model.encoder(batch.ids, batch.layout, layers=expected)
        with torch.no_grad():
            out = encoder(batch, layers=layers)
            first = encoder(batch, first_only=True)
        assert_close(out, expected[-1])
        assert_close(first, expected[-1][batch.layout.cu_seqlens[:-1].long()])
        assert len(layers) == len(expected) == 3
        for a, b in zip(layers, expected, strict=True):
            assert_close(a, b)
        with pytest.raises(UserError, match="not with first_only"):
            encoder(batch, first_only=True, layers=[])


def test_bert_in_transformers_alone_and_in_a_batch(bert: Path) -> None:
    """Against the model itself on one input at a time, without any padding, token types included."""
    import transformers

    encoder = load_encoder(bert)
    assert isinstance(encoder, TransformersEncoder)
    assert not any("pooler" in name for name, _ in encoder.named_parameters())
    model = transformers.AutoModel.from_pretrained(bert).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert)
    rows = []
    for a, b in zip(*TEXTS, strict=True):
        inputs = tokenizer(a, b, return_token_type_ids=True, return_tensors="pt")
        assert inputs["token_type_ids"].sum() > 0
        rows.append(model(**inputs).last_hidden_state[0])
    batch = batch_for(encoder)
    with torch.no_grad():
        assert_close(encoder(batch), torch.cat(rows))
        assert_close(encoder(batch, first_only=True), torch.stack([row[0] for row in rows]))


def test_bert_on_our_kernels(bert: Path) -> None:
    theirs, ours = load_encoder(bert), load_encoder(bert, engine="packed")
    assert ours.max_length == theirs.max_length == 140
    single = (TEXTS[0],)
    assert_close(ours(batch_for(ours, single)), theirs(batch_for(theirs, single)))
    with pytest.raises(UserError, match="use engine transformers"):
        ours(batch_for(ours))


def test_the_longest_input_of_roberta(exported: dict[str, Path]) -> None:
    """Its table has two rows that no token has, 142 in all."""
    encoder = load_encoder(exported["roberta"])
    assert encoder.max_length == 140
    inputs = encoder.tokenizer.encode((["the fox " * 100],), encoder.max_length)
    assert inputs.lengths == [140]
    assert encoder(token_batch(inputs, [0])).isfinite().all()


def test_a_random_run_is_what_pretraining_starts_from(tmp_path: Path) -> None:
    run = small.loaded_run()
    path = small.run_directory(tmp_path / "run", run)
    shutil.rmtree(path / "checkpoints")  # none is needed
    state = torch.random.get_rng_state()
    encoder = load_encoder(path, random_init=True, dropout=0.3)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (encoder.random_init, encoder.step) == (True, None)
    fresh = build_model(run.config, run.vocabulary).encoder.state_dict()
    for name, tensor in encoder.encoder.state_dict().items():
        assert torch.equal(tensor, fresh[name]), name
    other = load_encoder(path, random_init=True, seed=1)
    assert not torch.equal(other.encoder.token_table, encoder.encoder.token_table)


def test_a_random_hugging_face_encoder(exported: dict[str, Path], bert: Path) -> None:
    import transformers

    encoder = load_encoder(bert, random_init=True, seed=4)
    config = transformers.AutoConfig.from_pretrained(bert)
    torch.manual_seed(4)
    expected = transformers.AutoModel.from_config(config, add_pooling_layer=False).state_dict()
    for name, tensor in encoder.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    packed = load_encoder(exported["own"], random_init=True, seed=4)
    torch.manual_seed(4)
    fresh = MaeLm(packed.config).encoder.state_dict()
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in packed.encoder.state_dict().items())


@pytest.mark.parametrize("format", ["mpnet", "bert"])
def test_dropout_follows_from_the_seed(exported: dict[str, Path], bert: Path, format: str) -> None:
    path = bert if format == "bert" else exported[format]
    for engine in ("packed", "transformers"):
        encoder = load_encoder(path, engine=engine, dropout=0.4).train()
        batch = batch_for(encoder, (TEXTS[0],))
        state = torch.random.get_rng_state()
        first, again, other = (encoder(batch, dropout_seed=seed) for seed in (7, 7, 8))
        assert torch.equal(torch.random.get_rng_state(), state)
        assert torch.equal(first, again)
        assert not torch.allclose(first, other)
        assert not torch.allclose(encoder(batch), encoder(batch))
        encoder.eval()
        assert torch.equal(encoder(batch, dropout_seed=7), encoder(batch, dropout_seed=8))
        without = load_encoder(path, engine=engine, dropout=0.0).train()
        assert_close(without(batch), encoder(batch))


@pytest.mark.parametrize("engine", ["packed", "transformers"])
def test_bf16(exported: dict[str, Path], engine: Any) -> None:
    encoder = load_encoder(exported["mpnet"], engine=engine)
    batch = batch_for(encoder)
    with torch.autocast("cpu", torch.bfloat16):
        out = encoder(batch)
    exact = encoder(batch)
    assert out.dtype == torch.bfloat16 or engine == "transformers"
    assert (out.float() - exact).abs().mean() < 0.02 * exact.abs().mean()


def test_seeding_leaves_gpus_alone_that_it_could_not_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(seed: int) -> None:
        raise AssertionError("every GPU's generator was set")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", touched)
    state = torch.random.get_rng_state()
    with seeded(3):
        drawn = torch.rand(4)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(drawn, torch.rand(4, generator=torch.Generator().manual_seed(3)))


def test_no_padding_is_computed_for_the_first_tokens(
    exported: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the last layer's attention on there are as many rows as inputs."""
    encoder = load_encoder(exported["own"])
    assert isinstance(encoder, PackedEncoder)
    after_attention = {id(block.attention.out.weight) for block in encoder.encoder.blocks}
    seen: list[int] = []
    linear = ops.linear

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if id(weight) in after_attention:
            seen.append(len(x))
        return linear(x, weight, bias)

    monkeypatch.setattr(ops, "linear", counted)
    batch = TokenBatch(torch.randint(5, 200, (30,), dtype=torch.int32), layout_of([9, 1, 20]))
    encoder(batch, first_only=True)
    assert seen == [30, 3]


def _config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"step": 4}, "one checkpoint: leave out the step"),
        ({"engine": "transformers", "model_type": "maelm"}, "use engine packed"),
        ({"model_type": "gpt2"}, "no bidirectional encoder"),
        ({"model_type": "t5", "classifier_dropout": 0.0}, "no bidirectional encoder"),
        ({"model_type": "no-such-model"}, "transformers cannot load it"),
        ({"engine": "packed", "model_type": "electra"}, "'electra' is not supported; supported: roberta, bert, mpnet"),
        ({"engine": "packed", "hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"num_hidden_layers": 3}, "the weights lack 16 tensors of the encoder"),
        ({"engine": "packed", "num_hidden_layers": 3}, "the checkpoint has no tensor"),
        ({"vocab_size": 9}, "transformers cannot load it"),
        ({"engine": "packed", "vocab_size": 9}, "the tokenizer has 14 tokens, the model's table 9"),
        ({"engine": "packed", "hidden_size": 34}, "config.json does not fit the weights"),
    ],
)
def test_what_cannot_be_loaded(bert: Path, tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    path = shutil.copytree(bert, tmp_path / "copy")
    options = {name: arguments.pop(name) for name in ("step", "engine") if name in arguments}
    _config(path, **arguments)
    with pytest.raises(UserError, match=words) as error:
        load_encoder(path, **options)
    assert "\n" not in str(error.value)


def test_directories_that_are_none(
    bert: Path, exported: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="no such directory"):
        load_encoder(tmp_path / "absent")
    with pytest.raises(UserError, match="neither a run directory"):
        load_encoder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="not the configuration"):
        load_encoder(tmp_path)
    with pytest.raises(UserError, match="use engine packed"):
        load_encoder(exported["own"], engine="transformers")
    copy = shutil.copytree(bert, tmp_path / "copy")
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer_config.json").unlink()
    for engine in ("packed", "transformers"):
        with pytest.raises(UserError, match="no tokenizer beside the model"):
            load_encoder(copy, engine=engine)
    own = shutil.copytree(exported["own"], tmp_path / "own")
    state = load_file(own / "model.safetensors")
    save_file({k: v for k, v in state.items() if "blocks.1.ffn_in" not in k}, own / "model.safetensors")
    with pytest.raises(UserError, match=r"no tensor for encoder.blocks.1.ffn_in.weight"):
        load_encoder(own)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match="pip install transformers"):
        load_encoder(bert)
