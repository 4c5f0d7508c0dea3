"""Measure exchanges between ranks of this machine: all-to-all and all-reduce, by number of ranks and bytes.

The collectives are hotbed's own: the pairwise all-to-all of rows and gradients (`Link.exchange`), and the sum of dense
gradients along a tree (`mean_over_ranks_`). Every rank is a process. It uses one GPU and NCCL, or the CPU cores, which
ranks share, and Gloo. This module is the program of a rank.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from hotbed.comm import Link
from hotbed.config import ParallelRecipe
from hotbed.embed.dense_parallel import mean_over_ranks_
from hotbed.train.ranks.process_group import process_group, run_local

WARMUP = 2
"""Exchanges before the measurement, in which TCP's windows grow and NCCL creates its channels."""
_BYTES_PER_REPEAT = 4 << 20
_MOST_CALLS = 50
"""One measurement repeats a small exchange until it moves `_BYTES_PER_REPEAT`, at most `_MOST_CALLS` times."""
TIMEOUT_S = 300


def exchange_seconds(
    ranks: int, sizes: Sequence[int], repeats: int, device: torch.device
) -> dict[str, dict[int, list[float]]]:
    """Start ranks, and return the seconds of the slowest rank in each repeat, by collective (`KINDS`) and bytes.

    For an all-to-all, the bytes are the bytes from one rank to another. For an all-reduce, they are the bytes of the
    tensor.
    """
    job = {"sizes": list(sizes), "repeats": repeats, "device": device.type}
    found = run_ranks(__name__, job, ranks)
    return {kind: {int(size): seconds for size, seconds in by.items()} for kind, by in found.items()}


def run_ranks(module: str, job: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Run a module as the ranks of this machine, and return the result that the first rank passes to `write_found`."""
    with TemporaryDirectory(prefix="hotbed-") as folder:
        run_local([sys.executable, "-m", module, json.dumps({**job, "folder": folder})], ranks, Path(folder))
        return json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))


def write_found(job: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Write a rank's result for `run_ranks`."""
    (Path(job["folder"]) / "found.json").write_text(json.dumps(found), encoding="utf-8")


def rates(kind: str, ranks: int, by_size: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
    """Return the bytes/s of each repeat, by bytes, as `hotbed.plan.hardware.Hardware` defines them."""
    copies = ranks - 1 if kind == "all_to_all" else 1
    return {size: [copies * size / s for s in seconds] for size, seconds in by_size.items()}


def seconds_per_message(ranks: int, by_size: Mapping[int, Sequence[float]]) -> list[float]:
    """Return the fixed cost of a message in each repeat: seconds of the smallest all-to-all ÷ messages per rank."""
    return [seconds / (ranks - 1) for seconds in by_size[min(by_size)]]


# -- one rank -------------------------------------------------------------------------------------------------------


def _measure(job: Mapping[str, Any]) -> None:
    """Measure as one of the ranks. The first rank writes the results."""
    with process_group(ParallelRecipe(timeout_s=TIMEOUT_S), job["device"]):
        device = torch.device(job["device"])
        link = Link()
        found = {
            kind: {size: _repeats(make(link, size, device), link, size, job) for size in job["sizes"]}
            for kind, make in KINDS.items()
        }
        if link.rank == 0:
            write_found(job, found)


def _all_to_all(link: Link, size: int, device: torch.device) -> Callable[[], None]:
    outgoing = torch.full((link.size, size), link.rank, dtype=torch.uint8, device=device)
    incoming = torch.full_like(outgoing, 255)

    def call() -> None:
        link.exchange("bytes", list(outgoing), list(incoming)).wait()

    call()
    if incoming[:, 0].tolist() != list(range(link.size)):
        raise RuntimeError(f"rank {link.rank} received other values than the other ranks have sent")
    return call


def _all_reduce(link: Link, size: int, device: torch.device) -> Callable[[], None]:
    values = torch.ones(max(size // 4, 1), device=device)

    def call() -> None:
        mean_over_ranks_(values, link)

    return call


KINDS = {"all_to_all": _all_to_all, "all_reduce": _all_reduce}


def _repeats(call: Callable[[], None], link: Link, size: int, job: Mapping[str, Any]) -> list[float]:
    """Return the seconds per call of the slowest rank in each repeat."""
    calls = min(max(_BYTES_PER_REPEAT // (size * link.size), 1), _MOST_CALLS)
    for _ in range(WARMUP):
        call()
    taken: list[float] = []
    for _ in range(job["repeats"]):
        dist.barrier()
        _synchronize(job["device"])
        start = time.perf_counter()
        for _ in range(calls):
            call()
        _synchronize(job["device"])
        taken.append((time.perf_counter() - start) / calls)
    slowest = torch.tensor(taken, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)  # a CPU tensor is reduced over Gloo, also if there is NCCL
    return slowest.tolist()


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    _measure(json.loads(sys.argv[1]))
