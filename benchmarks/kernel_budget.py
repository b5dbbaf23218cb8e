"""What every Triton kernel variant that is launched costs a multiprocessor: registers, spills, shared memory.

Compiled ahead of time for sm_80 and sm_90; no GPU is needed. Prints a line per variant and exits with 1 if one spills
registers (bytes a thread) or needs more shared memory (KiB a block) than there is. resident: the share of a
multiprocessor's warps that fit at once.

    python -m benchmarks.kernel_budget [--op add_norm]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
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


def kernel_modules() -> list[str]:
    """Names of the kernel files, without their shared part."""
    return sorted(path.stem for path in KERNELS.glob("*.py") if path.stem != "common")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.kernel_budget", description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=kernel_modules(), help="this op only")
    parser.add_argument("--all", action="store_true", help="also those that no preset launches, and fp16")
    arguments = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set: interpreted kernels cannot be compiled; unset it")
    os.environ.setdefault("MLIR_DISABLE_MULTITHREADING", "1")  # a process a core already: threads would wait
    places = [
        (name, index, arch)
        for name in ([arguments.op] if arguments.op else kernel_modules())
        for index, variant in enumerate(_variants(name))
        for arch in SHARED_LIMIT
        if variant.arch in (None, arch)
        and (arguments.all or not (variant.rare or "*fp16" in variant.signature.values()))
    ]
    first: dict[tuple[Any, ...], tuple[str, int, int]] = {}  # of equal variants the first stands for all
    same = {place: first.setdefault(_content(*place), place) for place in places}
    jobs = list(first.values())
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
        costs = dict(zip(jobs, pool.map(compile_variant, *zip(*jobs, strict=True)), strict=True))
    over = show({place: costs[same[place]] for place in places})
    print(f"{len(jobs)} compilations, {over} over budget")
    return 1 if over else 0


def compile_variant(name: str, index: int, arch: int) -> Cost:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    variant = _variants(name)[index]
    arguments = list(variant.kernel.arg_names)
    signature = {a: "constexpr" if a in variant.constants else variant.signature[a] for a in arguments}
    attributes = {(arguments.index(a),): [["tt.divisibility", 16]] for a in variant.divisible}
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=variant.constants, attrs=attributes)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, **variant.options}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, WARP), options=options)
    registers, stack = _resources(compiled.asm["cubin"])
    return Cost(registers, stack, compiled.metadata.shared, variant.num_warps)


@functools.cache
def _variants(name: str) -> list[Any]:
    variants: list[Any] = importlib.import_module(f"maelm_fast.kernels.{name}").variants()
    return variants


def _content(name: str, index: int, arch: int) -> tuple[Any, ...]:
    """What makes a binary, as something to compare."""
    variant = _variants(name)[index]
    kernel = variant.kernel.fn
    rest = repr(dataclasses.replace(variant, label="", kernel=None, arch=arch))
    return kernel.__module__, kernel.__qualname__, rest


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


def show(costs: dict[tuple[str, int, int], Cost]) -> int:
    """Prints a line per variant; returns how many compilations are over budget."""
    lines: dict[str, dict[int, Cost]] = {}
    for (op, index, arch), cost in costs.items():
        lines.setdefault(f"{op}: {_variants(op)[index].label.removeprefix(op).strip('_ ')}", {})[arch] = cost
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
