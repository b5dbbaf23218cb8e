"""Go on with masked language modelling of a RoBERTa in transformers' Trainer, on our kernels: one line more.

The tokenizer is a store's:  maelm-fast data prepare embedded --out store --vocab-size 1024 --seq-len 64
Then:                        python examples/patch_roberta.py store
"""

import sys
from pathlib import Path

import torch
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    Trainer,
    TrainingArguments,
)

from maelm_fast import patch

NAMES = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>", "mask": "<mask>"}
TEXT = Path(__file__).parents[1] / "docs" / "pretraining.md"


def main(store: str) -> list[float]:
    names = {f"{role}_token": name for role, name in NAMES.items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{store}/tokenizer.json", model_max_length=128, **names)
    paragraphs = TEXT.read_text(encoding="utf-8").split("\n\n")  # of many lengths
    rows = [dict(tokenizer(text, truncation=True)) for text in paragraphs]

    torch.manual_seed(0)  # in the place of RobertaForMaskedLM.from_pretrained("roberta-base"), which needs the network
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
    config = RobertaConfig(vocab_size=len(tokenizer), max_position_embeddings=130, **sizes)
    model = patch(RobertaForMaskedLM(config))  # the one line; unpatch(model) takes it back

    arguments = TrainingArguments(
        output_dir="patch-roberta",
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,  # exact, which it is not without patch
        max_steps=20,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=DataCollatorForLanguageModeling(tokenizer))
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    losses = main(*sys.argv[1:])
