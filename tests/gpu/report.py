"""Compile every kernel for GPUs that are not here, and report what the code will ask of them.

    python -m tests.gpu.report [few|each|all] [--targets sm_90 …] [--json FILE] [--markdown FILE]

Each line of the table is a kernel under some conditions. What it says: `code.py`; the shares: `machines.py`.
Run in a process of its own, where TRITON_INTERPRET is not set: ``make gpu-report``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import code, machines
from .launches import Launch, launches
from .pretend import TARGETS, Compiled, compiling

IN_LOOP = {"_runs_kernel": 1, "_long_kernel": 1, "_occurrences_kernel": 1}
"""Kernels whose programs take tiles in turn: their path is in that loop."""

WORKLOADS = {"26 tables, one id": (26, 1_000_000, 4096, 1), "4 tables, 20 ids": (4, 100_000, 8192, 20)}
"""Tables, rows, samples and ids per bag of the batches whose update is modelled."""

BEGIN, END = "<!-- gpu-report -->", "<!-- end of gpu-report -->"


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
    registers: int
    spilled_bytes: int
    shared_bytes: int
    warps: int
    programs: int | None
    chain: int
    turn: int
    widths: dict[int, int]
    kib_in_flight: float
    tile: int
    share: float | None
    need: float | None


def line_of(launch: Launch, compiled: Compiled) -> Line:
    """Read a compiled kernel."""
    kernel, constants = compiled.kernel.strip("_").removesuffix("_kernel"), compiled.constants
    if "SINGLE" in constants:
        kernel += ", single" if constants["SINGLE"] else ", several"
    found = code.read(compiled, IN_LOOP.get(compiled.kernel, 0))
    machine = machines.MACHINES.get(compiled.target)
    programs = machine and machines.resident(machine, found.registers, compiled.warps, compiled.shared_bytes)
    tile = {"_lookup_kernel": "BLOCK_B", "_runs_kernel": "R"}.get(compiled.kernel)
    rows = constants.get(tile, 0) if tile else 0
    read = launch.row_bytes + (launch.grad_bytes if "R" in constants else 0)
    nbytes = rows * read
    goal = GOALS.get(kernel.split(",", maxsplit=1)[0], 0.0)
    share = machine and programs and nbytes and machines.share(machine, programs, nbytes, max(found.path.chain, 1))
    in_flight = found.path.in_flight * 32 * compiled.warps * (programs or 0) / 1024
    return Line(
        kernel,
        launch.about,
        compiled.target,
        found.registers,
        found.spilled_bytes,
        compiled.shared_bytes,
        compiled.warps,
        programs,
        found.path.chain,
        found.turn.chain,
        found.path.widths,
        round(in_flight, 1),
        rows,
        round(share, 3) if share else None,
        round(RESERVE * goal * read / (read + launch.written_bytes), 3) if share else None,
    )


def lines(which: Iterable[Launch], target: str, say: Callable[[Line], None] = lambda _: None) -> list[Line]:
    """Compile launches for a target; each kernel is in the result once per conditions."""
    found: dict[object, Line] = {}
    for launch in which:
        if target.startswith("gfx") and re.fullmatch(r"27 × \d+ fp32", launch.about):
            continue  # products of float32 are three of TF32, which Triton has for NVIDIA's GPUs only

        def keep(compiled: Compiled, launch: Launch = launch) -> None:
            if compiled.asm["ttir"] not in seen:
                seen.add(compiled.asm["ttir"])
                line = line_of(launch, compiled)
                found[line.kernel, line.about, len(found)] = line
                say(line)

        with compiling(target, keep):
            launch.run()
    return list(found.values())


seen: set[str] = set()
"""Kernels of this target that are in the table already: the same code under other conditions is said once."""


def updates(found: Sequence[Line]) -> dict[str, dict[str, float]]:
    """Model a batch's update by float32 row-wise AdaGrad: share of the bandwidth by workload and columns."""
    result: dict[str, dict[str, float]] = {}
    lengths = {name: machines.run_lengths(*workload) for name, workload in WORKLOADS.items()}
    for line in found:
        machine = machines.MACHINES.get(line.target)
        dim = int(line.about.split()[0]) if line.about[:1].isdigit() else 0
        if machine is None or line.about != f"{dim} fp32, rowwise_adagrad, gradient fp32":
            continue
        of = {other.kernel: other for other in found if other.about == line.about and other.target == line.target}
        for name, runs in lengths.items():
            seconds = 0.0
            if line.kernel == "runs, several":
                single, several = of["runs, single"], line
                alone, others = runs[runs == 1], np.sort(runs[runs > 1])
                seconds += machines.tiles_s(machine, alone, single.tile, single.programs or 1, single.chain, 0)
                seconds += machines.tiles_s(machine, others, line.tile, several.programs or 1, line.chain, line.turn)
            elif line.kernel == "runs":
                seconds = machines.tiles_s(machine, runs, line.tile, line.programs or 1, line.chain, line.turn)
            else:
                continue
            read = (int(runs.sum()) + len(runs)) * dim * 4
            result.setdefault(f"{line.target}, {dim} columns", {})[name] = read / seconds / machine.bytes_per_s
    return result


def markdown(found: Sequence[Line]) -> str:
    """Render the lines of all targets as one table, registers side by side."""
    targets = list(dict.fromkeys(line.target for line in found))
    main = "sm_90" if "sm_90" in targets else targets[0]
    by = {(line.kernel, line.about, line.target): line for line in found}
    head = [
        "kernel",
        "conditions",
        "registers " + " / ".join(targets),
        "spilled",
        "programs",
        "loads",
        "waits",
        "KiB",
        "share",
        "need",
    ]
    rows = [head, ["---"] * len(head)]
    for line in (line for line in found if line.target == main):
        same = [by.get((line.kernel, line.about, target)) for target in targets]
        rows.append(
            [
                line.kernel,
                line.about,
                " / ".join(str(other.registers) if other else "–" for other in same),
                str(max(other.spilled_bytes for other in same if other)),
                str(line.programs or "–"),
                " ".join(f"{n}×{width}" for width, n in line.widths.items()),
                str(line.chain) + (f" + {line.turn}" if line.turn else ""),
                f"{line.kib_in_flight:.0f}",
                f"{line.share:.0%}" if line.share else "–",
                f"{line.need:.0%}" if line.need else "–",
            ]
        )
    text = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    modelled = updates(found)
    if modelled:
        text += (
            "\n\n| update, row-wise AdaGrad, fp32 | "
            + " | ".join(WORKLOADS)
            + " |\n|"
            + " --- |" * (len(WORKLOADS) + 1)
        )
        for name, shares in modelled.items():
            text += f"\n| {name} | " + " | ".join(f"{shares[workload]:.0%}" for workload in WORKLOADS) + " |"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("amount", nargs="?", default="each", choices=["few", "each", "all"])
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path, help="a page whose table, between two comments, is replaced")
    options = parser.parse_args(argv)
    found: list[Line] = []
    for target in options.targets:
        seen.clear()

        def say(line: Line) -> None:
            print(f"{line.target} {line.kernel}, {line.about}: {line.registers} registers", file=sys.stderr, flush=True)

        found += lines(launches(options.amount), target, say)
    if options.json:
        record: dict[str, Any] = {"lines": [asdict(line) for line in found], "updates": updates(found)}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    table = markdown(found)
    if options.markdown:
        page = options.markdown.read_text(encoding="utf-8")
        before, behind = page[: page.index(BEGIN)], page[page.index(END) :]
        options.markdown.write_text(f"{before}{BEGIN}\n\n{table}\n\n{behind}", encoding="utf-8")
    else:
        print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
