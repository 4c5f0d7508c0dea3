"""Read machine code: registers, spills, widths of loads, and how many loads wait for one another.

Here that of NVIDIA's GPUs; `amd.py` reads AMD's. A chain of dependent loads is found in PTX by the flow of values: the
level of a load is one more than that of the highest value in its address, its predicate, or the condition of a branch
before it. Values that pass through shared memory have the highest level that was stored there. Each block is read once,
behind those that lead to it; loops deeper than the path that is asked for are looked at by themselves, as one turn
whose inputs are all there.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import triton

from . import amd, flow
from .loads import Loads
from .pretend import Compiled

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_BITS = re.compile(r"\.[bsuf](8|16|32|64|128)\b")
_VECTOR = re.compile(r"\.v([248])\b")
_REGISTER = re.compile(r"%[a-z]+\d+")
_LABEL = re.compile(r"^(\$L\w+):")
_INSTRUCTION = re.compile(r"^(?:@(!?%p\d+)\s+)?([a-z][\w.:]*)\s*(.*);")
_NO_RESULT = ("st.", "bra", "bar", "ret", "exit", "red.", "membar", "fence", "griddepcontrol", "cp.async.wait", "trap")


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
        text = compiled.asm["amdgcn"]
        return Code(*amd.usage(text), *amd.loads(text, depth))
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


def loads(ptx: str, depth: int) -> tuple[Loads, Loads]:
    """Loads on the path through loops of at most this depth, and in one turn of the deeper loops."""
    code, labels, jumps = _instructions(ptx)
    order = flow.blocks(len(code), labels, jumps)
    return _levels(code, order, lambda loops: loops <= depth), _levels(code, order, lambda loops: loops > depth)


def _instructions(ptx: str) -> tuple[list[re.Match[str]], dict[str, int], list[flow.Jump]]:
    """Instructions in order, where labels are, and jumps."""
    code: list[re.Match[str]] = []
    labels: dict[str, int] = {}
    jumps: list[flow.Jump] = []
    for raw in ptx.splitlines():
        line = raw.strip()
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _INSTRUCTION.match(line):
            if found[2].startswith("bra"):
                jumps.append(flow.Jump(len(code), found[3].strip(), always=not found[1]))
            elif found[2].startswith(("ret", "exit", "trap")):
                jumps.append(flow.Jump(len(code), None, always=not found[1]))
            code.append(found)
    return code, labels, jumps


def _levels(code: Sequence[re.Match[str]], order: Sequence[flow.Block], counted: Callable[[int], bool]) -> Loads:
    """Sort the global loads of blocks in loops of a counted depth by how many others they wait for."""
    behind: list[dict[str, int]] = []
    found: dict[int, Counter[int]] = {}
    for block in order:
        level = _merged([behind[k] for k in block.before])
        for line in code[block.start : block.stop] if counted(block.loops) else ():
            _follow(line, level, found)
        behind.append(level)
    return Loads(tuple(found[k] for k in sorted(found)))


def _merged(states: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Levels of values where several paths meet: the highest."""
    result: dict[str, int] = {}
    for state in states:
        for name, level in state.items():
            result[name] = max(result.get(name, 0), level)
    return result


_BRANCH, _SHARED = "branch", "shared"
"""What else has a level: the conditions of the branches so far, for which all that follows waits; shared memory."""


def _follow(line: re.Match[str], level: dict[str, int], found: dict[int, Counter[int]]) -> None:
    """Give the results of an instruction their level, and count it if it is a global load."""
    predicate, operation, operands = line.groups()
    results, inputs = _split(operands)
    if operation.startswith(_NO_RESULT):
        results, inputs = [], results + inputs
    if predicate:
        inputs = [*inputs, predicate.lstrip("!"), *results]  # without it the register stays as it is
    at = max((level.get(name, 0) for name in inputs), default=0)
    if operation.startswith("bra"):
        level[_BRANCH] = max(level.get(_BRANCH, 0), at)
    elif operation.startswith("ld.global"):
        bits, vector = _BITS.search(operation), _VECTOR.search(operation)
        assert bits, operation
        width = int(bits[1]) // 8 * (int(vector[1]) if vector else 1)
        at = max(at, level.get(_BRANCH, 0))
        found.setdefault(at, Counter())[width] += 1
        at += 1
    elif operation.startswith(("st.shared", "stmatrix", "cp.async")):
        level[_SHARED] = max(level.get(_SHARED, 0), at)
    elif operation.startswith(("ld.shared", "ldmatrix")):
        at = max(at, level.get(_SHARED, 0))
    for register in results:
        level[register] = at


def _split(operands: str) -> tuple[list[str], list[str]]:
    """Registers of the first operand, which may be several in braces, and of the others."""
    operands = operands.strip()
    cut = operands.find("}") + 1 if operands.startswith("{") else operands.find(",")
    cut = len(operands) if cut <= 0 else cut
    return _REGISTER.findall(operands[:cut]), _REGISTER.findall(operands[cut:])
