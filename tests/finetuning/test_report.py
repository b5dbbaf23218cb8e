"""What a job leaves is what its predictions say, and is loaded by others."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maelm_fast.encoders import load_encoder
from maelm_fast.errors import UserError
from maelm_fast.finetuning import report as module
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.examples import Answer, SpanExamples, TaskData
from maelm_fast.finetuning.fingerprint import Origin
from maelm_fast.finetuning.job import finetune, make_problem
from maelm_fast.finetuning.problem import Evaluation, token_batch
from maelm_fast.finetuning.report import effective_ranks, median_of, summary
from maelm_fast.finetuning.run import Result
from maelm_fast.finetuning.saving import load_finetuned
from maelm_fast.finetuning.tasks import TASKS, custom, with_labels
from tests.finetuning import toys

CONFIG = FinetuneConfig(
    lr=3e-3, epochs=2, batch_size=16, dropout=0.1, max_length=9, evaluations_per_epoch=1, device="cpu", precision="fp32"
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TaskData, list[Result], list[str]]:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("job")
    model = toys.make_run(place / "run")
    data = replace(toys.toy(toys.content_rows, 80, 50), notes=("one thing to know",))
    told: list[str] = []
    results = finetune(model, data, CONFIG, place / "out", [0, 1, 2], say=told.append)
    return place, data, results, told


def test_numbers_are_those_of_the_predictions(job: Any) -> None:
    place, data, results, _ = job
    report = json.loads((place / "out" / "report.json").read_text())
    rows = [json.loads(line) for line in (place / "out" / "predictions.jsonl").read_text().splitlines()]
    held = data.validation["validation"]
    assert [row["id"] for row in rows] == held.ids
    assert [row["label"] for row in rows] == [("no", "yes")[label] for label in held.labels]
    accuracy = 100 * sum(row["label"] == row["prediction"] for row in rows) / 50
    values = sorted(result.best for result in results)
    assert report["summary"]["best"] == {"median": values[1], "min": values[0], "max": values[2]}
    assert accuracy == pytest.approx(values[1])
    assert report["summary"]["metrics_at_best"]["validation"]["accuracy"]["median"] == values[1]
    chosen = next(result for result in results if result.seed == report["summary"]["median_seed"])
    assert chosen.best == pytest.approx(accuracy)
    counts = Counter((row["label"], row["prediction"]) for row in rows)
    matrix = report["details"]["confusion"]["validation"]
    assert matrix == [[counts["no", "no"], counts["no", "yes"]], [counts["yes", "no"], counts["yes", "yes"]]]
    majority = Counter(data.train.labels.tolist()).most_common(1)[0][0]
    assert report["baselines"]["majority"]["accuracy"] == pytest.approx(100 * (held.labels == majority).mean())
    assert [result["seed"] for result in report["results"]] == [0, 1, 2]
    assert [len(result["curve"]) for result in report["results"]] == [2, 2, 2]
    assert report["truncation"]["train"]["cut"] == sum(n > 9 for n in uncut_lengths(place, data)) > 0


def uncut_lengths(place: Path, data: TaskData) -> list[int]:
    encoder = load_encoder(place / "run")
    return [len(ids) for ids in encoder.tokenizer.encode(data.train.texts, 32).ids]  # type: ignore[union-attr]


def test_the_text_says_the_same(job: Any) -> None:
    place, _, results, told = job
    text = (place / "out" / "REPORT.md").read_text()
    report = json.loads((place / "out" / "report.json").read_text())
    assert "one thing to know" in text
    assert any("one thing to know" in line for line in told)
    for result in results:
        assert f"| seed {result.seed}, best | {result.best:.2f} |" in text
        assert f"| seed {result.seed}, last | {result.last:.2f} |" in text
    assert f"| median, best | {report['summary']['best']['median']:.2f} |" in text
    cut = f"train: {report['truncation']['train']['cut']} of 80, validation: "
    assert f"| {cut}" in text
    assert f"inputs cut: {cut}" in told[-2]
    assert f"median, best {report['summary']['best']['median']:.2f}" in " ".join(told[-2].split())
    for name in ("curves.png", "confusion.png"):
        assert (place / "out" / name).read_bytes().startswith(b"\x89PNG")


def test_the_saved_model_predicts_what_is_reported(job: Any) -> None:
    import transformers

    place, data, _, _ = job
    model = transformers.AutoModelForSequenceClassification.from_pretrained(place / "out" / "model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "out" / "model")
    rows = [json.loads(line) for line in (place / "out" / "predictions.jsonl").read_text().splitlines()]
    texts = data.validation["validation"].texts[0]
    inputs = tokenizer(texts, truncation=True, max_length=9, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    found = [model.config.id2label[i] for i in logits.argmax(-1).tolist()]
    assert found == [row["prediction"] for row in rows]
    scores = [row["scores"]["yes"] for row in rows]
    assert logits.softmax(-1)[:, 1].tolist() == pytest.approx(scores, abs=1e-4)


def test_effective_ranks_are_those_of_the_singular_values(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place, data, _, _ = job
    encoder = load_encoder(place / "run")
    inputs = make_problem(data, encoder, CONFIG).validation_inputs
    report = json.loads((place / "out" / "report.json").read_text())["effective_rank"]
    assert (report["inputs"], report["tokens"]) == (50, sum(inputs.lengths))
    assert report["before"] == by_hand(encoder, inputs)
    encoder.load_state_dict(load_finetuned(place / "out" / "model").encoder.state_dict())
    assert report["after"] == by_hand(encoder, inputs)
    monkeypatch.setattr(module, "RANK_INPUTS", 7)
    assert effective_ranks(encoder, inputs, torch.device("cpu"), "fp32").inputs == 7


def by_hand(encoder: Any, inputs: Any) -> list[int]:
    found: dict[int, list[torch.Tensor]] = {}
    with torch.no_grad():
        for i in range(len(inputs)):
            layers: list[torch.Tensor] = []
            encoder(token_batch(inputs, [i]), layers=layers)
            for place, layer in enumerate(layers):
                found.setdefault(place, []).append(layer)
    ranks = []
    for place in sorted(found):
        squares = torch.linalg.svdvals(torch.cat(found[place]).double()).square().numpy()
        ranks.append(int(np.searchsorted(np.cumsum(squares) / squares.sum(), 0.9)) + 1)
    return ranks


def result(seed: int, best: float) -> Result:
    curve = [{"step": 1, "epoch": 1.0, "loss": 1.0, "metrics": {"v": {"f1": best}}, "value": best, "seconds": 1.0}]
    return Result(
        "t",
        "f1",
        best,
        best,
        {"v": {"f1": best}},
        1,
        curve,
        1,
        seed,
        1.0,
        2.0,
        3.0,
        {},
        seed,
        {},
        "e",
        "packed",
        "cpu",
        "fp32",
    )


def test_the_median_seed() -> None:
    assert median_of([result(i, value) for i, value in enumerate((5.0, 9.0, 1.0))]).seed == 0
    assert median_of([result(i, value) for i, value in enumerate((5.0, 9.0, 1.0, 7.0))]).seed == 0
    assert median_of([result(i, value) for i, value in enumerate((4.0, 4.0, 4.0))]).seed == 1
    total = summary([result(i, value) for i, value in enumerate((5.0, 9.0, 1.0, 7.0))])
    assert total["best"] == {"median": 6.0, "min": 1.0, "max": 9.0}
    assert total["skipped_updates"] == 6


def test_metrics_that_a_development_set_has_not() -> None:
    """Extractive data without unanswerable questions, as SQuAD 1.1's."""
    found = {"exact": 1.0, "f1": 2.0, "HasAns_exact": 1.0, "HasAns_f1": 2.0, "best_exact": 3.0, "best_f1": 4.0}
    part = SpanExamples(TASKS["squad_v2"], "v", "here", ["p"], ["a"], ["a b"], [""], [(Answer("b", 2),)])
    one = result(0, 4.0)
    one = replace(one, metrics={"v": found}, curve=[{**row, "metrics": {"v": found}} for row in one.curve])
    lines = module.terminal_lines(TaskData(part.task, part, {"v": part}, ()), [one], {})
    assert lines[1].split() == list(found)


def test_many_classes_are_counted_but_neither_drawn_nor_printed(tmp_path: Path) -> None:
    count = module.MAX_CLASSES + 1
    task = with_labels(custom("classification", ["a"], "y"), [f"class|{i}" for i in range(count)])
    part = toys.examples(task, "validation", [(("x",), 0)])
    data = TaskData(task, part, {"validation": part}, ())
    metrics = {"validation": dict.fromkeys(task.metrics, 50.0)}
    curve = [{"step": 1, "epoch": 1.0, "loss": 1.0, "metrics": metrics, "value": 50.0, "seconds": 1.0}]
    places = [("cpu", "fp32"), ("cuda", "bf16"), ("cuda", "bf16")]
    results = [
        replace(
            result(i, 50.0),
            metrics=metrics,
            curve=curve,
            device=device,
            precision=precision,
            config={"max_length": 512, "lr": 0.1},
            truncation={"max_length": 9},
        )
        for i, (device, precision) in enumerate(places)
    ]
    found = Evaluation(metrics, [{"id": "0"}], {"confusion": {"validation": np.eye(count, dtype=int).tolist()}})
    origin = Origin("m", None, "auto", True, "", "")
    ranks = module.LayerRanks(1, 3, [1, 2])
    told: list[str] = []
    module.write_report(tmp_path, origin, "yes", data, results, found, {}, ranks, ranks, told.append)
    text = (tmp_path / "REPORT.md").read_text()
    assert f"Of {count} classes: in report.json" in text
    assert "cpu in fp32, cuda in bf16." in text
    assert "max_length 9, lr 0.1." in text  # the model has no more
    assert told == [f"no confusion.png: {count} classes are too many; the counts are in report.json"]
    assert len(json.loads((tmp_path / "report.json").read_text())["details"]["confusion"]["validation"]) == count
    assert module._confusion([[1, 2], [3, 4]], ["a|b", "c"])[2] == "| a\\|b | 1 | 2 |"


def test_without_matplotlib_that_is_said_and_the_rest_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: float) -> None:
        raise UserError("plots need matplotlib")

    monkeypatch.setattr(module, "figure_of", absent)
    told: list[str] = []
    out = tmp_path / "out"
    config = replace(CONFIG, epochs=1)
    finetune(toys.make_run(tmp_path / "run"), toys.toy(toys.score_rows, 16, 9), config, out, [0], say=told.append)
    assert "no pictures: plots need matplotlib" in told
    assert (out / "report.json").exists()
    assert not list(out.glob("*.png"))
    saved = json.loads((out / "model" / "config.json").read_text())
    assert saved["problem_type"] == "regression"


def test_regression_and_squad_have_reports_of_their_own(tmp_path: Path) -> None:
    model, config = toys.make_run(tmp_path / "run"), replace(CONFIG, epochs=1, max_length=32)
    finetune(model, toys.toy(toys.score_rows, 16, 9), config, tmp_path / "score", [0], say=lambda _: None)
    rows = [json.loads(line) for line in (tmp_path / "score" / "predictions.jsonl").read_text().splitlines()]
    report = json.loads((tmp_path / "score" / "report.json").read_text())
    pearson = np.corrcoef([row["prediction"] for row in rows], [row["label"] for row in rows])[0, 1]
    assert report["results"][0]["metrics"]["validation"]["pearson"] == pytest.approx(100 * pearson, abs=1e-3)
    assert (tmp_path / "score" / "confusion.png").exists()

    part = SpanExamples(
        TASKS["squad_v2"],
        "validation",
        "here",
        ["p", "q", "r"],
        ["alpha", "omega", "good"],
        ["red green alpha blue pink", "white black grey", "bad red good blue"],
        ["", "", ""],
        [(Answer("blue", 16),), (), (Answer("blue", 13),)],
    )
    data = TaskData(part.task, replace(part, split="train"), {"validation": part}, ())
    finetune(model, data, replace(config, stride=4), tmp_path / "squad", [0], say=lambda _: None)
    report = json.loads((tmp_path / "squad" / "report.json").read_text())
    text = (tmp_path / "squad" / "REPORT.md").read_text()
    assert sum(report["details"]["errors"]["validation"]["counts"].values()) == 3
    assert set(report["results"][0]["metrics"]["validation"]) >= {"exact", "f1", "HasAns_f1", "NoAns_f1", "best_f1"}
    assert "Errors on validation" in text
    assert math.isfinite(report["results"][0]["best"])
    assert len((tmp_path / "squad" / "predictions.jsonl").read_text().splitlines()) == 3
    assert not (tmp_path / "squad" / "confusion.png").exists()
    assert "stride 4" in text
