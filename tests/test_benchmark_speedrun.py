"""The speedrun at a size that takes seconds: what is compared is comparable, and repeats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import speedrun
from benchmarks.report_ops import tables
from benchmarks.report_plot import plot
from benchmarks.rows import FORMATS, Results, check
from benchmarks.tracks import Entry, Track
from maelm_fast import presets
from maelm_fast.training.rundir import RunDir, load_run
from maelm_fast.training.trainer import Trainer

SMALL = {
    "model": {"hidden_size": 32, "num_heads": 2, "ffn_size": 64, "num_layers": 1},
    "optim": {"max_steps": 6, "warmup_steps": 1, "batch_size": 8},
    "runtime": {"eval_samples": 16, "precision": "fp32"},
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small = presets.change(presets.get("tiny"), **SMALL)
    still = presets.change(small, optim={"lr": 1e-30})
    entries = {
        "paper": Entry("as it is", small),
        "masks": Entry("other masks", presets.change(small, masking={"rate": 0.4, "rate_end": 0.2})),
        "still": Entry("learns nothing", still),
        "still_masks": Entry("learns nothing", presets.change(still, masking={"rate": 0.5})),
    }
    track = Track("a test", target=6.0, seq_len=32, vocab_size=300, entries=entries)
    monkeypatch.setitem(speedrun.TRACKS, "tiny", track)


def run(*arguments: str) -> int:
    threads = torch.get_num_threads()
    try:
        return speedrun.main([*arguments])
    finally:
        torch.set_num_threads(threads)


def rows_of(store: Path, out: Path, *arguments: str) -> list[dict[str, Any]]:
    assert run("tiny", "--store", str(store), "--every", "2", "--out", str(out), *arguments) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_rows_repeat_and_hold_what_was_asked(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = rows_of(store, tmp_path / "a.jsonl", "--entries", "paper,masks", "--seeds", "0,1")
    again = rows_of(store, tmp_path / "b.jsonl", "--entries", "paper,masks", "--seeds", "0,1")
    assert [(row["entry"], row["seed"]) for row in first] == [("paper", 0), ("masks", 0), ("paper", 1), ("masks", 1)]
    losses = [[(step, loss) for step, _, loss in row["curve"]] for row in first]
    assert losses == [[(step, loss) for step, _, loss in row["curve"]] for row in again]
    assert len({str(curve) for curve in losses}) == 4
    for row in first:
        check(row, FORMATS["speedrun"].row, "row")
        assert [step for step, _, _ in row["curve"]] == [2, 4, 6]
        seconds = [seconds for _, seconds, _ in row["curve"]]
        assert 0 < seconds[0] <= seconds[1] <= seconds[2] == row["cpu_seconds"]
        assert row["tokens"] == 6 * 8 * 32
        assert row["loss"] == row["curve"][-1][2]
        reached = [(step, seconds) for step, seconds, loss in row["curve"] if loss <= 6.0]
        assert (row["updates_to_target"], row["cpu_seconds_to_target"]) == reached[0]
    assert "entry paper, seed 0: updates_to_target 2; cpu_seconds_to_target " in capsys.readouterr().out


def test_a_kept_run_is_a_run_and_is_not_overwritten(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep, asked = tmp_path / "runs", ("--entries", "paper", "--keep", str(tmp_path / "runs"))
    kept = rows_of(store, tmp_path / "a.jsonl", *asked)
    assert [(s, loss) for s, _, loss in kept[0]["curve"]] == [
        (s, loss) for s, _, loss in rows_of(store, tmp_path / "b.jsonl", "--entries", "paper")[0]["curve"]
    ]
    kept_run = load_run(keep / "paper-0")
    assert (kept_run.step, kept_run.record.preset, RunDir(keep / "paper-0").steps()) == (6, "paper", [6])
    assert kept_run.config.optim == presets.change(presets.get("tiny"), **SMALL).optim
    assert run("tiny", "--store", str(store), *asked) == 2
    assert "paper-0 is there already" in capsys.readouterr().err


def test_all_entries_read_the_same_samples_and_are_validated_alike(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they mask in training: models that learn nothing have one loss."""
    seen: list[list[int]] = []
    update = Trainer.update

    def noted(self: Trainer, batches: Any) -> Any:
        seen.append(self.batches.samples(self.progress.step)[0].tolist())
        return update(self, batches)

    monkeypatch.setattr(Trainer, "update", noted)
    still, masks = rows_of(store, tmp_path / "rows.jsonl", "--entries", "still,still_masks")
    assert seen[:6] == seen[6:]
    assert still["loss"] == masks["loss"] == pytest.approx(np.log(320), abs=0.3)


def made_up(entry: str, seed: int, seconds: float | None, loss: float, **changed: Any) -> dict[str, Any]:
    machine = {"date": "2026-11-23T00:00:00+00:00", "commit": "c", "device": "CPU", "threads": 1, "load": 1.0}
    row = {
        **machine,
        "torch": "2",
        "track": "tiny",
        "entry": entry,
        "kind": "mae",
        "recipe": entry,
        "precision": "fp32",
        "data": "d",
        "seed": seed,
        "updates": 6,
        "tokens": 5,
        "target": 6.0,
        "updates_to_target": None if seconds is None else 4,
        "cpu_seconds_to_target": seconds,
        "cpu_seconds": 9.0,
        "loss": loss,
        "curve": [[2, 3.0, 7.0], [6, 9.0, loss]],
    }
    return row | changed


def test_the_table_and_the_picture(tmp_path: Path) -> None:
    """p is Welch's: of 1, 1.1, 1.2 and 5, 6, 7 it is 0.013, and with one variance for both 0.001; a newer row takes an
    older one's place; another precision is another table."""
    rows = [made_up("paper", seed, 5.0 + seed, 5.0 + seed) for seed in range(3)]
    rows += [made_up("masks", seed, 1.0 + seed / 10, 1.0 + seed) for seed in range(3)]
    rows += [made_up("still", 0, None, 7.0), made_up("paper", 0, 1.0, 1.0, precision="bf16")]
    old = made_up("masks", 0, 99.0, 99.0, date="2026-11-22T00:00:00+00:00")
    made = list(tables("speedrun", [old, *rows]))
    assert len(made) == 2
    cells = {row[0]: dict(zip(made[0].header, row, strict=True)) for row in made[0].rows}
    assert list(cells) == ["`paper`", "`masks`", "`still`"]
    assert cells["`masks`"]["p"] == "0.01"
    assert cells["`masks`"]["p of them"] == "0.008"
    assert cells["`paper`"]["p"] == "-"
    assert cells["`masks`"]["CPU s to 6.00 nats"] == "1 [1, 1]"
    assert cells["`still`"]["CPU s to 6.00 nats"] == "-, 1 never"
    assert cells["`masks`"]["nats in the end"] == "2.000 [1.000, 3.000] after 6"
    plot(Results([], {"speedrun": rows}, []), "speedrun", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "unknown track 'None'"),
        (["large"], "unknown track 'large'"),
        (["tiny", "--entries", "papr"], "unknown entry 'papr', did you mean 'paper'"),
        (["tiny", "--seeds", "0,x"], "--seeds: numbers separated by commas, not 0,x"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err
