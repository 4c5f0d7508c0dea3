"""`EmbeddingCollection`: the module that holds embedding tables."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from hotbed.bags import describe
from hotbed.batch import Embeddings
from hotbed.embed.arena import Arena
from hotbed.embed.autograd import PooledLookup, Request
from hotbed.embed.ids import Discarded, checked_ids, verified_ids
from hotbed.embed.updater import TableUpdater
from hotbed.errors import BatchError, SpecError, did_you_mean
from hotbed.jagged import Jagged
from hotbed.ops import BackendName
from hotbed.optim import Rule
from hotbed.specs import Feature, Table, check_specs
from hotbed.untraced import untraced


class _Part(NamedTuple):
    """The tables of one dim: their arenas, the pooled features (whose vectors share one tensor), and the others."""

    arenas: list[Arena]
    pooled: list[str]
    sequences: list[Feature]

    @staticmethod
    def make(
        dim: int,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        seed: int,
        device: torch.device,
        backend: BackendName,
    ) -> _Part:
        of_dim = [t for t in tables if t.dim == dim]
        own = [f for f in features if any(f.table == t.name for t in of_dim)]
        pooled = [f for f in own if f.pooling != "none"]
        arenas: list[Arena] = []
        sequences: list[Feature] = []
        for dtype in dict.fromkeys(t.dtype for t in of_dim):
            members = [t for t in of_dim if t.dtype == dtype]
            names = {t.name for t in members}
            unpooled = [f for f in own if f.pooling == "none" and f.table in names]
            positions = {f: i for i, f in enumerate(pooled) if f.table in names}
            arenas.append(Arena(members, positions, unpooled, seed=seed, device=device, backend=backend))
            sequences += unpooled
        return _Part(arenas, [f.name for f in pooled], sequences)

    def requests(self, ids: Jagged, room: int, trained: Callable[[Arena], bool]) -> list[Request]:
        """What to look up: output 0 is for all pooled features, if there are any; then one per sequence."""
        found: list[Request] = []
        output = int(bool(self.pooled))
        for arena in self.arenas:
            wanted = trained(arena)
            if arena.pooled:
                found.append(Request(arena, arena.layout(ids, room + len(self.pooled), room), 0, wanted))
            for which in range(len(arena.sequences)):
                found.append(Request(arena, arena.sequence_layout(ids, which), output, wanted))
                output += 1
        return found

    def outputs(self, requests: Sequence[Request], dtype: torch.dtype) -> list[Tensor]:
        """Uninitialised ``[B, width, D]`` per output."""
        store = self.arenas[0].store
        shapes = {r.output: (r.bags.batch_size, r.bags.width, store.dim) for r in requests}
        return [store.empty(shapes[i], dtype) for i in range(len(shapes))]


class EmbeddingCollection(nn.Module):
    """Embedding tables and the features that are looked up in them.

    Tables are not ``nn.Parameter``s and have no dense gradient: train them with an optimizer of `hotbed.optim`.
    Their values are in ``state_dict`` under ``<table>.weight``. In ``eval()`` mode and under ``no_grad`` nothing is
    kept for an optimizer.

    Parameters
    ----------
    tables
        Tables, of any dims and dtypes; those of equal dim and dtype share one arena and one kernel launch.
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
        self._parts = [
            _Part.make(dim, tables, features, seed=seed, device=place, backend=backend)
            for dim in dict.fromkeys(t.dim for t in tables)
        ]
        self._arenas = [arena for part in self._parts for arena in part.arenas]
        self.handles = {
            t.name: torch.zeros((), dtype=torch.float32, device=place, requires_grad=not t.frozen) for t in tables
        }
        self._anchor = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
        self._updaters: weakref.WeakSet[TableUpdater] = weakref.WeakSet()
        self._rows = {t.name: t.rows for t in tables}
        self.bad_ids: Counter[str] = Counter()
        """By feature, how many ids were dropped or hashed so far (`Feature.on_bad_id`)."""
        self.truncated_ids: Counter[str] = Counter()
        """By feature, how many ids were cut off so far (`Feature.on_too_long`)."""

    # -- lookup ----------------------------------------------------------------------------------------------------

    @untraced
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, ids: Jagged, *, room: int = 0
    ) -> Embeddings:
        """Look up and pool.

        Parameters
        ----------
        ids
            Must contain every feature of the collection; further features are ignored. Per-id weights may require a
            gradient.
        room
            1 leaves room for one vector before those of each sample, which `Embeddings.stack` then fills without a
            copy of the others.

        Returns
        -------
        Embeddings
            By feature, ``[B, D]``, or ``[B, lengths, D]`` (a nested tensor) where it is not pooled: float32, under
            autocast in the dtype of autocast.

        Raises
        ------
        BatchError
            If a feature is missing, an id is out of range, a bag is too long, the ids are on another device, or room is
            neither 0 nor 1.
        """
        if room not in (0, 1):
            raise BatchError(f"room is {room}, must be 0 or 1: `Embeddings.stack` fills in one vector")
        if ids.values.device != self.device:
            raise BatchError(
                f"the ids are on {ids.values.device} but the tables on {self.device}; use batch.to('{self.device}')"
            )
        ids = self.check(ids)
        kind = ids.values.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
        found = Embeddings([f.name for f in self.features])
        for part in self._parts:
            requests = part.requests(ids, room, self._is_trained)
            outputs = part.outputs(requests, dtype)
            anchor = self._anchor if any(r.trained for r in requests) else self._anchor.detach()
            looked_up = PooledLookup.apply(anchor, ids.weights, requests, outputs, self._updaters)
            if part.pooled:
                found.add_pooled(part.pooled, looked_up[0], outputs[0] if room else None)
            for feature, values in zip(part.sequences, looked_up[bool(part.pooled) :], strict=True):
                found.add_sequence(feature.name, values[:, 0], ids[feature.name], feature.max_len)
        return found

    def _is_trained(self, arena: Arena) -> bool:
        return self.training and any(self.handles[t].requires_grad for t in arena.tables)

    def check(self, ids: Jagged) -> Jagged:
        """Return ids that are all valid rows in bags that are not too long; remembered, so it is done once.

        What breaks a limit is treated as each feature's ``on_bad_id`` and ``on_too_long`` say. On an accelerator this
        waits for the device: `verify` batches on the host, before they are moved.
        """
        return checked_ids(ids, self.features, self._rows, Discarded(self.bad_ids, self.truncated_ids))

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
        """The rows of a table ``[R, D]`` float32: shares the memory of a float32 table, a copy of a narrow one."""
        return self._arena(table).rows(table)

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
        self, rule: Rule, fill: Mapping[str, Mapping[str, float]], on_grad: Callable[[Tensor], None]
    ) -> TableUpdater:
        """Let an optimizer train these tables; it takes them over from any earlier one. Called by the optimizer."""
        for earlier in self._updaters:
            earlier.tables.difference_update(fill)
        for table, initial in fill.items():
            arena = self._arena(table)
            for moment in rule.moments:
                arena.store.add_moment(moment)
                arena.moment(table, moment.name).fill_(initial[moment.name])
        updater = TableUpdater(rule, fill, self._arenas, on_grad)
        self._updaters.add(updater)
        return updater

    # -- nn.Module -------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        device = fn(torch.empty(0, device=self.device)).device  # what fn does to a tensor; tables keep their dtype
        if device != self.device:
            for arena in self._arenas:
                arena.to(device)
            for handle in self.handles.values():
                handle.data = handle.data.to(device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for table in self.tables:
            for name, tensor in self._arena(table).raw(table).items():
                destination[f"{prefix}{table}.{name}"] = tensor

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
        expected = {
            f"{prefix}{table}.{name}": (table, tensor)
            for table in self.tables
            for name, tensor in self._arena(table).raw(table).items()
        }
        for key, (table, own) in expected.items():
            if key not in state_dict:
                missing_keys.append(key)
                continue
            value = state_dict[key]
            if value.shape != own.shape or value.dtype != own.dtype:
                error_msgs.append(
                    f"table '{table}': {describe(value)} in the state_dict, {describe(own)} here; make rows, dim, "
                    "dtype and fp32_rows of the table those it was saved with"
                )
                continue
            with torch.no_grad():
                own.copy_(value)
        if strict:
            unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in expected)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_updaters"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._updaters = weakref.WeakSet()  # a copy has no optimizer yet

    def extra_repr(self) -> str:
        """Tables and features, one per line."""
        tables = [f"{t.name}: {t.rows:,} × {t.dim} {t.dtype}" for t in self.tables.values()]
        features = [f"{f.name} → {f.table} ({f.pooling})" for f in self.features]
        return "\n".join([*tables, *features])
