"""What examples/ and the README print runs as it is printed, and loops of five libraries train the same model."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from maelm_fast import MaeLmForPreTraining, TokenStore, presets, pretrain
from maelm_fast.training.initial import Initial

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LOOPS = ("plain_loop", "hf_trainer", "accelerate_loop", "lightning_loop")
STEPS = 50


@pytest.fixture(scope="module")
def of_pretrain(store: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of our own trainer, from the weights that the examples start from."""
    config = presets.change(
        presets.get("tiny"),
        optim={"max_steps": STEPS, "warmup_steps": 5, "lr": 1e-3, "batch_size": 32},
        runtime={"micro_batch_size": 16, "log_every": 1, "eval_samples": 32, "device": "cpu", "precision": "fp32"},
        metrics={"rank_every": 0},
    )
    torch.manual_seed(0)
    tokenizer = TokenStore.open(store).tokenizer()
    weights = MaeLmForPreTraining.from_preset("tiny", tokenizer=tokenizer).maelm.state_dict()
    initial = Initial({"vocab_size": tokenizer.get_vocab_size()}, weights, None, "the examples")
    run = pretrain("tiny", config, str(store), str(tmp_path_factory.mktemp("runs") / "run"), initial)
    return [row["loss"] for row in run.metrics() if row["kind"] == "train"]


def executed(name: str, *arguments: object, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The script's names after it was run as a program."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", LOOPS)
def test_loops_of_other_libraries_train_as_ours_does(
    name: str, of_pretrain: list[float], store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same batches, masks and updates, of two micro-batches each: losses equal to rounding, over 50 updates."""
    monkeypatch.chdir(tmp_path)
    losses = executed(name, store, monkeypatch=monkeypatch)["losses"]
    assert isinstance(losses, list)
    assert len(losses) == len(of_pretrain) == STEPS
    assert max(abs(a - b) for a, b in zip(losses, of_pretrain, strict=True)) < 1e-5
    assert losses[-1] < losses[0] - 2.0


def test_examples_are_short() -> None:
    scripts = {path.stem: len(path.read_text(encoding="utf-8").splitlines()) for path in EXAMPLES.glob("*.py")}
    assert set(LOOPS) <= set(scripts)
    assert all(lines < 60 for lines in scripts.values()), scripts


def test_the_readme_from_python(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = (ROOT / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    lines = block.strip().splitlines()
    assert len(lines) <= 10
    assert sum(line.startswith(("import ", "from ")) for line in lines) == 1
    (tmp_path / "demo-run").mkdir()
    (tmp_path / "demo-run" / "store").symlink_to(store)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    model = names["model"]
    assert isinstance(model, MaeLmForPreTraining)
    assert all(parameter.grad is not None for parameter in model.parameters())
