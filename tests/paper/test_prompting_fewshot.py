"""Draws, and that a network which has learnt its language answers clozes, without training and better with it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from maelm_fast import presets
from maelm_fast.data.masking import pack_masked
from maelm_fast.data.tokenizer import train_tokenizer
from maelm_fast.encoders import load_encoder
from maelm_fast.errors import UserError
from maelm_fast.finetuning import tasks
from maelm_fast.finetuning.examples import Examples, TaskData
from maelm_fast.model.maelm import MaeLm
from maelm_fast.paper.prompting.cloze import ClozeProblem
from maelm_fast.paper.prompting.fewshot import DEVELOPMENT, SPLIT_SEEDS, FewShotConfig, base_config, draw, few_shot
from maelm_fast.paper.prompting.plan import METRICS, make_question
from maelm_fast.paper.prompting.templates import Prompts, label_ids, template_for
from maelm_fast.stop import Stopped
from maelm_fast.text import TextTokenizer
from maelm_fast.training.rundir import LoadedRun, RunRecord, vocabulary_of
from tests.finetuning.small import run_directory

FILLERS = "red green blue pink grey brown black white".split()
SEEN, UNSEEN = (("awful", "lovely"), ("boring", "charming")), ("sad", "sunny")
"""Words of (negative, positive) sentences: those of the language's sentences, and those of the toy task's alone."""
BASE = base_config(device="cpu", precision="fp32", max_length=32, dropout=0.0)


@cache
def bpe() -> Any:
    words = [*FILLERS, *(word for pair in (*SEEN, UNSEEN) for word in pair)]
    return train_tokenizer([f"{' '.join(words)}. It was great. It was terrible."] * 20, 400, cased=False)


def sentences(pairs: tuple[tuple[str, str], ...], count: int, seed: int) -> tuple[list[str], np.ndarray]:
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, count)
    texts = []
    for label in labels:
        words = [*random.choice(FILLERS, random.integers(2, 6)), pairs[random.integers(len(pairs))][label]]
        texts.append(" ".join(random.permutation(words)) + ".")
    return texts, labels


def toy(pairs: tuple[tuple[str, str], ...], train: int = 80, test: int = 100) -> TaskData:
    task = tasks.get("sst2")

    def examples(split: str, count: int, seed: int) -> Examples:
        texts, labels = sentences(pairs, count, seed)
        return Examples(task, split, "x", [str(i) for i in range(count)], (texts,), labels)

    return TaskData(task, examples("train", train, 1), {"validation": examples("validation", test, 2)}, ())


@pytest.fixture(scope="module", params=["self", "none"])
def pretrained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny MAE-LM, and a tiny MLM, fitted for seconds on "... awful ... . It was terrible." and the like: at <mask>
    it must find the right one of all tokens. Which words are which it is not told of the toy task's."""
    config = presets.change(
        presets.get("tiny"),
        model={
            "vocab_size": bpe().get_vocab_size(),
            "hidden_size": 32,
            "num_layers": 1,
            "num_heads": 2,
            "ffn_size": 64,
            "max_positions": 32,
            "dropout": 0.0,
            "decoder": request.param,
            "decoder_layers": 1,
            "relative_bias": "none",
            "decoder_relative_bias": False,
        },
    )
    torch.manual_seed(0)
    vocabulary = vocabulary_of(bpe())
    network = MaeLm(config.model, vocabulary.mask_id)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    texts, labels = sentences(SEEN, 32 * 60, 0)
    answers = torch.tensor([bpe().token_to_id(f"Ġ{word}") for word in ("terrible", "great")])[torch.from_numpy(labels)]
    prompts = Prompts(TextTokenizer.of_run(bpe()), template_for(tasks.get("sst2"))).encode((texts,), 32)
    for start in range(0, len(texts), 32):
        batch = pack_masked(prompts.ids[start : start + 32], vocabulary, network.encoder_sees_mask)
        loss = F.cross_entropy(network.logits(batch), answers[start : start + 32])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    run = LoadedRun(network, bpe(), vocabulary, config, RunRecord("tiny", "store", "fingerprint", None), 10)
    return run_directory(tmp_path_factory.mktemp("runs") / "run", run)


def test_zero_shot_finds_what_the_language_says(pretrained: Path) -> None:
    lm = load_encoder(pretrained, head=True)
    data = toy(SEEN)
    problem = ClozeProblem(data, lm, template_for(data.task), BASE)
    result = problem.evaluate(problem.model(lm, BASE), torch.device("cpu"), "fp32")
    assert result.metrics["validation"]["accuracy"] > 95
    swapped = template_for(data.task, None, ["great", "terrible"])
    problem = ClozeProblem(data, lm, swapped, BASE)
    result = problem.evaluate(problem.model(lm, BASE), torch.device("cpu"), "fp32")
    assert result.metrics["validation"]["accuracy"] < 5


def test_a_few_examples_teach_what_the_language_did_not(pretrained: Path, tmp_path: Path) -> None:
    lm = load_encoder(pretrained, head=True)
    data = toy((UNSEEN,))
    template = template_for(data.task)

    def make(part: TaskData, config: Any) -> ClozeProblem:
        return ClozeProblem(part, lm, template, config)

    test = make(TaskData(data.task, data.train.take([]), data.validation, ()), BASE)
    before = test.evaluate(test.model(lm, BASE), torch.device("cpu"), "fp32").metrics["validation"]["accuracy"]
    few = FewShotConfig(shots=16, lrs=(1e-6, 3e-3), batch_sizes=(8,), steps=60, evaluate_every=10)
    weights = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
    found, model = few_shot(data, lm, make, few, BASE, 13, resume=tmp_path / "state")
    after = test.evaluate(model, torch.device("cpu"), "fp32").metrics["validation"]["accuracy"]
    assert after > 95 > before + 10
    assert found["lr"] == 3e-3
    assert found["development"] == max(cell["development"] for cell in found["cells"])
    assert found["examples"] == 32
    assert found["best_step"] % 10 == 0
    assert not (tmp_path / "state").exists()
    for name, tensor in lm.state_dict().items():
        torch.testing.assert_close(
            tensor, weights[name], rtol=0, atol=0
        )  # the pretrained one is left for the next draw
    again, _ = few_shot(data, lm, make, replace(few, lrs=(3e-3,)), BASE, 13)
    assert {**again["cells"][0], "seconds": 0} == {**found["cells"][1], "seconds": 0}


def test_a_stop_goes_on_where_it_was(pretrained: Path, tmp_path: Path) -> None:
    lm = load_encoder(pretrained, head=True)
    data = toy((UNSEEN,))

    def make(part: TaskData, config: Any) -> ClozeProblem:
        return ClozeProblem(part, lm, template_for(data.task), config)

    few, asked = FewShotConfig(lrs=(1e-3,), steps=20, evaluate_every=10), iter([False] * 7 + [True])
    with pytest.raises(Stopped):
        few_shot(data, lm, make, few, BASE, 13, resume=tmp_path / "state", stop=lambda: next(asked))
    whole, model = few_shot(data, lm, make, few, BASE, 13)
    gone_on, other = few_shot(data, lm, make, few, BASE, 13, resume=tmp_path / "state")
    assert gone_on["development"] == whole["development"]
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


# Draws


def test_draws_are_balanced_disjoint_and_functions_of_the_seed() -> None:
    pool = toy(SEEN, train=200).train
    assert isinstance(pool, Examples)
    seen = []
    for seed in SPLIT_SEEDS:
        train, development = draw(pool, 16, seed)
        for part in (train, development):
            assert np.bincount(part.labels).tolist() == [16, 16]
            assert all(part.texts[0][i] == pool.texts[0][int(name)] for i, name in enumerate(part.ids))
        assert not set(train.ids) & set(development.ids)
        assert (train.split, development.split) == ("train", DEVELOPMENT)
        again, _ = draw(pool, 16, seed)
        assert again.ids == train.ids
        seen.append(frozenset(train.ids))
    assert len(set(seen)) == len(SPLIT_SEEDS)
    larger, _ = draw(pool, 32, 13)
    assert seen[0] < set(larger.ids)


def test_scores_are_drawn_from_both_halves_of_their_range() -> None:
    task, scores = tasks.get("stsb"), np.array([0.0, 1.0, 2.4, 2.5, 3.0, 5.0] * 10, np.float32)
    ids, texts = [str(i) for i in range(60)], ["a"] * 60
    train, development = draw(Examples(task, "train", "x", ids, (texts, texts), scores), 15, 13)
    for part in (train, development):
        assert (part.labels < 2.5).sum() == 15 == (part.labels >= 2.5).sum()
    assert not set(train.ids) & set(development.ids)


def test_too_few_examples_of_a_class() -> None:
    pool = toy(SEEN).train
    positive = int((pool.labels == 1).sum())
    few = pool.take(np.flatnonzero((pool.labels == 0) | (np.cumsum(pool.labels) <= 5)))
    with pytest.raises(UserError, match="sst2: 5 training examples of 'positive', but 3 to train on and 3 others"):
        draw(few, 3, 13)
    assert positive > 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shots": 0}, "shots must be at least 1"),
        ({"steps": 150}, "steps 150 must be a multiple of evaluate_every 100"),
        ({"lrs": (0.0,)}, "lr must be positive"),
        ({"batch_sizes": (0,)}, "batch_size must be at least 1"),
    ],
)
def test_settings_that_make_no_sense(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        FewShotConfig(**fields)


def test_metrics_are_those_of_the_table() -> None:
    for name in ("mrpc", "qqp", "stsb", "sst2"):
        task = tasks.get(name)
        assert METRICS.get(name, task.metric) in task.metrics
    data = toy(SEEN)
    question = make_question(data, template_for(data.task), limit=30)
    assert len(question.data.validation["validation"]) == 30
    assert any("30 of its 100 examples" in note for note in question.data.notes)
    assert question.data.fingerprint != make_question(data, template_for(data.task)).data.fingerprint
    same = make_question(data, template_for(data.task), limit=30)
    assert same.data.validation["validation"].ids == question.data.validation["validation"].ids


def test_label_words_of_the_toy_language_are_tokens() -> None:
    tokenizer = TextTokenizer.of_run(bpe())
    ids = label_ids(tokenizer, template_for(tasks.get("sst2")))
    assert [bpe().id_to_token(i) for i in ids] == ["Ġterrible", "Ġgreat"]
