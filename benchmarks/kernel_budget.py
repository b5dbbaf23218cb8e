"""What every Triton kernel variant that is launched costs a multiprocessor: registers, spills, shared memory.

Compiled ahead of time for sm_80 and sm_90; no GPU is needed. Prints a line per variant and exits with 1 if one spills
registers (bytes a thread) or needs more shared memory (KiB a block) than there is. resident: the share of a
multiprocessor's warps that fit at once.

    python -m benchmarks.kernel_budget [--op add_norm]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from benchmarks.kernel_launches import OPS, Launch, compiled, launches
from maelm_fast.stop import end_with_parent

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}  # bytes a block may ask for
SHARED_TOTAL = {80: 164 * 1024, 90: 228 * 1024}  # bytes a multiprocessor has; 1 KiB of each block's is the system's
REGISTERS, MAX_WARPS, MAX_BLOCKS, WARP = 65536, 64, 32, 32


@dataclass(frozen=True)
class Cost:
    """One variant on one architecture. stack: bytes a thread of local memory, which is where spills go."""

    registers: int
    stack: int
    shared: int
    warps: int

    def fits(self, arch: int) -> bool:
        return self.stack == 0 and self.shared <= SHARED_LIMIT[arch]

    def occupancy(self, arch: int) -> float:
        """Share of the multiprocessor's warps that can be resident."""
        registers = -(-self.registers // 8) * 8 * WARP * self.warps
        blocks = min(REGISTERS // registers, SHARED_TOTAL[arch] // (self.shared + 1024), MAX_BLOCKS)
        return min(MAX_WARPS, blocks * self.warps) / MAX_WARPS


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.kernel_budget", description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=list(OPS), help="this op only")
    parser.add_argument("--all", action="store_true", help="also those that no preset launches, and fp16")
    arguments = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set: interpreted kernels cannot be compiled; unset it")
    os.environ.setdefault("MLIR_DISABLE_MULTITHREADING", "1")  # a process a core already: threads would wait
    jobs = [
        launch
        for launch in launches([arguments.op] if arguments.op else list(OPS))
        if arguments.all or any("rare" not in call and "fp16" not in call for call in launch.calls)
    ]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(len(os.sched_getaffinity(0)), context, end_with_parent) as pool:
        over = show(dict(zip(jobs, pool.map(cost_of, jobs), strict=True)))
    print(f"{len(jobs)} compilations, {over} over budget")
    return 1 if over else 0


def cost_of(launch: Launch) -> Cost:
    binary = compiled(launch)
    registers, stack = _resources(binary.asm["cubin"])
    return Cost(registers, stack, binary.metadata.shared, launch.warps)


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of stack and local memory a thread) as the disassembler reports them."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", report)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage:\n{report}")
    registers, stack, local = (int(number) for number in found.groups())
    return registers, stack + local


def show(costs: dict[Launch, Cost]) -> int:
    """Prints a line per kernel and call; returns how many compilations are over budget. Of calls that need the same
    binary the first stands for all."""
    lines: dict[str, dict[int, Cost]] = {}
    for launch, cost in costs.items():
        name = launch.kernel.strip("_").removesuffix("_kernel")
        lines.setdefault(f"{name}: {launch.calls[0]}", {})[launch.arch] = cost
    width = max(map(len, lines))
    print(f"{'':{width}}" + "".join(f" | {f'sm_{arch}':<42}" for arch in SHARED_LIMIT))
    print(f"{'':{width}}" + " | warps  registers  spilled  KiB  resident   " * len(SHARED_LIMIT))
    over = 0
    for title, by_arch in lines.items():
        cells = []
        for arch, cost in sorted(by_arch.items()):
            over += not cost.fits(arch)
            cells.append(
                f" | {cost.warps:5}  {cost.registers:9} {cost.stack:8} {cost.shared / 1024:4.0f} "
                f"{cost.occupancy(arch):9.0%} " + ("  " if cost.fits(arch) else "!!")
            )
        print(f"{title:{width}}" + "".join(cells))
    return over


if __name__ == "__main__":
    sys.exit(main())
