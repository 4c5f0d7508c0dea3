"""An arena: the tables of one dim and dtype in one store, and the bags of a batch as its kernels take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hotbed.jagged import Jagged
from hotbed.ops import BackendName, BagLayout
from hotbed.specs import Feature, Table
from hotbed.store import DenseStore, RowStore, Span


class Arena:
    """Tables of one dim and dtype, one after the other in one store; one launch serves them all.

    Parameters
    ----------
    tables
        Tables with equal ``dim`` and ``dtype``.
    pooled
        Pooled features of these tables, and the position of each one's vector among those of a sample.
    sequences
        Features of these tables that are not pooled.
    seed
        Seed of the collection; each table derives its own.
    device, backend
        Where the store is and which kernels serve it.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        pooled: Mapping[Feature, int],
        sequences: Sequence[Feature],
        *,
        seed: int,
        device: torch.device,
        backend: BackendName,
    ) -> None:
        self.tables = {t.name: t for t in tables}
        self.pooled = dict(pooled)
        self.sequences = list(sequences)
        self._index = {t.name: i for i, t in enumerate(tables)}
        self._first_slot: dict[str, int] = {}
        slots = 0
        for table in tables:
            self._first_slot[table.name] = slots
            slots += table.rows
        self.updates = 0
        """How often rows were updated."""
        self._seeds = [t.seed(seed) for t in tables]
        self.store: RowStore = DenseStore(
            [Span(t.rows, t.fp32_rows) for t in tables],
            tables[0].dim,
            dtype=tables[0].dtype,
            device=device,
            backend=backend,
        )
        for table in tables:
            self.store.initialize(
                self._first_slot[table.name],
                seed=table.seed(seed),
                rows=range(table.rows),
                cols=range(table.dim),
                bound=table.bound,
            )
        self._placed(device)

    def to(self, device: torch.device) -> None:
        """Move the store."""
        self.store = self.store.to(device)
        self._placed(device)

    def _placed(self, device: torch.device) -> None:
        self.seeds = torch.tensor(self._seeds, dtype=torch.int64, device=device)
        """Seed of each table ``[T]`` int64, 32 bits."""
        self._last: dict[int, tuple[object, Tensor]] = {}

    def moment(self, table: str, name: str) -> Tensor:
        """A moment of one table, sharing memory."""
        return self.store.view(self._index[table], name)

    def raw(self, table: str) -> dict[str, Tensor]:
        """What the rows of one table are stored as, sharing memory; see `RowStore.raw`."""
        return self.store.raw(self._index[table])

    def rows(self, table: str) -> Tensor:
        """The rows of a table ``[R, D]`` float32; shares memory where all of them are stored so."""
        raw = self.raw(table)
        if set(raw) == {"weight"} and raw["weight"].dtype == torch.float32:
            return raw["weight"]
        first = self._first_slot[table]
        return self.store.read(torch.arange(first, first + self.tables[table].rows, device=self.store.device))

    def layout(self, ids: Jagged, width: int, room: int) -> BagLayout:
        """Where the bags of the pooled features lie in a batch; features are found by name."""
        return self._layout(ids, 0, list(self.pooled.items()), len(ids), width, room)

    def sequence_layout(self, ids: Jagged, which: int) -> BagLayout:
        """Every id of feature ``sequences[which]`` as a bag of its own."""
        feature = self.sequences[which]
        i = ids.index(feature.name)
        return self._layout(ids, 1 + which, [(feature, 0)], ids.starts[i + 1] - ids.starts[i], 1, 0)

    def _layout(
        self, ids: Jagged, key: int, features: Sequence[tuple[Feature, int]], batch_size: int, width: int, room: int
    ) -> BagLayout:
        at = [ids.index(f.name) for f, _ in features]
        offsets = ids.offsets
        if offsets is None or key:
            offsets = torch.empty(0, batch_size + 1, dtype=torch.int64, device=ids.values.device)
        return BagLayout(
            ids.values,
            self._features(ids, key, features, at),
            offsets,
            None if ids.weights is None else _values(ids.weights),
            batch_size,
            sum(ids.starts[i + 1] - ids.starts[i] for i in at),
            any(f.pooling == "mean" for f, _ in features),
            width,
            room,
        )

    def _features(self, ids: Jagged, key: int, features: Sequence[tuple[Feature, int]], at: Sequence[int]) -> Tensor:
        """`BagLayout.features`; fixed features keep their places from batch to batch, so the last one is kept."""
        places = (ids.names, ids.fixed, ids.starts)
        last = self._last.get(key)  # another thread may look up with this arena, too
        if last is None or last[0] != places:
            rows = [
                [
                    ids.starts[i],
                    1 if key else -1 if ids.fixed[i] is None else ids.fixed[i],
                    ids.ragged_row(i),
                    self._first_slot[feature.table],
                    feature.pooling == "mean",
                    position,
                    self._index[feature.table],
                ]
                for (feature, position), i in zip(features, at, strict=True)
            ]
            self._last[key] = last = places, torch.tensor(rows, dtype=torch.int64, device=self.store.device)
        return last[1]


def _values(weights: Tensor) -> Tensor:
    """Per-id weights as float32; those that are trained are copied, for they may change before the tables' step."""
    values = weights.detach().to(torch.float32)
    return values.clone() if weights.requires_grad and values.data_ptr() == weights.data_ptr() else values
