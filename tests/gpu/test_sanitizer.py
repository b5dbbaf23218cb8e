"""compute-sanitizer over every op's own kernel, forward and backward: addresses, shared memory's races, barriers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from benchmarks.registry import ENTRIES
from tests.devices import DEVICES, ON_GPU

SANITIZER = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
OPS = """
import sys
import torch
from benchmarks import ops
from benchmarks.registry import ENTRIES, Setting

device = sys.argv[1]
setting = Setting(device, torch.bfloat16, sequences=2, length=150, ffn=256, vocab=1000)
for name, entry in ENTRIES.items():
    if device == "cuda" or name != "mask_and_pack":  # which is the host's on a CPU
        print(name, ops.backend_of(entry, entry.inputs(setting)), ops.gate(entry, setting), flush=True)
"""
ALIVE = "import torch; torch.zeros(1, device='cuda')"
FOUND = 99


def run(code: str, device: str, *before: str) -> subprocess.CompletedProcess[str]:
    # Each tensor is then a piece of memory of its own, whose ends the sanitizer knows.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.curdir}
    command = [*before, sys.executable, "-c", code, device]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_run_is_every_op(device: str) -> None:
    done = run(OPS, device)
    assert done.returncode == 0, done.stderr
    backends = dict(line.split()[:2] for line in done.stdout.splitlines())
    assert set(backends) == set(ENTRIES) - ({"mask_and_pack"} if device == "cpu" else set())
    if device == "cuda":
        assert set(backends.values()) <= {"triton", "native"}, backends


@pytest.mark.parametrize("tool", [pytest.param(tool, marks=ON_GPU) for tool in ("memcheck", "racecheck", "synccheck")])
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    if SANITIZER is None:
        pytest.skip("compute-sanitizer is not installed")
    watched = (SANITIZER, "--tool", tool, "--error-exitcode", str(FOUND))
    if (alive := run(ALIVE, "cuda", *watched)).returncode != 0:
        pytest.skip(f"compute-sanitizer does not run here: {alive.stdout.strip().splitlines()[-1:]}")
    done = run(OPS, "cuda", *watched)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "RACECHECK SUMMARY: 0 hazards" in done.stdout
