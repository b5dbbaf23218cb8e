"""The demo: whole, what it promises to leave and to have learned, which takes minutes; and what it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maelm_fast.cli.main import main


@pytest.mark.slow
def test_the_demo_learns_from_context_and_leaves_what_it_says(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "demo"
    assert main(["demo", "--out", str(out)]) == 0
    report = out / "run" / "report"
    summary = json.loads((report / "summary.json").read_text())
    assert summary["unigram_nats"] - summary["val_loss"] >= 2.0  # about 3.3 where it was tried
    assert all((report / name).stat().st_size > 0 for name in ("loss.png", "effective_rank.png", "effective_rank.json"))
    assert transformers.AutoModel.from_pretrained(out / "hf", local_files_only=True).config.model_type == "mpnet"


def test_the_demo_removes_no_directory_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "precious").touch()
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "hf is not of an earlier demo: choose another --out" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["hf", "precious"]
