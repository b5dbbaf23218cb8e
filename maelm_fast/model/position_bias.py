"""Relative position buckets: integer arithmetic only, so that every machine gets the same table.

Both rules are exact for small distances and logarithmic beyond. They differ in how they round, and in that `t5` gives
each sign half of the buckets while `released` (the authors' code, of TUPE descent) is symmetric about its centre. With
distances d, e exact ones and m logarithmic buckets, "d lies in bucket i or above" compares powers of integers; no
logarithm is taken.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from maelm_fast.config import ModelConfig


def bucket(distance: int, rule: str, buckets: int, max_distance: int) -> int:
    """Bucket of distance = key position - query position. rule: "t5" (the paper's citation) or "released"."""
    if rule == "t5":
        half = buckets // 2
        return _t5_magnitude(abs(distance), half, max_distance) + (half if distance > 0 else 0)
    centre = buckets // 2 - 1
    magnitude = _released_magnitude(abs(distance), buckets // 2, max_distance)
    return centre + (magnitude if distance > 0 else -magnitude)


def _t5_magnitude(d: int, half: int, max_distance: int) -> int:
    """floor of e + m log(d/e) / log(max_distance/e), at most half - 1, with e = half/2 and m = half - e."""
    e = half // 2
    m = half - e
    if d < e:
        return d
    i = 0
    while i < m - 1 and d**m * e ** (i + 1) >= max_distance ** (i + 1) * e**m:
        i += 1
    return e + i


def _released_magnitude(d: int, half: int, max_distance: int) -> int:
    """ceil of e + m log(d/e) / log((max_distance-1)/e), at most half - 1, with e = half/2 and m = half - 1 - e."""
    e = half // 2
    m = half - 1 - e
    if d < e:
        return d
    i = 0
    while i < m and (max_distance - 1) ** i * e**m < d**m * e**i:
        i += 1
    return e + i


def bucket_line(rule: str, buckets: int, max_distance: int, max_positions: int) -> Tensor:
    """(2P-1,) int64: the bucket of each distance from -(P-1) to P-1."""
    distances = range(1 - max_positions, max_positions)
    return torch.tensor([bucket(d, rule, buckets, max_distance) for d in distances])


class RelativeBias(nn.Module):
    """One table (buckets, heads) shared by all layers of a stack. Calling it gives the line (heads, 2P-1) of biases by
    distance, which PositionBias takes."""

    def __init__(self, config: ModelConfig, rule: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.relative_buckets, config.num_heads))
        line = bucket_line(rule, config.relative_buckets, config.relative_max_distance, config.max_positions)
        self.buckets: Tensor
        self.register_buffer("buckets", line, persistent=False)

    def forward(self) -> Tensor:
        return self.weight[self.buckets].t().contiguous()
