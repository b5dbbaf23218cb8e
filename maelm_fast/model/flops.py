"""Model FLOPs of a packed batch, exactly as long as its sequences are.

A product of (m, k) and (k, n) counts 2mkn; backward counts twice forward; attention counts q k^T and the weighted sum;
everything else (norms, GELU, softmax, gathers, recomputation, the optimiser) counts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from maelm_fast.config import ModelConfig

# Dense bf16 peak of the matrix units, FLOP/s, from the data sheets; by the start of the device's name.
PEAK_BF16 = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}


def peak_flops(device_name: str) -> float | None:
    """bf16 peak of a known GPU, else None (then there is no MFU to report)."""
    return next((peak for name, peak in PEAK_BF16.items() if device_name.startswith(name)), None)


def training_flops(config: ModelConfig, visible: Sequence[int], original: Sequence[int], masked: Sequence[int]) -> int:
    """Forward and backward FLOPs of one batch, given each sequence's visible, original and masked token counts."""
    encoder_keys = original if config.decoder == "none" else visible
    total = 0
    for n, n_all, m in zip(encoder_keys, original, masked, strict=True):
        full_layers = config.num_layers - (config.decoder == "none")
        total += full_layers * _layer(config, n, n)
        if config.decoder == "none":
            total += _layer(config, m, n)
        elif config.decoder == "self":
            total += (config.decoder_layers - 1) * _layer(config, n_all, n_all) + _layer(config, m, n_all)
        else:
            total += config.decoder_layers * _layer(config, m, n)
        total += 2 * m * config.hidden_size * (config.hidden_size + config.vocab_size)
    return 3 * total


def _layer(config: ModelConfig, queries: int, keys: int) -> int:
    """Forward FLOPs of one layer with that many query rows and key rows."""
    d = config.hidden_size
    projections = 2 * queries * (2 * d * d + 2 * d * config.ffn_size) + 2 * keys * 2 * d * d
    return projections + 4 * queries * keys * d
