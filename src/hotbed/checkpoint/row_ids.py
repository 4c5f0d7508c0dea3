"""Tell which id each row of a saved table has: its number, or what a dynamic table's state says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from hotbed.checkpoint.manifest import Manifest
from hotbed.checkpoint.tensor_files import TensorFiles
from hotbed.embed.dynamic import PREFIX
from hotbed.errors import CheckpointError

NO_ID = -1


def is_dynamic(table: str, manifest: Manifest) -> bool:
    """Whether rows of a saved table belong to ids of a dynamic one."""
    return _state_of(table, "ids", manifest) is not None


def row_ids(table: str, rows: range, manifest: Manifest, files: TensorFiles, ttl_steps: int | None = None) -> Tensor:
    """Ids of rows ``[n]`` int64: their numbers, or those that they have in a dynamic table, `NO_ID` where none.

    With ``ttl_steps`` ids that were not seen for longer, which lookups no longer find, are none either.
    """
    found = _read(table, "ids", rows, manifest, files)
    if found is None:
        return torch.arange(rows.start, rows.stop)
    now = _state_of(table, "now", manifest)
    times = None if ttl_steps is None else _read(table, "times", rows, manifest, files)
    if now is None or times is None:
        return found
    return found.masked_fill(int(files.read(*now)) - times > (ttl_steps or 0), NO_ID)


def _read(table: str, name: str, rows: range, manifest: Manifest, files: TensorFiles) -> Tensor | None:
    found = _state_of(table, name, manifest)
    if found is None:
        return None
    stored, wanted = files.find(*found), manifest.tables[table].spec.rows
    if (stored.dtype, list(stored.shape)) != (torch.int64, [wanted]):
        raise CheckpointError(
            f"{files.place}/{found[0]}: '{found[1]}' is {stored.dtype} {list(stored.shape)}, must be torch.int64 "
            f"[{wanted}]"
        )
    return files.read_rows(*found, rows)


def _state_of(table: str, name: str, manifest: Manifest) -> tuple[str, str] | None:
    """File and array with a state of the rows of a dynamic table; None for other tables."""
    own, _, path = table.rpartition(":")
    for part, state in manifest.parts.items():
        entry = cast("Mapping[str, Any]", state).get(f"{path}.{PREFIX}{name}") if isinstance(state, Mapping) else None
        if own in ("", part) and isinstance(entry, Mapping) and "$tensor" in entry:
            return f"{part}.safetensors", str(cast("Mapping[str, Any]", entry)["$tensor"])
    return None
