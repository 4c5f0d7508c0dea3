"""Find the rows of a dynamic table's ids, as training left them; changes evict ids, and give others a row.

The directory is that of training (`hotbed.embed.dynamic.Vocabulary`): an id's row is one of 128 of its set. It is a
file without a name that is mapped, a copy of what was exported, so it takes no memory that the system cannot reclaim.
Changes name ids, not rows; which free row of its set an id gets here is no matter.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.comm import Link
from hotbed.embed.dynamic import Reinitialized
from hotbed.errors import DamagedError
from hotbed.files import unnamed_file
from hotbed.ops import cpu_cache
from hotbed.ops.cpu_runtime import launch
from hotbed.serve.record_files import CHANGED_ROWS
from hotbed.specs import DYNAMIC_WAYS
from hotbed.store.keyed import positions

SETS_AT_ONCE = 1 << 13
"""Sets whose free rows are listed at once."""
COPIED_AT_ONCE = 1 << 20
"""Ids that are copied at once."""


class _Staged:
    """Changes that wait to be swapped in: rows that get free, and ids, rising, with the rows that they get."""

    def __init__(self, freed: Tensor, ids: Tensor, rows: Tensor) -> None:
        self.freed, self.ids, self.rows = freed, ids, rows


class ServedIds:
    """Rows of the ids of a dynamic table; a lookup never assigns a row.

    ``ids [R]`` has the id of each row, −1 if none. ``directory`` has the copy (default: the directory of temporary
    files).
    """

    def __init__(self, table: str, ids: NDArray[np.int64], directory: str | Path | None = None) -> None:
        self._table, self._directory = table, directory
        self._ids = self._copied(ids)
        self._sets = len(ids) // DYNAMIC_WAYS
        self._replacement: NDArray[np.int64] | None = None
        self.discard()

    def _copied(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Copy ids to a file of our own, and map it; all of it is written, so that its disk is not full later."""
        file = unnamed_file(self._directory, CHANGED_ROWS)
        try:
            for first in range(0, len(ids), COPIED_AT_ONCE):
                data = memoryview(ids[first : first + COPIED_AT_ONCE].tobytes())
                at = 8 * first
                while len(data):
                    done = os.pwrite(file, data, at)
                    data, at = data[done:], at + done
            mapped = mmap.mmap(file, 8 * len(ids))
        finally:
            os.close(file)
        return np.frombuffer(mapped, np.int64)

    def rows_of(self, ids: Tensor, link: Link | None, *, train: bool) -> tuple[Tensor, Reinitialized]:
        """Find the row of each id ``[n]``, −1 where it has none; see `Vocabulary.rows_of`."""
        return self._find(ids.cpu()).to(ids.device), Reinitialized.none()

    def _find(self, ids: Tensor) -> Tensor:
        rows = torch.empty(len(ids), dtype=torch.int64)
        launch(cpu_cache.find, self._ids, self._sets, 0, DYNAMIC_WAYS, ids.contiguous().numpy(), rows.numpy())
        return rows

    # -- changes ---------------------------------------------------------------------------------------------------

    def stage(self, deleted: Tensor, ids: Tensor) -> None:
        """Prepare to remove the ids ``deleted [n]`` and to add ``ids [m]``, all different.

        Raise `DamagedError` if a set has no room for its ids.
        """
        found = self._find(deleted)
        freed = found[found >= 0]
        new = ids[self._find(ids) < 0]
        sets = torch.empty_like(new)
        cpu_cache.sets_of(new.numpy(), self._sets, sets.numpy())
        order = sets.argsort(stable=True)
        new, sets = new[order], sets[order]
        distinct, counts = sets.unique_consecutive(return_counts=True)
        rank = torch.arange(len(new)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        freed_sorted = freed.sort().values
        rows = torch.empty_like(new)
        done = 0
        ways = torch.arange(DYNAMIC_WAYS)
        for some, of_some in zip(distinct.split(SETS_AT_ONCE), counts.split(SETS_AT_ONCE), strict=True):
            places = some[:, None] * DYNAMIC_WAYS + ways
            is_free = torch.from_numpy(self._ids[places.numpy()]) == cpu_cache.FREE
            is_free |= (positions(freed_sorted, places.flatten()) >= 0).view_as(places)
            if bool((is_free.sum(1) < of_some).any()):
                raise DamagedError(
                    f"the changes give more ids to a set of table '{self._table}' than the {DYNAMIC_WAYS} that it has "
                    "room for, so they are not of this model"
                )
            free_first = (~is_free).int().argsort(dim=1, stable=True)
            end = done + int(of_some.sum())
            at = torch.arange(len(some)).repeat_interleave(of_some)
            rows[done:end] = places[at, free_first[at, rank[done:end]]]
            done = end
        ids, order = new.sort()
        self._staged = _Staged(freed, ids, rows[order])

    def stage_ids(self, ids: NDArray[np.int64]) -> None:
        """Prepare to take the ids of another exported model."""
        self._replacement = self._copied(ids)

    def staged_rows(self, ids: Tensor) -> Tensor:
        """Find the rows that staged ids ``[n]`` are going to have."""
        rows = self._find(ids)
        at = positions(self._staged.ids, ids)
        is_new = at >= 0
        rows[is_new] = self._staged.rows[at[is_new]]
        return rows

    def swap(self) -> None:
        """Let what was staged be found from now on."""
        if self._replacement is not None:
            self._ids = self._replacement
        self._ids[self._staged.freed.numpy()] = cpu_cache.FREE
        self._ids[self._staged.rows.numpy()] = self._staged.ids.numpy()
        self.discard()

    def discard(self) -> None:
        """Forget what was staged."""
        nothing = torch.empty(0, dtype=torch.int64)
        self._staged = _Staged(nothing, nothing, nothing)
        self._replacement = None
