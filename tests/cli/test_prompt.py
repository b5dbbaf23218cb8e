"""The command: what it prints, writes and goes on with, and one line for what is wrong."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maelm_fast.cli import main as command_line
from maelm_fast.cli.paper import prompt
from maelm_fast.data.tokenizer import train_tokenizer
from maelm_fast.errors import UserError
from maelm_fast.paper.prompting.plan import Unit
from maelm_fast.paper.trials import Trials
from maelm_fast.work import Ledger
from tests.finetuning.small import loaded_run, run_directory

TEXT = "It was great. It was terrible. yes, no, red and blue, the man"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    bpe, root = train_tokenizer([TEXT] * 10, 330, cased=False), tmp_path_factory.mktemp("runs")
    found = {}
    for name, decoder in (("mae", "self"), ("mlm", "none")):
        found[name] = run_directory(root / name, loaded_run(bpe, num_layers=1, decoder=decoder))
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name in ("sst2", "stsb"):
        (root / name).mkdir()
        for split, count in (("train", 30), ("validation", 12)):
            rows = []
            for i in range(count):
                words = " ".join(random.choice(["red", "blue", "the", "man"], 4))
                if name == "sst2":
                    rows.append({"sentence": words, "label": i % 2, "idx": i})
                else:
                    rows.append({"sentence1": words, "sentence2": f"The {words}", "label": float(i % 6), "idx": i})
            (root / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def results(out: Path) -> list[dict[str, str]]:
    with open(out / "results.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


FEW = ["--shots=3", "--splits=2", "--steps=2", "--evaluate-every=1", "--device=cpu", "--precision=fp32"]


def test_a_table_that_goes_on_after_a_stop(
    runs: dict[str, Path],
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    argv = ["sst2", "stsb", "--model", str(runs["mae"]), "--model", f"baseline={runs['mlm']}", "--data", str(data)]
    argv += ["--out", str(out), *FEW]
    prompt_one, done = Trials.prompt, []

    def fails_at_the_sixth(self: Trials, unit: Unit, *more: Any) -> object:
        if len(done) == 5:
            raise UserError("the power went")
        done.append(unit.title)
        return prompt_one(self, unit, *more)

    with monkeypatch.context() as patch:
        patch.setattr(Trials, "prompt", fails_at_the_sixth)
        with pytest.raises(UserError, match="the power went"):
            prompt.main(argv)
    assert len(Ledger(out).rows()) == 5
    capsys.readouterr()

    assert prompt.main(argv) == 0
    printed = capsys.readouterr().out
    assert printed.count("draw 13\n") + printed.count("draw 21\n") + printed.count("zero-shot\n") == 20 - 5
    rows = Ledger(out).rows()
    assert len({row["key"] for row in rows}) == len(rows) == 2 * 2 * (1 + 2 + 2)
    text = (out / "PROMPTS.md").read_text()
    assert "- mae: packed, [MASK] in the decoder" in text
    assert "- baseline: packed, [MASK] in the encoder" in text
    found = [row for row in results(out) if row["metric"] == {"sst2": "accuracy", "stsb": "pearson"}[row["task"]]]
    asked = [row for row in found if row["model"] != "majority class"]
    assert len(asked) == 20
    assert {row["label_tokens"] for row in asked if row["task"] == "stsb" and row["mode"] != "head"} == {
        "low=Ġno high=Ġyes"
    }
    draws: dict[tuple[str, ...], list[float]] = {}
    for row in asked:
        draws.setdefault((row["model"], row["task"], row["mode"]), []).append(float(row["value"]))
        predictions = [json.loads(line) for line in (out / row["predictions"]).read_text().splitlines()]
        assert len(predictions) == 12
        if row["task"] == "sst2":
            right = np.mean([one["label"] == one["prediction"] for one in predictions])
            assert 100 * right == pytest.approx(float(row["value"]))
    for (_, _, mode), values in draws.items():
        assert len(values) == (1 if mode == "zero-shot" else 2)
        assert f" {np.mean(values):.1f}" + (f" ({np.std(values):.1f})" if len(values) > 1 else "") in text
    assert "| Model | SST-2 | STS-B (Pearson) | AVG of 2 |" in text
    assert "| *MAE-LM, as printed in the paper* | 92.4 (1.1) | 72.3 (6.5) | - |" in text
    assert "| majority class | 50.0 | 0.0 | - |" in text

    assert prompt.main(argv) == 0
    assert len(Ledger(out).rows()) == len(rows)
    assert prompt.main([*argv, "--mode", "prompt", "--lr", "1e-4"]) == 0  # another setting is other work
    assert len(Ledger(out).rows()) == len(rows) + 8


def test_prompts_are_shown_as_the_model_sees_them(
    runs: dict[str, Path], data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prompt.main(["sst2", "--model", str(runs["mae"]), "--data", str(data), "--show", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mae, SST-2: {1} It was {mask}.   negative: Ġterrible, positive: Ġgreat"
    first = json.loads((data / "sst2" / "validation.jsonl").read_text().splitlines()[0])["sentence"]
    assert lines[1] == f"  negative: <s> {' '.join(f'Ġ{word}' for word in first.split())} Ġit Ġwas <mask> . </s>"
    assert len(lines) == 3


def test_a_task_of_ones_own(runs: dict[str, Path], data: Path, tmp_path: Path) -> None:
    argv = [
        "--task",
        "classification",
        "--text-columns",
        "sentence",
        "--label-column",
        "label",
        "--data",
        str(data / "sst2"),
        "--model",
        str(runs["mae"]),
        "--mode",
        "zero-shot",
        "--out",
        str(tmp_path / "out"),
        "--template",
        "{mask}, {1l}",
        "--label-words",
        "no,yes",
    ]
    assert prompt.main(argv) == 0
    assert "0: no, 1: yes" in (tmp_path / "out" / "PROMPTS.md").read_text()
    assert {row["label_tokens"] for row in results(tmp_path / "out")} == {"", "0=Ġno 1=Ġyes"}
    with pytest.raises(UserError, match="custom has no template: give --template and --label-words"):
        prompt.main(argv[:-4])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["sst2"], "--out is needed"),
        (["--out", "x"], "name a task, one of"),
        (["squad_v2", "--out", "x"], "squad_v2 is no prompting task"),
        (["sst3", "--out", "x"], "unknown task 'sst3'"),
        (["sst2", "stsb", "--out", "x", "--template", "{1} {mask}"], "--template is for one task"),
        (["sst2", "--out", "x", "--template", "{1}"], "needs {mask} once"),
        (["sst2", "--out", "x", "--label-words", "one,two,three"], "names 3 words, sst2 has 2 classes"),
        (
            ["sst2", "--out", "x", "--mode", "zero-shot", "--label-words", "splendid,great"],
            "mae, sst2: label word 'splendid' of class 'negative'",
        ),
        (["sst2", "--out", "x", "--mode", "few"], "--mode: invalid choice: 'few'"),
        (["sst2", "--out", "x", "--lr", "fast"], "--lr: invalid float value: 'fast'"),
        (["sst2", "--out", "x", "--shots", "9"], "15 training examples of 'negative', but 9 to train on and 9 others"),
        (["sst2", "--out", "x", "--steps", "150"], "multiple of evaluate_every"),
        (["sst2", "--out", "x", "--show", "0"], "--show must be at least 1"),
        (["rte", "--out", "x"], "no folder rte"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    runs: dict[str, Path],
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command_line.main(["paper", "prompt", *options, "--model", str(runs["mae"]), "--data", str(data)]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert "\n" not in error
    assert message in error
    assert not (tmp_path / "x").exists()


def test_a_place_that_cannot_be_written(
    runs: dict[str, Path], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    argv = ["paper", "prompt", "sst2", "--model", str(runs["mae"]), "--data", str(data), "--mode", "zero-shot"]
    assert command_line.main([*argv, "--out", str(tmp_path / "file")]) == 2
    assert "choose another --out" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "predictions").write_text("")
    assert command_line.main([*argv, "--out", str(tmp_path / "out")]) == 2
    assert "predictions" in capsys.readouterr().err
    assert Ledger(tmp_path / "out").rows() == []


def test_cut_inputs_are_told(runs: dict[str, Path], data: Path, tmp_path: Path) -> None:
    argv = ["sst2", "--model", str(runs["mae"]), "--data", str(data), "--out", str(tmp_path), "--mode", "prompt", *FEW]
    assert prompt.main([*argv, "--max-length", "8"]) == 0
    assert "| SST-2 | 30 | validation: 12 | accuracy | validation: 12 of 12 |" in (tmp_path / "PROMPTS.md").read_text()


def test_two_models_of_one_name(runs: dict[str, Path], data: Path, tmp_path: Path) -> None:
    model = ["--model", str(runs["mae"])]
    with pytest.raises(UserError, match="two models are called 'mae': name them as --model LABEL=DIR"):
        prompt.main(["sst2", *model, *model, "--data", str(data), "--out", str(tmp_path / "x")])
