"""The ops: pure functions over packed rows, each equal to the PyTorch line in its docstring.

Each has backends (ops/dispatch.py): plain PyTorch (ops/reference) on any device, Triton kernels, compiled code.
"""

from maelm_fast.ops.add_norm import add_norm, add_norm_twice
from maelm_fast.ops.attention import attention, attention_varlen
from maelm_fast.ops.attention_inputs import AttentionLayout, PositionBias
from maelm_fast.ops.dispatch import backends, set_backends
from maelm_fast.ops.embed_packed import embed_packed
from maelm_fast.ops.feed_forward import feed_forward
from maelm_fast.ops.layouts import PaddedLayout, layout_from_boundaries, layout_from_mask, repad, unpad
from maelm_fast.ops.mask_and_pack import mask_and_pack
from maelm_fast.ops.masked_cross_entropy import masked_cross_entropy
from maelm_fast.ops.reference.dropout import dropout
from maelm_fast.ops.reference.layer_norm import layer_norm
from maelm_fast.ops.reference.masked_cross_entropy import masked_logits
from maelm_fast.ops.scatter_to_decoder import scatter_to_decoder

__all__ = [
    "AttentionLayout",
    "PaddedLayout",
    "PositionBias",
    "add_norm",
    "add_norm_twice",
    "attention",
    "attention_varlen",
    "backends",
    "dropout",
    "embed_packed",
    "feed_forward",
    "layer_norm",
    "layout_from_boundaries",
    "layout_from_mask",
    "mask_and_pack",
    "masked_cross_entropy",
    "masked_logits",
    "repad",
    "scatter_to_decoder",
    "set_backends",
    "unpad",
]
