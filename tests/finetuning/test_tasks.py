import pytest

from maelm_fast.errors import UserError
from maelm_fast.finetuning.tasks import TASKS, custom, get, with_labels


def test_the_papers_tasks_with_their_metrics_and_grids():
    assert list(TASKS) == ["mnli", "qqp", "qnli", "sst2", "cola", "rte", "mrpc", "stsb", "squad_v2"]
    assert {name for name, task in TASKS.items() if task.group == "small"} == {"cola", "rte", "mrpc", "stsb"}
    chosen = {name: task.metric for name, task in TASKS.items() if task.metric != "accuracy"}
    assert chosen == {"cola": "matthews", "stsb": "spearman", "squad_v2": "best_f1"}
    assert all(task.metric in task.metrics and task.hub for task in TASKS.values())
    assert [get(name).outputs for name in ("mnli", "sst2", "stsb", "squad_v2")] == [3, 2, 1, 2]
    assert get("mnli").validation == ("validation_matched", "validation_mismatched")


def test_an_unknown_task_lists_the_known_ones():
    with pytest.raises(UserError, match=r"unknown task 'sst'.*mnli.*squad_v2.*--text-columns"):
        get("sst")


def test_scores_are_scaled_to_one_and_back():
    assert get("stsb").scale([0.0, 2.5, 5.0]).tolist() == [0.0, 0.5, 1.0]
    ten = custom("regression", ["a"], "y", label_range=(-10, 10))
    assert ten.scale([-10, 5]).tolist() == [0.0, 0.75]
    assert ten.unscale([0.0, 0.75]).tolist() == [-10.0, 5.0]


def test_the_metrics_of_a_users_task_follow_its_classes():
    assert "f1" in custom("classification", ["a"], "y", labels=["no", "yes"]).metrics
    three = custom("classification", ["a", "b"], "y", labels=["p", "q", "r"], metric="macro_f1")
    assert "f1" not in three.metrics
    assert three.metric == "macro_f1"
    assert custom("regression", ["a"], "y").metric == "spearman"


@pytest.mark.parametrize(
    ("match", "options"),
    [
        ("--task is classification or regression", {"kind": "spans"}),
        ("one column or two", {"columns": ["a", "b", "c"]}),
        ("one column or two", {"columns": []}),
        ("names 'a' twice", {"columns": ["a", "a"]}),
        ("also a text column", {"label": "a"}),
        ("--label-column is empty", {"label": ""}),
        ("metric 'spearman' is unknown", {"metric": "spearman"}),
        ("named twice", {"labels": ["x", "x"]}),
        ("nothing to learn", {"labels": ["x"]}),
        ("for regression", {"label_range": (0, 1)}),
        ("has no classes", {"kind": "regression", "labels": ["x", "y"]}),
        ("name of another task", {"name": "sst2"}),
        ("from a lower to a higher", {"kind": "regression", "label_range": (1, 1)}),
    ],
)
def test_a_users_task_that_makes_no_sense(match, options):
    kind = options.pop("kind", "classification")
    with pytest.raises(UserError, match=match) as caught:
        custom(kind, options.pop("columns", ["a"]), options.pop("label", "y"), **options)
    assert "\n" not in str(caught.value)


def test_f1_of_three_classes_is_refused_when_they_are_known():
    with pytest.raises(UserError, match="use macro_f1"):
        with_labels(custom("classification", ["a"], "y", metric="f1"), ["p", "q", "r"])
