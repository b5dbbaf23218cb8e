"""MAE-LM under Lightning's Trainer: our optimiser, schedule, order and masks in Lightning's loop.

    config, store = presets.get("tiny"), "store"
    model = MaeLmForPreTraining.from_preset("tiny", tokenizer=TokenStore.open(store).tokenizer())
    trainer = Trainer(max_steps=config.optim.max_steps)
    trainer.fit(MaeLmModule(model, config.optim), MaeLmDataModule(store, config))

An update's gradient is that of the mean over all its masked tokens, however many of them each micro-batch and each
process has: losses are summed, and the gradient is divided once, before it is clipped. That Lightning divides a loss by
the number of micro-batches, and DDP a gradient by that of processes, is undone.

To Lightning the whole run is one epoch. Where it resumes follows from the updates done, Trainer.global_step, alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, Subset

from maelm_fast.config import OptimConfig, RunConfig, require
from maelm_fast.data.order import permutation
from maelm_fast.data.token_store import TokenStore
from maelm_fast.integrations.transformers.collator import MaskedTokenDataset, PackedMaskingCollator
from maelm_fast.masking import VALIDATION_EPOCH
from maelm_fast.training.optim import build_optimizer, learning_rate


class MaeLmModule(LightningModule):
    """A MaeLmForPreTraining, `self.model`, trained by AdamW under the schedule of `optim`; a batch is what
    PackedMaskingCollator makes.

    Logs train_loss once an update and val_loss, each the mean over masked tokens in nats. Clips at
    Trainer(gradient_clip_val=...), or at optim.clip_norm if that is not given. For fp32 and bf16: a sum of losses can
    leave the range of fp16. Raises UserError if the Trainer's max_steps do not lie within the schedule."""

    def __init__(self, model: torch.nn.Module, optim: OptimConfig) -> None:
        super().__init__()
        self.model, self.optim = model, optim
        self._sums: list[Tensor] = []  # of the update's micro-batches so far: loss and masked tokens, (2,) each

    def configure_optimizers(self) -> OptimizerLRScheduler:
        steps = self.optim.max_steps
        require(
            0 < self.trainer.max_steps <= steps,
            f"the learning rate falls until optim.max_steps {steps}, but Trainer(max_steps={self.trainer.max_steps}) "
            "stops elsewhere: give both the same",
        )
        require(
            self.optim.average == 0.0,
            "optim.average is for maelm-fast's own loop: set optim.average=0, and give Lightning's Trainer a callback "
            "that averages weights (EMAWeightAveraging)",
        )
        optimizer = build_optimizer(self.model, self.optim)
        schedule = LambdaLR(optimizer, lambda step: learning_rate(self.optim, step) / self.optim.lr)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        output = self.model(**batch, num_items_in_batch=1)
        self._sums.append(torch.stack((output.loss.detach().double(), output.predicted.double())))
        return output.loss * self.trainer.accumulate_grad_batches  # type: ignore[no-any-return]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        sums: Any = self.trainer.strategy.reduce(torch.stack(self._sums).sum(0), reduce_op="sum")
        self._sums = []
        loss, predicted = sums[0], sums[1].clamp(min=1)
        scale = (self.trainer.world_size / predicted).float()
        torch._foreach_mul_([p.grad for p in self.model.parameters() if p.grad is not None], scale)
        self.log("train_loss", (loss / predicted).float(), prog_bar=True, batch_size=1)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        if gradient_clip_val is not None:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif self.optim.clip_norm:  # Lightning's own refuses fused AdamW under bf16-mixed
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.optim.clip_norm)

    def validation_step(self, batch: dict[str, Any]) -> None:
        masked = batch["labels"].shape[0]
        self.log("val_loss", self.model(**batch).loss, prog_bar=True, batch_size=masked, sync_dist=True)


class MaeLmDataModule(LightningDataModule):
    """A token store's updates in the order and with the masks of `maelm-fast pretrain` under config.seed, on any number
    of processes, and the samples of its evaluations.

    data: the store's directory. config: its masking, seed, optim.batch_size and max_steps, runtime.micro_batch_size
    (samples of a forward pass in one process), workers and eval_samples count. Raises UserError if micro_batch_size *
    Trainer(accumulate_grad_batches=...) * processes is not optim.batch_size."""

    def __init__(self, data: str | Path, config: RunConfig) -> None:
        super().__init__()
        self.config = config
        self.train, self.validation = TokenStore.open(data, "train"), TokenStore.open(data, "validation")
        self.collator = PackedMaskingCollator(
            self.train.tokenizer(),
            config.masking,
            seed=config.seed,
            encoder_sees_mask=config.model.decoder == "none",
        )

    def train_dataloader(self) -> DataLoader:
        trainer, batch_size, micro = self._trainer(), self.config.optim.batch_size, self._micro_batch_size
        accumulated = trainer.accumulate_grad_batches * trainer.world_size
        require(
            micro * accumulated == batch_size,
            f"runtime.micro_batch_size {micro} * Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) * "
            f"{trainer.world_size} processes must be optim.batch_size {batch_size}: change one of them",
        )
        places = batch_size * self.config.optim.max_steps
        rows = MaskedTokenDataset(self.train, seed=self.config.seed, samples=places)
        sampler = _Places(rows, trainer, micro, lambda: trainer.global_step * batch_size)
        return _ResumableLoader(rows, sampler=sampler, **self._options())

    def val_dataloader(self) -> DataLoader:
        count = min(len(self.validation), self.config.runtime.eval_samples)
        samples = permutation(np.arange(count), len(self.validation), self.config.seed, VALIDATION_EPOCH)
        return DataLoader(Subset(MaskedTokenDataset(self.validation), samples.tolist()), **self._options())

    @property
    def _micro_batch_size(self) -> int:
        return min(self.config.runtime.sequences_at_once, self.config.optim.batch_size)

    def _trainer(self) -> Any:
        require(self.trainer is not None, "give the data to a Trainer: trainer.fit(module, data)")
        return self.trainer

    def _options(self) -> dict[str, Any]:
        return {
            "batch_size": self._micro_batch_size,
            "collate_fn": self.collator,
            "num_workers": self.config.runtime.workers,
        }


class _Places(DistributedSampler):
    """This process's places of the run's order, from the update to do next on. A DistributedSampler, since Lightning
    puts another in the place of any other kind."""

    def __init__(self, rows: MaskedTokenDataset, trainer: Any, micro: int, first: Callable[[], int]) -> None:
        super().__init__(rows, trainer.world_size, trainer.global_rank, shuffle=False)
        self.micro, self.first = micro, first

    def __iter__(self) -> Iterator[int]:
        starts = range(self.first() + self.rank * self.micro, len(self.dataset), self.num_replicas * self.micro)  # type: ignore[arg-type]
        return (place for start in starts for place in range(start, start + self.micro))


class _ResumableLoader(DataLoader):
    """Lightning asks a loader for a state before it believes that it can be resumed. There is none."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""
