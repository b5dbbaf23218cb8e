"""The downstream half of `maelm-fast paper`: fine-tuned and prompted on little files, from plan to report."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from maelm_fast import presets
from maelm_fast.cli.main import main
from maelm_fast.errors import UserError
from maelm_fast.finetuning.examples import Examples, TaskData
from maelm_fast.finetuning.problem import SentenceProblem
from maelm_fast.paper import catalogue, downstream, figures, provenance, run, scales, trials
from maelm_fast.paper.cost import mean_tokens, unit_cost
from maelm_fast.paper.downstream import FineTuning, Found, Prompting, find_tasks
from maelm_fast.paper.figures import draw
from maelm_fast.paper.plan import Cell, Plan, make_plan
from maelm_fast.paper.report import checkpoints, report
from maelm_fast.paper.results import BASELINES, Results, passes
from maelm_fast.paper.scores import own_scores
from maelm_fast.work import Ledger
from tests.conftest import WORDS

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
UPDATES = 3
INPUTS = ("with_mask", "without_mask", "visible", "mask_positions")
DEV = 12


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sentence(draw: random.Random, words: int = 5) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(words))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SST-2, MNLI without its mismatched half, and SQuAD 2.0 in little."""
    root, draw = tmp_path_factory.mktemp("tasks"), random.Random(0)
    for split, count in (("train", 24), ("validation", DEV)):
        labels = ["entailment", "neutral", "contradiction"]
        write(root / "sst2" / f"{split}.jsonl", [{"sentence": sentence(draw), "label": i % 2} for i in range(count)])
        name = "validation_matched" if split == "validation" else split
        write(
            root / "mnli" / f"{name}.jsonl",
            [{"premise": sentence(draw), "hypothesis": sentence(draw), "label": labels[i % 3]} for i in range(count)],
        )
        rows = []
        for i in range(count):
            context = sentence(draw, 12)
            answer = {"text": [context.split()[3]], "answer_start": [len(" ".join(context.split()[:3])) + 1]}
            empty: dict[str, list[Any]] = {"text": [], "answer_start": []}
            question = {"id": f"{split}{i}", "title": "", "context": context, "question": sentence(draw, 3)}
            rows.append({**question, "answers": empty if i % 3 else answer})
        write(root / "squad_v2" / f"{split}.jsonl", rows)
    return root


def narrow() -> scales.Scale:
    smoke = scales.smoke()
    settings = {
        name: replace(s, config=presets.change(s.config, model={"hidden_size": 24, "ffn_size": 24, "num_heads": 2}))
        for name, s in smoke.settings.items()
    }
    return replace(smoke, settings=settings, rank_samples=8, downstream=replace(smoke.downstream, seeds=2))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scales.SCALES, "smoke", narrow)
    monkeypatch.setattr("maelm_fast.paper.cost.measured_rate", lambda config: 1e9)


@pytest.fixture(scope="module")
def pretrained(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `fig3` without tasks leaves: MLM and MAE-LM, and ranks of all checkpoints."""
    out = tmp_path_factory.mktemp("pretrained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(scales.SCALES, "smoke", narrow)
        patch.setattr("maelm_fast.paper.cost.measured_rate", lambda config: 1e9)
        assert main(command("fig3", store, out)) == 0
    return out


@pytest.fixture
def out(pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of it, in which nothing may be pretrained or ranked again."""
    shutil.copytree(pretrained, tmp_path / "out")
    monkeypatch.setattr(run, "pretrain", never)
    monkeypatch.setattr(run, "measure", never)
    return tmp_path / "out"


def command(experiment: str, store: Path, out: Path, *options: object) -> list[str]:
    return [
        "paper",
        experiment,
        "--scale",
        "smoke",
        "--data",
        str(store),
        "--out",
        str(out),
        "--updates",
        str(UPDATES),
        *map(str, options),
    ]


def placed(experiment: str, store: Path, out: Path, tasks: Path) -> Plan:
    asked, scale = catalogue.get(experiment), scales.get("smoke")
    found = find_tasks(asked.tasks, [str(tasks)], scale.downstream, asked.one_task, {})
    return run.place_data(make_plan(asked, scale, steps=UPDATES).with_tasks(found), str(store), out)


def never(*_: object, **__: object) -> Any:
    raise AssertionError("this was finished already")


def rows_of(out: Path, word: str) -> list[dict[str, Any]]:
    return [row for row in Ledger(out).rows() if row["stage"].startswith(word)]


def one_example_of(*names: str, text: str = "x") -> Found:
    data = {}
    for task in map(downstream.tasks.get, names):
        part = Examples(task, "train", "x", ["0"], tuple([text] for _ in task.text_columns), np.zeros(1, np.int64))
        data[task.name] = TaskData(task, part, dict.fromkeys(task.validation, part), ())
    return Found((), {}, data)


# Plans


def test_the_hashes_of_runs_that_have_been_made_stay() -> None:
    """A change here makes every finished run, rank and ledger of users a run that was never made."""
    scale = scales.get("cpu")
    plan = make_plan(catalogue.get("fig5"), scale)
    fingerprint = "e3759000ed833e7dda9fdbe4b229324f567f1af1687cc157be1ab94b8e69c233"
    plan = plan.with_data({plan.cells[0].corpus: ("store", fingerprint, 4096)})
    assert [cell.stages for cell in plan.cells] == [
        {"pretraining": "a784b4c27d73", "rank at 12208": "629157f26c20"},
        {"pretraining": "77708dbe22a2", "rank at 12208": "d6e60f8d996d"},
    ]
    with_tasks = plan.with_tasks(one_example_of("mnli"))
    for cell, grown in zip(plan.cells, with_tasks.cells, strict=True):
        assert list(grown.stages.items())[:2] == list(cell.stages.items())
        assert grown.name == cell.name


def test_a_unit_is_known_by_all_that_decides_its_result() -> None:
    config = scales.get("smoke").settings["base"].grid.cells(downstream.tasks.get("sst2"))[0].config
    unit = FineTuning("sst2", "data", 3, 1, config, ranks=False)
    others = [replace(unit, data="other"), replace(unit, step=0), replace(unit, ranks=True)]
    others += [replace(unit, config=replace(config, **change)) for change in ({"lr": 1.0}, {"seed": 1})]
    assert len({one.hash("cell") for one in (unit, *others)} | {unit.hash("another cell")}) == 7
    elsewhere = replace(unit, config=replace(config, device="cuda", precision="bf16"))
    assert elsewhere.hash("cell") == unit.hash("cell")


# settings x tasks x seeds (x checkpoints), and the control; by hand
FULL_UNITS = {
    "fig3": 12 * 5 * (25 + 25 + 1),  # MNLI alone
    "fig4": 336 * 5 * (5 + 1),
    "fig5": 12 * 5 * 2,
    "table1": 336 * 5 * (3 + 2),
    "table2": (336 - 32) * 5 * (14 + 1),
    "table6": 336 * 5 * (2 + 1),
    "table7": 8 * (1 + 5 + 5) * 2,
}


@pytest.mark.parametrize("name", FULL_UNITS)
def test_the_paper_in_full_is_counted(name: str) -> None:
    asked, scale = catalogue.get(name), scales.get("full")
    names = asked.tasks[:1] if asked.one_task else asked.tasks
    plan = make_plan(asked, scale).with_tasks(one_example_of(*names))
    assert sum(len(cell.units) for cell in plan.runs) == FULL_UNITS[name]
    if name == "fig3":
        one, data = plan.cells[0].units[0], one_example_of("mnli", text="x" * 200).data["mnli"]
        assert mean_tokens(data) == 400 / 4 + 4  # of a pair
        assert unit_cost(one, plan.cells[0], data, 104.0).tokens == 2 * 104  # the grid's first has 2 epochs


def test_experiments_share_units(tasks: Path, store: Path, tmp_path: Path) -> None:
    stages = {
        name: {
            (cell.key, *stage) for cell in placed(name, store, tmp_path, tasks).runs for stage in cell.stages.items()
        }
        for name in ("fig3", "fig5", "table1")
    }
    assert stages["fig5"] < stages["fig3"]
    assert stages["fig5"] < stages["table1"]
    assert len(stages["fig3"] & stages["table1"]) == len(stages["fig5"]) + 2  # the control's seeds


def test_tasks_are_found_or_left_out_with_a_reason(tasks: Path, tmp_path: Path) -> None:
    amount = replace(scales.get("smoke").downstream, train_limit=10, validation_limit=None)
    found = find_tasks(("mnli", "rte", "sst2"), [str(tmp_path), str(tasks)], amount, False, {})
    assert [task.name for task in found.tasks] == ["mnli", "sst2"]
    assert "train" in found.left_out["rte"]
    texts = [json.loads(line)["sentence"] for line in (tasks / "sst2" / "validation.jsonl").read_text().splitlines()]
    train = found.data["sst2"].train.texts[0]
    assert (len(train), len(found.data["sst2"].validation["validation"])) == (10, DEV)
    assert mean_tokens(found.data["sst2"]) == pytest.approx(sum(map(len, [*texts, *train])) / (10 + DEV) / 4 + 4)
    assert any("10 of its 24 examples" in note for note in found.data["sst2"].notes)
    assert find_tasks(("mnli", "sst2"), [str(tasks)], amount, True, {}).data.keys() == {"mnli"}
    named = {"sst2": {"train": ["validation.jsonl"], "validation": ["train.jsonl"]}}
    swapped = find_tasks(("sst2",), [str(tasks)], amount, False, named).data["sst2"]
    assert len(swapped.validation["validation"]) == 24
    with pytest.raises(UserError, match="none of rte, cola can be read"):
        find_tasks(("rte", "cola"), [str(tasks)], amount, False, {})
    misspelt = {"mnli": {"train": ["trian.jsonl"]}}
    with pytest.raises(UserError, match=r"files of mnli are named, but it is not read: there is no file trian\.jsonl"):
        find_tasks(("mnli", "sst2"), [str(tasks)], amount, True, misspelt)
    with pytest.raises(UserError, match="files of sst2 are named, but it is not read: one task is enough here"):
        find_tasks(("mnli", "sst2"), [str(tasks)], amount, True, named)


def test_without_a_network_the_hub_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def load_dataset(name: str, config: str, **_: Any) -> None:
        asked.append(config)
        raise ConnectionError(f"Couldn't reach '{name}' on the Hub")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(UserError, match="Couldn't reach"):
        find_tasks(("rte", "cola", "sst2"), ["hub"], scales.get("smoke").downstream, False, {})
    assert asked == ["rte"]


def test_a_cell_of_the_grid_wins_by_as_many_seeds_as_the_others(
    tasks: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three cells of two seeds. The best value is of a cell whose other seed failed."""
    scale = narrow()
    setting = scale.settings["base"]
    grid = replace(setting.grid, common={**setting.grid.common, "lr": (1e-3, 2e-3, 3e-3)})
    settings = {**scale.settings, "base": replace(setting, grid=grid)}
    monkeypatch.setitem(scales.SCALES, "smoke", lambda: replace(scale, settings=settings))
    plan, ledger = placed("table1", store, tmp_path, tasks), Ledger(tmp_path)
    cell, task = plan.cells[0], downstream.tasks.get("sst2")
    values = {(1, 0): 60.0, (1, 1): 62.0, (2, 0): 90.0, (3, 0): 70.0, (3, 1): 50.0}
    for unit in (unit for unit in cell.units if (unit.task, unit.step) == ("sst2", cell.rank_steps[-1])):
        row = {"key": cell.key, "stage": unit.stage, "config": cell.stages[unit.stage]}
        value = values.get((unit.setting, unit.config.seed))
        metrics = {"metrics": {"validation": {"accuracy": value}}}
        ledger.append(row | ({"error": "not finite"} if value is None else {"result": metrics}))
    results = Results(plan, ledger)
    assert sorted(own_scores(results.finetuned, task)["value"]) == [60.0, 62.0]
    assert set(results.finetuned["cell"]) == {1}


def test_where_one_curve_passes_a_value() -> None:
    points = [{"tokens": 0, "score": 50.0}, {"tokens": 100, "score": 70.0}, {"tokens": 200, "score": 90.0}]
    assert passes(points, 75.0, "tokens") == 125.0
    assert passes(points, 70.0, "tokens") == 100.0
    assert passes(points, 50.0, "tokens") == 0.0
    assert passes(points, 90.1, "tokens") is None
    assert passes([], 1.0, "tokens") is None


# Runs


def test_figure_3_from_pretrained_models_to_report(out: Path, store: Path, tasks: Path) -> None:
    """Pretraining and ranks of the ledger without tasks are still valid; the report's numbers are the ledger's."""
    assert main(command("fig3", store, out, "--tasks", tasks)) == 0
    rows = rows_of(out, "finetune")
    assert len(rows) == 2 * (3 + 3 + 1)
    assert not (out / "states").exists() or not any((out / "states").iterdir())
    text = (out / "fig3" / "REPORT.md").read_text()
    assert "is missing" not in text
    plan = placed("fig3", store, out, tasks)
    line = next(line for line in text.splitlines() if line.startswith(f"| {UPDATES} | "))
    finals = {}
    for label in ("MLM", "MAE-LM"):
        values = [
            r["result"]["metrics"]["validation_matched"]["accuracy"]
            for r in rows
            if r["label"] == label and r["stage"].endswith(f" at {UPDATES}")
        ]
        finals[label] = statistics.median(values)
        assert f"| {finals[label]:.1f} [" in line
    control = [r["result"]["best"] for r in rows if r["stage"].endswith("at 0")]
    assert f"Without pretraining: random initialisation {statistics.median(control):.1f} [" in text
    assert f"MLM's last accuracy, {finals['MLM']:.1f}" in text
    (floor,) = rows_of(out, BASELINES)
    assert f"majority {floor['result']['validation_matched']['majority']['accuracy']:.1f}" in text
    assert (out / "fig3" / "figure.png").read_bytes().startswith(b"\x89PNG")
    ranked = [row["stage"] for row in rows if "ranks" in row["result"]]
    assert ranked == [row["stage"] for row in rows if row["stage"].endswith(f" at {UPDATES}")]
    assert Results(plan, Ledger(out)).unfinished() == []


def test_figure_5_has_its_second_panel(out: Path, store: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(command("fig5", store, out, "--tasks", tasks)) == 0
    text = (out / "fig5" / "REPORT.md").read_text()
    rows = [row["result"]["ranks"]["after"]["ranks"] for row in rows_of(out, "finetune") if row["label"] == "MAE-LM"]
    middle = [f"{statistics.median(layer):g}" for layer in zip(*rows, strict=True)]
    written = re.search(r"\| MAE-LM \| MNLI's development inputs, after fine-tuning \| (.*) \|", text)
    assert written is not None
    assert [cell.split(" [")[0] for cell in written[1].split(" | ")] == middle
    monkeypatch.setattr(trials, "train", never)
    assert main(command("fig5", store, out, "--tasks", tasks)) == 0


def test_killed_in_the_middle_of_fine_tuning(
    out: Path,
    store: Path,
    tasks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By a signal during the second unit: its state is saved, and what follows is as without the signal."""
    shutil.copytree(out, tmp_path / "whole")
    assert main(command("fig5", store, tmp_path / "whole", "--tasks", tasks)) == 0
    loss, calls = SentenceProblem.loss, []

    def and_kill(self: SentenceProblem, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:  # an epoch is two updates
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(SentenceProblem, "loss", and_kill)
        assert main(command("fig5", store, out, "--tasks", tasks)) == 143
    assert len(calls) == 3
    assert len(rows_of(out, "finetune")) == 1
    assert any((out / "states").iterdir())
    assert "the same command resumes" in capsys.readouterr().out
    assert main(command("fig5", store, out, "--tasks", tasks)) == 0
    assert not any((out / "states").iterdir())

    def results(where: Path) -> list[Any]:
        return [
            [row["stage"], row["result"]["curve"][0]["loss"], row["result"]["metrics"], row["result"]["ranks"]]
            for row in rows_of(where, "finetune")
        ]

    assert results(out) == results(tmp_path / "whole")


def test_a_task_that_fails_costs_only_itself(
    out: Path, store: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = trials.train

    def fails_on_mnli(problem: Any, *rest: Any, **options: Any) -> Any:
        if problem.data.task.name == "mnli":
            raise UserError("out of memory")
        return train(problem, *rest, **options)

    monkeypatch.setattr(trials, "train", fails_on_mnli)
    assert main(command("table1", store, out, "--tasks", tasks)) == 1
    text = (out / "table1" / "REPORT.md").read_text()
    assert "- Failed: MAE-LM, seed 0, finetune mnli setting 1 seed 1 at 3: out of memory" in text
    assert f"- RTE is left out: {tasks.name} has no folder rte" in text
    assert str(tasks) not in text
    (header,) = (line for line in text.splitlines() if line.startswith("| setting | model | MNLI-(m/mm) |"))
    assert "| mean of MNLI, SST-2 |" in header
    cells = [cell.strip() for cell in header.split("|")]
    (line,) = (line for line in text.splitlines() if line.startswith("| base | MAE-LM | ") and "[" in line)
    written = dict(zip(cells, (cell.strip() for cell in line.split("|")), strict=True))
    assert written["MNLI-(m/mm)"] == written["mean of MNLI, SST-2"] == written["RTE"] == "-"
    values = [
        row["result"]["metrics"]["validation"]
        for row in rows_of(out, "finetune")
        if "result" in row and row["label"] == "MAE-LM" and not row["stage"].endswith("at 0")
    ]
    sst2 = [value["accuracy"] for value in values if "accuracy" in value]
    exact = [value["best_exact"] for value in values if "best_exact" in value]
    assert written["SST-2"] == f"{statistics.median(sst2):.1f} [{min(sst2):.1f}, {max(sst2):.1f}]"
    assert written["SQuAD EM"] == f"{statistics.median(exact):.1f} [{min(exact):.1f}, {max(exact):.1f}]"
    assert "| base | random initialisation | " in text
    assert "| no encoder | majority class, mean, no answer | " in text


def test_places_of_tasks_are_named_by_their_last_part(tasks: Path) -> None:
    found: Any = SimpleNamespace(sources=(str(tasks), ".", "hub"))
    results: Any = SimpleNamespace(plan=SimpleNamespace(found=found))
    said = provenance._without_places(f"RTE: {tasks} has no folder rte. The hub neither.", results)
    assert said == f"RTE: {tasks.name} has no folder rte. The hub neither."


def test_table_7_in_little(store: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = Tokenizer.from_file(str(store / "tokenizer.json")).get_vocab()
    bad, good = sorted(token[1:] for token in vocabulary if re.fullmatch("\u0120[a-z]+", token))[:2]
    monkeypatch.setitem(downstream.LABEL_WORDS, "sst2", (("no such", "words"), (bad, good)))
    shutil.copytree(tasks / "sst2", tmp_path / "tasks" / "sst2")
    tasks, out = tmp_path / "tasks", tmp_path / "out"
    assert main(command("table7", store, out, "--tasks", tasks)) == 0
    rows = rows_of(out, "prompt")
    assert len(rows) == 2 * (1 + 2 + 2)
    text = (out / "table7" / "REPORT.md").read_text()
    assert f"- SST-2: label words {bad}/{good}; terrible/great are not single tokens here." in text
    values = [
        row["result"]["test"]["validation"]["accuracy"]
        for row in rows
        if row["label"] == "MAE-LM" and "prompt sst2 prompt draw" in row["stage"]
    ]
    wanted = f"{statistics.mean(values):.1f} ({statistics.pstdev(values):.1f})"
    block = text[text.index("Ours, prompt-based few-shot") :].splitlines()
    header, line = block[2], next(line for line in block if line.startswith("| large++ | MAE-LM |"))
    assert dict(zip(header.split("|"), line.split("|"), strict=True))[" SST-2 "].strip() == wanted
    assert "| no encoder | majority class, mean, no answer | " in text
    monkeypatch.setattr(trials.Trials, "prompt", never)
    assert main(command("table7", store, out, "--tasks", tasks)) == 0


def one_step_more(cell: Cell) -> Cell:
    """As if there were one more checkpoint, about which the ledger says nothing."""
    return replace(cell, rank_steps=(*cell.rank_steps, cell.rank_steps[-1] + 1))


@pytest.mark.parametrize("name", [name for name, e in catalogue.EXPERIMENTS.items() if e.tasks])
def test_every_report_and_figure(name: str, store: Path, tasks: Path, tmp_path: Path) -> None:
    """Drawn from a ledger of made-up results: all but the last unit of the last run."""
    plan, ledger = placed(name, store, tmp_path, tasks), Ledger(tmp_path)
    assert plan.found is not None
    ranks = {"before": {"ranks": [4, 4, 4, 4]}, "after": {"ranks": [5, 4, 4, 3]}}
    for i, cell in enumerate(plan.runs):
        curve = [{"step": s, "tokens": 100 * s, "seconds": float(s), "val_loss": 9.0 - s} for s in cell.rank_steps]
        made_up: dict[str, Any] = {
            **{"step": 3, "tokens": 300, "val_loss": 7.125 + i, "val_accuracy": 0.5, "unigram_nats": 6.0},
            **{"seconds": 2.0, "curve": curve, "device": "some CPU", "precision": "fp32", "threads": 1, "commit": None},
            **{"torch": "2", "ranks": {name: [4, 3, 2, 1] for name in INPUTS}},
        }
        units = {unit.stage: unit for unit in cell.units}
        for j, (stage, config) in enumerate(cell.stages.items()):
            result = made_up
            if (unit := units.get(stage)) is not None:
                task = plan.found.data[unit.task].task
                score = 50.0 + unit.step + 2 * i + (j % 2)
                metrics = {split: dict.fromkeys(task.metrics, score) for split in task.validation}
                result = {"metrics": metrics, "metric": task.metric, "ranks": ranks}
                if isinstance(unit, Prompting):
                    result = {"test": metrics, "metric": task.metric, "label_words": ["a", "b"]}
            if (i, j) != (len(plan.runs) - 1, len(cell.stages) - 1):
                ledger.append({"key": cell.key, "stage": stage, "config": config, "result": result})
    results = Results(plan, ledger)
    text = report(results, run.manifests(plan), {cell.key: "somewhere" for cell in plan.cells})
    last, count = plan.runs[-1], len(plan.runs[-1].units)
    assert f"- Not finished: {last.title}, {count - 1} of {count} runs on tasks done." in text
    assert "## Tasks" in text
    if name == "fig3":  # the MLM ends at 53.5; MAE-LM has 53.5 at step 1, 54.5 at 2
        assert "MAE-LM reaches MLM's last accuracy, 53.5" in text
        early = Results(replace(plan, cells=tuple(map(one_step_more, plan.cells))), ledger)
        assert early.accuracy_curve(plan.rows[0], plan.tasks[0])
        assert early.end(plan.rows[0], plan.tasks[0]) is None
        assert "last accuracy" not in "".join(checkpoints(early))
    if name == "table1":  # of two rows both seeds of fine-tuning, of the tasks' mean
        seeds = results.means_by_seed()["MAE-LM"]
        assert statistics.median(seeds) == results.means()["MAE-LM"]
        assert len(set(seeds)) == 2
        assert len(figures._by_row(results).axes[2].containers) == len(results.means_by_seed()) - 1 == 2
    draw(results, tmp_path / f"{name}.png")
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("fig1 --tasks {tasks}", "fig1 has no downstream part"),
        ("fig5 --tasks {tasks}/none", "none of mnli, qnli"),
        ("fig5 --train mnli=train.jsonl", "give --tasks too"),
        ("fig5 --tasks {tasks} --train mnli", "takes TASK=FILE"),
        ("fig5 --tasks {tasks} --train mnli=a --train mnli=b", "--train names mnli twice"),
        ("fig5 --tasks {tasks} --train mnli=none.jsonl --train sst2=train.jsonl", "there is no file none.jsonl"),
        ("fig5 --tasks {tasks} --validation squad_v2=a", "fig5 has no task 'squad_v2'"),
    ],
)
def test_bad_input_is_one_line(
    arguments: str, message: str, store: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"tasks": tasks}
    experiment, *options = arguments.format(**places).split()
    assert main(command(experiment, store, tmp_path / "out", *options)) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1
    assert message in err[0]
    assert not (tmp_path / "out").exists()


def test_a_plan_counts_fine_tuning(tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main(["paper", "table1", "--scale", "smoke", "--plan", "--out", out, "--tasks", str(tasks)]) == 0
    shown = capsys.readouterr().out
    assert "18 fine-tuning runs; 18 unfinished" in shown  # 3 tasks, 2 models and the control, 2 seeds
    assert "missing: RTE is left out" in shown
    assert main(["paper", "table1", "--scale", "full", "--out", out, "--tasks", str(tasks)]) == 0
    shown = capsys.readouterr().out
    assert f"{(12 + 12 + 32) * 5 * (3 + 2):,} fine-tuning runs" in shown  # cells of the three tasks, seeds, encoders
    assert not Path(out).exists()
