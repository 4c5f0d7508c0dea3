"""Assign rows of dynamic tables to ids of any size. An id keeps its row until it is evicted.

Rows are positions of a set-associative directory (`DynamicVocabulary`). The hash of an id selects a set of 128 rows. So
collisions and evictions depend only on the ids, not on the plan or the number of ranks. Each rank has some of the sets.
Ranks send distinct ids to the rank with their set and receive rows. `DynamicTables` replaces ids with rows before the
lookup. Rows with a new id are reinitialized on all ranks.

For example, a table of 256 rows has 2 sets. With two ranks, rank 0 has set 0 (rows 0 … 127), and rank 1 has set 1 (rows
128 … 255). If the hash of an id selects set 1, rank 0 sends the id to rank 1. There, the first id of the set gets row
128.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotbed.comm import Link
from hotbed.embed.ids import keep_ids
from hotbed.jagged import Bags, Jagged
from hotbed.ops import cpu_cache
from hotbed.ops.cpu_runtime import launch
from hotbed.specs import DYNAMIC_WAYS, Feature, Table


class Reinitialized(NamedTuple):
    """Rows to reinitialize ``[n]``, and their new ids ``[n]``."""

    rows: Tensor
    ids: Tensor

    @staticmethod
    def none() -> Reinitialized:
        """Return no rows."""
        return Reinitialized(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))


class _Directory:
    """Positions of some of the sets. Each has an id, the time of its last use, and the number of uses."""

    def __init__(self, sets: int, first: int, last: int) -> None:
        self.sets, self.first_set = sets, first
        count = (last - first) * DYNAMIC_WAYS
        self.ids = torch.full((count,), cpu_cache.FREE, dtype=torch.int64)
        self.times = torch.zeros(count, dtype=torch.int64)
        self.counts = torch.zeros(count, dtype=torch.int64)

    def find(self, ids: Tensor) -> Tensor:
        positions = torch.empty(len(ids), dtype=torch.int64)
        sets = self.sets, self.first_set, DYNAMIC_WAYS
        launch(cpu_cache.find, self.ids.numpy(), *sets, ids.numpy(), positions.numpy())
        return positions

    def take(self, ids: Tensor, now: int, by_count: bool) -> tuple[Tensor, int]:
        """Assign a position to each id, or −1 if all of its set are in use. Also return the number of evictions."""
        positions, evicted = torch.empty_like(ids), torch.empty_like(ids)
        state = self.ids.numpy(), self.times.numpy(), self.counts.numpy()
        sets = self.sets, self.first_set, DYNAMIC_WAYS
        cpu_cache.take(*state, *sets, by_count, ids.numpy(), now, positions.numpy(), evicted.numpy())
        return positions, int((evicted >= 0).sum())

    def arrays(self) -> dict[str, Tensor]:
        return {"ids": self.ids, "times": self.times, "counts": self.counts}


class DynamicVocabulary:
    """The ids and rows of a dynamic table on one of ``size`` ranks.

    ``evicted`` counts evicted ids on this rank. ``unadmitted`` counts occurrences of ids without a row, because they
    were too rare or their set was full.
    """

    def __init__(self, table: Table, rank: int, size: int) -> None:
        assert table.dynamic is not None
        self.table, self.options, self.size = table, table.dynamic, size
        self.sets = table.rows // DYNAMIC_WAYS
        self._cuts = [self.sets * r // size for r in range(size + 1)]
        here = self._cuts[rank], self._cuts[rank + 1]
        self._first_row = here[0] * DYNAMIC_WAYS
        self._rows = _Directory(self.sets, *here)
        self._candidates = _Directory(self.sets, *here) if self.options.admit_after > 1 else None
        self._lock = threading.Lock()
        self._now = 0
        """Number of optimizer steps so far. Ids are not evicted before the step after their lookup."""
        self.evicted = self.unadmitted = 0

    def rows_of(self, ids: Tensor, link: Link | None, *, train: bool) -> tuple[Tensor, Reinitialized]:
        """Return the rows of ids ``[n]``. In training, assign rows to ids without one. All ranks must call this.

        Return the row of each id ``[n]``, −1 if it has none, and the rows to reinitialize from all ranks.
        """
        distinct, inverse, seen = ids.cpu().unique(return_inverse=True, return_counts=True)
        if link is None or link.size == 1:
            rows, reinitialized = self._local(distinct, seen, train)
            return rows[inverse].to(ids.device), reinitialized
        sets = torch.empty_like(distinct)
        cpu_cache.sets_of(distinct.numpy(), self.sets, sets.numpy())
        owner = torch.bucketize(sets, torch.tensor(self._cuts[1:-1]), right=True)
        order = torch.argsort(owner, stable=True)
        to = torch.bincount(owner, minlength=link.size).tolist()
        ones = [1] * link.size
        recv_counts: list[int] = link.all_to_all("numbers of ids", torch.tensor(to), ones, ones).wait().tolist()
        outgoing = torch.stack([distinct, seen], 1)[order]
        arrived = link.all_to_all("ids of dynamic tables", outgoing, to, recv_counts).wait()
        known, at = arrived[:, 0].unique(return_inverse=True)
        sightings = torch.zeros_like(known).index_add_(0, at, arrived[:, 1])
        rows, reinitialized = self._local(known, sightings, train)
        back = link.all_to_all("rows of ids", rows[at], recv_counts, to).wait()
        found = torch.empty_like(distinct)
        found[order] = back
        return found[inverse].to(ids.device), _gather_reinitialized(reinitialized, link)

    def stepped(self) -> None:
        """Count a step. Rows of earlier lookups may be evicted, because the step has used their gradients."""
        self._now += 1

    def _local(self, ids: Tensor, seen: Tensor, train: bool) -> tuple[Tensor, Reinitialized]:
        """Find or assign the rows of ascending distinct ids in sets of this rank."""
        with self._lock:
            directory, options = self._rows, self.options
            now = self._now
            positions = directory.find(ids)
            here = positions >= 0
            reinitialized = torch.zeros(len(ids), dtype=torch.bool)
            if options.ttl_steps is not None:
                late = now - directory.times[positions.clamp(min=0)] > options.ttl_steps
                reinitialized |= here & late
                if not train:
                    positions[reinitialized] = -1
                    reinitialized &= False
            if train:
                known = positions[here]
                directory.times[known] = now
                directory.counts[known] = torch.where(reinitialized[here], 0, directory.counts[known]) + seen[here]
                wanted = (~here).nonzero()[:, 0]
                if self._candidates is not None:
                    wanted = wanted[self._admitted(ids[wanted], seen[wanted], now)]
                positions[wanted], evicted = directory.take(ids[wanted], now, options.evict == "lfu")
                reinitialized[wanted] = positions[wanted] >= 0
                directory.counts[positions[wanted[positions[wanted] >= 0]]] = seen[wanted[positions[wanted] >= 0]]
                self.evicted += evicted
            self.unadmitted += int(seen[positions < 0].sum())
            rows = torch.where(positions >= 0, positions + self._first_row, -1)
            return rows, Reinitialized(rows[reinitialized], ids[reinitialized])

    def _admitted(self, ids: Tensor, seen: Tensor, now: int) -> Tensor:
        """Count ids without a row, and return a mask of ids that have now occurred often enough."""
        assert self._candidates is not None
        positions = self._candidates.find(ids)
        new = (positions < 0).nonzero()[:, 0]
        positions[new], _ = self._candidates.take(ids[new], now, False)
        self._candidates.counts[positions[new[positions[new] >= 0]]] = 0
        has_position = positions >= 0
        self._candidates.times[positions[has_position]] = now
        self._candidates.counts[positions[has_position]] += seen[has_position]
        total = torch.where(has_position, self._candidates.counts[positions.clamp(min=0)], seen)
        admitted = total >= self.options.admit_after
        self._candidates.ids[positions[admitted & has_position]] = cpu_cache.FREE
        return admitted

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state(self, link: Link | None) -> dict[str, Tensor]:
        """Return the concatenated directories of all ranks. All ranks must call this."""
        with self._lock:
            found = {name: t.clone() for name, t in self._rows.arrays().items()}
            if self._candidates is not None:
                found |= {f"candidate_{name}": t.clone() for name, t in self._candidates.arrays().items()}
        if link is not None and link.size > 1:
            found = {name: _gather(t, self._cuts, link) for name, t in found.items()}
        return {**found, "now": torch.tensor(self._now)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Overwrite this rank's directories with a `state` from any number of ranks."""
        mine = slice(self._first_row, self._first_row + len(self._rows.ids))
        with self._lock:
            for name, own in self._rows.arrays().items():
                own.copy_(state[name][mine])
            if self._candidates is not None and "candidate_ids" in state:
                for name, own in self._candidates.arrays().items():
                    own.copy_(state[f"candidate_{name}"][mine])
            self._now = int(state["now"])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors in `state`."""
        names = list(self._rows.arrays())
        names += [f"candidate_{name}" for name in names] if self._candidates is not None else []
        return {**dict.fromkeys(names, (self.table.rows,)), "now": ()}


def _gather_reinitialized(reinitialized: Reinitialized, link: Link) -> Reinitialized:
    """Gather the rows to reinitialize from all ranks."""
    count = len(reinitialized.rows)
    counts = link.all_gather("numbers of new ids", torch.tensor([count])).wait().flatten().tolist()
    pairs = torch.stack([reinitialized.rows, reinitialized.ids], 1).repeat(link.size, 1)
    recv_counts = link.all_to_all("new ids", pairs, [count] * link.size, counts).wait()
    return Reinitialized(recv_counts[:, 0], recv_counts[:, 1])


def _gather(values: Tensor, cuts: list[int], link: Link) -> Tensor:
    counts = [(b - a) * DYNAMIC_WAYS for a, b in pairwise(cuts)]
    whole = values.repeat(link.size)
    return link.all_to_all("ids of dynamic tables", whole, [len(values)] * link.size, counts).wait()


def replace_ids(
    ids: Jagged,
    features: Mapping[str, Sequence[str]],  # names of the features of each dynamic table
    rows_of: Callable[[str, Tensor], Tensor],  # returns the rows of a table's ids ``[n]`` int64, −1 for none
    missing: Counter[str],  # counts, by feature, the ids without a row
) -> Jagged:
    """Replace ids of dynamic tables with rows. Ids without a row are removed from their bags."""
    changed: dict[str, Bags] = {}
    for table, names in features.items():
        values = [ids[name].values.long() for name in names]
        rows = rows_of(table, torch.cat(values))
        for name, own in zip(names, rows.split([len(v) for v in values]), strict=True):
            bags, absent = ids[name]._replace(values=own), own < 0
            if bool(absent.any()):
                missing[name] += int(absent.sum())
                bags = keep_ids(bags, ~absent)
            changed[name] = bags
    return ids.with_features(changed)


PREFIX = "dynamic_"
"""Prefix of the state of a dynamic table, after the table's name."""


class DynamicTables:
    """Vocabularies of the dynamic tables of a collection, shared by the ranks of ``link``.

    ``unadmitted`` counts ids without a row so far, by feature.
    """

    def __init__(self, tables: Sequence[Table], features: Sequence[Feature], link: Link | None = None) -> None:
        place = (0, 1) if link is None else (link.rank, link.size)
        self._vocabularies = {t.name: DynamicVocabulary(t, *place) for t in tables if t.dynamic is not None}
        self._features = {t: [f.name for f in features if f.table == t] for t in self._vocabularies}
        self._link = link
        self.unadmitted: Counter[str] = Counter()

    def to_rows(self, ids: Jagged, reinitialize: Callable[[str, Reinitialized], None], *, train: bool) -> Jagged:
        """Replace ids with rows, and remove ids without a row. All ranks must call this.

        ``reinitialize`` is called with the rows of a table that have a new id. In training, ids without a row are
        counted and may get one.
        """

        def rows_of(table: str, values: Tensor) -> Tensor:
            rows, reinitialized = self._vocabularies[table].rows_of(values, self._link, train=train)
            if len(reinitialized.rows):
                reinitialize(table, reinitialized)
            return rows

        return replace_ids(ids, self._features, rows_of, self.unadmitted)

    def stepped(self, tables: Collection[str]) -> None:
        """Count a step of the tables' optimizer, see `DynamicVocabulary.stepped`."""
        for table, vocabulary in self._vocabularies.items():
            if table in tables:
                vocabulary.stepped()

    def save(self, destination: dict[str, Any], prefix: str) -> None:
        """Add the state to the state of a collection. All ranks must call this."""
        for table, vocabulary in self._vocabularies.items():
            for name, tensor in vocabulary.state(self._link).items():
                destination[f"{prefix}{table}.{PREFIX}{name}"] = tensor

    def load(self, state: Mapping[str, Any], prefix: str, missing: list[str], errors: list[str]) -> set[str]:
        """Load the entries of `save`. Return the keys that belong to dynamic tables."""
        expected: set[str] = set()
        for table, vocabulary in self._vocabularies.items():
            shapes = vocabulary.shapes()
            keys = {name: f"{prefix}{table}.{PREFIX}{name}" for name in shapes}
            expected.update(keys.values())
            absent = [key for key in keys.values() if key not in state]
            missing += absent
            other = [key for name, key in keys.items() if key in state and state[key].shape != shapes[name]]
            errors += [
                f"table '{table}': '{key}' has another capacity. Create the table with the capacity of the saved one"
                for key in other
            ]
            if not absent and not other:
                vocabulary.load_state({name: state[key] for name, key in keys.items()})
        return expected
