"""Do the tests find faults? Seeds those of ``faults.toml`` into a copy of the source, one at a time, and runs tests.

    python tests/faults/run.py [--only NAME…] [--tests "ARGUMENTS OF PYTEST"] [--narrow] [--json FILE]

For each fault the tests that ``faults.toml`` names are run until one fails; if none does, all tests are. Nothing
outside of the copy is touched, and it is removed at the end.

Compiled kernels are kept in a cache beside the copy, whose path and times of files stay the same from fault to fault;
hotbed names that cache after its kernels' sources, so a fault in one of them is compiled anew. With ``--work`` the
cache is there the next time, too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).with_name("faults.toml")
PLUGINS = Path(__file__).with_name("plugins")
SOURCE = Path("src/hotbed")
ALL_TESTS = ("tests",)

Outcome = Literal["caught", "missed", "timed out"]


class FaultError(Exception):
    """What is wrong with the description of a fault, or with the run of its tests."""


@dataclass(frozen=True)
class Fault:
    """A fault: what it breaks in plain words, its edits of which one fits, and the tests that are likely to find it."""

    name: str
    breaks: str
    edits: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """What came of a fault: the test that failed, and how long it took to get there."""

    name: str
    outcome: Outcome
    caught_by: str | None
    seconds: float
    tests: list[str]


def read_faults(path: Path = FAULTS) -> list[Fault]:
    """Read the faults that are written down."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
    return [
        Fault(e["name"], e["breaks"], tuple((find, put) for find, put in e["edits"]), tuple(e["tests"]))
        for e in entries
    ]


def locate(fault: Fault, root: Path) -> tuple[Path, str, str]:
    """Find the file under ``root`` that a fault is for, its text, and its text with the fault.

    Raises
    ------
    FaultError
        Unless one of the fault's edits fits in exactly one place, and the others in none.
    """
    found: list[tuple[Path, str, str]] = []
    for path in sorted((root / SOURCE).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for find, put in fault.edits:
            found += [(path, text, text.replace(find, put))] * text.count(find)
    if len(found) != 1:
        places = ", ".join(str(path.relative_to(root)) for path, _, _ in found) or "nowhere"
        raise FaultError(f"fault '{fault.name}' fits {len(found)} places, must fit one: {places}; mend its edits")
    return found[0]


@contextmanager
def seeded(fault: Fault, root: Path) -> Generator[Path]:
    """Seed a fault into the source under ``root`` for the time of a ``with``; the file is then as it was."""
    path, text, faulty = locate(fault, root)
    times = path.stat()
    path.write_text(faulty, encoding="utf-8")
    try:
        yield path
    finally:
        path.write_text(text, encoding="utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # compiled kernels of this file stay valid


def copy_project(root: Path, work: Path) -> Path:
    """Copy what git would into ``work/hotbed``; logs beside the project, which some tests read, are linked."""
    copy = work / "hotbed"
    shutil.rmtree(copy, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)
    logs = root.parent / "shared"
    if logs.is_dir() and not (work / "shared").exists():
        (work / "shared").symlink_to(logs.resolve())
    return copy


def environment(copy: Path, cache: Path) -> dict[str, str]:
    """Make the environment in which the tests of a copy import the copy, with a cache of kernels of its own."""
    paths = os.pathsep.join(map(str, (copy / "src", PLUGINS)))
    inherited = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    return {**inherited, "PYTHONPATH": paths, "XDG_CACHE_HOME": str(cache)}


def refuse_another_source(copy: Path, cache: Path) -> None:
    """Raise `FaultError` unless it is the copy that tests import, for in any other source no fault would be found."""
    script = "import importlib.util; print(importlib.util.find_spec('hotbed').origin)"
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=copy, env=environment(copy, cache), check=True, capture_output=True
    )
    origin = Path(found.stdout.decode().strip())
    if not origin.is_relative_to(copy / "src"):
        raise FaultError(
            f"hotbed is imported from {origin}, must be from {copy / 'src'}; what comes before PYTHONPATH?"
        )


def run_tests(arguments: Sequence[str], copy: Path, cache: Path, limit_s: float) -> tuple[Outcome, str | None]:
    """Run tests of a copy of the project until one fails; what came of them, and which one failed.

    Raises
    ------
    FaultError
        If pytest could not run them.
    """
    plugins = ["-p", "no:cacheprovider", "-p", "hotbed_unshrunk"]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-rfE", *plugins, *arguments]
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment(copy, cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=limit_s)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        return "timed out", None
    finally:
        _end(process)
        shutil.rmtree(copy / ".hypothesis", ignore_errors=True)  # examples that failed would be tried first next time
    if process.returncode == 0:
        return "missed", None
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    if failed is not None:
        return "caught", failed[1]
    if process.returncode < 0 or process.returncode > 128:
        return "caught", f"the tests' process ended with {process.returncode}"
    raise FaultError(f"{shlex.join(command)} ended with {process.returncode}:\n{output[-3000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End pytest and all processes that its tests have started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def try_fault(fault: Fault | None, runs: Sequence[Sequence[str]], copy: Path, cache: Path, limit_s: float) -> Result:
    """Run tests with a fault, or without any, one list of arguments after the other until one catches it."""
    name = "none" if fault is None else fault.name
    started = time.monotonic()
    tried: list[str] = []
    with nullcontext() if fault is None else seeded(fault, copy):
        for arguments in runs:
            tried.append(shlex.join(arguments))
            outcome, test = run_tests(arguments, copy, cache, limit_s)
            if outcome != "missed":
                return Result(name, outcome, test, round(time.monotonic() - started, 1), tried)
    return Result(name, "missed", None, round(time.monotonic() - started, 1), tried)


def main(argv: Sequence[str] | None = None) -> int:
    """Seed faults and run tests; 0 if all were caught, or, without a fault, if nothing failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults; 'none' is the source as it is")
    parser.add_argument(
        "--tests", metavar="ARGUMENTS", help="what to run of every fault, in the place of its own tests"
    )
    parser.add_argument("--options", metavar="ARGUMENTS", default="", help="more arguments of every pytest: -m, -k, …")
    parser.add_argument("--narrow", action="store_true", help="do not run all tests where the likeliest find nothing")
    parser.add_argument("--limit", type=float, default=1800, metavar="S", help="seconds after which a pytest is ended")
    parser.add_argument("--work", type=Path, help="folder for the copy, whose cache of kernels is kept")
    parser.add_argument("--json", type=Path, help="file to write the results to, after each fault")
    asked = parser.parse_args(argv)
    faults = {fault.name: fault for fault in read_faults()}
    names: list[str] = asked.only or list(faults)
    if unknown := [name for name in names if name not in faults and name != "none"]:
        parser.error(f"there is no fault {', '.join(unknown)}; there are none, {', '.join(faults)}")
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="hotbed-faults-") as temporary:
        work: Path = (asked.work or Path(temporary)).resolve()
        copy, cache = copy_project(ROOT, work), work / "cache"
        try:
            refuse_another_source(copy, cache)
            for name in names:
                fault = faults.get(name)
                own = [t for f in faults.values() if fault in (f, None) for t in f.tests if (copy / t).exists()]
                runs = [shlex.split(asked.tests)] if asked.tests else [list(dict.fromkeys(own))]
                runs += [] if asked.narrow or asked.tests or fault is None else [list(ALL_TESTS)]
                runs = [[*run, *shlex.split(asked.options)] for run in runs if run]
                results.append(try_fault(fault, runs, copy, cache, asked.limit))
                print(_line(results[-1]), flush=True)
                if asked.json is not None:
                    asked.json.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n", encoding="utf-8")
        finally:
            shutil.rmtree(copy, ignore_errors=True)
    caught = sum(r.outcome == "caught" for r in results if r.name != "none")
    print(f"{caught} of {sum(r.name != 'none' for r in results)} faults caught")
    return 0 if all((r.outcome == "caught") != (r.name == "none") for r in results) else 1


def _line(result: Result) -> str:
    return f"{result.name:<42} {result.outcome:<9} {result.seconds:7.1f} s  {result.caught_by or ''}"


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):  # which a shell's background jobs are told to ignore
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
