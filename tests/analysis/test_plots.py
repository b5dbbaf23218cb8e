"""Curves are read right, pictures are written whole, and errors are one line. How they look is judged by eye."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from maelm_fast.analysis.effective_rank import REMOVES_MASK, SEES_MASK, InputRanks, RankReport
from maelm_fast.analysis.plots import plot_ranks, plot_runs, read_curves, smoothed
from maelm_fast.cli import plot as plot_command
from maelm_fast.errors import UserError
from maelm_fast.training.rundir import RunDir

PNG = b"\x89PNG\r\n\x1a\n"
MakeRun = Callable[..., RunDir]
Write = Callable[..., None]


def test_curves_leave_out_what_is_not_finite(make_run: MakeRun) -> None:
    run = make_run()
    rows = [
        {"kind": "train", "step": 1, "tokens": 10, "loss": 5.0},
        {"kind": "train", "step": 2, "tokens": 20, "loss": float("nan")},
        {"kind": "train", "step": 3, "tokens": 30, "loss": None},
        {"kind": "validation", "step": 3, "tokens": 30, "val_loss": 4.0, "val_accuracy": 0.25, "unigram_nats": 5.1},
        {"kind": "train", "step": 4, "tokens": 40, "loss": 3.0},
    ]
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "tra')
    curves = read_curves(run)
    assert curves["loss"] == ([10, 40], [5.0, 3.0])
    assert (curves["val_loss"], curves["val_accuracy"]) == (([30], [4.0]), ([30], [0.25]))
    assert curves["unigram_nats"] == ([30], [5.1])
    assert read_curves(run, over="steps")["loss"][0] == [1, 4]


def test_smoothing_does_not_lag() -> None:
    falling = [float(10 - i) for i in range(8)]
    assert smoothed(falling, 3) == pytest.approx(falling)
    assert smoothed([0.0, 3.0, 0.0, 3.0, 6.0], 1) == pytest.approx([0.0, 1.0, 2.0, 3.0, 6.0])
    assert smoothed([4.0, 0.0, 1.0], 0) == [4.0, 0.0, 1.0]
    assert smoothed([], 3) == []


def test_plots_of_one_and_of_several_runs(make_run: MakeRun, write_metrics: Write, tmp_path: Path) -> None:
    runs = [make_run(f"run{i}") for i in range(2)] + [make_run("other", preset="roberta_tiny")]
    for i, run in enumerate(runs):
        write_metrics(run, floor=3.0 + i, evaluate_every=0 if i == 1 else 50)
    assert plot_command.main([str(runs[0].path)]) == 0
    assert (runs[0].report / "loss.png").read_bytes().startswith(PNG)
    assert plot_command.main([*(str(run.path) for run in runs), "--out", str(tmp_path / "new" / "all.svg")]) == 0
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["all.svg"]
    for text in ("tiny (run0)", "tiny (run1)", " roberta_tiny ", "Validation accuracy", "original tokens seen"):
        assert text in svg_text(tmp_path / "new" / "all.svg")
    plot_runs([runs[1]], tmp_path / "no-evaluation.svg", over="steps")
    assert "updates" in svg_text(tmp_path / "no-evaluation.svg")
    assert "Validation accuracy" not in svg_text(tmp_path / "no-evaluation.svg")


def report_of(name: str, sees_mask: bool, taus: list[float]) -> RankReport:
    labels = SEES_MASK if sees_mask else REMOVES_MASK
    ranks = [[3 + i, 4 + i] for i in range(len(taus))]
    entries = [InputRanks(entry, label, 99, ranks, [[1.0]] * 2) for entry, label in labels.items()]
    return RankReport(name, 5, sees_mask, 16, taus, False, "store", 4, 0.15, "mask", entries)


def test_a_plot_of_ranks_has_a_line_for_every_input(tmp_path: Path) -> None:
    report = report_of("tiny", False, [0.9])
    plot_ranks([report], tmp_path / "ranks.png")
    assert (tmp_path / "ranks.png").read_bytes().startswith(PNG)
    plot_ranks([report], tmp_path / "ranks.svg")
    assert all(label in svg_text(tmp_path / "ranks.svg") for label in REMOVES_MASK.values())


def test_several_reports_share_the_axes_of_figure_5(tmp_path: Path) -> None:
    reports = [report_of("mlm", True, [0.8, 0.9]), report_of("mae", False, [0.8, 0.9])]
    plot_ranks(reports, tmp_path / "both.svg")
    text = svg_text(tmp_path / "both.svg")
    for label in (
        "mlm, step 5: with [MASK]",
        "mlm, step 5: without [MASK]",
        "mae, step 5: all tokens real",
        "0.8-effective rank",
        "0.9-effective rank",
    ):
        assert label in text
    assert "mae, step 5: with [MASK]" not in text
    with pytest.raises(UserError, match="different taus"):
        plot_ranks([reports[0], report_of("mae", False, [0.9])], tmp_path / "none.svg")


def svg_text(path: Path) -> str:
    """matplotlib draws text as paths and leaves it in comments."""
    return path.read_text()


def test_ranks_measured_in_training_are_drawn(make_run: MakeRun, write_metrics: Write, tmp_path: Path) -> None:
    run, other = make_run(), make_run("other", preset="roberta_tiny")
    write_metrics(run)
    write_metrics(other)
    rows = [{"kind": "rank", "step": s, "tokens": 9 * s, "rank_last": 10 + s, "rank_last_mask": s} for s in (1, 2)]
    with open(run.metrics_file, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    curves = read_curves(run, over="steps")
    assert (curves["rank_last"], curves["rank_last_mask"][1]) == (([1, 2], [11, 12]), [1, 2])
    plot_runs([run, other], tmp_path / "with.svg")
    assert "0.9-effective rank of the last layer" in svg_text(tmp_path / "with.svg")
    plot_runs([other], tmp_path / "without.svg")
    assert "effective rank" not in svg_text(tmp_path / "without.svg")


def test_errors_say_what_to_do(
    make_run: MakeRun, write_metrics: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    with pytest.raises(UserError, match="no metrics yet"):
        plot_runs([run], tmp_path / "x.png")
    run.metrics_file.write_text('{"kind": "train"}\n')
    with pytest.raises(UserError, match="damaged"):
        plot_runs([run], tmp_path / "x.png")
    write_metrics(run)
    with pytest.raises(UserError, match=r"'\.doc'; use \.png"):
        plot_runs([run], tmp_path / "x.doc")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        plot_runs([run], tmp_path / "file" / "x.png")
    with pytest.raises(UserError, match="not a run directory"):
        plot_command.main([str(tmp_path / "nowhere")])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        plot_command.main([str(run.path)])
    assert not (tmp_path / "x.png").exists()
