import numpy as np
import pytest

from maelm_fast.errors import UserError
from maelm_fast.finetuning.examples import Answer, SpanExamples
from maelm_fast.finetuning.squad import f1, normalise, question_scores, squad_scores
from maelm_fast.finetuning.tasks import get


def questions(*golds):
    """Questions a, b, c, ... with these answers."""
    answers = [tuple(Answer(text, -1) for text in gold) for gold in golds]
    count, ids = len(golds), [chr(ord("a") + i) for i in range(len(golds))]
    return SpanExamples(
        get("squad_v2"), "validation", "made up", ids, ["?"] * count, ["."] * count, [""] * count, answers
    )


def scores(examples, texts, odds, **options):
    return squad_scores(
        dict(zip(examples.ids, texts, strict=True)), dict(zip(examples.ids, odds, strict=True)), examples, **options
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  U.S.\tArmy's (main) base", "us armys main base"),
        ("a an THE", ""),
        ("Theatre and another a.m.", "theatre and another am"),  # articles only as whole words; punctuation goes first
        ("an-other the-end", "another theend"),
        ("the\u2014end", "\u2014end"),  # only ASCII punctuation
        ("", ""),
    ],
)
def test_normalisation(text, expected):
    assert normalise(text) == expected


def test_exact_and_f1_by_hand():
    examples = questions(["The Cat!"], ["cat"], ["the big black cat"], ["the"], [])
    texts = ["cat", "cats", "black cat sat", "a", "cat"]
    exacts, f1s = question_scores(dict(zip(examples.ids, texts, strict=True)), examples)
    assert exacts.tolist() == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert f1s.tolist() == pytest.approx([1.0, 0.0, 2 * 2 / (3 + 3), 1.0, 0.0])
    repeated = f1("no no no yes".split(), "no no maybe".split())
    assert repeated == pytest.approx(2 * 2 / (4 + 3))  # as often as both have it
    assert (f1([], []), f1([], ["cat"]), f1(["cat"], [])) == (1.0, 0.0, 0.0)


def test_the_best_of_several_answers_counts():
    examples = questions(["a dog", "big cat", "black dog", "the"], [], ["the"])
    exacts, f1s = question_scores({"a": "big black cat", "b": "", "c": ""}, examples)
    assert exacts.tolist() == [0.0, 1.0, 1.0]  # answers that normalise to nothing are none
    assert f1s[0] == pytest.approx(4 / 5)


def test_fixed_and_best_threshold_by_hand():
    examples = questions(["red"], ["blue sky"], [], ["green"], [])
    texts = ["red", "sky", "wrong", "green", "wrong"]
    odds = [-3.0, -1.0, 0.5, 1.0, 4.0]
    result = scores(examples, texts, odds)
    # at 0: a right, b half right, c blanked and right, d blanked and wrong, e blanked and right
    assert result["exact"] == pytest.approx(100 * 3 / 5)
    assert result["f1"] == pytest.approx(100 * (1 + 2 / 3 + 1 + 0 + 1) / 5)
    assert (result["HasAns_exact"], result["NoAns_exact"]) == (pytest.approx(100 / 3), 100.0)
    assert result["HasAns_f1"] == pytest.approx(100 * (1 + 2 / 3) / 3)
    assert (result["total"], result["HasAns_total"], result["NoAns_total"]) == (5, 3, 2)
    # exact from blanking all: 2, a: 3, b: 3, c: 2, d: 3, e: 2; the first threshold that reaches 3 is kept
    assert (result["best_exact"], result["best_exact_thresh"]) == (60.0, -3.0)
    # F1: 2, 3, 3 2/3, 2 2/3, 3 2/3, 2 2/3
    assert result["best_f1"] == pytest.approx(100 * (11 / 3) / 5)
    assert result["best_f1_thresh"] == -1.0
    later = scores(examples, texts, odds, threshold=1.0)
    assert later["exact"] == pytest.approx(100 * 3 / 5)  # a, d, e; c is answered and wrong
    assert later["f1"] == pytest.approx(100 * (1 + 2 / 3 + 0 + 1 + 1) / 5)
    assert later["best_f1"] == result["best_f1"]


def test_odds_at_the_threshold_are_answered():
    examples = questions(["red"], [])
    assert scores(examples, ["red", "red"], [0.0, 0.0])["exact"] == 50.0
    assert scores(examples, ["red", "red"], [0.0, 1e-9])["exact"] == 100.0


def test_ties_are_answered_or_blanked_together():
    examples = questions(["red"], [])
    result = scores(examples, ["red", "red"], [1.0, 1.0])
    assert result["best_exact"] == 50.0  # a scan that stops between the two would say 100
    assert result["best_exact_thresh"] == 0.0  # blanks both


def test_all_unanswerable_and_all_answerable():
    none = scores(questions([], []), ["x", ""], [-2.0, 5.0])
    assert (none["exact"], none["best_exact"]) == (50.0, 100.0)
    assert none["best_exact_thresh"] < -2.0
    assert np.isfinite(none["best_exact_thresh"])
    assert "HasAns_exact" not in none
    every = scores(questions(["x"], ["y"]), ["x", "y"], [3.0, 2.0])
    assert (every["exact"], every["best_exact"], every["best_exact_thresh"]) == (0.0, 100.0, 3.0)
    assert "NoAns_exact" not in every


def test_an_empty_prediction_answers_nothing():
    result = scores(questions(["x"], []), ["", ""], [-5.0, -5.0])
    assert (result["exact"], result["HasAns_f1"], result["NoAns_f1"], result["best_f1"]) == (50.0, 0.0, 100.0, 50.0)


def test_a_text_that_normalises_to_nothing_is_right_at_a_fixed_threshold_only():
    """So the official scorer has it: its scan for the best threshold asks whether there is a text at all."""
    result = scores(questions([], ["red"]), ["the", "red"], [-1.0, 0.0])
    assert result["exact"] == 100.0
    assert result["best_exact"] == 50.0


@pytest.mark.parametrize("ties", [False, True])
def test_the_best_threshold_against_every_threshold_there_is(ties):
    rng = np.random.default_rng(5)
    for _ in range(20):
        count = int(rng.integers(1, 25))
        pool = ["red", "blue", "red sky", "blue sky night", ""]
        golds = [[] if rng.random() < 0.5 else list(rng.choice(pool[:4], 2)) for _ in range(count)]
        texts = [str(text) for text in rng.choice(pool, count)]
        odds = rng.integers(-3, 4, count).astype(float) if ties else rng.normal(size=count)
        examples = questions(*golds)
        result = scores(examples, texts, odds)
        for name in ("exact", "f1"):
            tried = {at: scores(examples, texts, odds, threshold=at)[name] for at in (*odds, odds.min() - 1)}
            assert result[f"best_{name}"] == pytest.approx(max(tried.values()))
            again = scores(examples, texts, odds, threshold=result[f"best_{name}_thresh"])
            assert again[name] == pytest.approx(result[f"best_{name}"])


def test_the_scan_of_the_official_scorer_gives_the_same_without_ties():
    """Its procedure as published, on questions and odds for which it is defined."""
    rng = np.random.default_rng(9)
    for _ in range(20):
        golds = [[] if rng.random() < 0.4 else ["red sky"] for _ in range(15)]
        texts = [str(text) for text in rng.choice(["red sky", "red", "night", "the", ""], 15)]
        examples, odds = questions(*golds), rng.random(15)
        raw = question_scores(dict(zip(examples.ids, texts, strict=True)), examples)[1]
        current = best = sum(not gold for gold in golds)
        threshold = 0.0
        for i in np.argsort(odds):
            current += raw[i] if golds[i] else (-1 if texts[i] else 0)
            if current > best + 1e-9:
                best, threshold = current, odds[i]
        result = scores(examples, texts, odds)
        assert result["best_f1"] == pytest.approx(100 * best / 15)
        assert result["best_f1_thresh"] == threshold


def test_predictions_that_are_missing_or_no_numbers():
    examples = questions(["x"], [])
    with pytest.raises(UserError, match="no prediction for question b"):
        squad_scores({"a": "x"}, {"a": 0.0, "b": 0.0}, examples)
    with pytest.raises(UserError, match="diverged"):
        scores(examples, ["x", ""], [float("nan"), 0.0])
    with pytest.raises(UserError, match="no questions"):
        squad_scores({}, {}, examples.take([]))
