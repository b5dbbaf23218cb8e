"""Checkpoints of Hugging Face models under our names: the same function, or one line saying why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from maelm_fast.batch import layout_of
from maelm_fast.config import ModelConfig
from maelm_fast.data.masking import pack_masked
from maelm_fast.errors import UserError
from maelm_fast.export.from_huggingface import read_checkpoint, read_fields
from maelm_fast.export.huggingface import export
from maelm_fast.masking import Vocabulary
from maelm_fast.model.maelm import MaeLm
from maelm_fast.training.initial import adapt, load_initial
from maelm_fast.training.rundir import LoadedRun

transformers = pytest.importorskip("transformers")
SHAPE = {
    "vocab_size": 90,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
KINDS = {
    "roberta": ("Roberta", {"max_position_embeddings": 142, "type_vocab_size": 1, "layer_norm_eps": 1e-3}),
    "bert": ("Bert", {"max_position_embeddings": 140, "pad_token_id": 0}),
    "mpnet": ("MPNet", {"max_position_embeddings": 142, "layer_norm_eps": 1e-5}),
}
MASK = 89


@pytest.fixture(scope="module")
def make(roughen: Callable[[Any], None]) -> Callable[..., Any]:
    def build(kind: str, suffix: str = "ForMaskedLM") -> Any:
        prefix, fields = KINDS[kind]
        config = getattr(transformers, f"{prefix}Config")(**SHAPE, **fields)
        torch.manual_seed(0)
        model = getattr(transformers, f"{prefix}{suffix}")(config).eval()
        roughen(model)
        return model

    return build


@pytest.fixture(scope="module")
def checkpoints(make: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    for kind in KINDS:
        make(kind).save_pretrained(path / kind)
    return path


@pytest.fixture
def edited(checkpoints: Path, tmp_path: Path) -> Callable[..., Path]:
    """edited(kind, change of config.json, change of the tensors): a copy of a checkpoint."""

    def copy(
        kind: str,
        config: dict[str, Any] | None = None,
        tensors: Callable[[dict[str, torch.Tensor]], None] = lambda _: None,
    ) -> Path:
        data = json.loads((checkpoints / kind / "config.json").read_text())
        weights = load_file(checkpoints / kind / "model.safetensors")
        tensors(weights)
        (tmp_path / "config.json").write_text(json.dumps(data | (config or {})))
        save_file(weights, tmp_path / "model.safetensors")
        return tmp_path

    return copy


def ours_from(path: Path, **fields: Any) -> tuple[MaeLm, list[str]]:
    initial = read_checkpoint(path)
    model = MaeLm(adapt(ModelConfig(**fields), initial), mask_id=MASK).eval()
    return model, load_initial(model, initial)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_hidden_states_and_scores(checkpoints: Path, make: Callable[..., Any], kind: str) -> None:
    theirs = make(kind).double()
    ours, fresh = ours_from(checkpoints / kind, decoder="none", max_positions=7)
    assert fresh == []
    assert ours.config.max_positions == 140
    assert ours.encoder.token_table.shape == (128, 32)
    assert not ours.encoder.token_table[90:].any()
    ours.double()  # in fp32 the rounding alone can be 1e-5
    ids = torch.randint(3, 80, (2, 140))
    ids[:, ::5] = MASK
    layers: list[torch.Tensor] = []
    with torch.no_grad():
        ours.encoder(ids.flatten().int(), layout_of([140, 140]), layers=layers)
        output = theirs(ids, output_hidden_states=True)
        logits = ours.logits(pack_masked(list(ids.numpy()), Vocabulary(90, MASK, ()), True))
    for a, b in zip(layers, output.hidden_states, strict=True):
        assert (a - b.flatten(0, 1)).abs().max() <= 1e-5
    assert (logits - output.logits[ids == MASK]).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_that_is_silent_has_the_class_s_epsilon(edited: Callable[..., Path], kind: str) -> None:
    file = edited(kind) / "config.json"
    data = json.loads(file.read_text())
    del data["layer_norm_eps"]
    file.write_text(json.dumps(data))
    theirs = getattr(transformers, f"{KINDS[kind][0]}Config")()
    assert read_fields(file.parent)["layer_norm_eps"] == theirs.layer_norm_eps != KINDS["mpnet"][1]["layer_norm_eps"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_bare_model_leaves_head_and_decoder_fresh(make: Callable[..., Any], tmp_path: Path, kind: str) -> None:
    make(kind, "Model").save_pretrained(tmp_path)
    _, fresh = ours_from(tmp_path, decoder="cross", decoder_layers=1)
    assert {name.split(".")[0] for name in fresh} == {"decoder", "head"}


@pytest.mark.parametrize("fields", [{}, {"decoder": "none"}, {"decoder": "none", "relative_bias": "none"}])
def test_our_own_export_reads_back_bit_for_bit(
    make_run: Callable[..., LoadedRun], tmp_path: Path, fields: dict[str, Any]
) -> None:
    run = make_run(**fields)
    export(run, tmp_path / "out")
    initial = read_checkpoint(tmp_path / "out")
    assert initial.vocabulary == run.tokenizer.get_vocab()
    assert adapt(run.config.model, initial) == run.config.model
    head = run.config.model.decoder == "none"
    expected = {n: t for n, t in run.model.state_dict().items() if n.startswith("encoder.") or head}
    assert initial.state.keys() == expected.keys()
    for name, tensor in initial.state.items():
        rows = run.config.model.vocab_size if name in ("encoder.token_table", "head.vocabulary_bias") else None
        assert torch.equal(tensor[:rows], expected[name][:rows]), name


def test_half_precision_pickles_and_old_names(checkpoints: Path, edited: Callable[..., Path]) -> None:
    expected = read_checkpoint(checkpoints / "bert").state
    path = edited("bert")
    weights = load_file(path / "model.safetensors")
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for n, t in weights.items()
    }
    old["bert.pooler.dense.weight"] = old["cls.seq_relationship.bias"] = torch.zeros(2)
    old["bert.embeddings.position_ids"] = torch.arange(140)
    torch.save(old, path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    assert all(torch.equal(t, expected[name]) for name, t in read_checkpoint(path).state.items())
    torch.save({name: t.half() for name, t in old.items()}, path / "pytorch_model.bin")
    state = read_checkpoint(path).state
    assert all(t.dtype == torch.float32 and torch.allclose(t, expected[n], atol=0.01) for n, t in state.items())


def test_the_vocabulary_comes_along(checkpoints: Path, edited: Callable[..., Path], tokenizer: Any) -> None:
    assert read_checkpoint(checkpoints / "roberta").vocabulary is None
    path = edited("roberta")
    tokenizer.save(str(path / "tokenizer.json"))
    assert read_checkpoint(path).vocabulary == tokenizer.get_vocab()
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"not a tokenizer\.json"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("bert", {"model_type": "deberta-v2"}, "'deberta-v2' is not supported; supported: roberta, bert, mpnet"),
        ("bert", {"model_type": None}, "None is not supported"),
        ("bert", {"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new'"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ("roberta", {"is_decoder": True}, "is_decoder is set"),
        ("roberta", {"add_cross_attention": True}, "add_cross_attention is set"),
        ("roberta", {"pad_token_id": 0}, "pad_token_id is 0"),
        ("roberta", {"hidden_size": None}, "hidden_size must be a positive number"),
        ("roberta", {"num_attention_heads": 3}, "not a multiple"),
        ("roberta", {"num_hidden_layers": 3}, "no tensor 'roberta.encoder.layer.2"),
        ("roberta", {"num_hidden_layers": 1}, "encoder.layer.1.* has no place"),
        ("roberta", {"intermediate_size": 64}, "does not fit the weights: encoder.blocks.0.ffn_in"),
        ("roberta", {"max_position_embeddings": 514}, "does not fit the weights: encoder.position_table"),
        ("mpnet", {"relative_attention_num_buckets": 64}, "fixed at 32"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(
    edited: Callable[..., Path], kind: str, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words) as error:
        read_checkpoint(edited(kind, change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("lm_head.dense.bias"), "no tensor 'lm_head.dense.bias'"),
        (lambda t: t.update({"roberta.encoder.layer.0.crossattention.self.query.weight": torch.ones(2)}), "no place"),
        (lambda t: t.update({"lm_head.decoder.weight": torch.ones(90, 32)}), "is not the token table"),
        (lambda t: t.update({"roberta.embeddings.token_type_embeddings.weight": torch.ones(1, 5)}), "does not fit"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    edited: Callable[..., Path], change: Callable[..., None], words: str
) -> None:
    with pytest.raises(UserError, match=words) as error:
        read_checkpoint(edited("roberta", None, change))
    assert "\n" not in str(error.value)


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("executed"),))


def test_files_that_cannot_be_read_are_refused(edited: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = edited("roberta")
    monkeypatch.chdir(path)
    weights = path / "model.safetensors"

    def refused(words: str, directory: Path = path) -> None:
        with pytest.raises(UserError, match=words) as error:
            read_checkpoint(directory)
        assert "\n" not in str(error.value)

    weights.write_bytes(weights.read_bytes()[:-10])
    refused("cannot be read")
    weights.unlink()
    refused(r"neither model\.safetensors nor pytorch_model\.bin")
    (path / "model.safetensors.index.json").write_text("{}")
    refused("split over several files")
    (path / "model.safetensors.index.json").unlink()
    for content in ({"x": Hostile()}, {"x": [1, 2]}, [torch.ones(2)]):
        torch.save(content, path / "pytorch_model.bin")
        refused("save the model again as model.safetensors")
    assert not (path / "executed").exists()
    (path / "pytorch_model.bin").write_bytes(b"not a checkpoint")
    refused("save the model again")
    (path / "config.json").write_text("{")
    refused("cannot be read as JSON")
    (path / "config.json").write_text("[]")
    refused("not the configuration of a model")
    (path / "config.json").unlink()
    refused(r"no config\.json")
    refused("not a directory", path / "nothing")
