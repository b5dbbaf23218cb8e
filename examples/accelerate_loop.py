"""Pretrain a tiny MAE-LM with Accelerate, on any number of processes: accelerate launch works as it is.

First, text that every machine has:  maelm-fast data prepare embedded --out store --vocab-size 1024 --seq-len 64
Then:                                accelerate launch examples/accelerate_loop.py store
"""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

from maelm_fast import MaeLmForPreTraining, MaskedTokenDataset, PackedMaskingCollator, TokenStore

STEPS, BATCH, MICRO_BATCHES = 50, 32, 2  # BATCH is that of one process


def main(path: str) -> list[float]:
    accelerator = Accelerator(step_scheduler_with_optimizer=False)
    store = TokenStore.open(path)
    torch.manual_seed(0)
    model = MaeLmForPreTraining.from_preset("tiny", tokenizer=store.tokenizer())
    rows = MaskedTokenDataset(store, seed=0, samples=STEPS * BATCH * accelerator.num_processes)
    collator = PackedMaskingCollator(store.tokenizer(), seed=0)
    loader = DataLoader(rows, batch_size=BATCH // MICRO_BATCHES, collate_fn=collator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01)
    schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=STEPS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    losses, batches = [], iter(loader)
    for _ in range(STEPS):
        update = [next(batches) for _ in range(MICRO_BATCHES)]
        masked = torch.tensor([sum(len(batch["labels"]) for batch in update)], device=accelerator.device)
        masked = accelerator.reduce(masked, "sum").squeeze()  # over all processes
        loss = torch.zeros((), device=accelerator.device)
        for batch in update:
            part = model(**batch, num_items_in_batch=masked).loss
            accelerator.backward(part * accelerator.num_processes)  # whose gradients DDP averages
            loss += part.detach()
        accelerator.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss, "sum").item())
    return losses


if __name__ == "__main__":
    losses = main(*sys.argv[1:])
    print(*(f"step {step}: loss {loss:.4f}" for step, loss in enumerate(losses, start=1)), sep="\n")
