"""Implement the parts of `EmbeddingCollection` other than lookups: devices, values, ``state_dict`` and freezing."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from hotbed.embed.arena import Arena, LocalTile, raw_shapes, view_as_storage
from hotbed.embed.dynamic import DynamicTables
from hotbed.embed.local_tables import LocalTables
from hotbed.embed.lookup_gradients import TableUpdater, Updaters
from hotbed.embed.table_group import TableGroup
from hotbed.errors import SpecError, did_you_mean
from hotbed.jagged import describe_tensor
from hotbed.ops import BackendName
from hotbed.specs import Feature, Table, check_specs
from hotbed.store import DenseStore, RowStore, Span, Traffic
from hotbed.torch_hooks import are_tables_left_out, number, warn_of_clipping

_tables_on_meta = ContextVar("tables_on_meta", default=False)


@contextmanager
def tables_on_meta() -> Generator[None]:
    """Create tables on ``meta`` in all collections that are created inside without a device.

    Then a rank allocates only the rows that `hotbed.distribute` assigns to it. Other modules are not affected.
    """
    token = _tables_on_meta.set(True)
    try:
        yield
    finally:
        _tables_on_meta.reset(token)


CALLS_BEFORE_WARNING = 10
"""Number of training batches before a warning about tables without an optimizer."""


class TableModule(nn.Module):
    """Tables and features without the lookup, which `EmbeddingCollection` adds."""

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
        self.is_swapped = False
        self.are_parameters = False
        """Whether torch optimizers train these tables as parameters, unless they are distributed."""
        self._backend: BackendName = backend
        elsewhere = torch.device("meta") if _tables_on_meta.get() else torch.get_default_device()
        place = elsewhere if device is None else torch.device(device)
        self._groups = self._make_groups(place)
        self._summed_ranks, self._is_distributed = 1, False
        self.handles = {
            t.name: torch.zeros((), dtype=torch.float32, device=place, requires_grad=not t.frozen) for t in tables
        }
        self.max_norms: dict[str, float] = {}
        """Maximum norm of a row after its update, by table. Overrides the option of an optimizer."""
        self.kept: list[object] = []
        """Optimizers that step in backward, kept alive here. Copies of the module have none."""
        self._updaters = Updaters(self, self._lost_tables)
        self._dynamic = DynamicTables(tables, features)
        self._training_calls = 0
        self.number = number(self)
        """Number that identifies these tables in graphs of ``torch.compile``."""
        self.dtype = torch.float32
        """Dtype of looked-up vectors outside of autocast. `Table.dtype` is the dtype of rows."""

    # -- tables ----------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Device of the tables."""
        return self._groups[0].device

    @property
    def is_distributed(self) -> bool:
        """Whether the tables are distributed over ranks."""
        return self._is_distributed

    @property
    def replicas(self) -> int:
        """Number of copies of the tables that are trained separately and averaged. 1 means no replicas."""
        return max(group.replicas for group in self._groups)

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank has tiles of the first replica, which is the one in checkpoints."""
        return all(group.is_first_replica for group in self._groups)

    def sync(self) -> None:
        """Average the replicas of the tables if any step followed the last average. All ranks must call this."""
        for group in self._groups:
            group.sync()

    def settle(self) -> None:
        """Wait for a running average of replicas. Lookups and steps call this."""
        for group in self._groups:
            group.settle()

    @property
    def nbytes(self) -> int:
        """Bytes of rows and moments on this rank."""
        return sum(group.nbytes for group in self._groups)

    @property
    def disk_bytes(self) -> int:
        """Bytes of files that hold rows and moments of this rank."""
        return sum(arena.store.disk_bytes for arena in self._arenas())

    @property
    def unadmitted_ids(self) -> Counter[str]:
        """Number of ids without a row so far, by feature of a dynamic table (see `Dynamic`)."""
        return self._dynamic.unadmitted

    @property
    def traffic(self) -> Traffic:
        """Reads, writes and cache hits of this rank's caches and files so far."""
        return sum((arena.store.traffic for arena in self._arenas()), Traffic())

    @property
    def served(self) -> dict[str, tuple[int, int]]:
        """Numbers of cache hits and misses on this rank's host, by table."""
        found: dict[str, tuple[int, int]] = dict.fromkeys(self.tables, (0, 0))
        for arena in self._arenas():
            for table, (hits, misses) in zip(arena.tables, arena.store.served, strict=False):
                found[table] = (found[table][0] + hits, found[table][1] + misses)
        return found

    def weight(self, table: str) -> Tensor:
        """Return the rows of a table ``[R, D]`` float32.

        The result shares the memory of a local float32 table. Otherwise it is a copy. If the table is distributed, all
        ranks must call this.
        """
        return self._group_of(table).rows(table)

    @torch.no_grad()
    def set_weight(self, table: str, values: Tensor) -> None:
        """Replace the rows of a table, rounded to its dtype. Moments are not changed.

        Parameters
        ----------
        table
            Name of the table.
        values
            Rows ``[R, D]``. If the table is distributed, all ranks must call this with the same values.

        Raises
        ------
        SpecError
            If the table does not exist, or values have another shape.
        """
        group, spec = self._group_of(table), self.tables[table]
        if values.shape != (spec.rows, spec.dim):
            raise SpecError(
                f"rows of table '{table}': got {describe_tensor(values)}, expected [{spec.rows}, {spec.dim}]"
            )
        span = Span(spec.rows, spec.fp32_rows)
        whole = DenseStore([span], spec.dim, dtype=spec.dtype, device=values.device, backend=self._backend)
        whole.write(torch.arange(spec.rows, device=values.device), values.float())
        group.load(table, whole.raw(0))

    @torch.no_grad()
    def adopt_initial(self, table: str, seed: int, bound: float) -> None:
        """Record the seed and bound of a table's initial values from a checkpoint."""
        self._group_of(table)
        self.tables[table] = replace(self.tables[table], init_seed=seed, init_bound=bound)

    def local_tiles(self, table: str) -> list[LocalTile]:
        """List the tiles of a table on this rank, for checkpoints."""
        return self._group_of(table).local_tiles(table)

    def freeze(self, *tables: str) -> Self:
        """Stop training these tables (default: all)."""
        return self._set_trained(tables, False)

    def unfreeze(self, *tables: str) -> Self:
        """Train these tables again (default: all)."""
        return self._set_trained(tables, True)

    def _set_trained(self, tables: Sequence[str], trained: bool) -> Self:
        for name in tables or self.tables:
            self._group_of(name)
            self.handles[name].requires_grad_(trained)
        return self

    def stores(self) -> list[RowStore]:
        """List the stores with the rows that this rank updates."""
        return [arena.store for arena in self._arenas()]

    def layouts(self) -> list[Tensor]:
        """Return the bag-layout tensors of the last batch, see `TableGroup.layouts`."""
        return [entries for group in self._groups for entries in group.layouts()]

    def _make_groups(self, device: torch.device) -> list[TableGroup]:
        """Create the tables, with their initial values unless the device is ``meta``."""
        of_dims: dict[int, list[Table]] = {}
        for table in self.tables.values():
            of_dims.setdefault(table.dim, []).append(table)
        options: dict[str, Any] = {"seed": self.seed, "device": device, "backend": self._backend}
        return [LocalTables(dim, tables, self.features, **options) for dim, tables in of_dims.items()]

    def _arenas(self) -> Iterator[Arena]:
        """Yield the arenas that this rank updates."""
        return (arena for group in self._groups for arena in group.arenas)

    def _group_of(self, table: str) -> TableGroup:
        for group in self._groups:
            if table in group.tables:
                return group
        raise SpecError(f"no table '{table}'; tables are {', '.join(self.tables)}{did_you_mean(table, self.tables)}")

    def updaters(self) -> list[TableUpdater]:
        """List the updaters that connect optimizers to the tables."""
        return list(self._updaters)

    @property
    def have_parameters(self) -> bool:
        """Whether torch's optimizers and gradient clipping handle these tables as parameters."""
        return self.are_parameters and not self._is_distributed

    def allow_idle(self) -> None:
        """Allow tables without an optimizer, e.g. in `hotbed.Trainer`, which has all optimizers of its model."""
        self._updaters.idle.may_be_idle = True

    def idle_tables(self) -> list[str]:
        """List the tables that are not frozen and have no optimizer."""
        trained = set[str]().union(*(updater.tables for updater in self._updaters))
        return [t for t, handle in self.handles.items() if handle.requires_grad and t not in trained]

    def _lost_tables(self) -> list[str]:
        """List the tables that no optimizer of hotbed or torch trains, so their gradients would be lost."""
        return [] if self.have_parameters else self.idle_tables()

    def _warn_of_idle_tables(self) -> None:
        """Warn once if tables are looked up in training and have no optimizer."""
        self._training_calls += 1
        if self._training_calls != CALLS_BEFORE_WARNING:
            return
        if idle := self.idle_tables():
            warnings.warn(
                f"no optimizer trains {', '.join(idle[:3])}{' …' * (len(idle) > 3)} of {len(self.tables)} tables after "
                f"{CALLS_BEFORE_WARNING} batches, because torch's optimizers do not train tables. Create one, "
                "RowWiseAdagrad(model, lr=0.01), or freeze the tables: embeddings.freeze()",
                stacklevel=3,
            )

    # -- nn.Module -------------------------------------------------------------------------------------------------

    def named_modules(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this module. Warn if torch clips gradients, because its clipping ignores tables."""
        if not torch.compiler.is_compiling() and not self.have_parameters:
            warn_of_clipping(self.handles)
        return super().named_modules(*args, **kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Train or freeze all tables."""
        super().requires_grad_(requires_grad)
        return self._set_trained((), requires_grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that wait for a step. All ranks that share the tables must call this."""
        super().zero_grad(set_to_none)
        for updater in self._updaters:
            updater.clear(self.tables)

    def __prepare_scriptable__(self) -> None:
        """Raise `SpecError` in ``torch.jit.script``, which calls this method."""
        raise SpecError("torch.jit.script cannot compile lookups in tables. Use torch.compile or torch.export")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if self.device.type == "meta":
            self._refuse_memory(fn)
        super()._apply(fn, recurse)
        moved = fn(
            torch.empty(0, dtype=self.dtype, device=self.device)
        )  # shows the device and dtype that fn changes to
        device, self.dtype = moved.device, moved.dtype  # the dtype of vectors, rows keep theirs
        if device != self.device:
            if self.device.type == "meta" and not self._is_distributed:  # e.g. by to_empty
                self._groups = self._make_groups(device)
            for group in self._groups:
                group.to(device)
            for name, handle in self.handles.items():
                if device.type == "meta":  # `data` cannot be set to a tensor on meta
                    self.handles[name] = handle.detach().to(device).requires_grad_(handle.requires_grad)
                elif handle.is_meta:
                    trained = handle.requires_grad
                    self.handles[name] = torch.zeros((), dtype=torch.float32, device=device, requires_grad=trained)
                else:
                    handle.data = handle.data.to(device)
        return self

    def _refuse_memory(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Raise `SpecError` if a function moves tensors from ``meta`` to a device."""
        try:
            device = fn(torch.empty(0, device="meta")).device
        except NotImplementedError:  # raised by `to`, but not by `to_empty`
            device = None
        if device is None or (self.is_swapped and device.type != "meta"):
            raise SpecError(
                f"tables on meta have no rows to move: got to() or to_empty() for {', '.join(self.tables)}. Call "
                "hotbed.distribute(model, device='cpu'), which initializes rows, or create the model on its device"
            )

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._dynamic.save(destination, prefix)
        if are_tables_left_out():
            return
        for table in self.tables:
            for name, tensor in self._group_of(table).raw(table).items():
                destination[f"{prefix}{table}.{name}"] = view_as_storage(tensor)

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
        expected = self._dynamic.load(state_dict, prefix, missing_keys, error_msgs)
        for table in () if are_tables_left_out() else self.tables:
            shapes = raw_shapes(self.tables[table])
            keys = {name: f"{prefix}{table}.{name}" for name in shapes}
            expected.update(keys.values())
            missing = [key for key in keys.values() if key not in state_dict]
            missing_keys += missing
            wrong = [
                f"table '{table}': got {describe_tensor(state_dict[key])} in the state_dict, expected "
                f"{describe_tensor(own)}. Create the table with the rows, dim, dtype and fp32_rows of the saved one"
                for key, own in ((keys[name], shapes[name]) for name in shapes)
                if key in state_dict and (state_dict[key].shape, state_dict[key].dtype) != (own.shape, own.dtype)
            ]
            error_msgs += wrong
            if not missing and not wrong:
                with torch.no_grad():
                    self._group_of(table).load(table, {name: state_dict[key] for name, key in keys.items()})
        if strict:
            unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in expected)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the tables without their optimizers.

        Dynamic tables, rows in files or behind a cache, and averaged replicas raise `SpecError`.
        """
        reasons = {
            "are dynamic": any(table.dynamic is not None for table in self.tables.values()),
            "have replicas": self.replicas > 1,
            "are in files, or behind a cache": not all(isinstance(a.store, DenseStore) for a in self._arenas()),
        }
        for reason in (reason for reason, found in reasons.items() if found):
            raise SpecError(
                f"tables that {reason} cannot be copied. Create the model again and load a checkpoint of this one "
                "(hotbed.save_checkpoint). For averages, AveragedModel(model.PART) averages a part without tables"
            )
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        made.__setstate__(deepcopy(self.__getstate__(), memo))
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_updaters", "kept")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._updaters, self.kept = Updaters(self, self._lost_tables), []  # a copy has no optimizer yet
        self.number = number(self)

    def extra_repr(self) -> str:
        """List tables and features, one per line."""
        tables = [f"{t.name}: {t.rows:,} × {t.dim} {t.dtype}" for t in self.tables.values()]
        features = [f"{f.name} → {f.table} ({f.pooling})" for f in self.features]
        return "\n".join([*tables, *features])
