"""masked_cross_entropy(): the end of a post-LN sublayer."""

from maelm_fast.ops.reference.masked_cross_entropy import masked_cross_entropy

__all__ = ["masked_cross_entropy"]
