"""The average of the weights: what it is of, that training does not notice it, and that a run goes on with it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from maelm_fast.config import RunConfig
from maelm_fast.data.loader import validation_batches
from maelm_fast.data.token_store import TokenStore
from maelm_fast.errors import UserError
from maelm_fast.masking import Masker
from maelm_fast.training import memory
from maelm_fast.training.average import Average
from maelm_fast.training.job import pretrain
from maelm_fast.training.parallel import Processes
from maelm_fast.training.rundir import load_run
from maelm_fast.training.trainer import Trainer, evaluate
from tests.training.runs import assert_same, config, pretrain_until, rows


def averaging(decay: float = 0.7, **runtime: Any) -> RunConfig:
    return config(optim={"name": "muon", "average": decay, "lr_end": 0.3}, runtime=runtime)


def saved(run: Path, file: str) -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / "step_8" / f"{file}.safetensors")


def test_what_is_evaluated_and_saved_is_the_average(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the weights that the same run without it trains, bit for bit; which are kept beside it."""
    trained: list[dict[str, Tensor]] = []
    update = Trainer.update

    def noted(self: Trainer, *arguments: Any) -> Any:
        done = update(self, *arguments)
        trained.append({name: p.detach().double() for name, p in self.model.named_parameters()})
        return done

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", noted)
        pretrain(averaging(0.0), store, tmp_path / "plain")
    pretrain(averaging(), store, tmp_path / "run")
    plain, run = ([row for row in rows(tmp_path / name) if row["kind"] == "train"] for name in ("plain", "run"))
    assert plain == run
    average, other = saved(tmp_path / "run", "model"), saved(tmp_path / "run", "optimizer")
    for name, last in saved(tmp_path / "plain", "model").items():
        assert torch.equal(other.pop(f"other.{name}"), last)
        expected = trained[0][name]
        for done, weights in enumerate(trained, start=1):
            decay = min(0.7, done / (done + 3))
            expected = decay * expected + (1 - decay) * weights[name]
        torch.testing.assert_close(average[name].double(), expected, rtol=0, atol=1e-6, msg=name)
    assert other.keys() == saved(tmp_path / "plain", "optimizer").keys()
    loaded, samples = load_run(tmp_path / "run"), TokenStore.open(store, "validation")
    masker = Masker(loaded.config.masking.final, loaded.vocabulary, loaded.config.seed, False)
    cpu, batches = torch.device("cpu"), validation_batches(samples, masker, 5, 20)
    result = evaluate(loaded.model, batches, cpu, contextlib.nullcontext, Processes(cpu))
    losses = [row["val_loss"] for row in rows(tmp_path / "run") if row["kind"] == "validation"]
    assert losses[-1] == result["val_loss"]


@pytest.mark.parametrize("cut", [1, 4, 7])
def test_resume_is_bitwise_with_an_average(cut: int, store: Path, tmp_path: Path) -> None:
    pretrain(averaging(), store, tmp_path / "whole")
    pretrain_until(cut, averaging(), str(store), str(tmp_path / "run"))
    pretrain(averaging(async_save=True), store, tmp_path / "run")
    assert_same(tmp_path / "run", tmp_path / "whole")
    mine, theirs = (saved(tmp_path / run, "optimizer") for run in ("run", "whole"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    with pytest.raises(UserError, match=r"was started with optim\.average=0\.7; use the same"):
        pretrain(averaging(0.0), store, tmp_path / "run")


def test_the_weights_are_exchanged_in_place_and_come_back() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    average = Average(model, optimizer, 0.5)
    with average.in_model():
        assert not optimizer.state[model.weight]  # before the first update there is nothing to exchange
    for done in (1, 2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        average.add(done)
    before, place = model.weight.detach().clone(), model.weight.data_ptr()
    with contextlib.suppress(KeyError), average.in_model():
        assert not torch.equal(model.weight, before)
        assert torch.equal(optimizer.state[model.weight]["other"], before)
        raise KeyError
    assert torch.equal(model.weight, before)
    assert model.weight.data_ptr() == place


def test_it_counts_in_the_estimate_of_memory() -> None:
    fixed = [memory.estimated(averaging(decay), 1000, 32)[0] for decay in (0.7, 0.0)]
    assert fixed[0] - fixed[1] == 4000


@pytest.mark.parametrize("name", ["average", "lr_end"])
def test_a_decay_and_an_end_lie_below_one(name: str) -> None:
    for wrong in (-0.1, 1.0):
        with pytest.raises(UserError, match=rf"optim\.{name} must lie in \[0, 1\), not {wrong}"):
            config(optim={name: wrong})
