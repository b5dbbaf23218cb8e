"""The ops: pure functions over packed rows, each equal to the PyTorch line in its docstring.

Each runs as its plain PyTorch reference (ops/reference), on any device; attention has backends (ops/attention.py).
"""

from maelm_fast.ops.attention import AttentionLayout, PositionBias, attention
from maelm_fast.ops.reference.cross_entropy import masked_cross_entropy, masked_logits
from maelm_fast.ops.reference.dropout import dropout
from maelm_fast.ops.reference.feed_forward import feed_forward
from maelm_fast.ops.reference.norm import add_norm, embed_packed, layer_norm, scatter_to_decoder

__all__ = [
    "AttentionLayout",
    "PositionBias",
    "add_norm",
    "attention",
    "dropout",
    "embed_packed",
    "feed_forward",
    "layer_norm",
    "masked_cross_entropy",
    "masked_logits",
    "scatter_to_decoder",
]
