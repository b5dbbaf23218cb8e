"""A task as the loop sees it, against logits computed one input at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from maelm_fast.errors import UserError
from maelm_fast.finetuning import tasks
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.examples import SpanExamples, TaskData
from maelm_fast.finetuning.job import make_problem
from maelm_fast.finetuning.problem import SentenceProblem, concatenated, predict, token_batch
from maelm_fast.finetuning.spans import SpanProblem
from maelm_fast.text import Inputs
from tests.finetuning import toys

CPU = torch.device("cpu")
CONFIG = FinetuneConfig(dropout=0.0, device="cpu", precision="fp32")


def one_by_one(model: torch.nn.Module, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        return torch.cat([model.eval()(token_batch(inputs, [i])) for i in range(len(inputs))])


@pytest.mark.parametrize("make", [toys.content_rows, toys.pair_rows, toys.score_rows])
def test_loss_and_evaluation_are_those_of_single_inputs(make: object) -> None:
    data = toys.toy(make, 30, 25)
    encoder = toys.tiny_encoder()
    problem = make_problem(data, encoder, CONFIG)
    assert isinstance(problem, SentenceProblem)
    assert problem.train_size == 30
    assert list(problem.lengths) == [len(ids) for ids in problem.train.ids]
    model = problem.model(encoder, CONFIG)
    chosen = np.array([3, 17, 4, 29])
    logits = one_by_one(model, problem.train)[chosen].numpy()
    labels = data.train.labels[chosen]
    if make is toys.score_rows:
        wanted = ((logits[:, 0] - labels / 5.0) ** 2).mean()
    else:
        odds = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        wanted = -np.log(odds[np.arange(4), labels]).mean()
    assert problem.loss(model, chosen, CPU, None).item() == pytest.approx(float(wanted), rel=1e-5)

    evaluation = problem.evaluate(model, CPU, "fp32")
    assert not model.training
    held = data.validation["validation"]
    found = one_by_one(model, problem.validation["validation"]).numpy()
    assert [row["id"] for row in evaluation.predictions] == held.ids
    if make is toys.score_rows:
        assert [row["prediction"] for row in evaluation.predictions] == pytest.approx(list(found[:, 0] * 5), abs=1e-4)
        assert [row["label"] for row in evaluation.predictions] == held.labels.tolist()
        pearson = np.corrcoef(found[:, 0], held.labels)[0, 1]
        assert evaluation.metrics["validation"]["pearson"] == pytest.approx(100 * pearson, abs=1e-3)
    else:
        names = np.array(["no", "yes"])
        assert [row["prediction"] for row in evaluation.predictions] == names[found.argmax(1)].tolist()
        assert [row["label"] for row in evaluation.predictions] == names[held.labels].tolist()
        assert all(sum(row["scores"].values()) == pytest.approx(1.0) for row in evaluation.predictions)
        right = (found.argmax(1) == held.labels).mean()
        assert evaluation.metrics["validation"]["accuracy"] == pytest.approx(100 * right)
        matrix = evaluation.details["confusion"]["validation"]
        assert matrix[1][0] == int(((held.labels == 1) & (found.argmax(1) == 0)).sum())
        assert sum(map(sum, matrix)) == 25


def test_every_split_is_evaluated_apart_and_rank_inputs_are_all_of_them() -> None:
    data = toys.toy(toys.content_rows, 20, 10)
    other = replace(toys.examples(data.task, "other", toys.make_rows(toys.content_rows, 7, 5)), split="other")
    data = replace(data, validation={**data.validation, "other": other})
    encoder = toys.tiny_encoder()
    problem = make_problem(data, encoder, CONFIG)
    evaluation = problem.evaluate(problem.model(encoder, CONFIG), CPU, "fp32")
    assert list(evaluation.metrics) == ["validation", "other"]
    assert [row["split"] for row in evaluation.predictions] == ["validation"] * 10 + ["other"] * 7
    assert len(problem.validation_inputs) == 17


def test_long_inputs_are_cut_and_counted() -> None:
    data = toys.toy(toys.content_rows, 20, 10)
    encoder = toys.tiny_encoder()
    whole = make_problem(data, encoder, CONFIG)
    lengths = np.array(whole.lengths)
    assert whole.truncation["train"] == {"inputs": 20, "cut": 0, "cut_tokens": 0, "longest": lengths.max()}
    short = make_problem(data, encoder, replace(CONFIG, max_length=8))
    assert short.truncation["max_length"] == 8
    assert max(short.lengths) == 8
    assert short.truncation["train"]["cut"] == int((lengths > 8).sum()) > 0
    assert short.truncation["train"]["cut_tokens"] == int((lengths - 8).clip(min=0).sum())
    assert short.truncation["train"]["longest"] == lengths.max()


def test_a_model_with_fewer_positions_takes_fewer_tokens() -> None:
    problem = make_problem(toys.toy(toys.content_rows, 5, 5), toys.tiny_encoder(max_positions=9), CONFIG)
    assert problem.truncation["max_length"] == 9
    assert max(problem.lengths) <= 9


def test_concatenated_inputs_keep_order_types_and_counts() -> None:
    def inputs(*lengths: int, cut: int) -> Inputs:
        ids = [np.arange(n, dtype=np.int32) for n in lengths]
        return Inputs(ids, [i % 2 for i in ids], cut, cut * 2, max(lengths))

    both = concatenated([inputs(2, 3, cut=1), inputs(4, cut=2)])
    assert both.lengths == [2, 3, 4]
    assert both.token_types is not None
    assert [types.tolist() for types in both.token_types] == [[0, 1], [0, 1, 0], [0, 1, 0, 1]]
    assert (both.cut, both.cut_tokens, both.longest) == (3, 6, 4)


def test_outputs_that_are_not_finite_are_an_error() -> None:
    encoder = toys.tiny_encoder()
    problem = make_problem(toys.toy(toys.content_rows, 5, 5), encoder, CONFIG)
    assert isinstance(problem, SentenceProblem)
    model = problem.model(encoder, CONFIG)
    with torch.no_grad():
        model.head.out.bias[0] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        predict(model, problem.train, CPU, "fp32")


def test_questions_about_passages_are_a_span_problem() -> None:
    task = tasks.get("squad_v2")
    part = SpanExamples(task, "validation", "here", ["q"], ["alpha"], ["red green blue"], [""], [()])
    data = TaskData(task, replace(part, split="train"), {"validation": part}, ())
    assert isinstance(make_problem(data, toys.tiny_encoder(), CONFIG), SpanProblem)
