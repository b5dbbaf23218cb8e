"""Small encoders for the tests of fine-tuning: runs of ours without training, and Hugging Face directories."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from maelm_fast.config import MaskingConfig, ModelConfig, RunConfig
from maelm_fast.data.tokenizer import train_tokenizer
from maelm_fast.model.maelm import MaeLm
from maelm_fast.training.files import write_directory
from maelm_fast.training.rundir import LoadedRun, RunDir, RunRecord, vocabulary_of

LINES = ["the quick brown fox jumps over the lazy dog", "a dog and a fox", "is the fox lazy?", "Over, and over again."]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "dog", "a", "is", "lazy", "over", "quick", "##s"]


@cache
def tokenizer() -> Tokenizer:
    return train_tokenizer(LINES * 3, 300, cased=False)


def config(**fields: Any) -> ModelConfig:
    """140 positions reach beyond the last bucket of 32/128."""
    base = ModelConfig(
        vocab_size=tokenizer().get_vocab_size(),
        max_positions=140,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        ffn_size=48,
        decoder_layers=1,
    )
    return replace(base, **fields)


def loaded_run(bpe: Tokenizer | None = None, masking: MaskingConfig = MaskingConfig(), **fields: Any) -> LoadedRun:
    """With weights large enough that a wrong place of one shows. bpe: its tokenizer, if not the one above."""
    torch.manual_seed(1)
    bpe = bpe or tokenizer()
    model = MaeLm(config(**{"vocab_size": bpe.get_vocab_size(), **fields})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = "norm" in name and name.endswith("weight")
            parameter.normal_(float(norm), 2.0 if "relative" in name else 0.2)
    record = RunRecord("base", "stores/books", "fingerprint", None)
    run_config = RunConfig(model=model.config, masking=masking)
    return LoadedRun(model, bpe, vocabulary_of(bpe), run_config, record, 10)


def run_directory(path: Path, run: LoadedRun) -> Path:
    """As pretraining leaves it, with the run's model as its one checkpoint."""
    directory = RunDir(path)
    path.mkdir(parents=True)
    directory.write_config(run.record, run.config)
    run.tokenizer.save(str(directory.tokenizer_file))
    directory.checkpoints.mkdir()
    write_directory(
        directory.checkpoint(run.step), lambda aside: save_file(run.model.state_dict(), aside / "model.safetensors")
    )
    return path


def wordpiece() -> Any:
    """BERT's kind of tokenizer, as transformers has it."""
    import transformers

    pieces = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    pieces.normalizer = normalizers.BertNormalizer()
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pieces.decoder = decoders.WordPiece()
    pieces.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {role: f"[{role.upper()}]" for role in ("cls", "sep", "pad", "mask", "unk")}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=pieces, **{f"{role}_token": name for role, name in names.items()}
    )


def bert_directory(path: Path, kind: str = "Bert", **fields: Any) -> Path:
    """A masked language model of the BERT family with random weights, and its tokenizer."""
    import transformers

    common = {
        "vocab_size": len(WORDS),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 140,
        "pad_token_id": 0,
    }
    torch.manual_seed(2)
    model = getattr(transformers, f"{kind}ForMaskedLM")(getattr(transformers, f"{kind}Config")(**common | fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name.lower():
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(path)
    wordpiece().save_pretrained(path)
    return path
