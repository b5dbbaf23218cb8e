"""Hugging Face's encoders by family: what patch() puts in the place of which module's forward.

A family is a row of FAMILIES, under its `config.model_type`. A function here takes the module that it stands in for,
then what that module's forward takes. The modules inside are called as modules, so that adapters and hooks in them go
on working.

Shapes: T packed tokens, M tokens to predict, d hidden size, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from maelm_fast import ops
from maelm_fast.ops import PositionBias

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Family:
    """transform: the head of a masked-LM model but for its last layer, (M, d) -> (M, d'). positions_skip_padding: stock
    numbers the tokens that are not the padding token, from behind its id on; else it numbers the columns. norm: what
    takes the place of the forward of modules whose class's name ends so. attention: likewise, by module class and name
    of the method, in a model whose attention cannot be chosen by name."""

    transform: Callable[[Any, Tensor], Tensor]
    positions_skip_padding: bool = False
    norm: Mapping[str, Forward] = field(default_factory=dict)
    attention: Mapping[tuple[str, str], Forward] = field(default_factory=dict)


def dropout_of(module: Any) -> float:
    return float(module.p) if module.training else 0.0


def dropout_seed(p: float, device: torch.device) -> Tensor | None:
    """One int64 from PyTorch's generator, None if nothing is dropped: every site draws its own."""
    return torch.randint(2**62, (), device=device) if p else None


def add_norm(x: Tensor, residual: Tensor, p: float, norm: Any) -> Tensor:
    """norm(residual + F.dropout(x, p)) as one op. x, residual: (..., d)."""
    rows = ops.add_norm(
        x.flatten(0, -2),
        residual.flatten(0, -2),
        norm.weight,
        norm.bias,
        eps=norm.eps,
        dropout_p=p,
        seed=dropout_seed(p, x.device),
    )
    return rows.view(x.shape)


def dense_add_norm(module: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    """BertSelfOutput, BertOutput and their like."""
    return add_norm(module.dense(hidden_states), input_tensor, dropout_of(module.dropout), module.LayerNorm)


def distilbert_block(module: Any, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Tensor:
    """DistilBERT's TransformerBlock. Gradient checkpointing is in stock's forward. Chunks of the feed-forward, which
    stock can make, would change nothing but memory."""
    if module.gradient_checkpointing and module.training:
        out: Tensor = type(module).forward(module, hidden_states, attention_mask, **kwargs)
        return out
    mixed, _ = module.attention(hidden_states, attention_mask=attention_mask, **kwargs)
    x = add_norm(mixed, hidden_states, 0.0, module.sa_layer_norm)
    ffn = module.ffn
    return add_norm(ffn.lin2(ffn.activation(ffn.lin1(x))), x, dropout_of(ffn.dropout), module.output_layer_norm)


def mpnet_add_norm(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """MPNetAttention: its self-attention and what follows."""
    mixed, *weights = module.attn(hidden_states, *args, **kwargs)
    return add_norm(mixed, hidden_states, dropout_of(module.dropout), module.LayerNorm), *weights


def mpnet_bias(encoder: Any, x: Tensor, position_ids: Any = None, num_buckets: int = 32) -> Any:
    """MPNetEncoder.compute_position_bias: for a packed row its layout and a PositionBias, (H, 2R+1), from the table's
    rows, where stock has (B, H, L, L). Buckets are stock's; from R = 128 on there is one to either side."""
    layout = encoder.maelm_patch.layout
    if layout is None:
        return type(encoder).compute_position_bias(encoder, x, position_ids, num_buckets)
    reach = min(128, max(1, layout.shape[1] - 1))
    distances = torch.arange(-reach, reach + 1, device=x.device)
    line = encoder.relative_attention_bias(encoder.relative_position_bucket(distances, num_buckets=num_buckets))
    return layout, PositionBias(line.t().contiguous(), max(layout.shape[1], reach + 1))


def mpnet_attention(
    module: Any, hidden_states: Tensor, attention_mask: Any = None, position_bias: Any = None, *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    """MPNetSelfAttention, of a packed row (1, T, d) if its bias is mpnet_bias's."""
    if not isinstance(position_bias, tuple):
        out: tuple[Any, ...] = type(module).forward(
            module, hidden_states, attention_mask, position_bias, *args, **kwargs
        )
        return out
    layout, bias = position_bias
    q, k, v = (
        project(hidden_states[0]).unflatten(1, (-1, module.attention_head_size))
        for project in (module.q, module.k, module.v)
    )
    p = dropout_of(module.dropout)
    mixed = ops.attention(q, k, v, layout, bias, dropout_p=p, seed=dropout_seed(p, q.device))
    return (module.o(mixed.flatten(1)[None]),)


def gelu_head(model: Any, x: Tensor) -> Tensor:
    normed: Tensor = model.lm_head.layer_norm(F.gelu(model.lm_head.dense(x)))
    return normed


def distilbert_head(model: Any, x: Tensor) -> Tensor:
    normed: Tensor = model.vocab_layer_norm(model.activation(model.vocab_transform(x)))
    return normed


POST_LN = {"Output": dense_add_norm}  # ...SelfOutput too
ROBERTA = Family(gelu_head, positions_skip_padding=True, norm=POST_LN)
BERT = Family(lambda model, x: model.cls.predictions.transform(x), norm=POST_LN)
FAMILIES = {
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "data2vec-text": ROBERTA,
    "bert": BERT,
    "ernie": BERT,
    "electra": Family(lambda model, x: model.generator_predictions(x), norm=POST_LN),
    "distilbert": Family(distilbert_head, norm={"TransformerBlock": distilbert_block}),
    "mpnet": Family(
        gelu_head,
        positions_skip_padding=True,
        norm={"MPNetOutput": dense_add_norm, "MPNetAttention": mpnet_add_norm},
        attention={
            ("MPNetEncoder", "compute_position_bias"): mpnet_bias,
            ("MPNetSelfAttention", "forward"): mpnet_attention,
        },
    ),
    "modernbert": Family(lambda model, x: model.head(x)),
}
