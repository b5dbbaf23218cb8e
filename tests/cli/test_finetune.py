"""`maelm-fast finetune` as a user types it: with files of their own, and with everything that can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maelm_fast.cli.finetune import parsed
from maelm_fast.cli.main import main
from tests.finetuning import toys


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("finetune")
    toys.make_run(here / "run")
    toys.write_files(here / "data", toys.toy(toys.pair_rows, 30, 20))
    sst2 = here / "glue" / "sst2"
    sst2.mkdir(parents=True)
    for split, rows in (("train", 12), ("validation", 8)):
        lines = [{"sentence": f"good red {i}", "label": i % 2} for i in range(rows)]
        (sst2 / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (here / "label").mkdir()
    for split in ("train", "validation"):
        (here / "label" / f"{split}.jsonl").write_text('{"sentence": "a", "label": 7}\n')
    (here / "empty").mkdir()
    for split in ("train", "validation"):
        (here / "empty" / f"{split}.jsonl").write_text('{"sentence": " ", "label": 1}\n')
    (here / "key.yaml").write_text("learning_rate: 1\n")
    (here / "notes").mkdir()
    (here / "notes" / "file").write_text("something")
    return here


OWN = "--task classification --text-columns a,b --label-column y"
SMALL = "--seeds 1 --epochs 1 --device cpu --precision fp32"


def run(place: Path, command: str) -> int:
    return main(["finetune", *(word.format(p=place) for word in command.split())])


def test_files_of_ones_own_from_end_to_end(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command = f"{OWN} --name swaps --model {{p}}/run --data {{p}}/data --out {out} {SMALL} --batch-size 8 --limit 24"
    assert run(place, command) == 0
    told = capsys.readouterr().out
    assert "swaps: 24 training examples, 20 of validation" in told
    assert "a fixed random choice (--limit)" in told
    assert "majority" in told
    assert {path.name for path in out.iterdir()} >= {
        "config.yaml",
        "env.json",
        "ledger.jsonl",
        "report.json",
        "REPORT.md",
        "predictions.jsonl",
        "model",
    }
    report = json.loads((out / "report.json").read_text())
    assert report["results"][0]["config"]["batch_size"] == 8
    assert report["results"][0]["steps"] == 3
    assert run(place, command) == 0
    assert "already finished" in capsys.readouterr().out
    assert run(place, command.replace("--batch-size 8", "--batch-size 4")) == 2
    assert "was started with batch_size=8" in capsys.readouterr().err


def test_a_named_task_goes_where_its_name_says(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(place, f"sst2 --model {{p}}/run --random-init --data {{p}}/glue {SMALL}") == 0
    assert "SST-2: 12 training examples" in capsys.readouterr().out
    report = json.loads((tmp_path / "finetuned" / "run" / "sst2" / "report.json").read_text())
    assert report["model"]["random_init"] is True
    assert "randomly initialised" in (tmp_path / "finetuned" / "run" / "sst2" / "REPORT.md").read_text()


def test_every_field_is_an_option_with_dashes_or_underscores(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("lr: 0.002\nbatch_size: 3\nseeds: 2\n")
    command = f"sst2 --model m --data d --config {tmp_path}/c.yaml --max-length=64 --evaluations_per_epoch 4 --lr 1e-4"
    options, _, config = parsed(command.split())
    assert (config.lr, config.batch_size, config.max_length, config.evaluations_per_epoch) == (1e-4, 3, 64, 4)
    assert (options.seeds, options.named, config.betas) == (2, "sst2", (0.9, 0.98))


def test_help_names_tasks_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["finetune", "--help-all"])
    told = capsys.readouterr().out
    for word in ("mnli", "squad_v2", "--max-length", "--random-init", "linear warm-up"):
        assert word in told


BASE = "sst2 --model {p}/run --data {p}/glue"
CASES = {
    "no task": ("--model {p}/run --data {p}/glue", "name a task"),
    "unknown task": ("sst3 --model {p}/run --data {p}/glue", "unknown task 'sst3'"),
    "no model": ("sst2 --data {p}/glue", "required: --model"),
    "no data": ("sst2 --model {p}/run", "required: --data"),
    "unknown option": (BASE + " --batchsize 3", "did you mean '--batch-size'?"),
    "wrong type": (BASE + " --lr fast", "--lr takes a number, not fast"),
    "wrong value": (BASE + " --lr -1", "lr must be positive"),
    "no seeds": (BASE + " --seeds 0", "--seeds must be at least 1"),
    "no limit": (BASE + " --limit 0", "--limit is a number of training examples, at least 1"),
    "both kinds of task": (BASE + " --task regression", "'sst2' and --task regression"),
    "columns without kind": (BASE + " --text-columns a", "--text-columns: for files of your own"),
    "name of a task that has one": (BASE + " --name mine", "--name: for files of your own"),
    "kind without columns": ("--task classification --model {p}/run --data {p}/data", "needs --text-columns"),
    "kind without label": ("--task classification --text-columns a --model {p}/run --data {p}/data", "needs --label"),
    "unknown key in a file": (BASE + " --config {p}/key.yaml", "key.yaml: unknown option '--learning-rate'"),
    "missing model": ("sst2 --model {p}/none --data {p}/glue", "no such directory"),
    "model that is none": ("sst2 --model {p}/notes --data {p}/glue", "neither a run directory"),
    "missing step": (BASE + " --step 7", "no checkpoint at step 7; there are: 5"),
    "step of nothing": (BASE + " --random-init --step 5", "leave out --step"),
    "missing data": ("sst2 --model {p}/run --data {p}/none", "none does not exist"),
    "missing column": ("cola --model {p}/run --data {p}/data", "train.jsonl: line 1 has no field 'sentence'"),
    "unknown label": ("sst2 --model {p}/run --data {p}/label", "train.jsonl: line 1: unknown label '7'"),
    "empty text": ("sst2 --model {p}/run --data {p}/empty", "train.jsonl: line 1: 'sentence' is empty"),
    "directory taken": (BASE + " --out {p}/notes", "choose another --out"),
    "out is a file": (BASE + " --out {p}/key.yaml", "key.yaml is a file"),
    "out not writable": (BASE + " --out /proc/none", "choose another --out"),
    "engine for a run": (BASE + " --engine transformers", "export it first"),
    "no room for text": (BASE + " --max-length 7", "max_length must be at least 8"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    command, message = CASES[name]
    before = sorted(str(path) for path in place.rglob("*"))
    assert run(place, command) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert sorted(str(path) for path in place.rglob("*")) == before
