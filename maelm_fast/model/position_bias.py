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
from maelm_fast.ops import PositionBias


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
    return torch.tensor(_buckets_by_distance(rule, buckets, max_distance, max_positions))


def _buckets_by_distance(rule: str, buckets: int, max_distance: int, max_positions: int) -> list[int]:
    return [bucket(d, rule, buckets, max_distance) for d in range(1 - max_positions, max_positions)]


def _reach(by_distance: list[int]) -> int:
    """The least R >= 1 such that all distances of at least R share a bucket, and all of at most -R."""
    centre = len(by_distance) // 2
    reach = centre
    while reach > 1 and all(by_distance[centre + s * (reach - 1)] == by_distance[centre + s * reach] for s in (1, -1)):
        reach -= 1
    return reach


class RelativeBias(nn.Module):
    """One table (buckets, heads) shared by all layers of a stack. Calling it gives the biases by distance, as attention
    takes them: up to the reach, the distance from which on, to either side, there is one bucket only."""

    def __init__(self, config: ModelConfig, rule: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.relative_buckets, config.num_heads))
        setting = (rule, config.relative_buckets, config.relative_max_distance, config.max_positions)
        self._by_distance = _buckets_by_distance(*setting)
        self.positions, self.reach = config.max_positions, _reach(self._by_distance)
        self.buckets: Tensor  # (2P-1,)
        self.register_buffer("buckets", torch.tensor(self._by_distance), persistent=False)

    def forward(self) -> PositionBias:
        within = self.buckets[self.positions - 1 - self.reach : self.positions + self.reach]
        return PositionBias(self.weight[within].t().contiguous(), self.positions)

    @torch.no_grad()
    def init_local(self) -> None:
        """Near keys first, far ones within reach: minus a slope times the distance, which counts as 8 at most. The
        slope is 1 and halves from one pair of heads to the next; of a pair, one head counts the distances to later keys
        double, the other those to earlier ones. A bucket counts as its nearest distance.

        Adam moves a bias by at most the learning rate an update, so that from zero it takes a tiny model thousands of
        updates to find its neighbours; until then it predicts token frequencies. For the same reason no bias may start
        far below zero: without the limit of 8 the far ones, at -85 and less, stayed there, and no head ever read
        beyond some twenty tokens (ours; benchmarks/LOG.md)."""
        values = [[0.0] * self.weight.shape[1] for _ in range(self.weight.shape[0])]
        reach = len(self._by_distance) // 2
        for distance in sorted(range(-reach, reach + 1), key=abs, reverse=True):
            for head in range(self.weight.shape[1]):
                slope, doubled = 0.5 ** (head // 2), distance * (-1) ** head > 0
                counted = min(abs(distance) * (2 if doubled else 1), 8)
                values[self._by_distance[distance + reach]][head] = -slope * counted
        self.weight.copy_(torch.tensor(values))
