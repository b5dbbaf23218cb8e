"""The fine-tuning benchmark on a model of a few thousand parameters, and its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from benchmarks import finetune, report_ops, rows
from benchmarks.tables import spread
from maelm_fast.export.huggingface import export
from tests.finetuning import small


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "roberta_small"
    export(small.loaded_run(decoder="none", relative_bias="none"), out, "roberta")
    return out


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The class says which animal is named; sentences of 2 to 12 words."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 24), ("validation", 10)):
        lines = []
        for _ in range(count):
            label = int(draw.integers(2))
            words = [str(word) for word in draw.choice(["the", "lazy", "a", "is"], draw.integers(1, 12))]
            lines.append(json.dumps({"sentence": " ".join([*words, ("fox", "dog")[label]]), "label": label}))
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def run(model: Path, data: Path, out: Path) -> list[dict[str, Any]]:
    arguments = ["--model", str(model), "--data", str(data), "--rounds", "2", "--batch", "8", "--out", str(out)]
    assert finetune.main(arguments) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_rows_and_table(model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(model, data, tmp_path / "rows.jsonl")
    assert [row["contestant"] for row in found] == ["ours", "hf", "hf_grouped"]
    for row in found:
        rows.check(row, rows.FORMATS["finetune"].row, "here")
        assert row["examples"] == 24
        assert row["gate"] < 1e-5
        assert len(row["results"]) == 2
        assert all(0.0 <= value <= 100.0 for value in row["results"])
    ratio = found[0]["ratios"]["hf"]
    assert ratio["q1"] <= ratio["median"] <= ratio["q3"]
    (table,) = report_ops.tables("finetune", found)
    assert [cells[0] for cells in table.rows] == list(report_ops.TRAINERS.values())
    assert table.rows[1][2] == spread(ratio)
    assert "round 2: hf_grouped" in capsys.readouterr().out


def test_the_gate_stops_other_weights(
    model: Path, data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = finetune.Comparison._their_model

    def changed(self: finetune.Comparison, seed: int) -> Any:
        found = theirs(self, seed)
        found.roberta.embeddings.LayerNorm.bias.data += 0.1
        return found

    monkeypatch.setattr(finetune.Comparison, "_their_model", changed)
    assert finetune.main(["--model", str(model), "--data", str(data), "--rounds", "1"]) == 1
    assert "nothing is timed" in capsys.readouterr().err
