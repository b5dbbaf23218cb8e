"""Reads PTX, the assembly of NVIDIA's GPUs, as Triton and nvcc print it.

A pair of braces, as inline assembly opens, may declare registers whose names are in use outside: registers are
numbered, so that names no longer matter. `.loc` lines are kept: a fault names the line of the kernel's source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

TYPES = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16,
    "s16": np.int16, "f16": np.float16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64,
}  # fmt: skip
"""What holds a register, or an element in memory. bf16 is not among them: NumPy has no such numbers."""


@dataclass(frozen=True)
class Register:
    number: int
    kind: str  # of TYPES


@dataclass(frozen=True)
class Address:
    """[base + offset]. base: a register, or the name of a parameter or of shared memory; none for a number alone."""

    base: Register | str | None
    offset: int


Operand = Register | Address | str | tuple["Register | str", ...]
"""A str is a number, a special register, a label, the name of shared memory, or `_`; a tuple was in braces."""


@dataclass(frozen=True)
class Instruction:
    parts: tuple[str, ...]  # ld.global.v4.b32 as its four parts
    operands: tuple[Operand, ...]
    guard: Register | None  # runs only for threads in which it is true,
    negated: bool  # or false
    line: str  # of the source
    text: str


@dataclass
class Program:
    """One kernel. parameters: bytes by name, in order. static: bytes of shared memory that the code itself names."""

    name: str
    parameters: dict[str, int]
    registers: list[str] = field(default_factory=list)  # their kinds
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)  # where in shared memory a name begins
    static: int = 0


ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)[^{;]*\{")
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr[^,]*\s)?\s*([\w$]+)(?:\[(\d+)\])?\s*$")
STATEMENT = re.compile(r"\s*(?:([\w$]+):(?!:)|([{}])|((?:[^;{}]|\{[^{}]*\})+);)")
REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.b8\s+([\w$]+)\[(\d*)\]")


def programs(text: str) -> dict[str, Program]:
    """The kernels of a file, by name."""
    files = {number: Path(name).name for number, name in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text)}
    text = re.sub(r"^\s*\.loc\s+(\d+)\s+(\d+).*$", r".loc \1 \2;", text, flags=re.M)
    text = re.sub(r"//.*$", "", text, flags=re.M)
    outside = re.sub(r"\{[^{}]*\}", "", text)
    found = {}
    for entry in ENTRY.finditer(text):
        sizes = {}
        for parameter in filter(str.strip, entry[2].split(",")):
            kind, name, count = PARAMETER.search(parameter).groups()  # type: ignore[union-attr]
            sizes[name] = np.dtype(TYPES[kind]).itemsize * int(count or 1)
        program = Program(entry[1], sizes)
        for _, name, size in SHARED.findall(outside):
            if not size:  # as large as the launch says, behind what the code names
                program.shared[name] = -1
        _body(program, text, entry.end(), files)
        program.shared = {name: program.static if at < 0 else at for name, at in program.shared.items()}
        found[program.name] = program
    return found


def _body(program: Program, text: str, at: int, files: dict[str, str]) -> None:
    scopes: list[dict[str, Register]] = [{}]
    line = ""
    while scopes:
        match = STATEMENT.match(text, at)
        if match is None:
            raise ValueError(f"not PTX: {text[at : at + 80]!r}")
        at = match.end()
        label, brace, statement = match.groups()
        if label:
            program.labels[label] = len(program.code)
        elif brace == "{":
            scopes.append({})
        elif brace:
            scopes.pop()
        elif (statement := " ".join(statement.split())).startswith(".loc"):
            _, file, number = statement.split()
            line = f"{files.get(file, file)}:{number}"
        elif declared := REGISTERS.match(statement):
            _declare(program, scopes[-1], *declared.groups())
        elif shared := SHARED.search(statement):
            align = int(shared[1] or 1)
            program.shared[shared[2]] = -(-program.static // align) * align
            program.static = program.shared[shared[2]] + int(shared[3])
        elif not statement.startswith("."):
            program.code.append(_instruction(statement, scopes, line))


def _declare(program: Program, scope: dict[str, Register], kind: str, names: str) -> None:
    for name in names.split(","):
        stem, _, count = name.strip().rstrip(">").partition("<")
        for spelled in [f"{stem}{i}" for i in range(int(count))] if count else [stem]:
            scope[spelled] = Register(len(program.registers), kind)
            program.registers.append(kind)


def _instruction(statement: str, scopes: list[dict[str, Register]], line: str) -> Instruction:
    def named(name: str) -> Register | str:
        return next((scope[name] for scope in reversed(scopes) if name in scope), name)

    def operand(text: str) -> Operand:
        if text.startswith("{"):
            return tuple(named(name.strip()) for name in text[1:-1].split(","))
        if text.startswith("["):
            base, _, offset = text[1:-1].replace(" ", "").partition("+")
            if re.match(r"-?\d", base):
                return Address(None, int(base, 0))
            return Address(named(base), int(offset or "0", 0))
        return named(text)

    guard, name, rest = re.fullmatch(r"(?:@(!?[%\w]+) )?([\w.:]+) ?(.*)", statement).groups()  # type: ignore[union-attr]
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s|][^,|]*", rest)
    predicate = named(guard.lstrip("!")) if guard else None
    assert predicate is None or isinstance(predicate, Register)
    parts = tuple(name.replace("::cta", "").split("."))
    negated = bool(guard) and guard.startswith("!")
    return Instruction(parts, tuple(operand(o.strip()) for o in operands), predicate, negated, line, statement)


def several(operand: Operand) -> Iterator[Operand]:
    """What stood in braces, or the operand itself."""
    yield from operand if isinstance(operand, tuple) else (operand,)
