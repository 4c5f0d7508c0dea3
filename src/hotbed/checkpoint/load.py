"""Load a checkpoint: every rank reads what it needs of the tables, whatever tiles they were saved in.

Rows come straight from the files into the tables, block by block, each checked before it is used; so memory is bounded
by a few blocks. Rows that were cut at other columns are not contiguous in the files, so such tiles are read whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from hotbed.checkpoint.blocks import VerifiedFiles
from hotbed.checkpoint.contents import (
    ModelTable,
    link_of,
    model_tables,
    refuse_parts_of_distributed,
    refuse_while_saved,
)
from hotbed.checkpoint.manifest import Manifest, SavedTable, Stateful, read_manifest, restored
from hotbed.checkpoint.storage import Directory, directory
from hotbed.checkpoint.tables import check_tile, load_tile
from hotbed.checkpoint.tensor_files import TensorFiles
from hotbed.errors import CheckpointError, DamagedError, HotbedError, did_you_mean
from hotbed.torch_hooks import without_tables

_log = logging.getLogger("hotbed")


def load_checkpoint(path: str | Path | Directory, parts: Mapping[str, Stateful]) -> Manifest:
    """Load the state of some parts; no other parts of the checkpoint are read.

    The number of ranks and the plan may be others than those that saved it, and so may the dtype of rows: those that
    are narrower here are rounded to the nearest, and it is logged.

    Parameters
    ----------
    path
        A checkpoint: a local path, or a URI like ``s3://bucket/path``.
    parts
        What to load into, by the name it was saved under.

    Returns
    -------
    Manifest
        What the checkpoint says of itself: ``step``, ``recipe``, ….

    Raises
    ------
    CheckpointError
        If the checkpoint is absent, incomplete or damaged (`DamagedError`), lacks a part, or does not fit it. The
        message says what may have been loaded by then, if anything: tables are read block by block, and damage is found
        when it is met.
    """
    place = directory(path)
    manifest = read_manifest(place)
    for name in parts:
        if name not in manifest.parts:
            raise CheckpointError(
                f"{place} has no part '{name}'; it has {', '.join(manifest.parts)}{did_you_mean(name, manifest.parts)}"
            )
    refuse_parts_of_distributed(parts, link_of(parts))
    tables = model_tables(parts)
    refuse_while_saved(tables)
    for name, table in tables.items():
        _check(f"{place}", name, table, manifest)
    with VerifiedFiles(place, manifest.files) as verified:
        files = TensorFiles(verified)
        states = read_states(manifest, parts, files)
        for table in tables:
            for tile in manifest.tables[table].tiles:
                check_tile(tile, manifest.tables[table], files)
        done: list[str] = []
        try:
            for name, part in parts.items():
                done.append(f"part '{name}'")
                _load_part(f"{place}", name, part, states[name])
            for name, table in tables.items():
                done.append(f"table '{name}'")
                _load_table(name, table, manifest.tables[name], files)
        except (CheckpointError, OSError) as error:
            kind = DamagedError if isinstance(error, DamagedError) else CheckpointError
            raise kind(
                f"{error}; {', '.join(done[:3])}{' …' * (len(done) > 3)} may be loaded in part, make the model again"
            ) from error
    return manifest


def _load_part(place: str, name: str, part: Stateful, state: Any) -> None:
    try:
        with without_tables():
            part.load_state_dict(state)
    except (HotbedError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{place}: part '{name}' does not fit this {type(part).__name__}: {error}; load it with the recipe that it "
            "was made with"
        ) from error


def read_states(manifest: Manifest, parts: Iterable[str], files: TensorFiles) -> dict[str, Any]:
    """Read what ``state_dict()`` gave of some parts, without tables."""
    states: dict[str, Any] = {}
    for name in parts:
        file = f"{name}.safetensors"
        tensors = {key: files.read(file, key) for key in files.arrays(file)} if file in manifest.files else {}
        states[name] = restored(manifest.parts[name], tensors)
    return states


def verify_checkpoint(
    path: str | Path | Directory, progress: Callable[[int, int], None] = lambda done, total: None
) -> Manifest:
    """Read all files of a checkpoint and compare them with the manifest; a `CheckpointError` names what differs.

    ``progress`` is called with the bytes that were read, and all that are to be.
    """
    place = directory(path)
    manifest = read_manifest(place)
    done = 0
    with VerifiedFiles(place, manifest.files) as verified:
        for name in manifest.files:
            for count in verified[name].verify():
                done += count
                progress(done, manifest.nbytes)
        files = TensorFiles(verified)
        for table in manifest.tables.values():
            for tile in table.tiles:
                check_tile(tile, table, files)
    return manifest


def _check(place: str, name: str, table: ModelTable, manifest: Manifest) -> None:
    """Raise `CheckpointError` unless the checkpoint has this table with these moments."""
    if name not in manifest.tables:
        raise CheckpointError(
            f"{place} has no table '{name}'; it has {', '.join(manifest.tables) or 'none'}"
            f"{did_you_mean(name, manifest.tables)}; init_from takes what fits, see hotbed train --init_from"
        )
    saved, spec = manifest.tables[name], table.table
    if (saved.spec.rows, saved.spec.dim) != (spec.rows, spec.dim):
        raise CheckpointError(
            f"{place}: table '{name}' is {saved.spec.rows:,} × {saved.spec.dim}, here {spec.rows:,} × {spec.dim}; make "
            "rows and dim those it was saved with; hotbed train --init_from lets tables grow"
        )
    for moment, wanted in table.saved.moments.items():
        there = saved.moments.get(moment)
        if there is None or (there.per, there.rule) != (wanted.per, wanted.rule):
            has = ", ".join(f"{m} per {s.per} of {s.rule}" for m, s in saved.moments.items()) or "none"
            raise CheckpointError(
                f"{place}: the moments of table '{name}' are {has}; part '{wanted.optimizer}' needs {moment} per "
                f"{wanted.per} of {wanted.rule}; use the optimizer that it was saved with"
            )


def _load_table(name: str, table: ModelTable, saved: SavedTable, files: TensorFiles) -> None:
    spec = table.table
    if (saved.spec.dtype, saved.spec.fp32_rows) != (spec.dtype, spec.fp32_rows):
        _log.info(
            "table %s: %s rows (%s of them fp32) are read as %s (%s fp32), rounded to the nearest where narrower",
            *(name, saved.spec.dtype, saved.spec.fp32_rows, spec.dtype, spec.fp32_rows),
        )
    with torch.no_grad():
        for tile in table.collection.local_tiles(spec.name):
            load_tile(tile, saved, table.saved.moments if tile.owned else (), files)
    assert saved.spec.init_seed is not None
    table.collection.adopt_initial(spec.name, saved.spec.init_seed, saved.spec.bound)
