"""Under Lightning: exact accumulation, our validation loss, a resume that goes on bit for bit, and what it refuses."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from maelm_fast import MaeLmForPreTraining, TokenStore, presets
from maelm_fast.config import RunConfig
from maelm_fast.data.loader import validation_batches
from maelm_fast.errors import UserError
from maelm_fast.integrations.lightning import MaeLmDataModule, MaeLmModule
from maelm_fast.integrations.transformers.collator import MaskedTokenDataset
from maelm_fast.training.parallel import Processes
from maelm_fast.training.trainer import evaluate

STEPS = 6
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")


def config(micro_batch_size: int) -> RunConfig:
    return presets.change(
        presets.get("tiny"),
        masking={"count": "stochastic", "rate": 0.3},
        optim={"max_steps": STEPS, "warmup_steps": 1, "lr": 1e-2, "batch_size": 8, "clip_norm": 0.5},
        runtime={"micro_batch_size": micro_batch_size, "eval_samples": 16},
    )


class Watched(MaeLmModule):
    """Keeps the norms of the gradients before and after they are clipped."""

    def configure_gradient_clipping(self, *arguments: Any, **options: Any) -> None:
        self.norms = [*getattr(self, "norms", []), self.norm()]
        super().configure_gradient_clipping(*arguments, **options)
        self.clipped = self.norm()

    def norm(self) -> float:
        return float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None]))


def module(store: Path) -> Watched:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "ffn_size": 32}
    tokenizer = TokenStore.open(store).tokenizer()
    return Watched(MaeLmForPreTraining.from_preset("tiny", tokenizer=tokenizer, **sizes), config(8).optim)


def trainer(tmp_path: Path, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    defaults = {"max_steps": STEPS, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    return Trainer(default_root_dir=tmp_path, **{**quiet, **defaults, **options})


def test_micro_batches_with_unequal_masks_add_up(document_store: Path, tmp_path: Path) -> None:
    whole, parts = module(document_store), module(document_store)
    losses = []
    for accumulated, of in ((1, whole), (4, parts)):
        running = trainer(tmp_path, accumulate_grad_batches=accumulated)
        running.fit(of, MaeLmDataModule(document_store, config(8 // accumulated)))
        assert running.global_step == STEPS
        losses.append(running.callback_metrics["train_loss"].item())
    assert abs(losses[0] - losses[1]) < 1e-6
    assert parts.norms == pytest.approx(whole.norms, rel=1e-5)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(parts.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)
    counts = [len(batch["labels"]) for batch in MaeLmDataModule(document_store, config(2)).val_dataloader()]
    assert max(counts) > 1.5 * min(counts)  # so that the test can fail
    first = MaeLmDataModule(document_store, config(8))
    rows = MaskedTokenDataset(first.train, seed=0)
    plain = module(document_store)
    plain.model(**first.collator([rows[i] for i in range(8)])).loss.backward()
    assert plain.norm() == pytest.approx(whole.norms[0], rel=1e-5)


def test_validation_is_ours(document_store: Path, tmp_path: Path) -> None:
    data, of = MaeLmDataModule(document_store, config(8)), module(document_store)
    (result,) = trainer(tmp_path).validate(of, data, verbose=False)
    batches = validation_batches(data.validation, data.collator.masker, 8, 16)
    cpu = torch.device("cpu")
    ours = evaluate(of.model.maelm, batches, cpu, lambda: torch.autocast("cpu", enabled=False), Processes(cpu))
    assert result["val_loss"] == pytest.approx(ours["val_loss"], abs=1e-6)


def test_a_resumed_run_goes_on_bit_for_bit(document_store: Path, tmp_path: Path) -> None:
    straight, stopped, resumed = (module(document_store) for _ in range(3))
    trainer(tmp_path, accumulate_grad_batches=2).fit(straight, MaeLmDataModule(document_store, config(4)))
    save = ModelCheckpoint(tmp_path, filename="half", every_n_train_steps=3, save_top_k=-1)
    trainer(tmp_path, accumulate_grad_batches=2, max_steps=4, enable_checkpointing=True, callbacks=[save]).fit(
        stopped, MaeLmDataModule(document_store, config(4))
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not resumable.*")
        again = trainer(tmp_path, accumulate_grad_batches=2)
        again.fit(resumed, MaeLmDataModule(document_store, config(4)), ckpt_path=str(tmp_path / "half.ckpt"))
    assert again.global_step == STEPS
    for name, parameter in straight.named_parameters():
        assert torch.equal(resumed.get_parameter(name), parameter), name


def test_settings_that_do_not_fit_are_one_line(store: Path, tmp_path: Path) -> None:
    data, of = MaeLmDataModule(store, config(4)), module(store)
    with pytest.raises(UserError, match=r"micro_batch_size 4 \* Trainer\(accumulate_grad_batches=1\) \* 1 processes"):
        trainer(tmp_path).fit(of, data)
    for steps in (-1, STEPS + 1):
        with pytest.raises(UserError, match=rf"max_steps={steps}\) stops elsewhere: give both the same"):
            trainer(tmp_path, max_steps=steps, max_epochs=1, accumulate_grad_batches=2).fit(of, data)
    averaged = MaeLmModule(of.model, replace(of.optim, average=0.9))
    with pytest.raises(UserError, match=r"set optim\.average=0"):
        trainer(tmp_path, accumulate_grad_batches=2).fit(averaged, data)
    with pytest.raises(UserError, match="give the data to a Trainer"):
        MaeLmDataModule(store, config(8)).train_dataloader()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gradients_are_clipped(precision: str, store: Path, tmp_path: Path) -> None:
    """Lightning's own clipping refuses a fused optimiser under bf16."""
    of = module(store)
    trainer(tmp_path, precision=precision, max_steps=1).fit(of, MaeLmDataModule(store, config(8)))
    assert of.norms[0] > 0.6
    assert of.clipped == pytest.approx(0.5, rel=1e-3)
    if precision == "32-true":
        of = module(store)
        trainer(tmp_path, max_steps=1, gradient_clip_val=0.25).fit(of, MaeLmDataModule(store, config(8)))
        assert of.clipped == pytest.approx(0.25, rel=1e-3)


def test_muon_trains(document_store: Path, tmp_path: Path) -> None:
    of = module(document_store)
    of.optim = replace(of.optim, name="muon")
    before = {name: parameter.detach().clone() for name, parameter in of.named_parameters()}
    trainer(tmp_path).fit(of, MaeLmDataModule(document_store, config(8)))
    changed = [name for name, parameter in of.named_parameters() if not torch.equal(parameter, before[name])]
    assert any(name.endswith("qkv.weight") for name in changed)
    assert any(name.endswith("token_table") for name in changed)
