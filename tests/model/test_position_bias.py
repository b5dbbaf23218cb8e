"""Bucket rules: T5's as transformers computes it, the released code's as its saturation points tell."""

from __future__ import annotations

import math

import pytest
import torch

from maelm_fast.config import ModelConfig
from maelm_fast.model.position_bias import RelativeBias, bucket, bucket_line

SETTINGS = [(32, 128), (64, 128), (128, 256), (32, 256), (8, 16)]


@pytest.mark.parametrize(("buckets", "max_distance"), SETTINGS)
def test_t5_rule_is_that_of_transformers(buckets: int, max_distance: int) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    theirs = t5.T5Attention._relative_position_bucket(
        torch.arange(-511, 512), bidirectional=True, num_buckets=buckets, max_distance=max_distance
    )
    assert torch.equal(bucket_line("t5", buckets, max_distance, 512), theirs)


def test_t5_saturates_at_91_for_32_buckets() -> None:
    line = bucket_line("t5", 32, 128, 512).tolist()
    assert [line[511 + d] for d in (0, 1, 7, 8, 90, 91, 511)] == [0, 17, 23, 24, 30, 31, 31]
    assert [line[511 - d] for d in (1, 90, 91, 511)] == [1, 14, 15, 15]


@pytest.mark.parametrize(
    ("buckets", "max_distance", "ends"),
    [(32, 128, [8, 11, 17, 26, 38, 57, 85]), (64, 128, None), (128, 256, None)],
)
def test_released_rule(buckets: int, max_distance: int, ends: list[int] | None) -> None:
    """Symmetric, one row unused, exact then by ceil: the last distances of each bucket, and where it saturates."""
    line = bucket_line("released", buckets, max_distance, 512).tolist()
    centre = buckets // 2 - 1
    assert line[511] == centre
    assert [a - centre for a in line] == [centre - a for a in reversed(line)]
    assert sorted(set(line)) == list(range(buckets - 1))
    changes = [d for d in range(buckets // 4, 511) if line[511 + d] != line[511 + d + 1]]
    if ends:
        assert changes == ends
    assert changes[-1] + 1 == {32: 86, 64: 111, 128: 239}[buckets]


@pytest.mark.parametrize(("buckets", "max_distance"), SETTINGS)
def test_integer_rule_equals_the_logarithm(buckets: int, max_distance: int) -> None:
    """Away from exact powers, where a logarithm may round either way."""
    half, exact = buckets // 2, buckets // 4
    for d in range(exact, 512):
        x = math.log(d / exact) / math.log(max_distance / exact) * (half - exact)
        if abs(x - round(x)) > 1e-9:
            assert bucket(-d, "t5", buckets, max_distance) == min(exact + math.floor(x), half - 1)


def test_line_is_the_table_by_distance() -> None:
    bias = RelativeBias(ModelConfig(max_positions=20, num_heads=2, hidden_size=8), "t5")
    torch.nn.init.normal_(bias.weight)
    line, reach = bias().line, bias().reach
    assert (line.shape, bias().positions) == ((2, 2 * reach + 1), 20)
    for distance in range(-reach, reach + 1):
        assert torch.equal(line[:, reach + distance], bias.weight[bucket(distance, "t5", 32, 128)])


@pytest.mark.parametrize("rule", ["t5", "released"])
def test_line_ends_where_the_last_bucket_begins(rule: str) -> None:
    bias = RelativeBias(ModelConfig(max_positions=512, num_heads=2, hidden_size=8), rule)
    reach = bias().reach
    ends = {s: {bucket(s * d, rule, 32, 128) for d in range(reach, 512)} for s in (1, -1)}
    assert [len(buckets) for buckets in ends.values()] == [1, 1]
    assert any(bucket(s * (reach - 1), rule, 32, 128) not in ends[s] for s in (1, -1))
    if rule == "t5":
        assert reach == 91


@pytest.mark.parametrize("rule", ["t5", "released"])
def test_local_initialisation_favours_near_keys_on_both_sides(rule: str) -> None:
    bias = RelativeBias(ModelConfig(max_positions=64, num_heads=4, hidden_size=8), rule)
    torch.nn.init.normal_(bias.weight)
    bias.init_local()
    line, reach = bias().line.detach(), bias().reach
    before, after = line[:, :reach].flip(1), line[:, reach + 1 :]  # by distance 1, 2, ...
    assert torch.equal(line[:, reach], torch.zeros(4))
    for side in (before, after):
        assert (side.diff(dim=1) <= 0).all()
        assert (side[:, 0] < 0).all()
    for preferred, other in ((before[::2], after[::2]), (after[1::2], before[1::2])):
        assert (preferred >= other).all()
        assert (preferred[:, 0] > other[:, 0]).all()
    # What has next to no weight in the softmax has next to no gradient: such a distance could never be learnt.
    assert line.min() >= -8
