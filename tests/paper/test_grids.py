"""The grids are the paper's, and a grid from a file is what the file says or one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from maelm_fast.errors import UserError
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.tasks import TASKS, custom
from maelm_fast.paper import grids

SMALL, LARGE = ("cola", "rte", "mrpc", "stsb"), ("mnli", "qqp", "qnli", "sst2")


@pytest.mark.parametrize("name", ["paper-base", "paper-large"])
def test_the_papers_grids_have_336_cells(name: str) -> None:
    grid = grids.get(name)
    assert [grid.size(TASKS[task]) for task in SMALL] == [64] * 4
    assert [grid.size(TASKS[task]) for task in LARGE] == [12] * 4
    assert grid.size(TASKS["squad_v2"]) == 32
    cells = [cell for task in TASKS.values() for cell in grid.cells(task)]
    assert len(cells) == 336
    for config in {cell.config for cell in cells}:
        assert (config.max_length, config.eps, config.betas) == (512, 1e-6, (0.9, 0.98))
        assert (config.clip_norm, config.dropout, config.weight_decay) == (0, 0.1, 0.01)


@pytest.mark.parametrize(
    ("name", "task", "lr", "epochs", "batch_size", "warmup"),
    [  # Tables 4 and 5, read off again
        ("paper-base", "rte", {2e-5, 3e-5, 4e-5, 5e-5}, {2, 3, 5, 10}, {16, 32}, {0.06, 0.1}),
        ("paper-base", "qqp", {1e-5, 2e-5, 3e-5, 4e-5}, {2, 3, 5}, {32}, {0.06}),
        ("paper-base", "squad_v2", {2e-5, 3e-5, 4e-5, 5e-5}, {2, 3}, {16, 32}, {0.06, 0.1}),
        ("paper-large", "stsb", {7e-6, 1e-5, 2e-5, 3e-5}, {2, 3, 5, 10}, {16, 32}, {0.06, 0.1}),
        ("paper-large", "mnli", {5e-6, 7e-6, 1e-5, 2e-5}, {2, 3, 5}, {32}, {0.06}),
        ("paper-large", "squad_v2", {7e-6, 1e-5, 2e-5, 3e-5}, {2, 3}, {16, 32}, {0.06, 0.1}),
    ],
)
def test_the_papers_values(
    name: str, task: str, lr: set[float], epochs: set[int], batch_size: set[int], warmup: set[float]
) -> None:
    cells = grids.get(name).cells(TASKS[task])
    found = {(c.config.lr, c.config.epochs, c.config.batch_size, c.config.warmup) for c in cells}
    assert found == {(a, b, c, d) for a in lr for b in epochs for c in batch_size for d in warmup}
    assert len(cells) == len(found)
    assert [c.number for c in cells] == list(range(1, len(cells) + 1))
    assert all({k: getattr(c.config, k) for k in c.values} == c.values for c in cells)


def test_a_budget_is_a_fixed_subset_in_the_grids_order() -> None:
    grid, task = grids.get("paper-base"), TASKS["rte"]
    some, whole = grid.cells(task, budget=12), grid.cells(task)
    assert some == grid.cells(task, budget=12)
    assert len(some) == 12
    assert some == [cell for cell in whole if cell in some]
    assert {c.number for c in some} < {c.number for c in grid.cells(task, budget=13)}, "more budget only adds cells"
    assert [c.number for c in some] != list(range(1, 13))
    assert grid.cells(task, budget=64) == grid.cells(task, budget=1000) == whole
    assert {c.number for c in some} == {c.number for c in grid.cells(TASKS["cola"], budget=12)}


def test_base_gives_what_the_grid_does_not_name() -> None:
    base = FinetuneConfig(device="cpu", precision="fp32", lr=7.0, seed=5)
    for cell in grids.get("quick").cells(TASKS["sst2"], base):
        assert (cell.config.device, cell.config.precision, cell.config.seed) == ("cpu", "fp32", 0)
        assert cell.config.lr != 7.0


def test_a_file_with_sections(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "lr: [1e-4, 3.0e-4]\nepochs: 2\nbetas: [[0.9, 0.99]]\n"
        "small: {epochs: [4, 8], batch_size: [8]}\nrte:\n  lr: 5e-5\nsquad_v2: {max_length: [384]}\n"
    )
    grid = grids.get(str(file))
    assert grid.name == "mine.yaml"
    sst2, rte, cola = (grid.values(TASKS[name]) for name in ("sst2", "rte", "cola"))
    assert sst2 == {"lr": (1e-4, 3e-4), "epochs": (2,), "betas": ((0.9, 0.99),)}
    assert cola == {**sst2, "epochs": (4, 8), "batch_size": (8,)}
    assert rte == {**cola, "lr": (5e-5,)}
    assert grid.values(TASKS["squad_v2"])["max_length"] == (384,)
    assert grid.size(TASKS["rte"]) == 2
    assert grid.values(custom("classification", ["text"], "label")) == cola


def test_a_section_for_tasks_of_ones_own_whatever_their_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("lr: 1e-4\ncustom: {epochs: 7}\n")
    grid = grids.get(str(file))
    for name in ("custom", "news"):
        assert grid.values(custom("classification", ["text"], "label", name=name))["epochs"] == (7,)
    assert "epochs" not in grid.values(TASKS["rte"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate: [1e-4]", "unknown field 'learning_rate'"),
        ("epoch: [3]", "did you mean 'epochs'"),
        ("lr: [fast]", "lr takes numbers, not 'fast'"),
        ("lr: [true]", "lr takes numbers, not True"),
        ("lr: []", "lr has no value"),
        ("lr: [1e-4, 0.0001]", "lr has the value 0.0001 twice"),
        ("lr: [-1]", "lr must be positive"),
        ("lr: [.inf]", "lr takes numbers"),
        ("epochs: [2.5]", "epochs takes whole numbers, not 2.5"),
        ("epochs: [0]", "epochs must be at least 1"),
        ("betas: [0.9, 0.98]", "each value of betas is 2 numbers"),
        ("precision: [fp16]", "precision is one of auto, bf16, fp32"),
        ("precision: [bf16, fp32]", "precision takes one value"),
        ("seed: [0, 1]", "seed is not searched over; every cell runs with seeds 0 to N-1"),
        ("device: cpu", "device is not searched over; use --device"),
        ("sst3: {lr: [1e-4]}", "unknown section 'sst3'"),
        ("sst2: [1e-4]", "'sst2' is a section"),
        ("lr: [1e-4]\nlr: [2e-4]", "'lr' stands twice"),
        ("lr: [", "cannot be read as YAML"),
        ("- 1", "a grid is a mapping"),
        ("", "a grid is a mapping"),
    ],
)
def test_what_is_wrong_with_a_file(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        grids.get(str(file))
    assert str(error.value).startswith(str(file))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown grid 'papers'.*paper-base, paper-large, quick"):
        grids.get("papers")
    with pytest.raises(UserError, match="no such file"):
        grids.get(str(tmp_path / "none.yaml"))
