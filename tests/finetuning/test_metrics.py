import math
import sys

import numpy as np
import pytest

from maelm_fast.errors import UserError
from maelm_fast.finetuning.examples import Answer, Examples, SpanExamples, TaskData
from maelm_fast.finetuning.metrics import baselines, confusion, evaluate
from maelm_fast.finetuning.tasks import custom, get, with_labels

TRUE = np.array([1, 1, 1, 1, 0, 0])
PREDICTED = np.array([1, 1, 1, 0, 0, 1])  # 3 true positives, 1 false one, 1 true negative, 1 false one


def examples(task, texts, labels, split="validation"):
    columns = tuple(list(column) for column in texts)
    return Examples(task, split, "made up", [str(i) for i in range(len(labels))], columns, np.array(labels))


def test_two_classes_by_hand():
    task = with_labels(custom("classification", ["a"], "y"), ["no", "yes"])
    result = evaluate(task, PREDICTED, TRUE)
    assert result["accuracy"] == pytest.approx(100 * 4 / 6)
    assert result["f1"] == pytest.approx(100 * 2 * 3 / (2 * 3 + 1 + 1))
    assert result["macro_f1"] == pytest.approx(100 * (3 / 4 + 2 * 1 / (2 * 1 + 1 + 1)) / 2)
    assert result["matthews"] == pytest.approx(100 * (3 * 1 - 1 * 1) / math.sqrt(4 * 4 * 2 * 2))
    assert evaluate(get("mrpc"), PREDICTED, TRUE) == {name: result[name] for name in ("accuracy", "f1")}
    assert list(evaluate(get("cola"), PREDICTED, TRUE)) == ["matthews", "accuracy"]


def test_a_confusion_matrix_has_true_classes_in_rows():
    assert confusion(get("sst2"), PREDICTED, TRUE).tolist() == [[1, 1], [1, 3]]
    assert confusion(get("mnli"), np.array([2, 0]), np.array([0, 0])).tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 0]]


def test_correlations_by_hand_with_ties():
    predicted = np.array([0.1, 0.4, 0.4, 2.0], np.float32)  # ranks 1, 2.5, 2.5, 4
    labels = np.array([0.0, 1.0, 3.0, 5.0], np.float32)  # ranks 1, 2, 3, 4
    result = evaluate(get("stsb"), predicted, labels)
    ranks, true_ranks = np.array([1, 2.5, 2.5, 4]) - 2.5, np.array([1, 2, 3, 4]) - 2.5
    spearman = (ranks @ true_ranks) / math.sqrt((ranks @ ranks) * (true_ranks @ true_ranks))
    a, b = predicted.astype(float) - predicted.mean(dtype=float), labels - labels.mean()
    assert result["spearman"] == pytest.approx(100 * spearman)
    assert result["pearson"] == pytest.approx(100 * (a @ b) / math.sqrt((a @ a) * (b @ b)), rel=1e-6)


def test_a_correlation_without_a_value_is_zero():
    labels = np.array([0.0, 1.0, 2.0])
    for predicted in ([1.0, 1.0, 1.0], [np.nan, 1.0, 2.0], [np.inf, 1.0, 2.0]):
        assert evaluate(get("stsb"), np.array(predicted), labels) == {"spearman": 0.0, "pearson": 0.0}
    assert evaluate(get("cola"), np.array([1, 1, 1]), np.array([0, 1, 1]))["matthews"] == 0.0


@pytest.mark.parametrize("package", ["sklearn", "scipy"])
def test_without_scikit_learn_or_scipy_the_remedy_is_named(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match="pip install scikit-learn scipy"):
        evaluate(get("sst2"), np.array([1, 0]), np.array([1, 1]))


def test_baselines_of_classes_see_length_and_overlap():
    task = get("mrpc")
    words = "red blue green white black pink grey brown".split()
    shared = [f"{a} {b}" for a in words for b in words]
    other = [f"{a} {b}" for a in reversed(words) for b in "one two six ten".split()]
    first = shared + shared[: len(other)]
    second = shared + other  # the same words, or none of them
    labels = np.array([1] * len(shared) + [0] * len(other))
    data = TaskData(task, examples(task, (first, second), labels, "train"), {}, ())
    held_out = examples(task, (["red blue", "grey pink"], ["blue red", "six two"]), [1, 0])
    data.validation["validation"] = held_out
    result = baselines(data)
    assert list(result) == ["majority", "length", "overlap"]
    assert result["majority"] == {"accuracy": 50.0, "f1": pytest.approx(200 / 3)}
    assert result["overlap"] == {"accuracy": 100.0, "f1": 100.0}

    single = get("sst2")
    texts = ["one two three four"] * 20 + ["one"] * 20
    part = examples(single, (texts,), [1] * 20 + [0] * 20)
    assert baselines(TaskData(single, part, {"validation": part}, ()))["length"] == {"accuracy": 100.0}


def test_baselines_of_scores():
    task = get("stsb")
    texts = ["word " * n for n in range(1, 21)]
    part = examples(task, (texts, ["word"] * 20), np.arange(20, dtype=np.float32) / 4)
    result = baselines(TaskData(task, part, {"validation": part}, ()))
    assert result["mean"] == {"spearman": 0.0, "pearson": 0.0}
    assert result["length"]["spearman"] == pytest.approx(100.0)
    assert set(result) == {"mean", "length", "overlap"}


def test_baselines_of_questions_and_of_the_split_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)  # not needed for SQuAD
    task = get("squad_v2")
    contexts = ["Ada wrote it. Then she left.", "Ada wrote it. Then she left.", 'He said "no." Nobody came.']
    answers = [(Answer("Ada wrote it", 0),), (), (Answer("no", 9),)]
    part = SpanExamples(task, "validation", "made up", list("abc"), ["?"] * 3, contexts, [""] * 3, answers)
    result = baselines(TaskData(task, part, {"none": part.take([0]), "validation": part}, ()), "validation")
    assert result["no answer"]["exact"] == pytest.approx(100 / 3)
    assert result["no answer"]["best_f1"] == pytest.approx(100 / 3)
    assert result["first sentence"]["exact"] == pytest.approx(100 / 3)  # "He said no" has one word of three too few
    assert result["first sentence"]["HasAns_f1"] == pytest.approx(100 * (1 + 2 / 4) / 2)
