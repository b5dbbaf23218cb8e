"""One training by transformers' Trainer, as it is told, on the processes that torchrun started, or on this one.

torchrun --standalone --nproc-per-node 2 tests/integrations/ddp_trainer.py STORE OUT SAMPLES_OF_A_PROCESS
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from maelm_fast import MaeLmForPreTraining, MaskedTokenDataset, PackedMaskingCollator, TokenStore
from maelm_fast.config import MaskingConfig

STEPS, ACCUMULATED = 4, 2
MASKING = MaskingConfig(rate=0.3, count="stochastic")


def trained(path: str, out: str, batch_size: int, **options: Any) -> Trainer:
    """STEPS updates of ACCUMULATED micro-batches of batch_size samples, documents of many lengths, in each process."""
    store = TokenStore.open(path)
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "ffn_size": 32}
    torch.manual_seed(0)
    model = MaeLmForPreTraining.from_preset("tiny", tokenizer=store.tokenizer(), **sizes)
    collator = PackedMaskingCollator(store.tokenizer(), MASKING)
    settings = {
        "output_dir": out,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": ACCUMULATED,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.0,
        "remove_unused_columns": False,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    rows = options.pop("rows", MaskedTokenDataset(store))
    resume = options.pop("resume_from_checkpoint", None)
    trainer = Trainer(
        model,
        TrainingArguments(**{**settings, **options}),
        data_collator=collator,
        train_dataset=rows,
        callbacks=[collator.callback()],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer: Trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    store, out, batch_size = sys.argv[1:]
    trainer = trained(store, out, int(batch_size), ddp_backend="gloo")
    if trainer.is_world_process_zero():
        weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
        torch.save({"losses": losses(trainer), "weights": weights}, Path(out) / "result.pt")
    sys.stdout.flush()
    # At Python's own end a thread of gloo that still holds a tensor aborts the process: in 4 launches of 25.
    os._exit(0)
