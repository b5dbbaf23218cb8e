"""Importing the package, or its model, is cheap and has no side effect; its names are there when asked for."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

import maelm_fast
from tests.waiting import HANG

HEAVY = (
    "transformers",
    "accelerate",
    "sklearn",
    "scipy",
    "matplotlib",
    "lightning",
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


FRONT = """
import sys
import maelm_fast
print(sorted({"torch", "numpy"} & set(sys.modules)), sorted(set(maelm_fast.__all__) - set(dir(maelm_fast))))
sys.modules["pyarrow"] = None  # as if it were not installed
try:
    from maelm_fast import TokenStore
except ImportError as error:
    print(error)
"""


def test_the_front_door_imports_nothing_and_says_what_is_missing() -> None:
    done = subprocess.run([sys.executable, "-c", FRONT], capture_output=True, text=True, check=False, timeout=HANG)
    assert done.stdout == "[] []\nmaelm_fast.TokenStore needs pyarrow: pip install pyarrow\n", done.stderr


def test_type_checkers_see_the_names_that_there_are() -> None:
    with open(maelm_fast.__file__, encoding="utf-8") as file:
        block = next(node for node in ast.parse(file.read()).body if isinstance(node, ast.If)).body
    seen = {
        alias.asname or alias.name: (imported.module, alias.name)
        for imported in block
        if isinstance(imported, ast.ImportFrom)
        for alias in imported.names
    }
    assert sorted(seen) == sorted(maelm_fast.__all__)
    for name, (module, attribute) in seen.items():
        assert getattr(maelm_fast, name) is getattr(sys.modules[str(module)], attribute), name
    with pytest.raises(AttributeError, match="module 'maelm_fast' has no attribute 'pretain'"):
        _ = maelm_fast.pretain
