"""One Transformer layer, post-LN, shared by encoder, decoder and baseline.

What differs between uses is an argument: `rows` restricts queries, output projection and feed-forward to some rows
(the last layer before the head), `memory` makes the attention cross-attention, `cross` adds one after it.

Shapes: T rows of the input, Tq query rows, d hidden size, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from maelm_fast import ops
from maelm_fast.config import ModelConfig
from maelm_fast.model.linear import Linear, feed_forward, project
from maelm_fast.model.position_bias import RelativeBias
from maelm_fast.ops import AttentionLayout, PositionBias
from maelm_fast.ops.stacked import unstack


@dataclass(frozen=True)
class Dropout:
    """Dropout of one forward pass: every site draws its mask from `seed`, one int64 on the device, and its own place,
    a number known when the model is traced."""

    p: float = 0.0
    seed: Tensor | None = None
    place: int = 0

    def at(self, *path: int) -> Dropout:
        """The site at `path` below this one; distinct for up to three coordinates below 1023."""
        place = self.place
        for coordinate in path:
            place = place * 1024 + coordinate + 1
        return replace(self, place=place) if self.p else self

    @property
    def arguments(self) -> dict[str, Any]:
        return {"dropout_p": self.p, "seed": self.seed, "place": self.place}


class Attention(nn.Module):
    """Multi-head attention with one (3d, d) projection for queries, keys and values, and an output projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = Linear(config.hidden_size, config.hidden_size)
        self.heads = (config.num_heads, config.head_dim)

    def forward(
        self,
        x: Tensor,
        layout: AttentionLayout,
        bias: PositionBias | None,
        dropout: Dropout,
        memory: Tensor | None = None,
    ) -> Tensor:
        """x: (Tq, d). memory: (Tk, d), what is attended to; x itself if None. Returns (Tq, d)."""
        if memory is None:
            q, k, v = unstack(self.qkv(x), 3, *self.heads)
        else:
            queries, keys_values = project(x, memory, self.qkv)
            (q,) = unstack(queries, 1, *self.heads)
            k, v = unstack(keys_values, 2, *self.heads)
        mixed: Tensor = ops.attention(q, k, v, layout, bias, **dropout.arguments)
        out: Tensor = self.out(mixed.reshape(x.shape))
        return out


class Block(nn.Module):
    """Attention, cross-attention on request, and feed-forward, each followed by dropout, residual and LayerNorm."""

    def __init__(self, config: ModelConfig, cross: bool = False) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.cross_attention = Attention(config) if cross else None
        self.cross_attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if cross else None
        self.ffn_in = Linear(config.hidden_size, config.ffn_size)
        self.ffn_out = Linear(config.ffn_size, config.hidden_size)
        self.ffn_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.keep_gelu = False

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        layout: AttentionLayout,
        bias: PositionBias | None = None,
        dropout: Dropout = Dropout(),
        *,
        rows: Tensor | None = None,
        memory: Tensor | None = None,
        cross: tuple[Tensor, AttentionLayout] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x, residual: (T, d), the same rows, for the attention and for the sum around it: one tensor, or what the
        block before returned, whose LayerNorm adds the gradients of both. rows: (Tq,) the rows to compute, all if None;
        layout.queries describes them. memory: (Tk, d), what the attention attends to; x itself if None. cross: what the
        cross-attention attends to, (Tk, d), and how; for blocks that have one. Returns (Tq, d) twice."""
        if rows is not None:
            memory = x if memory is None else memory
            x = residual = residual.index_select(0, rows)
        mixed = self.attention(x, layout, bias, dropout.at(0), memory)
        x, residual = _add_norm(mixed, residual, self.attention_norm, dropout.at(1))
        if self.cross_attention_norm is not None and self.cross_attention is not None:
            assert cross is not None
            cross_memory, cross_layout = cross
            mixed = self.cross_attention(x, cross_layout, None, dropout.at(3), cross_memory)
            x, residual = _add_norm(mixed, residual, self.cross_attention_norm, dropout.at(4))
        mixed = feed_forward(x, self.ffn_in, self.ffn_out, self.keep_gelu)
        return _add_norm(mixed, residual, self.ffn_norm, dropout.at(2))


def _add_norm(x: Tensor, residual: Tensor, norm: nn.LayerNorm, dropout: Dropout) -> tuple[Tensor, Tensor]:
    return ops.add_norm_twice(x, residual, norm.weight, norm.bias, eps=norm.eps, **dropout.arguments)


def keep_gelu(model: nn.Module, keep: bool) -> None:
    """Whether a model's blocks keep GELU's output for the backward pass: memory for time, the same bits
    (ops/feed_forward.py). As built, none does; `pretrain` asks for it where it fits (training/memory.py)."""
    for block in model.modules():
        if isinstance(block, Block):
            block.keep_gelu = keep


def position_table(config: ModelConfig) -> nn.Parameter:
    return nn.Parameter(torch.empty(config.max_positions, config.hidden_size))


def init_weights(module: nn.Module, config: ModelConfig) -> None:
    """N(0, init_std) for every matrix and table, zero biases, unit norms (released code); on request sinusoidal
    position tables of the same standard deviation, and relative biases that favour near keys (both ours)."""
    for name, parameter in module.named_parameters():
        if "norm" in name:
            nn.init.constant_(parameter, 1.0 if name.endswith("weight") else 0.0)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif name.endswith("position_table") and config.position_init == "sinusoidal":
            with torch.no_grad():
                parameter.copy_(sinusoids(*parameter.shape) * (config.init_std * 2**0.5))
        else:
            nn.init.normal_(parameter, std=config.init_std)
    for child in module.modules():
        if isinstance(child, RelativeBias) and config.relative_init == "local":
            child.init_local()


def sinusoids(positions: int, width: int) -> Tensor:
    """(positions, width) sines and cosines of wavelengths 2 pi to 20,000 pi; their root mean square is 1/sqrt(2)."""
    angles = torch.arange(positions)[:, None] / 10000.0 ** (torch.arange(0, width, 2)[None, :] / width)
    table = torch.stack([angles.sin(), angles.cos()], dim=-1)
    return table.reshape(positions, -1)[:, :width]
