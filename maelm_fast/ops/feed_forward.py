"""feed_forward(): the end of a post-LN sublayer."""

from maelm_fast.ops.reference.feed_forward import feed_forward

__all__ = ["feed_forward"]
