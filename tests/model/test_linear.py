"""What others put in place of the model's linear layers, or hang on them, is heard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maelm_fast.model.linear import Linear
from maelm_fast.model.maelm import MaeLm
from tests.model.checks import batch_for, build

NETWORKS: list[dict[str, Any]] = [
    {"decoder": "none"},
    {"decoder": "self_cross", "decoder_hidden_size": 8, "decoder_num_heads": 2},
    {"decoder": "cross"},
]


class Adapter(nn.Module):
    """As PEFT's LoRA layer: it stands where the layer was and passes that layer's parameters for its own."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.more = nn.Parameter(torch.zeros_like(base.weight))

    weight = property(lambda self: self.base_layer.weight)
    bias = property(lambda self: self.base_layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + x @ self.more.t()
        return out


def loss_and_gradients(model: MaeLm, names: list[str]) -> tuple[float, list[Tensor]]:
    model.zero_grad()
    loss, _ = model(batch_for(model, [20, 7]))
    loss.backward()
    parameters = dict(model.named_parameters())
    return loss.item(), [parameters[name].grad for name in names]  # type: ignore[misc]


def linear_layers(model: MaeLm) -> dict[str, Linear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network["decoder"])
def test_hooks_on_every_layer_are_called_and_change_nothing(network: dict[str, Any]) -> None:
    model = build(**network)
    names = [name for name, _ in model.named_parameters()]
    before, layers, called = loss_and_gradients(model, names), linear_layers(model), dict[str, set[str]]()
    assert len(layers) == sum(isinstance(module, nn.Linear) for module in model.modules())
    handles = []
    for name, layer in layers.items():
        seen = called.setdefault(name, set())
        handles += [
            layer.register_forward_pre_hook(lambda *_, seen=seen: seen.add("before")),
            layer.register_forward_hook(lambda *_, seen=seen: seen.add("after")),
            layer.register_full_backward_hook(lambda *_, seen=seen: seen.add("backward")),
        ]
    loss, gradients = loss_and_gradients(model, names)
    assert loss == pytest.approx(before[0], rel=1e-12)
    torch.testing.assert_close(gradients, before[1], rtol=1e-9, atol=1e-12)
    assert called == {name: {"before", "after", "backward"} for name in layers}
    for handle in handles:
        handle.remove()
    assert loss_and_gradients(model, names)[0] == before[0]


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network["decoder"])
def test_an_adapter_in_a_layer_s_place_learns(network: dict[str, Any]) -> None:
    """Its gradient is the layer's own: both are added to the same product."""
    model = build(**network)
    layers = linear_layers(model)
    before, gradients = loss_and_gradients(model, [f"{name}.weight" for name in layers])
    for name, layer in layers.items():
        model.set_submodule(name, Adapter(layer), strict=True)
    loss, adapted = loss_and_gradients(model, [f"{name}.more" for name in layers])
    assert loss == pytest.approx(before, rel=1e-12)
    torch.testing.assert_close(adapted, gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["attention.qkv", "ffn_in", "ffn_out"])
def test_a_forward_of_its_own_is_called(name: str) -> None:
    """As accelerate's hooks put one."""
    model = build(decoder="none")
    layer = model.encoder.blocks[-1].get_submodule(name)  # which attends from some of its rows to all
    called = []
    layer.forward = lambda x: called.append(x.shape) or Linear.forward(layer, x)  # type: ignore[assignment,method-assign]
    model(batch_for(model, [9]))
    assert called
