"""The floors at a size that takes a second; that a ratio below its floor fails; the run beside its bare step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import floor, pretraining, report_ops
from benchmarks.contestants import Settings
from benchmarks.rows import FORMATS, check
from maelm_fast import native

SMALL = {"num_layers": 1, "hidden_size": 64, "num_heads": 2, "ffn_size": 128, "decoder_layers": 1}


def run(*arguments: str) -> int:
    threads = torch.get_num_threads()
    try:
        return floor.main(list(arguments))
    finally:
        torch.set_num_threads(threads)


def test_every_ratio_has_a_floor_and_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if native.host() is None:
        pytest.skip(f"the host code: {native.reasons['host']}")
    monkeypatch.setattr(floor, "SETTING", floor.Setting(sequences=2, length=24, width=96, ffn=64, vocab=300))
    monkeypatch.setattr(floor, "STEP", replace(floor.STEP, batch=2, seq=32, changes=SMALL | {"vocab_size": 512}))
    out = tmp_path / "floors.json"
    assert run("--rounds", "1", "--save", str(out)) == 0
    saved = json.loads(out.read_text())
    assert saved["floors"].keys() == floor.read(floor.FLOORS).keys()
    assert all(value > 0 for value in saved["floors"].values())


@pytest.mark.parametrize(("least", "status"), [(1.9, 0), (2.1, 1)])
def test_below_its_floor_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], least: float, status: int
) -> None:
    def broken(rounds: int) -> Any:
        raise RuntimeError("no such kernel")

    twice = {"median": 2.0, "q1": 1.9, "q3": 2.2}
    found: list[tuple[str, Any]] = [("an op", lambda rounds: twice)]
    monkeypatch.setattr(floor, "cases", lambda: iter(found))
    out = tmp_path / "floors.json"
    out.write_text(json.dumps({"floors": {"an op": least}}))
    assert run("--floors", str(out)) == status
    assert capsys.readouterr().out.count("BELOW ITS FLOOR") == status
    out.write_text(json.dumps({"floors": {"an op": least, "gone": 1.0}}))
    assert run("--floors", str(out)) == 2
    assert "nothing is called gone" in capsys.readouterr().err
    found.append(("broken", broken))
    assert run("--save", str(tmp_path / "new.json")) == 2
    assert not (tmp_path / "new.json").exists()
    assert run("--floors", str(tmp_path / "new.json")) == 2


def test_a_run_has_its_turns_beside_the_bare_step() -> None:
    settings = Settings(batch=2, seq=32, changes=SMALL)
    row = pretraining.measured("tiny", settings, 0, 3)
    check(row, FORMATS["pretraining"].row, "here")
    for name in ("ratio", "cpu_ratio"):
        assert 0.1 < row[name]["q1"] <= row[name]["median"] <= row[name]["q3"] < 3
    (table,) = report_ops.tables("pretraining", [row])
    verdict = "met" if row["cpu_ratio"]["median"] >= 0.97 else "not met"
    assert dict(zip(table.header, table.rows[0], strict=True))["goal"] == f">= 0.97: {verdict}"
