"""What the tests of the ops share: one error bound, memory that shows when it was not written, strided inputs.

The bound has no tolerance chosen by hand: an op may be twice as far from float64 as PyTorch itself is at that dtype.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from maelm_fast.batch import Layout, layout_of
from maelm_fast.ops.dispatch import interpreted, triton_installed
from maelm_fast.ops.registration import native_reason

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.bfloat16, id="bf16"),
    pytest.param(torch.float16, id="fp16"),
]
POISON = {torch.int64: -(2**62), torch.int32: -(2**30), torch.int16: -(2**14), torch.int8: -77, torch.uint8: 177}


def backends_of(op: str, *names: str) -> list[Any]:
    """Parameters: the named backends of `op` to test; native is skipped where it was not built, triton where it is not
    installed."""
    reason = native_reason(op, DEVICE)  # which registers the compiled op's fake and backward too
    skips = {
        "native": [pytest.mark.skipif(bool(reason), reason=reason)],
        "triton": [pytest.mark.skipif(not triton_installed(), reason="triton is not installed")],
    }
    return [pytest.param(name, marks=skips.get(name, [])) for name in names]


def assert_as_good_as_pytorch(
    actual: Tensor, at_dtype: Tensor, exact: Tensor, floor: float = 2e-6, own_rounding: bool = False
) -> None:
    """Largest error of `actual` at most twice that of `at_dtype`, both against `exact`, plus `floor` of the scale.

    at_dtype: what the reference gives at the dtype under test. exact: what it gives in float64. own_rounding: half a
    unit in an element's own last place is no error of `actual`; for random inputs, where the few largest elements of
    `at_dtype` may by luck all lie next to numbers of the dtype."""
    assert actual.shape == exact.shape
    assert actual.dtype == at_dtype.dtype
    if exact.numel() == 0:
        return
    assert bool(actual.isfinite().all()), "not finite: memory that was not written, or an overflow"
    errors, bound = (actual.double() - exact).abs(), (at_dtype.double() - exact).abs().max().item()
    if own_rounding:
        errors = errors - torch.finfo(actual.dtype).eps / 2 * exact.abs()
    error = errors.max().item()
    bound = 2 * bound + floor * exact.abs().max().clamp(min=1.0).item()
    assert error <= bound, f"error {error:.3g}, allowed {bound:.3g}"


def check_against_reference(
    op: Callable[..., Any],
    reference: Callable[..., Any],
    tensors: Sequence[Tensor],
    *,
    floor: float = 2e-6,
    names: Sequence[str] = (),
) -> None:
    """Outputs of op(*tensors) and the gradients of the floating-point `tensors` against the reference, in memory that
    holds NaN where the op did not write."""
    with poisoned_memory():
        actual = outputs_and_gradients(op, tensors)
    at_dtype = outputs_and_gradients(reference, tensors)
    exact = outputs_and_gradients(reference, [t.double() if t.is_floating_point() else t for t in tensors])
    for index, triple in enumerate(zip(actual, at_dtype, exact, strict=True)):
        try:
            assert_as_good_as_pytorch(*triple, floor=floor)
        except AssertionError as error:
            label = names[index] if index < len(names) else f"result {index}"
            raise AssertionError(f"{label}: {error}") from error


def outputs_and_gradients(function: Callable[..., Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of function(*tensors), then the gradient of each floating-point tensor (zeros if it has none). The
    upstream gradients are the same for every dtype and function: drawn from the outputs' shapes."""
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]  # detach() keeps the strides
    results = function(*leaves)
    outputs = [results] if isinstance(results, Tensor) else list(results)
    roots = [out for out in outputs if out.requires_grad]
    draw = torch.Generator().manual_seed(1234)
    upstream = [torch.randn(out.shape, generator=draw).bfloat16().to(out) for out in roots]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    gradients = torch.autograd.grad(roots, wanted, upstream, allow_unused=True, materialize_grads=True)
    return [*(out.detach() for out in outputs), *gradients]


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within the block torch.empty, empty_like and new_empty give NaN (ints: a number out of any range), so that what a
    kernel left unwritten fails a comparison."""

    def poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            fresh = make(*args, **kwargs)
            if fresh.is_floating_point():
                return fresh.fill_(float("nan"))
            return fresh.fill_(POISON[fresh.dtype]) if fresh.dtype in POISON else fresh

        return made

    with (
        mock.patch.object(torch, "empty", poison(torch.empty)),
        mock.patch.object(torch, "empty_like", poison(torch.empty_like)),
        mock.patch.object(Tensor, "new_empty", poison(Tensor.new_empty)),
    ):
        yield


def strided(x: Tensor, step: int = 1) -> Tensor:
    """An equal view that is not contiguous: a slice of a larger tensor that is NaN elsewhere, every `step`-th column of
    it. A vector's elements lie two apart at least."""
    step = max(step, 2) if x.dim() == 1 else step
    filler = float("nan") if x.is_floating_point() else POISON[x.dtype]
    larger = x.new_full((*x.shape[:-1], x.shape[-1] * step + 24), filler)
    view = larger[..., 8 : 8 + x.shape[-1] * step : step]
    view.copy_(x)
    return view


class Seen(TorchDispatchMode):
    """The operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def gapped_layout(positions: int, lengths: list[int], seed: int = 0) -> Layout:
    """Sequences whose positions, below `positions`, have gaps, as after the removal of masked tokens."""
    draw = random.Random(seed)
    places = [p for n in lengths for p in sorted(draw.sample(range(positions), n))]
    return layout_of(lengths, torch.tensor(places, dtype=torch.int32))


def seed_tensor(seed: int = 12345678901) -> Tensor:
    """A dropout seed: one int64 on the device under test."""
    return torch.tensor(seed, device=DEVICE)


def opcheck(op: Any, *args: Any, **kwargs: Any) -> None:
    """torch.library.opcheck of schema, fake and autograd registration; `args` that require gradients get them."""
    torch.library.opcheck(op, args, kwargs)


def _round_as_a_gpu_does() -> None:
    """Triton's interpreter cuts fp32 off to bf16, where a GPU rounds to nearest: errors twice as large."""
    from triton.runtime import interpreter

    cut_off = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if str(source) != "fp32" or str(target) != "bf16":
            return cut_off(data, source, target, mode)
        rounded = torch.from_numpy(data.reshape(-1).copy()).bfloat16().view(torch.uint16)
        return rounded.numpy().reshape(data.shape)

    interpreter._convert_float = convert


if triton_installed() and interpreted():
    _round_as_a_gpu_does()


@contextlib.contextmanager
def deterministic(mode: bool = True) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
