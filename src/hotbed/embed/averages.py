"""Average tables in ``torch.optim.swa_utils.AveragedModel``: SWA and EMA of a model with tables.

torch averages parameters and buffers, and tables are neither: the copy would keep the rows that it was made with. So an
``AveragedModel`` that is made of a model with tables becomes an `AveragedTables`, by the hook that torch calls when it
gets its copy; ``fully_shard`` changes the classes of modules in the same way. Each rank averages the rows that it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn
from typing_extensions import override

from hotbed.embed.arena import LocalTile
from hotbed.embed.collection import EmbeddingCollection
from hotbed.embed.plan_names import collections_of
from hotbed.errors import SpecError

CELLS = 1 << 22
"""Of rows that are averaged at once, which bounds the memory for what an ``avg_fn`` returns."""


class AveragedTables(AveragedModel):
    """``AveragedModel`` of a model with tables, whose float32 rows are averaged like parameters."""

    @override
    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Average the parameters and rows of a model with those so far; all ranks must call this."""
        pairs = list(_pairs(self.module, model))
        count = self.n_averaged.clone()
        super().update_parameters(model)
        for mean, value in pairs:
            for rows, others in zip(_chunks(mean), _chunks(value), strict=True):
                self._average(rows, others.to(rows.device), count.to(rows.device))

    def _average(self, mean: Tensor, value: Tensor, count: Tensor) -> None:
        """Average rows in place as torch does with a parameter, of which ``count`` values were averaged before."""
        if count == 0:
            mean.copy_(value)
        elif self.multi_avg_fn is not None:
            average: Any = self.multi_avg_fn
            average([mean], [value], count)
        else:
            mean.copy_((self.avg_fn or get_swa_avg_fn())(mean, value, count))


def _pairs(averaged: nn.Module, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the float32 rows ``[rows, columns]`` of an averaged model and of the other, tile by tile."""
    here, there = list(collections_of(averaged).values()), list(collections_of(model).values())
    if [c.tables for c in here] != [c.tables for c in there]:
        raise SpecError(
            f"the averaged model has the tables {_names(here)}, the other {_names(there)}; give update_parameters() "
            "the model that AveragedModel was made of"
        )
    for collection, other in zip(here, there, strict=True):
        other.sync()  # replicas, which are no copy of each other before
        for mine, its in zip(_tiles(collection), _tiles(other), strict=True):
            mine.arena.updates += 1
            mine.arena.store.replaced()  # differential checkpoints cannot tell which rows these are
            yield from zip(_wide(mine), _wide(its), strict=True)


def _tiles(collection: EmbeddingCollection) -> list[LocalTile]:
    """List the tiles of a collection that are on this rank, its own and copies of other ranks'."""
    return [tile for table in collection.tables for tile in collection.local_tiles(table)]


def _wide(tile: LocalTile) -> list[Tensor]:
    """Return the float32 rows of a tile, its memory."""
    arrays = tile.arrays()
    return [arrays[e.array][e.start : e.stop] for e in tile.extents().values() if e.array == "wide"]


def _names(collections: list[EmbeddingCollection]) -> str:
    return ", ".join(name for collection in collections for name in collection.tables) or "none"


def _chunks(rows: Tensor) -> tuple[Tensor, ...]:
    return rows.split(max(CELLS // max(rows.shape[1], 1), 1))


def _refuse_unaveraged(model: nn.Module) -> None:
    """Raise `SpecError` for tables whose rows cannot be averaged, or whose averages would not be used."""
    if any(kind.__name__ == "LightningModule" for kind in type(model).__mro__):
        raise SpecError(
            "averages of a whole LightningModule, as its callback WeightAveraging makes them, go back into parameters "
            "only, not into tables; average the model in it, AveragedModel(self.net), in on_train_batch_end"
        )
    for collection in collections_of(model).values():
        for name, table in collection.tables.items():
            trained = collection.handles[name].requires_grad
            if trained and table.dtype != "fp32" and table.fp32_rows != table.rows:
                raise SpecError(
                    f"table '{name}' has {table.dtype} rows, in which averages are lost to rounding; make it "
                    f"Table('{name}', …, dtype='fp32'), or average the rest of the model: AveragedModel(model.PART)"
                )


@cache
def _with_tables(kind: type[AveragedModel]) -> type[AveragedTables]:
    """Make the class that averages tables, too, of `AveragedModel` or of a subclass."""
    if kind is AveragedModel:
        return AveragedTables
    return cast("type[AveragedTables]", type(kind.__name__, (AveragedTables, kind), {}))


def _average_tables(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Hook of torch: a module gets a submodule."""
    if name != "module" or not isinstance(module, AveragedModel) or isinstance(module, AveragedTables):
        return
    if submodule is not None and collections_of(submodule):
        _refuse_unaveraged(submodule)
        module.__class__ = _with_tables(type(module))


register_module_module_registration_hook(_average_tables)
