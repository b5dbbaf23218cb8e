"""Learning rates, mask rates and weight decay, as functions of the update."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from maelm_fast.config import OptimConfig
from maelm_fast.errors import UserError
from maelm_fast.masking import Masker
from maelm_fast.training import trainer
from maelm_fast.training.job import pretrain
from maelm_fast.training.optim import build_optimizer, learning_rate
from maelm_fast.training.rundir import RunDir
from tests.training.runs import VOCABULARY, assert_same, config, final_weights, pretrain_until, rows


def test_validation_masks_at_the_last_rate(store: Path, tmp_path: Path) -> None:
    """Whatever the rates before it: without a step, a model has the same validation loss."""
    losses = []
    for name, masking in (("falling", {"rate": 0.4, "rate_end": 0.15}), ("plain", {}), ("other", {"rate": 0.4})):
        asked = config(optim={"max_steps": 1, "warmup_steps": 0, "lr": 1e-30}, masking=masking)
        pretrain(asked, store, tmp_path / name)
        losses.append([row["val_loss"] for row in rows(tmp_path / name) if row["kind"] == "validation"])
    assert losses[0] == losses[1] != losses[2]


def test_schedule() -> None:
    optim = OptimConfig(lr=1.0, warmup_steps=10, max_steps=110)
    assert [learning_rate(optim, k) for k in (0, 5, 10, 60, 109)] == pytest.approx([0, 0.5, 1.0, 0.5, 0.01])
    ends = replace(optim, lr_end=0.2)
    assert [learning_rate(ends, k) for k in (0, 5, 10, 60, 110)] == pytest.approx([0, 0.5, 1.0, 0.6, 0.2])
    ends = replace(ends, schedule="trapezoid", cooldown_steps=20)
    assert [learning_rate(ends, k) for k in (60, 100, 110)] == pytest.approx([1.0, 0.6, 0.2])


def test_a_trapezoid() -> None:
    optim = OptimConfig(lr=1.0, warmup_steps=10, max_steps=110, schedule="trapezoid", cooldown_steps=20)
    assert [learning_rate(optim, k) for k in (0, 5, 10, 60, 90, 100, 109)] == pytest.approx(
        [0, 0.5, 1, 1, 1, 0.5, 0.05]
    )
    assert OptimConfig(warmup_steps=0, max_steps=50, schedule="trapezoid").cooldown_steps == 25
    with pytest.raises(UserError, match=r"cooldown_steps is set but optim\.schedule is linear"):
        OptimConfig(cooldown_steps=5)
    for wrong in (0, 101, 2.5):
        with pytest.raises(UserError, match=r"optim\.cooldown_steps .* must be a whole number, at least 1 and at most"):
            OptimConfig(warmup_steps=10, max_steps=110, schedule="trapezoid", cooldown_steps=wrong)


def test_a_trapezoid_can_be_prolonged_and_cooled_down_early(store: Path, tmp_path: Path) -> None:
    """Ending as if it had been asked for from the start; but not once an update would have been another."""

    def run(out: str, max_steps: int, cut: int | None = None, cooldown: int = 3) -> None:
        asked = config(optim={"max_steps": max_steps, "schedule": "trapezoid", "cooldown_steps": cooldown})
        arguments = asked, str(store), str(tmp_path / out)
        pretrain(*arguments) if cut is None else pretrain_until(cut, *arguments)

    run("short", 7)
    run("resumed", 12, cut=5)  # the newest checkpoint is step 4's
    run("resumed", 7)
    assert_same(tmp_path / "resumed", tmp_path / "short")
    with pytest.raises(UserError, match=r"was started with optim\.max_steps=7; use the same"):
        run("resumed", 12)
    run("finished", 4, cooldown=1)  # all at the peak
    run("finished", 7)
    mine = final_weights(tmp_path / "finished")
    assert all(torch.equal(mine[name], value) for name, value in final_weights(tmp_path / "short").items())
    run("long", 12)
    run("prolonged", 7, cut=5)
    run("prolonged", 12)
    weights = final_weights(tmp_path / "prolonged")
    assert all(torch.equal(weights[name], value) for name, value in final_weights(tmp_path / "long").items())
    with pytest.raises(UserError, match=r"was started with optim\.max_steps=12; use the same"):
        run("long", 10)
    for step in (10, 12):
        (tmp_path / "long" / "checkpoints" / f"step_{step}").rename(tmp_path / str(step))
    run("long", 10)  # update 7, the last before step 8, has lr * 3 / 3
    assert RunDir(tmp_path / "long").read_config()[1].optim.max_steps == 10


def test_mask_rates_of_updates() -> None:
    """Equal steps of at most 0.05, as many updates each; the last of them at rate_end."""

    def rates(masking: dict[str, Any], steps: int) -> list[float]:
        run = config(masking=masking, optim={"max_steps": steps, "warmup_steps": 0})
        return [run.mask_rate(update) for update in range(steps)]

    assert rates({}, 3) == [0.15] * 3
    falling = rates({"rate": 0.4, "rate_end": 0.15}, 12)
    assert falling == [rate for rate in (0.4, 0.35, 0.3, 0.25, 0.2, 0.15) for _ in range(2)]
    assert rates({"rate": 0.15, "rate_end": 0.22}, 3) == [0.15, 0.185, 0.22]
    assert rates({"rate": 0.3, "rate_end": 0.3}, 2) == [0.3, 0.3]
    assert rates({"rate": 0.4, "rate_end": 0.15}, 2) == [0.4, 0.25]  # fewer updates than steps
    with pytest.raises(UserError, match=r"masking\.rate_end must lie between 0 and 1, not 1"):
        config(masking={"rate_end": 1.0})
    with pytest.raises(ValueError, match="a masker has one rate"):
        Masker(config(masking={"rate_end": 0.2}).masking, VOCABULARY, 0, False)


def test_decay_groups() -> None:
    model = trainer.build_model(config(), VOCABULARY)
    everything = build_optimizer(model, OptimConfig())
    assert [g["weight_decay"] for g in everything.param_groups] == [0.01]
    some = build_optimizer(model, OptimConfig(decay="matrices"))
    assert [g["weight_decay"] for g in some.param_groups] == [0.01, 0.0]
    plain = {id(p) for p in some.param_groups[1]["params"]}
    names = {n for n, p in model.named_parameters() if id(p) in plain}
    assert names == {n for n, p in model.named_parameters() if p.ndim < 2 or n.endswith("relative_bias.weight")}
