"""Filling: the ids the model gets, the answers' form, and one clear line for texts that cannot be filled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from maelm_fast.analysis.fill import best_text, encode, fill
from maelm_fast.cli import fill as fill_command
from maelm_fast.data.masking import pack_masked
from maelm_fast.data.tokenizer import load_tokenizer, train_tokenizer
from maelm_fast.errors import UserError
from maelm_fast.masking import Vocabulary
from maelm_fast.training.rundir import LoadedRun, RunDir, load_run


@pytest.fixture
def run(make_run: Callable[..., RunDir]) -> LoadedRun:
    return load_run(make_run().path)


@pytest.mark.parametrize(
    ("masked", "whole", "at"),
    [
        ("people <mask>.", "people way.", 2),
        ("people <mask>ing", "people waying", 2),
        ("<mask> way day", "people way day", 1),
        ("[MASK] way day", "people way day", 1),
        ("people\nway <mask>", "people\nway day", 4),
    ],
)
def test_the_rest_of_a_text_is_cut_as_in_running_text(masked: str, whole: str, at: int) -> None:
    """Replacing <mask> by a word that is one token changes that token alone."""
    tokenizer = train_tokenizer(["people way day.", "way people day."] * 5, 400, cased=False)
    mask_id = tokenizer.token_to_id("<mask>")
    lines = [tokenizer.encode(line, add_special_tokens=False).ids for line in whole.splitlines()]
    reference = [0, *(i for ids in lines for i in (*ids, 2))]
    assert encode(tokenizer, masked) == [*reference[:at], mask_id, *reference[at + 1 :]]


def test_a_text_has_the_form_of_a_pretraining_sample(store: Path) -> None:
    tokenizer = load_tokenizer(store / "tokenizer.json")
    lines = [tokenizer.encode(line, add_special_tokens=False).ids for line in ("People way.", "day")]
    assert encode(tokenizer, "People way.\n\n day ") == [0, *lines[0], 2, *lines[1], 2]


def test_masks_given_are_packed_as_drawn_ones_would_be() -> None:
    vocabulary = Vocabulary(10, 9, (0, 1, 2, 3, 9))
    rows = [np.array([0, 9, 5, 2]), np.array([9, 6])]
    removed = pack_masked(rows, vocabulary, encoder_sees_mask=False)
    assert removed.ids.tolist() == [0, 5, 2, 6]
    assert removed.visible.positions.tolist() == [0, 2, 3, 1]
    assert removed.source.tolist() == [0, -1, 1, 2, -1, 3]
    assert removed.masked_index.tolist() == [1, 4]
    assert removed.masked.positions.tolist() == [1, 0]
    seen = pack_masked(rows, vocabulary, encoder_sees_mask=True)
    assert seen.ids.tolist() == [0, 9, 5, 2, 9, 6]
    assert seen.masked.lengths == (1, 1)


@pytest.mark.parametrize("preset", ["tiny", "tiny_cross", "roberta_tiny"])
def test_candidates_of_several_texts_and_masks(make_run: Callable[..., RunDir], preset: str) -> None:
    run = load_run(make_run(preset=preset).path)
    texts = ["the <mask> of the <mask>.", "<mask>", "time <mask> way"]
    filled = fill(run, texts, top=4)
    assert [len(masks) for masks in filled] == [2, 1, 1]
    for candidates in (c for masks in filled for c in masks):
        assert len(candidates) == 4
        values = [candidate.probability for candidate in candidates]
        assert values == sorted(values, reverse=True)
        assert 0.0 < sum(values) <= 1.0
        assert all(0 <= candidate.token_id < run.vocabulary.size for candidate in candidates)
    for text, together in zip(texts, filled, strict=True):
        (alone,) = fill(run, [text], top=4)
        for a, b in zip(alone, together, strict=True):
            np.testing.assert_allclose([c.probability for c in a], [c.probability for c in b], rtol=1e-3)


def test_the_model_s_favourite_is_what_is_filled_in(run: LoadedRun) -> None:
    wanted = run.tokenizer.encode("way people", add_special_tokens=False).ids[0]
    with torch.no_grad():
        run.model.head.vocabulary_bias[wanted] += 50.0
    text = "Time <mask>."
    (masks,) = fill(run, [text], top=1)
    word = run.tokenizer.decode([wanted])
    assert masks[0][0].token == f" {word}"
    assert masks[0][0].probability == pytest.approx(1.0, abs=1e-4)
    assert best_text(run, text, masks) == f"time {word}."


def test_more_candidates_than_tokens_gives_every_token(run: LoadedRun) -> None:
    (masks,) = fill(run, ["<mask>"], top=10**6)
    assert len(masks[0]) == run.vocabulary.size
    assert sum(candidate.probability for candidate in masks[0]) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "no text"),
        (["  \n"], "the text is empty"),
        (["a <mask>", "nothing here"], "text 2 has no <mask>"),
        (["<mask> " + "way " * 60], r"\d+ tokens with <s> and </s>, this model takes at most 32"),
        (["bad \udcff <mask>"], "not valid UTF-8"),
    ],
)
def test_texts_that_cannot_be_filled(run: LoadedRun, texts: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fill(run, texts)


def test_a_model_that_knows_no_mask_is_not_asked(run: LoadedRun) -> None:
    object.__setattr__(run.config.masking, "policy", "random")
    with pytest.raises(UserError, match="pretrained with random tokens in the place of <mask>"):
        fill(run, ["a <mask>"])


def test_the_command_prints_candidates_and_the_filled_text(
    make_run: Callable[..., RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    assert fill_command.main([str(run.path), "time <mask> way", "<mask>", "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "time <mask> way"
    assert lines[1].split()[:2] == ["mask", "1"]
    assert "%" in lines[2]
    assert lines[3].split()[0] == "best"
    assert len(lines) == 8


def test_command_errors(make_run: Callable[..., RunDir], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run directory"):
        fill_command.main([str(tmp_path / "nowhere"), "<mask>"])
    with pytest.raises(UserError, match="top must be positive"):
        fill_command.main([str(make_run().path), "<mask>", "--top", "0"])
    with pytest.raises(UserError, match="required"):
        fill_command.main([])
