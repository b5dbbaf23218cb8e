"""Patched models in the loops of others: Trainer, accelerate, pipelines, sentence-transformers, torch.compile."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import maelm_fast
from maelm_fast.errors import UserError
from maelm_fast.integrations.transformers.patch import patch, unpatch
from tests.integrations.encoders import batch_of, config_of, gradients, model_of
from tests.integrations.trainer import first_update, padded, small_roberta, texts, trained

WORDS = "time year people way day man thing woman life child world school state family student".split()


def parameters(model: Any) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_trainer_makes_the_same_update_of_one_batch_and_of_four_accumulated_ones() -> None:
    runs = [trained(patch(small_roberta()), batch, accumulated, 2) for batch, accumulated in ((16, 1), (4, 4))]
    runs.append(trained(small_roberta(), 16, 1, 2))
    (loss, norm), *others = map(first_update, runs)
    for other in others:
        assert other == pytest.approx((loss, norm), rel=1e-4)
    as_it_comes = first_update(trained(small_roberta(), 4, 4, 1))  # docs/integrations.md has these numbers
    assert as_it_comes == pytest.approx((21.2007, 6.6429), rel=1e-3)
    assert (loss, norm) == pytest.approx((5.3044, 1.6288), rel=1e-3)
    for one, *rest in zip(*(parameters(run.model) for run in runs), strict=True):
        for x in rest:
            torch.testing.assert_close(x, one, rtol=0.0, atol=2e-5)  # Adam's steps are 1e-3


def test_trainer_resumes_bit_for_bit_with_dropout(tmp_path: Path) -> None:
    def model() -> Any:
        one = small_roberta()
        for module in one.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1
        return patch(one)

    saving = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2, "seed": 3}
    whole = parameters(trained(model(), 8, 1, 4, **saving).model)
    again = trained(model(), 8, 1, 4, **saving, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.state.global_step == 4
    assert all(torch.equal(x, y) for x, y in zip(parameters(again.model), whole, strict=True))


@pytest.fixture
def _accelerate_afresh() -> Iterator[None]:
    """Its choice of precision is the process's."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("_accelerate_afresh")
def test_accelerate_wraps_it_for_mixed_precision_and_unwraps_it() -> None:
    from accelerate import Accelerator

    model, batch = patch(small_roberta().train()), padded(texts()[:4])
    expected = model(**batch).loss
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    wrapped = accelerator.prepare_model(model)
    loss = wrapped(**batch).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
    assert loss.item() != expected.item()
    with pytest.raises(UserError, match="has been wrapped since"):
        unpatch(model)
    plain = accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)
    assert torch.equal(plain(**batch).loss, expected)
    assert unpatch(plain)(**batch).logits is not None
    with pytest.raises(UserError, match="forward of its own already"):
        patch(accelerator.prepare_model(small_roberta()))


@pytest.mark.parametrize("family", ["roberta", "mpnet", "modernbert"])
def test_compiled_as_one_graph_where_the_lengths_are_given(family: str) -> None:
    torch._dynamo.reset()
    ours, batch = patch(model_of(config_of(family, num_hidden_layers=2), "", torch.float32)), batch_of("left-padded")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    inputs["sequence_lengths"] = batch["attention_mask"].sum(1).tolist()
    if hasattr(ours, "pooler"):  # it would read the first column, which this batch pads
        ours = patch(type(ours)(ours.config, add_pooling_layer=False))
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    found = []
    for model in (ours, compiled):
        ours.zero_grad()
        states = model(**inputs).last_hidden_state
        states.square().sum().backward()
        found.append([states.detach(), *gradients(ours).values()])
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_compiled_in_several_graphs_with_the_loss() -> None:
    """The host reads how long the texts are and where their labels stand."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    ours, batch = patch(model_of(config_of("roberta"), dtype=torch.float32)), batch_of("left-padded")
    expected = ours(**batch).loss
    torch.testing.assert_close(torch.compile(ours, backend="eager")(**batch).loss, expected)
    assert counters["stats"]["unique_graphs"] > 1
    assert counters["graph_break"]


def word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token", "mask_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


@pytest.mark.parametrize("family", ["roberta", "bert", "modernbert"])
def test_the_fill_mask_pipeline(family: str) -> None:
    from transformers import pipeline

    stock = model_of(config_of(family), dtype=torch.float32).eval()
    asked = ["time <mask> people", "way day man thing <mask>", "<mask>"]
    found = []
    for model in (stock, patch(copy.deepcopy(stock))):
        answers = pipeline("fill-mask", model=model, tokenizer=word_tokenizer(), device="cpu")(asked, batch_size=3)
        found.append([[(one["token"], one["score"]) for one in answer] for answer in answers])
    for theirs, ours in zip(*found, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], rel=1e-4)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("family", ["roberta", "mpnet"])
def test_sentence_transformers_encodes_and_trains(family: str, pooling: str, tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from sentence_transformers.models import Pooling, Transformer

    model_of(config_of(family), "", torch.float32).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)

    def made(patched: bool) -> Any:
        words, width = Transformer(str(tmp_path)), 32
        model = SentenceTransformer(modules=[words, Pooling(width, pooling)], device="cpu")
        if patched:
            maelm_fast.patch(model[0].auto_model)
        return model.train()

    draw = torch.Generator().manual_seed(0)
    sentences = [" ".join(WORDS[int(i)] for i in torch.randint(15, (n,), generator=draw)) for n in (1, 12, 5, 3)]
    stock, ours = made(False), made(True)
    embeddings = [model.encode(sentences, convert_to_tensor=True) for model in (stock, ours)]
    torch.testing.assert_close(embeddings[1], embeddings[0], rtol=1e-4, atol=1e-5)
    losses = []
    for model in (stock, ours):
        model.train()
        loss = MultipleNegativesRankingLoss(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        features = [model.tokenize(part) for part in (sentences[:2], sentences[2:])]
        for _ in range(2):
            value = loss(features, None)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(value.item())
    assert losses[2:] == pytest.approx(losses[:2], rel=1e-3)
    assert losses[1] != pytest.approx(losses[0], rel=1e-3)
