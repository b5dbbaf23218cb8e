"""Attention `maelm` for transformers' encoders: `attn_implementation="maelm"`.

Two functions are registered. transformers calls mask() at a model's door, once a forward, and hands what it returns to
every layer, which calls attention() with it. That is a SharedMask instead of a tensor: the first layer makes the layout
and leaves it there, the others find it, and it goes when the forward's arguments go.

What this attention cannot do it refuses: an encoder that is not told would attend to padding, or to the future.

Shapes: B sequences padded to L, or B = 1 and L tokens of a packed row; H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from maelm_fast import ops
from maelm_fast.batch import cumulative
from maelm_fast.errors import UserError
from maelm_fast.ops import AttentionLayout, PaddedLayout, PositionBias

NAME = "maelm"
INSTEAD = "use attn_implementation='sdpa' or 'eager'"


class Unsupported(UserError, ValueError):
    """A call that attention 'maelm' cannot serve; the message says why, and what to do."""

    def __init__(self, why: str, remedy: str = INSTEAD) -> None:
        super().__init__(f"attention 'maelm': {why}; {remedy}")


class SharedMask:
    """What the layers of one forward share, in place of an attention mask. mask: (B, L) bool, False for padding, or
    None. window: the distance up to which tokens see each other, or None."""

    def __init__(self, mask: Tensor | None, window: int | None) -> None:
        self.mask = mask
        self.window = window
        self.layout: AttentionLayout | None = None

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        raise Unsupported(
            "this model computes its attention itself, by torch's operations on the mask",
            "patch the model (maelm_fast.patch), or use attn_implementation='eager'",
        )


def mask(
    *,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> SharedMask:
    """What AttentionMaskInterface asks for. Where transformers allows to skip a bidirectional mask, it is nothing else
    but padding and, with local_size, a window."""
    if not allow_is_bidirectional_skip:
        raise Unsupported("the model asks for a mask that is not bidirectional, or has a part of its own")
    if q_length != kv_length:
        raise Unsupported(f"{q_length} queries but {kv_length} keys: a cache, a prefix or cross-attention")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise Unsupported(f"the mask is {tuple(attention_mask.shape)}", "give one of shape (batch, length)")
    return SharedMask(attention_mask, local_size)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: SharedMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    *,
    position_bias: PositionBias | None = None,
    layout: AttentionLayout | None = None,
    sequence_lengths: Sequence[int] | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What AttentionInterface asks for: (B, L, H, D), zeros where there is padding, and no weights.

    query: (B, H, L, D). key, value: the same, or with fewer heads that queries share. attention_mask: what mask() made,
    or None for a full batch. dropout: its mask comes from torch's generator. position_bias: of H heads; distances are
    those of columns, or of `layout`. sliding_window: keys nearer than this are seen; the mask's window goes before it.

    Keyword arguments of the model's forward that reach its attention, B being 1 for all but the second:
    cu_seq_lens_q  (S+1,) boundaries of S sequences in a packed row.
    sequence_lengths  S Python ints, or B for a padded batch: saves the host's one wait for the device.
    position_ids   (1, L) counting up by one in each sequence of a packed row: bounds them where cu_seq_lens_q does not.
    layout         the packed row's, whose positions and lengths then count.

    Raises Unsupported (a ValueError) for what it cannot do."""
    shared = attention_mask
    _check(module, query, key, shared, is_causal, others)
    if shared is None:
        shared = SharedMask(None, None)
    if shared.layout is None:
        boundaries = (cu_seq_lens_q, cu_seq_lens_k)
        shared.layout = _layout(query, shared.mask, layout, sequence_lengths, position_ids, *boundaries)
    window = shared.window
    if window is None and sliding_window is not None:
        if attention_mask is not None:
            raise Unsupported("the layer has a sliding window, the model's mask has none")
        window = sliding_window - 1
    heads = query.shape[1]
    bias = position_bias if window is None else _windowed(position_bias, window, shared.layout, heads)
    rows = [x.transpose(1, 2) for x in (query, key, value)]
    padded = shared.layout if layout is None and isinstance(shared.layout, PaddedLayout) else None
    q, k, v = (x.flatten(0, 1) if padded is None else ops.unpad(x, padded) for x in rows)
    if k.shape[1] != heads:
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    seed = torch.randint(2**62, (), device=query.device) if dropout > 0.0 else None
    out = ops.attention(q, k, v, shared.layout, bias, scale=scaling, dropout_p=dropout, seed=seed)
    return (out.view(rows[0].shape) if padded is None else ops.repad(out, padded)), None


def _check(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    shared: SharedMask | None,
    is_causal: bool | None,
    others: dict[str, Any],
) -> None:
    if isinstance(shared, Tensor):
        raise Unsupported(f"it got a mask of shape {tuple(shared.shape)}", f"give one of (batch, length), or {INSTEAD}")
    config = getattr(module, "config", None)
    if getattr(module, "is_causal", True) if is_causal is None else is_causal:
        raise Unsupported("it is causal attention, or its module does not say that it is not")
    if getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False):
        raise Unsupported("the model is a decoder, or has one")
    if getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__:
        raise Unsupported("it is cross-attention")
    if query.shape[2] != key.shape[2]:
        raise Unsupported(
            f"{query.shape[2]} queries but {key.shape[2]} keys: there is a cache, or it is cross-attention"
        )
    if others.get("output_attentions") or getattr(config, "output_attentions", False):
        raise Unsupported("output_attentions: its weights are never written out", "use attn_implementation='eager'")
    if found := [name for name in ("cache", "softcap", "s_aux", "head_mask") if others.get(name) is not None]:
        raise Unsupported(f"it has no {' and no '.join(found)}")


def _layout(
    query: Tensor,
    mask: Tensor | None,
    layout: AttentionLayout | None,
    lengths: Sequence[int] | None,
    position_ids: Tensor | None,
    boundaries: Tensor | None,
    key_boundaries: Tensor | None,
) -> AttentionLayout:
    batch, _, length, _ = query.shape
    packed = [name for name, given in (("layout", layout), ("cu_seq_lens_q", boundaries)) if given is not None]
    if packed and (batch != 1 or mask is not None):
        raise Unsupported(f"{packed[0]} is for one packed row", "give a batch of 1 and no attention_mask with it")
    if layout is not None:
        return layout
    if boundaries is not None:
        return _packed(boundaries, key_boundaries, lengths, length)
    if mask is not None:
        return ops.layout_from_mask(mask, lengths)
    if batch == 1 and lengths is None and position_ids is not None:
        lengths = _counted(position_ids)
    if batch == 1 and lengths is not None:
        return _packed(cumulative(lengths).to(query.device, non_blocking=True), None, lengths, length)
    if lengths is not None and set(lengths) != {length}:
        raise Unsupported("sequence_lengths without an attention_mask", "give both, or neither")
    return PaddedLayout.full(batch, length, query.device)


def _packed(
    boundaries: Tensor, key_boundaries: Tensor | None, lengths: Sequence[int] | None, total: int
) -> PaddedLayout:
    """Of one row of `total` tokens: positions count from 0 in each sequence."""
    tokens = ops.layout_from_boundaries(boundaries, sequence_lengths=lengths)
    if tokens.num_tokens != total:
        raise Unsupported(
            f"the row has {total} tokens, its sequences {tokens.num_tokens}", "give the boundaries of all"
        )
    if key_boundaries is not None and key_boundaries is not boundaries:
        if key_boundaries.shape != boundaries.shape:
            raise Unsupported("cu_seq_lens_k are not cu_seq_lens_q: it is cross-attention")
        torch._assert_async(
            (key_boundaries == boundaries).all(), "attention 'maelm': cu_seq_lens_k are not cu_seq_lens_q"
        )
    return PaddedLayout(tokens, (1, total), None)


def _counted(position_ids: Tensor) -> list[int]:
    """The lengths of a row's sequences, which count up by one from where the first begins. The host reads the row."""
    numbers = position_ids.reshape(-1).cpu().numpy()
    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[:1] + 1) != 1)
    if (numbers[starts] != numbers[:1]).any():
        raise Unsupported(
            "position_ids do not count up by one in sequences that begin alike, so they bound none",
            "give cu_seq_lens_q or sequence_lengths (one number for one sequence)",
        )
    lengths: list[int] = np.diff(starts, append=len(numbers)).tolist()
    return lengths


def _windowed(bias: PositionBias | None, window: int, layout: AttentionLayout, heads: int) -> PositionBias:
    """Once for all layers with this window."""
    kept = layout if bias is None else bias
    windowed: PositionBias = kept.keep(("within", window, heads), lambda: _window(bias, window, layout, heads))
    return windowed


def _window(bias: PositionBias | None, window: int, layout: AttentionLayout, heads: int) -> PositionBias:
    if bias is None:
        places = layout.queries.positions
        positions = layout.shape[1] if isinstance(layout, PaddedLayout) else int(places.max()) + 1
        bias = PositionBias(torch.zeros(heads, 1, device=places.device), positions)
    return bias.within(window, window)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
