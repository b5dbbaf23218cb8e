"""Bad input: one line on stderr that says what and how to mend it, exit code 2, nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from maelm_fast.cli.main import main
from maelm_fast.training.job import pretrain as run_job
from tests.training.test_run import config


@pytest.fixture(scope="module")
def place(store: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of things that are wrong, each in its own way, and of some that are right."""
    here = tmp_path_factory.mktemp("bad")
    shutil.copytree(store, here / "store")
    run_job(config(optim={"max_steps": 2, "warmup_steps": 1}), here / "store", here / "run")
    shutil.copy(text_file, here / "text.txt")
    (here / "empty.txt").write_text("\n\n")
    (here / "latin.txt").write_bytes("caf\xe9 au lait\n".encode("latin-1"))
    (here / "broken.txt.xz").write_bytes(b"not xz at all")
    (here / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (here / "field.jsonl").write_text('{"body": "no text field"}\n')
    (here / "text.docx").write_bytes(b"PK")
    (here / "tokenizer.json").write_text("{}")
    (here / "key.yaml").write_text("optim:\n  learning_rate: 1\n")
    (here / "type.yaml").write_text("optim:\n  lr: fast\n")
    (here / "good.yaml").write_text("seed: 1\n")
    (here / "twice.yaml").write_text("optim:\n  lr: 1e-3\n  lr: 1e-4\n")
    (here / "syntax.yaml").write_text("optim: [\n")
    for name, damage in (("truncated", "cut"), ("other", "tokenizer"), ("nomanifest", "manifest")):
        copy = here / name
        shutil.copytree(store, copy)
        if damage == "cut":
            shard = next(copy.glob("train-*.arrow"))
            os.truncate(shard, shard.stat().st_size // 2)
        elif damage == "tokenizer":
            manifest = json.loads((copy / "manifest.json").read_text())
            manifest |= {"tokenizer_sha256": "0" * 64, "sha256": ""}
            (copy / "manifest.json").write_text(json.dumps(manifest))
        else:
            (copy / "manifest.json").unlink()
    shutil.copytree(store, here / "flipped")
    shard = here / "flipped" / "train-00000.arrow"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    shutil.copytree(store, here / "edited")
    manifest = here / "edited" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"seq_len": 32', '"seq_len": 31'))
    shutil.copytree(here / "run", here / "torn")
    for file in (here / "torn").glob("checkpoints/*/model.safetensors"):
        os.truncate(file, file.stat().st_size // 2)
    (here / "notrun").mkdir()
    (here / "notrun" / "file").write_text("something")
    (here / "config.json").write_text("{}")
    return here


PREPARE = "data prepare {p}/text.txt --out {p}/out"
PRETRAIN = "pretrain tiny --data {p}/store --out {p}/out"
CASES = {
    "no such command": ("pretain", "unknown command 'pretain', did you mean 'pretrain'?"),
    "no such command of data": ("data prepair", "unknown command 'prepair', did you mean 'prepare'?"),
    "no such command of the paper": ("paper swep", "unknown command 'swep', did you mean 'sweep'?"),
    "no preset": ("pretrain --data {p}/store --out {p}/out", "name a preset first"),
    "unknown preset": ("pretrain tinny --data {p}/store --out {p}/out", "unknown preset 'tinny', did you mean 'tiny'?"),
    "unknown option": (PRETRAIN + " --optim.lrr 1", "did you mean '--optim.lr'?"),
    "option of the wrong type": (PRETRAIN + " --optim.lr fast", "error: --optim.lr takes a number, not fast"),
    "option without a value": (PRETRAIN + " --optim.lr", "--optim.lr/--lr: expected one argument"),
    "choice that is none": (PRETRAIN + " --model.decoder both", "--model.decoder takes one of none, self, cross,"),
    "rate out of range": (PRETRAIN + " --masking.rate 1.0", "masking.rate must lie between 0 and 1"),
    "negative lr": (PRETRAIN + " --optim.lr -1", "optim.lr must be positive"),
    "warm-up beyond the end": (PRETRAIN + " --optim.warmup_steps 9999999", "at least 0 and below"),
    "heads that do not divide": (PRETRAIN + " --model.num_heads 3", "not a multiple of model.num_heads"),
    "zero micro-batch": (PRETRAIN + " --runtime.micro_batch_size 0", "runtime.micro_batch_size must be positive"),
    "config key": (PRETRAIN + " --config {p}/key.yaml", "key.yaml: unknown option '--optim.learning-rate'"),
    "config type": (PRETRAIN + " --config={p}/type.yaml", "type.yaml: --optim.lr takes a number, not fast"),
    "config syntax": (PRETRAIN + " --config {p}/syntax.yaml", "syntax.yaml: cannot be read as YAML"),
    "config key twice": (PRETRAIN + " --config {p}/twice.yaml", "twice.yaml: line 2: 'lr' stands twice"),
    "short option": (PRETRAIN + " --config {p}/good.yaml --lr fast", "error: --optim.lr takes a number"),
    "config missing": (PRETRAIN + " --config {p}/none.yaml", "none.yaml: no such file"),
    "store missing": ("pretrain tiny --data {p}/none --out {p}/out", "none is not a token store"),
    "store without manifest": ("pretrain tiny --data {p}/nomanifest --out {p}/out", "no manifest.json"),
    "store truncated": ("pretrain tiny --data {p}/truncated --out {p}/out", "bytes instead of"),
    "store with a flipped bit": ("pretrain tiny --data {p}/flipped --out {p}/out", "arrow is damaged (checksum)"),
    "store with an edited manifest": ("pretrain tiny --data {p}/edited --out {p}/out", "was changed after it was"),
    "store with another tokenizer": ("pretrain tiny --data {p}/other --out {p}/out", "is not the tokenizer this store"),
    "vocabulary unlike the store's": (PRETRAIN + " --model.vocab_size 4096", "leave model.vocab_size out"),
    "sequence too long": (PRETRAIN + " --model.max_positions 16", "do not fit model.max_positions 16"),
    "run directory taken": ("pretrain tiny --data {p}/store --out {p}/notrun", "is not a run"),
    "run directory is a file": ("pretrain tiny --data {p}/store --out {p}/text.txt", "text.txt is a file"),
    "run directory in a file": ("pretrain tiny --data {p}/store --out {p}/text.txt/run", "choose another --out"),
    "run directory unwritable": ("pretrain tiny --data {p}/store --out /proc/none/run", "choose another --out"),
    "init from nothing": (PRETRAIN + " --init-from {p}/none", "no such directory"),
    "init from what is no model": (PRETRAIN + " --init-from {p}/notrun", "no config.json"),
    "init from another shape": (
        PRETRAIN + " --init-from {p}/run --model.num_heads 16",
        "model.num_heads is 16, but --init-from ",
    ),
    "init from a torn run": (PRETRAIN + " --init-from {p}/torn", "every checkpoint is damaged"),
    "seed negative": (PRETRAIN + " --seed -1", "seed must lie in"),
    "backend that cannot run": (PRETRAIN + " --runtime.backend.attention flash", "backend 'flash' cannot run"),
    "no gpu": (PRETRAIN + " --runtime.device cuda", "sees no GPU"),
    "input missing": ("data prepare {p}/none.txt --out {p}/out", "none.txt does not exist"),
    "glob without match": ("data prepare {p}/*.none --out {p}/out", "no file matches"),
    "input of an unknown kind": ("data prepare {p}/text.docx --out {p}/out", "unknown kind of file"),
    "corpus empty": ("data prepare {p}/empty.txt --out {p}/out", "no text in"),
    "corpus not UTF-8": ("data prepare {p}/latin.txt --out {p}/out", "not UTF-8"),
    "corpus broken": ("data prepare {p}/broken.txt.xz --out {p}/out", "cannot be read to its end"),
    "line that is not JSON": ("data prepare {p}/bad.jsonl --out {p}/out", "line 2 is not JSON"),
    "row without the field": ("data prepare {p}/field.jsonl --out {p}/out", "line 1 has no field 'text': set"),
    "input that is to validate itself": (PREPARE + " --validation-input {p}/text.txt", "input and a validation input"),
    "vocabulary too small": (PREPARE + " --vocab-size 100", "vocab_size must lie between 261"),
    "sequence too short": (PREPARE + " --seq-len 2", "seq_len must lie between"),
    "validation share and input": (
        PREPARE + " --validation 0.1 --validation-inputs {p}/none.txt",
        "--validation is a share of the inputs",
    ),
    "validation share of one": (PREPARE + " --validation 1.0", "validation must lie between 0 and 1"),
    "tokenizer that is none": (PREPARE + " --tokenizer {p}/tokenizer.json", "is not a tokenizer.json"),
    "store unwritable": (
        "data prepare {p}/text.txt --out /proc/none/store",
        "cannot write /proc/none: No such file or directory; choose another --out",
    ),
    "mode that is none": (PREPARE + " --mode half", "--sample-mode takes one of full, document, not half"),
    "run missing": ("fill {p}/none <mask>", "not a run directory (it does not exist)"),
    "checkpoint truncated": ("fill {p}/torn <mask>", "every checkpoint is damaged"),
    "checkpoint missing": ("fill {p}/run <mask> --step 77", "no checkpoint at step 77"),
    "text without mask": ("fill {p}/run word", "has no <mask>"),
    "text too long": ("fill {p}/run {long}", "this model takes at most"),
    "tau out of range": ("rank {p}/run --tau 0", "--tau must lie"),
    "plot of nothing": ("plot {p}/none --out {p}/out.png", "not a run directory"),
    "export format that would be wrong": ("export {p}/run --format roberta", "no relative position bias"),
    "export over something": ("export {p}/run --out {p}/notrun", "exists already"),
    "show what is no store": ("data show {p}/run", "is not a token store"),
    "nothing to fill": ("fill {p}/run", "required: TEXT ... (see"),
    "preset to show unknown": ("presets nothing", "unknown preset 'nothing'"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command, message = CASES[name]
    if name == "no gpu":
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    argv = [word.format(p=place, long="<mask>" * 400) for word in command.split()]
    before = sorted(str(p) for p in place.rglob("*"))
    assert main(argv) == 2
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if line]
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert sorted(str(p) for p in place.rglob("*")) == before
