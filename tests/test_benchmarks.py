"""The benchmark harness at a size that takes seconds: its gate must hold, be able to fail, and rows add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import attention, peers, train_step
from maelm_fast.model.maelm import MaeLm

SETTINGS = train_step.Settings(batch=2, seq=64, dropout=0.0, bias=False, shape="tiny")


def test_hugging_face_copy_has_our_loss_and_gradients() -> None:
    config = SETTINGS.model_config(train_step.HF)
    ours, theirs = MaeLm(config), peers.hugging_face_roberta(config)
    peers.copy_weights(ours, theirs)
    batch = SETTINGS.packed(config.vocab_size, encoder_sees_mask=True)
    loss, their_loss = ours(batch)[0] / batch.counts.masked, theirs(**peers.hugging_face_inputs(batch)).loss
    torch.testing.assert_close(loss, their_loss)
    loss.backward()
    their_loss.backward()
    grads: dict[str, Any] = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    torch.testing.assert_close(ours.encoder.token_table.grad, grads["roberta.embeddings.word_embeddings.weight"])
    positions = grads["roberta.embeddings.position_embeddings.weight"]
    torch.testing.assert_close(ours.encoder.position_table.grad, positions[2:])
    first: Any = ours.encoder.blocks[0]
    values = grads["roberta.encoder.layer.0.attention.self.value.weight"]
    torch.testing.assert_close(first.attention.qkv.weight.grad[-config.hidden_size :], values)


def test_gate_stops_when_the_weights_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    assert train_step.gate(["tiny"], SETTINGS)["tiny"] > 0
    monkeypatch.setattr(train_step, "copy_weights", lambda ours, theirs: None)
    with pytest.raises(SystemExit, match="disagree"):
        train_step.gate(["tiny"], SETTINGS)


def test_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(train_step, "alone", lambda function, *arguments: function(*arguments))
    out = tmp_path / "results" / "rows.jsonl"
    arguments = ["--models", "tiny,roberta_tiny", "--peers", "hf", "--seq", "64", "--batch", "2", "--rounds", "2"]
    train_step.main([*arguments, "--dropout", "0.1", "--bias", "--out", str(out)])
    rows = {row["model"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert list(rows) == ["tiny", "roberta_tiny", "hf"]
    assert [row["bias"] for row in rows.values()] == ["t5", "t5", "none"]
    assert {row["dropout"] for row in rows.values()} == {0.1}
    assert rows["hf"]["ratio_to_hf"] == {"median": 1.0, "q1": 1.0, "q3": 1.0}
    assert rows["hf"]["mflop_per_token"] > rows["roberta_tiny"]["mflop_per_token"]
    assert all(row["tokens_per_s"]["q1"] <= row["tokens_per_s"]["median"] for row in rows.values())
    assert "roberta_tiny" in capsys.readouterr().out


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
    assert len(rows) == 2 * 4 * 3 * 3  # cases, with and without bias and dropout, phases, contestants
    for row in rows:
        reference = row["contestant"] == "reference"
        assert (row["ratio"] == {"median": 1.0, "q1": 1.0, "q3": 1.0}) or not reference
        compared = reference or (row["backend"] == "sdpa" and not row["dropout"])
        assert row["from_ours"] < 1e-5 if compared else row["from_ours"] is None
    assert {row["contestant"] for row in rows if row["bias"]} == {"ours", "reference", "sdpa, bias written out"}
    assert capsys.readouterr().out.count("skipped: flash-attn: attention: backend 'flash' cannot run: ") == 8


@pytest.mark.usefixtures("small_cases")
def test_attention_is_not_timed_when_the_gate_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention.GATE, torch.float32, -1.0)
    with pytest.raises(SystemExit, match="nothing is timed"):
        attention.main(["--device", "cpu", "--cases", "kept", "--sequences", "2"])


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
    assert "sdpa, bias written out (sdpa, 59.6 GB: skipped)" in listed
