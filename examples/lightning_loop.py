"""Pretrain a tiny MAE-LM with Lightning's Trainer. (A script named lightning.py would hide the package from itself.)

First, text that every machine has:  maelm-fast data prepare embedded --out store --vocab-size 1024 --seq-len 64
Then:                                python examples/lightning_loop.py store
"""

import sys

import torch
from lightning.pytorch import Callback, Trainer

from maelm_fast import MaeLmForPreTraining, TokenStore, presets
from maelm_fast.integrations.lightning import MaeLmDataModule, MaeLmModule

STEPS, BATCH, MICRO_BATCHES = 50, 32, 2


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if "train_loss" in trainer.callback_metrics:  # the last update's
            self.seen[trainer.global_step] = trainer.callback_metrics["train_loss"].item()


def main(path: str) -> list[float]:
    config = presets.change(
        presets.get("tiny"),
        optim={"max_steps": STEPS, "warmup_steps": 5, "lr": 1e-3, "batch_size": BATCH},
        runtime={"micro_batch_size": BATCH // MICRO_BATCHES, "eval_samples": 64},
    )
    torch.manual_seed(0)
    model = MaeLmForPreTraining.from_preset("tiny", tokenizer=TokenStore.open(path).tokenizer())
    losses = Losses()
    trainer = Trainer(
        max_steps=STEPS,
        accumulate_grad_batches=MICRO_BATCHES,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(MaeLmModule(model, config.optim), MaeLmDataModule(path, config))
    return list(losses.seen.values())


if __name__ == "__main__":
    losses = main(*sys.argv[1:])
    print(*(f"step {step}: loss {loss:.4f}" for step, loss in enumerate(losses, start=1)), sep="\n")
