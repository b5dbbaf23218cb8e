"""Builds maelm_fast._host (csrc/host: C++, no torch) and maelm_fast._C (csrc/ops: torch's stable ABI, C++ and CUDA).

MAELM_BUILD_EXT is the only switch. auto: what can be built here (CUDA if there is a toolkit and torch is built for it);
a part that fails is left out with a warning, and the other one is built. cpu, cuda: both, or an error. 0: nothing.

pip shows no warning of a build that ends well. So what was left out, and why, is also written into the package
(left_out.json), from where the first import and `maelm-fast doctor` tell it.
"""

import json
import os
import shutil
import sys
from glob import glob
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext

MODE = os.environ.get("MAELM_BUILD_EXT", "auto")
FLAGS = ["-O3", "-std=c++17", "-DTORCH_TARGET_VERSION=0x020a000000000000"]  # the stable ABI of torch 2.10
EVERY = {"language": "c++", "depends": glob("csrc/**/*.h", recursive=True)}
left_out = {}  # part -> why
MODE in ("auto", "0", "cpu", "cuda") or sys.exit(f"MAELM_BUILD_EXT is '{MODE}'; it may be auto, 0, cpu or cuda")


def toolkit():  # an nvcc on PATH may be a wrapper outside its toolkit
    nvcc, needed = Path(shutil.which("nvcc") or "/").resolve(), ("bin/nvcc", "include/cuda_runtime.h")
    roots = [os.environ["CUDA_HOME"]] if "CUDA_HOME" in os.environ else [nvcc.parent.parent, "/usr/local/cuda"]
    return next((str(r) for r in roots if all(Path(r, n).exists() for n in needed)), None)


def leave_out(part, reason):
    left_out[part] = " ".join(str(reason).split())
    print(f"warning: maelm_fast.{part} is left out: {left_out[part]}", file=sys.stderr)


class Build(build_ext):
    """Each part by itself, and a record of those that could not be built."""

    def run(self):
        super().run()
        package = self.get_finalized_command("build_py").get_package_dir("maelm_fast")
        record = Path(package if self.inplace else Path(self.build_lib, "maelm_fast"), "left_out.json")
        record.unlink(missing_ok=True)
        if left_out and MODE != "0":
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_text(json.dumps(left_out, indent=1) + "\n", encoding="utf-8")

    def build_extensions(self):
        built = []
        for extension in list(self.extensions):
            name, self.extensions = extension.name.rpartition(".")[2], [extension]
            try:
                compiler = self.compiler.compiler_cxx[0]
                if shutil.which(compiler) is None:
                    raise RuntimeError(f"there is no C++ compiler ({compiler})")
                self.build_one(name)
                built.append(extension)
            except Exception as error:  # a compiler that fails; torch's CUDA and the toolkit's may not match
                if MODE != "auto":
                    raise
                leave_out(name, error)
        self.extensions = built

    def build_one(self, _name):
        build_ext.build_extensions(self)


def host():  # _host and the command that builds it, or ImportError
    import pybind11

    flags = {"include_dirs": [pybind11.get_include()], "extra_compile_args": [*FLAGS, "-fvisibility=hidden"]}
    return Extension("maelm_fast._host", sorted(glob("csrc/host/*.cpp")), **flags, **EVERY), Build


def ops():  # _C and the command that builds it, or RuntimeError with the reason it cannot be built
    import torch

    root = None if MODE == "cpu" else toolkit()
    if MODE == "cuda" and root is None:
        raise RuntimeError("there is no CUDA toolkit; set CUDA_HOME to the folder that holds bin and include")
    if MODE == "cuda" and torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} was built without CUDA; install one that has it")
    if cuda := root is not None and torch.version.cuda is not None:
        os.environ["CUDA_HOME"] = root  # read when cpp_extension is imported
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;8.6;8.9;9.0+PTX")
    from torch.utils import cpp_extension

    class TorchBuild(Build, cpp_extension.BuildExtension.with_options(use_ninja=False)):
        def build_one(self, name):
            (cpp_extension.BuildExtension if name == "_C" else build_ext).build_extensions(self)

    # Strict C++ turns fused multiply-add off; native.py refuses to load _C on an x86-64 CPU without AVX2.
    wide = ["-ffp-contract=fast", *(["-march=x86-64-v3"] if os.uname().machine == "x86_64" else [])]
    flags = {"cxx": [*FLAGS, *wide], "nvcc": [*FLAGS, "-DUSE_CUDA"]}
    sources = sorted(glob("csrc/ops/*.cpp") + (glob("csrc/ops/*.cu") if cuda else []))
    make = cpp_extension.CUDAExtension if cuda else cpp_extension.CppExtension
    return make("maelm_fast._C", sources, extra_compile_args=flags, py_limited_api=True, **EVERY), TorchBuild


extensions, command = [], Build
for name, part in {"_host": host, "_C": ops}.items() if MODE != "0" else ():
    try:
        extension, command = part()
        extensions.append(extension)
    except (ImportError, RuntimeError) as error:
        remedy = "; install it, then pip install --no-build-isolation" if isinstance(error, ImportError) else ""
        MODE == "auto" or sys.exit(f"MAELM_BUILD_EXT={MODE}: {error}{remedy}")
        leave_out(name, f"{error}{remedy}")
if "build_ext" in sys.argv:  # it needs nothing of pyproject.toml, whose license an old setuptools refuses
    Distribution.parse_config_files = lambda *_, **__: None
Distribution.has_ext_modules = lambda _: MODE != "0"  # the record is written also where no part can be built
setup(ext_modules=extensions, cmdclass={"build_ext": command})
