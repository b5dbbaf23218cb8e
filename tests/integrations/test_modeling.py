"""MaeLmForPreTraining is MaeLm in transformers' clothes: same weights, loss, and update however it is accumulated;
what it saves is an export of ours, which the Auto classes read without remote code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from maelm_fast import presets
from maelm_fast.batch import PackedBatch, to_kwargs
from maelm_fast.config import MaskingConfig
from maelm_fast.data.masking import pack, pack_masked
from maelm_fast.data.tokenizer import train_tokenizer
from maelm_fast.errors import UserError
from maelm_fast.masking import Masker, Vocabulary
from maelm_fast.model.maelm import MaeLm

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from maelm_fast.integrations.transformers import MaeLmConfig, MaeLmForPreTraining  # noqa: E402
from maelm_fast.integrations.transformers.modeling import _vocabulary  # noqa: E402

TOKENIZER = train_tokenizer(["the quick brown fox", "jumps over the lazy dog"] * 3, 290, cased=False)
TOKENS = TOKENIZER.get_vocab_size()
MASK = TOKENS - 1
SIZES: dict[str, Any] = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "ffn_size": 48, "max_positions": 40}
LENGTHS = [23, 7, 40, 12, 3, 31, 18, 9]


def build(preset: str = "tiny", seed: int = 0, **changes: Any) -> MaeLmForPreTraining:
    torch.manual_seed(seed)
    return MaeLmForPreTraining.from_preset(preset, tokenizer=TOKENIZER, **(SIZES | changes))


def batch_of(indices: list[int], encoder_sees_mask: bool = False) -> PackedBatch:
    """Rows of a few tokens, of unequal lengths, half of each masked: batches differ much in what they predict."""
    rows = [np.random.default_rng(i).integers(4, 20, LENGTHS[i % len(LENGTHS)]) for i in indices]
    masker = Masker(MaskingConfig(rate=0.5), Vocabulary(TOKENS, MASK, ()), 0, encoder_sees_mask)
    return pack(rows, np.array(indices), np.zeros(len(indices), int), masker)


@pytest.mark.parametrize("preset", ["base", "base++", "base_cross", "roberta_base", "small", "tiny", "roberta_tiny"])
def test_a_preset_is_the_same_network(preset: str) -> None:
    config = MaeLmConfig.from_preset(preset, tokenizer=TOKENIZER, **SIZES)
    expected = replace(presets.get(preset).model, vocab_size=TOKENS, **SIZES)
    torch.manual_seed(0)
    ours = MaeLm(expected)
    theirs = build(preset)
    assert theirs.maelm.config == expected
    assert theirs.encoder_sees_mask == preset.startswith("roberta")
    state = theirs.maelm.state_dict()
    assert state.keys() == ours.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in ours.state_dict().items())
    assert MaeLmConfig.from_dict(json.loads(config.to_json_string())).to_dict() == config.to_dict()
    batch = batch_of([0, 1, 2], theirs.encoder_sees_mask)
    loss, correct = ours(batch, 5)
    output = theirs(**to_kwargs(batch), dropout_seed=5)
    assert (int(output.correct), int(output.predicted)) == (int(correct), batch.counts.masked)
    assert torch.equal(output.loss, loss / batch.counts.masked)
    assert torch.equal(theirs(**to_kwargs(batch), dropout_seed=5, num_items_in_batch=50).loss, loss / 50)
    assert torch.equal(theirs(**to_kwargs(batch), dropout_seed=5, return_dict=False)[0], output.loss)


def test_dropout_is_drawn_from_pytorchs_generator() -> None:
    model = build("base")
    kwargs = to_kwargs(batch_of([0, 1]))

    def loss(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        value: torch.Tensor = model(**kwargs).loss
        return value

    assert torch.equal(loss(1), loss(1))
    assert not torch.equal(loss(1), loss(2))
    model.eval()
    assert torch.equal(loss(1), loss(2))


def test_autocast_to_bf16() -> None:
    model, kwargs = build(), to_kwargs(batch_of([0, 1, 2]))
    exact = model(**kwargs).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**kwargs).loss
    assert loss.dtype == torch.float32
    assert 0 < abs(loss - exact) < 0.05
    loss.backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("preset", ["tiny", "tiny_cross", "roberta_tiny"])
def test_what_is_saved_is_an_export_and_is_read_back(preset: str, tmp_path: Path) -> None:
    model = build(preset).double().eval()
    model.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors", "modeling_maelm.py"}
    again, information = MaeLmForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    assert not information["missing_keys"]
    assert not again.training
    assert {parameter.dtype for parameter in again.parameters()} == {torch.float64}
    kwargs = to_kwargs(batch_of([0, 1, 2], model.encoder_sees_mask))
    assert torch.equal(again(**kwargs).loss, model(**kwargs).loss)

    whole, information = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(whole).__name__ == "MaeLmForMaskedLM"
    assert not information["missing_keys"]
    assert not information["unexpected_keys"]
    assert whole.head.projection.weight is whole.encoder.token_embedding.weight
    ids = torch.randint(4, MASK, (1, 30))
    ids[0, 5:20:3] = MASK
    packed = pack_masked([ids[0].numpy()], Vocabulary(TOKENS, MASK, ()), model.encoder_sees_mask)
    difference = whole.eval()(ids).logits[ids == MASK] - model.maelm.logits(packed)
    assert difference.abs().max() < 1e-10
    assert isinstance(transformers.AutoModelForPreTraining.from_pretrained(tmp_path), MaeLmForPreTraining)


def test_saving_a_state_dict_saves_that(tmp_path: Path) -> None:
    """As trainers do that gather it from several processes."""
    model, other = build(seed=0), build(seed=1)
    model.save_pretrained(tmp_path, state_dict=other.state_dict())
    found = MaeLmForPreTraining.from_pretrained(tmp_path)
    assert torch.equal(found.maelm.head.dense.weight, other.maelm.head.dense.weight)


class Rows(Dataset[int]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> int:
        return index


def train(model: MaeLmForPreTraining, out: Path, batch: int, accumulate: int, **options: Any) -> Any:
    """Four updates, or as many as options say, of 8 rows each."""
    arguments = transformers.TrainingArguments(
        out,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulate,
        max_steps=4,
        learning_rate=1e-2,
        weight_decay=0.01,
        seed=3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **({"save_strategy": "no"} | options),
    )

    def collate(rows: list[int]) -> dict[str, Any]:
        return to_kwargs(batch_of(rows))

    data = Rows()
    return transformers.Trainer(model, arguments, data_collator=collate, train_dataset=data, eval_dataset=data)


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_trainer_makes_the_same_updates_however_they_are_accumulated(tmp_path: Path) -> None:
    one, four = build(), build()
    whole, parts = train(one, tmp_path, 8, 1), train(four, tmp_path, 2, 4)
    whole.train()
    parts.train()
    assert losses(whole) == pytest.approx(losses(parts), rel=1e-5)
    assert losses(whole)[-1] < losses(whole)[0]
    start = build().state_dict()
    for name, tensor in one.state_dict().items():
        moved = (tensor - start[name]).abs().max()
        assert (tensor - four.state_dict()[name]).abs().max() <= 1e-3 * moved, name
    evaluated = whole.evaluate()["eval_loss"]
    with torch.no_grad():
        means = [float(one.eval()(**to_kwargs(batch_of(list(range(i, i + 8))))).loss) for i in range(0, 32, 8)]
    assert evaluated == pytest.approx(sum(means) / 4, rel=1e-5)
    assert whole.state.total_flos > 0


def test_trainer_resumes_to_the_same_bits(tmp_path: Path) -> None:
    dropout: Any = {"dropout": 0.1}
    straight, stopped, resumed = build(**dropout), build(**dropout), build(seed=9, **dropout)
    train(straight, tmp_path / "a", 8, 1).train()
    train(stopped, tmp_path / "b", 8, 1, save_strategy="steps", save_steps=2).train()
    trainer = train(resumed, tmp_path / "b", 8, 1)
    trainer.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    assert trainer.state.global_step == 4
    vocabulary = dict.fromkeys(("maelm.encoder.token_table", "maelm.head.vocabulary_bias"), TOKENS)
    for name, tensor in straight.state_dict().items():
        rows = vocabulary.get(name)  # padding rows, which nobody reads, are not saved
        assert torch.equal(resumed.state_dict()[name][:rows], tensor[:rows]), name
        assert torch.equal(stopped.state_dict()[name], tensor), name


def test_exports_from_before_tied_weights_were_declared(tmp_path: Path) -> None:
    """Theirs hold the projection, too, and their configuration says nothing of how a model starts."""
    from safetensors.torch import load_file, save_file

    model = build().eval()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("position_init", "relative_init", "tie_word_embeddings"):
        config.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    table = tensors["encoder.token_embedding.weight"]
    save_file(tensors | {"head.projection.weight": table.clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    kwargs = to_kwargs(batch_of([0, 1]))
    assert torch.equal(MaeLmForPreTraining.from_pretrained(tmp_path)(**kwargs).loss, model(**kwargs).loss)


def test_tokenizers_of_transformers_and_of_tokenizers() -> None:
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=TOKENIZER, cls_token="<s>", pad_token="<pad>", sep_token="</s>", mask_token="<mask>"
    )
    special, size = _vocabulary(TOKENIZER)
    assert _vocabulary(fast) == ({role: special[role] for role in ("bos", "pad", "eos", "mask")}, size)
    config = MaeLmConfig.from_preset("tiny", tokenizer=fast)
    found = config.bos_token_id, config.pad_token_id, config.eos_token_id, config.mask_token_id, config.vocab_size
    assert found == (0, 1, 2, MASK, TOKENS)
    fast.mask_token = None
    with pytest.raises(UserError, match="lacks a special token: mask"):
        MaeLmConfig.from_preset("tiny", tokenizer=fast)


def test_what_cannot_be_says_so(tmp_path: Path) -> None:
    for preset, changes, words in (
        ("tinny", {}, "did you mean 'tiny'"),
        ("tiny", {"decoder": "self_cross"}, "maelm-fast pretrain trains it"),
        ("tiny", {"positions": "misaligned"}, "maelm-fast pretrain trains it"),
        ("tiny", {"hidden": 3}, "unexpected keyword argument 'hidden'"),
        ("tiny", {"num_heads": 5}, "not a multiple of model.num_heads"),
    ):
        with pytest.raises(UserError, match=words):
            MaeLmConfig.from_preset(preset, tokenizer=TOKENIZER, **changes)
    model = build("roberta_tiny")
    with pytest.raises(UserError, match="encoder_sees_mask=True"):
        model(**to_kwargs(batch_of([0, 1])))
    longest = MaeLmForPreTraining.from_preset("tiny", tokenizer=TOKENIZER, max_positions=4)
    with pytest.raises(UserError, match=r"a row of \d+ tokens, where the model has 4 positions"):
        longest(**to_kwargs(batch_of([0, 1])))
    with pytest.raises(ValueError, match="does not support"):
        model.gradient_checkpointing_enable()
    with pytest.raises(NotImplementedError, match="vocabulary's size is fixed"):
        model.resize_token_embeddings(TOKENS + 1)
    config = MaeLmConfig.from_preset("tiny", tokenizer=TOKENIZER)
    config.attention_probs_dropout_prob = 0.5
    with pytest.raises(UserError, match="one rate for both"):
        MaeLmForPreTraining(config)
    (tmp_path / "config.json").write_text('{"model_type": "roberta"}')
    with pytest.raises(UserError, match="model_type 'roberta'"):
        MaeLmForPreTraining.from_pretrained(tmp_path)
