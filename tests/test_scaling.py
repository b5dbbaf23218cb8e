"""The sweep at a size that takes seconds, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import report_plot, scaling
from benchmarks.rows import FORMATS, Results, check, read_rows
from maelm_fast.errors import UserError

TINY = {"hidden_size": 64, "num_heads": 1, "ffn_size": 256, "num_layers": 2, "decoder_layers": 1, "vocab_size": 256}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("measures on the GPU")
    values = {"seq": (512,), "batch": (1, 2), "width": (64, 128)}
    monkeypatch.setitem(scaling.SEQUENCES, "cpu", 1)
    monkeypatch.setitem(scaling.CHANGES, "cpu", TINY)
    monkeypatch.setitem(scaling.VALUES, "cpu", values)
    monkeypatch.setattr(scaling, "alone", lambda function, name, settings: 100.0 + settings.batch)


@pytest.mark.parametrize(
    ("axis", "x", "batch", "seq", "changes"),
    [
        ("seq", 128, 16, 128, {}),
        ("seq_fixed_batch", 128, 4, 128, {}),
        ("batch", 16, 16, 512, {}),
        ("width", 512, 4, 512, {"hidden_size": 512, "num_heads": 8, "ffn_size": 2048}),
        ("layers", 8, 4, 512, {"num_layers": 8}),
        ("vocab", 2048, 4, 512, {"vocab_size": 2048}),
    ],
)
def test_a_point_changes_what_its_axis_names(axis: str, x: int, batch: int, seq: int, changes: dict[str, int]) -> None:
    settings = scaling.settings_at(axis, x, "cpu")
    assert (settings.batch, settings.seq) == (batch, seq)
    assert settings.changes == {**scaling.SMALL, "max_positions": 2048, **changes}


@pytest.mark.usefixtures("tiny")
def test_points_are_measured_written_and_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = scaling.Contestant

    def lacking(name: str, settings: scaling.Settings) -> scaling.Contestant:
        if settings.batch == 2 and name == "base":
            raise torch.OutOfMemoryError("no room")
        return made(name, settings)

    monkeypatch.setattr(scaling, "Contestant", lacking)
    out, picture = tmp_path / "scaling.jsonl", tmp_path / "scaling.png"
    assert scaling.main(["--axes", "batch", "width", "--rounds", "2", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 8
    for row in rows:
        check(row, FORMATS["scaling"].row, "here")
    skipped = [row for row in rows if row["skipped"]]
    assert [(row["axis"], row["x"], row["model"], row["skipped"]) for row in skipped] == [
        ("batch", 2, "base", "no room")
    ]
    timed = [row for row in rows if not row["skipped"]]
    assert all(row["ms"]["q1"] > 0 and row["peak_memory_mb"] > 100 for row in timed)
    wide = {row["x"]: row["flops"] for row in timed if (row["axis"], row["model"]) == ("width", "base")}
    assert wide[128] > 1.5 * wide[64]
    found = list(read_rows(out, "here", "scaling"))
    assert len(found) == 7
    report_plot.plot(Results([], {"scaling": found}, []), "scaling", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="no row of scaling to draw"):
        report_plot.plot(Results([], {}, []), "scaling", picture)
