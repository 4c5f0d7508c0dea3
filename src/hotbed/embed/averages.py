"""Average tables in ``torch.optim.swa_utils.AveragedModel``: SWA and EMA of a model with tables.

torch averages parameters and buffers. Tables are neither, so their rows would not be averaged. A registration hook of
torch changes the class of an ``AveragedModel`` to `AveragedTables` if its model has tables. ``fully_shard`` changes
classes of modules in the same way. Each rank averages the rows that it has.
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

ELEMENTS_AT_ONCE = 1 << 22
"""Number of values that are averaged at once, which limits the memory for the result of an ``avg_fn``."""


class AveragedTables(AveragedModel):
    """``AveragedModel`` of a model with tables. Float32 rows are averaged like parameters."""

    @override
    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Add the parameters and rows of a model to the average. All ranks must call this."""
        pairs = list(_pair_rows(self.module, model))
        count = self.n_averaged.clone()
        super().update_parameters(model)
        for mean, value in pairs:
            for rows, others in zip(_split_rows(mean), _split_rows(value), strict=True):
                self._average(rows, others.to(rows.device), count.to(rows.device))

    def _average(self, mean: Tensor, value: Tensor, count: Tensor) -> None:
        """Average rows in place as torch averages a parameter. ``mean`` is the average of ``count`` values so far."""
        if count == 0:
            mean.copy_(value)
        elif self.multi_avg_fn is not None:
            average: Any = self.multi_avg_fn
            average([mean], [value], count)
        else:
            mean.copy_((self.avg_fn or get_swa_avg_fn())(mean, value, count))


def _pair_rows(averaged: nn.Module, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the float32 rows ``[rows, columns]`` of an averaged model and of a trained model, tile by tile."""
    here, there = list(collections_of(averaged).values()), list(collections_of(model).values())
    if [c.tables for c in here] != [c.tables for c in there]:
        raise SpecError(
            f"tables of the model: got {_names(there)}, expected {_names(here)} as in the averaged model. Call "
            "update_parameters() with the model that AveragedModel was created from"
        )
    for collection, other in zip(here, there, strict=True):
        other.sync()  # replicas may differ before
        for mine, its in zip(_tiles(collection), _tiles(other), strict=True):
            mine.arena.updates += 1
            mine.arena.store.replaced()  # differential checkpoints cannot list the averaged rows
            yield from zip(_float32_rows(mine), _float32_rows(its), strict=True)


def _tiles(collection: EmbeddingCollection) -> list[LocalTile]:
    """List the tiles of a collection on this rank, including copies of other ranks' tiles."""
    return [tile for table in collection.tables for tile in collection.local_tiles(table)]


def _float32_rows(tile: LocalTile) -> list[Tensor]:
    """Return the float32 rows of a tile without a copy."""
    arrays = tile.arrays()
    return [arrays[e.array][e.start : e.stop] for e in tile.extents().values() if e.array == "wide"]


def _names(collections: list[EmbeddingCollection]) -> str:
    return ", ".join(name for collection in collections for name in collection.tables) or "none"


def _split_rows(rows: Tensor) -> tuple[Tensor, ...]:
    return rows.split(max(ELEMENTS_AT_ONCE // max(rows.shape[1], 1), 1))


def _check_averageable(model: nn.Module) -> None:
    """Raise `SpecError` if rows of a model cannot be averaged, or the averages would not be used."""
    if any(base.__name__ == "LightningModule" for base in type(model).__mro__):
        raise SpecError(
            "averages of a whole LightningModule, e.g. by its callback WeightAveraging, are copied back to parameters "
            "only, not to tables. Average the model inside of it, AveragedModel(self.net), in on_train_batch_end"
        )
    for collection in collections_of(model).values():
        for name, table in collection.tables.items():
            trained = collection.handles[name].requires_grad
            if trained and table.dtype != "fp32" and table.fp32_rows != table.rows:
                raise SpecError(
                    f"table '{name}': got {table.dtype} rows, expected fp32, because rounding loses small changes of "
                    f"averages. Use Table('{name}', …, dtype='fp32'), or average the rest of the model: "
                    "AveragedModel(model.PART)"
                )


@cache
def _make_class(base: type[AveragedModel]) -> type[AveragedTables]:
    """Return the subclass of `AveragedTables` for `AveragedModel` or one of its subclasses."""
    if base is AveragedModel:
        return AveragedTables
    return cast("type[AveragedTables]", type(base.__name__, (AveragedTables, base), {}))


def _average_tables(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Change the class of an ``AveragedModel`` when torch registers its averaged module."""
    if name != "module" or not isinstance(module, AveragedModel) or isinstance(module, AveragedTables):
        return
    if submodule is not None and collections_of(submodule):
        _check_averageable(submodule)
        module.__class__ = _make_class(type(module))


register_module_module_registration_hook(_average_tables)
