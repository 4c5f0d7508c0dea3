"""What is known of a compiled kernel on a GPU, as a line of a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton

from . import code, machines
from .pretend import Compiled

GOALS = {"lookup": 0.85, "runs": 0.60}
"""Of the memory's bandwidth, that these kernels are to reach."""
RESERVE = 1.25
"""Of what that takes, which they are to be able to ask for."""


@dataclass(frozen=True)
class Line:
    """What is known of a kernel on a target.

    `share` of the bandwidth can be asked for by its reads, `need` is what they are to be able to ask for,
    writes counted. Both are None where programs have no bytes of rows.
    """

    kernel: str
    about: str
    target: str
    triton: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    warps: int
    programs: int
    chain: int
    turn: int
    widths: dict[int, int]
    kib_in_flight: float
    tile: int
    share: float | None
    need: float | None


def line_of(
    compiled: Compiled,
    kernel: str,
    about: str,
    *,
    depth: int = 0,
    tile: int = 0,
    read_bytes: int = 0,
    written_bytes: int = 0,
    goal: float = 0.0,
) -> Line:
    """Read a compiled kernel.

    Parameters
    ----------
    kernel, about
        What the line is called, and its conditions.
    depth
        Loops that the path of a program is in.
    tile, read_bytes, written_bytes
        Rows that a program takes at once; bytes that are read and written for each.
    goal
        Share of the memory's bandwidth that the kernel is to reach.
    """
    found = code.read(compiled, depth)
    machine = machines.MACHINES[compiled.target]
    programs = machines.resident(machine, found.registers, compiled.warps, compiled.shared_bytes)
    nbytes = tile * read_bytes
    share = machines.share(machine, programs, nbytes, max(found.path.chain, 1)) if nbytes else None
    return Line(
        kernel,
        about,
        compiled.target,
        triton.__version__,
        found.registers,
        found.spilled_bytes,
        compiled.shared_bytes,
        compiled.warps,
        programs,
        found.path.chain,
        found.turn.chain,
        found.path.widths,
        round(found.path.in_flight * machine.lanes * compiled.warps * programs / 1024, 1),
        tile,
        round(share, 3) if share else None,
        round(RESERVE * goal * read_bytes / (read_bytes + written_bytes), 3) if share else None,
    )


def write(file: Path, found: Sequence[Line], **more: Any) -> None:
    """Write lines, and more, as JSON."""
    record = {"lines": [asdict(line) for line in found], **more}
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read(file: Path) -> list[Line]:
    """Read the lines that `write` wrote."""
    found = json.loads(file.read_text(encoding="utf-8"))["lines"]
    return [Line(**{**line, "widths": {int(width): n for width, n in line["widths"].items()}}) for line in found]
