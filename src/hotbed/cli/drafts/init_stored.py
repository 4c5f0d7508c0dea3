"""Draft a recipe for a dataset with its own schema: a prepared dataset, or NumPy arrays of ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from hotbed.data import NpySource, Source
from hotbed.data.drafting.draft import Draft, DraftedSplits, hashed_rows
from hotbed.data.drafting.profile import count_distinct
from hotbed.data.formats.npy import has_days
from hotbed.data.preparation.stored_rows import open_described, source_files
from hotbed.errors import DataError, SpecError
from hotbed.locations import location

_MOST_READ = 1 << 24  # largest number of samples that are read; of more, evenly spread chunks are read
_MOST_ROWS = 40_000_000  # largest number of rows of a drafted table, as in MLPerf's DLRM v2


class OpenedData(NamedTuple):
    """A source, its entry in a recipe, and comments."""

    source: Source
    entry: Mapping[str, object]
    notes: Sequence[str] = ()


def draft_stored(path: str | Path, options: Sequence[str]) -> tuple[Draft, Source] | None:
    """Draft a recipe for a dataset with a schema; None for a path that has to be drafted from its columns."""
    if (found := open_stored(path)) is None:
        return None
    if options:
        raise SpecError(
            f"{path} is a dataset with its own schema, so {options[0]} has no effect. Leave it out, or edit the recipe"
        )
    source = found.source
    samples = {split: source.samples(split) for split in source.splits}
    if "train" not in samples:
        raise DataError(f"{path}: got the splits {', '.join(samples)}, expected one named train. Rename it")
    lookups = samples["train"] * sum(column.ids or 1 for column in source.schema.sparse)
    draft = Draft(
        schema=source.schema,
        reasons={},
        left_out=(),
        labels=(),
        splits=DraftedSplits(has_valid="valid" in samples, has_test="test" in samples, notes=list(found.notes)),
        samples=samples["train"],
        repeats=lookups / sum(source.schema.rows.values()),
        source=found.entry,
    )
    return draft, source


def open_stored(path: str | Path) -> OpenedData | None:
    """Open a prepared dataset or NumPy arrays; None for other paths."""
    at = location(str(path))
    if (described := open_described(at)) is not None:
        return OpenedData(described.source, described.entry)
    return _open_arrays(at) if isinstance(at, Path) and has_days(at) else None


def _open_arrays(path: Path) -> OpenedData:
    _, files = source_files(path, None)
    groups = [group for of_split in files.values() for file in of_split for group in file.row_groups()]
    if not groups:
        raise DataError(f"{path} has no rows")
    total = sum(group.samples for group in groups)
    count = max(1, min(len(groups), len(groups) * _MOST_READ // total))
    read = [groups[int(i)] for i in np.unique(np.linspace(0, len(groups) - 1, count).round())]
    names = [name for name in groups[0].file.schema.names if name.startswith("cat_")]
    largest = dict.fromkeys(names, 0)
    for group in read:
        table = group.read(names)
        for name in names:
            values: Any = table[name].combine_chunks()
            ids = (values.flatten() if pa.types.is_large_list(values.type) else values).to_numpy()
            if int(ids.min()) < 0:
                raise DataError(f"{group}, column '{name}': id {int(ids.min()):,} is negative. Ids must be row numbers")
            largest[name] = max(largest[name], int(ids.max()))
    wide = [name for name, most in largest.items() if most >= _MOST_ROWS]
    distinct = count_distinct(groups, dict.fromkeys(wide, groups[0].file.schema.field(wide[0]).type)) if wide else {}
    rows = [min(_MOST_ROWS, hashed_rows(distinct[name])) if name in distinct else largest[name] + 1 for name in names]
    modulo = bool(wide) or len(read) < len(groups)
    notes = ["The last day is the validation split (first half) and the test split; `splits` sets others."]
    notes += [f"`rows` is the largest id + 1 in {sum(g.samples for g in read):,} of {total:,} samples."]
    notes += ["Larger ids are reduced `modulo` the rows, as TorchRec's loader does."] if modulo else []
    arguments: dict[str, object] = {"rows": rows, **({"modulo": True} if modulo else {})}
    source = NpySource(path, rows=rows, modulo=modulo)
    return OpenedData(source, {"class_path": "hotbed.data.NpySource", "init_args": arguments}, notes)
