"""What setup.py builds, and what it says when it cannot. Builds run on copies of the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "maelm_fast", "kernels", "csrc")
SITE = sysconfig.get_paths()["purelib"]
PROBE = """
import maelm_fast, maelm_fast.kernels.common as common
from maelm_fast import native
print(native.ops(), native.host() is not None, native.why_not("cuda"), sep="|")
print(maelm_fast.__file__, common.__file__, sep="|")
"""
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


def copy_of_checkout(to: Path) -> Path:
    """The files a clone has, links kept, without build products."""
    to.mkdir()
    for name in FILES:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so", "build")
            shutil.copytree(source, to / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(source, to / name)
    return to


def run(*command: str | Path, cwd: Path, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CUDA_HOME", "MAELM_BUILD_EXT")}
    result = subprocess.run(
        [str(c) for c in command],
        cwd=cwd,
        env=environment | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=600,
    )
    assert not check or result.returncode == 0, result.stdout
    return result


def build_wheel(tmp_path: Path, **env: str) -> tuple[Path, str]:
    """The wheel, and what was printed."""
    source = copy_of_checkout(tmp_path / "source")
    pip = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    log = run(*pip, tmp_path / "wheels", source, cwd=tmp_path, **env).stdout
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    return wheel, log


def install_and_probe(tmp_path: Path, wheel: Path) -> list[list[str]]:
    """PROBE's output in a new environment that has the wheel, and this one's other packages."""
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    python = venv / "bin" / "python"
    site = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=tmp_path).stdout.strip()
    )
    (site / "borrowed.pth").write_text(SITE + "\n", encoding="utf-8")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    pytest.importorskip("triton")
    out = run(python, "-c", PROBE, cwd=elsewhere).stdout
    fields = [line.split("|") for line in out.strip().splitlines()[-2:]]
    assert all(Path(file).is_relative_to(site) for file in fields[1])
    return fields


@pytest.mark.slow
@needs_compiler
def test_a_wheel_holds_everything_and_works_elsewhere(tmp_path: Path) -> None:
    wheel, _ = build_wheel(tmp_path, MAELM_BUILD_EXT="cpu")
    names = zipfile.ZipFile(wheel).namelist()
    assert "maelm_fast/kernels/common.py" in names
    assert any(n.startswith("maelm_fast/_C.") for n in names)
    assert any(n.startswith("maelm_fast/_host.") for n in names)
    assert "maelm_fast/py.typed" in names
    assert not [n for n in names if n.startswith(("kernels/", "csrc/", "tests/"))]
    assert install_and_probe(tmp_path, wheel)[0][:2] == ["True", "True"]


@pytest.mark.slow
def test_a_wheel_without_extensions_says_what_is_lost(tmp_path: Path) -> None:
    wheel, _ = build_wheel(tmp_path, MAELM_BUILD_EXT="0")
    ops, host, why = install_and_probe(tmp_path, wheel)[0]
    assert (ops, host) == ("False", "False")
    assert re.search(r"was not built; to build it: MAELM_BUILD_EXT=\w+ pip install --force-reinstall --no-deps /", why)


@pytest.mark.slow
@pytest.mark.parametrize("tools", [{}, {"CC": "/nonexistent", "CXX": "/nonexistent"}], ids=["PATH", "CXX"])
def test_auto_without_a_compiler_installs_and_says_so(tmp_path: Path, tools: dict[str, str]) -> None:
    wheel, log = build_wheel(tmp_path, MAELM_BUILD_EXT="auto", PATH="/nonexistent", CUDA_HOME="/nonexistent", **tools)
    assert "maelm_fast._C is left out: there is no C++ compiler" in log
    ops, host, why = install_and_probe(tmp_path, wheel)[0]
    assert (ops, host) == ("False", "False")
    assert "could not be built when this package was installed (there is no C++ compiler" in why


@pytest.mark.slow
def test_the_source_distribution_holds_kernels_and_csrc(tmp_path: Path) -> None:
    source = copy_of_checkout(tmp_path / "source")
    run(sys.executable, "setup.py", "-q", "sdist", cwd=source, MAELM_BUILD_EXT="0")
    (archive,) = (source / "dist").glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path / "unpacked", filter="data")
    (top,) = (tmp_path / "unpacked").iterdir()
    for name in ("csrc/philox.h", "csrc/ops/index.h", "csrc/ops/scatter_to_decoder_cuda.cu", "csrc/host/bindings.cpp"):
        assert (top / name).is_file(), name
    kernel = top / "maelm_fast" / "kernels" / "common.py"
    assert kernel.is_file()


def refused(tmp_path: Path, **env: str) -> str:
    """What setup.py prints before it stops."""
    result = run(sys.executable, ROOT / "setup.py", "--version", cwd=tmp_path, check=False, **env)
    assert result.returncode != 0, result.stdout
    return result.stdout


def test_an_unknown_mode_is_one_line(tmp_path: Path) -> None:
    assert refused(tmp_path, MAELM_BUILD_EXT="gpu") == "MAELM_BUILD_EXT is 'gpu'; it may be auto, 0, cpu or cuda\n"


def test_cuda_without_a_toolkit_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("pybind11")
    message = refused(tmp_path, MAELM_BUILD_EXT="cuda", CUDA_HOME=str(tmp_path))
    assert message.startswith("MAELM_BUILD_EXT=cuda: there is no CUDA toolkit")
    assert message.count("\n") == 1


def test_cuda_with_a_cpu_torch_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("pybind11")
    if torch.version.cuda is not None:
        pytest.skip("this torch was built with CUDA")
    for file in ("bin/nvcc", "include/cuda_runtime.h"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).touch()
    message = refused(tmp_path, MAELM_BUILD_EXT="cuda", CUDA_HOME=str(tmp_path))
    assert re.fullmatch(r"MAELM_BUILD_EXT=cuda: torch \S+ was built without CUDA; install one that has it\n", message)


EXTENSIONS = f"""
import runpy, sys
import setuptools
setuptools.setup = lambda **given: print("builds", *(e.name for e in given["ext_modules"]))
runpy.run_path({str(ROOT / "setup.py")!r}, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("lacking", "left_out", "built"),
    [("torch", "_C", "maelm_fast._host"), ("pybind11", "_host", "maelm_fast._C")],
)
def test_auto_goes_on_without_the_part_that_lacks_something(
    tmp_path: Path, lacking: str, left_out: str, built: str
) -> None:
    pytest.importorskip("pybind11")
    (tmp_path / f"{lacking}.py").write_text(f"raise ImportError('no {lacking} here')\n", encoding="utf-8")
    remedy = f"no {lacking} here; install it, then pip install --no-build-isolation\n"
    message = refused(tmp_path, MAELM_BUILD_EXT="cpu", PYTHONPATH=str(tmp_path))
    assert message == f"MAELM_BUILD_EXT=cpu: {remedy}"
    result = run(sys.executable, "-c", EXTENSIONS, cwd=tmp_path, MAELM_BUILD_EXT="auto", PYTHONPATH=str(tmp_path))
    assert f"warning: maelm_fast.{left_out} is left out: {remedy}" in result.stdout
    assert result.stdout.endswith(f"builds {built}\n")


BACKEND = f"""
import importlib.util, pathlib, site, sys
sys.path[:] = [p for p in sys.path if "site-packages" not in p] + [{str(ROOT / "csrc")!r}, "build-requirements"]
if sys.argv[1:]:
    site.getsitepackages, site.getusersitepackages = list, lambda: "/nonexistent"
import build_backend
needs = build_backend.get_requires_for_build_wheel()
print("needs", *needs, bool(importlib.util.find_spec("torch")))
"""


def test_an_isolated_build_uses_the_torch_that_is_there_and_asks_for_one_only_if_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1"\n', encoding="utf-8")
    (tmp_path / "build-requirements").mkdir()
    for needed in [*Path(SITE).glob("setuptools*"), *Path(SITE).glob("_distutils_hack*")]:
        (tmp_path / "build-requirements" / needed.name).symlink_to(needed)

    def needs(*argv: str, **env: str) -> str:
        result = run(sys.executable, "-c", BACKEND, *argv, cwd=tmp_path, **env)
        return next(line for line in result.stdout.splitlines() if line.startswith("needs"))

    assert needs(CXX="g++") == "needs True"
    assert needs("without torch", CXX="g++") == "needs torch>=2.11 False"
    assert needs("without torch", CXX="g++", MAELM_BUILD_EXT="0") == "needs False"
    assert needs("without torch", CXX="", PATH="/nonexistent") == "needs False"


def test_extensions_are_built_whatever_pyproject_says(tmp_path: Path) -> None:
    """setuptools before 77 refuses the license in it."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nlicense = 3\n', encoding="utf-8")
    command = [sys.executable, ROOT / "setup.py", "--quiet"]
    result = run(*command, "build_ext", "--inplace", cwd=tmp_path, MAELM_BUILD_EXT="0")
    assert result.stdout == ""
    assert run(*command, "bdist", cwd=tmp_path, MAELM_BUILD_EXT="0", check=False).returncode != 0


def test_cuda_sources_compile(tmp_path: Path) -> None:
    """For two architectures that users have, without spilling a register. -O0 is for the host code, which is not looked
    at; what ptxas makes of the kernels is optimised."""
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc")
    includes = Path(torch.__file__).parent / "include"
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in (80, 90)]
    flags = [
        "-O0",
        "-Xptxas=-O3",
        "-std=c++17",
        "-DUSE_CUDA",
        "-DTORCH_TARGET_VERSION=0x020a000000000000",
        "--threads=2",
    ]
    sources = sorted((ROOT / "csrc" / "ops").glob("*.cu"))
    assert sources
    for source in sources:
        command = [nvcc, *flags, *targets, "-Xptxas=-v", f"-I{includes}", "-c", source, "-o", tmp_path / "object.o"]
        log = run(*command, cwd=tmp_path).stdout
        spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
        assert len(spills) >= 2 * len(targets)
        assert set(spills) == {("0", "0")}, log
