"""What is compiled ahead of time is what is launched; one binary for every dropout seed; importing changes nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from maelm_fast.ops.dispatch import triton_installed
from tests.launches import Recorded, recorded

pytestmark = pytest.mark.skipif(not triton_installed(), reason="triton is not installed")
KERNELS = Path(__file__).resolve().parents[1] / "kernels"


@pytest.fixture(scope="module")
def found() -> list[Recorded]:
    return recorded()


def test_every_kernel_is_launched_for_both_architectures(found: list[Recorded]) -> None:
    defined = {
        node.name
        for path in KERNELS.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }
    assert {(launch.kernel, launch.arch) for launch in found} == {(name, arch) for name in defined for arch in (80, 90)}


def test_every_launch_fuses_multiply_and_add_by_itself(found: list[Recorded]) -> None:
    """Not by a variable of the environment, which would change other kernels of the process too."""
    assert all(launch.data["options"]["enable_fp_fusion"] for launch in found)


def test_no_binary_depends_on_the_alignment_of_the_seed(found: list[Recorded]) -> None:
    """seeds[i] of a micro-batch lies 8 bytes after the one before it."""
    seeded = [launch for launch in found if launch.arguments.get("seed") == "*i64"]
    assert len(seeded) > 50
    for launch in seeded:
        names, places = list(launch.arguments), zip(launch.data["attrs_keys"], launch.data["attrs_vals"], strict=True)
        aligned = {names[place[0]] for place, kinds in places if kinds}
        assert "seed" not in aligned, (launch.kernel, launch.calls)
        assert aligned & {"x", "q", "token_table"}, (launch.kernel, launch.calls)
