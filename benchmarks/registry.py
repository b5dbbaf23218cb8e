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
        return {"weight": 1 + self.parameter(self.width), "bias": self.parameter(self.width), "eps": EPS}

    def bytes(self, rows: int, width: int | None = None) -> int:
        """Of one pass over an activation."""
        return rows * (self.width if width is None else width) * self.dtype.itemsize


@dataclass(frozen=True)
class Entry:
    """One op. inputs: keyword arguments. moved: least bytes of (forward, forward and backward), None where arithmetic
    is the limit, not memory. peers: other libraries' functions of the same inputs, by name, or another form of ours;
    ImportError where they are not installed. function: if what is called is not the op itself."""

    name: str
    inputs: Callable[[Setting], Inputs]
    gradients: tuple[str, ...]
    moved: Callable[[Setting], tuple[int, int]] | None = None
    peers: Mapping[str, Callable[[Inputs], Any]] = field(default_factory=dict)
    function: Callable[..., Tensor] | None = None

    def __call__(self, inputs: Inputs, backend: str | None = None) -> Tensor:
        out: Tensor = (self.function or getattr(ops, self.name))(**inputs, backend=backend)
        return out


def _dropped(s: Setting) -> Inputs:
    """What says which elements are dropped."""
    return {"dropout_p": DROPOUT, "seed": torch.tensor(7, device=s.device), "place": 1}


def _embed_inputs(s: Setting) -> Inputs:
    batch = s.batch()
    return {
        "ids": batch.ids,
        "positions": batch.visible.positions,
        "token_table": s.parameter(s.vocab, s.width),
        "position_table": s.parameter(s.length, s.width),
        **s.norm(),
        **_dropped(s),
        "dtype": s.dtype,
    }


def _embed_moved(s: Setting) -> tuple[int, int]:
    row = 4 * s.width
    tables = (min(s.vocab, s.visible) + s.length) * row
    forward = tables + s.bytes(s.visible)
    return forward, forward + tables + s.bytes(s.visible) + (s.vocab + s.length) * row


def _add_norm_inputs(s: Setting) -> Inputs:
    rows = (s.visible, s.width)
    return {"x": s.activation(*rows), "residual": s.activation(*rows), **s.norm(), **_dropped(s)}


def _linear_inputs(s: Setting) -> Inputs:
    """Of a block's widest projection: queries, keys and values."""
    return {
        "x": s.activation(s.visible, s.width),
        "weight": s.parameter(3 * s.width, s.width).to(s.dtype),
        "bias": s.parameter(3 * s.width).to(s.dtype),
    }


def _feed_forward_inputs(s: Setting) -> Inputs:
    return {
        "x": s.activation(s.visible, s.width),
        "weight_in": s.parameter(s.ffn, s.width).to(s.dtype),
        "bias_in": s.parameter(s.ffn).to(s.dtype),
        "weight_out": s.parameter(s.width, s.ffn).to(s.dtype),
        "bias_out": s.parameter(s.width).to(s.dtype),
    }


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


def _loss_inputs(s: Setting) -> Inputs:
    return {
        "hidden": s.activation(s.masked, s.width),
        "table": s.parameter(s.vocab, s.width),
        "bias": s.parameter(s.vocab),
        "labels": s.batch().labels,
        "vocab_size": s.vocab,
    }


def _loss(hidden: Tensor, **others: Any) -> Tensor:
    with torch.autocast(hidden.device.type, hidden.dtype, enabled=hidden.element_size() < 4):
        return ops.masked_cross_entropy(hidden, **others)[0]


def _liger_loss(i: Inputs) -> Tensor:
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    module = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    hidden = i["hidden"]
    loss: Tensor = module(i["table"].to(hidden.dtype), hidden, i["labels"].long(), i["bias"].to(hidden.dtype))
    return loss


def _pack_inputs(s: Setting) -> Inputs:
    rows = np.random.default_rng(0).integers(5, s.vocab - 1, (s.sequences, s.length))
    return {
        "ids": torch.from_numpy(rows.reshape(-1)).int().to(s.device),
        "lengths": (s.length,) * s.sequences,
        "samples": np.arange(s.sequences),
        "epochs": np.zeros(s.sequences, np.int64),
        "masker": s.masker,
        "rows": list(rows),
    }


def _pack(rows: Any, **inputs: Any) -> Tensor:
    return ops.mask_and_pack(**inputs).source


def _pack_on_host(i: Inputs) -> Tensor:
    return pack(i["rows"], i["samples"], i["epochs"], i["masker"]).to(i["ids"].device).source


def t5_line(positions: int, std: float, device: str) -> Tensor:
    """(12, 2R+1): the bias by distance of the `base` preset, the table drawn from a normal distribution."""
    bias = RelativeBias(presets.change(presets.get("base"), model={"max_positions": positions}).model, "t5")
    torch.nn.init.normal_(bias.weight, std=std)
    line: Tensor = bias().line
    return line.detach().to(device)


def _attention_inputs(s: Setting) -> Inputs:
    q, k, v = (s.activation(s.visible, s.heads, s.width // s.heads) for _ in range(3))
    line, layout = t5_line(s.length, 0.02, s.device), AttentionLayout(s.batch().visible)
    return {"q": q, "k": k, "v": v, "line": line, "positions": s.length, "layout": layout, **_dropped(s)}


def _attention(line: Tensor | None, positions: int, **inputs: Any) -> Tensor:
    return ops.attention(bias=None if line is None else PositionBias(line, positions), **inputs)


_NORM = ("weight", "bias")
ENTRIES = {
    entry.name: entry
    for entry in (
        Entry(
            "mask_and_pack",
            _pack_inputs,
            (),
            lambda s: (4 * (s.slots + 2 * s.slots + 2 * s.visible + 2 * s.masked),) * 2,
            peers={"host, then copy": _pack_on_host},
            function=_pack,
        ),
        Entry("embed_packed", _embed_inputs, ("token_table", "position_table", *_NORM), _embed_moved),
        Entry(
            "add_norm",
            _add_norm_inputs,
            ("x", "residual", *_NORM),
            lambda s: (s.bytes(3 * s.visible), s.bytes(8 * s.visible)),  # forward x, r, y; backward dy, x, r, dx, dr
        ),
        Entry(
            "scatter_to_decoder",
            _scatter_inputs,
            ("encoder_out", "mask_embedding", "position_table", *_NORM),
            lambda s: (s.bytes(s.visible + s.slots), s.bytes(3 * s.visible + 2 * s.slots)),
        ),
        Entry("linear", _linear_inputs, ("x", "weight", "bias")),
        Entry(
            "feed_forward",
            _feed_forward_inputs,
            ("x", "weight_in", "bias_in", "weight_out", "bias_out"),
            peers={"GELU kept": lambda i: ops.feed_forward(**i, keep_gelu=True)},
        ),
        Entry(
            "masked_cross_entropy",
            _loss_inputs,
            ("hidden", "table", "bias"),
            peers={"liger": _liger_loss},
            function=_loss,
        ),
        Entry("attention", _attention_inputs, ("q", "k", "v", "line"), function=_attention),
    )
}
