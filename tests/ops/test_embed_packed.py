"""embed_packed: every backend against the reference in float64, both ways of adding the tables' gradients, tracing."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from maelm_fast import ops
from maelm_fast.errors import UserError
from maelm_fast.ops.reference.dropout import keep_mask
from tests.ops.checks import (
    DEVICE,
    DTYPES,
    backends_of,
    check_against_reference,
    deterministic,
    opcheck,
    outputs_and_gradients,
    seed_tensor,
    strided,
)

BACKENDS = backends_of("embed_packed", "triton", "native")
NAMES = ("out", "grad_token_table", "grad_position_table", "grad_weight", "grad_bias")
EPS, VOCABULARY, POSITIONS = 1e-5, 11, 9

each_mode = pytest.mark.parametrize("fixed_order", [False, True], ids=["atomic", "deterministic"])


def inputs(tokens: int, width: int, dtype: torch.dtype, norm: torch.dtype | None = None) -> list[Tensor]:
    """ids, positions, token_table, position_table, weight, bias. Every other id is 3; 0 and 7 never occur."""
    draw = torch.Generator().manual_seed(tokens * 10_007 + width)
    ids = torch.randint(1, VOCABULARY, (tokens,), generator=draw, dtype=torch.int32)
    ids[ids == 7] = 8
    ids[::2] = 3
    positions = torch.arange(tokens, dtype=torch.int32) % (POSITIONS - 1)
    shapes = [(VOCABULARY, width), (POSITIONS, width), (width,), (width,)]
    tables = [torch.randn(shape, generator=draw) for shape in shapes]
    tables[2] = 1 + 0.2 * tables[2]
    dtypes = [dtype, dtype, norm or dtype, norm or dtype]
    floats = [t.to(DEVICE, d) for t, d in zip(tables, dtypes, strict=True)]
    return [ids.to(DEVICE), positions.to(DEVICE), *floats]


def both(
    backend: str, dropout_p: float = 0.0, place: int = 0, dtype: torch.dtype | None = None
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The op on `backend`, and the reference (in float64 too when its tables are), as functions of the six tensors."""

    def call(name: str, *tensors: Tensor) -> Tensor:
        out = torch.float64 if tensors[2].dtype == torch.float64 else dtype
        seed = seed_tensor() if dropout_p else None
        return ops.embed_packed(*tensors, eps=EPS, dropout_p=dropout_p, seed=seed, place=place, dtype=out, backend=name)

    return functools.partial(call, backend), functools.partial(call, "reference")


@each_mode
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [6, 100, 768])
@pytest.mark.parametrize("backend", BACKENDS)
def test_matches_the_reference(backend: str, width: int, dtype: torch.dtype, fixed_order: bool) -> None:
    tokens = 3 if width > 500 else 15
    with deterministic(fixed_order):
        for dropout_p in (0.0, 0.3) if width == 100 else (0.3,):
            check_against_reference(*both(backend, dropout_p, place=3), inputs(tokens, width, dtype), names=NAMES)


@pytest.mark.parametrize("tokens", [33, 64, 100])
@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_that_cross_chunks(backend: str, tokens: int) -> None:
    """Id 3 fills several chunks of 32 sorted rows; other runs end inside a chunk, at its end, or just after it."""
    tensors = inputs(tokens, 8, torch.float32)
    with deterministic():
        check_against_reference(*both(backend), tensors, names=NAMES)
        tensors[0] = torch.full_like(tensors[0], 3)  # one run of everything
        check_against_reference(*both(backend), tensors, names=NAMES)
        tensors[0][:32] = 2  # a run that ends where a chunk does
        check_against_reference(*both(backend), tensors, names=NAMES)


@each_mode
@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_token_and_one_token(backend: str, tokens: int, fixed_order: bool) -> None:
    with deterministic(fixed_order):
        check_against_reference(*both(backend, 0.5), inputs(tokens, 72, torch.float32), names=NAMES)


@each_mode
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_inputs(backend: str, step: int, fixed_order: bool) -> None:
    tensors = [strided(t, step) for t in inputs(9, 40, torch.bfloat16)]
    with deterministic(fixed_order):
        check_against_reference(*both(backend, 0.3), tensors, names=NAMES)


@pytest.mark.parametrize("backend", BACKENDS)
def test_int64_ids(backend: str) -> None:
    ids, positions, *floats = inputs(9, 24, torch.float32)
    for mode in (False, True):
        with deterministic(mode):
            check_against_reference(*both(backend), [ids.long(), positions.long(), *floats], names=NAMES)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("backend", BACKENDS)
def test_output_narrower_than_the_tables(backend: str, dtype: torch.dtype) -> None:
    check_against_reference(*both(backend, 0.1, dtype=dtype), inputs(9, 136, torch.float32), names=NAMES)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes_that_all_differ(backend: str) -> None:
    tensors = inputs(9, 136, torch.float32)
    for index, dtype in ((2, torch.bfloat16), (4, torch.float16)):
        tensors[index] = tensors[index].to(dtype)
    check_against_reference(*both(backend, 0.1), tensors, names=NAMES)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_autocast_gives_the_output_its_dtype(backend: str) -> None:
    tensors = inputs(5, 24, torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        out, *grads = outputs_and_gradients(both(backend)[0], tensors)
    assert out.dtype == torch.bfloat16
    assert {g.dtype for g in grads} == {torch.float32}
    assert both(backend)[0](*tensors).dtype == torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_mask_is_the_references(backend: str) -> None:
    place, p = 2**31 - 5, 0.37
    tensors = inputs(19, 92, torch.float32)
    keep = keep_mask((19, 92), p, seed_tensor(), place)
    kept, plain = both(backend, p, place)[0](*tensors), both(backend)[0](*tensors)
    assert torch.equal(kept != 0, keep)
    torch.testing.assert_close(kept, plain * keep / (1 - p))


@pytest.mark.parametrize("backend", BACKENDS)
def test_constant_rows(backend: str) -> None:
    """Variance 0: the output is the bias, however large the constant."""
    ids, positions, tokens, places, weight, bias = inputs(5, 200, torch.float32)
    out = both(backend)[0](ids, positions, torch.full_like(tokens, 1000.1), torch.zeros_like(places), weight, bias)
    assert torch.equal(out, bias.expand(5, 200))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_far_from_zero(backend: str) -> None:
    ids, positions, tokens, places, weight, bias = inputs(5, 200, torch.float32)
    check_against_reference(
        *both(backend), [ids, positions, tokens + 1000, places, weight, bias], names=NAMES, floor=1e-4
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_deterministic_mode_gives_the_same_bits(backend: str) -> None:
    tensors = inputs(40, 24, torch.float32)
    run, _ = both(backend, 0.2)
    with deterministic():
        for once, again in zip(outputs_and_gradients(run, tensors), outputs_and_gradients(run, tensors), strict=True):
            assert torch.equal(once, again)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend: str, dropout_p: float) -> None:
    tensors = inputs(3, 16, torch.float32)
    rest = (dropout_p, seed_tensor() if dropout_p else None, 1)
    forward = getattr(torch.ops.maelm_fast, f"embed_packed_{backend}_fwd")
    opcheck(forward, *(t.requires_grad_(t.is_floating_point()) for t in tensors), EPS, *rest, torch.bfloat16)
    tensors = [t.detach() for t in tensors]
    out, mean, rstd = forward(*tensors, EPS, *rest, torch.bfloat16)
    backward = getattr(torch.ops.maelm_fast, f"embed_packed_{backend}_bwd")
    opcheck(backward, torch.randn_like(out), *tensors[:5], mean, rstd, *rest, True)


@each_mode
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_without_a_break(backend: str, fixed_order: bool) -> None:
    run, _ = both(backend, 0.3)
    tensors = inputs(6, 24, torch.float32)
    torch.compiler.reset()
    with deterministic(fixed_order):
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        for eager, traced in zip(
            outputs_and_gradients(run, tensors), outputs_and_gradients(compiled, tensors), strict=True
        ):
            torch.testing.assert_close(eager, traced)


def test_float64_runs_on_the_reference() -> None:
    ids, positions, *floats = inputs(4, 24, torch.float32)
    tensors = [ids, positions, *(t.double() for t in floats)]
    assert ops.embed_packed(*tensors, eps=EPS).dtype == torch.float64
    with pytest.raises(UserError, match="float64"):
        ops.embed_packed(*tensors, eps=EPS, backend="triton")


def test_errors() -> None:
    ids, positions, tokens, places, weight, bias = inputs(4, 24, torch.float32)
    with pytest.raises(UserError, match=r"\(T,\)"):
        ops.embed_packed(ids[:3], positions, tokens, places, weight, bias, eps=EPS)
    with pytest.raises(UserError, match="one width"):
        ops.embed_packed(ids, positions, tokens, places[:, :8], weight, bias, eps=EPS)
    with pytest.raises(UserError, match="seed"):
        ops.embed_packed(ids, positions, tokens, places, weight, bias, eps=EPS, dropout_p=0.1)
