"""The model card says what the run's files say, its examples run, and nothing is uploaded unless it is asked for."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from maelm_fast.cli import export as command
from maelm_fast.config import MaskingConfig
from maelm_fast.errors import UserError
from maelm_fast.export import hub
from maelm_fast.export.card import About, card
from maelm_fast.export.huggingface import export
from maelm_fast.training.rundir import LoadedRun

pytest.importorskip("transformers")
huggingface_hub = pytest.importorskip("huggingface_hub")
MakeRun = Callable[..., LoadedRun]
METRICS = [
    {"kind": "validation", "step": 5, "tokens": 1000, "val_loss": 5.5, "val_accuracy": 0.1, "unigram_nats": 5.8},
    {"kind": "train", "step": 9, "tokens": 1800, "loss": 5.0},
    {"kind": "validation", "step": 20, "tokens": 4000, "val_loss": 4.5, "val_accuracy": 0.2, "unigram_nats": 5.8},
]


@pytest.mark.parametrize(
    ("format", "fields", "fills"),
    [("own", {}, True), ("auto", {"decoder": "none"}, True), ("auto", {}, False), ("layoutlmv3", {}, False)],
)
def test_the_examples_run_where_the_card_lies(
    make_run: MakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    format: str,
    fields: dict[str, Any],
    fills: bool,
) -> None:
    out = export(make_run(**fields), tmp_path / "out", format).out
    text = (out / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(out)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["vectors"].shape[::2] == (2, 32)
    assert ("fill" in names) == ("sequence" in capsys.readouterr().out) == fills
    assert ("Not for fill-mask" in text) != fills
    assert ("--format own` writes it" in text) != fills
    assert yaml.safe_load(text.split("---")[1])["pipeline_tag"] == ("fill-mask" if fills else "feature-extraction")


def test_what_it_says_of_the_run(make_run: MakeRun) -> None:
    run = make_run()  # at step 10: what was measured later is not its
    text = card(run, "mpnet", "MPNetModel", About(METRICS, "cc-by-sa-4.0", "you/it"))
    assert "| validation loss | 5.5000 nats per masked token, at step 5 |" in text
    assert "| validation accuracy | 10.00% of the masked tokens |" in text
    assert "| tokens | 1,800, visible and masked |" in text
    assert "4.5" not in text
    assert yaml.safe_load(text.split("---")[1])["license"] == "cc-by-sa-4.0"
    assert 'AutoModel.from_pretrained("you/it")' in text
    assert "`books` (fingerprint `fingerprint`), which is not where it was" in text
    silent = card(run, "mpnet", "MPNetModel", About())
    assert "license" not in silent.split("---")[1]
    assert "licence is not stated" in silent
    assert "validation loss is not known" in silent
    assert "| masking | 0.15 of the tokens" in silent
    falling = make_run(masking=MaskingConfig(rate=0.4, rate_end=0.15))
    assert "| masking | 0.4, falling to 0.15, of the tokens" in card(falling, "mpnet", "MPNetModel", About())
    ablation = make_run(masking=MaskingConfig(shown=0.5))
    assert "--format own" not in card(ablation, "mpnet", "MPNetModel", About())


def test_what_it_says_of_the_data(make_run: MakeRun, tmp_path: Path) -> None:
    from maelm_fast.data.prepare import PrepareConfig, prepare
    from maelm_fast.data.token_store import Manifest

    text = str(tmp_path / "books.txt")
    Path(text).write_text("".join(f"the quick brown fox number {i}\n\n" for i in range(60)))
    prepare(PrepareConfig(inputs=[text], out=tmp_path / "store", vocab_size=262, seq_len=16, validation=0.2))
    store = Manifest.read(tmp_path / "store")
    run = make_run()
    same = replace(run, record=replace(run.record, data=str(tmp_path / "store"), data_fingerprint=store.fingerprint))
    tokens = store.splits["train"].tokens
    assert f"): {tokens:,} tokens from `books.txt`." in card(same, "mpnet", "MPNetModel", About())
    other = replace(same, record=replace(same.record, data_fingerprint="of another"))
    assert "texts are unknown" in card(other, "mpnet", "MPNetModel", About())


class Hub:
    """The hub's interface, which writes down what it is asked to do."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failure = failure

    def create_repo(self, repo: str, *, private: bool, exist_ok: bool) -> str:
        self.calls.append((repo, private, exist_ok))
        return f"https://hub/{repo}"

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        if self.failure is not None:
            raise self.failure
        self.calls.append((repo_id, sorted(file.name for file in folder_path.iterdir()), commit_message))


@pytest.fixture
def run_of_command(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("maelm_fast.training.rundir.load_run", lambda path, step: make_run())
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_token")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in METRICS))
    return tmp_path / "run"


def test_upload(run_of_command: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: asked)
    assert command.main([str(run_of_command), "--out", str(run_of_command / "a")]) == 0
    assert not asked.calls
    assert "cannot fill in <mask>, which takes decoder and head: --format own" in capsys.readouterr().out
    argv = [str(run_of_command), "--out", str(run_of_command / "b"), "--push-to-hub", "you/it"]
    assert command.main(argv) == 0
    assert "uploaded: https://hub/you/it" in capsys.readouterr().out
    created, (repo, files, message) = asked.calls
    assert created == ("you/it", True, True)
    assert (repo, message) == ("you/it", "maelm-fast export: b")
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(files)
    text = (run_of_command / "b" / "README.md").read_text(encoding="utf-8")
    assert 'from_pretrained("you/it")' in text
    assert "5.5000 nats" in text
    assert hub.upload(run_of_command / "b", "you/other", public=True) == "https://hub/you/other"
    assert asked.calls[2] == ("you/other", False, True)


def test_an_upload_that_cannot_work_is_noticed_first(run_of_command: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(words: str, *arguments: str) -> None:
        with pytest.raises(UserError, match=words) as error:
            command.main([str(run_of_command), *arguments])
        assert "\n" not in str(error.value)
        assert not (run_of_command / "export").exists()

    monkeypatch.setattr("maelm_fast.export.huggingface.export", lambda *_: pytest.fail("exported"))
    refused("OWNER/NAME, such as you/my-encoder, not 'it'", "--push-to-hub", "it")
    refused("--push-to-hub you/a..b: ", "--push-to-hub", "you/a..b")
    refused("--public needs --push-to-hub", "--public")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    refused("needs a token that may write: run 'hf auth login', or set HF_TOKEN", "--push-to-hub", "you/it")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refused("HF_HUB_OFFLINE is set", "--push-to-hub", "you/it")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused("pip install huggingface_hub", "--push-to-hub", "you/it")


def test_an_upload_that_fails_leaves_the_export(run_of_command: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = OSError("403 Forbidden: you may not write here.\nRequest ID 17")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: Hub(failure))
    out = run_of_command / "out"
    words = rf"{out} is written, but not uploaded .*\(403 Forbidden: you may not write here\).*hf upload you/it {out}$"
    with pytest.raises(UserError, match=words):
        command.main([str(run_of_command), "--out", str(out), "--push-to-hub", "you/it"])
    assert (out / "model.safetensors").exists()
