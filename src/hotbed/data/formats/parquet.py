"""Read samples from any Parquet file or folder, without a preparation step.

`hotbed.data.files.parquet_files` finds files and row groups, and `hotbed.data.files.row_split` divides rows into
splits. A chunk of a split has the rows of one row group that are in this split.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
from pyarrow import fs
from torch import Tensor

from hotbed.batch import Batch
from hotbed.checks import check_known
from hotbed.data.arrow_columns import Ids
from hotbed.data.columns import Label
from hotbed.data.encoding.encoder import Encoder
from hotbed.data.encoding.labels import read_labels
from hotbed.data.encoding.prepared_dataset import PREPARATION, Preparation, PreparationEntry
from hotbed.data.encoding.vocabulary import VOCABULARY
from hotbed.data.files.column_statistics import ColumnStatistics, quantile_boundaries
from hotbed.data.files.parquet_files import (
    ParquetFile,
    RowGroup,
    RowsOfGroup,
    divide_into_slices,
    find_parquet,
    refuse_same_files,
    text_columns,
    with_rows,
)
from hotbed.data.files.row_split import SPLITS, RowSplit, divide, parse_row_split
from hotbed.data.schema import Schema
from hotbed.data.source import Source
from hotbed.errors import DataError, SpecError
from hotbed.locations import location

_LABEL_READERS = 4
_STREAMED_CELLS, _FEWEST_STREAMED = 2_000_000, 4_096
Chunk = RowGroup | RowsOfGroup
Groups = dict[str, list[Chunk]]


class ParquetSource(Source):
    """Samples of a Parquet file or folder.

    CSV and TSV files with a header are converted to Parquet on first use, see `hotbed.data.files.delimited`.

    Sparse columns have integers, booleans, strings, or lists of these types (multi-hot). By default, each value is
    hashed to one of the table rows 1 … rows − 1, and null becomes row 0. The hash never changes, see
    `hotbed.data.hashing`. A null list is an empty bag. A null numerical is 0 after scaling. If the model normalizes the
    column, `Numerical.missing` determines the value for null. A null label, weight or group is an error.

    Parameters
    ----------
    path
        File, folder or URI. Subfolders or files ``train``, ``valid`` and ``test`` are splits, see `find_parquet`.
        Folders like ``day=2024-01-01`` are columns of their files.
    schema
        The roles of columns, as a `Schema` or its dict form. `draft_schema` proposes a schema. If the schema has
        buckets by quantiles, call `measure` before reading samples, as ``hotbed train`` does.
    ids
        ``"hash"`` hashes values to table rows. ``"raw"`` uses integers as table rows, and the embedding checks that the
        integers are below ``rows``. Use ``"raw"`` for files written by `hotbed.prepare`, because their ids are rows.
    split
        Rule that divides the rows into splits. If the path has splits, only the train split is divided. Examples:
        ``{by: time, column: ts, test_from: 2024-06-01}``, ``{by: hash, valid: 0.1, test: 0.1}``, ``{by: order, test:
        0.1}``. See `hotbed.data.files.row_split`.
    split_paths
        Paths of splits by name, for splits outside of the main path. None removes a split of the main path.
    text
        Columns of CSV and TSV files that are always text, e.g. codes with values ``12`` and ``A1``.
    valid_fraction, test_fraction
        Shares of the valid and test splits, for data without splits. The test split has the last samples, and the valid
        split has the samples before them. Shares are rounded to whole row groups.
    missing
        Input columns that files may lack. All values of an absent column are missing.
    filesystem
        The `pyarrow.fs.FileSystem` of the path (default: the file system of the URI, or of this machine).
    encoder
        Encoder of an existing model (default: a new encoder for the schema and ``ids``).

    Raises
    ------
    DataError
        If the path does not exist, a file is not Parquet, a column is missing, ids are integers in one file and text in
        another file, or a file is in two splits.
    SpecError
        If a column has a type that does not fit its role, ids that `hotbed.prepare` has hashed would be hashed again,
        or the fractions leave a split without a row group.
    """

    def __init__(
        self,
        path: str | Path,
        schema: Schema | Mapping[str, object],
        *,
        ids: Ids = "hash",
        split: Mapping[str, object] | None = None,
        split_paths: Mapping[str, str | None] | None = None,
        text: Collection[str] = (),
        valid_fraction: float = 0.0,
        test_fraction: float = 0.0,
        missing: Collection[str] = (),
        filesystem: fs.FileSystem | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        self.schema = schema if isinstance(schema, Schema) else Schema.from_dict(schema)
        unchecked = Encoder(self.schema, ids=ids) if encoder is None else encoder.of(self.schema)
        self.ids: Ids = ids
        files = _with_paths(find_parquet(path, filesystem, text), split_paths or {}, str(path), filesystem, text)
        if missing:
            for name in missing:
                check_known("missing input column", name, [c.name for c in unchecked.columns()], SpecError)
            files = {split: [file.with_nulls(missing) for file in of_split] for split, of_split in files.items()}
        checked = with_rows(f for of_split in files.values() for f in of_split)
        fields: list[tuple[ParquetFile, pa.Schema]] = []
        for file in checked:
            if ids == "hash" and encoder is None and self.schema.stored[0] and _prepared_entry(file) is not None:
                raise SpecError(
                    f"ids of {file}: got `hash`, expected `raw`, because hotbed prepare has already hashed the ids. "
                    "Copy `ids` and `rows` from the source.yaml of the dataset to the recipe, or draft a recipe with "
                    "`hotbed init DATASET`"
                )
            fields.append((file, _check_fields(unchecked, file)))
        self._files = checked
        kinds = _id_kinds(unchecked, fields)
        self._encoder = unchecked.with_kinds({name: kinds[name] for name in unchecked.hashed if name in kinds})
        groups: Groups = {split: [g for f in of_split for g in f.row_groups()] for split, of_split in files.items()}
        if split is not None:
            groups = _by_rows(str(path), groups, parse_row_split(split), valid_fraction or test_fraction)
        elif "" in groups and (set(groups) == {""} or not (valid_fraction or test_fraction)):
            groups = {**_by_fractions(str(path), groups.pop(""), valid_fraction, test_fraction), **groups}
        elif valid_fraction or test_fraction:
            raise SpecError(
                f"{path} has the splits {', '.join(groups)}, so it is not divided. Remove valid_fraction and "
                "test_fraction"
            )
        self._groups = groups
        self.splits = tuple(groups)
        preparation = _preparation(path, files, self.schema) if ids == "raw" and encoder is None else None
        self._raw_encoder = None if preparation is None else Encoder(self.schema, ids=ids, preparation=preparation)

    def column_types(self) -> dict[str, str]:
        """Return the type of every column of the files, including columns outside of the schema."""
        fields = next(iter(self._groups.values()))[0].file.schema
        return {field.name: str(field.type) for field in fields}

    def id_kinds(self) -> dict[str, str]:
        """Return the type of stored values by hashed column, see `Source.id_kinds`."""
        encoder = self.encoder
        return {name: encoder.id_kinds[name] for name in encoder.hashed if name in encoder.id_kinds}

    def is_missing(self, column: str) -> bool:
        """Return whether a column has no value in any file."""
        return all(file.is_missing(column) for file in self._files)

    def measure(
        self, splits: str | Sequence[str] = "train", *, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """Measure the boundaries of buckets by quantiles, see `Source.measure`."""
        splits, encoder = [splits] if isinstance(splits, str) else list(splits), self.encoder
        for split in splits:
            self._check(split)
        groups = [group for split in splits for group in self._groups[split]]
        done, total = 0, sum(group.samples for group in groups)
        wanted = {bucket: ColumnStatistics() for bucket in encoder.unmeasured}
        names = list(dict.fromkeys(bucket.column for bucket in wanted))
        for group in groups if wanted else ():
            numbers = encoder.numbers(group.read(encoder.stored_for(names)), names)
            for bucket, statistics in wanted.items():
                statistics.add(numbers[bucket.column], done)
            done += group.samples
            progress(done, total)
        for bucket, statistics in wanted.items():
            encoder.boundaries[bucket.name] = quantile_boundaries(bucket, statistics)

    @property
    def encoder(self) -> Encoder:
        """The encoder of rows like those in the files. For files of `hotbed.prepare`, it encodes rows of its input."""
        if self._raw_encoder is None:
            return self._stored_encoder
        self._raw_encoder = self._raw_encoder.of(self.schema)
        return self._raw_encoder

    @property
    def _stored_encoder(self) -> Encoder:
        self._encoder = self._encoder.of(self.schema)  # `only` replaces the schema
        return self._encoder

    def streamed(self) -> Self:
        """Return a source that divides large row groups into slices, which bounds the memory for reading in order."""
        s, other = self.schema, copy.copy(self)
        columns = len(s.sparse) + len(s.dense) + len(s.labels)
        rows = max(_FEWEST_STREAMED, _STREAMED_CELLS // max(1, columns))
        other._groups = {
            split: [part for group in groups for part in divide_into_slices(group, rows)]
            for split, groups in self._groups.items()
        }
        return other

    def _chunks(self, split: str) -> Sequence[int]:
        return [g.samples for g in self._groups[split]]

    def _read_numericals(self, split: str, i: int) -> Tensor | None:
        group, encoder = self._groups[split][i], self._stored_encoder
        return encoder.numericals(group.read(encoder.stored_for(self.schema.dense)), group.location)

    def _read_columns(self, split: str, i: int, names: Sequence[str]) -> pa.Table:
        return self._groups[split][i].read(names)

    def _check_labels(self, split: str) -> dict[str, tuple[float, float]]:
        mapped = {label.column: label for label in self.schema.positives}

        def ranges(group: Chunk) -> list[tuple[float, float]]:
            return [_label_range(group, name, mapped.get(name)) for name in self.schema.labels]

        with ThreadPoolExecutor(_LABEL_READERS) as pool:
            by_column = zip(*pool.map(ranges, self._groups[split]), strict=True)
            spans = [(min(low for low, _ in column), max(high for _, high in column)) for column in by_column]
        return dict(zip(self.schema.labels, spans, strict=False))

    def _read(self, split: str, i: int) -> Batch:
        group, encoder = self._groups[split][i], self._stored_encoder
        return encoder.batch(group.read(encoder.names), group.location)


def is_prepared(path: str | Path) -> bool:
    """Return whether a path has Parquet files written by `hotbed.prepare`."""
    return any(_prepared_entry(file) is not None for of_split in find_parquet(path).values() for file in of_split)


def _prepared_entry(file: ParquetFile) -> bytes | None:
    return (file.metadata.metadata or {}).get(PREPARATION)


def _preparation(path: str | Path, files: Mapping[str, Sequence[ParquetFile]], schema: Schema) -> Preparation | None:
    """Return the preparation of prepared files, or None if they lack information for converting raw rows."""
    entries = {_prepared_entry(file) for of_split in files.values() for file in of_split}
    text, root = next(iter(entries)), location(str(path))
    if len(entries) > 1 or text is None or not isinstance(root, Path) or schema.derived:
        return None
    tables = PreparationEntry.parse(text, str(path)).tables
    if any(column.name not in tables for column in schema.sparse):
        return None
    folder = next((above for above in (root, *root.parents[:2]) if (above / VOCABULARY).is_dir()), root)
    return Preparation.of_dataset(folder, schema, text)


def _label_range(group: Chunk, name: str, label: Label | None) -> tuple[float, float]:
    """Check that the labels of a row group are from 0 to 1. Return the smallest and the largest label."""
    found = None if label else group.integer_range(name)
    if found is not None and found[0] >= 0 and found[1] <= 1:
        return found
    labels = read_labels(group.read([name])[name], name, label, group.location, check=True)
    return float(labels.min()), float(labels.max())


def _check_fields(encoder: Encoder, file: ParquetFile) -> pa.Schema:
    """Check a file's columns, and return their types. Inputs without values may have any type, and become null."""
    fields = file.schema
    try:
        encoder.check(fields, str(file))
    except (DataError, SpecError):
        fields = file.known_schema([column.name for column in encoder.columns()])
        encoder.check(fields, str(file))
    return fields


def _id_kinds(encoder: Encoder, files: Sequence[tuple[ParquetFile, pa.Schema]]) -> dict[str, str]:
    """For each column of ids, and for the group column, return the type of its values, as `Encoder.type_of` does.

    Raise `DataError` if a column has different types in different files.
    """
    found: dict[str, str] = {}
    schema = encoder.schema
    names = [*(c.name for c in schema.stored[0]), *encoder.hashed, *([schema.group] if schema.group else [])]
    for name in dict.fromkeys(names):
        kinds = [(kind, file) for file, fields in files if (kind := encoder.type_of(name, fields))]
        if len({kind for kind, _ in kinds}) > 1:
            kinds = [(kind, file) for kind, file in kinds if not file.is_missing(name)]
        for kind, file in kinds:
            before, first = kinds[0]
            if kind != before:
                raise DataError(
                    f"column '{name}': got {before} in {first} and {kind} in {file}, expected one type, because 5 and "
                    "'5' are hashed to different rows. Write the column with one type in all files. For CSV and TSV "
                    "files, you can add the column to `text`"
                )
            found[name] = kind
    return found


def _with_paths(
    files: dict[str, list[ParquetFile]],
    split_paths: Mapping[str, str | None],
    path: str,
    filesystem: fs.FileSystem | None,
    text: Collection[str],
) -> dict[str, list[ParquetFile]]:
    """Add the files of ``split_paths`` to the files by split, and remove splits with path None."""
    found = dict(files)
    text = {*text, *text_columns(file for of_split in files.values() for file in of_split)}
    for split, other in split_paths.items():
        check_known("split_paths: split", split, SPLITS, SpecError)
        if other is None:
            if found.pop(split, None) is None:
                raise SpecError(f"split_paths.{split}: got null, but {path} has no {split} split. Remove the entry")
            continue
        if split in found or (split == "train" and "" in found):
            raise SpecError(
                f"split_paths.{split}: got {other}, but {path} already has {split} samples. Remove the entry, or the "
                "samples from this path"
            )
        others = find_parquet(other, filesystem, text)
        if len(others) > 1:
            check_known(f"split of {other}", split, others, SpecError)
        of_split = others[split] if split in others else next(iter(others.values()))
        refuse_same_files(split, of_split, found)
        found[split] = of_split
    if not found:
        raise SpecError(f"split_paths: got null for all splits of {path}, expected at least one split")
    return found


def _by_rows(path: str, groups: Groups, split: RowSplit, fractions: float) -> Groups:
    """Divide all rows into splits. If the data already have splits, divide only the train split, and keep the rest."""
    whole = [group for group in groups.get("", groups.get("train", [])) if isinstance(group, RowGroup)]
    others = {name: of_split for name, of_split in groups.items() if name not in ("", "train")}
    both = next((name for name in split.names if name in others), None)
    if fractions:
        raise SpecError("got both split and valid_fraction or test_fraction, expected one of them")
    if both is not None:
        raise SpecError(
            f"split: got '{both}', but {path} already has this split. Remove '{both}' from split, or ignore the split "
            f"of the path with split_paths: {{{both}: null}}"
        )
    for file in {group.file.shown: group.file for group in whole}.values():
        split.check(file.schema, file.shown)
    divided: Groups = {name: [*of_split] for name, of_split in divide(split, whole).items()}
    return divided | others


def _by_fractions(path: str, groups: Sequence[Chunk], valid: float, test: float) -> Groups:
    """Divide row groups in order into train, valid and test, at the row-group boundaries nearest to the fractions."""
    if not (0 <= valid < 1 and 0 <= test < 1 and valid + test < 1):
        raise SpecError(
            f"valid_fraction and test_fraction: got {valid} and {test}, expected at least 0 and a sum below 1"
        )
    if not groups:
        raise DataError(f"{path}: got no rows, expected at least one")
    ends = np.cumsum([0, *(g.samples for g in groups)])
    total = int(ends[-1])
    cuts = [0, *(int(np.abs(ends - total * (1 - f)).argmin()) for f in (valid + test, test)), len(groups)]
    splits: Groups = {}
    for split, fraction, (start, stop) in zip(SPLITS, (1, valid, test), pairwise(cuts), strict=True):
        if fraction:
            splits[split] = list(groups[start:stop])
            if start >= stop:
                raise SpecError(
                    f"{path}: got {len(groups):,} row groups, too few for a {split} split with valid_fraction {valid} "
                    f"and test_fraction {test}. Write the files with a smaller row_group_size, or use split folders"
                )
    return splits
