"""The host code under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOST = ROOT / "csrc" / "host"
NEEDS_PYTHON = {"bindings.cpp"}
COMPILER = next(
    (found for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++") if name and (found := shutil.which(name))),
    None,
)


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
def test_host_code_runs_clean(tmp_path: Path) -> None:
    assert COMPILER is not None
    sources = [path for path in sorted(HOST.glob("*.cpp")) if path.name not in NEEDS_PYTHON]
    program = tmp_path / "host_driver"
    flags = [
        "-std=c++17",
        "-O1",
        "-g",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        f"-I{HOST}",
    ]
    build = subprocess.run(
        [COMPILER, *flags, *map(str, sources), str(ROOT / "tests" / "native" / "host_driver.cpp"), "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr
    run = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "ok\n"
