"""Collect the content of a checkpoint: states as plain values and tensors, and tables with their moments, in chunks.

States of torch contain tensors, tuples and integer keys, which JSON does not have. They are written as ``{"$kind":
…}``, and tensors are written into a safetensors file (`to_plain_value`, `restore_value`).

A rank writes the tiles that it owns (`owned_tiles`), in chunks that fit into a file (`chunks_of`). If a tile's rows are
materialized on their first update, only materialized rows are written, in chunks with an array of keys. For example, a
tile has the rows 0 … 9 of a table, and a file holds 4 rows. The chunks are the rows 0 … 3, 4 … 7 and 8 … 9. If only
the rows 1, 2, 5, 6, 7 and 9 are materialized, the chunks are the rows 0 … 6 with the keys 1, 2, 5, 6, and the rows
7 … 9 with the keys 7 and 9. Each row of the tile is in one chunk, and rows without a key have their initial values. The
chunks of a differential checkpoint have the changed rows as keys.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from hotbed.checkpoint.manifest import PlanEntry, SavedMoment, SavedTable
from hotbed.checkpoint.snapshot import Snapshot, select_rows
from hotbed.checkpoint.tensor_files import Array, Chunk, rows_per_chunk
from hotbed.comm import Link
from hotbed.embed import Distributed, EmbeddingCollection, LocalTile
from hotbed.embed.arena import array_ranges
from hotbed.embed.dense_parallel import gather_shards
from hotbed.embed.slices import states_now
from hotbed.errors import CheckpointError
from hotbed.optim import SparseOptimizer
from hotbed.specs import Table
from hotbed.store import MOMENT, DenseStore, LazyStore, RowStore, SelectedArray, SelectedRows, SlotRange, SortedSlots
from hotbed.torch_hooks import without_tables


class Stateful(Protocol):
    """An object with a state that a checkpoint can hold, e.g. a model, an optimizer or a loader."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return tensors and plain values, nested in mappings and sequences."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state that `state_dict` has returned."""
        ...


class RandomState:
    """The states of torch's default random generators on all ranks, as a part of a checkpoint.

    ``gather`` returns the rows of all ranks in rank order. Default: there is one rank. If a process computes several
    virtual ranks, ``states`` has the states of each for CPU and CUDA, and ``rank`` is the first of them.
    """

    def __init__(
        self,
        gather: Callable[[Tensor], Tensor] = lambda rows: rows,
        rank: int = 0,
        states: list[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self._gather, self._rank, self._states = gather, rank, states

    def state_dict(self) -> dict[str, Any]:
        """Return generator states by rank, ``[W, n]`` uint8, of the CPU and the current CUDA device (or ``[W, 0]``)."""
        now = states_now()
        states = [now] if self._states is None else self._states
        cpu, cuda = (torch.stack([*(of[i] for of in states), now[i]])[: len(states)] for i in range(2))
        return {"cpu": self._gather(cpu), "cuda": self._gather(cuda)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the generators. If there are more ranks than saved states, the states are reused in turn."""
        cpu, cuda = state_dict["cpu"], state_dict["cuda"]
        if self._states is not None:
            for i, (_, of_cuda) in enumerate(self._states):
                number = self._rank + i
                loaded = cuda[number % len(cuda)] if cuda.shape[1] and len(of_cuda) else of_cuda
                self._states[i] = cpu[number % len(cpu)].clone(), loaded.clone()
            return
        torch.set_rng_state(cpu[self._rank % len(cpu)].clone())  # torch ignores the offset of a view
        if cuda.shape[1] and torch.cuda.is_available():
            torch.cuda.set_rng_state(cuda[self._rank % len(cuda)].clone())


Tensors = dict[tuple[object, ...], tuple[str, Tensor]]
"""Key and tensor by the tensor's memory, so that tied weights, which occur repeatedly in a state, are saved once."""


def to_plain_value(value: object, tensors: Tensors, where: str) -> object:
    """Convert a value to plain values of JSON, and add its tensors to ``tensors``."""
    if isinstance(value, Tensor):
        memory = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        return {"$tensor": tensors.setdefault(memory, (where, value))[0]}
    if isinstance(value, Mapping):
        items = [
            (k, to_plain_value(v, tensors, f"{where}.{k}".lstrip(".")))
            for k, v in cast("Mapping[Any, Any]", value).items()
        ]
        if all(isinstance(k, str) and not k.startswith("$") for k, _ in items):
            return dict(items)
        if all(isinstance(k, str | int) for k, _ in items):
            return {"$items": [[k, v] for k, v in items]}
    elif isinstance(value, list | tuple):
        found = [to_plain_value(v, tensors, f"{where}.{i}".lstrip(".")) for i, v in enumerate(cast("list[Any]", value))]
        return {"$tuple": found} if isinstance(value, tuple) else found
    elif value is None or isinstance(value, str | int | float):
        return value
    raise CheckpointError(f"state at '{where}': got {type(value).__name__}, expected a tensor or a plain value")


def restore_value(value: object, tensors: Mapping[str, Tensor]) -> Any:
    """Invert `to_plain_value` for a state that `read_manifest` has checked. Raise KeyError if a tensor is missing."""
    if isinstance(value, list):
        return [restore_value(v, tensors) for v in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    entries = cast("dict[str, Any]", value)
    if "$tensor" in entries:
        return tensors[entries["$tensor"]]
    if "$items" in entries:
        return {k: restore_value(v, tensors) for k, v in entries["$items"]}
    if "$tuple" in entries:
        return tuple(restore_value(v, tensors) for v in entries["$tuple"])
    return {k: restore_value(v, tensors) for k, v in entries.items()}


def states_of(parts: Mapping[str, Stateful], *, is_first: bool) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Return the states of parts without tables: plain values by part, and tensors by part and name.

    For example, ``{"lr": 0.1, "m": t}`` becomes ``{"lr": 0.1, "m": {"$tensor": "m"}}`` and ``{"m": t}``.
    """
    with without_tables():
        # The first rank writes tensors that FSDP2 has sharded as a whole.
        states = {name: gather_shards(part.state_dict(), keep=is_first) for name, part in parts.items()}
    plains: dict[str, Any] = {}
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, state in states.items():
        found: Tensors = {}
        plains[name] = to_plain_value(state, found, "")
        tensors[name] = {key: t.detach() for key, t in found.values()}
        if len(tensors[name]) < len(found):
            raise CheckpointError(
                f"two tensors of part '{name}' would have the same name in {name}.safetensors. Rename one"
            )
    return plains, tensors


class ModelTable(NamedTuple):
    """A table of a model, and its manifest entry without tiles."""

    collection: EmbeddingCollection
    table: Table
    saved: SavedTable


def model_tables(parts: Mapping[str, Stateful]) -> dict[str, ModelTable]:
    """Return the tables of all models among the parts, with the moments of all optimizers among the parts.

    The names are ``path.table``, as in `SparseOptimizer`, or ``PART:path.table`` if a name is used already. Raise
    `CheckpointError` if an optimizer trains tables of a model that is not among the parts.
    """
    found: dict[str, ModelTable] = {}
    names: dict[tuple[int, str], str] = {}
    for part, model in parts.items():
        if not isinstance(model, nn.Module):
            continue
        for path, module in model.named_modules():
            if not isinstance(module, EmbeddingCollection):
                continue
            for table in module.tables.values():
                if (id(module), table.name) in names:
                    continue
                name = f"{path}.{table.name}".lstrip(".")
                name = f"{part}:{name}" if name in found else name
                spec = replace(table, init_seed=table.seed(module.seed), init_bound=table.bound, frozen=False)
                names[id(module), table.name] = name
                found[name] = ModelTable(module, table, SavedTable.of(spec))
    for part, optimizer in parts.items():
        if not isinstance(optimizer, SparseOptimizer):
            continue
        rule = optimizer.rule
        for trained in optimizer.trained():
            name = names.get((id(trained.collection), trained.table))
            if name is None:
                raise CheckpointError(
                    f"part '{part}' trains table '{trained.table}', but the parts lack its model. Pass the model, "
                    'too: {"model": model, …}'
                )
            moments = {
                m.name: SavedMoment(per=m.per, initial=trained.initial[m.name], optimizer=part, rule=rule.name)
                for m in rule.moments
            }
            here = found[name]
            saved = here.saved.model_copy(update={"moments": {**here.saved.moments, **moments}})
            found[name] = here._replace(saved=saved)
    return found


def refuse_while_saved(tables: Mapping[str, ModelTable]) -> None:
    """Raise `CheckpointError` if a checkpoint of a table is being written."""
    for name, table in tables.items():
        if any(tile.arena.store.on_change is not None for tile in table.collection.local_tiles(table.table.name)):
            raise CheckpointError(
                f"table '{name}' is being saved. First call wait() of the Saving that save_checkpoint returned"
            )


def find_link(parts: Mapping[str, Stateful]) -> Link | None:
    """Return the link of the distributed model among the parts, or None."""
    return next((part.link for part in parts.values() if isinstance(part, Distributed)), None)


def refuse_parts_of_distributed(parts: Mapping[str, Stateful], link: Link | None) -> None:
    """Raise `CheckpointError` if a part has distributed tables, but no part is a `Distributed` model."""
    for name, part in parts.items():
        for module in part.modules() if isinstance(part, nn.Module) else ():
            if link is None and isinstance(module, EmbeddingCollection) and module.is_distributed:
                raise CheckpointError(
                    f"part '{name}' has distributed tables. Pass the model that hotbed.distribute returned"
                )


def plan_of(parts: Mapping[str, Stateful]) -> PlanEntry | None:
    """Return the plan of the distributed model among the parts, or None."""
    plan = next((part.plan for part in parts.values() if isinstance(part, Distributed)), None)
    return None if plan is None else PlanEntry.model_validate(plan.to_dict())


def _keyed_chunks(
    name: str, tile: LocalTile, moments: Collection[str], selected: SelectedRows, snapshot: Snapshot | None
) -> Iterator[Chunk]:
    """Yield the selected rows of a tile in chunks that fit into a file. The chunks cover the tile."""
    store, rows = tile.arena.store, tile.shard.rows
    slots, first_slot = selected.slots[tile.number], tile.arena.first_slots[tile.number]
    arrays = {
        array: key
        for array, key in tile.to_table_names(selected.of(tile.number)).items()
        if not array.startswith(MOMENT) or array.removeprefix(MOMENT) in moments
    }
    step = rows_per_chunk(8 + sum(selected.arrays[key].row_bytes for key in arrays.values()))
    for first in range(0, max(len(slots), 1), step):
        last = min(first + step, len(slots))
        begin = 0 if first == 0 else int(slots[first : first + 1]) - first_slot
        end = len(rows) if last == len(slots) else int(slots[last : last + 1]) - first_slot
        found = {"keys": _keys(slots.part(first, last), first_slot, rows)}
        for array, key in arrays.items():
            values, before = selected.arrays[key], selected.first[key]
            low, high = (min(max(at - before, 0), len(values)) for at in (first, last))
            if low < high:
                found[array] = array_of(store, key, values, low, high, snapshot)
        yield Chunk(name, rows[begin:end], tile.shard.cols, found)


def _keys(slots: SlotRange, first_slot: int, rows: range) -> Array:
    """Return an array of the row numbers of these slots of a tile."""

    def read(start: int, stop: int) -> Tensor:
        return rows.start + (slots[start:stop] - first_slot) * rows.step

    return Array(torch.int64, (len(slots),), read)


def array_of(
    store: RowStore, name: str, values: Tensor | SelectedArray, first: int, last: int, snapshot: Snapshot | None
) -> Array:
    """Return an array of the rows ``first … last − 1`` of a store's array, from the snapshot if there is one."""

    def rows(start: int, stop: int) -> Tensor:
        if snapshot is None:
            return values[first + start : first + stop].cpu()
        return snapshot.read(store, name, first + start, first + stop)

    return Array(values.dtype, (last - first, *values.shape[1:]), rows)


OwnedTile = tuple[str, ModelTable, LocalTile]
"""A tile that this rank writes: the table's name in checkpoints, the table, and the tile."""


def owned_tiles(tables: Mapping[str, ModelTable]) -> list[OwnedTile]:
    """Return the tiles that this rank writes. If there are replicas, only the first group of ranks writes."""
    return [
        (name, table, tile)
        for name, table in tables.items()
        for tile in table.collection.local_tiles(table.table.name)
        if tile.owned and table.collection.is_first_replica
    ]


def chunks_of(
    owned: Sequence[OwnedTile], snapshot: Snapshot | None, changed: Mapping[RowStore, SortedSlots] | None = None
) -> Iterator[Chunk]:
    """Split the tiles that this rank owns into chunks, in the order of their memory, which a snapshot requires.

    For a differential checkpoint, ``changed`` has the changed slots by store, the same as in the snapshot.
    """
    # Start with small stores, because the copied rows of a store are freed when it has been read.
    stores = sorted(dict.fromkeys(tile.arena.store for _, _, tile in owned), key=_most_bytes)
    order = {store: i for i, store in enumerate(stores)}
    tiles = sorted(owned, key=lambda tile: (order[tile[2].arena.store], tile[2].number))
    saved = {store: select_rows(store, changed) for store in stores} if snapshot is None else snapshot.rows
    for tile in tiles:
        yield from _chunks(*tile, saved[tile[2].arena.store], snapshot)


def _most_bytes(store: RowStore) -> int:
    """Return the bytes of a store with all rows. Unlike its current bytes, they do not depend on other threads."""
    return store.slots * store.records.record_bytes if isinstance(store, LazyStore) else store.nbytes


def _chunks(
    name: str, table: ModelTable, tile: LocalTile, saved: DenseStore | SelectedRows, snapshot: Snapshot | None
) -> Iterator[Chunk]:
    """Yield a tile in chunks that fit into a file."""
    store, rows = tile.arena.store, tile.shard.rows
    if isinstance(saved, SelectedRows):
        yield from _keyed_chunks(name, tile, table.saved.moments, saved, snapshot)
        return
    extents = {
        key: extent
        for key, extent in tile.extents().items()
        if not key.startswith(MOMENT) or key.removeprefix(MOMENT) in table.saved.moments
    }
    of_rows, whole = array_ranges(tile.shard.table, rows), tile.arrays()
    step = rows_per_chunk(sum(whole[e.array][:1].nbytes for e in extents.values()))
    for first in range(0, len(rows), step):
        last = min(first + step, len(rows))
        arrays: dict[str, Array] = {}
        for key, extent in extents.items():
            of = of_rows.get(key, range(len(rows)))  # all rows have moments
            start, stop = max(first, of.start) - of.start, min(last, of.stop) - of.start
            if start < stop:
                tensor = whole[extent.array]
                arrays[key] = array_of(store, extent.array, tensor, extent.start + start, extent.start + stop, snapshot)
        yield Chunk(name, rows[first:last], tile.shard.cols, arrays)
