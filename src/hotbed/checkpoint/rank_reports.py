"""Tell the first rank what the others have written of a checkpoint, or why they could not: a small file each.

Reports go through the checkpoint's own directory, ``rank-N.json``, so that ranks can write in threads beside training
without an exchange. What all ranks must know at once, in the thread of training, is exchanged.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from enum import IntEnum
from typing import Any

import torch

from hotbed.checkpoint.blocks import Entry
from hotbed.checkpoint.manifest import MOST_BYTES, SavedTile
from hotbed.checkpoint.storage import Directory
from hotbed.comm import Link
from hotbed.errors import CheckpointError

PATIENCE_S = 600.0
"""How long the first rank waits for another that has written no further file, and for any once it has failed itself."""
LAST_PATIENCE_S = 5.0
"""How long the first rank waits for the others' reports once training has failed."""
SAY_S = 0.25
"""Seconds between two messages of ranks that wait for a checkpoint; an exchange may take longer than that."""


class State(IntEnum):
    """How far a rank is with its files of a checkpoint."""

    WRITING = 0
    WRITTEN = 1
    FAILED = 2
    GIVEN_UP = 3
    """The first rank has failed, and waits no longer for others that still write."""


class OtherRankError(CheckpointError):
    """What the first rank heard of another's failure."""


class RankReports:
    """The reports of a checkpoint's ranks.

    ``token`` and ``attempt`` are those of this attempt to save it; reports with another token are not read. The first
    rank does not wait for reports of ranks that are known to have ``failed``.
    """

    def __init__(self, place: Directory, token: str, attempt: str, rank: int, size: int) -> None:
        self._place, self._token, self._attempt, self._rank, self._size = place, token, attempt, rank, size
        self._deadline = float("inf")
        self.failed: Set[int] = frozenset()

    def hurry(self) -> None:
        """Wait no longer for ranks that may be gone."""
        self._deadline = time.monotonic() + LAST_PATIENCE_S

    def name(self, rank: int) -> str:
        """Name a rank's report."""
        return f"rank-{rank}-{self._attempt}.json" if self._attempt else f"rank-{rank}.json"

    def write(self, files: Mapping[str, Entry], tiles: Mapping[str, Sequence[SavedTile]]) -> None:
        """Report what this rank wrote."""
        self._write({"files": files, "tiles": {n: [t.to_dict() for t in of] for n, of in tiles.items()}})

    def write_error(self, error: BaseException) -> None:
        """Report an error, so that the first rank does not wait; a report that cannot be written, neither is this."""
        with suppress(OSError):
            self._write({"error": str(error) or type(error).__name__})

    def _write(self, report: Mapping[str, Any]) -> None:
        if self._rank != 0:
            self._place.write(self.name(self._rank), json.dumps({"token": self._token, **report}))

    def read(self, rank: int) -> dict[str, Any]:
        """Wait for a rank's report, for as long as it goes on writing files.

        Raise `OtherRankError` if it could not write its files, `CheckpointError` if no report came, or one that cannot
        be.
        """
        from hotbed.checkpoint import schema  # with pydantic, which only reading needs

        name = self.name(rank)
        start = seen = time.monotonic()
        written = 0
        while time.monotonic() < min(seen + PATIENCE_S, self._deadline):
            count = sum(file.startswith(f"tables-{rank:05d}-") for file in self._place.names())
            if count != written:
                seen, written = time.monotonic(), count
            failed = rank in self.failed  # asked before the report, which is written first
            if self._place.has(name):
                report = schema.parsed(self._place.read(name, MOST_BYTES), f"{self._place}/{name}")
                if report.get("token") == self._token:
                    schema.check_report(report, f"{self._place}/{name}")
                    if "error" in report:
                        raise OtherRankError(f"{self._place} was not saved: rank {rank} failed: {report['error']}")
                    return report
            if failed:
                raise OtherRankError(f"{self._place} was not saved: rank {rank} failed; its own output says why")
            time.sleep(min(0.02 + (time.monotonic() - start) / 20, 1.0))
        waited = time.monotonic() - start
        raise CheckpointError(
            f"{self._place} was not saved: rank {rank} has not written {name} in {waited:,.0f} s; all ranks must see "
            "one directory, on a shared file system or an object store"
        )

    def remove(self) -> None:
        """Remove all of them."""
        for rank in range(1, self._size):
            self._place.remove(self.name(rank))


def from_first(link: Link | None, first: Callable[[], str]) -> str:
    """Call something on the first rank and return its result, at most 32 letters, on all ranks, or raise on all."""
    if link is None:
        return first()
    error: Exception | None = None
    text = ""
    if link.rank == 0:
        try:
            text = first()
        except Exception as raised:
            error = raised
    sent = torch.tensor(list(text.encode().ljust(32, b"\0")), dtype=torch.uint8, device=link.device)
    came = bytes(link.broadcast("the checkpoint's token", sent, 0).wait().tolist()).rstrip(b"\0").decode()
    if error is not None:
        raise error
    if not came:
        raise CheckpointError("rank 0 could not make the checkpoint's directory; its own output says why")
    return came


def exchange_states(link: Link | None, own: State) -> list[State]:
    """List how far each rank is; all must call this."""
    if link is None:
        return [own]
    states = link.all_gather("whether the checkpoint was written", torch.tensor([own], device=link.device)).wait()
    return [State(state) for state in states.flatten().tolist()]
