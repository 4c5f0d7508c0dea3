"""Look features up in embedding tables: `EmbeddingCollection`, the module that models are built with.

The way of a call is `EmbeddingCollection.forward`: ids are checked (`hotbed.embed.ids`), each table group says what to
look up (`hotbed.embed.table_group`), one autograd function per group pools (`hotbed.embed.lookup_gradients`). `prefetch_ids`
and `prefetch_rows` do the exchanges of a later call ahead of it. In graphs of ``torch.compile`` the same is done by
`hotbed.embed.compile_ops`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from hotbed.batch import Embeddings, ModelParallelInput
from hotbed.comm import Link
from hotbed.embed.dense_parallel import refuse_data_parallel
from hotbed.embed.dynamic import DynamicTables, Reinitialized
from hotbed.embed.embedding_tables import TableModule
from hotbed.embed.ids import Discarded, checked_ids, refuse_other_ids, verified_ids
from hotbed.embed.local_tables import LocalTables, storages_of
from hotbed.embed.lookup_gradients import VECTOR_DTYPES, PooledLookup, TableUpdater
from hotbed.embed.pooled_exchange import Wire
from hotbed.embed.shard_routing import IdExchange
from hotbed.embed.sharded_tables import ShardedTables
from hotbed.embed.table_group import Request, TableGroup
from hotbed.errors import BatchError, OptimizerError, SpecError
from hotbed.jagged import Jagged
from hotbed.ops import BackendName
from hotbed.optim import Rule, Updater
from hotbed.plan import Plan
from hotbed.specs import ANY_ID, Feature, Table
from hotbed.store import Storage


class _Prefetched(NamedTuple):
    """What `prefetch_ids` and `prefetch_rows` keep for the call: checked ids, by table group their routes or rows."""

    ids: Jagged
    routes: list[object]
    discarded: Discarded


class EmbeddingCollection(TableModule):
    """Embedding tables and the features that are looked up in them.

    Tables are not ``nn.Parameter``s and have no dense gradient: train them with an optimizer of `hotbed.optim`.
    Their values are in ``state_dict`` under ``<table>.weight``: the memory of the tables, not a copy, yet every tensor
    with a storage of its own, so that ``torch.save``, ``safetensors.torch.save_model`` and the like keep all of them.
    In ``eval()`` mode and under ``no_grad`` nothing is kept for an optimizer. Over several ranks, train what
    `hotbed.distribute` returns: torch's ``DistributedDataParallel`` and FSDP average parameters only.

    Parameters
    ----------
    tables
        Tables, of any dims and dtypes; those of equal dim and dtype share one arena and one kernel launch.
    features
        Features; several may share a table. Batches are matched by feature name, in any order.
    seed
        Seed of the initial values. Each table derives its own seed from it and from the table's name. The default is 0,
        whatever ``torch.manual_seed`` was called with. Two collections whose tables have equal names start with equal
        values; give them different seeds. Where ranks have different seeds, `distribute` uses those of the first rank.
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

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        backend: BackendName = "auto",
    ) -> None:
        super().__init__(tables, features, seed=seed, device=device, backend=backend)
        self._anchor = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
        self._has_dynamic = any(t.dynamic is not None for t in tables)
        self._names = tuple(f.name for f in features)
        self._pooled_names = tuple(tuple(group.pooled) for group in self._groups)
        self._rows = {t.name: t.rows if t.dynamic is None else ANY_ID for t in tables}
        self.bad_ids: Counter[str] = Counter()
        """By feature, how many ids were dropped or hashed so far (`Feature.on_bad_id`)."""
        self.truncated_ids: Counter[str] = Counter()
        """By feature, how many ids were cut off so far (`Feature.on_too_long`)."""

    # -- lookup ----------------------------------------------------------------------------------------------------

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
            By feature, ``[B, D]``, or ``[B, lengths, D]`` (a nested tensor) where it is not pooled: float32, float16
            after ``model.half()``, bfloat16 after ``model.bfloat16()``; under autocast in the dtype of autocast.

        Raises
        ------
        BatchError
            If ``ids`` is no `Jagged`, a feature is missing, an id is out of range, a bag is too long, the ids are on
            another device, or room is neither 0 nor 1.
        SpecError
            If tables that are not distributed are trained inside ``DistributedDataParallel`` or FSDP, or the model was
            converted to another dtype, as by ``model.double()``.
        """
        if torch.compiler.is_dynamo_compiling():
            from hotbed.embed.compile_ops import (
                traced_lookup,  # which imports the compiler, seconds of every `import hotbed`
            )

            return traced_lookup(self, ids, room)
        if not isinstance(ids, Jagged):
            refuse_other_ids(ids)
        self._check_call(ids, room, torch.is_grad_enabled() and self._is_trained(self.tables))
        prefetched = cast("_Prefetched | None", ids.take_prefetched(self))
        routes: list[object] = [None] * len(self._groups)
        if prefetched is None:
            ids = self.check(ids)
        else:
            ids, routes = prefetched.ids, prefetched.routes
            self.bad_ids += prefetched.discarded.bad
            self.truncated_ids += prefetched.discarded.truncated
        dtype = self._dtype_on(ids.values.device.type)
        if self._has_dynamic:
            ids = self._dynamic.with_rows(ids, self._reinitialize, train=self.training and torch.is_grad_enabled())
        found = Embeddings(self._names)
        for group, of_group in zip(self._groups, routes, strict=True):
            requests, outputs = self._requests(group, ids, room, dtype, of_group)
            anchor = self._anchor if any(r.trained for r in requests) else self._anchor.detach()
            looked_up = PooledLookup.apply(anchor, ids.weights, requests, outputs, self._updaters)
            if group.pooled:
                found.add_pooled(group.pooled, looked_up[0], outputs[0] if room else None)
            for feature, values in zip(group.sequences, looked_up[bool(group.pooled) :], strict=True):
                found.add_sequence(feature, values.squeeze(1), ids.bags_of(feature.name))
        return found

    def _check_call(self, ids: Jagged | None, room: int, trained: bool) -> None:
        """Refuse what cannot be looked up, or trained; warn of tables that are not."""
        if trained:
            if not self._is_distributed:
                refuse_data_parallel(self)
            self._warn_of_idle_tables()
        if room not in (0, 1):
            raise BatchError(f"room is {room}, must be 0 or 1: `Embeddings.stack` fills in one vector")
        device = self._groups[0].device
        if ids is not None and ids.values.device != device:
            raise BatchError(f"the ids are on {ids.values.device} but the tables on {device}; use batch.to('{device}')")

    def _dtype_on(self, kind: str) -> torch.dtype:
        """Return the dtype of looked-up vectors, which autocast may decide."""
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.dtype
        if dtype not in VECTOR_DTYPES:
            raise SpecError(
                f"vectors of tables cannot be {dtype}, must be float32, float16 or bfloat16; keep the model as it was "
                "made (model.float()), and convert vectors where they are needed so: embeddings(ids)['item'].double()"
            )
        return dtype

    def _requests(
        self, group: TableGroup, ids: Jagged, room: int, dtype: torch.dtype, routes: object = None
    ) -> tuple[list[Request], list[Tensor]]:
        """List what to look up of a group, and make the outputs ``[B, width, D]``."""
        requests = group.requests(ids, room, self._is_trained, routes)
        shapes = {r.output: (r.bags.batch_size, r.bags.width, group.dim) for r in requests}
        return requests, [group.empty(shapes[i], dtype) for i in range(len(shapes))]

    def prefetch_ids(self, ids: Jagged, over: Link | IdExchange) -> None:
        """Exchange the ids of a batch ahead of the collection's next call with it; all ranks must call this.

        Nothing is done for a collection that has dynamic tables.

        Parameters
        ----------
        ids
            The batch, as the collection will get it.
        over
            Ranks, over a process group of its own: other exchanges may be under way. Or an exchange with them, which
            the caller starts and finishes before that call.
        """
        if self._has_dynamic:
            return  # ids get their rows after the step that precedes the call
        exchange = over if isinstance(over, IdExchange) else IdExchange(over)
        discarded = Discarded(Counter(), Counter())
        checked = self._checked(ids, discarded)
        # As if all tables were trained: another thread may be evaluating the model, or about to unfreeze a table, and
        # ranks must agree. The call itself decides whose gradients are sent.
        routes = [group.routes(checked, exchange, lambda _: True) for group in self._groups]
        for group, of_group in zip(self._groups, routes, strict=True):
            if of_group is not None and exchange.link.overlaps:  # else it would be the step's thread that reads
                exchange.then(partial(group.read_ahead, of_group))
        ids.put_prefetched(self, _Prefetched(checked, routes, discarded))
        if exchange is not over:
            exchange.finish()

    def prefetch_rows(self, ids: Jagged, link: Link) -> None:
        """Exchange the rows of a batch ahead of the collection's next call with it; all ranks must call this.

        After `prefetch_ids` and `settle`; no row may be updated until the call. Nothing is done for a collection that
        has dynamic tables.

        Parameters
        ----------
        ids, link
            As in `prefetch_ids`.
        """
        prefetched = cast("_Prefetched | None", ids.take_prefetched(self))
        if prefetched is not None:
            exchanged = [
                g.exchange_rows(prefetched.ids, r, link) for g, r in zip(self._groups, prefetched.routes, strict=True)
            ]
            ids.put_prefetched(self, prefetched._replace(routes=exchanged))

    @property
    def is_traceable(self) -> bool:
        """Whether graphs of ``torch.compile`` can hold lookups: pooled ones, in tables of this rank, with all rows."""
        return not (self._is_distributed or self._has_dynamic) and all(f.is_pooled for f in self.features)

    def _reinitialize(self, table: str, changed: Reinitialized) -> None:
        with torch.no_grad():
            self._group_of(table).reinitialize(table, *changed)

    def _is_trained(self, tables: Iterable[str]) -> bool:
        return self.training and self._has_trained(tables)

    def _has_trained(self, tables: Iterable[str]) -> bool:
        return any(self.handles[t].requires_grad for t in tables)

    def check(self, ids: Jagged) -> Jagged:
        """Check ids: returns ids that are all valid rows, in bags that are not too long; done once per batch.

        What breaks a limit is treated by each feature's ``on_bad_id`` and ``on_too_long``. On an accelerator this
        waits for the device: `verify` batches on the host, before they are moved.
        """
        return self._checked(ids, Discarded(self.bad_ids, self.truncated_ids))

    def _checked(self, ids: Jagged, discarded: Discarded) -> Jagged:
        if isinstance(ids, ModelParallelInput):
            whole = checked_ids(ids.whole, self._features_in(ids), self._rows, discarded)
            if len(ids.sizes) == 1:
                return whole
            return ids if whole is ids.whole else ModelParallelInput(whole, ids.sizes, ids.rank)
        return checked_ids(ids, self.features, self._rows, discarded)

    def verify(self, ids: Jagged) -> bool:
        """Mark ids as checked if all are valid rows, and return whether they are; nothing is repaired or counted.

        Raises
        ------
        BatchError
            For a missing feature, or an id out of range of a feature with ``on_bad_id="error"``.
        """
        if isinstance(ids, ModelParallelInput):
            return verified_ids(ids.whole, self._features_in(ids), self._rows)
        return verified_ids(ids, self.features, self._rows)

    def _features_in(self, ids: ModelParallelInput) -> list[Feature]:
        """Select the features of this collection that model-parallel input brings."""
        if not self._is_distributed:
            raise BatchError(
                "the batch is model-parallel input, the model is not distributed; call hotbed.distribute first"
            )
        if len(ids.sizes) != self._ranks:
            raise BatchError(
                f"the model-parallel input is of {len(ids.sizes)} ranks, the model of {self._ranks}; make them equal"
            )
        return [f for f in self.features if f.name in ids.whole]

    def connect(
        self,
        rule: Rule,
        fill: Mapping[str, Mapping[str, float]],
        on_grad: Callable[[Callable[[], Tensor]], None],
        beside: Sequence[Updater] = (),
    ) -> TableUpdater:
        """Connect an optimizer to its tables, which earlier ones lose; called by the optimizer.

        ``beside`` are its updaters of other collections, of which one that has the same arenas is returned.
        """
        for earlier in self._updaters:
            earlier.tables.difference_update(fill)
        for table, initial in fill.items():
            for moment in rule.moments:
                self._group_of(table).add_moment(table, moment, initial[moment.name])
        arenas = {arena for group in self._groups if group.is_shared for arena in group.arenas}
        own = (u for u in beside if arenas and isinstance(u, TableUpdater) and not arenas.isdisjoint(u.shared_arenas))
        updater = next(own, None)
        if updater is None:
            on_stepped = self._dynamic.stepped if self._has_dynamic else None
            updater = TableUpdater(rule, fill, self._groups, self._summed_ranks, on_grad, on_stepped)
        else:
            updater.add(fill, self._groups)
        self._updaters.add(updater)
        return updater

    def _placed(
        self, group: TableGroup, plan: Plan, wire: Wire, device: torch.device, storage: Storage
    ) -> LocalTables | ShardedTables:
        """Make the tables of a group anew, where a plan puts them.

        Of a single rank they are looked up directly. Not where a GPU reads them in other memories: that it does ahead,
        while it computes another part of a batch.
        """
        tables, seed, backend = list(group.tables.values()), self.seed, self._backend
        storages = storages_of(tables, plan, storage) if wire.is_alone else None
        if storages is not None and (device.type == "cpu" or all(s.tier == "device" for s in storages.values())):
            return LocalTables(
                group.dim, tables, self.features, seed=seed, device=device, backend=backend, storages=storages
            )
        return ShardedTables(
            tables, self.features, plan, wire, seed=seed, device=device, backend=backend, storage=storage
        )

    def distribute(
        self, plan: Plan, wire: Wire, device: torch.device | None = None, storage: Storage | None = None
    ) -> None:
        """Replace all tables by the tiles of this rank; called by `hotbed.distribute`. All ranks must call this.

        Parameters
        ----------
        plan
            Where the tables' tiles are.
        wire
            Links, and options like codecs.
        device
            Where the tables are to be; default: where they are. Tables on ``meta`` get their initial values.
        storage
            How rows are kept that are not in the device's memory.

        Raises
        ------
        OptimizerError
            If an optimizer trains the tables already.
        """
        if self._updaters:
            raise OptimizerError(
                "these tables have an optimizer already, which would go on with tables that are not here any more; "
                "distribute the model first, then make its optimizers"
            )
        place = self.device if device is None else device
        rows = storage or Storage()
        sharded: list[TableGroup] = []
        for group in self._groups:
            new = self._placed(group, plan, wire, place, rows)
            if self.device.type != "meta":
                for table in group.tables:
                    new.load(table, group.raw(table))
            sharded.append(new)
        self._groups, self._is_distributed = sharded, True
        self._dynamic = DynamicTables(list(self.tables.values()), self.features, wire.link)
        self._ranks, self._summed_ranks = wire.link.size, wire.summed_ranks
        for name, handle in self.handles.items():
            new_handle = torch.zeros((), dtype=torch.float32, device=place)
            self.handles[name] = new_handle.requires_grad_(handle.requires_grad)
