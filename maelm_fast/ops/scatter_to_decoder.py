"""scatter_to_decoder(): the end of a post-LN sublayer."""

from maelm_fast.ops.reference.scatter_to_decoder import scatter_to_decoder

__all__ = ["scatter_to_decoder"]
