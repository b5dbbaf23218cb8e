"""The demo, whole: what it promises to leave and to have learned. Takes minutes."""

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
    assert summary["unigram_nats"] - summary["val_loss"] >= 0.3
    assert all((report / name).stat().st_size > 0 for name in ("loss.png", "effective_rank.png", "effective_rank.json"))
    assert transformers.AutoModel.from_pretrained(out / "hf", local_files_only=True).config.model_type == "mpnet"
