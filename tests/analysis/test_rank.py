"""maelm-fast rank: runs alone and together, Hugging Face encoders of four classes, and what cannot be measured."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maelm_fast.analysis.effective_rank import REPORT_FILE, SEES_MASK
from maelm_fast.analysis.huggingface import (
    MASKING,
    load_checkpoint,
    measure_checkpoint,
    sequences,
    text_lines,
    vocabulary_of_checkpoint,
)
from maelm_fast.cli.main import main
from maelm_fast.data.masking import pack
from maelm_fast.data.tokenizer import load_tokenizer
from maelm_fast.errors import UserError
from maelm_fast.masking import VALIDATION_EPOCH, Masker
from maelm_fast.training.gram import GramMatrix, rank_at
from maelm_fast.training.rundir import RunDir

transformers = pytest.importorskip("transformers")
PNG = b"\x89PNG\r\n\x1a\n"
SHAPE = {
    "vocab_size": 310,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}
KINDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "roberta": ("Roberta", {"max_position_embeddings": 42}, 40),
    "bert": ("Bert", {"max_position_embeddings": 40}, 40),
    "mpnet": ("MPNet", {"max_position_embeddings": 42}, 40),
    "modernbert": ("ModernBert", {"max_position_embeddings": 40, **IDS}, 40),
}


@pytest.fixture(scope="module")
def checkpoints(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory per class, with the store's tokenizer; and some that do not fit."""
    path = tmp_path_factory.mktemp("checkpoints")
    names = {"bos": "<s>", "eos": "</s>", "cls": "<s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>", "mask": "<mask>"}
    special = {f"{role}_token": name for role, name in names.items()}
    object_ = load_tokenizer(store / "tokenizer.json")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=object_, **special)
    for kind, (prefix, fields, _) in KINDS.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{prefix}Config")(**SHAPE, **fields)
        getattr(transformers, f"{prefix}Model")(config).save_pretrained(path / kind)
        tokenizer.save_pretrained(path / kind)
    transformers.GPT2Model(transformers.GPT2Config(vocab_size=310, n_embd=32, n_layer=1, n_head=2)).save_pretrained(
        path / "gpt2"
    )
    tokenizer.save_pretrained(path / "gpt2")
    bart = transformers.BartConfig(
        vocab_size=310,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
    )
    transformers.BartModel(bart).save_pretrained(path / "bart")
    tokenizer.save_pretrained(path / "bart")
    for name in ("no_tokenizer", "no_mask_token", "other_tokenizer", "no_weights", "damaged"):
        shutil.copytree(path / "roberta", path / name)
    for file in (path / "no_tokenizer").glob("token*"):
        file.unlink()
    del special["mask_token"]
    transformers.PreTrainedTokenizerFast(tokenizer_object=object_, **special).save_pretrained(path / "no_mask_token")
    tokenizer.add_tokens([f"word{i}" for i in range(50)])
    tokenizer.save_pretrained(path / "other_tokenizer")
    (path / "no_weights" / "model.safetensors").unlink()
    (path / "damaged" / "config.json").write_text("{")
    (path / "empty").mkdir()
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_are_those_of_the_model_s_own_hidden_states(kind: str, checkpoints: Path, store: Path) -> None:
    encoder = load_checkpoint(checkpoints / kind, torch.device("cpu"))
    assert encoder.max_length == KINDS[kind][2]
    report = measure_checkpoint(encoder, str(store), (0.7, 0.9), samples=6, length=512)
    assert (report.name, report.step, report.samples, report.hidden_size) == (kind, None, 6, 32)
    assert {entry.name for entry in report.inputs} == set(SEES_MASK)

    rows = sequences(encoder, str(store), 6, encoder.max_length)
    samples = torch.arange(6).numpy()
    batch = pack(
        rows, samples, samples * 0 + VALIDATION_EPOCH, Masker(MASKING, vocabulary_of_checkpoint(encoder), 0, True)
    )
    model = transformers.AutoModel.from_pretrained(checkpoints / kind).eval()
    ids = batch.ids.view(6, -1).long()
    is_mask = ids == encoder.tokenizer.mask_id
    special = torch.isin(torch.from_numpy(np.stack(rows)), torch.tensor(encoder.tokenizer.source.all_special_ids))
    assert not bool((is_mask & special).any())
    maskable = (~special).sum(1)
    assert is_mask.sum(1).tolist() == (0.15 * maskable + 0.5).floor().int().tolist()
    with torch.no_grad():
        shown = model(input_ids=ids, output_hidden_states=True).hidden_states
        original = model(input_ids=torch.from_numpy(np.stack(rows)), output_hidden_states=True).hidden_states
    for entry in report.inputs:
        states = original if entry.name == "without_mask" else shown
        rows_of = {"mask_positions": is_mask, "real_positions": ~is_mask}.get(entry.name, torch.ones_like(is_mask))
        assert entry.tokens == int(rows_of.sum())
        for layer, hidden in enumerate(states):
            gram = GramMatrix(32)
            gram.add(hidden[rows_of])
            exact = [rank_at(gram.squared_singular_values(), tau) for tau in (0.7, 0.9)]
            assert [ranks[layer] for ranks in entry.ranks] == exact


def test_sequences_have_the_model_s_form_and_text(checkpoints: Path, store: Path, tmp_path: Path) -> None:
    encoder = load_checkpoint(checkpoints / "roberta", torch.device("cpu"))
    tokenizer = encoder.tokenizer.source
    rows = sequences(encoder, str(store), 5, 20)
    assert [len(row) for row in rows] == [20] * 5
    assert all(row[0] == tokenizer.cls_token_id and row[-1] == tokenizer.sep_token_id for row in rows)
    lines = list(text_lines(str(store)))
    assert tokenizer.decode(rows[0][1:15]).split("</s>")[0].strip() in lines[0]
    file = tmp_path / "text.txt"
    file.write_text("the <mask> of the people\n" * 20)
    from_file = sequences(encoder, str(file), 10**6, 20)
    assert 1 < len(from_file) < 100
    assert all(tokenizer.mask_token_id not in row for row in from_file)


def test_the_command_on_a_checkpoint(
    checkpoints: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    argv = ["rank", "--hf", str(checkpoints / "bert"), "--text", str(text_file), "--samples", "4", "--length", "24"]
    assert main([*argv, "--tau", "0.5,0.9", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    (report,) = json.loads((out / REPORT_FILE).read_text())["reports"]
    assert (report["taus"], report["data"]) == ([0.5, 0.9], str(text_file))
    assert report["inputs"][0]["tokens"] == 96
    assert (out / "effective_rank.png").read_bytes().startswith(PNG)
    assert "bert: 0.5-effective rank of 32 dimensions" in printed
    assert "fewer tokens than dimensions in: [MASK] positions alone" in printed


HF_ERRORS = {
    "nowhere": "no such directory",
    "empty": "neither a run directory (config.yaml) nor a Hugging Face one",
    "damaged": "not the configuration of a Hugging Face model",
    "gpt2": "model_type 'gpt2' is no bidirectional encoder",
    "bart": "model_type 'bart' is no bidirectional encoder",
    "no_tokenizer": "no tokenizer beside the model",
    "no_mask_token": "no mask token",
    "other_tokenizer": "do not belong together",
    "no_weights": "transformers cannot load it",
}


@pytest.mark.parametrize("name", HF_ERRORS)
def test_checkpoints_that_do_not_fit(
    name: str, checkpoints: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["rank", "--hf", str(checkpoints / name), "--text", str(text_file), "--out", str(tmp_path / "out")]
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert HF_ERRORS[name] in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--hf needs text"),
        (["--text", "hf:wikitext"], "would be downloaded"),
        (["--text", "nowhere.txt"], "nowhere.txt does not exist"),
        (["--text", "{here}"], "is a directory but not a token store"),
        (["--text", "{here}/short.txt"], "which is not one sequence"),
        (["--text", "{here}/short.txt", "--length", "4"], "at least 8 tokens"),
        (["--text", "{here}/short.txt", "--samples", "0"], "samples must be positive"),
        (["--text", "{here}/short.txt", "--step", "3"], "--step names a checkpoint of runs"),
    ],
)
def test_texts_that_do_not_fit(
    options: list[str], message: str, checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("a few words\n")
    words = [option.format(here=tmp_path) for option in options]
    assert main(["rank", "--hf", str(checkpoints / "roberta"), *words]) == 2
    assert message in capsys.readouterr().err


def test_without_transformers_the_remedy_is_named(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match="pip install transformers"):
        load_checkpoint(checkpoints / "roberta", torch.device("cpu"))


def test_the_command_on_a_run_writes_into_its_report(
    make_run: Callable[..., RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(preset="roberta_tiny")
    assert main(["rank", str(run.path), "--samples", "4", "--tau", "0.5"]) == 0
    data = json.loads((run.report / REPORT_FILE).read_text())["reports"][0]
    assert (data["taus"], data["step"]) == ([0.5], 20)
    assert [entry["name"] for entry in data["inputs"]] == list(SEES_MASK)
    assert all(len(entry["ranks"][0]) == 3 for entry in data["inputs"])
    assert (run.report / "effective_rank.png").read_bytes().startswith(PNG)
    assert "real positions of the input with [MASK]" in capsys.readouterr().out


def test_runs_and_checkpoints_are_compared_in_one_report(
    make_run: Callable[..., RunDir], checkpoints: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mlm, mae = make_run("mlm", "roberta_tiny"), make_run("mae", "tiny")
    argv = ["rank", str(mlm.path), str(mae.path), "--hf", str(checkpoints / "mpnet"), "--data", str(store)]
    assert main([*argv, "--samples", "4", "--tau", "0.9,0.8", "--out", str(tmp_path / "both")]) == 0
    reports = json.loads((tmp_path / "both" / REPORT_FILE).read_text())["reports"]
    assert [report["name"] for report in reports] == ["roberta_tiny", "tiny", "mpnet"]
    assert [report["encoder_sees_mask"] for report in reports] == [True, False, True]
    assert all(report["taus"] == [0.8, 0.9] for report in reports)
    assert (tmp_path / "both" / "effective_rank.png").read_bytes().startswith(PNG)
    assert not mlm.report.exists()
    printed = capsys.readouterr().out
    assert "tiny, step 20: 0.9-effective rank" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tau", "1.5"], "--tau must lie"),
        (["--tau", "0.9;0.8"], "--tau takes numbers"),
        (["--samples", "0"], "samples must be positive"),
        (["--step", "7"], "no checkpoint at step 7; there are: 20"),
        (["--data", "nowhere"], "name one with --data STORE"),
        (["--text", "embedded"], "--text is for --hf"),
        (["--length", "64"], "--length is for --hf"),
        (["--depth", "7"], "unknown option '--depth'"),
    ],
)
def test_wrong_arguments_say_what_is_wrong(
    make_run: Callable[..., RunDir], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    assert main(["rank", str(run.path), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not run.report.exists()


def test_nothing_named_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rank"]) == 2
    assert "name a run" in capsys.readouterr().err
