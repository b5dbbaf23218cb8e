"""The compiled CPU ops that stand beside Triton kernels (add_norm, embed_packed) and the dropout mask, on the CPU also
where there is a GPU; and attention with vectors of either width."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from maelm_fast import native, ops
from maelm_fast.ops.reference.dropout import keep_weights
from tests.ops import checks

EPS, SEED, PLACE = 1e-5, -6872316421537386961, 11
OPS = torch.ops.maelm_fast
pytestmark = pytest.mark.skipif(not native.has("add_norm", "cpu"), reason=native.why_not("cpu"))
DROPOUT = pytest.mark.parametrize("p", [0.0, 0.1, 0.9], ids=lambda p: f"p{p}")


def add_norm(*inputs: Tensor, p: float, backend: str = "native") -> Tensor:
    return ops.add_norm(*inputs, eps=EPS, dropout_p=p, seed=torch.tensor(SEED), place=PLACE, backend=backend)


def embed_packed(*inputs: Tensor, p: float, dtype: torch.dtype, backend: str = "native") -> Tensor:
    return ops.embed_packed(
        *inputs, eps=EPS, dropout_p=p, seed=torch.tensor(SEED), place=PLACE, dtype=dtype, backend=backend
    )


def add_norm_inputs(
    rows: int, width: int, dtype: torch.dtype, parameters: torch.dtype, residual: torch.dtype
) -> list[Tensor]:
    x, r, w, b = torch.randn(rows, width), torch.randn(rows, width), 1 + 0.2 * torch.randn(width), torch.randn(width)
    exact = [t.bfloat16() for t in (x, r, w, b)]
    return [t.to(kind) for t, kind in zip(exact, (dtype, residual, parameters, parameters), strict=True)]


def check_add_norm(tensors: list[Tensor], p: float) -> None:
    reference = functools.partial(add_norm, p=p, backend="reference")
    names = ("out", "x", "residual", "weight", "bias")
    checks.check_against_reference(functools.partial(add_norm, p=p), reference, tensors, names=names)


def embed_inputs(rows: int, width: int, tables: torch.dtype, index: torch.dtype = torch.int32) -> list[Tensor]:
    ids, positions = torch.randint(0, 40, (rows,)), torch.randint(0, 13, (rows,))
    ids[: rows // 3] = 7  # a frequent token
    floats = [torch.randn(41, width), torch.randn(15, width), 1 + 0.2 * torch.randn(width), torch.randn(width)]
    return [ids.to(index), positions.to(index), *(t.bfloat16().to(tables) for t in floats)]


def check_embed_packed(tensors: list[Tensor], p: float, dtype: torch.dtype) -> None:
    def reference(*inputs: Tensor) -> Tensor:
        kind = torch.float64 if inputs[2].dtype == torch.float64 else dtype
        return embed_packed(*inputs, p=p, dtype=kind, backend="reference")

    names = ("out", "tokens", "table", "weight", "bias")
    checks.check_against_reference(functools.partial(embed_packed, p=p, dtype=dtype), reference, tensors, names=names)


@DROPOUT
@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize("width", [1, 13, 128, 200])
def test_add_norm(width: int, dtype: torch.dtype, p: float) -> None:
    for parameters in {dtype, torch.float32}:
        check_add_norm(add_norm_inputs(37, width, dtype, parameters, dtype), p)


@DROPOUT
@pytest.mark.parametrize("rows", [0, 1, 300])
def test_add_norm_rows(rows: int, p: float) -> None:
    check_add_norm(add_norm_inputs(rows, 24, torch.float32, torch.float32, torch.float32), p)


@DROPOUT
@pytest.mark.parametrize("step", [1, 2])
def test_add_norm_strided(step: int, p: float) -> None:
    tensors = add_norm_inputs(9, 40, torch.bfloat16, torch.float32, torch.bfloat16)
    check_add_norm([checks.strided(t, step) for t in tensors], p)


def test_add_norm_residual_of_another_dtype() -> None:
    check_add_norm(add_norm_inputs(9, 40, torch.bfloat16, torch.float32, torch.float32), 0.2)


@DROPOUT
@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize("width", [1, 13, 128, 200])
def test_embed_packed(width: int, dtype: torch.dtype, p: float) -> None:
    for tables in {dtype, torch.float32}:
        check_embed_packed(embed_inputs(37, width, tables), p, dtype)


@DROPOUT
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("rows", [0, 1, 300])
def test_embed_packed_rows(rows: int, index: torch.dtype, p: float) -> None:
    check_embed_packed(embed_inputs(rows, 24, torch.float32, index), p, torch.float32)


@pytest.mark.parametrize("step", [1, 2])
def test_embed_packed_strided(step: int) -> None:
    check_embed_packed([checks.strided(t, step) for t in embed_inputs(19, 40, torch.float32)], 0.3, torch.bfloat16)


@pytest.mark.parametrize(("argument", "name"), [(0, "ids"), (1, "positions")])
def test_embed_packed_indices_out_of_range(argument: int, name: str) -> None:
    tensors = embed_inputs(5, 8, torch.float32)
    tensors[argument][2] = 99
    with pytest.raises(RuntimeError, match=rf"embed_packed: {name}\[2\] is 99, outside \[0, "):
        embed_packed(*tensors, p=0.0, dtype=torch.float32)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999999])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(5, 512), (3, 1), (4, 63), (2, 71), (0, 8)])
def test_keep_weights_has_the_references_bits(rows: int, columns: int, dtype: torch.dtype, p: float) -> None:
    seed, place = torch.tensor(SEED), 4_000_000_000
    numbers = torch.arange(rows) * 1000 + 7
    actual = OPS.keep_weights_native_fwd(numbers, 3, columns, p, seed, place, dtype)
    assert torch.equal(actual, keep_weights(numbers, 3, columns, p, seed, place, dtype))


@pytest.mark.parametrize("p", [1.0, -0.1, float("nan")])
def test_a_rate_that_is_none_is_an_error(p: float) -> None:
    with pytest.raises(RuntimeError, match="dropout_p must lie in"):
        OPS.keep_weights_native_fwd(torch.arange(2), 1, 8, p, torch.tensor(3), 0, torch.bool)


def test_dropout_without_a_seed_is_an_error() -> None:
    x, residual, weight, bias = add_norm_inputs(2, 8, torch.float32, torch.float32, torch.float32)
    with pytest.raises(RuntimeError, match="add_norm: dropout needs a seed"):
        OPS.add_norm_native_fwd(x, residual, weight, bias, EPS, 0.1, None, 0)


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    add = add_norm_inputs(700, 72, torch.float32, torch.float32, torch.float32)
    embed = embed_inputs(700, 72, torch.float32)
    runs: list[Callable[[], list[Tensor]]] = [
        functools.partial(checks.outputs_and_gradients, functools.partial(add_norm, p=0.1), add),
        functools.partial(
            checks.outputs_and_gradients, functools.partial(embed_packed, p=0.1, dtype=torch.float32), embed
        ),
    ]
    before = torch.get_num_threads()
    try:
        for run in runs:
            torch.set_num_threads(1)
            expected = run()
            for threads in (2, 3):
                torch.set_num_threads(threads)
                assert all(torch.equal(a, b) for a, b in zip(expected, run(), strict=True))
    finally:
        torch.set_num_threads(before)


def test_what_is_not_written_shows() -> None:
    """Deterministic mode fills new memory with NaN inside the compiled code too."""
    with checks.deterministic():
        check_add_norm(add_norm_inputs(37, 40, torch.float32, torch.float32, torch.float32), 0.1)
        check_embed_packed(embed_inputs(37, 40, torch.float32), 0.1, torch.float32)


ATTENTION = """
import torch
from maelm_fast import ops
from maelm_fast.batch import Layout

def numbers(*shape):  # not normal ones, which depend on the capability
    return (4 * torch.rand(shape) - 2).to(dtype).requires_grad_()

found = []
cases = (16, (1, 7, 0, 109), 0.0), (32, (128, 61), 0.1), (64, (300, 13, 25), 0.1), (128, (435,), 0.0)
for width, lengths, p in cases:
    torch.manual_seed(width)
    rows = sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.randperm(length + 40)[:length].sort().values for length in lengths]).int()
    q, k, v, line = *(numbers(rows, 3, width) for _ in range(3)), numbers(3, 65)
    layout, bias = ops.AttentionLayout(Layout(starts, positions, lengths)), ops.PositionBias(line, 512)
    rows_of_products = [t.to(products) for t in (q, k, v)]
    out = ops.attention(*rows_of_products, layout, bias, dropout_p=p, seed=torch.tensor(5), backend="native").to(dtype)
    out.backward(numbers(rows, 3, width))
    found += [out.detach(), q.grad, k.grad, v.grad, line.grad]
torch.save(found, file)
"""


def attention_under_avx2(path: Path, dtype: str) -> list[Tensor]:
    """PyTorch's ATEN_CPU_CAPABILITY is read once a process."""
    setting = f"file, dtype, products = {str(path)!r}, torch.{dtype}, torch.{dtype}"
    subprocess.run(
        [sys.executable, "-c", f"import torch\n{setting}\n{ATTENTION}"],
        check=True,
        env=os.environ | {"ATEN_CPU_CAPABILITY": "avx2"},
    )
    results: list[Tensor] = torch.load(path)
    assert len(results) == 20
    return results


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="a CPU without AVX-512 has one width")
def test_the_width_of_vectors_does_not_change_a_bit_of_attention(tmp_path: Path) -> None:
    exec(ATTENTION, widest := {"file": tmp_path / "here", "dtype": torch.float32, "products": torch.float32})
    results = attention_under_avx2(tmp_path / "avx2", "float32")
    assert all(torch.equal(a, b) for a, b in zip(widest["found"], results, strict=True))


def test_attention_without_bf16_products_widens(tmp_path: Path) -> None:
    """bf16 tensors give what they give in fp32, rounded, where the CPU or ATEN_CPU_CAPABILITY has no AVX-512."""
    exec(ATTENTION, widened := {"file": tmp_path / "here", "dtype": torch.bfloat16, "products": torch.float32})
    results = attention_under_avx2(tmp_path / "avx2", "bfloat16")
    assert all(torch.equal(a, b) for a, b in zip(widened["found"], results, strict=True))
