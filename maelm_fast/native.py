"""The compiled extensions, if they were built: torch ops (csrc/ops) and host code without torch (csrc/host).

Loading is tried once, at first use; what went wrong is kept, for `maelm-fast doctor` and for error messages. pip hides
what a build left out, so it is said here, once.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import logging
import platform
from importlib import metadata
from pathlib import Path
from types import ModuleType

log = logging.getLogger(__name__)

reasons: dict[str, str] = {}
"""Why "ops" or "host" could not be loaded; filled at first use."""
_PACKAGE = Path(__file__).parent


@functools.cache
def host() -> ModuleType | None:
    """maelm_fast._host: mask drawing, best-fit packing. None if it was not built."""
    return _load("host", "maelm_fast._host")


@functools.cache
def ops() -> bool:
    """Whether the compiled torch ops are registered under torch.ops.maelm_fast."""
    spec = importlib.util.find_spec("maelm_fast._C")
    if spec is None or spec.origin is None:
        reasons["ops"] = _not_built("_C", "most ops run in plain PyTorch")
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
    return f"the extension was built without {device.upper()} code for this op, or before it had any; {mend(device)}"


def mend(device: str = "cpu") -> str:
    """The command that builds both extensions from where this package came from, or ends with why it cannot."""
    switch = f"MAELM_BUILD_EXT={device}"
    if (_PACKAGE.parent / "setup.py").is_file():
        return f"to build it: cd {_PACKAGE.parent} && {switch} python setup.py build_ext --inplace"
    try:
        came_from = json.loads(metadata.distribution("maelm_fast").read_text("direct_url.json") or "{}").get("url")
    except metadata.PackageNotFoundError:
        came_from = None
    source = came_from or "maelm_fast's sources"
    return f"to build it: {switch} pip install --force-reinstall --no-deps {source.removeprefix('file://')}"


def _not_built(part: str, lost: str) -> str:
    """Why a part is missing, as setup.py recorded it; warns if it is missing unasked."""
    try:
        why = json.loads((_PACKAGE / "left_out.json").read_text(encoding="utf-8"))[part]
    except (OSError, ValueError, KeyError):
        return f"the extension was not built; {mend()}"
    reason = f"the extension could not be built when this package was installed ({why}); {mend()}"
    log.warning("%s, several times slower: %s", lost, reason)
    return reason


def _load(part: str, name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        reasons[part] = _not_built("_host", "masks are drawn and documents packed in PyTorch and NumPy")
    except ImportError as error:
        reasons[part] = f"{name} does not load: {error}"
    return None
