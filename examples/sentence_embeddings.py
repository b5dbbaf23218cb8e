"""sentence-transformers on our kernels: embed and train as before.

The tokenizer is a store's:  maelm-fast data prepare embedded --out store --vocab-size 1024 --seq-len 64
Then:                        python examples/sentence_embeddings.py store
"""

import sys
import tempfile

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from transformers import MPNetConfig, MPNetModel, PreTrainedTokenizerFast

from maelm_fast import patch

NAMES = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>", "mask": "<mask>"}
WORDS = "house school water family week money book night story friend".split()
QUESTIONS = [f"Where is the {word}?" for word in WORDS]
ANSWERS = [f"The {word} is behind the old station, and has been there for as long as I can think." for word in WORDS]


def main(store: str) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    names = {f"{role}_token": name for role, name in NAMES.items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{store}/tokenizer.json", model_max_length=128, **names)
    torch.manual_seed(0)  # in the place of SentenceTransformer("all-mpnet-base-v2"), which needs the network
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    with tempfile.TemporaryDirectory() as folder:
        MPNetModel(MPNetConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        model = SentenceTransformer(folder, device="cpu")  # with mean pooling

    stock = model.encode(QUESTIONS + ANSWERS, convert_to_tensor=True)
    patch(model[0].auto_model)  # the one line
    patched = model.encode(QUESTIONS + ANSWERS, convert_to_tensor=True)

    arguments = SentenceTransformerTrainingArguments(
        output_dir="sentence-embeddings",
        per_device_train_batch_size=len(WORDS),
        max_steps=8,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    pairs = Dataset.from_dict({"question": QUESTIONS, "answer": ANSWERS})
    loss = MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(model, arguments, train_dataset=pairs, loss=loss)
    trainer.train()
    return stock, patched, [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    stock, patched, trained = main(*sys.argv[1:])
    print(f"embeddings differ by at most {(stock - patched).abs().max():.1e}")
