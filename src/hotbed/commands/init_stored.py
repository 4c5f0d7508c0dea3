# pyright: reportUnknownParameterType=false
"""Draft a recipe for a folder that says itself what its columns are: a prepared dataset, or NumPy arrays of ids."""

# pyarrow ships no types.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
from pyarrow import fs

from hotbed.data import NpySource, ParquetSource, Source, SplitBinarySource
from hotbed.data.draft import Draft, hashed_rows
from hotbed.data.draft_splits import DraftedSplits
from hotbed.data.encoding import MARKERS
from hotbed.data.npy_files import has_days
from hotbed.data.profile import count_distinct
from hotbed.data.source_rows import source_files
from hotbed.errors import DataError, SpecError
from hotbed.locations import location, opened
from hotbed.parsing import TextError, parse_yaml

_PARQUET = "hotbed.data.ParquetSource"
_MOST_BYTES = 64 << 20
_MOST_READ = 1 << 24
"""Samples whose ids are looked at; of more, chunks that are spread over the data are."""
_MOST_ROWS = 40_000_000
"""Rows of a table that is drafted, as in MLPerf's DLRM v2."""


class DraftStored(NamedTuple):
    """A draft, and the source that it is of."""

    draft: Draft
    source: Source


class _Found(NamedTuple):
    """A source, what a recipe says of it, and remarks."""

    source: Source
    said: Mapping[str, object]
    notes: Sequence[str] = ()


def draft_stored(path: str | Path, options: Sequence[str]) -> DraftStored | None:
    """Draft a recipe for a dataset; None where a path is none, or has to be looked at as a table.

    Parameters
    ----------
    path
        A folder, or a URI of one.
    options
        What was asked for that such data say themselves.

    Raises
    ------
    DataError
        If the data are damaged.
    SpecError
        If there are options.
    """
    found = _find(path)
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


def _find(path: str | Path) -> _Found | None:
    place = location(str(path))
    if isinstance(place, str):
        return _prepared_parquet(place)
    path = place
    if not path.is_dir():
        return None
    if (path / MARKERS["split_binary"]).is_file():
        return _Found(SplitBinarySource(path), {"class_path": "hotbed.data.SplitBinarySource"})
    return _arrays(path) if has_days(path) else _prepared_parquet(path)


def _prepared_parquet(path: str | Path) -> _Found | None:
    """A dataset whose ``source.yaml`` says what it is; None where there is none."""
    try:
        store, root = (fs.LocalFileSystem(), str(path)) if isinstance(path, Path) else opened(path)
    except ValueError:  # said when files are looked for
        return None
    file = f"{root.rstrip('/')}/{MARKERS['parquet']}"
    if not store.get_file_info(file).is_file:
        return None
    with store.open_input_stream(file) as stream:
        text: bytes = stream.read(_MOST_BYTES)
    try:
        said: Any = parse_yaml(text.decode("utf-8"))
    except (UnicodeDecodeError, TextError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{file} cannot be read as YAML: {reason}; prepare the data again") from None
    arguments = cast("Mapping[str, Any]", said).get("init_args") if isinstance(said, Mapping) else None
    if not isinstance(arguments, Mapping) or cast("Mapping[str, Any]", said).get("class_path") != _PARQUET:
        raise DataError(f"{file} must say class_path: {_PARQUET} and its init_args; prepare the data again")
    return _Found(ParquetSource(path, **cast("Mapping[str, Any]", arguments)), cast("Mapping[str, object]", said))


# -- arrays --------------------------------------------------------------------------------------------------------


def _arrays(path: Path) -> _Found:
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
    return _Found(source, {"class_path": "hotbed.data.NpySource", "init_args": arguments}, notes)


def _values(column: pa.ChunkedArray) -> Any:
    values = column.combine_chunks()
    return (values.flatten() if pa.types.is_large_list(values.type) else values).to_numpy()
