"""Hugging Face's Trainer on a small RoBERTa and 64 made-up texts.

Trainer leaves the division of accumulated losses to models whose forward takes any keyword, and gives them
`num_items_in_batch` for it. The encoders of transformers 5 take it and drop it (transformers#47688): loss and gradient
are then the sum of the batches' means.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch

TEXTS, LONGEST, VOCAB, PAD, MASK, IGNORED = 64, 60, 200, 1, 4, -100


def texts() -> list[dict[str, torch.Tensor]]:
    """Of 8 to 60 tokens, a seventh of them to predict."""
    draw, rows = torch.Generator().manual_seed(0), []
    for _ in range(TEXTS):
        count = int(torch.randint(8, LONGEST, (), generator=draw))
        ids = torch.randint(MASK + 1, VOCAB, (count,), generator=draw)
        labels, chosen = torch.full((count,), IGNORED), torch.randperm(count, generator=draw)[: count // 7]
        labels[chosen] = ids[chosen]
        ids[chosen] = MASK
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def padded(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    def pad(name: str, filling: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], True, filling)

    ids = pad("input_ids", PAD)
    return {"input_ids": ids, "attention_mask": ids.ne(PAD).long(), "labels": pad("labels", IGNORED)}


def small_roberta() -> Any:
    from transformers import RobertaConfig, RobertaForMaskedLM

    torch.manual_seed(0)
    return RobertaForMaskedLM(
        RobertaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=LONGEST + 2,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def trained(model: Any, batch: int, accumulated: int, updates: int, **options: Any) -> Any:
    """The Trainer after `updates` of `accumulated` batches each."""
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    with tempfile.TemporaryDirectory() as scratch:
        told: dict[str, Any] = {
            "output_dir": scratch,
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": accumulated,
            "max_steps": updates,
            "logging_steps": 1,
            "learning_rate": 1e-3,
            "max_grad_norm": 1e9,  # nothing is clipped
            "use_cpu": True,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        trainer = Trainer(model, TrainingArguments(**told | options), padded, texts())
        for noisy in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(noisy)
        trainer.train(resume_from_checkpoint=options.get("resume_from_checkpoint"))
    return trainer


def first_update(trainer: Any) -> tuple[float, float]:
    """Loss and norm of the gradient."""
    (record,) = [record for record in trainer.state.log_history if record.get("step") == 1 and "grad_norm" in record]
    return record["loss"], record["grad_norm"]
