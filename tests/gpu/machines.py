"""Say how much of its memory's bandwidth a GPU can ask for with a kernel, by latency alone.

Little's law: bytes in flight = bandwidth × latency. A program of a kernel asks for its bytes in as many waits as its
loads depend on each other, and a multiprocessor holds as many programs as registers, warps and shared memory let it.
Shares above 100 % say that latency is no longer the limit. Left out: misses of address translation, caches, writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEVEL_S = 1e-6
"""Seconds of a wait for a busy GPU's memory, a cautious figure: idle ones take 0.5 to 0.8. Of AMD's it is assumed."""

RUN = 32


@dataclass(frozen=True)
class Machine:
    """What data sheets say; `registers` and `shared_bytes` are of a multiprocessor, `lanes` the threads of a warp."""

    name: str
    processors: int
    bytes_per_s: float
    shared_bytes: int
    registers: int = 65536
    warps: int = 64
    blocks: int = 32
    lanes: int = 32
    own_shared_bytes: int = 1024
    """Shared memory that a program takes beside what it asks for."""


MACHINES = {
    "sm_80": Machine("A100 80 GB", 108, 2.039e12, 164 * 1024),
    "sm_90": Machine("H100 SXM", 132, 3.35e12, 228 * 1024),
    "sm_100": Machine("B200", 148, 8.0e12, 228 * 1024),
    "gfx942": Machine("MI300X", 304, 5.3e12, 64 * 1024, 131072, 32, 16, lanes=64, own_shared_bytes=0),
}


def resident(machine: Machine, registers: int, warps: int, shared_bytes: int) -> int:
    """Programs that a multiprocessor holds: each thread of a warp has registers in eights."""
    of_warp = -(-registers // 8) * 8 * machine.lanes
    shared_bytes += machine.own_shared_bytes
    # AMD's limit is one of barriers, and a single warp has none.
    blocks = machine.warps if warps == 1 and machine.lanes == 64 else machine.blocks
    return min(
        machine.registers // of_warp // warps,
        machine.warps // warps,
        machine.shared_bytes // shared_bytes if shared_bytes else blocks,
        blocks,
    )


def share(machine: Machine, programs: int, nbytes: float, waits: float) -> float:
    """Share of the bandwidth that these resident programs ask for, each ``nbytes`` in so many waits."""
    return programs * nbytes / (waits * LEVEL_S) * machine.processors / machine.bytes_per_s


def run_lengths(
    tables: int, rows: int, batch: int, bag: int, longest: int = RUN, skew: float = 1.05
) -> NDArray[np.int64]:
    """Occurrences of the runs of a batch, at most ``longest`` each, row by row; ids follow Zipf's law."""
    rng = np.random.default_rng(0)
    below = np.cumsum(1 / np.arange(1, rows + 1) ** skew)
    found: list[int] = []
    for _ in range(tables):
        ids = rng.permutation(rows)[np.searchsorted(below / below[-1], rng.random(batch * bag))]
        for count in np.unique(ids, return_counts=True)[1].tolist():
            found += [longest] * (count // longest) + ([count % longest] if count % longest else [])
    return np.array(found)


def tiles_s(machine: Machine, lengths: NDArray[np.int64], tile: int, programs: int, waits: int, turn: int) -> float:
    """Seconds of tiles of runs in this order: each waits for its longest, whose turns take four occurrences each."""
    padded = np.concatenate([lengths, np.ones(-len(lengths) % tile, np.int64)]).reshape(-1, tile)
    all_waits = waits + turn * np.ceil((padded.max(1) - 1) / 4)
    return float(all_waits.sum()) * LEVEL_S / (programs * machine.processors)
