"""The device and precision a run really uses, and a record of what it ran on."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from maelm_fast.config import RuntimeConfig
from maelm_fast.errors import UserError

log = logging.getLogger(__name__)


def choose_device(runtime: RuntimeConfig) -> torch.device:
    if runtime.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "runtime.device is cuda but PyTorch sees no GPU; set runtime.device=cpu, or see 'maelm-fast doctor'"
        )
    if runtime.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(runtime.device)


def choose_precision(runtime: RuntimeConfig, device: torch.device) -> str:
    """ "bf16" or "fp32". auto is bf16, except on a device that computes bf16 products slower than fp32 ones: a CPU
    without instructions for them, a GPU older than sm_80."""
    if device.type == "cuda":
        bf16_is_fast, lacking = gpu_has_bf16(device), "this GPU is older than sm_80 and"
    else:
        bf16_is_fast, lacking = cpu_has_bf16(), "this CPU"
    if runtime.precision == "bf16" and not bf16_is_fast:
        log.warning("%s has no bf16 matrix instructions: bf16 is slower here than precision fp32", lacking)
    if runtime.precision != "auto":
        return runtime.precision
    return "bf16" if bf16_is_fast else "fp32"


@contextlib.contextmanager
def deterministic(asked: bool) -> Iterator[None]:
    """Inside, if asked: what PyTorch and our ops compute is the same bit for bit every time, on a GPU too; what cannot
    be made so raises. Products in bf16 are then added up in fp32, also where cuBLAS splits a sum."""
    if not asked:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # a module with a property
    fill, products = memory.fill_uninitialized_memory, torch.backends.cuda.matmul
    reduced = products.allow_bf16_reduced_precision_reduction
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used; PyTorch asks for it
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # every byte that is read has been written
    products.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = fill
        products.allow_bf16_reduced_precision_reduction = reduced


def gpu_has_bf16(device: torch.device) -> bool:
    """Whether it is an A100 or newer; one that is not here, of which a benchmark lists what it would run, is taken to
    be."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware that PyTorch uses (AVX-512 BF16, AMX, or Arm's BF16)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and _cpu_flags_have_bf16()


def _cpu_flags_have_bf16() -> bool:
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        return any(flag in text for flag in ("avx512_bf16", "amx_bf16", " bf16"))
    return False


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Of a GPU, from whatever library, or of a CPU; also one that another error came out of, as that of a recording
    that it broke off."""
    while error is not None:
        said = str(error)
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in said or "allocate memory" in said:
            return True
        error = error.__cause__ or error.__context__
    return False


def environment(device: torch.device, precision: str) -> dict[str, Any]:
    """What a start of a run is recorded with."""
    packages = ("maelm_fast", "torch", "triton", "numpy", "tokenizers", "pyarrow", "transformers")
    return {
        "device": device_name(device),
        "device_type": device.type,
        "precision": precision,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda,
        "packages": {name: version for name in packages if (version := _version(name))},
        "commit": _commit(),
        "host": platform.node(),
        "pid": os.getpid(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The source's git commit, with "+" if it was changed; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed.strip() else "")
