"""What ``hotbed bench ops`` and ``hotbed bench step`` do: measure, print, return what ``--json`` writes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numba
import torch
from rich.console import Console
from rich.live import Live

from hotbed.bench.ops import bench_ops
from hotbed.bench.options import OPTIONS, OpsOptions, StepOptions
from hotbed.bench.report import print_ops, print_step
from hotbed.bench.step import bench_step
from hotbed.train.report import environment


def bench(what: str, options: Mapping[str, Any], out: Console, progress: Console) -> dict[str, Any]:
    """Measure and print.

    Parameters
    ----------
    what
        ``"ops"`` or ``"step"``.
    options
        Fields of its options.
    out
        Where the tables go.
    progress
        Where it says what it is doing.

    Returns
    -------
    dict
        As described in `hotbed.bench`.

    Raises
    ------
    HotbedError
        If an option cannot be right, or it does not fit into memory.
    """
    made = OPTIONS[what](**options)
    with _stages(progress) as tell:
        found = bench_step(made, tell) if isinstance(made, StepOptions) else bench_ops(made, tell)
    result = {
        "command": f"bench {what}",
        "environment": _environment(made),
        "settings": made.settings(),
        **found,
    }
    (print_step if what == "step" else print_ops)(out, result)
    return result


@contextmanager
def _stages(console: Console) -> Generator[Callable[[str], None]]:
    """Show what is done now: on a terminal in one line, else in a line each.

    No thread redraws it, which would take time from what is measured.
    """
    if not console.is_terminal:
        yield lambda stage: console.print(f"{stage} …")
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda stage: live.update(f"{stage} …", refresh=True)


def _environment(options: OpsOptions) -> dict[str, Any]:
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    return {
        **environment(options.place()),
        "threads": torch.get_num_threads(),
        "numba": numba.__version__,
        "triton": triton,
    }
