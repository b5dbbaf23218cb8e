"""Every specialisation of a Triton kernel that the presets launch, taken from the launches.

The functions of kernels/ are called with tensors that have no data, on a GPU that is not there, and Triton's hook
before a compilation notes what it would compile. So what is compiled ahead of time is what runs.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from maelm_fast.kernels import attention_tiles
from maelm_fast.ops.attention_backends.triton import SUMMED_DIM

ARCHITECTURES = (80, 90)
WIDTHS = (128, 512, 768, 1024)
"""The presets' hidden sizes."""
FFN_WIDTHS = (512, 2048, 3072, 4096)
VOCABULARIES = (1024, 32_768, 64_000)
HEAD_DIMS = (32, 64, 96, 128)
T5_REACH = 91
"""Of the paper's 32 buckets up to distance 128."""
WINDOW_REACH = 65
"""Of attention to 64 positions on either side."""
TYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
TYPES = [
    (dtype, parameters, f"{TYPE_NAMES[dtype]} {TYPE_NAMES[parameters]}")
    for dtype in TYPE_NAMES
    for parameters in dict.fromkeys((torch.float32, dtype))
]
"""Of activations and of parameters, and both names."""
RATES = {"": 0.0, " dropout": 0.1}
ROWS, HEADS, POSITIONS = 300, 12, 512

Calls = Iterator[str]
"""Of an op: makes its calls one after another, each after it has yielded what the call is."""


@dataclass(frozen=True)
class Launch:
    """What one binary is made of. data: as Triton's JITFunction.preload takes it. calls: which need it."""

    op: str
    module: str
    kernel: str
    arch: int
    data: str
    warps: int
    calls: list[str] = field(default_factory=list, compare=False)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def int32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32)


def add_norm(kernels: Any) -> Calls:
    modes = itertools.product(RATES.items(), (False, True))
    for width, (dtype, parameters, names), ((drop, p), twice) in itertools.product(WIDTHS, TYPES, list(modes)):
        yield f"{width} {names}{drop}{' twice' * twice}"
        x, vector, seed = empty(ROWS, width, dtype=dtype), empty(width, dtype=parameters), empty(dtype=torch.int64)
        _, mean, rstd = kernels.add_norm_fwd(x, x, vector, vector, 1e-5, p, seed, 3)
        kernels.add_norm_bwd(x, x if twice else None, x, x, vector, mean, rstd, p, seed, 3)


def embed_packed(kernels: Any) -> Calls:
    modes = itertools.product(RATES.items(), {"": False, " deterministic": True}.items())
    for width, (dtype, parameters, names), mode in itertools.product(WIDTHS, TYPES, list(modes)):
        (drop, p), (how, deterministic) = mode
        yield f"{width} {names}{drop}{how}"
        ids, seed = int32(ROWS), empty(dtype=torch.int64)
        table, vector = empty(1024, width, dtype=parameters), empty(width, dtype=parameters)
        inputs = (ids, ids, table, table, vector)
        out, mean, rstd = kernels.embed_packed_fwd(*inputs, vector, 1e-5, p, seed, 3, dtype)
        kernels.embed_packed_bwd(out, *inputs, mean, rstd, p, seed, 3, deterministic)


def feed_forward(kernels: Any) -> Calls:
    for width, (dtype, parameters, names), kept in itertools.product(FFN_WIDTHS, TYPES, (False, True)):
        yield f"{width} {names}{' kept' * kept}"
        h, bias = empty(ROWS, width, dtype=dtype), empty(width, dtype=parameters)
        a = kernels.bias_gelu(h, bias)
        kernels.bias_gelu_bwd_(h, h, bias, a if kept else None)


def masked_cross_entropy(kernels: Any) -> Calls:
    for width, (dtype, parameters, names), grad in itertools.product(VOCABULARIES, TYPES, (False, True)):
        yield f"{width} {names}{' gradient' * grad}"
        logits, bias = empty(ROWS, width, dtype=dtype), empty(width, dtype=parameters)
        kernels.loss_rows_(logits, bias, int32(ROWS), width - 7, 0.0, grad)


def mask_and_pack(kernels: Any) -> Calls:
    ids, row, counts, special = int32(ROWS), int32(9), int32(8), int32(5)
    for longest, special_tokens in itertools.product((512, 1024, 2048, kernels.LONGEST), (True, False)):
        label = f"longest={longest} special={special_tokens}" + (" rare" if 512 < longest < kernels.LONGEST else "")
        yield label
        kernels.maskable_counts(ids, row, special, longest)
        kernels.removed_counts(ids, row, counts, counts, special, counts, longest, 1, special_tokens)
        for policy, reads in kernels.READ_BY_POLICY.items():
            for read in reads:
                yield f"{label} {policy} {read}"
                sizes = (200, 40, longest, 1, 1024, 1000)
                inputs = (ids, row, row, row, counts, counts, special)
                kernels.mask_and_pack_fwd(*inputs, *sizes, special_tokens, policy, read)


def attention(kernels: Any) -> Calls:
    """Rows of a fused projection of queries, keys and values, and with heads of 64 what may yet replace its tiles. The
    window is ModernBERT's, whose heads have 64; no preset has one. (Where heads have 96 and 128 its kernels spill 8 to
    24 bytes on sm_90: with dropout forward and dkv under Triton 3.9, dkv under 3.6, which does so in dq without.)"""
    yield from attention_calls(kernels, "", HEAD_DIMS, (torch.bfloat16, torch.float16))
    for name in attention_tiles.CANDIDATES:
        with attention_tiles.trying(name):
            yield from attention_calls(kernels, f", {name}", (64,), (torch.bfloat16,))


def attention_calls(kernels: Any, tiles: str, dims: Sequence[int], dtypes: Sequence[torch.dtype]) -> Calls:
    reaches = {"": 0, " bias": T5_REACH, " window rare": WINDOW_REACH}
    for dim, dtype, (kind, reach) in itertools.product(dims, dtypes, reaches.items()):
        for drop, p in RATES.items() if dim <= 64 or "window" not in kind else ():
            yield f"{dim} {TYPE_NAMES[dtype]}{kind}{drop}{tiles}"
            q, k, v = empty(ROWS, 3, HEADS, dim, dtype=dtype).unbind(1)
            line, window = empty(HEADS, 3 * POSITIONS) if reach else None, "window" in kind
            packed = kernels.Packed(int32(3), int32(3), int32(ROWS), int32(ROWS), *(int32(9, 2) for _ in range(3)))
            numbers = (dim**-0.5, p, empty(dtype=torch.int64), 3, window)
            out, lse = kernels.attention_fwd(q, k, v, line, reach, packed, *numbers)
            gradients = empty(ROWS, 3, HEADS, dim, dtype=dtype).unbind(1)
            inputs = (out, None, q, k, v, out, lse, line, reach, kind == " bias", packed)
            kernels.attention_bwd(*inputs, *numbers, gradients=gradients, summed=dim <= SUMMED_DIM and not window)


OPS: dict[str, Callable[[Any], Calls]] = {
    function.__name__: function
    for function in (add_norm, attention, embed_packed, feed_forward, mask_and_pack, masked_cross_entropy)
}


class NoGpu:
    """What Triton asks of a driver until it launches. Its devices' numbers are their architectures."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


def set_arch(arch: int) -> None:
    """Triton compiles for sm_{arch} from here on, whatever GPU there is, in this process."""
    from triton.runtime.driver import driver

    driver.set_active(NoGpu(arch))


def launches(ops: list[str]) -> list[Launch]:
    """Of all calls of these ops for both architectures; equal binaries once."""
    from triton import knobs

    found: dict[tuple[str, str], Launch] = {}
    for op, arch in itertools.product(ops, ARCHITECTURES):
        calls = OPS[op](importlib.import_module(f"maelm_fast.kernels.{op}"))
        asked: list[tuple[Any, dict[str, Any]]] = []

        def note(*, fn: Any, compile: dict[str, Any], to: list[Any] = asked, **_: Any) -> bool:
            to.append((fn.jit_function, compile))
            return True  # do not compile

        set_arch(arch)
        with mock.patch.object(knobs.runtime, "jit_cache_hook", note), _without_a_gpu(arch):
            call = next(calls)
            while call:
                following = next(calls, "")  # makes `call`
                for kernel, made_of in asked:
                    data, warps = made_of["specialization_data"], made_of["num_warps"]
                    new = Launch(op, kernel.__module__, kernel.__name__, arch, data, warps)
                    found.setdefault((new.kernel, data), new).calls.append(call)
                asked.clear()
                call = following
    return list(found.values())


@contextlib.contextmanager
def _without_a_gpu(arch: int) -> Iterator[None]:
    """Tensors are on a GPU of that architecture and without data; a launch only asks for the compilation."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def ask(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        with mock.patch.object(JITFunction, "run", run):
            kernel.warmup(*(x.dtype if isinstance(x, Tensor) else x for x in args), grid=grid, **options)

    gpu = types.SimpleNamespace(multi_processor_count=108)
    with (
        mock.patch.object(JITFunction, "run", ask),
        mock.patch.object(torch.cuda, "device_of", return_value=contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=gpu),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(arch, 10)),
        FakeTensorMode(),
        torch.device("cuda"),
    ):
        yield


def compiled(launch: Launch) -> Any:
    """The binary: Triton's CompiledKernel."""
    set_arch(launch.arch)
    return getattr(importlib.import_module(launch.module), launch.kernel).preload(launch.data)
