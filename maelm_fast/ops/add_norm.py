"""add_norm(): the end of a post-LN sublayer."""

from maelm_fast.ops.reference.add_norm import add_norm

__all__ = ["add_norm"]
