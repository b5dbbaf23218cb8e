"""What is benchmarked, one entry an op: its inputs, its call, and the fewest bytes it can move.

Inputs are those of a training step: S sequences of L tokens, `rate` of them masked, encoder dropout 0.1. Tables and
norm parameters are fp32, activations have the setting's dtype, as under autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maelm_fast import ops, presets
from maelm_fast.batch import PackedBatch
from maelm_fast.config import MaskingConfig
from maelm_fast.data.masking import pack
from maelm_fast.masking import Masker, Vocabulary
from maelm_fast.model.position_bias import RelativeBias
from maelm_fast.ops import AttentionLayout, PositionBias

DROPOUT = 0.1
EPS = 1e-5
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """Sizes shared by all entries: `base` unless told otherwise."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    sequences: int = 8
    length: int = 512
    rate: float = 0.15
    width: int = 768
    heads: int = 12
    ffn: int = 3072
    vocab: int = 32768

    @property
    def masked(self) -> int:
        return self.sequences * int(self.rate * self.length + 0.5)

    @property
    def slots(self) -> int:
        return self.sequences * self.length

    @property
    def visible(self) -> int:
        return self.slots - self.masked

    def batch(self) -> PackedBatch:
        draw = np.random.default_rng(0)
        rows = list(draw.integers(5, self.vocab - 1, (self.sequences, self.length)))
        every = np.arange(self.sequences)
        return pack(rows, every, np.zeros_like(every), self.masker).to(self.device)

    @property
    def masker(self) -> Masker:
        vocabulary = Vocabulary(self.vocab, self.vocab - 1, (0, 1, 2, 3, self.vocab - 1))
        return Masker(MaskingConfig(rate=self.rate), vocabulary, seed=0, encoder_sees_mask=False)

    def activation(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def parameter(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device) * 0.02

    def norm(self) -> Inputs:
        return {"weight": 1 + self.parameter(self.width), "bias": self.parameter(self.width)}

    def bytes(self, rows: int, width: int | None = None) -> int:
        """Of one pass over an activation."""
        return rows * (self.width if width is None else width) * self.dtype.itemsize


@dataclass(frozen=True)
class Entry:
    """One op. moved: least bytes of (forward, forward and backward), None where arithmetic is the limit, not memory.
    peers: other libraries' functions of the same inputs, by name; ImportError where they are not installed."""

    name: str
    inputs: Callable[[Setting], Inputs]
    call: Callable[[Inputs, str | None], Any]
    gradients: tuple[str, ...]
    moved: Callable[[Setting], tuple[int, int]] | None = None
    peers: Mapping[str, Callable[[Inputs], Any]] = field(default_factory=dict)


def _embed_inputs(s: Setting) -> Inputs:
    batch = s.batch()
    return {
        "ids": batch.ids,
        "positions": batch.visible.positions,
        "token_table": s.parameter(s.vocab, s.width),
        "position_table": s.parameter(s.length, s.width),
        **s.norm(),
        "seed": torch.tensor(7, device=s.device),
        "dtype": s.dtype,
    }


def _embed(i: Inputs, backend: str | None) -> Tensor:
    return ops.embed_packed(
        i["ids"],
        i["positions"],
        i["token_table"],
        i["position_table"],
        i["weight"],
        i["bias"],
        eps=EPS,
        dropout_p=DROPOUT,
        seed=i["seed"],
        place=1,
        dtype=i["dtype"],
        backend=backend,
    )


def _embed_moved(s: Setting) -> tuple[int, int]:
    row = 4 * s.width
    tables = (min(s.vocab, s.visible) + s.length) * row
    forward = tables + s.bytes(s.visible)
    return forward, forward + tables + s.bytes(s.visible) + (s.vocab + s.length) * row


def _add_norm_inputs(s: Setting) -> Inputs:
    rows = (s.visible, s.width)
    return {
        "x": s.activation(*rows),
        "residual": s.activation(*rows),
        **s.norm(),
        "seed": torch.tensor(7, device=s.device),
    }


def _add_norm(i: Inputs, backend: str | None) -> Tensor:
    return ops.add_norm(
        i["x"],
        i["residual"],
        i["weight"],
        i["bias"],
        eps=EPS,
        dropout_p=DROPOUT,
        seed=i["seed"],
        place=1,
        backend=backend,
    )


def _linear_inputs(s: Setting) -> Inputs:
    """Of a block's widest projection: queries, keys and values."""
    return {
        "x": s.activation(s.visible, s.width),
        "weight": s.parameter(3 * s.width, s.width).to(s.dtype),
        "bias": s.parameter(3 * s.width).to(s.dtype),
    }


def _linear(i: Inputs, backend: str | None) -> Tensor:
    return ops.linear(i["x"], i["weight"], i["bias"], backend=backend)


def _feed_forward_inputs(s: Setting) -> Inputs:
    return {
        "x": s.activation(s.visible, s.width),
        "weight_in": s.parameter(s.ffn, s.width).to(s.dtype),
        "bias_in": s.parameter(s.ffn).to(s.dtype),
        "weight_out": s.parameter(s.width, s.ffn).to(s.dtype),
        "bias_out": s.parameter(s.width).to(s.dtype),
    }


def _feed_forward(i: Inputs, backend: str | None) -> Tensor:
    return ops.feed_forward(i["x"], i["weight_in"], i["bias_in"], i["weight_out"], i["bias_out"], backend=backend)


def _scatter_inputs(s: Setting) -> Inputs:
    batch = s.batch()
    return {
        "encoder_out": s.activation(s.visible, s.width),
        "source": batch.source,
        "mask_embedding": s.parameter(s.width),
        "positions": batch.decoder.positions,
        "position_table": s.parameter(s.length, s.width),
        **s.norm(),
    }


def _scatter(i: Inputs, backend: str | None) -> Tensor:
    return ops.scatter_to_decoder(
        i["encoder_out"],
        i["source"],
        i["mask_embedding"],
        i["positions"],
        i["position_table"],
        i["weight"],
        i["bias"],
        eps=EPS,
        backend=backend,
    )


def _loss_inputs(s: Setting) -> Inputs:
    return {
        "hidden": s.activation(s.masked, s.width),
        "table": s.parameter(s.vocab, s.width),
        "bias": s.parameter(s.vocab),
        "labels": s.batch().labels,
        "vocab": s.vocab,
    }


def _loss(i: Inputs, backend: str | None) -> Tensor:
    hidden = i["hidden"]
    with torch.autocast(hidden.device.type, hidden.dtype, enabled=hidden.element_size() < 4):
        return ops.masked_cross_entropy(
            hidden, i["table"], i["bias"], i["labels"], vocab_size=i["vocab"], backend=backend
        )[0]


def _liger_loss(i: Inputs) -> Tensor:
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    module = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    hidden = i["hidden"]
    loss: Tensor = module(i["table"].to(hidden.dtype), hidden, i["labels"].long(), i["bias"].to(hidden.dtype))
    return loss


def _pack_inputs(s: Setting) -> Inputs:
    draw = np.random.default_rng(0)
    rows = draw.integers(5, s.vocab - 1, (s.sequences, s.length))
    return {
        "ids": torch.from_numpy(rows.reshape(-1)).int().to(s.device),
        "lengths": (s.length,) * s.sequences,
        "samples": np.arange(s.sequences),
        "masker": s.masker,
        "rows": list(rows),
        "device": s.device,
    }


def _pack(i: Inputs, backend: str | None) -> Tensor:
    zeros = np.zeros_like(i["samples"])
    return ops.mask_and_pack(i["ids"], i["lengths"], i["samples"], zeros, i["masker"], backend=backend).source


def _pack_on_host(i: Inputs) -> Tensor:
    zeros = np.zeros_like(i["samples"])
    packed = pack(i["rows"], i["samples"], zeros, i["masker"])
    return packed.to(i["device"]).source


def t5_line(positions: int, std: float, device: str) -> Tensor:
    """(12, 2R+1): the bias by distance of the `base` preset, the table drawn from a normal distribution."""
    bias = RelativeBias(presets.change(presets.get("base"), model={"max_positions": positions}).model, "t5")
    torch.nn.init.normal_(bias.weight, std=std)
    line: Tensor = bias().line
    return line.detach().to(device)


def _attention_inputs(s: Setting) -> Inputs:
    q, k, v = (s.activation(s.visible, s.heads, s.width // s.heads) for _ in range(3))
    return {
        "q": q,
        "k": k,
        "v": v,
        "line": t5_line(s.length, 0.02, s.device),
        "positions": s.length,
        "layout": AttentionLayout(s.batch().visible),
        "seed": torch.tensor(7, device=s.device),
    }


def _attention(i: Inputs, backend: str | None) -> Tensor:
    return ops.attention(
        i["q"],
        i["k"],
        i["v"],
        i["layout"],
        PositionBias(i["line"], i["positions"]),
        dropout_p=DROPOUT,
        seed=i["seed"],
        place=1,
        backend=backend,
    )


ENTRIES = {
    entry.name: entry
    for entry in (
        Entry(
            "mask_and_pack",
            _pack_inputs,
            _pack,
            (),
            lambda s: (4 * (s.slots + 2 * s.slots + 2 * s.visible + 2 * s.masked),) * 2,
            peers={"host, then copy": _pack_on_host},
        ),
        Entry("embed_packed", _embed_inputs, _embed, ("token_table", "position_table", "weight", "bias"), _embed_moved),
        Entry(
            "add_norm",
            _add_norm_inputs,
            _add_norm,
            ("x", "residual", "weight", "bias"),
            lambda s: (s.bytes(3 * s.visible), s.bytes(8 * s.visible)),  # forward x, r, y; backward dy, x, r, dx, dr
        ),
        Entry(
            "scatter_to_decoder",
            _scatter_inputs,
            _scatter,
            ("encoder_out", "mask_embedding", "position_table", "weight", "bias"),
            lambda s: (s.bytes(s.visible + s.slots), s.bytes(3 * s.visible + 2 * s.slots)),
        ),
        Entry("linear", _linear_inputs, _linear, ("x", "weight", "bias")),
        Entry(
            "feed_forward", _feed_forward_inputs, _feed_forward, ("x", "weight_in", "bias_in", "weight_out", "bias_out")
        ),
        Entry("masked_cross_entropy", _loss_inputs, _loss, ("hidden", "table", "bias"), peers={"liger": _liger_loss}),
        Entry("attention", _attention_inputs, _attention, ("q", "k", "v", "line")),
    )
}
