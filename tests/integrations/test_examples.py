"""What examples/ and the README print runs as it is printed, and loops of five libraries train the same model."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
import torch

from maelm_fast import MaeLmForPreTraining, TokenStore, presets, pretrain
from maelm_fast.training.initial import Initial
from tests.waiting import HANG

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
    run = pretrain(config, store, str(tmp_path_factory.mktemp("runs") / "run"), initial)
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


def test_a_patched_roberta_goes_on(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    losses = executed("patch_roberta", store, monkeypatch=monkeypatch)["losses"]
    assert isinstance(losses, list)
    assert 4.0 < losses[0] < 8.0  # about the logarithm of 300; four times that if accumulation were not exact
    assert losses[-1] < losses[0] - 1.0


def test_sentence_embeddings_are_stock_ones_and_train(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = executed("sentence_embeddings", store, monkeypatch=monkeypatch)
    stock, patched, trained = (names[name] for name in ("stock", "patched", "trained"))
    torch.testing.assert_close(patched, stock, rtol=0.0, atol=1e-5)
    assert isinstance(trained, list)
    assert trained[-1] < trained[0] - 0.5


def test_a_patched_modernbert_has_the_loss_of_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    results = executed("speed_up_modernbert", monkeypatch=monkeypatch)["results"]
    assert isinstance(results, dict)
    losses = [[loss for loss, _ in results[name]] for name in ("stock", "patched")]
    torch.testing.assert_close(losses[1], losses[0], rtol=0.0, atol=1e-5)


def test_the_notebook(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("STORE", str(store))
    notebook = nbformat.read(EXAMPLES / "walkthrough.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # what is committed has none
    nbclient.NotebookClient(notebook, timeout=HANG, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [cell.outputs[-1]["data"]["text/plain"] for cell in notebook.cells if cell.get("outputs")]
    first, last = eval(shown[2])
    assert last < first - 1.0
    stock, patched = eval(shown[-1])
    assert patched == pytest.approx(stock, abs=1e-5)


def test_examples_are_short_and_all_of_them_are_run() -> None:
    scripts = {path.stem: len(path.read_text(encoding="utf-8").splitlines()) for path in EXAMPLES.glob("*.py")}
    assert set(scripts) == {*LOOPS, "patch_roberta", "sentence_embeddings", "speed_up_modernbert"}
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
