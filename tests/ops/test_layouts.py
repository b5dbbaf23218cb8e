"""Layouts of padded and packed batches, and the way of a tensor to packed rows and back."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from maelm_fast import ops
from maelm_fast.errors import UserError
from maelm_fast.ops import layouts

MASKS = {
    "right": [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]],
    "left": [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]],
    "both sides and a hole": [[0, 1, 0, 1, 0], [1, 1, 1, 1, 0]],
    "an empty row": [[0, 0, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]],
    "nothing kept": [[0, 0, 0]],
    "full": [[1, 1, 1], [1, 1, 1]],
    "no rows": [],
}


def mask_of(name: str) -> Tensor:
    return torch.tensor(MASKS[name]).reshape(len(MASKS[name]), -1 if MASKS[name] else 4)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("name", MASKS)
def test_layout_of_a_mask(name: str, dtype: torch.dtype) -> None:
    mask = mask_of(name).to(dtype)
    kept = mask.bool()
    layout = ops.layout_from_mask(mask)
    tokens = layout.queries
    rows, columns = kept.nonzero(as_tuple=True)
    assert layout.keys is tokens
    assert layout.shape == tuple(mask.shape)
    assert tokens.lengths == tuple(kept.sum(1).tolist())
    assert tokens.positions.tolist() == columns.tolist()
    assert {tokens.positions.dtype, tokens.cu_seqlens.dtype} == {torch.int32}
    assert tokens.cu_seqlens.tolist() == [0, *kept.sum(1).cumsum(0).tolist()]
    assert (layout.rows is None) == bool(kept.all())
    if layout.rows is not None:
        assert layout.rows.tolist() == (rows * mask.shape[1] + columns).tolist()


@pytest.mark.parametrize("name", MASKS)
def test_unpad_and_repad_are_each_other_s_way_back_and_their_gradients_too(name: str) -> None:
    mask = mask_of(name)
    kept = mask.bool()
    x = torch.randn(*mask.shape, 2, 3, dtype=torch.float64, requires_grad=True)
    layout = ops.layout_from_mask(mask)
    packed = ops.unpad(x, layout)
    assert torch.equal(packed, x[kept])
    back = ops.repad(packed * 2, layout)
    assert torch.equal(back, 2 * x * kept[:, :, None, None])
    upstream = torch.randn_like(back)
    (gradient,) = torch.autograd.grad(back, x, upstream)
    assert torch.equal(gradient, 2 * upstream * kept[:, :, None, None])


def test_a_full_batch_is_not_copied() -> None:
    x = torch.randn(2, 3, 4)
    layout = ops.layout_from_mask(torch.ones(2, 3))
    packed = ops.unpad(x, layout)
    assert {packed.data_ptr(), ops.repad(packed, layout).data_ptr()} == {x.data_ptr()}


@pytest.mark.parametrize("name", MASKS)
def test_known_lengths_give_the_same_without_a_read(name: str) -> None:
    mask = mask_of(name)
    lengths = mask.sum(1).tolist()
    expected = ops.layout_from_mask(mask)
    with mock.patch.object(Tensor, "tolist", side_effect=AssertionError), mock.patch.object(Tensor, "item"):
        layout = ops.layout_from_mask(mask, lengths)
    assert layout.queries.lengths == expected.queries.lengths
    assert torch.equal(layout.queries.positions, expected.queries.positions)
    assert torch.equal(layout.queries.cu_seqlens, expected.queries.cu_seqlens)


def test_what_is_no_padding_mask_or_not_its_lengths_is_refused() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    with pytest.raises(UserError, match=r"must be \(batch, length\); it is \(2, 1, 3, 3\)"):
        ops.layout_from_mask(torch.ones(2, 1, 3, 3))
    with pytest.raises(UserError, match="2 numbers from 0 to 3"):
        ops.layout_from_mask(mask, [2, 4])
    with pytest.raises(UserError, match="2 numbers from 0 to 3; there are 1"):
        ops.layout_from_mask(mask, [2])
    with pytest.raises(RuntimeError, match="not what the mask keeps"):
        ops.layout_from_mask(mask, [1, 2])
    layout = ops.layout_from_mask(mask)
    with pytest.raises(UserError, match=r"of a batch \(2, 3\)"):
        ops.unpad(torch.ones(3, 2), layout)
    with pytest.raises(UserError, match="has 3 tokens"):
        ops.repad(torch.ones(4, 2), layout)


def test_traced_whole_with_known_lengths() -> None:
    mask = mask_of("left")
    x = torch.randn(2, 5, 3)

    def double(x: Tensor, mask: Tensor) -> Tensor:
        layout = ops.layout_from_mask(mask, (3, 1))
        return ops.repad(2 * ops.unpad(x, layout), layout)

    compiled = torch.compile(double, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, mask), 2 * x * mask[:, :, None])


def test_layout_of_boundaries() -> None:
    boundaries = torch.tensor([0, 3, 3, 5])
    for lengths in (None, (3, 0, 2)):
        layout = layouts.layout_from_boundaries(boundaries, sequence_lengths=lengths)
        assert layout.lengths == (3, 0, 2)
        assert layout.positions.tolist() == [0, 1, 2, 0, 1]
        assert layout.cu_seqlens.dtype == layout.positions.dtype == torch.int32
    placed = layouts.layout_from_boundaries(boundaries, torch.tensor([0, 4, 9, 2, 3]))
    assert placed.positions.tolist() == [0, 4, 9, 2, 3]


@pytest.mark.parametrize(
    ("boundaries", "positions", "lengths", "message"),
    [
        ([1, 3], None, None, "ascend from 0"),
        ([0, 3, 2], None, None, "ascend from 0"),
        ([[0, 3]], None, None, r"must be \(sequences \+ 1,\)"),
        ([], None, None, r"must be \(sequences \+ 1,\)"),
        ([0, 3], [0, 1], None, r"must be \(3,\)"),
        ([0, 3], None, [1, 2], "bounds 1 sequences, there are 2"),
    ],
)
def test_what_are_no_boundaries_is_refused(
    boundaries: list[int], positions: list[int] | None, lengths: list[int] | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        layouts.layout_from_boundaries(
            torch.tensor(boundaries), None if positions is None else torch.tensor(positions), lengths
        )


def test_lengths_that_the_boundaries_do_not_have_are_refused() -> None:
    with pytest.raises(RuntimeError, match="not those that cu_seqlens bounds"):
        layouts.layout_from_boundaries(torch.tensor([0, 3, 5]), sequence_lengths=[2, 3])
