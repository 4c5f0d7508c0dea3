"""Compile every kernel for GPUs that are not here, and report what the code will ask of them.

    python -m tests.gpu.report [few|each|all] [--targets sm_90 …] [--json FILE] [--markdown FILE] [--beside FILE …]

Each line of the table is a kernel under some conditions. What it says: `code.py`; the shares: `machines.py`.
Run in a process of its own, where TRITON_INTERPRET is not set: ``make gpu-report``. It says how far it is, and writes
``--json`` after each target. Triton keeps what it has compiled, so a run that was interrupted goes on when it is
started again. ``--beside`` adds what other runs wrote by ``--json``: with another Triton, for other targets.

    python -m tests.gpu.report few --targets sm_90 --theirs FOLDER [--markdown FILE]

compiles instead, the same way, the kernels of TorchRec's TritonTBE, whose files are in a folder (`theirs.py`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from . import tables, theirs
from .launches import Launch, launches
from .line import GOALS, Line, line_of, read, write
from .pretend import TARGETS, Compiled, compiling

IN_LOOP = {
    **dict.fromkeys(["_runs_kernel", "_long_kernel", "_occurrences_kernel", "_mean_of_rows_kernel"], 1),
    "_add_along_tree_kernel": 2,
}
"""Kernels whose programs take tiles in turn: their path is in that loop."""
TILE = {"_lookup_kernel": "BLOCK_B", "_runs_kernel": "R"}
"""What says how many rows a program of a kernel takes at once."""


def lines(which: Iterable[Launch], target: str, say: Callable[[Line], None] = lambda _: None) -> list[Line]:
    """Compile launches for a target; the same code under several conditions is in the result once."""
    found: list[Line] = []
    seen: set[str] = set()
    for launch in which:

        def keep(compiled: Compiled, launch: Launch = launch) -> None:
            if compiled.asm["ttir"] not in seen:
                seen.add(compiled.asm["ttir"])
                found.append(_line(compiled, launch))
                say(found[-1])

        with compiling(target, keep):
            launch.run()
    return found


def _line(compiled: Compiled, launch: Launch) -> Line:
    constants = compiled.constants
    family = kernel = compiled.kernel.strip("_").removesuffix("_kernel")
    if "SINGLE" in constants:
        kernel += ", single" if constants["SINGLE"] else ", several"
    return line_of(
        compiled,
        kernel,
        launch.about,
        depth=IN_LOOP.get(compiled.kernel, 0),
        tile=constants.get(TILE.get(compiled.kernel, ""), 0),
        read_bytes=launch.row_bytes + (launch.grad_bytes if "R" in constants else 0),
        written_bytes=launch.written_bytes,
        goal=GOALS.get(family, 0.0),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("amount", nargs="?", default="each", choices=["few", "each", "all"])
    parser.add_argument("--targets", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--json", type=Path, help="a file for the lines, which is written after each target")
    parser.add_argument("--markdown", type=Path, help="a page whose table, between two comments, is replaced")
    parser.add_argument("--beside", type=Path, nargs="*", default=[], help="files of other runs, by --json")
    parser.add_argument("--theirs", type=Path, help="a folder with the files of TorchRec's TritonTBE")
    options = parser.parse_args(argv)
    found: list[Line] = []
    for target in options.targets:

        def say(line: Line) -> None:
            print(f"{line.target} {line.kernel}, {line.about}: {line.registers} registers", file=sys.stderr, flush=True)

        if options.theirs:
            found += theirs.lines(options.theirs, target, say)
        else:
            found += lines(_counted(list(launches(options.amount)), target), target, say)
        if options.json:
            write(options.json, found, updates=tables.updates(found))
    for file in options.beside:
        found += read(file)
    text, name = (tables.theirs(found), "theirs") if options.theirs else (tables.ours(found), "gpu-report")
    if options.markdown:
        _replace(options.markdown, name, text)
    else:
        print(text)
    return 0


def _counted(which: Sequence[Launch], target: str) -> Iterable[Launch]:
    for k, launch in enumerate(which):
        print(f"{target} {k + 1} of {len(which)}: {launch.about}", file=sys.stderr, flush=True)
        yield launch


def _replace(page: Path, name: str, text: str) -> None:
    """Put a text between the two comments of a page that have this name."""
    old = page.read_text(encoding="utf-8")
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, behind = old[: old.index(begin)], old[old.index(end) :]
    page.write_text(f"{before}{begin}\n\n{text}\n\n{behind}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
