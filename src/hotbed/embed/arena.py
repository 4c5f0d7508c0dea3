"""An arena: the tables of one dim in one store, and the bags of a batch as its kernels take them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hotbed.jagged import Jagged
from hotbed.ops import BackendName, BagLayout
from hotbed.specs import Feature, Table
from hotbed.store import DenseStore, RowStore


class Arena:
    """Tables of one dim, one after the other in one store; one launch serves them all.

    Parameters
    ----------
    tables
        Tables with equal ``dim``.
    features
        All features of the collection; those of other arenas are skipped.
    seed
        Seed of the collection; each table derives its own.
    device, backend
        Where the store is and which kernels serve it.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        seed: int,
        device: torch.device,
        backend: BackendName,
    ) -> None:
        self.tables = {t.name: t for t in tables}
        self.positions = [i for i, f in enumerate(features) if f.table in self.tables]
        self.features = [features[i] for i in self.positions]
        self.first_slot: dict[str, int] = {}
        slots = 0
        for table in tables:
            self.first_slot[table.name] = slots
            slots += table.rows
        self.store: RowStore = DenseStore(slots, tables[0].dim, device=device, backend=backend)
        for table in tables:
            self.store.initialize(
                self.first_slot[table.name],
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
        self.bases = torch.tensor(list(self.first_slot.values()), dtype=torch.int64, device=device)
        """First slot of each table ``[T]`` int64."""
        self._last: tuple[object, Tensor] | None = None

    def view(self, table: str, moment: str | None = None) -> Tensor:
        """The rows or a moment of one table, sharing memory."""
        first = self.first_slot[table]
        return self.store.view(slice(first, first + self.tables[table].rows), moment)

    def layout(self, ids: Jagged) -> BagLayout:
        """Where this arena's bags lie in a batch; features are found by name."""
        at = [ids.index(f.name) for f in self.features]
        offsets = ids.offsets
        if offsets is None:
            offsets = torch.empty(0, len(ids) + 1, dtype=torch.int64, device=ids.values.device)
        weights = None if ids.weights is None else ids.weights.to(torch.float32)
        return BagLayout(
            ids.values,
            self._features(ids, at),
            offsets,
            weights,
            len(ids),
            sum(ids.starts[i + 1] - ids.starts[i] for i in at),
            any(f.pooling == "mean" for f in self.features),
        )

    def _features(self, ids: Jagged, at: Sequence[int]) -> Tensor:
        """`BagLayout.features`; fixed features keep their places from batch to batch, so the last one is kept."""
        key = (ids.names, ids.fixed, ids.starts)
        last = self._last  # another thread may look up with this arena, too
        if last is None or last[0] != key:
            rows = [
                [
                    ids.starts[i],
                    -1 if ids.fixed[i] is None else ids.fixed[i],
                    ids.ragged_row(i),
                    self.first_slot[feature.table],
                    feature.pooling == "mean",
                ]
                for feature, i in zip(self.features, at, strict=True)
            ]
            self._last = last = key, torch.tensor(rows, dtype=torch.int64, device=self.store.device)
        return last[1]
