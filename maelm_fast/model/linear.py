"""Linear layers of the model. They are called as modules, so that an adapter in a layer's place and hooks on it work;
where a fused op takes the parameters instead, it asks `is_plain` first."""

from __future__ import annotations

from typing import TypeGuard

import torch.nn.functional as F
from torch import Tensor, nn

from maelm_fast import ops


class Linear(nn.Linear):
    """nn.Linear whose product is ops.linear's."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


def is_plain(layer: nn.Module) -> TypeGuard[Linear]:
    """Whether a call of the layer is its product and nothing else: it was neither replaced (PEFT, quantisation,
    parametrisations) nor given hooks or a forward of its own (accelerate)."""
    return type(layer) is Linear and not (
        layer._forward_pre_hooks
        or layer._forward_hooks
        or layer._backward_pre_hooks
        or layer._backward_hooks
        or "forward" in layer.__dict__
    )


def feed_forward(x: Tensor, first: nn.Module, second: nn.Module, keep_gelu: bool = False) -> Tensor:
    """(T, d): two layers with an exact GELU between them. keep_gelu: as ops.feed_forward's."""
    if is_plain(first) and is_plain(second):
        return ops.feed_forward(x, first.weight, first.bias, second.weight, second.bias, keep_gelu=keep_gelu)
    out: Tensor = second(F.gelu(first(x)))
    return out


def project(x: Tensor, memory: Tensor, qkv: nn.Module) -> tuple[Tensor, Tensor]:
    """(Tq, d), (Tk, 2d): x's queries, memory's keys and values."""
    d = x.shape[-1]
    if not is_plain(qkv):
        return qkv(x)[..., :d], qkv(memory)[..., d:]
    weight, bias = qkv.weight, qkv.bias
    return ops.linear(x, weight[:d], bias[:d]), ops.linear(memory, weight[d:], bias[d:])
