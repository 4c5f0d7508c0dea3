"""Read machine code: registers, spills, widths of loads, and how many loads wait for one another.

A chain of dependent loads is found in PTX by the flow of values: the level of a load is one more than that of the
highest value in its address or its predicate. Values that pass through shared memory have the highest level that was
stored there. Code is read once, from top to bottom; loops deeper than the path that is asked for are looked at by
themselves, as one turn whose inputs are all there.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import triton

from .pretend import Compiled

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_BITS = re.compile(r"\.[bsuf](8|16|32|64|128)\b")
_VECTOR = re.compile(r"\.v([248])\b")
_REGISTER = re.compile(r"%[a-z]+\d+")
_LABEL = re.compile(r"^(\$L\w+):")
_INSTRUCTION = re.compile(r"^(?:@(!?%p\d+)\s+)?([a-z][\w.:]*)\s*(.*);")
_NO_RESULT = ("st.", "bra", "bar", "ret", "exit", "red.", "membar", "fence", "griddepcontrol", "cp.async.wait", "trap")


@dataclass(frozen=True)
class Loads:
    """Global loads of a stretch of code: ``levels[k]`` counts those that wait for k others, by bytes per thread."""

    levels: tuple[Counter[int], ...]

    @property
    def chain(self) -> int:
        """How many loads follow each other, at most."""
        return len(self.levels)

    @property
    def widths(self) -> dict[int, int]:
        """How many loads there are of each width in bytes."""
        return dict(sorted(sum(self.levels, Counter()).items()))

    @property
    def in_flight(self) -> int:
        """Most bytes that a thread waits for at once."""
        return max((sum(width * n for width, n in level.items()) for level in self.levels), default=0)


@dataclass(frozen=True)
class Code:
    """What is known of a kernel's code: by thread its registers, bytes spilled, loads on the path, in a loop's turn."""

    registers: int
    spilled_bytes: int
    path: Loads
    turn: Loads


def read(compiled: Compiled, depth: int = 0) -> Code:
    """Read the code of a kernel whose path lies within loops of this depth."""
    if compiled.target.startswith("gfx"):
        registers, spilled = _amd_usage(compiled.asm["amdgcn"])
        return Code(registers, spilled, Loads(()), Loads(()))
    registers, spilled = _usage(compiled.asm["cubin"])
    path, turn = loads(compiled.asm["ptx"], depth)
    return Code(registers, spilled, path, turn)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of its stack: these kernels call nothing, so that only spills need one."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_TOOLS / "cuobjdump", "-res-usage", file.name]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", out)
    assert found, out
    return int(found[1]), int(found[2])


def _amd_usage(text: str) -> tuple[int, int]:
    """Vector registers per thread, and bytes of its private segment."""
    registers, private = (
        re.search(r"\.vgpr_count:\s+(\d+)", text),
        re.search(r"\.private_segment_fixed_size: (\d+)", text),
    )
    assert registers and private
    return int(registers[1]), int(private[1])


def loads(ptx: str, depth: int) -> tuple[Loads, Loads]:
    """Loads on the path through loops of at most this depth, and in one turn of the deeper loops."""
    code, inside = _instructions(ptx)
    path = _levels([line for line, loops in zip(code, inside, strict=True) if loops <= depth])
    return path, _levels([line for line, loops in zip(code, inside, strict=True) if loops > depth])


def _instructions(ptx: str) -> tuple[list[re.Match[str]], list[int]]:
    """Instructions, and how many loops each is in; a loop is what lies between a label and the last jump back to it."""
    code: list[re.Match[str]] = []
    labels: dict[str, int] = {}
    ends: dict[str, int] = {}
    for raw in ptx.splitlines():
        line = raw.strip()
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _INSTRUCTION.match(line):
            if found[2].startswith("bra") and (to := found[3].strip()) in labels:
                ends[to] = len(code)
            code.append(found)
    inside = [0] * len(code)
    for label, end in ends.items():
        for i in range(labels[label], end + 1):
            inside[i] += 1
    return code, inside


def _levels(code: Sequence[re.Match[str]]) -> Loads:
    """Sort the global loads of straight code by how many others they wait for."""
    level: dict[str, int] = {}
    shared = 0
    found: dict[int, Counter[int]] = {}
    for predicate, operation, operands in (line.groups() for line in code):
        results, inputs = _split(operands)
        if operation.startswith(_NO_RESULT):
            results, inputs = [], results + inputs
        if predicate:
            inputs = [*inputs, predicate.lstrip("!"), *results]  # without it the register stays as it is
        at = max((level.get(register, 0) for register in inputs), default=0)
        if operation.startswith("ld.global"):
            bits, vector = _BITS.search(operation), _VECTOR.search(operation)
            assert bits, operation
            width = int(bits[1]) // 8 * (int(vector[1]) if vector else 1)
            found.setdefault(at, Counter())[width] += 1
            at += 1
        elif operation.startswith(("st.shared", "stmatrix", "cp.async")):
            shared = max(shared, at)
        elif operation.startswith(("ld.shared", "ldmatrix")):
            at = max(at, shared)
        for register in results:
            level[register] = at
    return Loads(tuple(found[k] for k in sorted(found)))


def _split(operands: str) -> tuple[list[str], list[str]]:
    """Registers of the first operand, which may be several in braces, and of the others."""
    operands = operands.strip()
    cut = operands.find("}") + 1 if operands.startswith("{") else operands.find(",")
    cut = len(operands) if cut <= 0 else cut
    return _REGISTER.findall(operands[:cut]), _REGISTER.findall(operands[cut:])
