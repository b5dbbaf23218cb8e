"""The adapters of other packages' attention. Without a GPU: FlexAttention written out, and what the others are called
with, by stand-ins that compute from the arguments they were given. With one: the kernels against float64."""

from __future__ import annotations

import functools
import importlib.machinery
import inspect
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from maelm_fast import native
from maelm_fast.batch import layout_of
from maelm_fast.errors import UserError
from maelm_fast.ops import AttentionLayout, PositionBias, attention, dispatch
from maelm_fast.ops.attention_backends import common, flash, flex, torch_varlen, xformers
from maelm_fast.ops.attention_inputs import Call
from maelm_fast.ops.reference.attention import attention as reference_attention
from tests.ops.checks import (
    assert_as_good_as_pytorch,
    deterministic,
    gapped_layout,
    outputs_and_gradients,
    strided,
)

HEADS, DIM, POSITIONS, REACH = 3, 16, 300, 40
ADAPTERS = {"flash": flash, "torch": torch_varlen, "xformers": xformers, "flex": flex}
LAYOUTS = {
    "one token": ([1, 2], None),
    "mixed": ([1, 17, 200, 3, 64, 130], None),
    "cross": ([2, 5, 9, 130], [20, 1, 290, 30]),
    "empty": ([3, 4, 0, 150, 0], [5, 0, 7, 129, 0]),  # queries without keys, keys without queries, neither
}
WHOLE = [name for name in LAYOUTS if name != "empty"]
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
gapped = functools.partial(gapped_layout, POSITIONS)


def plan_of(name: str, device: str = "cpu") -> AttentionLayout:
    queries, keys = LAYOUTS[name]
    return AttentionLayout(gapped(queries).to(device), None if keys is None else gapped(keys, 1).to(device))


def inputs(plan: AttentionLayout, dtype: torch.dtype, dim: int = DIM, bias: bool = True) -> list[Tensor]:
    """q, k, v and a line whose ends many pairs lie beyond; on the device of the layout."""
    device = plan.keys.positions.device
    draw = torch.Generator().manual_seed(plan.queries.num_tokens)
    rows = (plan.queries.num_tokens, *(plan.keys.num_tokens,) * 2)
    tensors = [torch.randn(n, HEADS, dim, generator=draw).to(device, dtype) for n in rows]
    line = torch.randn(HEADS, 2 * REACH + 1, generator=draw).to(device, torch.promote_types(dtype, torch.float32))
    return [*tensors, line] if bias else tensors


def exact(plan: AttentionLayout, scale: float) -> Callable[..., Tensor]:
    return lambda q, k, v, line=None: reference_attention(q, k, v, plan.queries, plan.keys, line, scale=scale)


def call_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttentionLayout,
    bias: PositionBias | None = None,
    scale: float = 1.0,
    dropout_p: float = 0.0,
) -> Call:
    return Call(q, k, v, plan, bias, scale, dropout_p, None, 0)


def biased(line: Tensor | None) -> PositionBias | None:
    return None if line is None else PositionBias(line, POSITIONS)


# FlexAttention, eager


@pytest.fixture
def _backward_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention refuses to differentiate on a CPU, since its compiled code cannot; written out, it can."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.usefixtures("_backward_on_a_cpu")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_flex_forward_and_every_gradient(name: str, bias: bool, dtype: torch.dtype) -> None:
    plan, scale = plan_of(name), 0.3
    tensors = inputs(plan, dtype, bias=bias)

    def call(q: Tensor, k: Tensor, v: Tensor, line: Tensor | None = None) -> Tensor:
        return flex.run(call_of(q, k, v, plan, biased(line), scale))

    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    expected = outputs_and_gradients(exact(plan, scale), tensors)
    for mine, theirs in zip(outputs_and_gradients(call, tensors), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max().clamp(1)))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_runs_on_a_cpu_only_when_named() -> None:
    plan = plan_of("mixed")
    q, k, v, line = inputs(plan, torch.float32)
    out = attention(q, k, v, plan, biased(line), backend="flex")
    torch.testing.assert_close(out, attention(q, k, v, plan, biased(line), backend="reference"))
    with pytest.raises(UserError, match="backend 'flex' cannot run: FlexAttention has no backward pass on a CPU"):
        attention(q.requires_grad_(), k, v, plan, biased(line), backend="flex")


@pytest.mark.parametrize("name", [*LAYOUTS, "many"])
def test_the_block_mask_holds_every_pair_and_its_full_blocks_no_other(name: str) -> None:
    queries, keys = LAYOUTS.get(name, ([500, 3, 0, 260, 128, 128, 140], [700, 0, 40, 300, 128, 128, 513]))
    there = layout_of(queries if keys is None else keys)
    mask = flex.block_mask(layout_of(queries), there)
    owners = [torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in (queries, list(there.lengths))]
    pairs = owners[0][:, None] == owners[1][None, :]
    padded = torch.zeros([-(-n // 128) * 128 for n in pairs.shape], dtype=torch.bool)
    padded[: pairs.shape[0], : pairs.shape[1]] = pairs
    blocks = padded.view(padded.shape[0] // 128, 128, -1, 128).transpose(1, 2).flatten(2)
    listed = [torch.zeros(blocks.shape[:2], dtype=torch.bool) for _ in range(2)]
    for where, count, columns in (
        (listed[0], mask.kv_num_blocks, mask.kv_indices),
        (listed[1], mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        for row in range(blocks.shape[0]):
            where[row, columns[0, 0, row, : count[0, 0, row]].long()] = True
    assert torch.equal(listed[1], blocks.all(2))
    assert not (listed[0] & listed[1]).any()
    assert (listed[0] | listed[1] >= blocks.any(2)).all()
    if name not in ("empty", "many"):  # an empty sequence between two others may list a block too many
        assert torch.equal(listed[0] | listed[1], blocks.any(2))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_what_is_made_of_the_layout_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, made = plan_of("mixed"), []
    block_mask = flex.block_mask
    monkeypatch.setattr(flex, "block_mask", lambda *layouts: made.append(block_mask(*layouts)) or made[-1])
    for _ in range(2):
        flex.run(call_of(*inputs(plan, torch.float32, bias=False), plan))
    assert len(made) == 1


# flash-attn, torch and xformers, with stand-ins


def from_boundaries(q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, scale: float) -> Tensor:
    """Attention by the boundaries alone, as the kernels do it."""
    for starts, rows in ((q_starts, q), (k_starts, k)):
        assert starts.dtype == torch.int32
        assert starts[0] == 0
        assert starts[-1] == rows.shape[0]
        assert rows.stride(-1) == 1
    layouts = [layout_of(starts.diff().tolist()) for starts in (q_starts, k_starts)]
    return reference_attention(q, k, v, *layouts, scale=scale)


def longest(starts: Tensor) -> int:
    return int(starts.diff().max())


def package(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """A module of that name, which counts as installed."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(common, "_found", {})
    monkeypatch.setattr(common, "_broken", {})


def stand_in_for_flash(monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        assert (max_seqlen_q, max_seqlen_k) == (longest(cu_seqlens_q), longest(cu_seqlens_k))
        assert dropout_p == 0.0
        calls.append(deterministic)
        return from_boundaries(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale)

    package(monkeypatch, "flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)


def stand_in_for_torch(monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    """Called as anything, then bound to the signature of the real one."""
    from torch.nn.attention import varlen

    signature = inspect.signature(varlen.varlen_attn)

    def varlen_attn(*args: Any, **kwargs: Any) -> Tensor:
        bound = signature.bind(*args, **kwargs).arguments
        assert set(bound) == {"query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale"}
        assert (bound["max_q"], bound["max_k"]) == (longest(bound["cu_seq_q"]), longest(bound["cu_seq_k"]))
        assert type(bound["max_q"]) is int
        calls.append(None)
        names = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "scale")
        return from_boundaries(*(bound[name] for name in names))

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)


def stand_in_for_xformers(monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    class BlockDiagonalMask:
        def __init__(self, *starts: Tensor) -> None:
            self.starts = starts

        @classmethod
        def from_seqlens(cls, q_seqlen, kv_seqlen=None, *, device=None):
            calls.append("mask")
            return cls(*(layout_of(lengths).cu_seqlens for lengths in (q_seqlen, kv_seqlen or q_seqlen)))

    def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None):
        assert query.shape[0] == key.shape[0] == value.shape[0] == 1
        assert p == 0.0
        calls.append("call")
        return from_boundaries(query[0], key[0], value[0], *attn_bias.starts, scale)[None]

    package(monkeypatch, "xformers")
    package(monkeypatch, "xformers.ops", memory_efficient_attention=memory_efficient_attention)
    package(monkeypatch, "xformers.ops.fmha")
    package(monkeypatch, "xformers.ops.fmha.attn_bias", BlockDiagonalMask=BlockDiagonalMask)


STAND_INS = {"flash": stand_in_for_flash, "torch": stand_in_for_torch, "xformers": stand_in_for_xformers}


@pytest.mark.parametrize("step", [0, 2], ids=["whole", "strided"])
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("backend", STAND_INS)
def test_what_the_package_is_called_with(backend: str, name: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    STAND_INS[backend](monkeypatch, calls)
    plan, scale = plan_of(name), 0.3
    tensors = [strided(t, step) if step else t for t in inputs(plan, torch.bfloat16, bias=False)]
    actual = outputs_and_gradients(lambda *t: ADAPTERS[backend].run(call_of(*t, plan, scale=scale)), tensors)
    for mine, theirs in zip(actual, outputs_and_gradients(exact(plan, scale), tensors), strict=True):
        assert torch.equal(mine, theirs)
    assert calls[-1:] == {"flash": [False], "torch": [None], "xformers": ["call"]}[backend]


def test_flash_is_told_to_be_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    stand_in_for_flash(monkeypatch, calls)
    plan = plan_of("empty")  # which flash-attn takes
    with deterministic():
        out = flash.run(call_of(*inputs(plan, torch.bfloat16, bias=False), plan))
    assert calls == [True]
    assert torch.equal(out[3:7], torch.zeros(4, HEADS, DIM, dtype=torch.bfloat16))


def test_the_mask_of_xformers_is_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    stand_in_for_xformers(monkeypatch, calls)
    plan = plan_of("mixed")
    tensors = inputs(plan, torch.bfloat16, bias=False)
    for _ in range(3):
        xformers.run(call_of(*tensors, plan))
    assert calls == ["mask", *["call"] * 3]


# Reasons


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """All packages, and a GPU for tensors that have no data."""
    for stand_in in STAND_INS.values():
        stand_in(monkeypatch, [])
    monkeypatch.setattr(torch_varlen, "_lack", [])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: types.SimpleNamespace(major=9))
    monkeypatch.setattr(dispatch, "triton_installed", lambda: True)


def reasons(
    backend: str,
    *,
    name: str = "mixed",
    dtype: torch.dtype = torch.bfloat16,
    dim: int = 64,
    bias: bool = False,
    dropout_p: float = 0.0,
    device: str = "cuda",
    v_dtype: torch.dtype | None = None,
) -> str:
    plan = plan_of(name)
    with FakeTensorMode():
        q = torch.empty(plan.queries.num_tokens, HEADS, dim, dtype=dtype, device=device)
        k = torch.empty(plan.keys.num_tokens, HEADS, dim, dtype=dtype, device=device)
        extra = PositionBias(torch.empty(HEADS, 2 * REACH + 1, device=device), POSITIONS) if bias else None
        call = call_of(q, k, k.to(v_dtype or dtype), plan, extra, dropout_p=dropout_p)
        return "; ".join(ADAPTERS[backend].why_not(call))


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ADAPTERS)
def test_nothing_speaks_against_a_plain_call(backend: str, dtype: torch.dtype) -> None:
    assert reasons(backend, dtype=dtype) == ""


KERNELS = ("flash", "torch", "xformers")
REFUSALS: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (tuple(ADAPTERS), {"dropout_p": 0.1}, "its dropout mask would not be a function of the seed"),
    (tuple(ADAPTERS), {"v_dtype": torch.float16}, "q, k and v differ in dtype"),
    (tuple(ADAPTERS), {"dtype": torch.float64}, "dtype float64"),
    (KERNELS, {"dtype": torch.float32}, r"dtype float32 \(it takes bf16 and fp16\)"),
    (KERNELS, {"bias": True}, "it has no bias by distance"),
    (KERNELS, {"dim": 20}, r"head_dim 20 \(a multiple of 8, at most 256\)"),
    (KERNELS, {"dim": 264}, "head_dim 264"),
    (KERNELS, {"device": "cpu"}, "the tensors are on the CPU"),
    (("torch", "xformers"), {"name": "empty"}, "a sequence is empty"),
    (("flex",), {"dim": 8}, r"head_dim 8 \(at least 16\)"),
]


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize(
    ("backend", "arguments", "reason"),
    [(backend, arguments, reason) for backends, arguments, reason in REFUSALS for backend in backends],
)
def test_a_call_it_cannot_serve_has_exactly_that_reason(backend: str, arguments: dict[str, Any], reason: str) -> None:
    found = reasons(backend, **arguments)
    assert ";" not in found
    assert re.match(reason, found), found


@pytest.mark.usefixtures("everything")
def test_flash_takes_empty_sequences_and_flex_a_bias() -> None:
    assert reasons("flash", name="empty") == reasons("flex", name="empty") == reasons("flex", bias=True) == ""


@pytest.mark.usefixtures("everything")
def test_in_deterministic_mode_those_without_one_refuse() -> None:
    with deterministic():
        assert reasons("flash") == reasons("torch") == reasons("flex") == ""
        assert reasons("xformers") == "its backward pass has no deterministic mode"
        assert reasons("flex", bias=True) == "its bias gradient has no deterministic mode"


@pytest.mark.usefixtures("everything")
def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: types.SimpleNamespace(major=7))
    for backend in KERNELS:
        assert reasons(backend) == "the GPU is older than compute capability 8.0"


@pytest.mark.usefixtures("everything")
def test_a_package_that_is_not_installed_or_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "_found", {"flash_attn": False, "xformers": False})
    assert reasons("flash") == "flash-attn is not installed"
    assert reasons("xformers", bias=True) == "xformers is not installed; it has no bias by distance"
    monkeypatch.delitem(sys.modules, "xformers.ops")
    monkeypatch.setattr(common, "_found", {})
    assert reasons("xformers").startswith("xformers is installed but does not import: No module named 'xformers.ops'")


def test_torch_is_asked_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import varlen

    assert torch_varlen._lacking() == []
    monkeypatch.setattr(torch_varlen, "_lack", None)
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k: None)
    assert "takes no scale" in torch_varlen._lacking()[0]
    monkeypatch.setattr(torch_varlen, "_lack", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert "has no torch.nn.attention.varlen" in torch_varlen._lacking()[0]


ON_A_CPU = "native" if native.has("attention", "cpu") else "grouped"


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize(
    ("arguments", "choice"),
    [
        ({}, "flash"),
        ({"bias": True}, "triton"),
        ({"dropout_p": 0.1}, "triton"),
        ({"dtype": torch.float32}, "flex"),
        ({"dtype": torch.float32, "bias": True}, "flex"),
        ({"dtype": torch.float32, "dropout_p": 0.1}, "grouped"),
        ({"device": "cpu"}, ON_A_CPU),
        ({"device": "cpu", "dtype": torch.float32, "bias": True}, ON_A_CPU),
        ({"device": "cpu", "dtype": torch.float64}, "grouped"),
    ],
)
def test_the_order_of_preference(arguments: dict[str, Any], choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Picked(Exception):
        pass

    seen: dict[str, Any] = {}
    pick = dispatch.pick

    def spy(op: str, asked: str | None, device: torch.device, able: Any) -> str:
        seen["able"], seen["name"] = list(able), pick(op, asked, device, able)
        raise Picked

    monkeypatch.setattr(dispatch, "pick", spy)
    given = {"dtype": torch.bfloat16, "device": "cuda", "bias": False, "dropout_p": 0.0, **arguments}
    plan = plan_of("mixed")
    with FakeTensorMode():
        q = torch.empty(plan.queries.num_tokens, HEADS, 64, dtype=given["dtype"], device=given["device"])
        bias = PositionBias(torch.empty(HEADS, 3, device=given["device"])) if given["bias"] else None
        seed = torch.empty((), dtype=torch.int64)
        with pytest.raises(Picked):
            attention(q, q, q, plan, bias, dropout_p=given["dropout_p"], seed=seed)
    assert seen["able"] == ["flash", "torch", "triton", "xformers", "flex", "native", "grouped", "reference"]
    assert seen["name"] == choice


@pytest.mark.parametrize("backend", ADAPTERS)
def test_without_tokens_no_kernel_is_called(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only flash and flex take empty sequences at all."""
    monkeypatch.setattr(ADAPTERS[backend], "why_not", lambda _: [])
    plan = AttentionLayout(layout_of([2, 1]), layout_of([0, 0]))
    nothing = torch.randn(0, HEADS, DIM)
    assert torch.equal(
        attention(torch.randn(3, HEADS, DIM), nothing, nothing, plan, backend=backend), torch.zeros(3, HEADS, DIM)
    )


# On a GPU


def at_dtype(plan: AttentionLayout, scale: float) -> Callable[..., Tensor]:
    """PyTorch, sequence by sequence, every step in the dtype of q: whose error a kernel's may be twice."""

    def run(q: Tensor, k: Tensor, v: Tensor, line: Tensor | None = None) -> Tensor:
        outputs = []
        q_places, k_places = (x.positions.split(x.lengths) for x in (plan.queries, plan.keys))
        k_rows, v_rows = k.split(plan.keys.lengths), v.split(plan.keys.lengths)
        for s, q_s in enumerate(q.split(plan.queries.lengths)):
            scores = torch.einsum("qhd,khd->hqk", q_s * scale, k_rows[s])
            if line is not None:
                distance = (k_places[s][None, :] - q_places[s][:, None]).long()
                scores = scores + line[:, distance.clamp(-REACH, REACH) + REACH].to(q.dtype)
            weights = scores.softmax(-1) if k_rows[s].shape[0] else scores
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v_rows[s]))
        return torch.cat(outputs)

    return run


PACKAGES = {"flash": "flash_attn", "xformers": "xformers.ops"}


@gpu
@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("backend", ["flash", "torch", "xformers", "flex", "flex with a bias"])
def test_kernel(backend: str, name: str, dtype: torch.dtype, step: int) -> None:
    backend, _, bias = backend.partition(" ")
    if backend in PACKAGES:
        pytest.importorskip(PACKAGES[backend])
    if name == "empty" and backend in ("torch", "xformers"):
        pytest.skip("it refuses empty sequences")
    plan, scale = plan_of(name, "cuda"), 64**-0.5
    tensors = inputs(plan, dtype, dim=64, bias=bool(bias))
    if step:
        tensors = [*(strided(t, step) for t in tensors[:3]), *tensors[3:]]

    def call(q: Tensor, k: Tensor, v: Tensor, line: Tensor | None = None) -> Tensor:
        return attention(q, k, v, plan, biased(line), backend=backend)

    actual = outputs_and_gradients(call, tensors)
    at = outputs_and_gradients(at_dtype(plan, scale), tensors)
    whole = outputs_and_gradients(exact(plan, scale), [t.double() for t in tensors])
    for label, *triple in zip(("out", "grad q", "grad k", "grad v", "grad line"), actual, at, whole, strict=False):
        try:
            assert_as_good_as_pytorch(*triple)
        except AssertionError as error:
            raise AssertionError(f"{label}: {error}") from error


@gpu
@pytest.mark.parametrize("backend", ["flash", "torch"])
def test_kernel_gives_the_same_bits_in_deterministic_mode(backend: str) -> None:
    if backend in PACKAGES:
        pytest.importorskip(PACKAGES[backend])
    plan = AttentionLayout(layout_of([500, 300, 512]).to("cuda"))
    tensors = inputs(plan, torch.bfloat16, dim=64, bias=False)
    with deterministic():
        once, again = (
            outputs_and_gradients(lambda *t: attention(*t, plan, backend=backend), tensors) for _ in range(2)
        )
    for a, b in zip(once, again, strict=True):
        assert torch.equal(a, b)
