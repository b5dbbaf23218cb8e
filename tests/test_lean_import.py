"""Importing the package, or its model, is cheap and has no side effect."""

from __future__ import annotations

import subprocess
import sys
import textwrap

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
    "triton",
    "jsonargparse",
    "tokenizers",
    "pyarrow",
)


def run(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False, timeout=HANG
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_the_package_loads_nothing_optional() -> None:
    out = run(f"""
        import sys, torch
        before = set(sys.modules)
        import maelm_fast, maelm_fast.presets, maelm_fast.batch
        from maelm_fast.model.maelm import MaeLm
        new = set(sys.modules) - before
        print([name for name in {HEAVY!r} if name in new])
        print(torch.cuda.is_initialized())
    """)
    assert out.split("\n")[:2] == ["[]", "False"]


def test_importing_the_package_costs_less_than_importing_torch() -> None:
    """In CPU time of one process, so that neither the machine nor its load matters."""
    out = run("""
        import time
        start = time.process_time()
        import torch
        before = time.process_time()
        import maelm_fast, maelm_fast.presets
        from maelm_fast.model.maelm import MaeLm
        print((time.process_time() - before) / (before - start))
    """)
    assert float(out) < 1.0
