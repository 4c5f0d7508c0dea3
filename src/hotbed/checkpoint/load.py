"""Load a checkpoint: every rank reads what it needs of the tables, whatever tiles they were saved in.

Rows come straight from the files into the tables. Each block of a file is verified before any of it is used. Memory is
bounded, because rows and keys are read in pieces. Rows that were cut at other columns are not contiguous in the files,
so such tiles are read whole.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from hotbed.checkpoint.contents import (
    ModelTable,
    Stateful,
    find_link,
    model_tables,
    refuse_parts_of_distributed,
    refuse_while_saved,
    restored,
)
from hotbed.checkpoint.differential import nbytes_with_base, open_with_bases
from hotbed.checkpoint.manifest import Manifest, SavedTable, read_manifest
from hotbed.checkpoint.saved_tables import check_tables, load_tile
from hotbed.checkpoint.storage import Directory, directory
from hotbed.checkpoint.tensor_files import TensorFiles
from hotbed.embed.dense_parallel import shard_moments
from hotbed.errors import CheckpointError, DamagedError, HotbedError, did_you_mean
from hotbed.optim import SparseOptimizer
from hotbed.torch_hooks import without_tables

OF_ELEMENTS = frozenset(("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "sum", "square_avg"))
"""States of torch's optimizers that have the shape of their parameter."""
MOST_OF_AN_OPTION = 2**63
"""Of a torch optimizer's number; it multiplies float32 by them, and takes larger ones for errors of its own."""

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
    _refuse_missing(parts, manifest, place)
    refuse_parts_of_distributed(parts, find_link(parts))
    tables = model_tables(parts)
    refuse_while_saved(tables)
    for name, table in tables.items():
        _check(f"{place}", name, table, manifest)
    with open_with_bases(place, manifest) as files:
        states = read_states(manifest, parts, files)
        check_tables((manifest.tables[table] for table in tables), files)
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


def load_dense(path: str | Path | Directory, model: nn.Module) -> Manifest:
    """Load the parameters and buffers of a model without tables from a checkpoint's part ``model``."""
    place = directory(path)
    manifest = read_manifest(place)
    _refuse_missing(["model"], manifest, place)
    with open_with_bases(place, manifest) as files:
        state = read_states(manifest, ["model"], files)["model"]
    with faults_named(f"{place}", "model", model):
        model.load_state_dict({name: state[name] for name in model.state_dict() if name in state})
    return manifest


def _refuse_missing(parts: Iterable[str], manifest: Manifest, place: Directory) -> None:
    for name in parts:
        if name not in manifest.parts:
            raise CheckpointError(
                f"{place} has no part '{name}'; it has {', '.join(manifest.parts)}{did_you_mean(name, manifest.parts)}"
            )


def _load_part(place: str, name: str, part: Stateful, state: Any) -> None:
    with faults_named(place, name, part), without_tables():
        if isinstance(part, Optimizer) and not isinstance(part, SparseOptimizer):
            _load_optimizer(part, state)
        else:
            part.load_state_dict(state)


def _load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load the state of an optimizer of dense parameters, which stays fused only where it was saved so, too.

    Torch takes over whether it was; with parameters of another device or layout it may be impossible.
    """
    check_optimizer(optimizer, state)
    own = [group.get("fused") for group in optimizer.param_groups]
    optimizer.load_state_dict(shard_moments(optimizer, state))
    for group, fused in zip(optimizer.param_groups, own, strict=True):
        if group.get("fused") and not fused:
            group["fused"] = fused


@contextmanager
def faults_named(place: str, name: str, part: Stateful) -> Generator[None]:
    """Raise `CheckpointError` for whatever a part makes of a state: states pass no schema, only the part knows them."""
    try:
        yield
    except (MemoryError, OSError):
        raise
    except Exception as error:
        own = isinstance(error, HotbedError | RuntimeError) or type(error) is ValueError
        text = str(error) if own else f"{type(error).__name__} {error}"
        raise CheckpointError(
            f"{place}: part '{name}' does not fit this {type(part).__name__}: {text}; load it with the recipe that it "
            "was made with"
        ) from error


def check_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` for a state that torch would load, but that fails in the next step."""
    if fault := next(_faults_of_optimizer(optimizer, state), None):
        raise CheckpointError(fault)


def _faults_of_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> Iterator[str]:
    for number, (own, saved) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=True)):
        for key, value in own.items():
            # Options that are flags have defaults in torch, so that states of its earlier releases lack some.
            if key == "params" or value is None or isinstance(value, bool):
                continue
            if not _is_like(value, saved.get(key)):
                yield f"'param_groups.{number}.{key}' is {reprlib.repr(saved.get(key))}, must be like {value!r}"
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    order = [index for group in state["param_groups"] for index in group["params"]]
    for p, index in zip(parameters, order, strict=True):
        for name, value in state["state"].get(index, {}).items():
            if name in OF_ELEMENTS and value is not None and getattr(value, "shape", None) != p.shape:
                shape = list(getattr(value, "shape", ()))
                yield f"'state.{index}.{name}' has the shape {shape}, its parameter {list(p.shape)}"
    if len({frozenset(of) for of in state["state"].values()}) > 1:
        yield "'state' has other names for some parameters than for others"


def _is_like(value: object, found: object) -> bool:
    """Say whether an option is a finite number, or as many of them, where the other is."""
    if isinstance(value, tuple | list):
        values, others = cast("Sequence[object]", value), found if isinstance(found, tuple | list) else ()
        return len(values) == len(others) and all(map(_is_like, values, cast("Sequence[object]", others)))
    if isinstance(value, int | float | torch.Tensor):
        if isinstance(found, torch.Tensor):
            return found.numel() == 1 and bool(found.isfinite().all())
        return isinstance(found, int | float) and not isinstance(found, bool) and abs(found) < MOST_OF_AN_OPTION
    return isinstance(found, type(value))


def read_states(manifest: Manifest, parts: Iterable[str], files: TensorFiles) -> dict[str, Any]:
    """Read what ``state_dict()`` gave of some parts, without tables."""
    states: dict[str, Any] = {}
    for name in parts:
        file = manifest.file_of(name)
        tensors = {key: files.read(file, key) for key in files.arrays(file)} if file in manifest.files else {}
        try:
            states[name] = restored(manifest.parts[name], tensors)
        except KeyError as missing:
            raise CheckpointError(
                f"{files.place}/{file} has no array {missing}, which part '{name}' of the manifest speaks of"
            ) from None
    return states


def verify_checkpoint(
    path: str | Path | Directory, progress: Callable[[int, int], None] = lambda done, total: None
) -> Manifest:
    """Read all files of a checkpoint and compare them with the manifest; a `CheckpointError` names what differs.

    ``progress`` is called with the bytes that were read, and all that are to be.
    """
    place = directory(path)
    manifest = read_manifest(place)
    total, done = nbytes_with_base(manifest), 0
    with open_with_bases(place, manifest) as files:
        for count in files.verify():
            done += count
            progress(done, total)
        check_tables(manifest.tables.values(), files)
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
