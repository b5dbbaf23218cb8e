"""A pytest plugin: tests of the ops run each Triton kernel as an A100 would.

    TRITON_INTERPRET=0 python -m pytest -p tests.emulation.plugin tests/ops/test_add_norm.py -k triton

Says at the end which kernels ran, in how many variants, and the faults.
"""

from __future__ import annotations

import collections
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # read when Triton and the kernels are imported

from tests.emulation.kernels import RECORD, stand_in

stand_in()
os.environ["TRITON_INTERPRET"] = "1"  # read by ops/dispatch.py: kernels take tensors on the CPU


def pytest_terminal_summary(terminalreporter: Any) -> None:
    variants = collections.Counter(kernel for kernel, *_ in RECORD.variants)
    for kernel, number in sorted(variants.items()):
        launches = sum(n for (name, *_), n in RECORD.variants.items() if name == kernel)
        terminalreporter.write_line(f"{kernel}: {number} variants, {launches} launches")
    passed = len(terminalreporter.stats.get("passed", []))
    terminalreporter.write_line(
        f"{passed} tests passed, {len(variants)} kernels, {len(RECORD.variants)} variants, "
        f"{sum(RECORD.variants.values())} launches, {len(RECORD.faults)} faults"
    )
