"""Warm-start a new model from a checkpoint of another model. Tables may be new, removed, renamed or larger."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotbed.checkpoint.contents import (
    ModelTable,
    Stateful,
    find_link,
    model_tables,
    refuse_parts_of_distributed,
    refuse_while_saved,
)
from hotbed.checkpoint.differential import open_with_bases
from hotbed.checkpoint.load import check_optimizer, explain_part_errors, read_states
from hotbed.checkpoint.manifest import SavedTable, find_checkpoint, read_manifest
from hotbed.checkpoint.saved_tables import check_tables, load_tile
from hotbed.checkpoint.storage import Directory
from hotbed.checkpoint.tensor_files import TensorFiles
from hotbed.embed.dense_parallel import shard_like, shard_moments
from hotbed.embed.dynamic import PREFIX
from hotbed.errors import CheckpointError, did_you_mean
from hotbed.optim import SparseOptimizer
from hotbed.optim.saved_state import check_step
from hotbed.store import DenseStore
from hotbed.torch_hooks import without_tables


@dataclass(frozen=True)
class Taken:
    """Report of whether a ``table``, ``parameter`` or ``optimizer`` was loaded, at least partially.

    ``name`` is its name in this model, or in the checkpoint if this model does not have it. ``note`` has details.
    """

    what: str
    name: str
    taken: bool
    note: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def init_from(
    path: str | Path | Directory,
    parts: Mapping[str, Stateful],
    *,
    rename: Mapping[str, str] | None = None,
    leave: Collection[str] = (),
    optimizers: bool = True,
) -> list[Taken]:
    """Initialize a model from a matching part of a checkpoint. For a distributed model, all ranks must call this.

    A table loads the rows that it has in common with the checkpoint's table. Ids must have the same meaning, e.g. from
    a vocabulary that was extended. Additional rows have the initial values that they would have in the checkpoint's
    table. Tables with another dim and parameters with another shape are initialized as usual. The step,
    schedules, loaders and metrics are never loaded.

    Parameters
    ----------
    path
        A checkpoint, or a directory, which stands for its newest checkpoint.
    parts
        Models and optimizers by name, e.g. ``{"model": model, "sparse": optimizer}``. Other parts are ignored.
    rename
        Names of tables in the checkpoint, by their names in this model.
    leave
        Tables that are not loaded.
    optimizers
        Whether to also load the moments of tables and parameters. Moments of another optimizer are not loaded.

    Returns
    -------
    list
        A report for every table, parameter and optimizer of this model and of the checkpoint.

    Raises
    ------
    CheckpointError
        If there is no checkpoint, it is damaged, or a named table does not exist.
    """
    place = find_checkpoint(path, best=True)
    manifest = read_manifest(place)
    refuse_parts_of_distributed(parts, find_link(parts))
    tables = model_tables(parts)
    refuse_while_saved(tables)
    there = {
        resolve_table(name, tables, "in this model"): resolve_table(old, manifest.tables, f"in {place}")
        for name, old in (rename or {}).items()
    }
    left = {resolve_table(name, tables, "in this model") for name in leave}
    report: list[Taken] = []
    with open_with_bases(place, manifest) as files:
        check_tables(manifest.tables.values(), files)
        trained_by = {moment.optimizer for table in manifest.tables.values() for moment in table.moments.values()}
        states = read_states(manifest, trained_by & manifest.parts.keys() if optimizers else (), files)
        for name, table in tables.items():
            saved = None if name in left else manifest.tables.get(there.get(name, name))
            taken, moments = _take_table(name, there.get(name, name), table, saved, optimizers, files)
            report.append(taken)
            if saved is not None and moments:
                trainer = next(iter(saved.moments.values())).optimizer
                with explain_part_errors(f"{place}", trainer, table.collection):
                    _take_step(table, parts, saved, states)
        used = {there.get(name, name) for name in tables}
        report += [Taken("table", name, False, "is not in this model") for name in manifest.tables if name not in used]
        for part, value in parts.items():
            if part not in manifest.parts:
                continue
            if isinstance(value, nn.Module):
                state = read_states(manifest, [part], files)[part]
                with explain_part_errors(f"{place}", part, value):
                    report += _take_parameters(value, state)
            elif optimizers and isinstance(value, Optimizer) and not isinstance(value, SparseOptimizer):
                state = read_states(manifest, [part], files)[part]
                with explain_part_errors(f"{place}", part, value):
                    report.append(_take_optimizer(part, value, state))
    return report


def resolve_table(name: str, known: Collection[str], where: str) -> str:
    """Return the full name of a table. ``name`` may lack its collection."""
    found = [full for full in known if name in (full, full.rsplit(".", 1)[-1])]
    if len(found) != 1:
        short = [full.rsplit(".", 1)[-1] for full in known]
        what = "is ambiguous: " + ", ".join(found) if found else "does not exist"
        raise CheckpointError(
            f"table '{name}' {what} {where}. Tables are {', '.join(known) or 'none'}{did_you_mean(name, short)}"
        )
    return found[0]


def _take_table(
    name: str, there: str, table: ModelTable, saved: SavedTable | None, optimizers: bool, files: TensorFiles
) -> tuple[Taken, list[str]]:
    """Load a table's rows. Return the report, and the names of the moments that were loaded."""
    spec = table.table
    if saved is None:
        return Taken("table", name, False, f"{spec.rows:,} rows, reinitialized"), []
    if spec.dynamic is not None:
        return Taken("table", name, False, "reinitialized, because a dynamic table's rows belong to ids of a run"), []
    if saved.spec.dim != spec.dim:
        note = f"reinitialized: dim {saved.spec.dim} in the checkpoint, {spec.dim} in this model"
        return Taken("table", name, False, note), []
    fitting = [
        moment
        for moment, wanted in table.saved.moments.items()
        if optimizers
        and (old := saved.moments.get(moment)) is not None
        and (old.per, old.rule) == (wanted.per, wanted.rule)
    ]
    moments = fitting if len(fitting) == len(table.saved.moments) else []
    seed = saved.spec.init_seed
    assert seed is not None
    with torch.no_grad():
        for tile in table.collection.local_tiles(spec.name):
            rows = tile.shard.rows
            known = len(range(rows.start, min(rows.stop, saved.spec.rows), rows.step))
            slot = tile.arena.first_slots[tile.number] + known
            new = rows[known:]
            if new and isinstance(tile.arena.store, DenseStore):
                tile.arena.store.initialize(slot, seed=seed, rows=new, cols=tile.shard.cols, bound=saved.spec.bound)
            load_tile(tile, saved, moments if tile.owned else (), files)
    table.collection.adopt_initial(spec.name, seed, saved.spec.bound)
    notes = [f"{min(saved.spec.rows, spec.rows):,} rows" + (f" of '{there}'" if there != name else "")]
    if spec.rows != saved.spec.rows:
        more = spec.rows - saved.spec.rows
        notes.append(f"{more:,} new rows" if more > 0 else f"{-more:,} more rows in the checkpoint")
    if (spec.dtype, spec.fp32_rows) != (saved.spec.dtype, saved.spec.fp32_rows):
        notes.append(f"{saved.spec.dtype} as {spec.dtype}, rounded to nearest if of lower precision")
    if table.saved.moments:
        notes.append(f"moments {', '.join(moments)}" if moments else "moments reinitialized")
    return Taken("table", name, True, ", ".join(notes)), moments


def _take_parameters(model: nn.Module, saved: Mapping[str, Tensor]) -> list[Taken]:
    """Copy parameters and buffers of equal names and shapes."""
    report: list[Taken] = []
    with without_tables(), torch.no_grad():
        own: dict[str, Tensor] = {n: t for n, t in model.state_dict().items() if not _is_of_ids(n)}
        saved = {n: t for n, t in saved.items() if not _is_of_ids(n)}
        for name, tensor in own.items():
            if name not in saved:
                report.append(Taken("parameter", name, False, "is not in the checkpoint, reinitialized"))
            elif saved[name].shape != tensor.shape:
                shapes = f"{list(saved[name].shape)} in the checkpoint, {list(tensor.shape)} in this model"
                report.append(Taken("parameter", name, False, f"reinitialized: {shapes}"))
            else:
                tensor.copy_(shard_like(saved[name], tensor))
                report.append(Taken("parameter", name, True, str(list(tensor.shape))))
    return report + [Taken("parameter", n, False, "is not in this model") for n in saved if n not in own]


def _is_of_ids(name: str) -> bool:
    """Return whether a tensor of a model's state belongs to the ids of a dynamic table."""
    return name.rsplit(".", 1)[-1].startswith(PREFIX)


def _take_optimizer(part: str, optimizer: Optimizer, saved: Mapping[str, Any]) -> Taken:
    """Load the state of a torch optimizer if its parameters match. Its options are not loaded."""
    own = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    counts = [[len(group["params"]) for group in groups] for groups in (own["param_groups"], saved["param_groups"])]
    shapes = [
        {k: v.shape for k, v in saved["state"].get(i, {}).items() if isinstance(v, Tensor) and v.dim()}
        for i in range(len(parameters))
    ]
    fits = counts[0] == counts[1] and all(
        shape == p.shape for p, of in zip(parameters, shapes, strict=True) for shape in of.values()
    )
    same = [sorted(group.keys()) for group in own["param_groups"]] == [
        sorted(group.keys()) for group in saved["param_groups"]
    ]
    if not fits or not same:
        return Taken("optimizer", part, False, "reinitialized: its parameters or options differ")
    check_optimizer(optimizer, saved)
    taken = {"state": saved["state"], "param_groups": own["param_groups"]}
    optimizer.load_state_dict(shard_moments(optimizer, taken))
    return Taken("optimizer", part, True, f"moments of {len(saved['state'])} parameters")


def _take_step(table: ModelTable, parts: Mapping[str, Stateful], saved: SavedTable, states: Mapping[str, Any]) -> None:
    """Load the step count of a table after its moments were loaded."""
    part = next(iter(saved.moments.values())).optimizer
    if part not in states:
        return
    groups: list[Mapping[str, Any]] = states[part]["param_groups"]
    names = [name for group in groups for name in cast("Sequence[str]", group["tables"])]
    own = [i for i, name in enumerate(names) if name.rsplit(".", 1)[-1] == saved.spec.name]
    for optimizer in parts.values():
        for trained in optimizer.trained() if isinstance(optimizer, SparseOptimizer) else ():
            if len(own) == 1 and trained.collection is table.collection and trained.table == table.table.name:
                step = states[part]["state"][own[0]]["step"]
                check_step(step)
                with without_tables():
                    trained.updater.load_state(trained.table, {"step": step})
