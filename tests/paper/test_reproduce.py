"""`maelm-fast paper` end to end, a few updates a run: what it writes, and that nothing is lost or done twice."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from maelm_fast import presets, work
from maelm_fast.cli.main import main
from maelm_fast.cli.paper.experiment import duration
from maelm_fast.data.token_store import Manifest
from maelm_fast.errors import UserError
from maelm_fast.paper import catalogue, run, scales
from maelm_fast.paper.figures import draw
from maelm_fast.paper.plan import PRETRAINING, Plan, make_plan
from maelm_fast.paper.report import rank_cells, report
from maelm_fast.paper.results import Results
from maelm_fast.training.rundir import RunDir
from maelm_fast.training.trainer import Trainer
from maelm_fast.work import Ledger
from tests.waiting import HANG

pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[2]
UPDATES = 4


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrower model, and a calibration that takes no time."""
    smoke = scales.smoke()

    def narrow() -> scales.Scale:
        settings = {
            name: scales.Setting(presets.change(s.config, model={"hidden_size": 48, "ffn_size": 48}), s.corpus, s.grid)
            for name, s in smoke.settings.items()
        }
        return scales.Scale(**{**vars(smoke), "settings": settings, "rank_samples": 16})

    monkeypatch.setitem(scales.SCALES, "smoke", narrow)
    monkeypatch.setattr("maelm_fast.paper.cost.measured_rate", lambda config: 1e9)


def command(experiment: str, store: Path, out: Path, *options: str) -> list[str]:
    return [
        "paper",
        experiment,
        "--scale",
        "smoke",
        "--data",
        str(store),
        "--out",
        str(out),
        "--steps",
        str(UPDATES),
        *options,
    ]


def placed(experiment: str, store: Path, out: Path, seeds: int = 1) -> Plan:
    plan = make_plan(catalogue.get(experiment), scales.get("smoke"), seeds, UPDATES)
    return run.place_data(plan, str(store), out)


def never(*_: object, **__: object) -> Any:
    raise AssertionError("this was finished already")


def test_figure_5_from_start_to_report_and_again(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command("fig5", store, tmp_path)) == 0
    text = (tmp_path / "fig5" / "REPORT.md").read_text()
    assert "mean nothing" in text.splitlines()[0]
    assert "Figure 5(b), ranks after fine-tuning on MNLI, is missing" in text
    assert (tmp_path / "fig5" / "figure.png").read_bytes().startswith(b"\x89PNG")
    results = Results(placed("fig5", store, tmp_path), Ledger(tmp_path))
    assert not results.unfinished()
    mlm, mae_lm = results.plan.rows
    ranks = results.layers(mlm, "with_mask")[0]
    assert "| MLM | with [MASK] | " + " | ".join(map(str, ranks)) + " |" in text
    assert len(results.layers(mae_lm, "visible")[0]) == 4
    losses = [row["val_loss"] for row in run.run_dir(tmp_path, results.plan.cells[0]).metrics() if "val_loss" in row]
    assert results.of_row(mlm, "val_loss") == losses[-1:]
    assert f"| MLM | {losses[-1]:.3f} |" in text

    monkeypatch.setattr(run, "pretrain", never)
    monkeypatch.setattr(run, "measure", never)
    assert main(command("fig5", store, tmp_path)) == 0
    assert main(command("fig1", store, tmp_path)) == 0  # the same MLM
    assert "1 runs" in capsys.readouterr().out


def test_killed_between_pretraining_and_measurement(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> Any:
        raise SystemExit(9)

    with monkeypatch.context() as patch:
        patch.setattr(run, "measure", killed)
        with pytest.raises(SystemExit):
            main(command("fig1", store, tmp_path))
    assert [row["stage"] for row in Ledger(tmp_path).rows()] == [PRETRAINING]
    monkeypatch.setattr(run, "pretrain", never)
    assert main(command("fig1", store, tmp_path)) == 0
    assert [row["stage"] for row in Ledger(tmp_path).rows()] == [PRETRAINING, f"rank at {UPDATES}"]


def test_a_ledger_without_its_runs_is_pretrained_again_for_what_is_left(store: Path, tmp_path: Path) -> None:
    whole, copy = tmp_path / "whole", tmp_path / "copy"
    assert main(command("fig1", store, whole)) == 0
    pretrained, ranks = Ledger(whole).rows()
    copy.mkdir()
    Ledger(copy).append(pretrained)
    assert main(command("fig1", store, copy)) == 0
    assert [(row["stage"], row["result"]) for row in Ledger(copy).rows()] == [
        (row["stage"], row["result"]) for row in (pretrained, ranks)
    ]


def test_a_signal_saves_and_the_same_command_goes_on(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command("fig1", store, tmp_path / "whole")) == 0
    evaluate = Trainer.evaluate

    def and_kill(self: Trainer) -> None:
        evaluate(self)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", and_kill)
        assert main(command("fig1", store, tmp_path / "cut")) == 143
    assert Ledger(tmp_path / "cut").rows() == []
    assert "stopped with 1 of 1 runs unfinished" in capsys.readouterr().out
    monkeypatch.setattr("maelm_fast.paper.cost.measured_rate", lambda config: 1.0)
    days = []
    for out in (tmp_path / "new", tmp_path / "cut"):
        assert main(command("fig1", store, out, "--plan")) == 0
        (shown,) = re.findall(r"1 unfinished, about ([\d,]+) days", capsys.readouterr().out)
        days.append(int(shown.replace(",", "")))
    assert 0 < days[1] < 0.8 * days[0]
    assert main(command("fig1", store, tmp_path / "cut")) == 0
    assert "resuming from step " in capsys.readouterr().out
    keys = ("val_loss", "step", "tokens")
    whole, cut = (Ledger(tmp_path / name).rows()[0]["result"] for name in ("whole", "cut"))
    assert [whole[key] for key in keys] == [cut[key] for key in keys]


def test_a_run_that_fails_is_recorded_and_costs_only_itself(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = run.pretrain

    def fails_for_mlm(config: Any, *rest: Any, **options: Any) -> Any:
        if config.model.decoder == "none":
            raise UserError("no space left")
        return real(config, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(run, "pretrain", fails_for_mlm)
        assert main(command("fig5", store, tmp_path)) == 1
    text = (tmp_path / "fig5" / "REPORT.md").read_text()
    assert "- Failed: MLM, seed 0, pretraining: no space left" in text
    assert "| MAE-LM | without [MASK]: all tokens real |" in text
    assert main(command("fig5", store, tmp_path)) == 0
    assert "Failed" not in (tmp_path / "fig5" / "REPORT.md").read_text()


OTHER_PROCESS = """
import os, sys, time
from pathlib import Path
from maelm_fast.work import Ledger, lock
parent = os.getppid()
out, held, rows, key, *stages = Path(sys.argv[1]), *sys.argv[2:]
with lock(out / "locks" / f"{held}.lock") as ours:
    print("held" if ours else "not held", flush=True)
    while len(Ledger(out).rows()) < int(rows):
        assert os.getppid() == parent
        time.sleep(0.05)
    for stage, config in (pair.split("=") for pair in stages):
        Ledger(out).append({"key": key, "stage": stage, "config": config, "result": {}})
"""


@pytest.mark.parametrize("theirs", ["a run", "a measurement of it"])
def test_what_another_process_works_on_is_left_to_it(
    theirs: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the lock of its part until everything else is in the ledger."""
    plan = placed("fig5", store, tmp_path)
    first, second = plan.runs
    parts = list(first.stages.items())[0 if theirs == "a run" else 1 :]
    everything = len(first.stages) + len(second.stages)
    other = subprocess.Popen(
        [
            sys.executable,
            "-c",
            OTHER_PROCESS,
            str(tmp_path),
            parts[0][1],
            str(everything - len(parts)),
            first.key,
            *map("=".join, reversed(parts)),  # what needs the run first, so that we find it done when we find the run
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    monkeypatch.setattr(work, "_POLL_SECONDS", 0.05)
    run.run_plan(plan, tmp_path)
    assert other.wait(HANG) == 0
    rows = [(row["key"], row["stage"], row["config"]) for row in Ledger(tmp_path).rows()]
    assert rows[-len(parts) :] == [(first.key, *part) for part in reversed(parts)]
    assert sorted(rows) == sorted((cell.key, *part) for cell in plan.runs for part in cell.stages.items())
    assert len(list((tmp_path / "runs").iterdir())) == (1 if theirs == "a run" else 2)


def test_what_fails_is_not_tried_again_until_the_next_command(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = placed("fig5", store, tmp_path)
    first, second = plan.runs
    Ledger(tmp_path).append({"key": second.key, "stage": PRETRAINING, "config": second.key, "error": "an old one"})

    def another_process_fails(config: Any, *_: object, **__: object) -> Any:
        Ledger(tmp_path).append({"key": second.key, "stage": PRETRAINING, "config": second.key, "error": "theirs"})
        raise UserError("ours")

    monkeypatch.setattr(run, "pretrain", another_process_fails)
    run.run_plan(plan, tmp_path)
    rows = [(row["key"], row["error"]) for row in Ledger(tmp_path).rows()]
    assert rows == [(second.key, "an old one"), (second.key, "theirs"), (first.key, "ours")]


def test_a_plan_is_shown_and_nothing_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["paper", "table2", "--scale", "smoke", "--plan", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "14 runs" in shown
    assert "measured just now" in shown
    assert "The GLUE column of our own is missing" in shown
    assert main(["paper", "table1", "--scale", "full", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "only planned: scale full starts when --run is given" in shown
    assert "131.1B" in shown
    assert main(["paper", "fig4", "--scale", "smoke", "--rows", "0.5", "0", "--plan", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "2 runs" in shown
    assert "not asked for: 0.25; 0.75; 1" in shown
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("fig2 --scale smoke", "unknown command 'fig2', did you mean 'fig"),
        ("fig1 --scale tiny", "unknown scale 'tiny'"),
        ("fig1", "--scale"),
        ("fig1 --scale smoke --seeds 0", "--seeds must be at least 1"),
        ("table2 --scale smoke --rows MAE", "its rows: 'MAE-LM base' 'enc. w. [MASK] (i.e., MLM)'"),
        ("fig1 --scale cpu --out {out}", "--data is needed at scale cpu"),
        ("fig1 --scale smoke --data {out}/none --out {out}/out", "none does not exist"),
        ("fig1 --scale smoke --data {empty} --out {out}/out", "neither a token store nor a directory of text"),
        ("fig1 --scale smoke --data {store} --out /proc/none", "choose another --out"),
        ("table1 --scale full --run --data {store} --out {out}", "needs stores uncased-32768-512 and cased-64000-512"),
    ],
)
def test_bad_input_is_one_line(
    arguments: str, message: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"out": tmp_path / "out", "store": store, "empty": tmp_path / "empty"}
    assert main(["paper", *arguments.format(**places).split()]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1
    assert message in err[0]
    assert not (tmp_path / "out" / "runs").exists()


def test_a_directory_of_text_becomes_a_store_once(
    text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    shutil.copy(text_file, texts / "train.txt")
    (texts / "validation.txt").write_text(text_file.read_text()[:20_000])
    (texts / "README").write_text("not text to train on")
    plan = make_plan(catalogue.get("fig1"), scales.get("smoke"))
    first = run.place_data(plan, str(texts), tmp_path / "out")
    manifest = Manifest.read(Path(first.cells[0].data))
    assert [Path(i["source"]).name for i in manifest.options["inputs"]] == ["train.txt"]
    assert [Path(i["source"]).name for i in manifest.options["validation_inputs"]] == ["validation.txt"]
    assert first.cells[0].config.model.vocab_size == manifest.vocab_size < plan.cells[0].config.model.vocab_size
    assert run.place_data(plan, str(texts), tmp_path / "out") == first
    cell = first.cells[0]
    for i, (stage, config) in enumerate(cell.stages.items()):
        Ledger(tmp_path / "out").append({"key": cell.key, "stage": stage, "config": config, "result": {}})
        capsys.readouterr()
        assert (
            main(["paper", "fig1", "--scale", "smoke", "--data", str(texts), "--out", str(tmp_path / "out"), "--plan"])
            == 0
        )
        shown = capsys.readouterr().out
        assert "not prepared yet" not in shown
        assert ("finished" in shown.split("MLM", 2)[2].splitlines()[0]) == (i == 1)
    (texts / "train.txt").write_text(text_file.read_text() * 2)
    with pytest.raises(UserError, match="prepared differently"):
        run.place_data(plan, str(texts), tmp_path / "out")


PAPER_VALUES = {
    "table1": ["| RoBERTa (Ours) | 85.9/85.8 |", "| MAE-LM | 89.1/89.1 |", "MAE-LM (base++)"],
    "table2": [
        "| Handling [MASK] | random replace w. real token | masking.policy=random | 85.1 | missing |",
        "cannot be compared",
    ],
    "table6": ["| BART | 89.9/90.1 |"],
    "table7": ["| MAE-LM | 70.7 (2.0)/73.3 (1.8) |", "prompting"],
    "fig3": ["MNLI accuracy of fine-tuned checkpoints, is missing"],
    "fig4": ["GLUE average and SQuAD EM, are missing", "masking.shown=0.25"],
    "fig6": ["MLM, BERT masking"],
    "fig1": ["[MASK] positions alone"],
    "fig5": ["Figure 5(b)"],
}


@pytest.mark.parametrize("name", catalogue.EXPERIMENTS)
def test_every_report_and_figure(name: str, store: Path, tmp_path: Path) -> None:
    """Drawn from a ledger of made-up results, of two seeds, once with a row that is not finished."""
    plan, ledger = placed(name, store, tmp_path, seeds=2), Ledger(tmp_path)
    for i, cell in enumerate(plan.runs):
        ranks = {n: [5 + i, 4 + i, 3] for n in ("with_mask", "without_mask", "visible", "mask_positions")}
        curve = [{"step": s, "tokens": 100 * s, "seconds": float(s), "val_loss": 9.0 - s} for s in (2, UPDATES)]
        outcome = {
            **{"step": 4, "tokens": 400, "val_loss": 7.125 + i, "val_accuracy": 0.5, "unigram_nats": 6.0},
            **{"seconds": 2.0, "curve": curve, "device": "some CPU", "precision": "fp32", "threads": 1, "commit": None},
            "torch": "2",
        }
        for stage, config in list(cell.stages.items())[: 1 if i == len(plan.runs) - 1 else None]:
            result = outcome if stage == PRETRAINING else {"ranks": ranks, "step": 4}
            ledger.append({"key": cell.key, "stage": stage, "config": config, "result": result})
    results = Results(plan, ledger)
    text = report(results, run.manifests(plan), {cell.key: "somewhere" for cell in plan.cells})
    for value in [*PAPER_VALUES[name], "| some CPU, fp32, 1 threads, torch 2 |", "- Not finished: ", "200"]:
        assert value in text, value
    draw(results, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_a_report_says_which_rows_were_not_asked_for(store: Path, tmp_path: Path) -> None:
    plan = make_plan(catalogue.get("fig4"), scales.get("smoke"), steps=UPDATES, labels=["0", "0.5"])
    plan = run.place_data(plan, str(store), tmp_path)
    lines = report(Results(plan, Ledger(tmp_path)), run.manifests(plan), {}).splitlines()
    assert "- Not asked for (`--rows`): 0.25; 0.75; 1." in lines
    rows = [line for line in lines if line.startswith("| 0")]
    assert [row.split(" | ")[0] for row in rows] == ["| 0", "| 0.5"]


def test_rows_that_do_not_differ_are_called_out(store: Path, tmp_path: Path) -> None:
    """As when an option is parsed and ignored."""
    plan, ledger = placed("fig5", store, tmp_path, seeds=2), Ledger(tmp_path)
    for cell, loss in zip(plan.runs, (6.0, 5.0, 5.5, 5.0), strict=True):  # MLM with seeds 0 and 1, then MAE-LM
        ledger.append({"key": cell.key, "stage": PRETRAINING, "config": cell.key, "result": {"val_loss": loss}})
    (pair,) = Results(plan, ledger).equal_losses()
    assert pair == (plan.runs[1], plan.runs[3])


def test_the_time_of_an_evaluation_between_two_logged_updates(tmp_path: Path) -> None:
    """It is on the straight line between them, not the later one's."""
    directory = RunDir(tmp_path)
    logged = [(1, 10, 5.0), (50, 500, 49.0), (100, 1000, 50.0)]  # 2 s, 10 s more, 10 s more
    rows: list[dict[str, Any]] = [
        {"kind": "train", "step": step, "tokens": tokens, "tokens_per_s": rate} for step, tokens, rate in logged
    ]
    rows += [
        {
            "kind": "validation",
            "step": step,
            "tokens": 10 * step,
            "val_loss": 5.0,
            "val_accuracy": 0.1,
            "unigram_nats": 6.0,
        }
        for step in (60, 100)
    ]
    directory.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {"device": "CPU", "precision": "fp32", "threads": 1, "commit": None, "packages": {"torch": "2"}}
    directory.env_file.write_text(json.dumps([environment]))
    result = run.pretraining_result(directory)
    assert [point["seconds"] for point in result["curve"]] == pytest.approx([14.0, 22.0])
    assert result["seconds"] == pytest.approx(22.0)


def test_ranks_over_seeds() -> None:
    assert rank_cells([[9, 5, 2], [9, 8, 3]]) == ["9", "6.5 [5, 8]", "2.5 [2, 3]"]
    assert rank_cells([[9, 5]]) == ["9", "5"]


def test_durations() -> None:
    assert [duration(s) for s in (5, 89.9, 600, 7200, 864_000)] == ["5 s", "90 s", "10 min", "2.0 h", "10 days"]
