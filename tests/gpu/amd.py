"""Read machine code of AMD's GPUs: registers, spills, and the loads between its waits.

These GPUs issue in order, and say themselves where they stop for memory: ``s_waitcnt vmcnt(n)`` waits until all loads
but the last n are there, ``lgkmcnt`` until those of scalars and of shared memory are. So code is run by a clock that
such a wait alone moves: what is issued at the same time waits together. Stores count among them, but take no time here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from . import flow
from .loads import Loads

_LABEL = re.compile(r"^(\.LBB\w+):")
_INSTRUCTION = re.compile(r"^([a-z]\w+)\s*([^;]*)")
_COUNT = re.compile(r"(vmcnt|lgkmcnt)\((\d+)\)")
_REGISTERS = re.compile(r"\bs(?:(\d+)|\[(\d+):(\d+)\])")
_BYTES = {"ubyte": 1, "sbyte": 1, "ushort": 2, "sshort": 2, "short": 2, "dword": 4}
_LOAD = re.compile(r"^(?:global|buffer|flat)_load_(?:(dword)(?:x(\d))?|(ubyte|sbyte|ushort|sshort|short))")
_VECTOR_MEMORY = ("global_", "buffer_", "flat_", "scratch_")
_ARGUMENTS = (0, 1)
"""The pair of scalar registers that points at a kernel's arguments when it begins."""


@dataclass(frozen=True)
class _Instruction:
    name: str
    operands: str
    argument: bool = False
    """Whether it loads an argument of the kernel, for which nobody waits long."""


def usage(text: str) -> tuple[int, int]:
    """Vector registers per thread, and bytes of its private segment."""
    registers, private = (
        re.search(r"\.vgpr_count:\s+(\d+)", text),
        re.search(r"\.private_segment_fixed_size: (\d+)", text),
    )
    assert registers and private
    return int(registers[1]), int(private[1])


def loads(text: str, depth: int) -> tuple[Loads, Loads]:
    """Loads on the path through loops of at most this depth, and in one turn of the deeper loops."""
    code, labels, jumps = _instructions(text)
    order = flow.blocks(len(code), labels, jumps)
    path = [line for block in order if block.loops <= depth for line in code[block.start : block.stop]]
    turn = [line for block in order if block.loops > depth for line in code[block.start : block.stop]]
    return _levels(path), _levels(turn)


def _instructions(text: str) -> tuple[list[_Instruction], dict[str, int], list[flow.Jump]]:
    """Instructions in order, where labels are, and jumps."""
    code: list[_Instruction] = []
    labels: dict[str, int] = {}
    jumps: list[flow.Jump] = []
    pointers = {_ARGUMENTS}
    for raw in text.splitlines():
        line = raw.strip()
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif line.startswith(".Lfunc_end"):
            break
        elif found := _INSTRUCTION.match(line):
            name, operands = found[1], found[2].strip()
            scalars = [_pair(match) for match in _REGISTERS.finditer(operands)]
            argument = name.startswith("s_load") and len(scalars) > 1 and scalars[1] in pointers
            if name.startswith(("s_cbranch", "s_branch")):
                jumps.append(flow.Jump(len(code), operands, always=name == "s_branch"))
            elif name == "s_endpgm":
                jumps.append(flow.Jump(len(code), None, always=True))
            elif scalars and operands.startswith("s"):
                copied = name == "s_mov_b64" and len(scalars) > 1 and scalars[1] in pointers
                low, high = scalars[0]
                pointers = {pair for pair in pointers if pair[1] < low or pair[0] > high}
                if copied:
                    pointers.add(scalars[0])
            code.append(_Instruction(name, operands, argument))
    return code, labels, jumps


def _pair(found: re.Match[str]) -> tuple[int, int]:
    """First and last of the scalar registers of an operand."""
    return (int(found[1]),) * 2 if found[1] else (int(found[2]), int(found[3]))


def _levels(code: Sequence[_Instruction]) -> Loads:
    """Sort the loads of straight code by the time at which they are issued, in waits."""
    now = 0
    ready: dict[str, list[int]] = {"vmcnt": [], "lgkmcnt": []}
    found: dict[int, Counter[int]] = {}
    for line in code:
        if line.name == "s_waitcnt":
            for counter, left in _COUNT.findall(line.operands):
                queue = ready[counter]
                done = queue[: len(queue) - int(left)] if int(left) else queue
                now = max([now, *done])
                ready[counter] = queue[len(done) :]
        elif load := _LOAD.match(line.name):
            width = _BYTES[load[1] or load[3]] * int(load[2] or 1)
            found.setdefault(now, Counter())[width] += 1
            ready["vmcnt"].append(now + 1)
        elif line.name.startswith("s_load"):
            if not line.argument:
                found.setdefault(now, Counter())  # one for all threads of a wave: a wait, but no bytes of theirs
            ready["lgkmcnt"].append(now if line.argument else now + 1)
        elif line.name.startswith(_VECTOR_MEMORY):
            ready["vmcnt"].append(now)
        elif line.name.startswith("ds_"):
            ready["lgkmcnt"].append(now)
    return Loads(tuple(found[k] for k in sorted(found)))
