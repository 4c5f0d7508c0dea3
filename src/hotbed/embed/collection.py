"""Define `EmbeddingCollection`, the module with embedding tables and their lookup.

`EmbeddingCollection.forward` checks ids (`hotbed.embed.ids`), gets requests from each table group
(`hotbed.embed.table_group`), and pools with one autograd function per group (`hotbed.embed.lookup_gradients`).
`prefetch_ids` and `prefetch_rows` run the exchanges of a later call ahead of it. `hotbed.embed.compile_ops` implements
the lookup in graphs of ``torch.compile``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from hotbed.batch import Embeddings
from hotbed.comm import Link
from hotbed.embed.dense_parallel import refuse_data_parallel
from hotbed.embed.dynamic import DynamicTables, Reinitialized
from hotbed.embed.embedding_tables import TableModule
from hotbed.embed.ids import Discarded, bag_ends, check_batch_ids, refuse_other_ids, verify_ids
from hotbed.embed.local_tables import LocalTables, storages_of
from hotbed.embed.lookup_gradients import VECTOR_DTYPES, PooledLookup, TableUpdater
from hotbed.embed.pooled_exchange import Wire
from hotbed.embed.shard_routing import IdExchange
from hotbed.embed.sharded_tables import ShardedTables
from hotbed.embed.table_group import PreparedLookup, Request, TableGroup
from hotbed.errors import BatchError, OptimizerError, SpecError
from hotbed.jagged import Jagged
from hotbed.ops import BackendName
from hotbed.ops.layout import LeafBags
from hotbed.optim import Rule, Updater
from hotbed.plan import Plan
from hotbed.specs import ANY_ID, Feature, Table
from hotbed.store import Storage
from hotbed.virtual_ranks import VirtualRanks, tree_size


def _with_leaves(
    request: Request, group: TableGroup, ids: Jagged, sizes: Sequence[int], virtual: VirtualRanks
) -> Request:
    """Note which bags belong to which virtual rank."""
    sequence = request.output - bool(group.pooled)
    ends = bag_ends(ids, None if sequence < 0 else group.sequences[sequence], sizes)
    leaf_bags = LeafBags(tuple(ends), virtual.own.start, tree_size(virtual.total))
    return request._replace(bags=replace(request.bags, leaf_bags=leaf_bags))


class SlicedIds(Protocol):
    """The ids of one virtual rank. One lookup has found the vectors of all of them (`hotbed.embed.slices`)."""

    def embeddings(self, room: int) -> Embeddings:
        """Return the vectors of the virtual rank."""
        ...


class _Prefetched(NamedTuple):
    """Prefetched data for a call: checked ids, and the prepared lookup of each table group."""

    ids: Jagged
    lookups: list[PreparedLookup]
    discarded: Discarded


class EmbeddingCollection(TableModule):
    """Embedding tables and the lookup of features in them.

    Tables are not ``nn.Parameter``s and have no dense gradient. Train them with an optimizer of `hotbed.optim`. Their
    values are in ``state_dict`` under ``<table>.weight``, without a copy. Each tensor there has a separate storage, as
    ``torch.save`` and ``safetensors.torch.save_model`` require. Gradients are not kept in ``eval()`` mode and under
    ``no_grad``. On several ranks, train the result of `hotbed.distribute`, because torch's ``DistributedDataParallel``
    and FSDP average parameters only.

    Parameters
    ----------
    tables
        Tables of any dims and dtypes. Tables with equal dim and dtype share one arena and one kernel launch.
    features
        Features. Several may share a table. Batches are matched by feature name, in any order.
    seed
        Seed of the initial values (default: 0, independent of ``torch.manual_seed``). Each table derives its seed from
        this one and the table's name. So tables of equal names in two collections start with equal values, unless the
        seeds of the collections differ. If ranks have different seeds, `distribute` uses the seeds of the first rank.
    device
        Device of the tables (default: torch's default device). ``.to(device)`` moves them.
    backend
        Kernels: ``"auto"`` (Numba on CPU, Triton on CUDA), or one by name.

    Raises
    ------
    SpecError
        If features and tables are inconsistent, e.g. a feature names an unknown table.

    Examples
    --------
    >>> import hotbed as hb
    >>> import torch
    >>> embeddings = hb.EmbeddingCollection(
    ...     tables=[hb.Table("items", rows=1000, dim=16)],
    ...     features=[hb.Feature("item", table="items"), hb.Feature("history", table="items", pooling="mean")])
    >>> optimizer = hb.optim.RowWiseAdagrad(embeddings, lr=0.1)
    >>> vectors = embeddings(hb.Jagged.from_dict({"item": torch.tensor([3, 5]), "history": [[1, 2], []]}))
    >>> vectors["item"].sum().backward()
    >>> optimizer.step()
    >>> vectors["history"].shape
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
        self.anchor = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
        """Input of autograd functions, so that autograd records lookups."""
        self.is_sliced = False
        """Whether calls return the vectors of one virtual rank, see `hotbed.embed.slices`."""
        self.slices: tuple[Sequence[int], VirtualRanks] | None = None
        """Numbers of samples of the virtual ranks in the next call. None: the call has the ids of one virtual rank."""
        self._has_dynamic = any(t.dynamic is not None for t in tables)
        self._names = tuple(f.name for f in features)
        self._pooled_names = tuple(tuple(group.pooled) for group in self._groups)
        self._rows = {t.name: t.rows if t.dynamic is None else ANY_ID for t in tables}
        self.bad_ids: Counter[str] = Counter()
        """Number of dropped or hashed ids so far, by feature (`Feature.on_bad_id`)."""
        self.truncated_ids: Counter[str] = Counter()
        """Number of truncated ids so far, by feature (`Feature.on_too_long`)."""

    # -- lookup ----------------------------------------------------------------------------------------------------

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, ids: Jagged, *, room: int = 0
    ) -> Embeddings:
        """Look up and pool.

        Parameters
        ----------
        ids
            Batch with every feature of the collection. Other features are ignored. Per-id weights may require a
            gradient.
        room
            1 reserves space for one vector at the start of each sample. `Embeddings.stack` fills it without copying
            the others.

        Returns
        -------
        Embeddings
            By feature ``[B, D]``, or ``[B, lengths, D]`` (a nested tensor) if it is not pooled. The dtype is float32,
            float16 after ``model.half()``, bfloat16 after ``model.bfloat16()``, and autocast's dtype under autocast.

        Raises
        ------
        BatchError
            If ``ids`` is not a `Jagged`, a feature is missing, an id is out of range, a bag is too long, the ids are on
            another device, or ``room`` is neither 0 nor 1.
        SpecError
            If undistributed tables are trained inside ``DistributedDataParallel`` or FSDP, or the model was converted
            to an unsupported dtype, e.g. by ``model.double()``.
        """
        if torch.compiler.is_dynamo_compiling():
            from hotbed.embed.compile_ops import (
                trace_lookup,  # which imports the compiler, seconds of every `import hotbed`
            )

            return trace_lookup(self, ids, room)
        if not isinstance(ids, Jagged):
            refuse_other_ids(ids)
        self._check_call(ids, room, torch.is_grad_enabled() and self._is_trained(self.tables))
        prefetched = ids.take_prefetched(self)
        if self.is_sliced:
            if prefetched is None:
                raise BatchError(
                    "ids: got other ids than the ids of the batch, or the same ids twice, expected the ids of the batch"
                    " once, because a process computes several virtual ranks. Set parallel.virtual_ranks to the number "
                    "of processes"
                )
            return cast("SlicedIds", prefetched).embeddings(room)
        prepared: Sequence[PreparedLookup | None] = [None] * len(self._groups)
        if prefetched is None:
            ids = self.check(ids)
        else:
            ids, prepared, discarded = cast("_Prefetched", prefetched)
            self.bad_ids += discarded.bad
            self.truncated_ids += discarded.truncated
        dtype = self._dtype_on(ids.values.device.type)
        if self._has_dynamic:
            ids = self._dynamic.to_rows(ids, self._reinitialize, train=self.training and torch.is_grad_enabled())
        found = Embeddings(self._names)
        for group, lookup in zip(self._groups, prepared, strict=True):
            requests, outputs = self._requests(group, ids, room, dtype, lookup)
            if self.slices is not None:
                requests = [_with_leaves(request, group, ids, *self.slices) for request in requests]
            anchor = self.anchor if any(r.trained for r in requests) else self.anchor.detach()
            looked_up = PooledLookup.apply(anchor, ids.weights, requests, outputs, self._updaters)
            if group.pooled:
                found.add_pooled(group.pooled, looked_up[0], outputs[0] if room else None)
            for feature, values in zip(group.sequences, looked_up[bool(group.pooled) :], strict=True):
                found.add_sequence(feature, values.squeeze(1), ids.bags_of(feature.name))
        return found

    def _check_call(self, ids: Jagged | None, room: int, trained: bool) -> None:
        """Raise an error if the call is invalid, and warn of tables without an optimizer."""
        if trained:
            if not self._is_distributed:
                refuse_data_parallel(self)
            self._warn_of_idle_tables()
        if room not in (0, 1):
            raise BatchError(f"room: got {room}, expected 0 or 1, because `Embeddings.stack` adds one vector")
        device = self._groups[0].device
        if ids is not None and ids.values.device != device:
            raise BatchError(
                f"ids: got device {ids.values.device}, expected {device} as for the tables. Use batch.to('{device}')"
            )

    def _dtype_on(self, device_type: str) -> torch.dtype:
        """Return the dtype of looked-up vectors, which depends on autocast."""
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else self.dtype
        if dtype not in VECTOR_DTYPES:
            raise SpecError(
                f"dtype of looked-up vectors: got {dtype}, expected float32, float16 or bfloat16. Use model.float(), "
                "and convert vectors after the lookup: embeddings(ids)['item'].double()"
            )
        return dtype

    def _requests(
        self, group: TableGroup, ids: Jagged, room: int, dtype: torch.dtype, lookup: PreparedLookup | None = None
    ) -> tuple[list[Request], list[Tensor]]:
        """Return the requests of a group, and allocate the outputs ``[B, width, D]``."""
        if lookup is None:
            requests = group.requests(ids, room, self._is_trained)
        else:
            requests = lookup.requests(room, self._is_trained)
        shapes = {r.output: (r.bags.batch_size, r.bags.width, group.dim) for r in requests}
        return requests, [group.empty(shapes[i], dtype) for i in range(len(shapes))]

    def prefetch_ids(self, ids: Jagged, over: Link | IdExchange) -> None:
        """Exchange the ids of a batch ahead of its lookup. All ranks must call this.

        Collections with dynamic tables are skipped.

        Parameters
        ----------
        ids
            Batch of the next call.
        over
            Link with a separate process group, because other exchanges may be running. Alternatively an exchange that
            the caller starts and finishes before the lookup.
        """
        if self._has_dynamic:
            return  # rows are assigned to ids after the previous step
        exchange = over if isinstance(over, IdExchange) else IdExchange(over)
        discarded = Discarded(Counter(), Counter())
        checked = check_batch_ids(ids, self.features, self._rows, discarded)
        # Exchange ids as if all tables were trained, because another thread may evaluate the model or unfreeze a table,
        # and ranks must agree. The lookup decides which gradients are sent.
        lookups = [group.prepare(checked, exchange, lambda _: True) for group in self._groups]
        if exchange.link.overlaps:  # otherwise the thread of the step would read
            for lookup in lookups:
                exchange.add_local(lookup.read_ahead)
        ids.put_prefetched(self, _Prefetched(checked, lookups, discarded))
        if exchange is not over:
            exchange.finish()

    def prefetch_rows(self, ids: Jagged, link: Link) -> None:
        """Exchange the rows of a batch ahead of its lookup. All ranks must call this.

        Call it after `prefetch_ids` and `settle`. Rows must not be updated between this and the lookup. Collections
        with dynamic tables are skipped.

        Parameters
        ----------
        ids, link
            As in `prefetch_ids`.
        """
        prefetched = cast("_Prefetched | None", ids.take_prefetched(self))
        if prefetched is not None:
            for lookup in prefetched.lookups:
                lookup.exchange_rows(link)
            ids.put_prefetched(self, prefetched)

    @property
    def is_traceable(self) -> bool:
        """Whether graphs of ``torch.compile`` can contain lookups: tables are local, not dynamic, and pooled."""
        return not (self._is_distributed or self._has_dynamic) and all(f.is_pooled for f in self.features)

    def _reinitialize(self, table: str, changed: Reinitialized) -> None:
        with torch.no_grad():
            self._group_of(table).reinitialize(table, *changed)

    def _is_trained(self, tables: Iterable[str]) -> bool:
        return self.training and self._has_trained(tables)

    def _has_trained(self, tables: Iterable[str]) -> bool:
        return any(self.handles[t].requires_grad for t in tables)

    def check(self, ids: Jagged) -> Jagged:
        """Return a batch in which all ids are valid rows and no bag is too long. Each batch is checked once.

        ``on_bad_id`` and ``on_too_long`` of a feature define the treatment of other ids. On an accelerator this
        synchronizes with the device. To avoid that, call `verify` on the host before moving batches.
        """
        return check_batch_ids(ids, self.features, self._rows, Discarded(self.bad_ids, self.truncated_ids))

    def verify(self, ids: Jagged) -> bool:
        """Return whether all ids are valid, and record that in the batch. Ids are not changed or counted.

        Raises
        ------
        BatchError
            If a feature is missing, or an id is out of range with ``on_bad_id="error"``.
        """
        return verify_ids(ids, self.features, self._rows)

    def connect(
        self,
        rule: Rule,
        fill: Mapping[str, Mapping[str, float]],
        on_grad: Callable[[Callable[[], Tensor]], None],
        beside: Sequence[Updater] = (),
    ) -> TableUpdater:
        """Connect an optimizer to its tables and disconnect earlier optimizers. Optimizers call this.

        ``beside`` are the optimizer's updaters of other collections. If one of them has the same arenas, it is
        extended and returned.
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

    def _make_group(
        self, group: TableGroup, plan: Plan, wire: Wire, device: torch.device, storage: Storage
    ) -> LocalTables | ShardedTables:
        """Create the tables of a group as assigned by a plan.

        A single rank uses `LocalTables`. Exception: if a GPU reads rows from host memory or disk, `ShardedTables` can
        read them ahead while the GPU computes another part of a batch.
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
        """Replace all tables with the tiles of this rank. `hotbed.distribute` calls this on all ranks.

        Parameters
        ----------
        plan
            Tiles of the tables.
        wire
            Links and options like codecs.
        device
            Device of the tables (default: their current device). Tables on ``meta`` get their initial values.
        storage
            Options for rows outside of the device's memory.

        Raises
        ------
        OptimizerError
            If the tables already have an optimizer.
        """
        if self._updaters:
            raise OptimizerError(
                "the tables already have an optimizer, which would not train the distributed tables. Distribute the "
                "model first, then create its optimizers"
            )
        place = self.device if device is None else device
        rows = storage or Storage()
        sharded: list[TableGroup] = []
        for group in self._groups:
            new = self._make_group(group, plan, wire, place, rows)
            if self.device.type != "meta":
                for table in group.tables:
                    new.load(table, group.raw(table))
            sharded.append(new)
        self._groups, self._is_distributed = sharded, True
        self._dynamic = DynamicTables(list(self.tables.values()), self.features, wire.link)
        self._summed_ranks = wire.virtual.total
        for name, handle in self.handles.items():
            new_handle = torch.zeros((), dtype=torch.float32, device=place)
            self.handles[name] = new_handle.requires_grad_(handle.requires_grad)
