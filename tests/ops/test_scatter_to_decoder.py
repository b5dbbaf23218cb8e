"""The decoder's input: compiled kernels against the plain reference, forward and every gradient."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from maelm_fast import native
from maelm_fast.errors import UserError
from maelm_fast.ops.reference.scatter_to_decoder import scatter_to_decoder as reference
from maelm_fast.ops.scatter_to_decoder import CUDA_WIDTH, scatter_to_decoder
from tests.ops import checks

EPS = 1e-5
NAMES = ("out", "encoder", "mask", "table", "weight", "bias")
needs_native = pytest.mark.skipif(
    not native.has("scatter_to_decoder", checks.DEVICE), reason=native.why_not(checks.DEVICE)
)
pytestmark = needs_native


def example(
    lengths: tuple[int, ...] = (5, 1, 0, 9),
    masked: float = 0.3,
    width: int = 24,
    dtype: torch.dtype = torch.float32,
    parameters: torch.dtype | None = None,
    index: torch.dtype = torch.int32,
    unused: int = 1,
) -> list[Tensor]:
    """Inputs for sequences of these lengths. `unused` encoder rows are named by no slot."""
    slots = sum(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths] or [torch.empty(0)]).to(index)
    visible = (torch.rand(slots) >= masked).nonzero()[:, 0]
    source = torch.full((slots,), -1, dtype=index)
    rows = len(visible) + unused
    source[visible] = torch.randperm(rows)[: len(visible)].to(index)
    draw = functools.partial(torch.randn, dtype=torch.float32)
    table_rows = max(lengths, default=0) + 3
    floats = [draw(rows, width), draw(width), draw(table_rows, width), 1 + 0.2 * draw(width), draw(width)]
    encoder, mask, table, weight, bias = (t.to(torch.bfloat16) for t in floats)  # exact in every dtype but fp16's range
    kinds = parameters or dtype
    tensors = [encoder.to(dtype), source, mask.to(kinds), positions, table.to(kinds), weight.to(kinds), bias.to(kinds)]
    return [t.to(checks.DEVICE) for t in tensors]


def check(tensors: list[Tensor]) -> None:
    run = functools.partial(scatter_to_decoder, eps=EPS, backend="native")
    checks.check_against_reference(run, functools.partial(reference, eps=EPS), tensors, names=NAMES)


def with_gradients(tensors: list[Tensor], **kwargs: Any) -> list[Tensor]:
    return checks.outputs_and_gradients(functools.partial(scatter_to_decoder, eps=EPS, **kwargs), tensors)


@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize("width", [1, 7, 24, 72, 128, 200, 768])
def test_widths_and_dtypes(width: int, dtype: torch.dtype) -> None:
    check(example(width=width, dtype=dtype))


@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_fp32_parameters_beside_rows_of_any_dtype(dtype: torch.dtype, index: torch.dtype) -> None:
    check(example(dtype=dtype, parameters=torch.float32, index=index, width=40))


def test_maps_of_different_dtypes() -> None:
    tensors = example()
    tensors[3] = tensors[3].long()
    check(tensors)


@pytest.mark.parametrize("lengths", [(), (1,), (63,), (100, 3, 0, 17), (40,) * 20], ids=str)
@pytest.mark.parametrize("masked", [0.0, 0.4, 1.0])
def test_lengths_and_rates(lengths: tuple[int, ...], masked: float) -> None:
    """Among them no slot at all, no masked slot, and no visible one (with and without encoder rows)."""
    check(example(lengths, masked))
    check(example(lengths, masked, unused=0))


@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize("step", [1, 2])
def test_strided_inputs(dtype: torch.dtype, step: int) -> None:
    check([checks.strided(t, step) for t in example(dtype=dtype, width=32)])


def test_what_is_not_written_shows() -> None:
    """Deterministic mode fills new memory with NaN inside the compiled code too."""
    with checks.deterministic():
        check(example(unused=5))


def test_strided_upstream_gradient() -> None:
    tensors = example(width=16)
    leaves = [t.requires_grad_(t.is_floating_point()) for t in tensors]
    wanted = [t for t in leaves if t.requires_grad]
    out = scatter_to_decoder(*leaves, eps=EPS, backend="native")
    upstream = checks.strided(torch.randn(out.shape, device=out.device), 2)
    actual = torch.autograd.grad(out, wanted, upstream)
    expected = torch.autograd.grad(reference(*leaves, eps=EPS), wanted, upstream)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


def test_a_constant_row_has_finite_gradients() -> None:
    tensors = example()
    for i in (0, 2, 4):
        tensors[i] = torch.ones_like(tensors[i])
    check(tensors)


def test_deterministic_mode_repeats_bitwise() -> None:
    tensors = example((33,) * 40, width=64)
    with checks.deterministic():
        first, second = with_gradients(tensors, backend="native"), with_gradients(tensors, backend="native")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.skipif(checks.DEVICE != "cpu", reason="the CPU's threads")
def test_the_number_of_threads_does_not_change_a_bit() -> None:
    tensors = example((33, 70, 5) * 20, width=72)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(with_gradients(tensors, backend="native"))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.skipif(checks.DEVICE != "cpu", reason="on CUDA indices are the caller's duty")
@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        (1, 99, r"source\[1\] is 99, outside \[-1, "),
        (1, -2, r"source\[1\] is -2"),
        (3, 99, r"positions\[1\] is 99, outside \[0, 12\)"),
        (3, -1, r"positions\[1\] is -1"),
    ],
)
def test_indices_out_of_range_are_one_clear_error(argument: int, value: int, message: str) -> None:
    tensors = example()
    tensors[argument][1] = value
    with pytest.raises(RuntimeError, match=message):
        scatter_to_decoder(*tensors, eps=EPS, backend="native")


@pytest.mark.skipif(checks.DEVICE != "cpu", reason="on CUDA indices are the caller's duty")
def test_a_row_named_twice_is_an_error() -> None:
    tensors = example(masked=0.0)
    tensors[1][4] = tensors[1][0]
    with pytest.raises(RuntimeError, match=r"source names row \d+ of encoder_out twice"):
        scatter_to_decoder(*tensors, eps=EPS, backend="native")


@pytest.mark.parametrize(("argument", "name"), [(2, "mask_embedding"), (4, "position_table"), (5, "weight")])
def test_a_wrong_shape_names_the_argument(argument: int, name: str) -> None:
    tensors = example()
    tensors[argument] = tensors[argument][..., :-1]
    with pytest.raises(RuntimeError, match=f"{name} must have shape"):
        scatter_to_decoder(*tensors, eps=EPS, backend="native")


def test_float64_goes_to_the_reference() -> None:
    tensors = [t.double() if t.is_floating_point() else t for t in example()]
    assert torch.equal(scatter_to_decoder(*tensors, eps=EPS), reference(*tensors, eps=EPS))
    with pytest.raises(UserError, match=r"native.* cannot run: dtype float64"):
        scatter_to_decoder(*tensors, eps=EPS, backend="native")


@pytest.mark.skipif(checks.DEVICE != "cuda", reason="the CPU takes any width")
def test_a_row_too_wide_for_cuda_has_a_reason() -> None:
    tensors = example(width=CUDA_WIDTH + 8)
    with pytest.raises(UserError, match=f"width {CUDA_WIDTH + 8}"):
        scatter_to_decoder(*tensors, eps=EPS, backend="native")


@pytest.mark.parametrize("dtype", checks.DTYPES)
def test_opcheck(dtype: torch.dtype) -> None:
    tensors = example(dtype=dtype, width=16)
    scatter_to_decoder(*tensors, eps=EPS, backend="native")  # registers
    leaves = [t.requires_grad_(t.is_floating_point()) for t in tensors]
    checks.opcheck(torch.ops.maelm_fast.scatter_to_decoder_native_fwd, *leaves, EPS)
    out, mean, rstd = torch.ops.maelm_fast.scatter_to_decoder_native_fwd(*tensors, EPS)
    plain = [t.detach() for t in (torch.randn_like(out), *tensors, mean, rstd)]
    checks.opcheck(torch.ops.maelm_fast.scatter_to_decoder_native_bwd, *plain, False)


def test_compiles_without_a_graph_break() -> None:
    tensors = example()
    compiled = torch.compile(scatter_to_decoder, fullgraph=True, backend="aot_eager")
    expected = with_gradients(tensors, backend="native")
    actual = checks.outputs_and_gradients(functools.partial(compiled, eps=EPS, backend="native"), tensors)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)
