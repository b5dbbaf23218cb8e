"""What the benchmarks share: distance of results, timing in turns, quartiles, the machine a row was measured on, result
files that are only appended to."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import UTC, datetime
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maelm_fast.data.files import written_aside
from maelm_fast.errors import UserError
from maelm_fast.stop import end_with_parent
from maelm_fast.training.hardware import cpu_has_bf16

GATE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}  # relative L2 distance from plain PyTorch
TURN_SECONDS = 0.03  # a turn repeats its call until it takes at least this long
FLUSH_BYTES = 256 << 20  # several times any L2 cache
Call = Callable[[], Any]


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm().div(b.double().norm().clamp(min=1e-30)).item())


def timed(call: Call, device: str, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds per call, over as many calls as make a turn."""
    if device == "cuda":
        return _timed_cuda(call)
    count, seconds = 0, 0.0
    while seconds < TURN_SECONDS:
        began = clock()
        call()
        seconds += clock() - began
        count += 1
    return seconds / count


def _timed_cuda(call: Call, count: int = 5) -> float:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in events:
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in events)) / 1000


def turns(
    calls: Mapping[str, Call], device: str, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of each call in each round, the calls taking turns; and of those that failed, which have no further turn,
    why."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    failed: dict[str, str] = {}
    for round_ in range(-1, rounds):
        for name, call in calls.items():
            if name in failed:
                continue
            try:
                if round_ < 0:
                    for _ in range(3):
                        call()
                else:
                    taken[name].append(timed(call, device, clock))
            except Exception as error:
                failed[name] = reason(error)
                del taken[name]
    return taken, failed


class Failed(Exception):
    """Its text is the reason that a row shall have."""


def reason(error: Exception) -> str:
    """Why something did not run, in a line, for its row; the traceback of what nobody expects goes to stderr."""
    if isinstance(error, Failed):
        return str(error)
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory: {text}"
    if not isinstance(error, ImportError | UserError):
        traceback.print_exception(error)
    return f"{type(error).__name__}: {text}"


def quartiles(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": round(middle, 4), "q1": round(low, 4), "q3": round(high, 4)}


def times_base(taken: Mapping[str, Sequence[float]], name: str, base: str) -> dict[str, float] | None:
    """Quartiles of base's seconds over name's, round by round; None without base."""
    if base not in taken:
        return None
    return quartiles([theirs / mine for theirs, mine in zip(taken[base], taken[name], strict=True)])


def ratios(taken: Mapping[str, Sequence[float]], name: str, inverse: bool = False) -> dict[str, dict[str, float]]:
    """By the others' names, the quartiles of `name`'s rates over theirs, round by round. inverse: what is given are
    seconds, not rates."""
    sign = -1 if inverse else 1
    return {
        other: quartiles([(mine / its) ** sign for mine, its in zip(taken[name], rates, strict=True)])
        for other, rates in taken.items()
        if other != name
    }


def environment(device: str) -> dict[str, Any]:
    """What a reader needs to judge the numbers. load: runnable processes over the last minute, ours included."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+changes" if _git("status", "--porcelain") else ""),
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu_model(),
        "threads": torch.get_num_threads(),
        "load": load(),
        "torch": torch.__version__,
    }


def load() -> float:
    """Runnable processes over the last minute."""
    return round(os.getloadavg()[0], 2)


def transformers_version() -> str | None:
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None


class Joules:
    """A GPU's energy counter, where the driver can be asked for it; the time between two readings is to be seconds."""

    def __init__(self, device: str) -> None:
        self._read: Callable[[], float] | None = None
        if device != "cuda":
            return
        with contextlib.suppress(Exception):  # no pynvml, no driver, no permission: there is no such figure then
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
            pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
            self._read = lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000

    def __call__(self) -> float | None:
        return None if self._read is None else self._read()


def resident_bytes(field: str) -> int:
    """VmRSS or VmHWM (the peak), from Linux's account of this process. (getrusage's peak would include the parent's
    before exec.)"""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call in a fresh process, which ends with this one."""
    with _another_process() as pool:
        return pool.submit(function, *arguments).result()


def _another_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"), end_with_parent)


class Apart:
    """Calls in one other process, started at the first. Whatever a call does to it, to its GPU's state too, ours goes
    on: an error is Failed, with its reason, and after one that leaves the process unusable there is a new one."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self._pool = self._pool or _another_process()
        try:
            result, why, usable = self._pool.submit(_result, function, arguments).result()
        except BrokenProcessPool:
            result, why, usable = None, "its process died", False
        if not usable:
            self.close()
        if why is not None:
            raise Failed(why)
        return result

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = None


def _result(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Any, str | None, bool]:
    """What it returned, or why it failed; and whether this process is still good for another call."""
    try:
        return function(*arguments), None, True
    except Exception as error:
        return None, reason(error), not isinstance(error, torch.AcceleratorError)
    finally:
        release()


def release() -> None:
    """Gives back the GPU memory of what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def append_rows(path: Path, rows: Iterable[dict[str, Any]], alike: Sequence[str] = ()) -> None:
    """Each row is in the file before the next one is made. alike: fields; a row takes the place of an earlier one that
    is alike in them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for row in rows:
        old = path.read_text().splitlines(keepends=True) if alike and path.exists() else []
        kept = [line for line in old if any(json.loads(line).get(name) != row[name] for name in alike)]
        if len(kept) < len(old):
            with written_aside(path) as aside:
                aside.write("".join([*kept, json.dumps(row) + "\n"]).encode())
        else:
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def _cpu_model() -> str:
    """With family, model and instruction set: machines that differ in them share a name such as "AMD EPYC"."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    vectors = torch.backends.cpu.get_cpu_capability() + (" BF16" if cpu_has_bf16() else "")
    if "model name" not in said:
        return f"{platform.processor()} ({vectors})"
    return f"{said['model name']} (family {said.get('cpu family')}, model {said.get('model')}, {vectors})"


def _git(*arguments: str) -> str:
    if shutil.which("git") is None:
        return ""
    done = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()
