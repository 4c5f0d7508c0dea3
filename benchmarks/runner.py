"""Parts that all benchmarks share: options, turns, tables, processes, and the description of the machine."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hotbed.errors import HotbedError
from hotbed.files import write_text
from hotbed.parsing import yaml_text
from hotbed.train.runs.report import environment

S = TypeVar("S")
T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that prints the docstring of a module as its help and has the option `--json`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="File for the results.")
    return parser


def about(**more: object) -> dict[str, Any]:
    """Return what results depend on: hardware, versions, commit, date and load."""
    now = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(), "load": os.getloadavg()}
    return {**environment(torch.device("cpu")), "threads": torch.get_num_threads(), **now, **more}


def commit() -> str:
    """Return the commit of the working tree, with `-dirty` if files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def measured_on() -> str:
    """Return commit, hardware and version of torch as text for a page."""
    here = environment(torch.device("cpu"))
    return f"commit {commit()}, {here['hardware']}, torch {here['torch']}"


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def in_turns(sides: Mapping[S, Callable[[], T]], rounds: int, *, title: str = "") -> dict[S, list[T]]:
    """Call each side once per round, and begin each round with another side. Return the results by side."""
    found: dict[S, list[T]] = {name: [] for name in sides}
    names = list(sides)
    turns = [name for i in range(rounds) for name in (*names[i % len(names) :], *names[: i % len(names)])]
    for name in progress(turns, title) if title else turns:
        found[name].append(sides[name]())
    return found


def progress(turns: Sequence[T], title: str) -> Iterable[T]:
    return track(turns, title, console=Console(stderr=True), transient=True)


def spread(values: Sequence[float], form: str = ".2f") -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}}–{max(values):{form}})"


def show(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Print rows as a table. The keys of the first row are the columns, and numbers are aligned on the right."""
    table = Table(title=title, title_justify="left")
    for name, value in rows[0].items() if rows else ():
        table.add_column(name, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*map(cell, row.values()))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def cell(value: object) -> str:
    """Return the text of a value in a table: `1,234`, `0.25`, `–` for None."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if type(value) is int else str(value)


def put_between(page: Path, begin: str, end: str, text: str) -> None:
    whole = page.read_text(encoding="utf-8")
    before, after = whole.split(begin)[0], whole.split(end)[1]
    write_text(page, f"{before}{begin}\n\n{text}\n\n{end}{after}")


def write_recipe(file: Path, values: Mapping[str, Any]) -> Path:
    file.write_text(f"{yaml_text(json.loads(json.dumps(values)))}\n", encoding="utf-8")
    return file


def hotbed(*argv: object) -> None:
    """Run a command of hotbed in this process. Exit if it fails."""
    from hotbed.cli.main import main  # here, because the machines of some benchmarks lack what commands need

    if status := main([str(arg) for arg in argv]):
        raise SystemExit(status)


def python(*argv: object, env: Mapping[str, str] | None = None) -> str:
    """Run Python with these arguments in a process of its own, and return what it prints.

    Raises
    ------
    HotbedError
        If the process fails.
    """
    command = [sys.executable, *map(str, argv)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "hotbed: error" in line]
        raise HotbedError(f"{' '.join(command[1:4])} failed: {lines[0] if lines else done.stderr[-2000:]}")
    return done.stdout


def last_json(*argv: object, env: Mapping[str, str] | None = None) -> Any:
    """Run Python like `python`, and read the last line that it prints as JSON."""
    return json.loads(python(*argv, env=env).splitlines()[-1])


def read_json(file: Path | None) -> dict[str, Any]:
    """Return the content of a results file, or an empty dict if there is none."""
    return json.loads(file.read_text(encoding="utf-8")) if file is not None and file.is_file() else {}


class RankError(HotbedError):
    """A rank failed or did not end in time. The message has its rank and the end of its stderr."""


def outputs_of_ranks(ranks: Sequence[subprocess.Popen[str]], timeout_s: float | None = None) -> list[str]:
    """Wait until all ranks have ended, and return what each printed to stdout.

    Raises
    ------
    RankError
        If a rank fails, or has not ended after ``timeout_s``. The other ranks are killed.
    """
    problem: tuple[int, str] | None = None
    with ThreadPoolExecutor(len(ranks)) as readers:
        outputs = [readers.submit(process.communicate) for process in ranks]
        try:
            ended = (outputs.index(output) for output in as_completed(outputs, timeout_s))
            failed = next((rank for rank in ended if ranks[rank].returncode != 0), None)
            if failed is not None:
                problem = failed, f"failed with exit status {ranks[failed].returncode}"
        except TimeoutError:
            late = [rank for rank, output in enumerate(outputs) if not output.done()]
            problem = late[0], f"had not ended after {timeout_s} s (late: {late})"
        finally:
            for process in ranks:
                process.kill()
    if problem is not None:
        rank, what = problem
        raise RankError(f"rank {rank} {what}; its stderr ends with:\n{outputs[rank].result()[1][-4000:]}")
    return [output.result()[0] for output in outputs]
