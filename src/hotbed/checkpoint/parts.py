"""What a model and its optimizers put into a checkpoint: tables by tile, and everything else as states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, cast

from torch import nn

from hotbed.checkpoint.manifest import SavedMoment, SavedTable
from hotbed.checkpoint.state import Stateful
from hotbed.comm import Link
from hotbed.embed import Distributed, EmbeddingCollection
from hotbed.errors import CheckpointError
from hotbed.optim import SparseOptimizer
from hotbed.specs import Table


class TablePart(NamedTuple):
    """A table of a model.

    Attributes
    ----------
    collection, table
        Where it is.
    saved
        What a manifest says of it, but for its tiles.
    """

    collection: EmbeddingCollection
    table: Table
    saved: SavedTable


def tables_of_parts(parts: Mapping[str, Stateful]) -> dict[str, TablePart]:
    """Tables of all models among some parts, with the moments of all optimizers among them.

    They are called ``path.table``, as in `SparseOptimizer`; a second model's ``PART:path.table``.

    Raises
    ------
    CheckpointError
        If an optimizer trains tables that are in no model among the parts.
    """
    found: dict[str, TablePart] = {}
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
                found[name] = TablePart(module, table, SavedTable(spec))
    for part, optimizer in parts.items():
        if not isinstance(optimizer, SparseOptimizer):
            continue
        rule = optimizer.rule
        for trained in optimizer.trained():
            name = names.get((id(trained.collection), trained.table))
            if name is None:
                raise CheckpointError(
                    f"part '{part}' trains table '{trained.table}', whose model is not among the parts; give the "
                    'model, too: {"model": model, …}'
                )
            moments = {m.name: SavedMoment(m.per, trained.initial[m.name], part, rule.name) for m in rule.moments}
            here = found[name]
            found[name] = here._replace(saved=replace(here.saved, moments={**here.saved.moments, **moments}))
    return found


def refuse_while_saved(tables: Mapping[str, TablePart]) -> None:
    """Raise `CheckpointError` for tables of which a checkpoint is being written."""
    for name, table in tables.items():
        if any(held.arena.store.on_change is not None for held in table.collection.held(table.table.name)):
            raise CheckpointError(f"table '{name}' is being saved; call wait() of what save_checkpoint returned first")


def link_of(parts: Mapping[str, Stateful]) -> Link | None:
    """The ranks of a distributed model among the parts; None where there is none."""
    return next((part.link for part in parts.values() if isinstance(part, Distributed)), None)


def refuse_parts_of_distributed(parts: Mapping[str, Stateful], link: Link | None) -> None:
    """Raise `CheckpointError` for tables of several ranks whose model is not among the parts as it was distributed."""
    for name, part in parts.items():
        for module in part.modules() if isinstance(part, nn.Module) else ():
            if link is None and isinstance(module, EmbeddingCollection) and module.is_distributed:
                raise CheckpointError(
                    f"part '{name}' has tables that are distributed over ranks; give what hotbed.distribute returned"
                )


def plan_of(parts: Mapping[str, Stateful]) -> Mapping[str, object] | None:
    """Plain values of its plan."""
    plan = next((part.plan for part in parts.values() if isinstance(part, Distributed)), None)
    return None if plan is None else cast("Mapping[str, object]", plan.to_dict())
