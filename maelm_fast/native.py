"""The compiled extensions, if they were built: torch ops (csrc/ops) and host code without torch (csrc/host).

Loading is tried once, at first use; what went wrong is kept, for `maelm-fast doctor` and for error messages.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import platform
from types import ModuleType

reasons: dict[str, str] = {}
"""Why "ops" or "host" could not be loaded; filled at first use."""
REMEDY = "reinstall with a C++ compiler: MAELM_BUILD_EXT=cpu pip install --no-build-isolation --editable ."


@functools.cache
def host() -> ModuleType | None:
    """maelm_fast._host: mask drawing, best-fit packing. None if it was not built."""
    return _load("host", "maelm_fast._host")


@functools.cache
def ops() -> bool:
    """Whether the compiled torch ops are registered under torch.ops.maelm_fast."""
    spec = importlib.util.find_spec("maelm_fast._C")
    if spec is None or spec.origin is None:
        reasons["ops"] = f"the extension was not built; {REMEDY}"
        return False
    import torch

    if platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        reasons["ops"] = "this CPU lacks AVX2, which the extension is compiled for"
        return False
    try:
        torch.ops.load_library(spec.origin)
    except OSError as error:
        reasons["ops"] = f"{spec.origin} does not load: {error}"
        return False
    return True


def has(op: str, device: str) -> bool:
    """Whether the extension has a kernel of `op` (say "scatter_to_decoder") for "cpu" or "cuda"."""
    if not ops():
        return False
    import torch

    name = f"maelm_fast::{op}_native_fwd"
    if not hasattr(torch.ops.maelm_fast, f"{op}_native_fwd"):  # the extension was built before the op was written
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, device.upper())


def why_not(device: str) -> str:
    """Why the extension does not serve this device."""
    if not ops():
        return reasons["ops"]
    return f"the extension was built without {device.upper()} code for this op, or before it had any; {REMEDY}"


def _load(part: str, name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        reasons[part] = f"the extension was not built; {REMEDY}"
    except ImportError as error:
        reasons[part] = f"{name} does not load: {error}"
    return None
