"""What a contestant must pass before it is timed holds, and stops what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import contestants, gates
from benchmarks.contestants import Contestant, Settings
from benchmarks.measure import Failed
from benchmarks.padded import PaddedMaeLm
from maelm_fast import ops as ops_package
from maelm_fast.ops import dispatch

SMALL = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "ffn_size": 128, "vocab_size": 512}
SETTINGS = Settings(batch=2, seq=64, dropout=0.1, bias=True, shape="tiny", changes=SMALL)
GATED = ["tiny", "roberta_tiny", "hf", "padded"]


def compiled_as(monkeypatch: pytest.MonkeyPatch, change: float) -> None:
    """torch.compile for a test that has no time for it: the model itself, its loss times 1 + change."""

    def compile_(model: Any, **options: Any) -> Any:
        return lambda batch: tuple(value * (1 + change) for value in model(batch))

    monkeypatch.setattr(contestants.torch, "compile", compile_)


@pytest.mark.parametrize("lengths", ["full", "documents"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", [*GATED, "hf_eager", "tiny_compiled"])
def test_gate_holds(monkeypatch: pytest.MonkeyPatch, lengths: str, bias: bool, name: str) -> None:
    compiled_as(monkeypatch, 0.0)
    settings = Settings(**{**vars(SETTINGS), "lengths": lengths, "bias": bias})
    values = gates.gate(name, settings)
    if name in ("padded", "hf", "hf_eager"):
        assert values[f"{name}, our weights"] == pytest.approx(values[f"ours, as {name}"], rel=1e-5)
    elif name == "tiny_compiled":
        assert values["tiny_compiled"] == values["tiny"]
    else:
        assert 0 < values["gradients, ours"] < 1e-5


def test_gate_compares_our_kernels_at_the_precision_and_dropout_that_are_timed() -> None:
    values = gates.gate("tiny", Settings(**{**vars(SETTINGS), "precision": "bf16"}))
    assert 1e-3 < values["gradients, pytorch"] < 3e-2
    assert 1e-3 < values["gradients, ours"] < 3e-2


def test_gate_compares_hugging_faces_gradient_in_bf16_too(monkeypatch: pytest.MonkeyPatch) -> None:
    bf16 = Settings(**{**vars(SETTINGS), "precision": "bf16"})
    values = gates.gate("hf_eager", bf16)
    assert values["hf_eager, our weights"] != values["hf_eager, our weights, bf16"]
    assert values["hf_eager, gradient norm, bf16"] > 0
    made = gates.hugging_face_roberta

    def steeper(*arguments: Any) -> Any:  # the same losses, a twentieth more of gradient
        model = made(*arguments)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: 1.05 * gradient)
        return model

    monkeypatch.setattr(gates, "hugging_face_roberta", steeper)
    with pytest.raises(Failed, match="gradient norm in bf16 and ours disagree"):
        gates.gate("hf_eager", bf16)


def test_gate_stops_a_kernel_whose_gradient_is_a_little_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ops_package.attention

    def wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = plain(*args, **kwargs)
        if dispatch._default.attention != "reference":
            out = out + 0.1 * (out - out.detach())  # a tenth too much, in the backward pass alone
        return out

    monkeypatch.setattr(ops_package, "attention", wrong)
    for precision in ("fp32", "bf16"):
        with pytest.raises(Failed, match=r"gate: tiny: the gradient of .* is 0\.\d+ from that of float64"):
            gates.gate("tiny", Settings(**{**vars(SETTINGS), "precision": precision}))


def test_gate_stops_when_the_weights_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "copy_weights", lambda ours, theirs: None)
    with pytest.raises(Failed, match=r"gate: hf, our weights and ours, as hf disagree"):
        gates.gate("hf", SETTINGS)


def test_gate_stops_when_the_padded_model_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(PaddedMaeLm):
        def forward(self, inputs: Any) -> torch.Tensor:
            return super().forward(inputs._replace(positions=inputs.positions + 1))

    monkeypatch.setattr(gates, "PaddedMaeLm", Wrong)
    settings = Settings(**{**vars(SETTINGS), "seq": 32})
    with pytest.raises(Failed, match=r"gate: padded, our weights and ours, as padded disagree"):
        gates.gate("padded", settings)


def test_gate_stops_when_the_compiled_model_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_as(monkeypatch, 1e-4)
    with pytest.raises(Failed, match=r"gate: tiny_compiled and tiny disagree"):
        gates.gate("tiny_compiled", SETTINGS)


def test_gate_stops_at_a_loss_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Contestant, "forward", lambda self: torch.tensor(float("nan")))
    compiled_as(monkeypatch, 0.0)
    with pytest.raises(Failed, match=r"gate: tiny_compiled and tiny disagree"):
        gates.gate("tiny_compiled", SETTINGS)
