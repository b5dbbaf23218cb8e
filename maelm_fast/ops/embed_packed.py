"""embed_packed(): the end of a post-LN sublayer."""

from maelm_fast.ops.reference.embed_packed import embed_packed

__all__ = ["embed_packed"]
