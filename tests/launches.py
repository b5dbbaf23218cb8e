"""benchmarks.kernel_launches in a process of its own: here kernels may be interpreted, or stood in for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

SCRIPT = """
import json, os, sys
before = {name for name in os.environ if name.startswith("TRITON")}
from benchmarks.kernel_launches import OPS, launches
found = [(l.kernel, l.arch, l.warps, l.calls, json.loads(l.data)) for l in launches(sys.argv[1:] or list(OPS))]
assert {name for name in os.environ if name.startswith("TRITON")} == before
print(json.dumps(found))
"""


class Recorded(NamedTuple):
    kernel: str
    arch: int
    warps: int
    calls: list[str]
    data: dict[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        """The value of each argument that is a constant, and the type of each other."""
        constants = {
            key[0]: value for key, value in zip(self.data["constant_keys"], self.data["constant_vals"], strict=True)
        }
        kinds = self.data["signature"].items()
        return {name: constants[i] if kind == "constexpr" else kind for i, (name, kind) in enumerate(kinds)}


def recorded(*ops: str) -> list[Recorded]:
    """Of these ops, or of all."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "0"  # as it will be: what is fused says so itself
    command, root = [sys.executable, "-c", SCRIPT, *ops], Path(__file__).resolve().parents[1]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [Recorded(*row) for row in json.loads(done.stdout)]
