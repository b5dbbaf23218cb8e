"""Stands in for a @triton.jit kernel: Triton specialises and compiles it for an A100, the machine runs the PTX.

Tensors stay where they are: each launch copies the elements that it was given into the machine's memory, with the
addresses' alignment, and back.
"""

from __future__ import annotations

import collections
import importlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch import Tensor

from benchmarks.kernel_launches import set_arch
from tests.emulation.machine import Counts, Kernel
from tests.emulation.memory import Fault, Memory
from tests.emulation.ptx import programs

MODULES = ("common", "add_norm", "attention", "embed_packed", "feed_forward", "mask_and_pack", "masked_cross_entropy")


@dataclass
class Record:
    """All that ran. variants: (kernel, signature with constants, warps) and how many launches of each. binaries: what
    was compiled for them."""

    variants: collections.Counter[tuple[Any, ...]] = field(default_factory=collections.Counter)
    binaries: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    counts: dict[str, Counts] | None = None  # by kernel, if wanted


RECORD = Record()


class StandIn:
    """changed: what a test does to the PTX before it runs."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.ready: dict[tuple[str, str], Kernel] = {}
        self.changed: Callable[[str], str] = str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self.run(*args, grid=grid, **options)

    def run(self, *args: Any, grid: tuple[int, ...], **options: Any) -> None:
        if "INTERPRETED" in options:
            options["INTERPRETED"] = False
        compiled = self.kernel.run(*args, grid=grid, warmup=True, **options)
        given = dict(zip(self.arg_names, args, strict=False)) | options
        signature = compiled.src.signature
        variant = tuple((n, given[n] if kind == "constexpr" else kind) for n, kind in signature.items())
        RECORD.variants[self.fn.__name__, variant, compiled.metadata.num_warps] += 1
        RECORD.binaries.add(f"{self.fn.__name__} {compiled.hash}")
        values = [given[name] for name, kind in signature.items() if kind != "constexpr"]
        kinds = [kind for kind in signature.values() if kind != "constexpr"]
        text = self.changed(compiled.asm["ptx"])
        if "tf32" in text:
            pytest.skip("a product of fp32: on a GPU attention's kernel takes none")
        if (compiled.hash, text) not in self.ready:
            (program,) = programs(text).values()
            self.ready[compiled.hash, text] = Kernel(program)
        kernel = self.ready[compiled.hash, text]
        counts = None if RECORD.counts is None else RECORD.counts.setdefault(self.fn.__name__, Counts())
        tensors = Tensors([value for value in values if isinstance(value, Tensor)], kernel.granules["global"])
        arguments = [
            struct.pack("<q", tensors.address(v)) if isinstance(v, Tensor) else struct.pack(FORMATS[kind], v)
            for v, kind in zip(values, kinds, strict=True)
        ]
        arguments += [bytes(8)] * (len(kernel.program.parameters) - len(arguments))  # Triton's own scratch memory
        whole = (*grid, 1, 1)[:3]
        try:
            kernel.launch(arguments, whole, (32 * compiled.metadata.num_warps, 1, 1), compiled.metadata.shared,
                          tensors.memory, counts)  # fmt: skip
        except Fault as fault:
            RECORD.faults.append(str(fault))
            raise
        tensors.copy_back()


FORMATS = {"i1": "<b", "i32": "<i", "u32": "<I", "i64": "<q", "fp32": "<f"}


class Tensors:
    """Some tensors in the machine's memory."""

    def __init__(self, tensors: list[Tensor], granule: int) -> None:
        granule = min([granule, *(t.element_size() for t in tensors)])
        self.offsets: dict[int, int] = {}
        top = 4096
        for storage in {s.data_ptr(): s for s in (t.untyped_storage() for t in tensors)}.values():
            top = (top + 4096) // 4096 * 4096 + storage.data_ptr() % 256  # the alignment that Triton saw
            self.offsets[storage.data_ptr()] = top - storage.data_ptr()
            top += storage.nbytes()
        self.memory = Memory(top + 4096, granule)
        self.tensors = tensors
        for tensor in tensors:
            if tensor.numel():
                each = tensor.element_size() // granule
                self.memory.open(self.address(tensor), (*tensor.shape, each), (*(s * each for s in tensor.stride()), 1))
                self._here(tensor, self.memory.bytes)[...] = _bytes(tensor)
        self.before = self.memory.bytes.copy()

    def address(self, tensor: Tensor) -> int:
        return tensor.data_ptr() + self.offsets[tensor.untyped_storage().data_ptr()]

    def copy_back(self) -> None:
        """What the kernel changed."""
        for tensor in self.tensors:
            if tensor.numel():
                now, before = (self._here(tensor, where) for where in (self.memory.bytes, self.before))
                np.copyto(_bytes(tensor), now, where=now != before)

    def _here(self, tensor: Tensor, where: Any) -> Any:
        strides = (*(s * tensor.element_size() for s in tensor.stride()), 1)
        inside = where[self.address(tensor) :]
        return np.lib.stride_tricks.as_strided(inside, (*tensor.shape, tensor.element_size()), strides)


def _bytes(tensor: Tensor) -> Any:
    """(..., bytes an element), the tensor's own memory."""
    raw = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    strides = (*(s * tensor.element_size() for s in tensor.stride()), 1)
    start = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
    return np.lib.stride_tricks.as_strided(raw[start:], (*tensor.shape, tensor.element_size()), strides)


def stand_in() -> None:
    """Every kernel of the project, for this process. Triton must have been imported without its interpreter."""
    set_arch(80)
    for name in MODULES:
        module = importlib.import_module(f"maelm_fast.kernels.{name}")
        for key, value in list(vars(module).items()):
            if isinstance(value, triton.JITFunction) and key.endswith("_kernel"):
                setattr(module, key, StandIn(value))
    tiles = importlib.import_module("maelm_fast.kernels.attention_tiles")
    tiles.tiles_for = lambda device, head_dim: tiles.TILES[80, tiles.padded(head_dim)]
