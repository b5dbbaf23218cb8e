"""Sweeps: which runs, in which order, none lost, none done twice, and the tables say what the runs did.

Training is a stand-in here, a formula of the cell and the seed, but for the last test; tests/cli/test_sweep.py has more
of the real one.
"""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maelm_fast import work
from maelm_fast.errors import UserError
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.examples import Examples, TaskData
from maelm_fast.finetuning.fingerprint import Origin
from maelm_fast.finetuning.tasks import TASKS
from maelm_fast.paper import sweep as module
from maelm_fast.paper import trials
from maelm_fast.paper.catalogue import GLUE
from maelm_fast.paper.grids import Grid
from maelm_fast.paper.scores import averages
from maelm_fast.paper.sweep import Run, Sweep, estimate, make_sweep, run_sweep
from maelm_fast.paper.sweep_report import draw, results, write_tables
from maelm_fast.reporting import where
from maelm_fast.stop import Stopped
from maelm_fast.work import Ledger
from tests.finetuning import toys
from tests.waiting import HANG, wait_until

Worker = module._Worker
GRID = Grid("mine", "a test's", {"lr": (1e-4, 2e-4, 3e-4), "epochs": (2, 4)})
MODELS = (Origin("mlm", 20, "auto", False, "MLM", "aaa"), Origin("mae", 20, "auto", False, "MAE-LM", "bbb"))


def data(name: str, n: int = 4) -> TaskData:
    task = TASKS[name]
    texts = tuple([f"{column} {i}" for i in range(n)] for column in task.text_columns)
    labels = np.arange(n) % 2
    split = Examples(task, "train", f"{name}.tsv", [str(i) for i in range(n)], texts, labels)
    return TaskData(task, split, dict.fromkeys(task.validation, split), (f"a note on {name}",))


def small(tasks: tuple[str, ...] = ("sst2", "cola"), seeds: int = 3, **options: Any) -> Sweep:
    return make_sweep(GRID, MODELS, [data(task) for task in tasks], seeds, **options)


def value(run: Run) -> float:
    """What the stand-in scores: cell 4 is best for MLM and cell 2 for MAE-LM; seeds are not in order, and
    their mean is not their median."""
    best = 4 if run.model.label == "MLM" else 2
    return 90.0 - 3.0 * abs(run.cell.number - best) + (0.5, -1.0, 2.5, 0.25, -0.75)[run.seed]


def result(run: Run, score: float) -> dict[str, Any]:
    task = run.data.task
    metrics = {
        split: {metric: score - 10.0 * i - j for j, metric in enumerate(task.metrics)}
        for i, split in enumerate(run.data.validation)
    }
    for split, found in metrics.items():
        found[task.metric] = score - (1.0 if split.endswith("mismatched") else 0.0)
    return {
        **{"metric": task.metric, "best": score, "last": score - 1.5, "metrics": metrics, "steps": 10},
        **{"seconds": 2.0 * run.config.epochs, "seconds_in_all": 3.0 * run.config.epochs, "examples_per_s": 5.0},
        **{"truncation": {"max_length": 512, "train": {"inputs": 4, "cut": 1, "cut_tokens": 7, "longest": 519}}},
    }


def stand_in(_: Any, run: Run, *more: Any) -> dict[str, Any]:
    return result(run, value(run))


def best_cell(sweep: Sweep, out: Path) -> int:
    """Of MLM."""
    (cell,) = set(where(results(sweep, *Ledger(out).ended()), model="MLM", best=True)["cell"])
    return int(cell)


def titles(out: Path) -> list[tuple[Any, ...]]:
    return [(row["model"], row["task"], row["cell"], row["seed"]) for row in Ledger(out).rows()]


def test_every_cell_has_a_seed_before_any_has_two() -> None:
    sweep = small()
    assert len(sweep.runs) == len({run.key for run in sweep.runs}) == 2 * 2 * 6 * 3
    assert [run.seed for run in sweep.runs] == [0] * 24 + [1] * 24 + [2] * 24
    first = sweep.runs[:12]
    assert [run.data.task.name for run in first] == ["sst2"] * 12
    assert [(run.cell.number, run.model.label) for run in first[:4]] == [
        *((1, "MLM"), (1, "MAE-LM"), (2, "MLM"), (2, "MAE-LM"))
    ]
    assert all(run.config.seed == run.seed and run.config.lr == run.cell.values["lr"] for run in sweep.runs)


def test_a_key_is_what_decides_the_result() -> None:
    def keys(**options: Any) -> set[str]:
        return {run.key for run in small(**options).runs}

    usual = keys()
    assert keys() == usual
    assert keys(base=FinetuneConfig(device="cpu", precision="fp32", micro_batch_tokens=100)) == usual
    assert not keys(base=FinetuneConfig(dropout=0.2)) & usual
    assert keys(seeds=2) < usual
    assert keys(budget=2) < usual
    for change in ({"fingerprint": "ccc"}, {"random_init": True}, {"engine": "packed"}):
        other = make_sweep(GRID, [replace(m, **change) for m in MODELS], [data("sst2")], 3)
        assert not {run.key for run in other.runs} & usual
    other = make_sweep(GRID, MODELS, [data("sst2", n=6)], 3)
    assert not {run.key for run in other.runs} & usual
    renamed = make_sweep(GRID, [replace(m, label=m.label + "!") for m in MODELS], [data("sst2"), data("cola")], 3)
    assert {run.key for run in renamed.runs} == usual, "a label decides nothing"


def test_medians_and_best_cells_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "do", stand_in)
    sweep = small()
    run_sweep(sweep, tmp_path)
    assert len(titles(tmp_path)) == 72
    rows = results(sweep, *Ledger(tmp_path).ended())
    best = where(rows, model="MAE-LM", task="sst2", metric="accuracy", best=True)
    assert best["value"].tolist() == [90.5, 89.0, 92.5]
    assert best[["cell", "lr", "epochs", "seed"]].values.tolist() == [[2, 1e-4, 4, seed] for seed in range(3)]
    write_tables(
        sweep,
        tmp_path,
        [("the paper's", {"SST-2": "93.8", "QQP": "91.6", "AVG": "86.1"})],
        {"sst2": {"majority": {"accuracy": 50.917}}},
    )
    text = (tmp_path / "SWEEP.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows[0] == "| model | SST-2 | CoLA | AVG |"
    assert rows[2:6] == [
        "| the paper's | 93.8 | - | 86.1 |",
        "| **MLM** | 90.5 [89.0, 92.5] | 90.5 [89.0, 92.5] | - |",
        "| **MAE-LM** | 90.5 [89.0, 92.5] | 90.5 [89.0, 92.5] | - |",
        "| no model: majority | 50.9 | - | - |",
    ]
    found = "90.5 [89.0, 92.5] | 3 of 3 | 6 of 6 | 89.0 [87.5, 91.0] |"
    assert f"| SST-2 | MAE-LM | 2: lr 0.0001, epochs 4 | accuracy {found}" in text
    assert "- SST-2: a note on sst2" in text
    assert "| SST-2 | 4 | validation: 4 | accuracy | train: 1 of 4 | sst2.tsv |" in text
    assert "provisional" not in text
    with open(tmp_path / "results.csv", newline="") as file:
        written = list(csv.DictReader(file))
    own = [row for row in written if row["metric"] == TASKS[row["task"]].metric]
    for row, run in zip(own, sweep.runs, strict=True):
        assert (row["model"], row["task"], int(row["seed"])) == (run.model.label, run.data.task.name, run.seed)
        assert (float(row["lr"]), float(row["value"]), row["status"]) == (run.config.lr, value(run), "finished")
        assert (row["best"] == "True") == (run.cell.number == (4 if run.model.label == "MLM" else 2))
    assert [float(row["value"]) for row in written if row["metric"] == "last"] == [value(r) - 1.5 for r in sweep.runs]
    pytest.importorskip("matplotlib")
    draw(sweep, tmp_path)
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_all_of_glue_and_squad_in_the_papers_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With values near those of MAE-LM's row of Table 1."""
    names = ("mnli", "qqp", "qnli", "sst2", "cola", "rte", "mrpc", "stsb", "squad_v2")
    printed = dict(zip(names, (87.2, 91.6, 92.9, 93.8, 63.1, 79.1, 90.2, 90.9, 84.1), strict=True))
    grid = Grid("one", "a cell", {"lr": (1e-4,)})

    def as_printed(_: Any, run: Run, *more: Any) -> dict[str, Any]:
        outcome = result(run, printed[run.data.task.name])
        if run.data.task.kind == "spans":
            outcome["metrics"]["validation"] = {"best_exact": 81.1, "best_f1": 84.1, "exact": 80.0, "f1": 83.0}
        return outcome

    monkeypatch.setattr(Worker, "do", as_printed)
    sweep = make_sweep(grid, MODELS[1:], [data(name) for name in printed], 1)
    run_sweep(sweep, tmp_path)
    write_tables(sweep, tmp_path)
    text = (tmp_path / "SWEEP.md").read_text()
    assert (
        "| model | MNLI-(m/mm) | QQP | QNLI | SST-2 | CoLA | RTE | MRPC | STS-B | AVG | SQuAD EM | SQuAD F1 |" in text
    )
    assert "| **MAE-LM** | 87.2/86.2 | 91.6 | 92.9 | 93.8 | 63.1 | 79.1 | 90.2 | 90.9 | 86.0 | 81.1 | 84.1 |" in text
    assert "MAE-LM 80.0/83.0" in text
    rows = results(sweep, *Ledger(tmp_path).ended())
    means = averages(rows, {name: TASKS[name].metric for name in GLUE})
    assert means == {"MAE-LM": pytest.approx((86.7 + 91.6 + 92.9 + 93.8 + 63.1 + 79.1 + 90.2 + 90.9) / 8)}
    assert averages(where(rows, split="validation"), {name: TASKS[name].metric for name in GLUE}) == {}, "without MNLI"


def test_a_budget_is_told_and_holds_for_all_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "do", stand_in)
    sweep = small(tasks=("sst2",), seeds=1, budget=2)
    assert [run.cell.number for run in sweep.runs[::2]] == [run.cell.number for run in sweep.runs[1::2]]
    assert [run.key for run in sweep.runs] == [run.key for run in small(tasks=("sst2",), seeds=1, budget=2).runs]
    run_sweep(sweep, tmp_path)
    write_tables(sweep, tmp_path)
    text = (tmp_path / "SWEEP.md").read_text()
    assert "a fixed pseudo-random subset of each task's cells (--budget): SST-2 2 of 6." in text
    assert text.count("| 1 of 1 | 2 of 6 |") == 2


def test_a_failing_run_costs_only_itself_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = small(tasks=("sst2",))
    tried: Counter[str] = Counter()

    def fails(_: Any, run: Run, *more: Any) -> dict[str, Any]:
        tried[run.key] += 1
        if run.cell.number == 4 and run.seed == 0 and run.model.label == "MLM":
            raise UserError("the gradient was not finite in 10 updates in a row")
        if run.cell.number == 4 and run.model.label == "MLM":
            raise RuntimeError("out of\nmemory")
        return result(run, value(run))

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "do", fails)
        run_sweep(sweep, tmp_path)
    assert set(tried.values()) == {1}
    assert [len(ended) for ended in Ledger(tmp_path).ended()] == [33, 3]
    write_tables(sweep, tmp_path)
    text = (tmp_path / "SWEEP.md").read_text()
    assert "seed 0: the gradient was not finite in 10 updates in a row" in text
    assert "seed 1: RuntimeError: out of memory" in text
    assert "provisional" in text
    assert best_cell(sweep, tmp_path) == 3, "cells 3 and 5 tie: the earlier"
    failed = where(results(sweep, *Ledger(tmp_path).ended()), status="failed")
    assert sorted(failed["error"].str[:12].tolist()) == ["RuntimeError", "RuntimeError", "the gradient"]

    monkeypatch.setattr(Worker, "do", stand_in)
    run_sweep(sweep, tmp_path)
    assert [len(ended) for ended in Ledger(tmp_path).ended()] == [36, 0]
    assert len(Ledger(tmp_path).rows()) == 36 + 3


def test_one_lucky_seed_does_not_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lucky(_: Any, run: Run, *more: Any) -> dict[str, Any]:
        if run.cell.number != 5 and run.seed == 1:
            raise UserError("no")
        return result(run, 80.0 if run.cell.number == 5 else 90.0)

    monkeypatch.setattr(Worker, "do", lucky)
    sweep = small(tasks=("sst2",), seeds=2)
    run_sweep(sweep, tmp_path)
    assert best_cell(sweep, tmp_path) == 5


def test_time_is_estimated_from_finished_runs_of_the_same_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = small()
    assert estimate(sweep, Ledger(tmp_path).ended()[0]) == (0.0, 72)

    def stops(_: Any, run: Run, *more: Any) -> dict[str, Any]:
        if run.data.task.name == "cola":
            os.kill(os.getpid(), signal.SIGTERM)
            raise Stopped(3)
        return result(run, value(run))

    monkeypatch.setattr(Worker, "do", stops)
    with pytest.raises(Stopped):
        run_sweep(sweep, tmp_path)
    assert len(titles(tmp_path)) == 12
    seconds, unknown = estimate(sweep, Ledger(tmp_path).ended()[0])
    assert unknown == 36, "nothing is known of CoLA"
    assert seconds == pytest.approx(2 * 2 * 3 * (3.0 * 2 + 3.0 * 4)), "2 models, 2 seeds, 3 rates, of 2 and 4 epochs"


def slowly(out: Path, rows: int, processes: int) -> None:
    """In a process of its own: the stand-in, which waits until so many processes have begun, and once there are so many
    rows for nothing but to be stopped."""

    def slow(worker: Any, run: Run, stop: Callable[[], bool]) -> dict[str, Any]:
        with open(out / "begun", "a") as file:
            file.write(f"{os.getpid()} {run.key}\n")
        while len(Ledger(out).rows()) >= rows or len(by_process(out)) < processes:
            time.sleep(0.005)
            if stop():
                raise Stopped(1)
        return stand_in(worker, run)

    Worker.do = slow  # type: ignore[assignment, method-assign]
    work._POLL_SECONDS = 0.02
    try:
        run_sweep(small(tasks=("sst2",), seeds=1), out)
    except Stopped as stopped:
        os._exit(int(str(stopped.code)))
    os._exit(0)


def start(out: Path, rows: int = 99, processes: int = 1) -> Any:
    out.mkdir(exist_ok=True)
    process = multiprocessing.get_context("fork").Process(target=slowly, args=(out, rows, processes))
    process.start()
    return process


def ended(process: Any) -> int:
    process.join(HANG)
    return int(process.exitcode)


def by_process(out: Path) -> Counter[str]:
    return Counter(line.split()[0] for line in (out / "begun").read_text().splitlines())


def begun(out: Path) -> Counter[str]:
    return Counter(line.split()[1] for line in (out / "begun").read_text().splitlines())


@pytest.mark.parametrize(("end", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_ended_in_the_middle_and_gone_on(end: signal.Signals, code: int, tmp_path: Path) -> None:
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    process = start(cut, rows=3)
    wait_until(lambda: (cut / "begun").exists() and sum(begun(cut).values()) == 4)
    os.kill(process.pid, end)
    assert ended(process) == code
    assert len(titles(cut)) == 3
    assert ended(start(cut)) == 0
    assert ended(start(whole)) == 0
    assert titles(cut) == titles(whole)
    assert len(set(titles(cut))) == 12
    assert sum(begun(cut).values()) == 13, "only the run that was cut short began twice"
    sweep = small(tasks=("sst2",), seeds=1)
    assert results(sweep, *Ledger(cut).ended()).equals(results(sweep, *Ledger(whole).ended()))


def test_two_processes_share(tmp_path: Path) -> None:
    processes = [start(tmp_path / "out", processes=2) for _ in range(2)]
    assert [ended(process) for process in processes] == [0, 0]
    assert set(begun(tmp_path / "out").values()) == {1}
    assert len(set(titles(tmp_path / "out"))) == len(titles(tmp_path / "out")) == 12
    assert len(by_process(tmp_path / "out")) == 2


def still_starting(*_: Any) -> None:
    """A worker that has no handler for signals yet."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(HANG)


def test_a_stop_while_workers_start_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: fork)
    monkeypatch.setattr(work, "_process", still_starting)
    with pytest.raises(Stopped):
        run_sweep(small(), tmp_path, workers=2)


def test_bad_plans() -> None:
    for options, message in (({"seeds": 0}, "--seeds"), ({"budget": 0}, "--budget")):
        with pytest.raises(UserError, match=message):
            small(**options)
    with pytest.raises(UserError, match="two models are called 'MLM'"):
        make_sweep(GRID, [MODELS[0]] * 2, [data("sst2")])
    with pytest.raises(UserError, match="task sst2 is given twice"):
        small(tasks=("sst2", "sst2"))
    with pytest.raises(UserError, match="--workers"):
        run_sweep(small(), Path("nowhere"), workers=0)


def test_gpus_are_taken_as_the_user_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert work._gpus() == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert work._gpus() == ["5", "7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,2,-1,4")
    assert work._gpus() == ["5", "7", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    asked: list[Any] = []
    monkeypatch.setattr(module, "work", lambda *_, gpus, **__: asked.append(gpus))
    for device in ("cpu", "auto"):
        run_sweep(small(base=FinetuneConfig(device=device)), Path("nowhere"))  # type: ignore[arg-type]
    assert asked == [False, True]
    with work._environment({"CUDA_VISIBLE_DEVICES": "7", "MAELM_NOT_SET": "x"}):
        assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["MAELM_NOT_SET"]) == ("7", "x")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,7"
    assert "MAELM_NOT_SET" not in os.environ


def test_a_run_is_what_train_gives_also_when_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from maelm_fast.encoders import load_encoder
    from maelm_fast.finetuning.job import make_problem
    from maelm_fast.finetuning.run import train

    model = Origin.of(toys.make_run(tmp_path / "run"), label="toy")
    assert model.step == 5
    task = toys.toy(toys.content_rows, train=40, validation=20)
    grid = Grid("two", "two cells", {"lr": (1e-3, 3e-3), "epochs": (2,), "batch_size": (8,)})
    base = FinetuneConfig(device="cpu", precision="fp32")
    sweep = make_sweep(grid, [model], [task], seeds=2, base=base)
    made = []
    original = make_problem
    monkeypatch.setattr(trials, "make_problem", lambda *a: made.append(a) or original(*a))
    asked = 0

    def sometimes(problem: Any, encoder: Any, config: FinetuneConfig, **options: Any) -> Any:
        """The first run is asked to stop at its fourth update."""

        def stop() -> bool:
            nonlocal asked
            asked += 1
            if asked == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            return bool(options["stop"]())

        return train(problem, encoder, config, **{**options, "stop": stop})

    monkeypatch.setattr(trials, "train", sometimes)
    with pytest.raises(Stopped):
        run_sweep(sweep, tmp_path / "out")
    assert titles(tmp_path / "out") == []
    assert [path.name for path in (tmp_path / "out" / "states").iterdir()] == [sweep.runs[0].key]
    run_sweep(sweep, tmp_path / "out")
    assert list((tmp_path / "out" / "states").iterdir()) == []
    assert len(made) == 2, "tokenised once by each call, for all cells and seeds"

    finished, _ = Ledger(tmp_path / "out").ended()
    timed = ("seconds", "seconds_in_all", "examples_per_s", "tokens_per_s", "curve")
    for run in sweep.runs:
        encoder = load_encoder(model.path, dropout=run.config.dropout)
        result, _, _ = train(original(task, encoder, run.config), encoder, run.config)
        expected = json.loads(json.dumps(result.to_dict()))
        found = finished[run.identity]
        assert {k: v for k, v in found.items() if k not in timed} == {
            k: v for k, v in expected.items() if k not in timed
        }
        assert [row["loss"] for row in found["curve"]] == [row["loss"] for row in expected["curve"]]
        assert found["seconds_in_all"] >= found["seconds"] > 0
    assert len({tuple(row["loss"] for row in r["curve"]) for r in finished.values()}) == 4, "seeds and cells differ"
