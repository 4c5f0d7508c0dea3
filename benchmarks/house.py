"""Count the files that a reader opens to follow a command: ``python -m benchmarks.house [--files] [--json FILE]``.

A journey runs a command in a fresh process until a certain call. A file counts if a function of it is called, in
the order of the first call. Modules that are only imported do not count, nor functions that an import calls.

- *train to first kernel*: ``hotbed train recipe.yaml`` of `TINY` until the first kernel fills a table.
- *train to first lookup*: the same command until the first step looks up rows, so with loaders and callbacks.
- *request to score*: a row to ``POST /score`` of a server in this process until its score is answered, in all threads.
  An earlier request has warmed the server up.
"""

from __future__ import annotations

import http.client
import inspect
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch.multiprocessing as mp

import hotbed as hb
from benchmarks import runner
from hotbed.files import write_json

PACKAGE = Path(hb.__file__).parent
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


class Walk:
    """Notes the files and functions of the package that are called while a walk is active."""

    def __init__(self, stop: Callable[[str, str], bool] = lambda file, function: False) -> None:
        self.entered: dict[str, list[str]] = {}
        self.active, self.last, self._stop, self._seen = True, 0.0, stop, set[CodeType]()

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call, as a profiling function of Python."""
        code = frame.f_code
        if event != "call" or not code.co_flags & inspect.CO_OPTIMIZED or (file := file_of(code)) is None:
            return
        self.last = time.monotonic()
        if not self.active or code in self._seen:
            return
        if not any(of.co_name == "<module>" and file_of(of) is not None for of in stack_of(frame)):
            self._seen.add(code)
            self.entered.setdefault(file, []).append(code.co_name)
            self.active = not self._stop(file, code.co_name)

    def wait_until_quiet(self) -> None:
        """Wait until no thread has called a function of the package for 0.3 s."""
        self.last = time.monotonic()
        while time.monotonic() - self.last < 0.3:
            time.sleep(0.03)


def file_of(code: CodeType) -> str | None:
    prefix = f"{PACKAGE}{os.sep}"
    inside = code.co_filename.startswith(prefix)
    return code.co_filename.removeprefix(prefix).replace(os.sep, "/") if inside else None


def stack_of(frame: FrameType) -> Iterator[CodeType]:
    at: FrameType | None = frame
    while at is not None:
        yield at.f_code
        at = at.f_back


def train_until(*kernels: str) -> dict[str, list[str]]:
    """Return the files that `hotbed train` enters until the first call of one of these kernels."""
    walk = Walk(lambda file, function: file.startswith("ops/cpu") and function in kernels)
    sys.setprofile(walk.note)
    runner.hotbed("train", "recipe.yaml")
    sys.setprofile(None)
    return walk.entered


def request_to_score() -> dict[str, list[str]]:
    """Return the files that all threads of a server enter for one request."""
    from hotbed.serve.options import ServeOptions
    from hotbed.serve.served_model import ServedModel
    from hotbed.serve.server import Served, Server, listen

    runner.hotbed("train", "recipe.yaml")
    runner.hotbed("export", "runs/tiny", "model")
    options, walk = ServeOptions(port=0), Walk()
    walk.active = False
    threading.setprofile(walk.note)
    server = Server([Served("tiny", ServedModel.open("model"))], options, listen(options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    server.started.wait()
    connection = http.client.HTTPConnection(server.host, server.port)
    for is_counted in (False, True):
        walk.wait_until_quiet()
        walk.active = is_counted
        connection.request("POST", "/score", json.dumps([{"user": 3, "item": 2, "price": 0.5}]))
        answer = json.loads(connection.getresponse().read())
        if len(answer.get("scores", [])) != 1:
            raise RuntimeError(f"the server returned no score: got {answer}")
    walk.wait_until_quiet()
    connection.close()
    server.stop()
    thread.join()
    return walk.entered


JOURNEYS: dict[str, Callable[[], dict[str, list[str]]]] = {
    "train to first kernel": lambda: train_until("initial_values_", "lookup"),
    "train to first lookup": lambda: train_until("lookup"),
    "request to score": request_to_score,
}


def _journey(_: int, name: str, folder: str) -> None:
    os.chdir(folder)
    columns: dict[str, Any] = {"click": [i % 2 for i in range(256)], "price": [i / 256 for i in range(256)]}
    columns |= {"user": [i % 50 for i in range(256)], "item": [i % 9 for i in range(256)]}
    Path("data").mkdir()
    for split in ("train", "valid", "test"):
        pq.write_table(pa.table(columns), f"data/{split}.parquet")
    Path("recipe.yaml").write_text(TINY, encoding="utf-8")
    write_json(Path("found.json"), JOURNEYS[name]())


def journey(name: str) -> dict[str, list[str]]:
    """Return the files of a journey with their functions, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_journey, (name, folder), nprocs=1)
        return runner.read_json(Path(folder) / "found.json")


def main() -> None:
    parser = runner.arguments(__doc__)
    parser.add_argument("--files", action="store_true", help="List the files of journeys with their functions.")
    args = parser.parse_args()
    journeys = {name: journey(name) for name in JOURNEYS}
    runner.show("journeys", [{"journey": name, "files": len(files)} for name, files in journeys.items()])
    for name, files in journeys.items() if args.files else ():
        lines = (f"{n:3} {file}: {', '.join(of)}" for n, (file, of) in enumerate(files.items(), 1))
        print(f"\n{name}:", *lines, sep="\n")
    if args.json:
        write_json(args.json, {"journeys": journeys})


if __name__ == "__main__":
    main()
