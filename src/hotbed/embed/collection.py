"""Look features up in embedding tables: `EmbeddingCollection`, the module that models are built with.

The way of a call is `EmbeddingCollection.forward`: ids are checked (`hotbed.embed.ids`), each table group says what to
look up (`hotbed.embed.table_group`), one autograd function per group pools (`hotbed.embed.gradients`). `prefetch_ids`
and `prefetch_rows` do the exchanges of a later call ahead of it. At the end: what plans call the tables of a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from hotbed.batch import Embeddings
from hotbed.comm import Link
from hotbed.embed.dense import refuse_data_parallel
from hotbed.embed.dynamic import DynamicTables, Reinitialized
from hotbed.embed.gradients import PooledLookup, TableUpdater
from hotbed.embed.id_exchange import IdExchange
from hotbed.embed.ids import Discarded, checked_ids, refuse_other_ids, verified_ids
from hotbed.embed.sharded_tables import ShardedTables
from hotbed.embed.table_group import TableGroup
from hotbed.embed.tables import TableModule
from hotbed.embed.wire import Wire
from hotbed.errors import BatchError, OptimizerError, SpecError
from hotbed.jagged import Jagged, ModelParallelInput
from hotbed.ops import BackendName
from hotbed.optim import Rule
from hotbed.plan import Cut, Plan, make_plan
from hotbed.plan.here import hardware_here
from hotbed.plan.placement import AUTO
from hotbed.specs import ANY_ID, Feature, Table
from hotbed.store import Storage
from hotbed.torch_hooks import untraced


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
        self._rows = {t.name: t.rows if t.dynamic is None else ANY_ID for t in tables}
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
        if not isinstance(ids, Jagged):
            refuse_other_ids(ids)
        if torch.is_grad_enabled() and self._is_trained(self.tables):
            if not self._is_distributed:
                refuse_data_parallel(self)
            self._warn_of_idle_tables()
        if room not in (0, 1):
            raise BatchError(f"room is {room}, must be 0 or 1: `Embeddings.stack` fills in one vector")
        device = self._groups[0].device
        if ids.values.device != device:
            raise BatchError(f"the ids are on {ids.values.device} but the tables on {device}; use batch.to('{device}')")
        prefetched = cast("_Prefetched | None", ids.take_prefetched(self))
        routes: list[object] = [None] * len(self._groups)
        if prefetched is None:
            ids = self.check(ids)
        else:
            ids, routes = prefetched.ids, prefetched.routes
            self.bad_ids += prefetched.discarded.bad
            self.truncated_ids += prefetched.discarded.truncated
        kind = ids.values.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.dtype
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise SpecError(
                f"vectors of tables cannot be {dtype}, must be float32, float16 or bfloat16; keep the model as it was "
                "made (model.float()), and convert vectors where they are needed so: embeddings(ids)['item'].double()"
            )
        if self._has_dynamic:
            ids = self._dynamic.with_rows(ids, self._reinitialize, train=self.training and torch.is_grad_enabled())
        found = Embeddings([f.name for f in self.features])
        for group, of_group in zip(self._groups, routes, strict=True):
            requests = group.requests(ids, room, self._is_trained, of_group)
            shapes = {r.output: (r.bags.batch_size, r.bags.width, group.dim) for r in requests}
            outputs = [group.empty(shapes[i], dtype) for i in range(len(shapes))]  # [B, width, D]
            anchor = self._anchor if any(r.trained for r in requests) else self._anchor.detach()
            looked_up = PooledLookup.apply(anchor, ids.weights, requests, outputs, self._updaters)
            if group.pooled:
                found.add_pooled(group.pooled, looked_up[0], outputs[0] if room else None)
            for feature, values in zip(group.sequences, looked_up[bool(group.pooled) :], strict=True):
                found.add_sequence(feature, values[:, 0], ids[feature.name])
        return found

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
        return [f for f in self.features if f.name in ids.whole]

    def connect(
        self, rule: Rule, fill: Mapping[str, Mapping[str, float]], on_grad: Callable[[Callable[[], Tensor]], None]
    ) -> TableUpdater:
        """Connect an optimizer to its tables, which earlier ones lose; called by the optimizer."""
        for earlier in self._updaters:
            earlier.tables.difference_update(fill)
        for table, initial in fill.items():
            for moment in rule.moments:
                self._group_of(table).add_moment(table, moment, initial[moment.name])
        on_stepped = self._dynamic.stepped if self._has_dynamic else None
        updater = TableUpdater(rule, fill, self._groups, self._summed_ranks, on_grad, on_stepped)
        self._updaters.add(updater)
        return updater

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
            tables = list(group.tables.values())
            new = ShardedTables(
                tables, self.features, plan, wire, seed=self.seed, device=place, backend=self._backend, storage=rows
            )
            if self.device.type != "meta":
                for table in group.tables:
                    new.load(table, group.raw(table))
            sharded.append(new)
        self._groups, self._is_distributed = sharded, True
        self._dynamic = DynamicTables(list(self.tables.values()), self.features, wire.link)
        self._summed_ranks = wire.summed_ranks
        for name, handle in self.handles.items():
            new_handle = torch.zeros((), dtype=torch.float32, device=place)
            self.handles[name] = new_handle.requires_grad_(handle.requires_grad)


# -- plans of a model -------------------------------------------------------------------------------------------------


def plan_tables(model: nn.Module) -> list[Table]:
    """List a model's tables by the names that plans have for them: ``collection.table`` where a name occurs twice."""
    names = names_in_plans(model)
    return [
        replace(table, name=names[path, table.name])
        for path, collection in collections_of(model).items()
        for table in collection.tables.values()
    ]


def plan_for(model: nn.Module, world_size: int, scheme: str | Cut | Mapping[str, str | Cut], **options: Any) -> Plan:
    """Make a plan for the tables of a model, see `make_plan`.

    A model may have an attribute ``schemes`` that gives collections, by path, a scheme of their own: the wide part of
    `hotbed.nn.WideDeep` is ``"dp"`` always. A mapping overrides it, for the tables that it names. The number of ids
    per table, where ``options`` do not give it, is one per sample and feature; ``"auto"`` is for the machine that this
    is, where they do not give ``hardware``.
    """
    names = names_in_plans(model)
    schemes = schemes_for(model, scheme)
    collections = collections_of(model).items()
    ids = Counter(names[path, f.table] for path, collection in collections for f in collection.features)
    options.setdefault("ids", ids)
    if AUTO in schemes.values() and "hardware" not in options:
        options["hardware"] = hardware_here(next(iter(collections_of(model).values())).device)
    return make_plan(plan_tables(model), world_size, schemes, **options)


def schemes_for(
    model: nn.Module, scheme: str | Cut | Mapping[str, str | Cut], others: str = "table"
) -> dict[str, str | Cut]:
    """Give each table of a model its scheme: its own by name or pattern, its collection's, or that of all others.

    Parameters
    ----------
    model
        With collections, and perhaps ``schemes`` of theirs.
    scheme
        For all tables, or by table.
    others
        Where schemes by table have none.
    """
    own: Mapping[str, str | Cut] = getattr(model, "schemes", {})
    given, of_others = (scheme, others) if isinstance(scheme, Mapping) else ({}, scheme)
    schemes = {name: own.get(path, of_others) for (path, _), name in names_in_plans(model).items()}
    for name in schemes:
        schemes[name] = next((given[k] for k in (name, *given) if k in given and fnmatchcase(name, k)), schemes[name])
    # Those that no table has stay, to be refused.
    return schemes | {key: s for key, s in given.items() if not any(fnmatchcase(n, key) for n in schemes)}


def collections_of(model: nn.Module) -> dict[str, EmbeddingCollection]:
    """Find the collections of a model, by path."""
    return {path: m for path, m in model.named_modules() if isinstance(m, EmbeddingCollection)}


def names_in_plans(model: nn.Module) -> dict[tuple[str, str], str]:
    """Name each table as plans do, by its collection's path and its name there."""
    tables = [(path, table) for path, collection in collections_of(model).items() for table in collection.tables]
    count = Counter(table for _, table in tables)
    return {(p, t): t if count[t] == 1 else f"{p}.{t}" for p, t in tables}


def local_plan(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Select the tiles of these tables from a plan, renamed as in their collection (``names``: own name → plan's)."""
    here = {name: own for own, name in names.items()}
    tiles = tuple(replace(tile, table=here[tile.table]) for tile in plan.tiles if tile.table in here)
    return Plan(plan.world_size, tiles, {here[name]: form for name, form in plan.wire.items() if name in here})
