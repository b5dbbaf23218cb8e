"""The emulation in processes of its own: there Triton compiles kernels, which elsewhere in the tests it interprets, and
CUDA kernels serve tensors on the CPU. `make emulate` runs all of the first, here runs what is quick."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from maelm_fast import native
from maelm_fast.ops.dispatch import triton_installed

ROOT = Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
SOME = ("strided", "runs_that_cross", "every_scale", "long_and_empty")


def emulated(plugin: str, *arguments: str) -> tuple[int, int, int]:
    """(tests passed, kernels run, faults)."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        f"tests.emulation.{plugin}",
        "-m",
        "not slow and not gpu",
        *arguments,
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    said = re.search(r"(\d+) tests passed, (\d+) kernels, .* (\d+) faults", done.stdout)
    assert said, done.stdout
    passed, kernels, faults = map(int, said.groups())
    return passed, kernels, faults


@pytest.mark.skipif("tests.emulation.plugin" in sys.modules, reason="this process has the plugin")
@pytest.mark.skipif(not triton_installed(), reason="triton is not installed")
def test_triton_kernels() -> None:
    some = f"test_kernels or ((triton or kernel or feed_forward) and ({' or '.join(SOME)}))"
    passed, kernels, faults = emulated("plugin", "tests/emulation/test_kernels.py", "tests/ops", "-k", some)
    assert (kernels, faults) == (16, 0)
    assert passed >= 40


@pytest.mark.skipif(not native.has("scatter_to_decoder", "cpu"), reason=native.why_not("cpu"))
@pytest.mark.skipif(NVCC is None, reason="there is no nvcc, which makes the PTX")
def test_cuda_kernels() -> None:
    """The whole test file of the op, but for what is the CPU's: indices that are checked, and its threads."""
    tests = ("tests/ops/test_scatter_to_decoder.py", "tests/emulation/test_cuda_kernels.py")
    rest = "not out_of_range and not named_twice and not number_of_threads"
    passed, kernels, faults = emulated("cuda", *tests, "-k", rest)
    assert (kernels, faults) == (14, 0)
    assert passed >= 60
