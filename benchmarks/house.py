"""How far does a reader walk in the code? Files and functions by size, the files that a training step enters, imports.

    python -m benchmarks.house [--files] [--only journeys] [--json FILE]

*Source.* Files ``*.py`` of the package that is imported, and their lines, all of them. A function's lines go from its
``def`` to its end; its docstring is counted in ``lines`` and not in ``code``. It has an example if the docstring has a
line with ``>>>``, or one that ends in ``:`` or ``::`` with an indented line after it (blank lines between them or not).
``raises`` counts the statements that raise an error, in all and per 1,000 lines.

*Step.* Two tables of one dim, one feature each, row-wise AdaGrad: in one process with all rows in memory; in two ranks
over Gloo, rows cut over both, the first counted; in one process with all rows in a file and a cache that is too small.
Batches are there already, so reading data is not counted. After `WARM_UP` steps one is counted:

- of the ``tables`` alone, for comparison with other libraries: a loop that calls the `EmbeddingCollection`, adds up all
  vectors, calls ``backward`` and the optimizer's ``step``;
- of the ``Trainer``, with a DLRM around the tables and Adam: from where callbacks are told of a step to where they are
  told of the next, so with the loss, checks, schedules, and what is prepared ahead for the batch after it.

`sys.setprofile` counts in the main thread, `threading.setprofile` in all that Python starts. Counting begins and ends
when nothing has been called for `QUIET_S`, so what threads still do belongs to the step that asked for it. Moves of
the ``Trainer`` with rows in a file differ by some percent, by what of the read-ahead is there in time.

- *call*: a ``call`` event of a Python function whose code is in a file of the package; going back into a generator is
  one, too. Comprehensions and generator expressions are no functions, so no calls. Functions of C and of Numba, and
  code without a file, as the ``__init__`` of dataclasses, are not the package's.
- *files*: distinct files of the functions called.
- *moves*: calls that follow, in the same thread, a call into another file; the first of a thread is none.
- *calls into others*: calls whose caller, the next frame of the package on the stack, is in another file.
- *frames*: the most functions of the package on the stack of one thread at a call. In the column ``()`` with
  comprehensions, which are frames of their own in some versions of Python.

*Journeys.* How many files does a reader open to follow a command from its start to a certain call? `journey` runs the
command in a fresh process and lists the distinct files of the package in the order of their first call, up to and with
the file of that call. It counts the functions that are called in the main thread, whatever calls them. It does not
count modules that are only imported, nor functions that an import calls (a body of a module of the package is on the
stack). A nested function, a lambda, a comprehension or a generator expression counts as the file that it is in.
``path`` is the part of these files that has a function on the stack at that call: the shortest way to it.

- *train to first kernel*: ``hotbed train recipe.yaml`` of `TINY`, a DLRM with two tables in memory and Parquet files,
  until the first kernel of `hotbed.ops` is called. This kernel fills a table with initial values.
- *train to first lookup*: the same command until the first step looks up rows, so with loaders, callbacks and the loop.
- *request to score*: a row to ``POST /score`` of a server in this process, until its score is answered. All threads are
  counted, as in a step, and no path. An earlier request has warmed the server up.

*Imports.* Medians of fresh processes: seconds of ``import torch`` and ``import hotbed`` inside, of all of ``--help``.
"""

from __future__ import annotations

import argparse
import ast
import http.client
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table as View

import hotbed as hb

PACKAGE = Path(hb.__file__).parent
WARM_UP = 6
"""Steps before the one that is counted."""
QUIET_S = 0.3
SHORT, LONG, LONG_FUNCTION = 80, 400, 40
"""Lines: of files that should be few, of none, and of functions that need an example."""
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}


class Function(NamedTuple):
    """A function of the source, and how long it is."""

    name: str
    where: str
    lines: int
    code: int
    example: bool


def functions(file: str, text: str) -> Iterator[Function]:
    """All functions and methods of a file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring, first = ast.get_docstring(node), node.body[0]
            lines, documented = (1 + (n.end_lineno or n.lineno) - n.lineno for n in (node, first))
            code = lines - (documented if docstring is not None else 0)
            yield Function(node.name, f"{file}:{node.lineno}", lines, code, has_example(docstring or ""))


def has_example(docstring: str) -> bool:
    """Whether a docstring has a session, or an indented picture after a line that ends in a colon."""
    lines = [line.rstrip() for line in docstring.splitlines() if line.strip()]
    indents = [len(line) - len(line.lstrip()) for line in lines]
    after = zip(lines, indents, indents[1:], strict=False)
    return any(">>>" in line for line in lines) or any(line[-1] == ":" and b > a for line, a, b in after)


def source(package: Path) -> dict[str, Any]:
    """Files and lines of a package, in all and by its own packages; its long functions."""
    texts = {f.relative_to(package).as_posix(): f.read_text(encoding="utf-8") for f in sorted(package.rglob("*.py"))}
    lines = {file: len(text.splitlines()) for file, text in texts.items()}
    of = [(file.split("/")[0] if "/" in file else ".", count) for file, count in lines.items()]
    counts = {package: [count for other, count in of if other == package] for package, _ in of}
    raises = Counter[str]()
    for (name, _), text in zip(of, texts.values(), strict=True):
        raises[name] += sum(isinstance(node, ast.Raise) for node in ast.walk(ast.parse(text)))
    long = [f for file, text in texts.items() for f in functions(file, text) if f.lines > LONG_FUNCTION]
    return {
        "files": len(lines),
        "lines": sum(lines.values()),
        "short_files": [file for file, count in lines.items() if count < SHORT],
        "long_files": [file for file, count in lines.items() if count > LONG],
        "raises": raises.total(),
        "packages": {n: {"files": len(of), "lines": sum(of), "raises": raises[n]} for n, of in counts.items()},
        "long_functions": [f._asdict() for f in sorted(long, key=lambda f: (-f.code, f.where))],
    }


class Call(NamedTuple):
    """A call of a function of the package."""

    thread: str
    file: str
    function: str
    caller: str | None  # file of the next frame of the package on the stack
    frames: int
    comprehensions: int  # that wait on the stack


class Walk:
    """Notes the calls of a package's functions while ``counting``, here and in threads that are started from now on."""

    def __init__(self, package: Path) -> None:
        self.calls: list[Call] = []
        self.counting, self._last = False, 0.0
        self._prefix = str(package) + os.sep
        self._files: dict[CodeType, str | None] = {}
        threading.setprofile(self._seen)

    def start(self) -> None:
        """Count from now on, once nobody is at work."""
        self._wait()
        self.counting, self._before = True, sys.getprofile()
        sys.setprofile(self._seen)

    def stop(self) -> None:
        """Count until nobody is at work."""
        sys.setprofile(self._before)
        self._wait()
        self.counting = False
        threading.setprofile(None)  # type: ignore[arg-type]

    def _wait(self) -> None:
        self._last = time.monotonic()
        while time.monotonic() - self._last < QUIET_S:
            time.sleep(QUIET_S / 10)

    def _file(self, code: CodeType) -> str | None:
        """The code's file within the package; None of what is elsewhere."""
        if code not in self._files:
            within = code.co_filename.startswith(self._prefix)
            self._files[code] = code.co_filename.removeprefix(self._prefix).replace(os.sep, "/") if within else None
        return self._files[code]

    def _seen(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or (file := self._file(code)) is None or code.co_name in COMPREHENSIONS:
            return
        self._last = time.monotonic()
        if self.counting:
            waiting = list(self._waiting(frame))
            callers = [caller for caller, name in waiting if name not in COMPREHENSIONS]
            thread, name = threading.current_thread().name, getattr(code, "co_qualname", code.co_name)
            caller, frames = callers[0] if callers else None, 1 + len(callers)
            self.calls.append(Call(thread, file, name, caller, frames, len(waiting) - len(callers)))

    def _waiting(self, frame: FrameType) -> Iterator[tuple[str, str]]:
        """Files and functions of the package's frames that wait for this one, the caller's first."""
        at = frame.f_back
        while at is not None:
            if (file := self._file(at.f_code)) is not None:
                yield file, at.f_code.co_name
            at = at.f_back

    def found(self) -> dict[str, Any]:
        """What was counted, and the functions called by file, both in the order of their first call."""
        entered: dict[str, dict[str, None]] = {}
        last: dict[str, str] = {}
        moves = 0
        for call in self.calls:
            entered.setdefault(call.file, {})[call.function] = None
            moves += last.get(call.thread, call.file) != call.file
            last[call.thread] = call.file
        return {
            "files": len(entered),
            "moves": moves,
            "calls_into_others": sum(call.caller not in (None, call.file) for call in self.calls),
            "frames": max((call.frames for call in self.calls), default=0),
            "frames_with_comprehensions": max((call.frames + call.comprehensions for call in self.calls), default=0),
            "calls": len(self.calls),
            "threads": len(last),
            "entered": {file: list(names) for file, names in entered.items()},
        }


def journey(name: str, start: Callable[[], object], stop: Callable[[str, str], bool]) -> dict[str, Any]:
    """Call ``start``, and list the files of the package that this thread enters until ``stop`` is true.

    Parameters
    ----------
    name
        Name of the journey, for errors.
    start
        What is called; it runs to its end, also after ``stop``.
    stop
        Maps the file within the package and the name of a function to whether the journey ends with its call. It is
        asked once per function.
    """
    prefix, files, path, asked = f"{PACKAGE}{os.sep}", dict[str, list[str]](), list[str](), set[CodeType]()

    def within(code: CodeType) -> str | None:
        inside = code.co_filename.startswith(prefix)
        return code.co_filename.removeprefix(prefix).replace(os.sep, "/") if inside else None

    def seen(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or code in asked or not code.co_flags & inspect.CO_OPTIMIZED or within(code) is None:
            return
        stack, at = list[CodeType](), frame
        while at is not None:
            stack.append(at.f_code)
            at = at.f_back
        if any(of.co_name == "<module>" and within(of) for of in stack):
            return
        asked.add(code)
        file, function = within(code) or "", code.co_name
        files.setdefault(file, []).append(function)
        if stop(file, function):
            sys.setprofile(None)
            path[:] = dict.fromkeys(found for of in reversed(stack) if (found := within(of)) is not None)

    sys.setprofile(seen)
    try:
        start()
    finally:
        sys.setprofile(None)
    if not path:
        raise RuntimeError(f"the journey '{name}' ended without the call that it was to lead to")
    return {"files": len(files), "path": len(path), "entered": files, "on_path": path}


TINY = """
name: tiny
data:
  path: data
  dim: 4
  source:
    class_path: hotbed.data.ParquetSource
    init_args:
      schema: {labels: [click], dense: [price], sparse: [{name: user, rows: 100}, {name: item, rows: 100}]}
model: {class_path: hotbed.nn.DLRM, init_args: {bottom: [8, 4], top: [8, 1]}}
dense_optimizer: {class_path: torch.optim.Adam, init_args: {lr: 0.01}}
sparse_optimizer: {class_path: hotbed.optim.RowWiseAdagrad, init_args: {lr: 0.01}}
train: {batch_size: 64, device: cpu, precision: fp32, steps: 2}
"""
"""Recipe of the journeys of training."""


def write_tiny() -> None:
    """Write `TINY` and its data into the working directory."""
    n = 256
    columns = {
        "click": [i % 2 for i in range(n)],
        "user": [i % 50 for i in range(n)],
        "item": [i % 9 for i in range(n)],
    }
    Path("data").mkdir()
    for split in ("train", "valid", "test"):
        pq.write_table(pa.table({**columns, "price": [i / n for i in range(n)]}), f"data/{split}.parquet")
    Path("recipe.yaml").write_text(TINY, encoding="utf-8")


def train_until(name: str, kernels: Collection[str]) -> dict[str, Any]:
    """Count the files from ``hotbed train recipe.yaml`` to the first call of one of these kernels on CPUs."""
    from hotbed.cli.main import main as hotbed

    write_tiny()
    return journey(
        name, lambda: hotbed(["train", "recipe.yaml"]), lambda file, f: file[:7] == "ops/cpu" and f in kernels
    )


def request_to_score() -> dict[str, Any]:
    """Count the files from the arrival of a request at a server to the answer with its score, in all threads."""
    from hotbed.cli.main import main as hotbed
    from hotbed.serve.options import ServeOptions
    from hotbed.serve.served_model import ServedModel
    from hotbed.serve.server import Served, Server, listen

    write_tiny()
    hotbed(["train", "recipe.yaml"])
    hotbed(["export", "runs/tiny", "model"])
    options, walk = ServeOptions(port=0), Walk(PACKAGE)
    server = Server([Served("tiny", ServedModel.open("model"))], options, listen(options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    server.started.wait()
    connection = http.client.HTTPConnection(server.host, server.port)

    def ask() -> None:
        connection.request("POST", "/score", json.dumps([{"user": 3, "item": 2, "price": 0.5}]))
        answer = json.loads(connection.getresponse().read())
        if len(answer.get("scores", [])) != 1:
            raise RuntimeError(f"the server gave no score: {answer}")

    ask()
    walk.start()
    ask()
    walk.stop()
    connection.close()
    server.stop()
    thread.join()
    found = walk.found()
    return {"files": found["files"], "path": 0, "entered": found["entered"], "on_path": []}


JOURNEYS: dict[str, Callable[[], dict[str, Any]]] = {
    "train to first kernel": lambda: train_until("train to first kernel", ("initial_values_", "lookup")),
    "train to first lookup": lambda: train_until("train to first lookup", ("lookup",)),
    "request to score": request_to_score,
}
"""By name, what counts a journey, in a process and an empty working directory of its own."""


def _journey_process(_: int, name: str, folder: str) -> None:
    os.chdir(folder)
    Path("found.json").write_text(json.dumps(JOURNEYS[name]()), encoding="utf-8")


def count_journey(name: str) -> dict[str, Any]:
    """Count a journey in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_journey_process, (name, folder), nprocs=1)
        return json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))


class Case(NamedTuple):
    """Where the rows are."""

    name: str
    ranks: int = 1
    cut: Mapping[str, Any] | None = None


CASES = (
    Case("memory"),
    Case("two ranks", 2, {"rows": 0}),
    Case("disk and cache", 1, {"rows": 0, "tier": "disk", "cache_rows": 128}),
)
LOOPS = ("tables", "Trainer")
TABLES, ROWS, DIM, INPUTS, SAMPLES = 2, 1000, 16, 3, 64
TRAIN = {"steps": WARM_UP + 3, "device": "cpu", "precision": "fp32", "log_every": 1000, "checkpoint": "none"}


def step(case: Case, loop: str, rank: int = 0) -> dict[str, Any]:
    """Train until a step is warm, and count the calls of the next."""
    walk, draw = Walk(PACKAGE), torch.Generator().manual_seed(rank)
    torch.manual_seed(0)
    names = [f"t{i}" for i in range(TABLES)]
    tables = [hb.Table(name, rows=ROWS, dim=DIM) for name in names]
    features = [hb.Feature(name, table=name) for name in names]
    model: Any = torch.nn.ModuleDict({"tables": hb.EmbeddingCollection(tables, features)})
    if loop == "Trainer":
        model = hb.nn.DLRM(tables, features, INPUTS, bottom=(32, DIM), top=(32, 1))
    if case.cut is not None:
        model = hb.distribute(model, hb.make_plan(tables, case.ranks, hb.Cut(**case.cut)))
    sparse = hb.optim.RowWiseAdagrad(model, lr=0.05)

    def batch() -> hb.Batch:
        ids = {name: torch.randint(0, ROWS, (SAMPLES,), generator=draw) for name in names}
        numbers = torch.rand(SAMPLES, INPUTS, generator=draw)
        return hb.Batch(sparse=hb.Jagged.from_dict(ids), dense=numbers, labels=numbers[:, :1].round())

    class Count(hb.Callback):
        def on_step(self, trainer: hb.Trainer, loss: float) -> None:
            if trainer.step == WARM_UP:
                walk.start()
            elif trainer.step == WARM_UP + 1:
                walk.stop()

    batches = [batch() for _ in range(WARM_UP + 6)]  # more than are counted: the Trainer prepares them ahead
    if loop == "Trainer":
        recipe = get_type_hints(hb.Recipe)["train"](batch_size=SAMPLES * case.ranks, **TRAIN)
        dense = torch.optim.Adam(model.parameters())
        hb.Trainer(model, dense, sparse, recipe=recipe, callbacks=[Count()]).fit(batches)
        return walk.found()
    collection = getattr(model, "module", model)["tables"]
    for number, of_step in enumerate(batches[: WARM_UP + 1]):
        if number == WARM_UP:
            walk.start()
        collection(of_step.sparse).concatenate().sum().backward()
        sparse.step()
    walk.stop()
    return walk.found()


def _process(rank: int, case: Case, folder: str) -> None:
    torch.set_num_threads(1)
    if case.ranks > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        where, timeout = f"file://{folder}/store", timedelta(minutes=5)
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=case.ranks, timeout=timeout)
    found = {loop: step(case, loop, rank) for loop in LOOPS}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    if case.ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def walked(case: Case) -> dict[str, Any]:
    """As `step`, of all loops, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, (case, folder), nprocs=case.ranks)
        return json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))


def imports(turns: int) -> dict[str, float]:
    """Median seconds of imports and of the command's help."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), *sys.path])}
    timed = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
    commands = {f"import {name}": ("-c", timed.format(name)) for name in ("torch", "hotbed")}
    commands |= {"hotbed --help": ("-m", "hotbed", "--help")}

    def seconds(command: Sequence[str]) -> float:
        start = time.perf_counter()
        printed = subprocess.run([sys.executable, *command], env=env, stdout=subprocess.PIPE, check=True).stdout
        return float(printed) if command[0] == "-c" else time.perf_counter() - start

    found = [[seconds(command) for command in commands.values()] for _ in range(turns)]
    return dict(zip(commands, map(statistics.median, zip(*found, strict=True)), strict=True))


def view(title: str, columns: str, rows: Sequence[Sequence[object]]) -> View:
    """A table of texts and numbers."""
    table = View(title=title, title_justify="left")
    for name, value in zip(columns.split(", "), rows[0] if rows else columns.split(", "), strict=True):
        table.add_column(name, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else f"{v:,}" if type(v) is int else str(v) for v in row))
    return table


def journey_views(journeys: Mapping[str, Any]) -> list[View]:
    """Journeys, and their files by package."""
    totals = [(name, found["files"], found["path"]) for name, found in journeys.items()]
    by_package = [Counter(f.split("/")[0] if "/" in f else "." for f in of["entered"]) for of in journeys.values()]
    packages = dict.fromkeys(package for counts in by_package for package in counts)
    rows = [(package, *(counts[package] for counts in by_package)) for package in packages]
    return [
        view("journeys", "journey, files, path", totals),
        view("files of journeys by package", ", ".join(["package", *journeys]), rows),
    ]


def views(results: Mapping[str, Any]) -> list[View]:
    """Everything but the files that a step enters."""
    of, long = results["source"], [Function(**f) for f in results["source"]["long_functions"]]
    bare = [f for f in long if not f.example]
    counts = [("files", of["files"]), ("lines", of["lines"]), ("raises", of["raises"])]
    counts += [("raises per 1,000 lines", round(1000 * of["raises"] / of["lines"], 1))]
    counts += [(f"files under {SHORT} lines", len(of["short_files"]))]
    counts += [(f"files over {LONG} lines", len(of["long_files"]))]
    counts += [(f"functions over {LONG_FUNCTION} lines", len(long)), ("… without an example", len(bare))]
    counts += [("… nor so short without their docstring", sum(f.code > LONG_FUNCTION for f in bare))]
    keys = ("files", "moves", "calls_into_others", "frames", "frames_with_comprehensions", "calls", "threads")
    walks = [(case, *walk) for case, loops in results["steps"].items() for walk in loops.items()]
    steps = [(case, loop, *(found[key] for key in keys)) for case, loop, found in walks]
    return [
        view("source", "what, how many", counts),
        view("packages", "package, files, lines, raises", [(name, *n.values()) for name, n in of["packages"].items()]),
        view(f"functions over {LONG_FUNCTION} lines", "function, where, lines, code, example", long),
        view("one step", "case, of, files, moves, into others, frames, (), calls, threads", steps),
        view("imports", "what, seconds", list(results["imports_s"].items())),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Count all, print and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="list the functions that a step enters, by file, in order")
    parser.add_argument("--only", choices=["journeys"], help="count nothing else")
    parser.add_argument("--turns", type=int, default=5, help="processes that time each import")
    parser.add_argument("--json", type=Path, help="write results here")
    args = parser.parse_args(argv)
    journeys = {name: count_journey(name) for name in JOURNEYS}
    results: dict[str, Any] = {"journeys": journeys, "python": sys.version}
    steps: dict[str, Any] = {}
    if args.only is None:
        steps = {case.name: walked(case) for case in CASES}
        results |= {"source": source(PACKAGE), "steps": steps, "imports_s": imports(args.turns)}
    console = Console(width=120)
    console.print(*([] if args.only else views(results)), *journey_views(journeys), sep="\n")
    for name, found in journeys.items() if args.files else ():
        lines = [f"{file}{' *' * (file in found['on_path'])}" for file in found["entered"]]
        console.print(f"\n{name} (*: path):", *(f"{n:3} {line}" for n, line in enumerate(lines, 1)), sep="\n")
    for case, loops in steps.items() if args.files else ():
        for loop, found in loops.items():
            lines = [f"{file}: {', '.join(names)}" for file, names in found["entered"].items()]
            console.print(f"\n{case}, {loop}:", *(f"{n:3} {line}" for n, line in enumerate(lines, 1)), sep="\n")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
