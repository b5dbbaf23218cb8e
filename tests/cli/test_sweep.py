"""`maelm-fast paper sweep` as a user types it: files in, tables out, real training of a tiny encoder."""

from __future__ import annotations

import csv
import json
import shutil
import signal
from pathlib import Path

import pytest

from maelm_fast.cli.main import main
from maelm_fast.finetuning.fingerprint import deciding
from maelm_fast.stop import Stopped
from maelm_fast.work import Ledger
from tests.finetuning import toys

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

OWN = ["--task", "classification", "--text-columns", "a", "--label-column", "y", "--name", "toy"]
CPU = ["--device", "cpu", "--precision", "fp32"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, one whose checkpoint is damaged, a task's files, a grid of two cells."""
    here = tmp_path_factory.mktemp("sweep")
    toys.make_run(here / "mae")
    shutil.copytree(here / "mae", here / "torn")
    (here / "torn" / "checkpoints" / "step_5" / "model.safetensors").write_bytes(b"")
    toys.write_files(here / "data", toys.toy(toys.content_rows, train=96, validation=40))
    (here / "grid.yaml").write_text("lr: [1e-5, 5e-3]\nepochs: 6\nbatch_size: 8\nevaluations_per_epoch: 1\n")
    return here


def command(place: Path, out: Path, *more: str) -> list[str]:
    files = ["--data", str(place / "data"), "--grid", str(place / "grid.yaml"), "--out", str(out)]
    return ["paper", "sweep", *OWN, *CPU, *files, *more]


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_planned_run_reported_and_done(
    workers: str, place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, seeds = tmp_path / "out", ["--seeds", "1"]
    line = command(place, out, "--model", f"MAE-LM={place / 'mae'}", "--random-init", str(place / "mae"), *seeds)
    assert main([*line, "--plan"]) == 0
    shown = capfd.readouterr().out
    assert "4 runs, 4 unfinished: no estimate before a run is finished" in shown
    assert "lr 1e-05/0.005" in shown
    assert not out.exists()

    assert main([*line, "--workers", workers]) == 0
    assert "| **MAE-LM** |" in capfd.readouterr().out
    rows = Ledger(out).rows()
    assert len(rows) == len({row["key"] for row in rows}) == 4
    with open(out / "results.csv", newline="") as file:
        written = [row for row in csv.DictReader(file) if row["metric"] == "accuracy"]
    assert [row["status"] for row in written] == ["finished"] * 4
    best = [row for row in written if row["best"] == "True"]
    for entry in best:
        values = {row["result"]["best"] for row in rows if row["model"] == entry["model"]}
        assert float(entry["value"]) == max(values)
    assert [row["model"] for row in best] == ["MAE-LM", "mae, random init"]
    assert float(best[0]["value"]) > 90, "a word tells the class, and the higher learning rate finds it"
    assert float(best[0]["lr"]) == 5e-3
    text = (out / "SWEEP.md").read_text()
    majority = next(line for line in text.splitlines() if line.startswith("| no model: majority"))
    assert 50 <= float(majority.split("|")[2]) <= 70
    assert f"maelm-fast finetune --model {place / 'mae'} --step 5 --lr 0.005 --epochs 6 --batch_size 8" in text
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    table = (out / "results.csv").read_text()
    assert main(line) == 0
    assert "4 runs, 0 unfinished" in capfd.readouterr().out
    assert len(Ledger(out).rows()) == 4
    assert (out / "results.csv").read_text() == table


def test_workers_record_what_fails_once(place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Real processes, whose runs end early: the run's tokenizer is not one."""
    shutil.copytree(place / "mae", tmp_path / "mae")
    (tmp_path / "mae" / "tokenizer.json").write_text("{}")
    out = tmp_path / "out"
    line = command(place, out, "--model", str(tmp_path / "mae"), "--seeds", "3", "--workers", "2")
    assert main(line) == 1
    assert "6 of 6 runs failed" in capfd.readouterr().out
    rows = Ledger(out).rows()
    assert len(rows) == len({row["key"] for row in rows}) == 6
    assert all("tokenizer.json" in row["error"] for row in rows)


def test_the_commands_of_the_report_are_commands(place: Path, tmp_path: Path) -> None:
    assert main(command(place, tmp_path / "out", "--model", str(place / "mae"), "--seeds", "1", "--budget", "1")) == 0
    text = (tmp_path / "out" / "SWEEP.md").read_text()
    assert "(--budget): toy 1 of 2." in text
    words = next(line for line in text.splitlines() if line.startswith("maelm-fast finetune")).split()
    from maelm_fast.cli.finetune import parsed

    options, own, config = parsed(words[2:])
    with open(tmp_path / "out" / "results.csv", newline="") as file:
        entry = next(csv.DictReader(file))
    for name, value in deciding(config).items():
        if name != "seed":
            assert (json.loads(entry[name]) if name == "betas" else type(value)(entry[name])) == value, name
    assert (options.data, options.model, options.step) == (str(place / "data"), str(place / "mae"), 5)
    assert (own.task, own.text_columns, own.label_column) == ("classification", "a", "y")


def test_the_papers_rows_stand_beside(place: Path, tmp_path: Path) -> None:
    data = tmp_path / "sst2"
    data.mkdir()
    for split in ("train", "validation"):
        rows = [json.loads(line) for line in (place / "data" / f"{split}.jsonl").read_text().splitlines()]
        lines = [json.dumps({"sentence": row["a"], "label": row["y"]}) for row in rows[:24]]
        (data / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "grid.yaml").write_text("epochs: 1\n")
    line = ["paper", "sweep", "sst2", *CPU, "--model", str(place / "mae"), "--data", str(place), str(tmp_path)]
    line += ["--seeds", "1", "--grid", str(tmp_path / "grid.yaml"), "--out", str(tmp_path / "out")]
    assert main([*line, "--paper", "base"]) == 0
    text = (tmp_path / "out" / "SWEEP.md").read_text()
    assert "| model | SST-2 | AVG |" in text
    assert "| paper, base: MAE-LM | 93.8 | 86.1 |" in text
    assert "AVG: over GLUE's eight tasks" in text


def test_stopped_before_anything_began(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> None:
        raise Stopped(received=signal.SIGINT)

    monkeypatch.setattr("maelm_fast.cli.paper.sweep.run_sweep", stopped)
    assert main(command(place, tmp_path / "out", "--model", str(place / "mae"), "--seeds", "1")) == 130
    assert "stopped with 2 of 2 runs unfinished" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_failed_run_is_exit_code_1(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    line = command(place, tmp_path / "out", "--model", str(place / "mae"), "--seeds", "1")
    monkeypatch.setattr("maelm_fast.paper.sweep._Worker.do", fails)
    assert main(line) == 1
    assert "2 of 2 runs failed; the same command tries them again" in capsys.readouterr().out
    assert "RuntimeError: out of memory" in (tmp_path / "out" / "SWEEP.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "the following arguments are required: --data, --grid, --out"),
        ("--data {p}/data --grid quick --out {o}", "--model is needed"),
        ("--data {p}/data --grid quick --out {o} --model {p}/mae", "name a task"),
        ("sst3 --data {p}/data --grid quick --out {o} --model {p}/mae", "unknown task 'sst3'"),
        ("sst2 --data {p}/data --grid best --out {o} --model {p}/mae", "unknown grid 'best'"),
        ("sst2 --data {p}/data --grid quick --out {o} --model {p}/none", "none: no such directory"),
        (
            "sst2 --data {p}/data --grid quick --out {o} --model {p}/mae@6",
            "no checkpoint at step 6; there are: 5",
        ),
        ("sst2 --data {p}/data --grid quick --out {o} --model {p}/mae@last", "a checkpoint's step, not 'last'"),
        ("sst2 --data {p}/data --grid quick --out {o} --model {p}/data", "neither a run directory"),
        ("sst2 --data {p}/data --grid quick --out {o} --random-init {p}/mae@5", "random weights have no step"),
        ("sst2 --data {p}/data --grid quick --out {o} --model {p}/mae", "has no field 'sentence'"),
        ("sst2 --task regression --data {p} --grid quick --out {o} --model {p}/mae", "'sst2' and --task regression"),
        ("sst2 --data {p} {p}/data --grid quick --out {o} --model {p}/mae", "no folder sst2"),
        ("--task regression --data {p} --grid quick --out {o} --model {p}/mae", "needs --text-columns"),
        ("sst2 cola --train x.tsv --data {p} --grid quick --out {o} --model {p}/mae", "name one task"),
        ("{own} --data {p}/data --grid quick --out {o} --model {p}/mae --seeds 0", "--seeds must be"),
        ("{own} --data {p}/data --grid quick --out {o} --model {p}/mae --budget 0", "--budget must be"),
        ("{own} --data {p}/data --grid quick --out {o} --model {p}/mae --workers 0", "--workers must be"),
        ("{own} --data {p}/data --grid quick --out /proc/none --model {p}/mae", "choose another --out"),
        ("{own} --data {p}/data --grid quick --out {p}/grid.yaml --model {p}/mae", "choose another --out"),
        ("{own} --name sst2 --data {p}/data --grid quick --out {o} --model {p}/mae", "name of another task"),
        ("sst2 --data {p} --data {p}/data --grid quick --out {o} --model {p}/mae", "no folder sst2"),
        ("{own} --data {p}/data --grid quick --out {o} --model {p}/mae --model {p}/mae", "two models"),
        ("{own} --data {p}/data --grid quick --out {o} --model {p}/torn", "every checkpoint is damaged"),
    ],
)
def test_bad_input_is_one_line(
    arguments: str, message: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = arguments.format(p=place, o=tmp_path / "out", own=" ".join(OWN)).split()
    assert main(["paper", "sweep", *words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("WARNING")]
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "out").exists()
