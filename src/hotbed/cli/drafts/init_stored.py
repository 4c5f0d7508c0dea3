"""Draft a recipe for a dataset with its own schema: a prepared dataset, or NumPy arrays of ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from hotbed.data import NpySource, Source
from hotbed.data.drafting.draft import Draft, DraftedSplits, hashed_rows
from hotbed.data.drafting.profile import count_distinct, spread_groups
from hotbed.data.formats.npy import has_days
from hotbed.data.preparation.stored_rows import Described, open_described, source_files
from hotbed.errors import DataError, SpecError
from hotbed.locations import location

_MOST_READ = 1 << 24  # about this many samples are read, in chunks that are spread evenly over the data
_MOST_ROWS = 40_000_000  # largest number of rows of a drafted table, as in MLPerf's DLRM v2


def draft_stored(path: str | Path, options: Sequence[str]) -> tuple[Draft, Source] | None:
    """Draft a recipe for a dataset with its own schema. Return None if the schema has to be drafted from columns."""
    if (found := open_stored(path)) is None:
        return None
    if options:
        raise SpecError(
            f"{path} is a dataset with its own schema, so {options[0]} has no effect. Remove {options[0]}, or edit "
            "the drafted recipe"
        )
    source = found.source
    samples = {split: source.samples(split) for split in source.splits}
    if "train" not in samples:
        raise DataError(
            f"{path}: got the splits {', '.join(samples)}, expected a split named train. Rename one of the splits"
        )
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


def open_stored(path: str | Path) -> Described | None:
    """Open a prepared dataset or NumPy arrays. Return None for any other path."""
    at = location(str(path))
    return open_described(at) or (_open_arrays(at) if isinstance(at, Path) and has_days(at) else None)


def _open_arrays(path: Path) -> Described:
    _, files = source_files(path, None)
    groups = [group for of_split in files.values() for file in of_split for group in file.row_groups()]
    if not groups:
        raise DataError(f"{path} has no rows")
    total = sum(group.samples for group in groups)
    read = spread_groups(groups, len(groups) * _MOST_READ // total)
    names = [name for name in groups[0].file.schema.names if name.startswith("cat_")]
    largest = dict.fromkeys(names, 0)
    for group in read:
        table = group.read(names)
        for name in names:
            values: Any = table[name].combine_chunks()
            ids = (values.flatten() if pa.types.is_large_list(values.type) else values).to_numpy()
            if int(ids.min()) < 0:
                raise DataError(f"{group}, column '{name}': got id {int(ids.min()):,}, expected row numbers from 0 on")
            largest[name] = max(largest[name], int(ids.max()))
    wide = [name for name, most in largest.items() if most >= _MOST_ROWS]
    distinct = count_distinct(groups, dict.fromkeys(wide, groups[0].file.schema.field(wide[0]).type)) if wide else {}
    rows = [min(_MOST_ROWS, hashed_rows(distinct[name])) if name in distinct else largest[name] + 1 for name in names]
    modulo = bool(wide) or len(read) < len(groups)
    notes = ["The last day is split into validation (first half) and test. Set `splits` for other splits."]
    notes += [f"`rows` is 1 + the largest id in {sum(g.samples for g in read):,} of {total:,} samples."]
    notes += ["`modulo` replaces larger ids by their remainders, as TorchRec's loader does."] if modulo else []
    arguments: dict[str, object] = {"rows": rows, **({"modulo": True} if modulo else {})}
    source = NpySource(path, rows=rows, modulo=modulo)
    return Described(source, {"class_path": "hotbed.data.NpySource", "init_args": arguments}, notes)
