"""What the benchmarks share: distance of results, timing in turns, quartiles, the machine a row was measured on, result
files that are only appended to."""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GATE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}  # relative L2 distance from plain PyTorch
TURN_SECONDS = 0.03  # a turn repeats its call until it takes at least this long
FLUSH_BYTES = 256 << 20  # several times any L2 cache
Call = Callable[[], Any]


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm().div(b.double().norm().clamp(min=1e-30)).item())


def timed(call: Call, device: str) -> float:
    """Seconds per call, over as many calls as make a turn."""
    if device == "cuda":
        return _timed_cuda(call)
    count, seconds = 0, 0.0
    while seconds < TURN_SECONDS:
        began = time.perf_counter()
        call()
        seconds += time.perf_counter() - began
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


def turns(calls: Sequence[Call], device: str, rounds: int) -> list[list[float]]:
    """Seconds of each call in each round, the calls taking turns."""
    for call in calls:
        for _ in range(3):
            call()
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for seconds, call in zip(taken, calls, strict=True):
            seconds.append(timed(call, device))
    return taken


def quartiles(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": round(middle, 4), "q1": round(low, 4), "q3": round(high, 4)}


def environment(device: str) -> dict[str, Any]:
    """What a reader needs to judge the numbers. load: runnable processes over the last minute, ours included."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+changes" if _git("status", "--porcelain") else ""),
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu_model(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
    }


def resident_bytes(field: str) -> int:
    """VmRSS or VmHWM (the peak), from Linux's account of this process. (getrusage's peak would include the parent's
    before exec.)"""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def append_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def _git(*arguments: str) -> str:
    if shutil.which("git") is None:
        return ""
    done = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()
