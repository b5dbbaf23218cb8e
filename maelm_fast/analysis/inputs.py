"""What is fed to an encoder whose representations are measured, and the encoders themselves as one kind of function.

An encoder is any `encode(ids, layout)` that takes packed token ids and gives every layer's output.

The inputs are those of the paper, on the same sequences with the same masks:

    with_mask       the full sequence, masked tokens shown as [MASK]; every position counts
    without_mask    the original sequence, real tokens only
    mask_positions  the [MASK] positions of with_mask alone
    real_positions  the other positions of with_mask alone
    visible         masked tokens removed, as a MAE-LM encoder is pretrained

Shapes: T tokens in a packed row, S sequences of at most L tokens, d dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from maelm_fast.batch import Layout, PackedBatch, layout_of
from maelm_fast.config import require
from maelm_fast.encoders import TextEncoder, TokenBatch
from maelm_fast.errors import UserError
from maelm_fast.model.encoder import Encoder
from maelm_fast.training.gram import GramMatrix

Encode = Callable[[Tensor, Layout], list[Tensor]]
"""(ids (T,) int32, layout) -> the embedding output and every block's output, each (T, d)."""

INPUTS = ("with_mask", "without_mask", "mask_positions", "visible", "real_positions")


def from_encoder(encoder: Encoder) -> Encode:
    def encode(ids: Tensor, layout: Layout) -> list[Tensor]:
        layers: list[Tensor] = []
        encoder(ids, layout, layers=layers)
        return layers

    return encode


def from_text_encoder(encoder: TextEncoder) -> Encode:
    """One of the transformers library numbers positions itself, so that the input `visible`, whose positions have gaps,
    is not for it."""

    def encode(ids: Tensor, layout: Layout) -> list[Tensor]:
        layers: list[Tensor] = []
        encoder(TokenBatch(ids, layout), layers=layers)
        return layers

    return encode


class Input(NamedTuple):
    """One forward pass of the encoder. counted: input name to the rows (T,) that count, None being all of them."""

    ids: Tensor
    layout: Layout
    counted: dict[str, Tensor | None]


def encoder_inputs(batch: PackedBatch, mask_id: int, names: Sequence[str] = INPUTS) -> list[Input]:
    """The passes for one batch with [MASK] in the encoder's row that the named inputs need."""
    if batch.visible.lengths != batch.decoder.lengths:
        raise UserError("effective ranks need batches packed with encoder_sees_mask=True, whatever the model")
    shown, layout = batch.ids, batch.visible
    is_mask = shown == mask_id
    passes = []
    rows = {"with_mask": None, "mask_positions": is_mask, "real_positions": ~is_mask}
    if counted := {name: rows[name] for name in rows if name in names}:
        passes.append(Input(shown, layout, counted))
    if "without_mask" in names:
        original = shown.index_copy(0, batch.masked_index.long(), batch.labels)
        passes.append(Input(original, layout, {"without_mask": None}))
    if "visible" in names:
        kept = [int((~part).sum()) for part in is_mask.split(layout.lengths)]
        visible = layout_of(kept, layout.positions[~is_mask]).to(shown.device)
        passes.append(Input(shown[~is_mask], visible, {"visible": None}))
    return passes


@torch.no_grad()
def gram_matrices(
    encode: Encode, batches: Iterable[PackedBatch], mask_id: int, names: Sequence[str], device: torch.device | str
) -> dict[str, list[GramMatrix]]:
    """One Gram matrix per named input and layer, in one pass over the batches (encoder_sees_mask=True)."""
    grams: dict[str, list[GramMatrix]] = {}
    for batch in batches:
        for ids, layout, counted in encoder_inputs(batch.to(device), mask_id, names):
            layers = encode(ids, layout)
            for name, rows in counted.items():
                if name not in grams:
                    grams[name] = [GramMatrix(hidden.shape[1], hidden.device) for hidden in layers]
                for gram, hidden in zip(grams[name], layers, strict=True):
                    gram.add(hidden if rows is None else hidden[rows])
    require(bool(grams), "there is no text to measure: not one sequence")
    return {name: grams[name] for name in names}
