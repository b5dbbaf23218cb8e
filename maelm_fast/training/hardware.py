"""The device and precision a run really uses, and a record of what it ran on."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import subprocess
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
    """ "bf16" or "fp32". auto is bf16, except on a CPU that would compute bf16 products many times slower than fp32."""
    bf16_is_fast = device.type == "cuda" or cpu_has_bf16()
    if runtime.precision == "bf16" and not bf16_is_fast:
        log.warning("this CPU has no bf16 matrix instructions: bf16 is many times slower here than precision fp32")
    if runtime.precision != "auto":
        return runtime.precision
    return "bf16" if bf16_is_fast else "fp32"


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


def is_out_of_memory(error: Exception) -> bool:
    """Of a GPU, from whatever library, or of a CPU."""
    said = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in said or "allocate memory" in said


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
