"""The benchmarks of attention and of ops at a size that takes seconds: rows add up, and who fails stops no other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import attention, ops
from maelm_fast.ops import registration


@pytest.fixture
def small_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reach of 91 needs more positions than that."""
    for name, case in {"kept": attention.Case(96, 0.85), "documents": attention.Case(128, None)}.items():
        monkeypatch.setitem(attention.CASES, name, case)


@pytest.mark.usefixtures("small_cases")
def test_attention_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(attention.CONTESTANTS["cpu"], "flash-attn", "flash")
    out = tmp_path / "rows.jsonl"
    arguments = ["--device", "cpu", "--cases", "kept,documents", "--sequences", "3", "--rounds", "2"]
    attention.main([*arguments, "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    skipped = [row for row in rows if row["skipped"] is not None]
    assert {row["contestant"] for row in skipped} == {"flash-attn"}
    assert len(skipped) == 2 * 4
    assert all("backend 'flash' cannot run: " in row["skipped"] for row in skipped)
    rows = [row for row in rows if row["skipped"] is None]
    once = [row for row in rows if row["phase"] == "once"]
    assert {row["contestant"] for row in once} == {"sdpa, bias written out"}
    assert len(once) == 2 * 2
    rows = [row for row in rows if row["phase"] != "once"]
    assert len(rows) == 2 * 4 * 2 * 4  # cases, with and without bias and dropout, phases, contestants
    for row in rows:
        reference = row["contestant"] == "reference"
        assert (row["ratio"] == {"median": 1.0, "q1": 1.0, "q3": 1.0}) or not reference
        compared = row["backend"] in ("grouped", "reference") or (row["backend"] == "sdpa" and not row["dropout"])
        assert row["from_ours"] < 1e-5 if compared else row["from_ours"] is None
    contestants = {row["contestant"] for row in rows if row["bias"]}
    assert contestants == {"ours", "grouped", "reference", "sdpa, bias written out"}
    assert (
        capsys.readouterr().out.count("contestant flash-attn: UserError: attention: backend 'flash' cannot run: ") == 8
    )


@pytest.mark.usefixtures("small_cases")
def test_attention_is_not_timed_when_the_gate_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(attention.GATE, torch.float32, -1.0)
    out = tmp_path / "rows.jsonl"
    assert attention.main(["--device", "cpu", "--cases", "kept", "--sequences", "2", "--out", str(out)]) == 1
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["contestant"] for row in rows] == ["ours"] * 4
    assert all(row["skipped"].startswith("gate: differs from the reference by ") for row in rows)


@pytest.mark.usefixtures("small_cases")
def test_attention_goes_on_without_who_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks(attention.Contestant):
        def call(self, phase: str) -> Any:
            def broken() -> None:
                raise RuntimeError("no plan for this\nmore")

            return broken if (self.name, phase) == ("grouped", "fwd") else super().call(phase)

    monkeypatch.setattr(attention, "Contestant", Breaks)
    rows = list(attention.measured(attention.Setting("kept", True, 0.0, 160, "cpu"), 1))
    assert [row["skipped"] for row in rows if row["contestant"] == "grouped"] == [
        None,
        "RuntimeError: no plan for this",
    ]
    assert [row["phase"] for row in rows if row["contestant"] == "ours"] == ["fwd+bwd", "fwd"]
    assert rows[-1]["phase"] == "once"
    assert rows[-1]["contestant"] == "sdpa, bias written out"


def test_ops_go_on_without_who_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(**inputs: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(ops.ENTRIES, "add_norm", replace(ops.ENTRIES["add_norm"], function=broken))
    out = tmp_path / "rows.jsonl"
    arguments = ["--device", "cpu", "--ops", "add_norm,feed_forward", "--sequences", "2", "--length", "32"]
    assert ops.main([*arguments, "--width", "96", "--rounds", "1", "--out", str(out)]) == 1
    first, *others = [json.loads(line) for line in out.read_text().splitlines()]
    assert (first["op"], first["contestant"], first["skipped"]) == ("add_norm", "ours", "RuntimeError: no such kernel")
    assert [(row["op"], row["contestant"], row["skipped"]) for row in others] == [("feed_forward", "pytorch", None)] * 2


def test_attention_says_in_a_line_that_ours_cannot_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registration, "_compiled", set())
    assert attention.main(["--device", "cpu", "--cases", "kept", "--sequences", "1"]) == 2
    error = capsys.readouterr().err
    assert "error: attention: backend 'native' cannot run: " in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--rounds", "0"], "--rounds: must be at least 1, not 0"),
        (["--sequences", "0"], "--sequences: must be at least 1"),
        (["--width", "100"], "--width must be a multiple of 12, the number of heads"),
        (["--ops", "add"], "--ops: unknown add; there are: mask_and_pack, "),
    ],
)
def test_ops_refuses_sizes_that_cannot_be(wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ops.main(["--device", "cpu", *wrong]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_attention_list_names_every_case_and_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attention, "measured", None)
    assert attention.main(["--device", "cuda", "--list"]) == 0
    listed = capsys.readouterr().out
    for case in ("kept", "documents", "1024", "2048"):
        for variant in ("no bias, dropout 0", "no bias, dropout 0.1", "bias, dropout 0", "bias, dropout 0.1"):
            assert f"{case}, {variant}: " in listed
    assert "256 x 435 of 512 positions, 111360 tokens" in listed
    assert listed.count("flash-attn (flash)") == listed.count("flex (flex)") == 16
    assert "cudnn, bias written out (cudnn, 2.4 GB)" in listed
    assert "sdpa, bias written out (sdpa, 59.6 GB: skipped)" in listed
