"""Options of loaders, and readers that die at chosen moments."""

from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor, Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster_cases import kill_at
from hypothesis import strategies as st

from hotbed.data.readers import WindowTask, read_window

loader_options = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 50),
        "shuffle": st.booleans(),
        "drop_last": st.booleans(),
        "seed": st.integers(0, 3),
        "window": st.integers(1, 4),
        "workers": st.integers(1, 3),
        "prefetch": st.integers(1, 5),
    }
)

PLACES = ("begin", "end")
"""Where in a task its reader is killed: before it has read anything, and before its window is sent."""


def dying(folder: Path, task: WindowTask) -> Any:
    """Read a window, and kill the reader at the moments that were drawn, named ``EPOCH-WINDOW-PLACE``."""
    name = "-".join(map(str, task.order[2:])) if task.order is not None else "in_order"
    kill_at(folder / f"{name}-begin")
    found = read_window(task)
    kill_at(folder / f"{name}-end")
    return found


def kill_readers_at(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let readers die at the moments of a folder."""
    patch.setattr("hotbed.data.readers.read_window", partial(dying, folder))


class Recorded(Executor):
    """Run calls at once, in this thread, or lose some of them; note what was asked for and what came back."""

    def __init__(self, lost: Iterator[bool] | None = None) -> None:
        self.asked = list[WindowTask]()
        self.results = list[Any]()
        self.lost = lost

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        self.asked.append(args[-1])
        if self.lost is not None and next(self.lost):
            future.set_exception(BrokenExecutor("a reader died"))
            return future
        try:
            self.results.append(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(self.results[-1])
        return future
