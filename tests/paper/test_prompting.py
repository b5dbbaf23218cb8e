"""Prompts at token level, and what a network says at [MASK], against the same computed by hand."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maelm_fast.analysis import fill
from maelm_fast.config import MaskingConfig
from maelm_fast.data.masking import pack_masked
from maelm_fast.data.tokenizer import train_tokenizer
from maelm_fast.encoders import load_encoder, packed_prompts
from maelm_fast.errors import UserError
from maelm_fast.export.huggingface import export
from maelm_fast.finetuning import tasks
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.examples import Examples, TaskData
from maelm_fast.finetuning.problem import token_batch
from maelm_fast.paper.prompting.cloze import ClozeModel, ClozeProblem
from maelm_fast.paper.prompting.templates import (
    TEMPLATES,
    Prompts,
    Template,
    check_text,
    label_ids,
    shown,
    template_for,
)
from maelm_fast.text import TextTokenizer
from maelm_fast.training.rundir import load_run, vocabulary_of
from tests.finetuning.small import bert_directory, loaded_run, run_directory, wordpiece

SENTENCES = [
    "A man plays the violin. It was great.",
    "The plot was thin. It was terrible.",
    "the sky is blue? yes, the man plays. no, maybe it was the violin?",
    "this is correct. this is incorrect.",
]
CONFIG = FinetuneConfig(device="cpu", precision="fp32", max_length=64)


@cache
def bpe() -> Any:
    return train_tokenizer(SENTENCES * 4, 400, cased=False)


@cache
def ours() -> TextTokenizer:
    return TextTokenizer.of_run(bpe())


def make_run(path: Path, masking: MaskingConfig = MaskingConfig(), **fields: Any) -> Path:
    return run_directory(path, loaded_run(bpe(), masking, **fields))


# Templates


def test_every_classification_and_regression_task_has_a_template_that_fits() -> None:
    assert set(TEMPLATES) == {name for name, task in tasks.TASKS.items() if task.kind != "spans"}
    for name in TEMPLATES:
        task = tasks.get(name)
        template = template_for(task)
        assert tuple(template.words) == (task.labels or ("low", "high"))
        check_text(template.text, len(task.text_columns))


@pytest.mark.parametrize(
    ("name", "texts", "filled"),
    [
        ("sst2", ("A man plays.",), "A man plays. It was {}."),
        ("cola", ("The man ",), "The man This is {}."),
        ("mnli", ("A man plays.", "The man plays."), "A man plays? {}, the man plays."),
        ("qnli", ("Is the sky blue?", "It is."), "Is the sky blue? {}, it is."),
        ("rte", ("No stop", "Maybe"), "No stop? {}, maybe"),
        ("mrpc", ("A man plays.", "The man plays."), "A man plays. {}, the man plays."),
        ("qqp", ("Is it?", "Was it?"), "Is it? {}, was it?"),
        ("stsb", ("A man.", "The man\nplays."), "A man. {}, the man plays."),
    ],
)
def test_around_the_mask_are_the_tokens_of_running_text(name: str, texts: tuple[str, ...], filled: str) -> None:
    """The prompt is the tokens of the sentence with the label word in it, that token alone replaced by [MASK]."""
    task = tasks.get(name)
    template = template_for(task)
    (row,) = Prompts(ours(), template).encode(tuple([text] for text in texts), 64).ids
    for word, token in zip(template.words.values(), label_ids(ours(), template), strict=True):
        running = bpe().encode(filled.format(word), add_special_tokens=False).ids
        mask = row.tolist().index(bpe().token_to_id("<mask>"))
        assert [*row[:mask], token, *row[mask + 1 :]] == [0, *running, 2]


def test_a_prompt_is_what_filling_gives_the_model() -> None:
    (row,) = Prompts(ours(), template_for(tasks.get("sst2"))).encode((["The plot was thin."],), 64).ids
    assert row.tolist() == fill.encode(bpe(), "The plot was thin. It was <mask>.")


def test_a_mask_in_a_text_is_plain_characters() -> None:
    (row,) = Prompts(ours(), template_for(tasks.get("sst2"))).encode((["The <mask> </s>"],), 64).ids
    assert row.tolist().count(bpe().token_to_id("<mask>")) == 1
    assert row.tolist().count(2) == 1


def test_word_pieces_and_a_mask_at_the_beginning() -> None:
    """BERT's own form: [CLS] ... [SEP], and "fox" as a word, not as "##fox"."""
    tokenizer = TextTokenizer.of_transformers(wordpiece(), "bert")
    template = Template("{mask} is the {1}", {"a": "Fox", "b": "dog"})
    prompts = Prompts(tokenizer, template).encode((["lazy dogs"],), 64)
    assert shown(tokenizer, prompts.ids[0]) == "[CLS] [MASK] is the lazy dog ##s [SEP]"
    assert shown(tokenizer, label_ids(tokenizer, template)) == "fox dog"
    with pytest.raises(UserError, match=r"'cat' of class 'a' is not one token .*--label-words"):
        label_ids(tokenizer, replace(template, words={"a": "cat", "b": "dog"}))


def test_label_words_at_the_beginning_have_the_space_that_our_inputs_begin_with() -> None:
    (token,) = label_ids(ours(), Template("{mask}: {1}", {"a": "Great"}))
    assert bpe().id_to_token(token) == "Ġgreat"


def test_texts_are_cut_the_longer_first_and_the_template_stays() -> None:
    texts = (["the violin " * 30, "the man"], ["the sky is", "the sky"])
    prompts = Prompts(ours(), template_for(tasks.get("mrpc"))).encode(texts, 20)
    whole = Prompts(ours(), template_for(tasks.get("mrpc"))).encode(texts, 1000)
    assert [len(ids) for ids in prompts.ids] == [20, len(whole.ids[1])]
    assert prompts.cut == 1
    assert prompts.cut_tokens == len(whole.ids[0]) - 20
    assert prompts.longest == len(whole.ids[0])
    end = ours().tokenize([", the sky is"], as_is=True)[0]
    np.testing.assert_array_equal(prompts.ids[0][-len(end) - 1 : -1], end)
    assert prompts.ids[0][-len(end) - 2] == ours().mask_id
    np.testing.assert_array_equal(prompts.ids[0][: 20 - len(end) - 2], whole.ids[0][: 20 - len(end) - 2])
    with pytest.raises(UserError, match="the template alone is longer than 4 tokens"):
        Prompts(ours(), template_for(tasks.get("sst2"))).encode((["the man"],), 4)


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("{1} It was.", None, "needs {mask} once"),
        ("{1} {mask} {mask}", None, "needs {mask} once"),
        ("It was {mask}.", None, "each text of the example once: {1}"),
        ("{1} {2} {mask}", None, "unknown field {2}"),
        ("{1x} {mask}", None, "unknown field {1x}"),
        ("{1} {mask} }", None, "unknown field }"),
        (None, ["a"], "names 1 words, sst2 has 2 classes: one word for each of negative, positive"),
        (None, ["a", ""], "no label word for class 'positive'"),
    ],
)
def test_templates_that_do_not_fit(text: str | None, words: list[str] | None, message: str) -> None:
    with pytest.raises(UserError) as error:
        template_for(tasks.get("sst2"), text, words)
    assert message in str(error.value)


def test_tasks_without_a_template() -> None:
    with pytest.raises(UserError, match="squad_v2 is no prompting task"):
        template_for(tasks.get("squad_v2"))
    with pytest.raises(UserError, match="give --template and --label-words"):
        template_for(tasks.with_labels(tasks.custom("classification", ["a"], "y"), ("no", "yes")), "{1} {mask}")


def test_label_words_that_cannot_be_told_apart() -> None:
    with pytest.raises(UserError, match="'negative' and 'positive' have the same label word, Ġgreat"):
        label_ids(ours(), template_for(tasks.get("sst2"), None, ["great", "Great"]))


# Networks


@pytest.mark.parametrize("sees_mask", [False, True])
def test_prompts_are_packed_where_they_are_as_the_host_packs_them(sees_mask: bool) -> None:
    template = template_for(tasks.get("sst2"))
    inputs = Prompts(ours(), template).encode((["the man", "the sky is blue", ""],), 64)
    vocabulary = vocabulary_of(bpe())
    found = packed_prompts(token_batch(inputs, [2, 0, 1]), vocabulary.mask_id, sees_mask)
    expected = pack_masked([inputs.ids[i] for i in (2, 0, 1)], vocabulary, sees_mask)
    for a, b in zip(found.tensors, expected.tensors, strict=True):
        assert a.dtype == torch.int32
        torch.testing.assert_close(a, b)
    assert found.lengths == expected.lengths


@pytest.mark.parametrize(
    ("fields", "masking", "mask_in"),
    [
        ({"decoder": "self"}, MaskingConfig(), "decoder"),
        ({"decoder": "cross"}, MaskingConfig(), "decoder"),
        ({"decoder": "none"}, MaskingConfig(), "encoder"),
        ({"decoder": "self"}, MaskingConfig(shown=0.25), "decoder"),
        ({"decoder": "self"}, MaskingConfig(shown=0.5), "encoder"),
    ],
)
def test_scores_are_those_of_the_pretraining_network(
    tmp_path: Path, fields: dict[str, Any], masking: MaskingConfig, mask_in: str
) -> None:
    path = make_run(tmp_path / "run", masking, **fields)
    lm, run = load_encoder(path, dropout=0.1, head=True), load_run(path)
    assert (lm.mask_in, lm.engine, lm.step) == (mask_in, "packed", 10)
    texts = ["The man plays.", "the plot was thin and the sky is blue"]
    problem = ClozeProblem(_data(texts), lm, template_for(tasks.get("sst2")), CONFIG)
    model = problem.model(lm, CONFIG).eval()
    with torch.no_grad():
        found = model(token_batch(problem.validation["validation"], [0, 1]))
        words = [bpe().token_to_id("Ġterrible"), bpe().token_to_id("Ġgreat")]
        for row, text in zip(found, texts, strict=True):
            ids = np.array(fill.encode(bpe(), f"{text} It was <mask>."))
            expected = run.model.logits(pack_masked([ids], run.vocabulary, mask_in == "encoder"))[0, words]
            torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)
    predictions = problem.evaluate(model, torch.device("cpu"), "fp32").predictions
    for row, prediction in zip(found.softmax(-1).tolist(), predictions, strict=True):
        assert prediction["scores"] == pytest.approx({"negative": row[0], "positive": row[1]}, abs=1e-5)
        assert prediction["prediction"] == ("negative" if row[0] > row[1] else "positive")


def test_an_exported_mlm_run_says_the_same_through_transformers(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", decoder="none", relative_bias="none")
    export(load_run(path), tmp_path / "hf")
    texts = ["The man plays.", "the plot was thin and the sky is blue", "the violin"]
    scores = []
    for directory, engine in ((path, "auto"), (tmp_path / "hf", "auto"), (tmp_path / "hf", "packed")):
        lm = load_encoder(directory, engine=engine, head=True)  # type: ignore[arg-type]
        problem = ClozeProblem(_data(texts), lm, template_for(tasks.get("sst2")), CONFIG)
        with torch.no_grad():
            scores.append(problem.model(lm, CONFIG).eval()(token_batch(problem.validation["validation"], [0, 1, 2])))
    assert float(scores[0].std()) > 0.01
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores[0], scores[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Bert", "DistilBert"])
def test_hugging_face_scores_are_those_of_a_plain_call(tmp_path: Path, kind: str) -> None:
    """Though the projection to the vocabulary is computed for [MASK] alone."""
    import transformers

    fields = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48} if kind == "DistilBert" else {}
    path = bert_directory(tmp_path / "hf", kind, **fields)
    lm, plain = load_encoder(path, head=True), transformers.AutoModelForMaskedLM.from_pretrained(path).eval()
    prompts = Prompts(lm.tokenizer, Template("a {1} is {mask}", {})).encode((["lazy dog", "fox"],), 64)
    widths: list[int] = []
    projection = lm.network.get_output_embeddings()  # type: ignore[operator,union-attr]
    projection.register_forward_hook(lambda _, __, output: widths.append(output.shape[1]))
    with torch.no_grad():
        found = lm.fill(token_batch(prompts, [0, 1]))
        assert widths == [1]
        for row, ids in zip(found, prompts.ids, strict=True):
            logits = plain(torch.from_numpy(ids).long()[None]).logits[0]
            torch.testing.assert_close(row, logits[ids.tolist().index(4)], rtol=1e-4, atol=1e-4)


def test_models_that_cannot_be_prompted(tmp_path: Path) -> None:
    import transformers

    with pytest.raises(UserError, match="random tokens in the place"):
        load_encoder(make_run(tmp_path / "random", MaskingConfig(policy="random")), head=True)
    with pytest.raises(UserError, match="causal_cross decoder"):
        load_encoder(make_run(tmp_path / "causal", decoder="causal_cross"), head=True)
    export(load_run(make_run(tmp_path / "mae", relative_bias="none")), tmp_path / "stock")
    for engine in ("auto", "packed"):
        with pytest.raises(UserError, match="without the head that fills in"):
            load_encoder(tmp_path / "stock", engine=engine, head=True)  # type: ignore[arg-type]
    export(load_run(tmp_path / "mae"), tmp_path / "own", "own")
    with pytest.raises(UserError, match="prompt the run directory instead"):
        load_encoder(tmp_path / "own", head=True)
    with pytest.raises(UserError, match="no such directory"):
        load_encoder(tmp_path / "nowhere", head=True)
    bare = bert_directory(tmp_path / "bare")
    transformers.BertModel.from_pretrained(bare).save_pretrained(bare)
    with pytest.raises(UserError, match="without the head that fills in"):
        load_encoder(bare, head=True)


def test_dropout_is_a_function_of_the_seed_and_reaches_the_encoder(tmp_path: Path) -> None:
    lm = load_encoder(make_run(tmp_path / "run"), dropout=0.3, head=True).train()
    batch = token_batch(Prompts(ours(), template_for(tasks.get("sst2"))).encode((["the man"],), 64), [0])
    with torch.no_grad():
        first, again, other = (lm.fill(batch, seed) for seed in (1, torch.tensor(1), 2))
        torch.testing.assert_close(first, again)
        assert not torch.allclose(first, other)
        torch.testing.assert_close(lm.eval().fill(batch, 1), lm.fill(batch))


def test_dropout_of_a_hugging_face_model_is_a_function_of_the_seed_too(tmp_path: Path) -> None:
    lm = load_encoder(bert_directory(tmp_path / "hf"), dropout=0.3, head=True).train()
    prompts = Prompts(lm.tokenizer, Template("a {1} is {mask}", {})).encode((["lazy dog", "fox"],), 64)
    long, short = (token_batch(prompts, [i]) for i in (0, 1))
    with torch.no_grad():
        first, again, other = (lm.fill(long, seed) for seed in (1, 1, 2))
        torch.testing.assert_close(first, again, rtol=0, atol=0)
        assert not torch.allclose(first, other)
        found = copy.deepcopy(lm).fill(short, 1)  # as training copies it; it must look at its own [MASK]
        torch.testing.assert_close(found, lm.fill(short, 1))


def test_regression_is_the_mixture_of_the_two_poles(tmp_path: Path) -> None:
    task = tasks.get("stsb")
    lm = load_encoder(make_run(tmp_path / "run"), head=True)
    examples = Examples(
        task, "train", "x", ["a", "b"], (["the man", "the sky"], ["A man", "it was"]), np.array([0.0, 4.0], np.float32)
    )
    problem = ClozeProblem(TaskData(task, examples, {"validation": examples}, ()), lm, template_for(task), CONFIG)
    model = problem.model(lm, CONFIG).eval()
    assert isinstance(model, ClozeModel)
    with torch.no_grad():
        scores = model.scores(token_batch(problem.train, [0, 1])).double()
        loss = problem.loss(model, np.array([0, 1]), torch.device("cpu"), 0)
    high = (scores[:, 1].exp() / scores.exp().sum(1)).tolist()  # the probability of "yes"
    expected = -np.log(1 - high[0]) + 0.8 * np.log(0.8 / high[1]) + 0.2 * np.log(0.2 / (1 - high[1]))
    assert float(loss) == pytest.approx(expected / 2, rel=1e-4)
    rows = problem.evaluate(model, torch.device("cpu"), "fp32").predictions
    assert [row["prediction"] for row in rows] == pytest.approx([5 * value for value in high], rel=1e-4)


def _data(texts: list[str]) -> TaskData:
    task = tasks.get("sst2")
    ids = [str(i) for i in range(len(texts))]
    examples = Examples(task, "validation", "x", ids, (texts,), np.arange(len(texts)) % 2)
    return TaskData(task, examples.take([]), {"validation": examples}, ())
