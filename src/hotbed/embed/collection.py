"""`EmbeddingCollection`: the module that holds embedding tables."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from hotbed.batch import Embeddings
from hotbed.embed.arena import Arena
from hotbed.embed.autograd import PooledLookup, TableUpdater
from hotbed.embed.ids import checked_ids, verified_ids
from hotbed.errors import BatchError, SpecError, did_you_mean
from hotbed.jagged import Jagged
from hotbed.ops import BackendName
from hotbed.ops.untraced import untraced
from hotbed.optim import Rule
from hotbed.specs import Feature, Table, check_specs


class EmbeddingCollection(nn.Module):
    """Embedding tables and the features that are looked up in them.

    Tables are not ``nn.Parameter``s and have no dense gradient: train them with an optimizer of `hotbed.optim`.
    Their values are in ``state_dict`` under ``<table>.weight``. In ``eval()`` mode and under ``no_grad`` nothing is
    kept for an optimizer.

    Parameters
    ----------
    tables
        Tables, of any dims; those of equal dim share one arena and one kernel launch.
    features
        Features; several may share a table. Batches are matched by feature name, in any order.
    seed
        With each table's name, the seed of its initial values.
    device
        Where the tables are; default as for any torch module. ``.to(device)`` moves them.
    backend
        Kernels: ``"auto"`` (Numba on CPU, Triton on CUDA), or one by name.

    Raises
    ------
    SpecError
        If tables and features do not fit together.

    Examples
    --------
    >>> embeddings = EmbeddingCollection(
    ...     tables=[Table("items", rows=1000, dim=16)],
    ...     features=[Feature("item", table="items"), Feature("history", table="items", pooling="mean")])
    >>> e = embeddings(Jagged.from_dict({"item": torch.tensor([3, 5]), "history": [[1, 2], []]}))
    >>> e["history"].shape
    torch.Size([2, 16])
    """

    handles: dict[str, Tensor]

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        backend: BackendName = "auto",
    ) -> None:
        super().__init__()
        check_specs(tables, features)
        self.tables = {t.name: t for t in tables}
        self.features = tuple(features)
        self.seed = seed
        place = torch.get_default_device() if device is None else torch.device(device)
        dims = list(dict.fromkeys(t.dim for t in tables))
        self._arenas = [
            Arena([t for t in tables if t.dim == dim], features, seed=seed, device=place, backend=backend)
            for dim in dims
        ]
        self.handles = {
            t.name: torch.zeros((), dtype=torch.float32, device=place, requires_grad=not t.frozen) for t in tables
        }
        self._anchor = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
        self._updaters: weakref.WeakSet[TableUpdater] = weakref.WeakSet()
        self._rows = {t.name: t.rows for t in tables}
        self.bad_ids: Counter[str] = Counter()
        """By feature, how many ids were dropped or hashed so far (`Feature.on_bad_id`)."""

    # -- lookup ----------------------------------------------------------------------------------------------------

    @untraced
    def forward(self, ids: Jagged) -> Embeddings:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Look up and pool.

        Parameters
        ----------
        ids
            Must contain every feature of the collection; further features are ignored.

        Returns
        -------
        Embeddings
            By feature, ``[B, D]`` float32.

        Raises
        ------
        BatchError
            If a feature is missing, an id is out of range, or the ids are on another device.
        """
        if ids.values.device != self.device:
            raise BatchError(
                f"the ids are on {ids.values.device} but the tables on {self.device}; use batch.to('{self.device}')"
            )
        if ids.weights is not None and ids.weights.requires_grad:
            raise BatchError("per-id weights that require a gradient are not supported; detach them")
        ids = self.check(ids)
        parts: list[tuple[Sequence[int], Tensor]] = []
        for arena in self._arenas:
            trained = self.training and any(self.handles[t].requires_grad for t in arena.tables)
            anchor = self._anchor if trained else self._anchor.detach()
            parts.append((arena.positions, PooledLookup.apply(anchor, arena, arena.layout(ids), self._updaters)))
        return Embeddings([f.name for f in self.features], parts)

    def check(self, ids: Jagged) -> Jagged:
        """Return ids that are all valid rows, by each feature's ``on_bad_id``; remembered, so it is done once.

        On an accelerator this waits for the device: `verify` batches on the host, before they are moved.
        """
        return checked_ids(ids, self.features, self._rows, self.bad_ids)

    def verify(self, ids: Jagged) -> bool:
        """Mark ids as checked if all are valid rows, and return whether they are; nothing is repaired or counted.

        Raises
        ------
        BatchError
            For a missing feature, or an id out of range of a feature with ``on_bad_id="error"``.
        """
        return verified_ids(ids, self.features, self._rows)

    # -- tables ----------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self._arenas[0].store.device

    @property
    def nbytes(self) -> int:
        """Bytes of rows and moments."""
        return sum(arena.store.nbytes for arena in self._arenas)

    def weight(self, table: str) -> Tensor:
        """The rows of a table ``[R, D]``, sharing the table's memory."""
        return self._arena(table).view(table)

    def freeze(self, *tables: str) -> Self:
        """Stop training these tables (all if none is named)."""
        return self._set_trained(tables, False)

    def unfreeze(self, *tables: str) -> Self:
        """Train these tables again (all if none is named)."""
        return self._set_trained(tables, True)

    def _set_trained(self, tables: Sequence[str], trained: bool) -> Self:
        for name in tables or self.tables:
            self._arena(name)
            self.handles[name].requires_grad_(trained)
        return self

    def _arena(self, table: str) -> Arena:
        for arena in self._arenas:
            if table in arena.tables:
                return arena
        raise SpecError(f"no table '{table}'; tables are {', '.join(self.tables)}{did_you_mean(table, self.tables)}")

    def connect(
        self, rule: Rule, tables: Sequence[str], fill: Mapping[str, float], on_grad: Callable[[Tensor], None]
    ) -> TableUpdater:
        """Let an optimizer train these tables; it takes them over from any earlier one. Called by the optimizer."""
        for earlier in self._updaters:
            earlier.tables.difference_update(tables)
        for table in tables:
            arena = self._arena(table)
            for moment in rule.moments:
                arena.store.add_moment(moment)
                arena.view(table, moment.name).fill_(fill[table])
        updater = TableUpdater(rule, tables, self._arenas, on_grad)
        self._updaters.add(updater)
        return updater

    # -- nn.Module -------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        device = fn(torch.empty(0, device=self.device)).device  # what fn does to a tensor; tables stay float32
        if device != self.device:
            for arena in self._arenas:
                arena.to(device)
            for handle in self.handles.values():
                handle.data = handle.data.to(device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for table in self.tables:
            destination[f"{prefix}{table}.weight"] = self.weight(table)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        expected = {f"{prefix}{table}.weight": table for table in self.tables}
        for key, table in expected.items():
            if key not in state_dict:
                missing_keys.append(key)
                continue
            value, own = state_dict[key], self.weight(table)
            if value.shape != own.shape:
                error_msgs.append(f"table '{table}': {list(value.shape)} in the state_dict, {list(own.shape)} here")
                continue
            own.copy_(value)
        if strict:
            unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in expected)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no optimizer yet.
        return {**self.__dict__, "_updaters": weakref.WeakSet()}

    def extra_repr(self) -> str:
        """Tables and features, one per line."""
        tables = [f"{t.name}: {t.rows:,} × {t.dim}" for t in self.tables.values()]
        features = [f"{f.name} → {f.table} ({f.pooling})" for f in self.features]
        return "\n".join([*tables, *features])
