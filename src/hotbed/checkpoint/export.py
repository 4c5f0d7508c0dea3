"""Tables of a checkpoint as safetensors files, one for each, which any library can read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from hotbed.checkpoint.blocks import VerifiedFiles
from hotbed.checkpoint.convert import Progress, Rectangle, read_rectangle, rows_in_memory
from hotbed.checkpoint.load import read_states
from hotbed.checkpoint.making import making
from hotbed.checkpoint.manifest import SavedTable, read_manifest
from hotbed.checkpoint.storage import Directory, directory
from hotbed.checkpoint.tensors import Array, TensorFiles
from hotbed.embed.held import form
from hotbed.specs import Table
from hotbed.store.dense import TORCH_DTYPES

TABLES = "tables.json"
"""File that says which file holds which table."""


def export_tables(
    source: str | Path | Directory,
    target: str | Path | Directory,
    *,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Write each table to a file, with bounded memory, and the rest of the model to ``dense.safetensors``.

    A table's file is ``NAME.safetensors``, its name percent-encoded, with the array ``weight [R, D]``: bfloat16 or
    float16 where all rows are stored so, else float32. ``tables.json`` says what there is.

    Parameters
    ----------
    source, target
        Paths or URIs; there must be nothing at ``target``.
    progress
        Called now and then with cells done and all cells.

    Returns
    -------
    dict
        What ``tables.json`` holds: ``step``, and by name each table's ``file``, ``rows``, ``dim`` and ``dtype``.

    Raises
    ------
    CheckpointError
        If there is no checkpoint at ``source``, it is damaged, or there is anything at ``target``.
    """
    place = directory(source)
    manifest = read_manifest(place)
    specs = {name: _readable(table.spec) for name, table in manifest.tables.items()}
    total = sum(spec.rows * spec.dim for spec in specs.values())
    done = 0

    def count(cells: int) -> None:
        nonlocal done
        done += cells
        progress(done, total)

    found: dict[str, Any] = {"step": manifest.step, "tables": {}}
    with VerifiedFiles(place, manifest.files) as verified, making(target) as (new, writer):
        files = TensorFiles(verified)
        for name, table in manifest.tables.items():
            spec, file = specs[name], f"{quote(name, safe='')}.safetensors"
            writer.write(file, {"weight": _weight(table, spec, files, count)})
            found["tables"][name] = {"file": file, "rows": spec.rows, "dim": spec.dim, "dtype": spec.dtype}
        if "model.safetensors" in manifest.files:
            state = read_states(manifest, ["model"], files)["model"]
            writer.write("dense.safetensors", {k: Array.of(t) for k, t in state.items() if isinstance(t, Tensor)})
        writer.entries()
        new.write(TABLES, json.dumps(found, indent=1))
    return found


def _readable(spec: Table) -> Table:
    """The table with rows of a dtype that others know, and of one only."""
    stored, fp32_rows = form(spec)
    return replace(spec, dtype=stored if stored in ("bf16", "fp16") and not fp32_rows else "fp32", fp32_rows=0)


def _weight(saved: SavedTable, spec: Table, files: TensorFiles, count: Any) -> Array:
    """All rows, of which some more than are asked for are in memory: tiles may lie across them."""
    saved = replace(saved, moments={})
    first, slab = 0, torch.empty(0)

    def rows(start: int, stop: int) -> Tensor:
        nonlocal first, slab
        if stop > first + len(slab):
            first, slab = start, torch.empty(0)
            last = min(start + max(rows_in_memory(saved, spec.dim), stop - start), spec.rows)
            _, arrays = read_rectangle(Rectangle(range(start, last), range(spec.dim), saved), spec, files)
            slab = arrays["weight"]
        count((stop - start) * spec.dim)
        return slab[start - first : stop - first]

    return Array(TORCH_DTYPES[spec.dtype], (spec.rows, spec.dim), rows)
