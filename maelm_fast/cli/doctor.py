"""maelm-fast doctor: what this machine has, what is missing, and what is lost without it.

It must work where the package cannot: only the standard library is imported until the required packages are known to be
there, and versions are read from the installed packages' metadata.
"""

from __future__ import annotations

import importlib.metadata
import logging
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from maelm_fast import __version__
from maelm_fast.config import require

PYTHON = (3, 11)
TORCH = (2, 11)
REQUIRED = [
    *"torch numpy pandas pyarrow datasets tokenizers transformers safetensors jsonargparse".split(),
    *"pyyaml rich filelock matplotlib".split(),
]
OPTIONAL = {
    "accelerate": "training an exported model with the Hugging Face Trainer",
    "scikit-learn": "'finetune' and 'paper': metrics and baselines",
    "scipy": "'finetune' and 'paper': correlations",
    "triton": "GPU kernels",
}
"""Package: what is lost without it."""


@dataclass(frozen=True)
class Row:
    """One finding. note: something is missing that is not required. fail: a required part is missing or broken."""

    name: str
    found: str
    state: Literal["ok", "note", "fail"] = "ok"


def main(argv: list[str]) -> int:
    if argv:
        require(
            argv[0] in ("-h", "--help", "--help-all"), f"doctor takes no '{argv[0]}', nor anything else: leave it out"
        )
        print(f"usage: maelm-fast doctor\n\n{str(__doc__).partition(': ')[2].partition('.')[0]}.")
        return 0
    logging.getLogger("maelm_fast.ops").setLevel(logging.WARNING)  # what runs is in the table
    sections = {"packages": package_rows()}
    failed = [row for row in sections["packages"] if row.state == "fail"]
    if not failed:
        try:
            sections |= {
                "hardware": hardware_rows(),
                "compiled extension": extension_rows(),
                "backends of the ops": backend_rows(),
                "self-test": self_test_rows(),
            }
        except (ImportError, OSError) as error:  # installed, but broken; OSError: a shared library of torch is missing
            sections["import"] = [Row("import", _reason(error), "fail")]
        failed = [row for rows in sections.values() for row in rows if row.state == "fail"]
    show(sections)
    missing = [row.name for rows in sections.values() for row in rows if row.state == "note"]
    fine = "all required parts are fine" + (
        f"; see above what is lost without: {', '.join(missing)}" if missing else ""
    )
    print(f"not fine: {', '.join(row.name for row in failed)}" if failed else fine)
    return 1 if failed else 0


def package_rows() -> list[Row]:
    """This package, Python, and every package that is used, required ones first."""
    old = sys.version_info < PYTHON
    python = platform.python_version() + (f": {_dotted(PYTHON)} or newer is needed" if old else "")
    rows = [Row("maelm_fast", __version__), Row("Python", python, "fail" if old else "ok")]
    for name in REQUIRED:
        version = _version(name)
        if version is None:
            rows.append(Row(name, f'missing: pip install "{name}"', "fail"))
        elif name == "torch" and _numbers(version) < TORCH:
            remedy = f'pip install "torch>={_dotted(TORCH)}"'
            rows.append(Row(name, f"{version}: {_dotted(TORCH)} or newer is needed: {remedy}", "fail"))
        else:
            rows.append(Row(name, version))
    for name, purpose in OPTIONAL.items():
        missing = f"not installed; without it no {purpose}: pip install {name}"
        version = _version(name)
        rows.append(Row(name, version or missing, "ok" if version else "note"))
    return rows


def hardware_rows() -> list[Row]:
    """What PyTorch was built for, the CPU, and the GPUs; also a GPU that PyTorch cannot use, and why."""
    import torch

    from maelm_fast.training.hardware import cpu_has_bf16, device_name

    build = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda or 'none'}"
    threads = f"{torch.get_num_threads()} threads of {os.cpu_count()} logical CPUs"
    bf16 = "bf16 matrix instructions" if cpu_has_bf16() else "no bf16 matrix instructions (precision auto means fp32)"
    rows = [
        Row("PyTorch build", f"{build}; CPU code for {torch.backends.cpu.get_cpu_capability()}"),
        Row("CPU", f"{device_name(torch.device('cpu'))}, {threads}, {bf16}"),
    ]
    present, driver = nvidia_smi()
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        what = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}"
        rows.append(Row(f"GPU {i}", what + (f", driver {driver}" if driver else "")))
    if not torch.cuda.is_available():
        rows.append(Row("GPU", _why_no_gpu(present, driver), "note"))
    return rows


def nvidia_smi() -> tuple[list[str], str | None]:
    """Names of the NVIDIA GPUs the driver sees, whatever PyTorch does, and the driver's version."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], None
    query = [program, "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return [], None
    cells = [line.split(", ", 1) for line in lines if ", " in line]
    return [name for _, name in cells], cells[0][0] if cells else None


def _why_no_gpu(present: list[str], driver: str | None) -> str:
    import torch

    if not present and torch.version.cuda is None:
        return "none; training runs on the CPU"
    seen = f"{', '.join(present) or 'none'} (driver {driver})" if driver else "none seen by a driver"
    if torch.version.cuda is None:
        return f"{seen}, but this PyTorch is a CPU build: install one with CUDA, see pytorch.org"
    try:
        torch.cuda.init()
    except Exception as error:  # whatever it raises is the answer
        return f"{seen}; PyTorch: {_reason(error)}"
    return f"{seen}; PyTorch may use none of them (is CUDA_VISIBLE_DEVICES empty?)"


def extension_rows() -> list[Row]:
    """The compiled code, or what is lost without it, and the command that builds it."""
    from maelm_fast import native

    host = native.host() is not None
    ops = native.ops()
    lost = {
        "host": "masks are drawn and documents packed in PyTorch and NumPy, several times slower",
        "ops": "the CPU's attention, embedding, LayerNorm, scatter and dropout run in plain PyTorch, slower",
    }
    return [
        Row(name, "loaded" if there else f"{native.reasons[part]}; {lost[part]}", "ok" if there else "note")
        for name, part, there in (("host code", "host", host), ("torch ops", "ops", ops))
    ]


def backend_rows() -> list[Row]:
    """What runs each op on every device, what else could, tried forward and backward, and why the others cannot."""
    import typing

    from maelm_fast import native
    from maelm_fast.config import BackendConfig

    rows = []
    for op, setting in typing.get_type_hints(BackendConfig).items():
        names = [name for name in typing.get_args(setting) if name != "auto"]
        tried = {(name, device): _trial(op, name, device) for device in _devices() for name in names}
        found = []
        for device in _devices():
            runs = [name for name in names if tried[name, device] is None]
            picked = _picked(op, device)
            others = [f"also {name}" for name in runs if name != picked]
            others += [f"not {name}: {tried[name, device]}" for name in names if tried[name, device]]
            found.append(f"{device}: {picked or 'nothing'}" + (f" ({'; '.join(others)})" if others else ""))
        shown = "; ".join(found)
        for reason in native.reasons.values():  # said in full above
            shown = shown.replace(reason, "the extension is missing, see above")
        anything = any(reason is None for reason in tried.values())
        rows.append(Row(op, shown, "ok" if anything else "fail"))
    return rows


def _picked(op: str, device: str) -> str | None:
    """The backend that `auto` takes."""
    from maelm_fast.ops import dispatch

    if op == "mask_and_pack":  # the loader's, whatever the device
        return "host"
    dispatch.picked.pop((op, device.partition(":")[0]), None)
    return None if _trial(op, "auto", device) else dispatch.picked.get((op, device.partition(":")[0]))


def _trial(op: str, backend: str, device: str) -> str | None:
    """None if the backend runs, forward and backward, else why it does not."""
    try:
        _small_call(op, backend, device)
    except Exception as error:  # any failure is a finding
        return _reason(error).removeprefix(f"{op}: ").removeprefix(f"backend '{backend}' cannot run: ")
    return None


def _small_call(op: str, backend: str, device: str) -> None:
    """A call of the op, forward and backward, on a few tokens."""
    import torch

    from maelm_fast import ops
    from maelm_fast.batch import layout_of

    x = torch.randn(8, 64, device=device, requires_grad=True)
    ones, zeros, square = torch.ones(64, device=device), torch.zeros(64, device=device), torch.eye(64, device=device)
    some = torch.arange(5, dtype=torch.int32, device=device)
    source = torch.tensor([0, -1, 3, -1, 1], dtype=torch.int32, device=device)
    norm = ones, zeros
    # The compiled products take bf16, and it is for bf16 that auto chooses them.
    taken = torch.bfloat16 if backend in ("native", "auto") and device == "cpu" else torch.float32
    how: Any = {"eps": 1e-5, "backend": backend}
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "add_norm": lambda: ops.add_norm(x, x, *norm, **how),
        "embed_packed": lambda: ops.embed_packed(some, some, x, x, *norm, **how),
        "scatter_to_decoder": lambda: ops.scatter_to_decoder(x, source, x[1], some, x, *norm, **how),
        "linear": lambda: ops.linear(x.to(taken), square.to(taken), zeros.to(taken), backend=backend),
        "feed_forward": lambda: ops.feed_forward(
            x.to(taken), square.to(taken), zeros.to(taken), square.to(taken), zeros.to(taken), backend=backend
        ),
        "masked_cross_entropy": lambda: ops.masked_cross_entropy(
            x[:5], square, zeros, some, vocab_size=63, backend=backend
        )[0],
        "attention": lambda: ops.attention(q, k, v, ops.AttentionLayout(layout), bias, backend=backend),
    }
    if op == "mask_and_pack":
        _try_mask_and_pack(backend, device)
        return
    layout, plain = layout_of((5, 3)).to(device), backend in ("flash", "torch", "xformers")
    dtype = torch.bfloat16 if plain or device != "cpu" else torch.float32  # what the GPU kernels take
    q, k, v = (torch.randn(8, 2, 32, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    bias = None if plain else ops.PositionBias(torch.randn(2, 15, device=device, requires_grad=True))
    calls[op]().sum().backward()


def _try_mask_and_pack(backend: str, device: str) -> None:
    import numpy as np
    import torch

    from maelm_fast import ops
    from maelm_fast.config import MaskingConfig
    from maelm_fast.data.masking import pack
    from maelm_fast.masking import Masker, Vocabulary

    masker = Masker(MaskingConfig(), Vocabulary(20, 19, (0, 19)), seed=0, encoder_sees_mask=False)
    ids = np.arange(1, 15)
    if backend == "host":
        pack([ids], np.zeros(1, np.int64), np.zeros(1, np.int64), masker)
    else:
        ops.mask_and_pack(torch.from_numpy(ids).int().to(device), [14], [0], [0], masker, backend=backend)


def self_test_rows() -> list[Row]:
    """A forward and backward pass of a tiny MAE-LM on every device: loss and gradients must be finite."""
    import numpy as np
    import torch

    from maelm_fast import presets
    from maelm_fast.data.masking import pack
    from maelm_fast.masking import Masker, Vocabulary
    from maelm_fast.model.maelm import MaeLm

    smaller = {"vocab_size": 320, "num_layers": 2, "hidden_size": 64, "num_heads": 2}
    config = presets.change(presets.tiny(), model=smaller)
    masker = Masker(config.masking, Vocabulary(320, 319, (0, 1, 2, 3, 319)), seed=0, encoder_sees_mask=False)
    sequences = [np.arange(4, 4 + n) for n in (32, 20)]
    batch = pack(sequences, np.arange(2), np.zeros(2, np.int64), masker)

    def row(device: str) -> Row:
        name, start = f"tiny model on {device}", time.perf_counter()
        try:
            model = MaeLm(config.model).to(device)
            loss, _ = model(batch.to(device))
            mean = loss / batch.counts.masked
            mean.backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).sum()
            if not math.isfinite(mean.item() + norm.item()):
                raise ArithmeticError(f"loss {mean.item()}, gradient norms' sum {norm.item()}: not finite")
        except Exception as error:  # any failure is a finding
            return Row(name, f"not on {device}: {_reason(error)}", "fail")
        seconds = time.perf_counter() - start
        return Row(name, f"forward and backward fine: loss {mean.item():.2f} nats, {seconds:.2f} s")

    return [row(device) for device in _devices()]


def show(sections: dict[str, list[Row]]) -> None:
    width = max(len(row.name) for rows in sections.values() for row in rows)
    for title, rows in sections.items():
        print(title)
        for row in rows:
            print(f"  {row.state.replace('note', '-'):<5} {row.name:<{width}}  {row.found}")


def _devices() -> list[str]:
    import torch

    return ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]


def _reason(error: Exception) -> str:
    """The first line of the message, or the exception's name if it has none."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version, which compare as numbers: 2.9 is older than 2.11."""
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
