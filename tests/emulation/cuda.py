"""A pytest plugin: tests of compiled ops run the CUDA kernels' PTX in place of the CPU's code.

The host code runs as it is, but for its dispatch key, above cuda_runtime.cpp and under the undefined-behaviour
sanitizer, which aborts. It is compiled by nvcc, which this needs.

    python -m pytest -p tests.emulation.cuda tests/ops/test_scatter_to_decoder.py
"""

from __future__ import annotations

import ctypes
import math
import re
import shutil
import subprocess
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maelm_fast import native
from tests.emulation.kernels import RECORD, Tensors
from tests.emulation.machine import Kernel
from tests.emulation.ptx import programs

ROOT = Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
RUNTIMES: list[Runtime] = []  # C++ calls into them: they stay
ON_CPU = {r"\(maelm_fast, CUDA, library\)": "(maelm_fast, CPU, library)", r"is_cuda\(\)": "is_cpu()"}
KINDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes: what the bits mean is no matter
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, *[ctypes.POINTER(ctypes.c_uint)] * 2,
                          ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t)  # fmt: skip
SEEN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, *[ctypes.POINTER(ctypes.c_int64)] * 2)


class Runtime:
    """changed: what a test does to the PTX."""

    def __init__(self, source: Path) -> None:
        folder = Path(tempfile.mkdtemp())
        text = source.read_text(encoding="utf-8")
        for pattern, by in ON_CPU.items():
            text, found = re.subn(pattern, by, text)
            assert found == 1
        (folder / "ops.cu").write_text(text, encoding="utf-8")
        torch_folder = Path(torch.__file__).parent
        subprocess.run([
            str(NVCC), "-std=c++17", "-O1", "-lineinfo", "-arch=sm_80", "--keep", "--keep-dir", folder, "--cudart=none",
            "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-Xcompiler=-fPIC", "-shared",
            "-Xcompiler=-fsanitize=undefined,-fno-sanitize-recover=undefined,-fno-sanitize=vptr",  # torch hides types
            f"-I{torch_folder / 'include'}", f"-I{source.parent}", f"-L{torch_folder / 'lib'}", "-ltorch_cpu",
            "-Xlinker=--wrap=aoti_torch_get_data_ptr", folder / "ops.cu", Path(__file__).with_name("cuda_runtime.cpp"),
            "-o", folder / "ops.so",
        ], check=True)  # fmt: skip
        self.ptx = (folder / "ops.ptx").read_text(encoding="utf-8")
        self.kernels = {name: Kernel(program) for name, program in programs(self.ptx).items()}
        self.tensors: dict[int, Tensor] = {}
        self.callbacks = LAUNCH(self.launch), SEEN(self.seen)  # kept alive
        torch.ops.load_library(str(folder / "ops.so"))  # over the CPU's kernels, which are loaded
        ctypes.CDLL(str(folder / "ops.so")).emulate(*self.callbacks)
        shutil.rmtree(folder)

    def seen(self, data: int | None, element: int, dimensions: int, sizes: Any, strides: Any) -> None:
        if not data:
            self.tensors.clear() if not element else None
            return
        shape, steps = sizes[:dimensions], strides[:dimensions]
        length = 1 + sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) if math.prod(shape) else 0
        if length:
            raw = (ctypes.c_uint8 * (length * element)).from_address(data)
            self.tensors[data] = torch.frombuffer(raw, dtype=KINDS[element]).as_strided(shape, steps)

    def launch(self, name: bytes, grid: Any, block: Any, arguments: Any, shared: int) -> int:
        try:
            kernel = self.kernels[name.decode()]
            sizes = kernel.program.parameters.values()
            given = [ctypes.string_at(arguments[i], size) for i, size in enumerate(sizes)]
            tensors = Tensors(list(self.tensors.values()), kernel.granules["global"])
            spans = [
                (start, start + t.untyped_storage().nbytes(), tensors.address(t)) for start, t in self.tensors.items()
            ]

            def there(word: bytes) -> bytes:
                """Of eight bytes that are an address: where it is in the machine."""
                value = int.from_bytes(word, "little")
                for start, end, at in spans:
                    if start <= value < end:
                        return (value - start + at).to_bytes(8, "little")
                return word

            whole = [
                b"".join(there(a[i : i + 8]) if len(a) - i >= 8 else a[i:] for i in range(0, len(a), 8)) for a in given
            ]
            RECORD.variants[re.sub(r".*\d(\w+_kernel)", r"\1", name.decode()), (), 0] += 1
            kernel.launch(whole, tuple(grid[:3]), tuple(block[:3]), shared, tensors.memory)
            tensors.copy_back()
        except BaseException as error:  # C++ is between here and the test
            RECORD.faults.append(f"{error}")
            traceback.print_exc()
            return 1
        return 0


def pytest_configure() -> None:
    assert native.has("scatter_to_decoder", "cpu"), native.why_not("cpu")
    RUNTIMES.append(Runtime(ROOT / "csrc" / "ops" / "scatter_to_decoder_cuda.cu"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    passed = len(terminalreporter.stats.get("passed", []))
    terminalreporter.write_line(
        f"{passed} tests passed, {len(RECORD.variants)} kernels, {sum(RECORD.variants.values())} launches, "
        f"{len(RECORD.faults)} faults"
    )
