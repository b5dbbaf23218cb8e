"""Importing the package, or its model, is cheap and has no side effect."""

from __future__ import annotations

import subprocess
import sys

from tests.waiting import HANG

HEAVY = (
    "transformers",
    "accelerate",
    "sklearn",
    "scipy",
    "matplotlib",
    "flash_attn",
    "xformers",  # the extras
    "datasets",
    "pandas",
    "triton",
    "jsonargparse",
    "tokenizers",
    "pyarrow",
)


PROGRAM = """
import sys, time
start = time.process_time()
import torch
before, begun = set(sys.modules), time.process_time()
import maelm_fast, maelm_fast.presets, maelm_fast.batch, maelm_fast.reporting
from maelm_fast.model.maelm import MaeLm
share = (time.process_time() - begun) / (begun - start)
print([name for name in {heavy!r} if name in set(sys.modules) - before])
print(torch.cuda.is_initialized())
print(share)
"""


def test_importing_the_package_loads_nothing_optional_and_costs_less_than_torch() -> None:
    """In CPU time of one process, so that neither the machine nor its load matters."""
    program = PROGRAM.format(heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=HANG)
    assert done.returncode == 0, done.stderr
    loaded, initialised, share = done.stdout.splitlines()
    assert (loaded, initialised) == ("[]", "False")
    assert float(share) < 1.0
