"""The benchmark of patched models on a model of a few thousand parameters, and its table."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("transformers")

from benchmarks import patch, report_ops, rows
from benchmarks.tables import spread
from maelm_fast import ops
from tests.conftest import generated_text

SMALL = ["--layers", "1", "--width", "64", "--vocab", "300", "--longest", "48", "--rounds", "2", "--batch", "4"]


def test_rows_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(generated_text(400))
    out = tmp_path / "rows.jsonl"
    real = [*SMALL, "--data", str(tmp_path / "text.txt"), "--precision", "fp32", "--out", str(out)]
    assert patch.main([*real, "--contestants", "patched,attention,sdpa"]) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["mix"], row["contestant"]) for row in found] == [
        (mix, name) for mix in ("paragraphs", "documents") for name in ("patched", "attention", "sdpa")
    ]
    for row in found:
        rows.check(row, rows.FORMATS["patch"].row, "here")
        assert 0 < row["padding"] < 1
        assert row["gate"]["patched"] == pytest.approx(row["gate"]["sdpa"], rel=1e-5)
    (table,) = report_ops.tables("patch", found)
    assert [cells[1] for cells in table.rows] == [
        "patched",
        "attention `maelm` by name alone",
        report_ops.PATCHED["sdpa"],
    ] * 2
    ratio = found[0]["ratios"]["sdpa"]
    assert table.rows[2][3] == spread(ratio)
    assert table.rows[0][-1] == f"over the faster stock >= 3: {'met' if ratio['median'] >= 3 else 'not met'}"
    assert "paragraphs: 4 of " in capsys.readouterr().out


def test_the_faster_stock_attention_is_the_yardstick() -> None:
    quartiles = {name: {"median": value, "q1": value, "q3": value} for name, value in (("sdpa", 3.5), ("eager", 2.9))}
    shared = dict.fromkeys(("device", "torch", "commit", "precision", "transformers", "texts", "contestant"), "patched")
    numbers = dict.fromkeys(("threads", "load", "layers", "hidden_size", "vocab", "dropout", "batch", "rounds"), 1)
    row = {**shared, **numbers, "date": "2026-01-01T00:00:00+00:00", "mean_length": 70.0, "padding": 0.7}
    row |= {"mix": "paragraphs", "tokens_per_s": quartiles["sdpa"], "ratios": quartiles, "cpu_ratios": None}
    (table,) = report_ops.tables("patch", [row])
    assert table.rows[0][-1] == "over the faster stock >= 3: not met"
    row["ratios"]["eager"]["median"] = 3.1
    (table,) = report_ops.tables("patch", [row])
    assert table.rows[0][-1] == "over the faster stock >= 3: met"


def test_who_computes_something_else_is_not_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (text := tmp_path / "text.txt").write_text(generated_text(400))
    data = ["--data", str(text)]
    repad = ops.repad
    off = mock.patch.object(ops, "repad", lambda x, layout: 1.01 * repad(x, layout))
    with off:
        assert patch.main([*SMALL, *data, "--contestants", "patched,sdpa"]) == 1
    assert "gate: patched and sdpa disagree" in capsys.readouterr().err
    assert patch.main([*data, "--contestants", "sdpa,patched"]) == 2
    assert "patched comes first" in capsys.readouterr().err
