"""Under tests.emulation.cuda: the CUDA kernels broken on purpose."""

from __future__ import annotations

import re

import pytest

from tests.emulation.cuda import RUNTIMES
from tests.emulation.kernels import RECORD
from tests.emulation.machine import Kernel
from tests.emulation.ptx import programs
from tests.ops.test_scatter_to_decoder import check, example


@pytest.mark.parametrize(
    ("kernel", "pattern", "by", "notices"),
    [
        ("scatter_fwd_kernelIfE", r"bar\.sync\s+0;", "", "another warp wrote it, with no barrier between"),
        ("scatter_bwd_kernelIfE", r"bar\.sync\s+0;", "", "with no barrier between"),
        ("list_by_arrival_kernel", r"setp\.ge\.s64", "setp.gt.s64", "outside of every tensor"),
        ("count_kernel", r"atom\.global\.add\.u32\s+\S+, (\[\S+\]), \S+;", r"st.global.u32 \1, 1;", "write"),
    ],
)
def test_broken(kernel: str, pattern: str, by: str, notices: str) -> None:
    (runtime,) = RUNTIMES
    (name,) = (name for name in runtime.kernels if kernel in name)
    intact, faults = runtime.kernels[name], len(RECORD.faults)
    start = runtime.ptx.index(f".entry {name}")
    changed, places = re.subn(pattern, by, runtime.ptx[start:])
    assert places
    runtime.kernels[name] = Kernel(programs(runtime.ptx[:start] + changed)[name])
    try:
        with pytest.raises(RuntimeError, match="the kernel has a fault"):
            check(example((33, 70, 5), width=520))
        assert notices in RECORD.faults[-1]
    finally:
        runtime.kernels[name] = intact
        del RECORD.faults[faults:]
