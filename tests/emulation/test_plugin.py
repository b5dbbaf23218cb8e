"""What of the emulation is quick, in a process of its own: there Triton compiles kernels, here it interprets them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from maelm_fast.ops.dispatch import triton_installed

ROOT = Path(__file__).resolve().parents[2]
SOME = ["strided", "runs_that_cross", "autocast", "every_scale", "long_and_empty", "statistics", "window"]


@pytest.mark.skipif(not triton_installed(), reason="triton is not installed")
def test_kernels_run_as_on_a_gpu() -> None:
    """`make emulate` runs all tests."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.emulation.plugin", "-m", "not slow and not gpu",
               "tests/emulation/test_kernels.py", "tests/ops",
               "-k", f"test_kernels or ((triton or kernel or feed_forward) and ({' or '.join(SOME)}))"]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    tests, kernels, faults = re.search(r"(\d+) tests passed, (\d+) kernels, .* (\d+) faults", done.stdout).groups()
    assert (int(kernels), int(faults)) == (16, 0)
    assert int(tests) >= 40
