"""Pretrain a tiny MAE-LM with transformers' Trainer, on any number of processes: torchrun --nproc-per-node 2 ... works
as it is.

First, text that every machine has:  maelm-fast data prepare embedded --out store --vocab-size 1024 --seq-len 64
Then:                                python examples/hf_trainer.py store
"""

import sys

import torch
from transformers import Trainer, TrainingArguments, get_linear_schedule_with_warmup

from maelm_fast import MaeLmForPreTraining, MaskedTokenDataset, PackedMaskingCollator, TokenStore

STEPS, BATCH, MICRO_BATCHES = 50, 32, 2


def main(path: str) -> list[float]:
    store = TokenStore.open(path)
    torch.manual_seed(0)
    model = MaeLmForPreTraining.from_preset("tiny", tokenizer=store.tokenizer())
    collator = PackedMaskingCollator(store.tokenizer(), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01)
    schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=STEPS)
    arguments = TrainingArguments(
        output_dir="hf-trainer",
        per_device_train_batch_size=BATCH // MICRO_BATCHES,
        gradient_accumulation_steps=MICRO_BATCHES,
        max_steps=STEPS,
        max_grad_norm=2.0,
        remove_unused_columns=False,  # a row's idx and epoch are for the collator
        train_sampling_strategy="sequential",  # the rows are in the order of `maelm-fast pretrain` already
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        arguments,
        data_collator=collator,
        train_dataset=MaskedTokenDataset(store, seed=0, samples=STEPS * BATCH),
        optimizers=(optimizer, schedule),
        callbacks=[collator.callback()],  # tells the collator the epoch where rows do not; refuses what cuts batches
    )
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    losses = main(*sys.argv[1:])
