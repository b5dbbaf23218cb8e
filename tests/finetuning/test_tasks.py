import pytest

from maelm_fast.errors import UserError
from maelm_fast.finetuning.tasks import TASKS, custom, get, with_labels, with_range


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
    ten = with_range(custom("regression", ["a"], "y"), (-10, 10))
    assert ten.scale([-10, 5]).tolist() == [0.0, 0.75]
    assert ten.unscale([0.0, 0.75]).tolist() == [-10.0, 5.0]


def test_the_metrics_of_a_users_task_follow_its_classes():
    task = custom("classification", ["a"], "y")
    assert "f1" in with_labels(task, ["no", "yes"]).metrics
    three = with_labels(task, ["p", "q", "r"])
    assert "f1" not in three.metrics
    assert (three.metric, "macro_f1" in three.metrics) == ("accuracy", True)
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
        ("name of another task", {"name": "sst2"}),
    ],
)
def test_a_users_task_that_makes_no_sense(match, options):
    kind = options.pop("kind", "classification")
    with pytest.raises(UserError, match=match) as caught:
        custom(kind, options.pop("columns", ["a"]), options.pop("label", "y"), **options)
    assert "\n" not in str(caught.value)


def test_classes_and_ranges_that_leave_nothing_to_learn():
    for labels, match in ((["x", "x"], "named twice"), (["x"], "nothing to learn")):
        with pytest.raises(UserError, match=match):
            with_labels(custom("classification", ["a"], "y"), labels)
    with pytest.raises(UserError, match="from a lower to a higher"):
        with_range(custom("regression", ["a"], "y"), (1, 1))
