"""What is compiled ahead of time is what is launched; one binary for every dropout seed; importing changes nothing."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from maelm_fast.ops.dispatch import triton_installed

pytestmark = pytest.mark.skipif(not triton_installed(), reason="triton is not installed")
KERNELS = Path(__file__).resolve().parents[1] / "kernels"
RECORD = """
import json, os
before = {name for name in os.environ if name.startswith("TRITON")}
from benchmarks.kernel_launches import OPS, launches
found = [(launch.kernel, launch.arch, json.loads(launch.data), launch.calls) for launch in launches(list(OPS))]
assert {name for name in os.environ if name.startswith("TRITON")} == before
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> list[tuple[str, int, dict, list[str]]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "0"  # as it will be: what is fused says so itself
    done = subprocess.run([sys.executable, "-c", RECORD], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_kernel_is_launched_for_both_architectures(found) -> None:
    defined = {
        node.name
        for path in KERNELS.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }
    assert {(kernel, arch) for kernel, arch, *_ in found} == {(name, arch) for name in defined for arch in (80, 90)}


def test_every_launch_fuses_multiply_and_add_by_itself(found) -> None:
    """Not by a variable of the environment, which would change other kernels of the process too."""
    assert all(data["options"]["enable_fp_fusion"] for _, _, data, _ in found)


def test_no_binary_depends_on_the_alignment_of_the_seed(found) -> None:
    """seeds[i] of a micro-batch lies 8 bytes after the one before it."""
    seeded = 0
    for kernel, _, data, calls in found:
        names = list(data["signature"])
        if "seed" in names and data["signature"]["seed"] == "*i64":
            seeded += 1
            places = zip(data["attrs_keys"], data["attrs_vals"], strict=True)
            aligned = {names[place[0]] for place, kinds in places if kinds}
            assert "seed" not in aligned, (kernel, calls)
            assert aligned & {"x", "q", "token_table"}, (kernel, calls)
    assert seeded > 50
