"""Hugging Face's encoders in small, rough weights in them, and batches that pad them in every way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VOCAB, PAD = 60, 1
ENDS = {"pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 2}
SHAPE = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 150,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
}
FIELDS: dict[str, dict[str, Any]] = {
    "electra": {"embedding_size": 16, "summary_last_dropout": 0.0},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 40},
    "modernbert": {"num_hidden_layers": 3, "local_attention": 8, "cls_token_id": 0, "sep_token_id": 2},
}
DROPOUTS = {
    "distilbert": ("dropout", "attention_dropout"),
    "modernbert": ("embedding_dropout", "attention_dropout", "mlp_dropout"),
}
LENGTHS = {
    "ragged": ((140, 1, 9, 37), 140, "right"),
    "left-padded": ((23, 2, 9, 17), 25, "left"),
    "one token": ((1, 1, 1), 1, "right"),
    "full": ((13, 13), 13, "right"),
}


def config_of(family: str, dropout: float = 0.0, **fields: Any) -> Any:
    from transformers import AutoConfig

    dropped = dict.fromkeys(DROPOUTS.get(family, ("hidden_dropout_prob", "attention_probs_dropout_prob")), dropout)
    if family == "distilbert":
        dropped["seq_classif_dropout"] = dropped["qa_dropout"] = dropout
    return AutoConfig.for_model(family, **{**SHAPE, **ENDS, **FIELDS.get(family, {}), **dropped, **fields})


def model_of(config: Any, task: str = "MaskedLM", dtype: torch.dtype = torch.float64) -> Any:
    """In training mode, no bias 0 and no norm the identity. task: what follows AutoModelFor; "" for the base model."""
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, f"AutoModelFor{task}" if task else "AutoModel")
    model = kind.from_config(config).to(dtype).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter), alpha=2.0 if "relative" in name else 0.2)
    return model


def batch_of(kind: str, seed: int = 1) -> dict[str, Tensor]:
    """input_ids, attention_mask, and as labels three tokens of ten and each text's first."""
    lengths, longest, side = LENGTHS[kind]
    draw = torch.Generator().manual_seed(seed)
    columns, counts = torch.arange(longest)[None], torch.tensor(lengths)[:, None]
    first = longest - counts if side == "left" else torch.zeros_like(counts)
    kept = (columns >= first) & (columns < first + counts)
    ids = torch.randint(5, VOCAB, kept.shape, generator=draw)
    asked = kept & ((torch.rand(kept.shape, generator=draw) < 0.3) | (columns == first))
    return {"input_ids": ids.where(kept, PAD), "attention_mask": kept.long(), "labels": ids.where(asked, -100)}


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step(model: Any, **inputs: Any) -> tuple[Any, dict[str, Tensor]]:
    """The output, and every gradient of its loss."""
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    return out, gradients(model)


def assert_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Of the largest of all gradients."""
    assert actual.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=tolerance, atol=tolerance * largest, msg=name)
