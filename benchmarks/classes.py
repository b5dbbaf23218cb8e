"""The classes that a step's time is split into, measured (train_step's profile) and projected alike."""

from __future__ import annotations

CLASSES = {
    "gemm": "matrix products of the linear layers and of the vocabulary projection, forward and backward",
    "attention": "scores, softmax and weighted sum, with bias and dropout",
    "norm": "embedding, LayerNorm with residual and dropout, scatter to the decoder",
    "gelu": "GELU and the feed-forward's first bias, where no product does them",
    "loss": "softmax and cross-entropy, without the projection",
    "optimizer": "gradient norm, clipping, AdamW",
    "dropout": "dropout where it is a kernel of its own; ours is a part of norm and attention",
    "other": "everything else: copies, casts, additions, zeroing",
}
