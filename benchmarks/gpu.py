"""What a session with a GPU runs, in the order in which it matters: `make gpu`, or one of its targets.

    python -m benchmarks.gpu gate headline --results DIR
    python -m benchmarks.gpu --list

A target is steps, each a process with a limit on its time; the limits of a target sum to less than eight minutes. A
step that fails or is stopped keeps no other from running, and makes the exit status 1. Benchmarks write each row when
it is known: what a stopped one leaves is good. Peers' kernels are tested last: they may be wrong. No target asks
whether `gate` passed: a benchmark gates what it times in its own run.

Without the compiled extension everything but its own op runs; that it was not built is a failure of its own. All
minutes are estimates, made without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from maelm_fast import native

LISTED = ("benchmarks.train_step", "benchmarks.attention", "benchmarks.ops")  # what has --list
GRACE = 5.0  # seconds from the interrupt to the end


@dataclass(frozen=True)
class Step:
    """A Python module with its arguments. estimate, limit: minutes. out: the file for its rows, if it makes any."""

    name: str
    command: Sequence[str]
    estimate: float
    limit: float
    out: str = ""

    def words(self, results: Path) -> list[str]:
        return [sys.executable, "-m", *self.command, *(["--out", str(results / self.out)] if self.out else [])]


def targets() -> dict[str, list[Step]]:
    # Most of the tests' time is the compilation of kernels: side by side where pytest-xdist is there.
    workers = ("-n", "8", "--dist", "worksteal") if importlib.util.find_spec("xdist") else ()
    tests, peers = ("pytest", "-rs", *workers, "-m", "not slow"), "tests/ops/test_attention_backends.py"
    on_gpu = ("pytest", "-rs", "-m", "gpu")
    bias, neither = ("--dropouts", "0.1", "--biases", "on"), ("--dropouts", "0", "--biases", "off")
    presets = ("base,base_cross,roberta_base", "hf,padded,hf_compiled,hf_flash")
    return {
        "gate": [
            Step("build", ["benchmarks.gpu", "build"], 0.7, 1.5),
            Step("kernels", [*tests, "tests/ops", "--ignore", peers], *((1.0, 2.0) if workers else (2.5, 4.0))),
            Step("updates", [*on_gpu, "tests/gpu/test_updates.py", "tests/training/test_step.py"], 0.7, 1.5),
        ],
        "headline": [train_step("bias", *presets, bias, 3.5, 4.5), train_step("neither", *presets, neither, 2.5, 3.0)],
        "attention": [attention_of_kept(3.5, 5.8), Step("peers", [*tests, peers], 0.5, 0.7)],
        "rest": [
            # in settings of their own: of a setting the newest run counts
            train_step("update", "base,base_accumulated,base_graph", "", (*bias[:3], "off"), 1.0, 1.2),
            # where launches take longest: if the graph wins here, runtime.cuda_graph should be on where it applies
            train_step("graph", "small,small_graph", "", ("--dropouts", "0", "--biases", "on"), 0.3, 0.5, seq=128),
            train_step("eager", "base", "hf,hf_eager,padded", bias, 0.7, 0.9, batch=64),
            Step(
                "ops", "benchmarks.ops --device cuda --dtype bf16 --sequences 256".split(), 1.5, 1.8, "ops_cuda.jsonl"
            ),
            Step(
                "ceilings",
                "benchmarks.ceilings --device cuda --batch 256 --rounds 3".split(),
                0.4,
                0.6,
                "ceilings_cuda.jsonl",
            ),
            Step(
                "runs",
                [
                    *on_gpu,
                    "tests/gpu/test_runs.py",
                    "tests/gpu/test_streams.py",
                    *(f"tests/training/test_{name}.py" for name in ("run", "memory")),
                ],
                0.9,
                1.3,
            ),
            Step("sanitizer", [*on_gpu, "tests/gpu/test_sanitizer.py"], 0.9, 1.2),
        ],
    }


def train_step(
    name: str,
    models: str,
    peers: str,
    case: Sequence[str],
    estimate: float,
    limit: float,
    batch: int = 256,
    seq: int = 512,
) -> Step:
    command = ["benchmarks.train_step", "--device", "cuda", "--models", models, "--peers", peers, *case]
    command += ["--precision", "bf16", "--batch", str(batch), "--seq", str(seq), "--rounds", "3"]
    return Step(name, command, estimate, limit, "train_step_cuda.jsonl")


def attention_of_kept(estimate: float, limit: float) -> Step:
    command = ["benchmarks.attention", "--device", "cuda", "--cases", "kept"]
    return Step("kept", command, estimate, limit, "attention_cuda.jsonl")


def build() -> int:
    """Builds the extension in place, and says what came of it."""
    major, minor = torch.cuda.get_device_capability()
    environment = {"TORCH_CUDA_ARCH_LIST": f"{major}.{minor}", "MAELM_BUILD_EXT": "auto"} | os.environ
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], env=environment, check=False
    )
    problems = built(done.returncode)
    print("\n".join(problems) if problems else "the extension is built")
    return 1 if problems else 0


def built(status: int) -> list[str]:
    """What is missing of the extension, after setup.py has ended with this status."""
    problems = [f"the extension: setup.py ended with {status}"] if status else []
    if native.host() is None:
        problems.append(f"the host code: {native.reasons['host']}")
    compiler = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if compiler and not native.has("scatter_to_decoder", "cuda"):
        problems.append(f"scatter_to_decoder: {compiler} is there, but {native.why_not('cuda')}")
    return problems


def carry_out(step: Step, results: Path) -> str:
    """Runs it, with what it prints in the log too. Returns what came of it."""
    environment = os.environ | {"PYTHONPATH": os.curdir, "PYTHONUNBUFFERED": "1"}
    with (
        (results / "gpu.log").open("a", encoding="utf-8") as log,
        subprocess.Popen(
            step.words(results),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):
        timers = [
            threading.Timer(60 * step.limit, os.killpg, (process.pid, signal.SIGINT)),
            threading.Timer(60 * step.limit + GRACE, os.killpg, (process.pid, signal.SIGKILL)),
        ]
        began = time.monotonic()
        for timer in timers:
            timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            for file in (sys.stdout, log):
                file.write(line)
                file.flush()
        status = process.wait()
        for timer in timers:
            timer.cancel()
    minutes = (time.monotonic() - began) / 60
    outcome = "passed" if status == 0 else "stopped" if minutes >= step.limit else f"failed ({status})"
    return f"{outcome}, {minutes:.1f} min"


def lines(name: str, steps: Sequence[Step], results: Path) -> list[str]:
    """A target as it would run."""
    total = sum(step.estimate for step in steps), sum(step.limit for step in steps)
    found = [f"gpu-{name}: about {total[0]:.1f} min, an estimate; at most {total[1]:.1f}"]
    for step in steps:
        found.append(
            f"  {step.name}: about {step.estimate} min, at most {step.limit}: {' '.join(step.words(results)[1:])}"
        )
        if step.command[0] in LISTED:
            listed = [sys.executable, "-m", *step.command, "--list"]
            done = subprocess.run(listed, capture_output=True, text=True, check=True)
            found += [f"    {line}" for line in done.stdout.splitlines()]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    every = targets()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", help=f"default: {' '.join(every)}")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="folder for rows and gpu.log")
    parser.add_argument("--list", action="store_true", help="what would run, how long about; run nothing")
    options = parser.parse_args(arguments)
    chosen = options.targets or list(every)
    if unknown := [name for name in chosen if name not in every and chosen != ["build"]]:
        parser.error(f"unknown target {', '.join(unknown)}; there are: {', '.join(every)}")
    if options.list:
        print("\n".join(line for name in chosen for line in lines(name, every[name], options.results)))
        return 0
    if not torch.cuda.is_available():
        parser.error("no CUDA device is visible")
    if chosen == ["build"]:
        return build()
    options.results.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for name in chosen:
        for step in every[name]:
            print(f"== gpu-{name}: {step.name}, about {step.estimate} min, at most {step.limit}", flush=True)
            outcomes.append(f"gpu-{name}: {step.name}: {carry_out(step, options.results)}")
            print(outcomes[-1], flush=True)
    print("\n".join(["", *outcomes]))
    return 0 if all(": passed" in outcome for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
