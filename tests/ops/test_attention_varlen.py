"""attention_varlen(): the arguments of torch.nn.attention.varlen, which runs on a GPU only."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maelm_fast import ops
from maelm_fast.errors import UserError
from maelm_fast.ops import PositionBias

LENGTHS, KEYS = (5, 1, 0, 9), (3, 4, 2, 9)


def boundaries(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def rows(count: int, heads: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(count + heads)
    return torch.randn(count, heads, 16, dtype=torch.float64, generator=generator)


def by_sequence(q: Tensor, k: Tensor, v: Tensor, lengths: Any, keys: Any, seen: Any = None, **options: Any) -> Tensor:
    """scaled_dot_product_attention of each sequence. seen: which keys a query sees, of the distances."""
    outputs = []
    for parts in zip(q.split(lengths), k.split(keys), v.split(keys), strict=True):
        a, b, c = (x.transpose(0, 1) for x in parts)
        distance = torch.arange(b.shape[1])[None] - torch.arange(a.shape[1])[:, None]
        mask = None if seen is None else seen(distance)
        outputs.append(F.scaled_dot_product_attention(a, b, c, mask, **options).transpose(0, 1))
    return torch.cat(outputs)


def test_it_has_torch_s_arguments_in_torch_s_order() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    theirs = inspect.signature(varlen.varlen_attn).parameters
    ours = inspect.signature(ops.attention_varlen).parameters
    assert [name for name in ours if name in theirs] == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind
        assert ours[name].default == parameter.default


def test_queries_and_keys_of_unequal_lengths_and_a_scale() -> None:
    q, k, v = rows(15).requires_grad_(), rows(18), rows(18, 4).flip(0)
    out = ops.attention_varlen(q, k, v, boundaries(LENGTHS), boundaries(KEYS), 9, 9, scale=0.3)
    expected = by_sequence(q, k, v, LENGTHS, KEYS, scale=0.3)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    gradients = (torch.autograd.grad(x.pow(2).sum(), q)[0] for x in (out, expected))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [(-1, 0), (2, 0), (3, 1), (-1, -1), (0, -1)])
def test_windows_and_shared_heads(window: tuple[int, int]) -> None:
    q, k, v = rows(15), rows(15, 2), rows(15, 2).flip(0)
    starts, (left, right) = boundaries(LENGTHS), window
    out = ops.attention_varlen(q, k, v, starts, None, 9, 9, window_size=window, enable_gqa=True)

    def seen(distance: Tensor) -> Tensor:
        return ((distance >= -left) | (left < 0)) & ((distance <= right) | (right < 0))

    expected = by_sequence(q, k, v, LENGTHS, LENGTHS, seen, enable_gqa=True)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_positions_bias_and_dropout_are_those_of_attention() -> None:
    q, k, v = rows(15), rows(15), rows(15).flip(0)
    starts, positions = boundaries(LENGTHS), torch.tensor([0, 2, 3, 7, 8, 4, 1, 2, 5, 6, 8, 9, 20, 21, 30])
    bias = PositionBias(torch.randn(4, 15, dtype=torch.float64), 31)
    dropout = {"dropout_p": 0.3, "seed": torch.tensor(5), "place": 2}
    layout = ops.AttentionLayout(ops.layout_from_boundaries(starts, positions))
    out = ops.attention_varlen(q, k, v, starts, starts, 9, 9, positions=positions, bias=bias, **dropout)
    assert torch.equal(out, ops.attention(q, k, v, layout, bias, **dropout))
    assert not torch.equal(out, ops.attention_varlen(q, k, v, starts, starts, 9, 9, bias=bias, **dropout))
    windowed = ops.attention_varlen(q, k, v, starts, starts, 9, 9, positions=positions, window_size=(2, 2))
    expected = ops.attention(q, k, v, layout, PositionBias(torch.zeros(4, 1), 31).within(2, 2))
    assert torch.equal(windowed, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_splits": 1}, "it has no num_splits; use torch.nn.attention.varlen"),
        ({"seqused_k": 1, "block_table": 2}, "it has no seqused_k, no block_table"),
        ({"return_aux": 1}, "no return_aux"),
        ({"max_q": 8}, "a sequence has 9 queries or 9 keys, above max_q 8 or max_k 9"),
        ({"window_size": (2, 2)}, "unequal lengths needs positions"),
        ({"positions": torch.zeros(4)}, r"positions must be \(15,\)"),
        ({"dropout_p": 0.1}, "needs a seed"),
    ],
)
def test_what_it_has_not_is_refused(arguments: dict[str, Any], message: str) -> None:
    places = {"cu_seq_q": boundaries(LENGTHS), "cu_seq_k": boundaries(KEYS), "max_q": 9, "max_k": 9}
    with pytest.raises(UserError, match=message):
        ops.attention_varlen(rows(15), rows(18), rows(18), **(places | arguments))


def test_fewer_key_heads_are_refused_unless_asked_for() -> None:
    with pytest.raises(UserError, match="k and v"):
        ops.attention_varlen(rows(15), rows(15, 2), rows(15, 2), boundaries(LENGTHS), None, 9, 9)
