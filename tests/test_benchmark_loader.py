"""The loader's benchmark at a size that takes seconds: rows add up, the gate can fail, and no store is left behind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import loader
from maelm_fast import native
from maelm_fast.data.token_store import TokenStore

SMALL = ["--batch", "96", "--micro-batches", "16", "--updates", "2", "--rounds", "2"]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "alone", lambda function, *arguments: function(*arguments))


def run(*arguments: str) -> int:
    threads = torch.get_num_threads()
    try:
        return loader.main([*SMALL, *arguments])
    finally:
        torch.set_num_threads(threads)


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, scratch = tmp_path / "rows.jsonl", tmp_path / "scratch"
    scratch.mkdir()
    assert run("--scratch", str(scratch), "--sizes", "100KB,0.5MB", "--workers", "0", "--out", str(out)) == 0
    assert not list(scratch.iterdir())
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["mode"], row["masks"]) for row in rows] == [
        (mode, masks) for _ in range(2) for mode in ("full", "document") for masks in ("host", "device")
    ]
    printed = capsys.readouterr().out
    for row, size in zip(rows, [100_000] * 4 + [500_000] * 4, strict=True):
        assert abs(row["tokens"] * 2 - size) <= 1024
        assert size - 1024 <= row["store_bytes"] <= size * 1.02 + 4096
        speed = row["tokens_per_s_per_core"]
        assert 0 < speed["q1"] <= speed["median"] <= speed["q3"]
        assert row["tokens_per_cpu_s"]["median"] > 0
        assert row["workers"] == 0
        assert row["rss_anon_mb"] > 10
        assert row["major_faults"] >= 0
        assert {"date", "commit", "device", "threads", "load", "torch"} <= row.keys()
        fill = row["fill"]
        assert fill == {"all": 1.0} if row["mode"] == "full" else 0.5 < fill["all"] <= 1
    assert sum("tokens_per_s_per_core " in line for line in printed.splitlines()) == 8


def test_rows_with_a_loader_process(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["--sizes", "200KB", "--modes", "document", "--workers", "1", "--scratch", str(tmp_path)]
    assert run(*arguments, "--out", str(out)) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["workers"], row["masks"]) for row in rows] == [(1, "host"), (1, "device")]
    for row in rows:
        assert row["tokens_per_s_per_core"]["median"] > 0


def test_a_prepared_store(document_store: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert run("--store", str(document_store), "--workers", "0", "--out", str(out)) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    opened = TokenStore.open(document_store)
    assert {(row["store"], row["mode"], row["samples"], row["seq_len"]) for row in rows} == {
        ("document", "document", len(opened), 32)
    }


@pytest.mark.parametrize("mode", ["full", "document"])
def test_synthetic_stores_are_stores(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "BATCH_TOKENS", 1 << 16)
    loader.write_store(tmp_path / "store", mode, 500_000)
    store = TokenStore.open(tmp_path / "store")
    store.verify()
    split = store.manifest.splits["train"]
    assert (len(store), store.lengths.sum()) == (split.samples, split.tokens)
    assert 0 <= 250_000 - split.tokens < 512
    assert store.lengths.max() == 512
    assert (store.lengths == 512).all() == (mode == "full")
    tokens = store.read(np.arange(len(store)))
    assert tokens.max() < loader.VOCABULARY_SIZE


def test_the_gate_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(loader, "SEED", 1)
    batches = loader.Setting.batches

    def other_seed(*arguments: Any) -> Any:
        made = batches(*arguments)
        made.masker = dataclasses.replace(made.masker, seed=2)
        return made

    monkeypatch.setattr(loader.Setting, "batches", other_seed)
    assert run("--scratch", str(tmp_path), "--sizes", "100KB") == 1
    assert "nothing is timed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())  # the store is deleted on an error


def test_without_the_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "host", lambda: None)
    arguments = ["--sizes", "100KB", "--modes", "document", "--workers", "0", "--scratch", str(tmp_path)]
    assert run(*arguments, "--out", str(tmp_path / "rows.jsonl")) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "10 MB"], "'10 MB' is not a size"),
        (["--sizes", "0MB"], "not a size"),
        (["--sizes", "100000000GB"], "needs more room"),
        (["--workers", "-1"], "--workers: must be at least 1, not -1"),
        (["--micro-batches", "0"], "at least 1"),
        (["--batch", "0"], "--batch: must be at least 1"),
        (["--rounds", "0"], "--rounds: must be at least 1"),
        (["--modes", "fill"], "unknown fill; there are: full, document"),
        (["--scratch", "/nowhere"], "is not a directory"),
        (["--store", "/nowhere"], "is not a token store"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--scratch", str(tmp_path), *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
