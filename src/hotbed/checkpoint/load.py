"""Load a checkpoint. Every rank reads the rows and columns that it needs from the saved tiles.

Rows are read from the files directly into the tables. Each block of a file is verified before its use. Memory is
bounded, because rows and keys are read in pieces. If a tile was sharded at other columns, its rows are not contiguous
in the file, so all columns of the tile are read.
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
    restore_value,
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
"""Upper limit of numeric options of torch's optimizers. Larger options cause errors when they multiply float32."""

_log = logging.getLogger("hotbed")


def load_checkpoint(path: str | Path | Directory, parts: Mapping[str, Stateful]) -> Manifest:
    """Load the states of some parts. Other parts of the checkpoint are not read.

    The number of ranks, the plan and the dtype of rows may differ from the run that saved the checkpoint. If the dtype
    has a lower precision, rows are rounded to nearest, and this is logged.

    Parameters
    ----------
    path
        A checkpoint: a local path, or a URI like ``s3://bucket/path``.
    parts
        Objects to load into, by the names of the saved parts.

    Returns
    -------
    Manifest
        The manifest, with ``step``, ``recipe``, ….

    Raises
    ------
    CheckpointError
        If the checkpoint does not exist, is incomplete or damaged (`DamagedError`), lacks a part, or does not match it.
        Tables are read block by block, so damage may be detected late. The message then names the parts that may be
        partially loaded.
    """
    place = directory(path)
    manifest = read_manifest(place)
    _refuse_missing(parts, manifest, place)
    refuse_parts_of_distributed(parts, find_link(parts))
    tables = model_tables(parts)
    refuse_while_saved(tables)
    for name, table in tables.items():
        _check_table(f"{place}", name, table, manifest)
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
                f"{error}. {', '.join(done[:3])}{' …' * (len(done) > 3)} may be partially loaded. Create a new model"
            ) from error
    return manifest


def load_dense(path: str | Path | Directory, model: nn.Module) -> Manifest:
    """Load the parameters and buffers of a model without tables from a checkpoint's part ``model``."""
    place = directory(path)
    manifest = read_manifest(place)
    _refuse_missing(["model"], manifest, place)
    with open_with_bases(place, manifest) as files:
        state = read_states(manifest, ["model"], files)["model"]
    with explain_part_errors(f"{place}", "model", model):
        model.load_state_dict({name: state[name] for name in model.state_dict() if name in state})
    return manifest


def _refuse_missing(parts: Iterable[str], manifest: Manifest, place: Directory) -> None:
    for name in parts:
        if name not in manifest.parts:
            raise CheckpointError(
                f"{place}: got part '{name}', expected one of {', '.join(manifest.parts)}"
                f"{did_you_mean(name, manifest.parts)}"
            )


def _load_part(place: str, name: str, part: Stateful, state: Any) -> None:
    with explain_part_errors(place, name, part), without_tables():
        if isinstance(part, Optimizer) and not isinstance(part, SparseOptimizer):
            _load_optimizer(part, state)
        else:
            part.load_state_dict(state)


def _load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load the state of an optimizer of dense parameters. It is fused only if the saved optimizer was, too."""
    check_optimizer(optimizer, state)
    own = [group.get("fused") for group in optimizer.param_groups]
    optimizer.load_state_dict(shard_moments(optimizer, state))
    # Loading overwrites the option, but parameters of this device or layout may not support fused steps.
    for group, fused in zip(optimizer.param_groups, own, strict=True):
        if group.get("fused") and not fused:
            group["fused"] = fused


@contextmanager
def explain_part_errors(place: str, name: str, part: Stateful) -> Generator[None]:
    """Raise `CheckpointError` for any error of loading a part, because states have no schema that could be checked."""
    try:
        yield
    except (MemoryError, OSError):
        raise
    except Exception as error:
        own = isinstance(error, HotbedError | RuntimeError) or type(error) is ValueError
        text = str(error) if own else f"{type(error).__name__} {error}"
        raise CheckpointError(
            f"{place}: part '{name}' does not match this {type(part).__name__}: {text}. Load it with the recipe of the "
            "checkpoint"
        ) from error


def check_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` for a state that torch would load but that would fail in the next step."""
    if fault := next(_faults_of_optimizer(optimizer, state), None):
        raise CheckpointError(fault)


def _faults_of_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> Iterator[str]:
    for number, (own, saved) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=True)):
        for key, value in own.items():
            # Flags have defaults in torch, so states of earlier releases may lack them.
            if key == "params" or value is None or isinstance(value, bool):
                continue
            if not _is_like(value, saved.get(key)):
                got = reprlib.repr(saved.get(key))
                yield f"'param_groups.{number}.{key}': got {got}, expected a value like {value!r}"
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    order = [index for group in state["param_groups"] for index in group["params"]]
    for p, index in zip(parameters, order, strict=True):
        for name, value in state["state"].get(index, {}).items():
            if name in OF_ELEMENTS and value is not None and getattr(value, "shape", None) != p.shape:
                shape = list(getattr(value, "shape", ()))
                yield f"'state.{index}.{name}': got shape {shape}, expected {list(p.shape)} as its parameter"
    if len({frozenset(of) for of in state["state"].values()}) > 1:
        yield "'state': got different names for different parameters, expected the same names"


def _is_like(value: object, found: object) -> bool:
    """Return whether a saved option has the type of ``value``. Numbers must be finite, sequences of equal length."""
    if isinstance(value, tuple | list):
        values, others = cast("Sequence[object]", value), found if isinstance(found, tuple | list) else ()
        return len(values) == len(others) and all(map(_is_like, values, cast("Sequence[object]", others)))
    if isinstance(value, int | float | torch.Tensor):
        if isinstance(found, torch.Tensor):
            return found.numel() == 1 and bool(found.isfinite().all())
        return isinstance(found, int | float) and not isinstance(found, bool) and abs(found) < MOST_OF_AN_OPTION
    return isinstance(found, type(value))


def read_states(manifest: Manifest, parts: Iterable[str], files: TensorFiles) -> dict[str, Any]:
    """Read the saved ``state_dict()`` of some parts, without tables."""
    states: dict[str, Any] = {}
    for name in parts:
        file = manifest.file_of(name)
        tensors = {key: files.read(file, key) for key in files.arrays(file)} if file in manifest.files else {}
        try:
            states[name] = restore_value(manifest.parts[name], tensors)
        except KeyError as missing:
            raise CheckpointError(
                f"{files.place}/{file} has no array {missing}, but part '{name}' of the manifest refers to it"
            ) from None
    return states


def verify_checkpoint(
    path: str | Path | Directory, progress: Callable[[int, int], None] = lambda done, total: None
) -> Manifest:
    """Read all files of a checkpoint and compare them with the manifest. Raise `CheckpointError` if a file differs.

    ``progress`` is called with the number of bytes read and of all bytes.
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


def _check_table(place: str, name: str, table: ModelTable, manifest: Manifest) -> None:
    """Raise `CheckpointError` if the checkpoint lacks this table or its moments."""
    if name not in manifest.tables:
        raise CheckpointError(
            f"{place}: got table '{name}', expected one of {', '.join(manifest.tables) or 'none'}"
            f"{did_you_mean(name, manifest.tables)}. To load only matching tables, use hotbed train --init_from"
        )
    saved, spec = manifest.tables[name], table.table
    if (saved.spec.rows, saved.spec.dim) != (spec.rows, spec.dim):
        raise CheckpointError(
            f"{place}: table '{name}': got {spec.rows:,} × {spec.dim}, expected {saved.spec.rows:,} × {saved.spec.dim} "
            "as in the checkpoint. Use its rows and dim, or let the table grow with hotbed train --init_from"
        )
    for moment, wanted in table.saved.moments.items():
        there = saved.moments.get(moment)
        if there is None or (there.per, there.rule) != (wanted.per, wanted.rule):
            has = ", ".join(f"{m} per {s.per} of {s.rule}" for m, s in saved.moments.items()) or "none"
            raise CheckpointError(
                f"{place}: moments of table '{name}': got {has}, expected {moment} per {wanted.per} of {wanted.rule} "
                f"for part '{wanted.optimizer}'. Use the optimizer of the checkpoint"
            )


def _load_table(name: str, table: ModelTable, saved: SavedTable, files: TensorFiles) -> None:
    spec = table.table
    if (saved.spec.dtype, saved.spec.fp32_rows) != (spec.dtype, spec.fp32_rows):
        _log.info(
            "table %s: %s rows (%s of them fp32) are read as %s (%s fp32), rounded to nearest if of lower precision",
            name,
            saved.spec.dtype,
            saved.spec.fp32_rows,
            spec.dtype,
            spec.fp32_rows,
        )
    with torch.no_grad():
        for tile in table.collection.local_tiles(spec.name):
            load_tile(tile, saved, table.saved.moments if tile.owned else (), files)
    assert saved.spec.init_seed is not None
    table.collection.adopt_initial(spec.name, saved.spec.init_seed, saved.spec.bound)
