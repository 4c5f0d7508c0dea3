"""Draft a recipe for a folder that says itself what its columns are: a prepared dataset, or NumPy arrays of ids."""

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

_MOST_READ = 1 << 24
"""Samples whose ids are looked at; of more, chunks that are spread over the data are."""
_MOST_ROWS = 40_000_000
"""Rows of a table that is drafted, as in MLPerf's DLRM v2."""


class DraftStored(NamedTuple):
    """A draft, and the source that it is of."""

    draft: Draft
    source: Source


class Stored(NamedTuple):
    """A source, what a recipe says of it, and remarks."""

    source: Source
    said: Mapping[str, object]
    notes: Sequence[str] = ()


def draft_stored(path: str | Path, options: Sequence[str]) -> DraftStored | None:
    """Draft a recipe for a dataset; None where a path is none, or has to be looked at as a table."""
    found = open_stored(path)
    if found is None:
        return None
    if options:
        raise SpecError(
            f"{path} is a dataset that says itself which columns are what, so {options[0]} means nothing; leave it "
            "out, or change the recipe"
        )
    source = found.source
    schema = source.schema
    samples = {split: source.samples(split) for split in source.splits}
    if "train" not in samples:
        raise DataError(f"{path} has the splits {', '.join(samples)}, none of which is train; name one so")
    lookups = samples["train"] * sum(column.ids or 1 for column in schema.sparse)
    draft = Draft(
        schema=schema,
        reasons={},
        left_out=(),
        labels=(),
        splits=DraftedSplits(has_valid="valid" in samples, has_test="test" in samples, notes=list(found.notes)),
        samples=samples["train"],
        repeats=lookups / sum(schema.rows.values()),
        source=found.said,
    )
    return DraftStored(draft, source)


def open_stored(path: str | Path) -> Stored | None:
    """Open a prepared dataset or arrays of NumPy as a recipe of `draft_stored` does; None where a path is neither."""
    place = location(str(path))
    described = open_described(place)
    if described is not None:
        return Stored(described.source, described.entry)
    return _arrays(place) if isinstance(place, Path) and has_days(place) else None


# -- arrays --------------------------------------------------------------------------------------------------------


def _arrays(path: Path) -> Stored:
    """Arrays of NumPy, with the rows of tables by the largest ids."""
    _, files = source_files(path, None)
    groups = [group for of_split in files.values() for file in of_split for group in file.row_groups()]
    if not groups:
        raise DataError(f"{path} has no rows")
    total = sum(group.samples for group in groups)
    count = max(1, min(len(groups), len(groups) * _MOST_READ // total))
    looked_at = [groups[int(i)] for i in np.unique(np.linspace(0, len(groups) - 1, count).round())]
    names = [name for name in groups[0].file.schema.names if name.startswith("cat_")]
    largest = dict.fromkeys(names, 0)
    for group in looked_at:
        table = group.read(names)
        for name in names:
            ids = _values(table[name])
            if int(ids.min()) < 0:
                raise DataError(f"{group}, column '{name}': id {int(ids.min()):,} is negative; ids are rows of tables")
            largest[name] = max(largest[name], int(ids.max()))
    rows = [most + 1 for most in largest.values()]
    wide = [name for name, most in largest.items() if most >= _MOST_ROWS]
    distinct = count_distinct(groups, dict.fromkeys(wide, groups[0].file.schema.field(wide[0]).type)) if wide else {}
    rows = [min(_MOST_ROWS, hashed_rows(distinct[name])) if name in distinct else largest[name] + 1 for name in names]
    modulo = bool(wide) or len(looked_at) < len(groups)
    notes = ["The last day is validated (its first half) and tested; `splits` of the source says otherwise."]
    notes += [f"`rows` are the largest id + 1 of {sum(g.samples for g in looked_at):,} of {total:,} samples."]
    notes += ["Larger ids are taken `modulo` the rows, as TorchRec's loader does."] if modulo else []
    arguments: dict[str, object] = {"rows": rows, **({"modulo": True} if modulo else {})}
    source = NpySource(path, rows=rows, modulo=modulo)
    return Stored(source, {"class_path": "hotbed.data.NpySource", "init_args": arguments}, notes)


def _values(column: pa.ChunkedArray) -> Any:
    values = column.combine_chunks()
    return (values.flatten() if pa.types.is_large_list(values.type) else values).to_numpy()
