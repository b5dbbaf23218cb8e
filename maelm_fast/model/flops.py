"""Model FLOPs of a packed batch, exactly as long as its sequences are.

A product of (m, k) and (k, n) counts 2mkn; backward counts twice forward; attention counts q k^T and the weighted sum;
everything else (norms, GELU, softmax, gathers, recomputation, the optimiser) counts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from maelm_fast.config import ModelConfig

# Dense bf16 peak of the matrix units, FLOP/s, from the data sheets; by the start of the device's name, the first that
# fits: the cards for a PCIe slot are slower.
PEAK_BF16 = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
}


def peak_flops(device_name: str) -> float | None:
    """bf16 peak of a known GPU, else None (then there is no MFU to report)."""
    return next((peak for name, peak in PEAK_BF16.items() if device_name.startswith(name)), None)


def training_flops(config: ModelConfig, visible: Sequence[int], original: Sequence[int], masked: Sequence[int]) -> int:
    """Forward and backward FLOPs of one batch, given each sequence's visible, original and masked token counts.

    visible: the tokens in the encoder's row. Attention counts all pairs, behind a causal decoder's diagonal too, since
    its kernel computes them. Left out: the one [MASK] row a batch that a decoder of another width projects."""
    own = config.decoder_config
    return 3 * sum(_sequence(config, own, *counts) for counts in zip(visible, original, masked, strict=True))


def _sequence(config: ModelConfig, own: ModelConfig, visible: int, original: int, masked: int) -> int:
    """Forward FLOPs of one sequence. own: the decoder's configuration."""
    d = config.hidden_size
    if config.decoder == "none":
        blocks = (config.num_layers - 1) * _layer(config, original, original) + _layer(config, masked, original)
        return blocks + 2 * masked * d * (d + config.vocab_size)
    before_last = config.decoder_layers - 1
    w, predicted, projected = own.hidden_size, masked, visible
    total = config.num_layers * _layer(config, visible, visible)
    if config.decoder == "cross":
        total += config.decoder_layers * _layer(own, masked, visible)
    elif config.decoder == "causal_cross":
        predicted, projected = original, visible + original
        total += config.decoder_layers * (_layer(own, original, original) + _attention(own, original, visible))
    else:
        total += before_last * _layer(own, original, original) + _layer(own, masked, original)
        if config.decoder == "self_cross":
            total += before_last * _attention(own, original, visible) + _attention(own, masked, visible)
    if w != d:
        total += 2 * (projected + predicted) * d * w
    return total + 2 * predicted * (w * w + d * config.vocab_size)


def _layer(config: ModelConfig, queries: int, keys: int) -> int:
    """Forward FLOPs of one layer with that many query rows and key rows."""
    return _attention(config, queries, keys) + 2 * queries * 2 * config.hidden_size * config.ffn_size


def _attention(config: ModelConfig, queries: int, keys: int) -> int:
    """Of its attention alone: the four projections and the products."""
    d = config.hidden_size
    return 2 * (queries + keys) * 2 * d * d + 4 * queries * keys * d
