"""Read samples from any Parquet file or folder, without a preparation step.

First files and their row groups are found (`hotbed.data.files.parquet_files`) and divided into splits
(`hotbed.data.files.row_split`); then `ParquetSource` serves the rows of each row group that are in a split as a
chunk of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
from pyarrow import fs
from torch import Tensor

from hotbed.batch import Batch
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
    RowSlice,
    find_parquet,
    in_slices,
    refuse_same_files,
    text_columns,
    with_rows,
)
from hotbed.data.files.row_split import SPLITS, RowSplit, SplitRows, divide, row_split
from hotbed.data.row_location import RowLocation
from hotbed.data.schema import Schema
from hotbed.data.source import Source
from hotbed.errors import DataError, SpecError, did_you_mean
from hotbed.locations import location

_LABEL_READERS = 4
_STREAMED_CELLS, _FEWEST_STREAMED = 2_000_000, 4_096
Chunk = RowGroup | RowSlice | SplitRows
Groups = dict[str, list[Chunk]]


class ParquetSource(Source):
    """Samples of a Parquet file or folder; a chunk is a row group, or what of it is in the split.

    Files of CSV and TSV with a header are converted to Parquet when they are first used, see
    `hotbed.data.files.delimited`.

    Sparse columns are integers, booleans, strings, or lists of these (multi-hot). By default a value is hashed to one
    of the rows 1 … rows − 1 (see `hotbed.data.hashing` for the function, which never changes), and null is row 0. A
    null list is an empty bag, a null numerical is 0 (if it is scaled, after that; what `Numerical.missing` says, if the
    model normalizes it), a null label, weight or group is an error.

    Parameters
    ----------
    path
        File, folder or URI. A folder with subfolders or files ``train``, ``valid``, ``test`` has these splits (see
        `find_parquet`). Columns of folders like ``day=2024-01-01`` are columns of their files.
    schema
        Which columns are what, as a `Schema` or its dict form. See `draft_schema` for a first draft. If it has buckets
        by quantiles, call `measure` before samples are read; ``hotbed train`` does.
    ids
        ``"hash"`` hashes values to rows; ``"raw"`` takes integers as rows, and leaves the check that they are below
        ``rows`` to the embedding. Files that `hotbed.prepare` made hold rows already, so they are ``"raw"``.
    split
        Divide all rows, or those of ``train`` where the path has splits, by row: ``{by: time, column: ts, valid_from:
        …, test_from: …}``, ``{by: hash, valid: 0.1, test: 0.1}`` or ``{by: order, …}``, the last ones; see
        `hotbed.data.files.row_split`.
    split_paths
        By split, a path that it is in and the main path is not; or None for a split of the path that is not used.
    text
        Columns of CSV and TSV files that are text, whatever is in them: codes such as ``12`` where others are ``A1``.
    valid_fraction, test_fraction
        Where there are no such splits: share of the samples in these splits, the last ones, cut between row groups.
    missing
        Input columns that files may lack: all of their values are then missing.
    filesystem
        A `pyarrow.fs.FileSystem` that has the path; default: local, or what the URI says.
    encoder
        What makes batches of rows, in place of one of the schema and ``ids``: of a model that is there already.

    Raises
    ------
    DataError
        If there is no such path, a file is not Parquet, a column is missing, ids are integers in one file and text in
        another, or a file is in two splits.
    SpecError
        If a column has a type that does not fit its role, ids of `hotbed.prepare` would be hashed once more, or the
        fractions leave a split without a row group.
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
            _check_missing(missing, [column.name for column in unchecked.columns()])
            files = {split: [file.with_nulls(missing) for file in of_split] for split, of_split in files.items()}
        checked = with_rows(f for of_split in files.values() for f in of_split)
        fields: list[tuple[ParquetFile, pa.Schema]] = []
        for file in checked:
            if ids == "hash" and encoder is None and self.schema.stored[0] and _said(file) is not None:
                raise SpecError(
                    f"{file} has ids of hotbed prepare, which `ids: hash` would hash once more; take what source.yaml "
                    "beside it says, `ids: raw` and its rows (hotbed init of the whole folder drafts such a recipe)"
                )
            fields.append((file, _checked_fields(unchecked, file)))
        self._files = checked
        kinds = _id_kinds(unchecked, fields)
        self._encoder = unchecked.with_kinds({name: kinds[name] for name in unchecked.hashed if name in kinds})
        groups: Groups = {split: [g for f in of_split for g in f.row_groups()] for split, of_split in files.items()}
        if split is not None:
            groups = _by_rows(str(path), groups, row_split(split), valid_fraction or test_fraction)
        elif "" in groups and (set(groups) == {""} or not (valid_fraction or test_fraction)):
            groups = {**_by_fractions(str(path), groups.pop(""), valid_fraction, test_fraction), **groups}
        elif valid_fraction or test_fraction:
            raise SpecError(f"{path} has the splits {', '.join(groups)}; leave valid and test_fraction at 0")
        self._groups = groups
        self.splits = tuple(groups)
        preparation = _preparation(path, files, self.schema) if ids == "raw" and encoder is None else None
        self._raw_encoder = None if preparation is None else Encoder(self.schema, ids=ids, preparation=preparation)

    def column_types(self) -> dict[str, str]:
        """Type of every column of the files, also of columns outside of the schema."""
        fields = next(iter(self._groups.values()))[0].file.schema
        return {field.name: str(field.type) for field in fields}

    def id_kinds(self) -> dict[str, str]:
        """By sparse column whether its values are integers or text; empty where integers are rows."""
        encoder = self.encoder
        return {name: encoder.id_kinds[name] for name in encoder.hashed if name in encoder.id_kinds}

    def is_missing(self, column: str) -> bool:
        """Whether no row of all files has a value of a column."""
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
        """What turns rows into batches: stored ones, or raw ones where files are of a dataset of `hotbed.prepare`."""
        if self._raw_encoder is None:
            return self._of_stored
        if self._raw_encoder.schema is not self.schema:  # of fewer columns, see `only`
            self._raw_encoder = self._raw_encoder.of(self.schema)
        return self._raw_encoder

    @property
    def _of_stored(self) -> Encoder:
        if self._encoder.schema is not self.schema:
            self._encoder = self._encoder.of(self.schema)
        return self._encoder

    def streamed(self) -> Self:
        """The same samples with large row groups in slices, which are read in order, so that memory does not grow."""
        s = self.schema
        columns = len(s.sparse) + len(s.dense) + len(s.labels)
        rows = max(_FEWEST_STREAMED, _STREAMED_CELLS // max(1, columns))
        other = copy.copy(self)
        other._groups = {
            split: [slice_ for g in groups for slice_ in (in_slices(g, rows) if isinstance(g, RowGroup) else [g])]
            for split, groups in self._groups.items()
        }
        return other

    def _chunks(self, split: str) -> Sequence[int]:
        return [g.samples for g in self._groups[split]]

    def _read_numericals(self, split: str, i: int) -> Tensor | None:
        group = self._groups[split][i]
        encoder = self._of_stored
        return encoder.numericals(group.read(encoder.names_of_dense), RowLocation(str(group), group.place))

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
        group = self._groups[split][i]
        encoder = self._of_stored
        return encoder.batch(group.read(encoder.names), RowLocation(str(group), group.place))


def is_prepared(path: str | Path) -> bool:
    """Whether a path has Parquet files of a dataset that `hotbed.prepare` made."""
    return any(_said(file) is not None for of_split in find_parquet(path).values() for file in of_split)


def _said(file: ParquetFile) -> bytes | None:
    return (file.metadata.metadata or {}).get(PREPARATION)


def _preparation(path: str | Path, files: Mapping[str, Sequence[ParquetFile]], schema: Schema) -> Preparation | None:
    """Return the preparation of prepared files; None for other files, and if raw rows cannot be prepared alike."""
    said = {_said(file) for of_split in files.values() for file in of_split}
    text, place = next(iter(said)), location(str(path))
    if len(said) > 1 or text is None or not isinstance(place, Path) or schema.derived:
        return None
    tables = PreparationEntry.parse(text, str(path)).tables
    if any(column.name not in tables for column in schema.sparse):
        return None
    folder = next((above for above in (place, *place.parents[:2]) if (above / VOCABULARY).is_dir()), place)
    return Preparation.of_dataset(folder, schema, text)


def _label_range(group: Chunk, name: str, label: Label | None) -> tuple[float, float]:
    """Smallest and largest label of a row group; a `DataError` names the first that is not from 0 to 1."""
    found = None if label else group.integer_range(name)
    if found is not None and found[0] >= 0 and found[1] <= 1:
        return found
    labels = read_labels(group.read([name])[name], name, label, RowLocation(str(group), group.place), check=True)
    return float(labels.min()), float(labels.max())


def _check_missing(missing: Collection[str], inputs: Sequence[str]) -> None:
    """Raise `SpecError` unless these columns, which files may lack, are inputs."""
    for name in missing:
        if name not in inputs:
            raise SpecError(
                f"missing names a column that is no input: got '{name}', expected one of {', '.join(inputs)}"
                f"{did_you_mean(name, inputs)}"
            )


def _checked_fields(encoder: Encoder, file: ParquetFile) -> pa.Schema:
    """Check a file's columns and return their types; inputs without values may have any type, and are null."""
    try:
        encoder.check(file.schema, str(file))
    except (DataError, SpecError):
        fields = file.known_schema([column.name for column in encoder.columns()])
        encoder.check(fields, str(file))
        return fields
    return file.schema


def _id_kinds(encoder: Encoder, files: Sequence[tuple[ParquetFile, pa.Schema]]) -> dict[str, str]:
    """By column of ids and group whether its values are integers or text; a `DataError` where both are met.

    ``5`` and ``"5"`` are hashed to different rows, and nothing else would show that.
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
                    f"column '{name}' is {before} in {first} and {kind} in {file}, which are other ids (5 and '5' are "
                    "hashed to different rows); write it as one of them in all files (of CSV and TSV files, name it in "
                    "the source's `text`)"
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
    """Add split paths to the files by split, and remove unused splits."""
    found = dict(files)
    text = {*text, *text_columns(file for of_split in files.values() for file in of_split)}
    for split, place in split_paths.items():
        if split not in SPLITS:
            raise SpecError(f"split_paths has '{split}', which is no split; there are {', '.join(SPLITS)}")
        if place is None:
            if found.pop(split, None) is None:
                raise SpecError(f"split_paths leaves out '{split}', but {path} has no such split; remove it")
            continue
        if split in found:
            raise SpecError(f"split_paths says where '{split}' is, but {path} has this split; leave one of them out")
        of_place = find_parquet(place, filesystem, text)
        if len(of_place) > 1 and split not in of_place:
            raise SpecError(f"{place} has the splits {', '.join(of_place)}, none of which is '{split}'")
        of_split = of_place[split] if split in of_place else next(iter(of_place.values()))
        refuse_same_files(split, of_split, found)
        found[split] = of_split
    if "train" in split_paths and "" in found:
        raise SpecError(f"split_paths says where 'train' is, but {path} has samples of no split; leave one of them out")
    if not found:
        raise SpecError(f"split_paths leaves out all splits of {path}; keep one")
    return found


def _by_rows(path: str, groups: Groups, split: RowSplit, fractions: float) -> Groups:
    """Rows without a split, or those to train on, divided; the splits that there are already."""
    whole = [group for group in groups.get("", groups.get("train", [])) if isinstance(group, RowGroup)]
    others = {name: of_split for name, of_split in groups.items() if name not in ("", "train")}
    both = next((name for name in split.names if name in others), None)
    if fractions:
        raise SpecError("there are both split and valid_fraction or test_fraction; leave one of them out")
    if both is not None:
        raise SpecError(
            f"split makes a split '{both}', which {path} has already; leave it out of split, or say split_paths: "
            f"{{{both}: null}} not to use that of the path"
        )
    for file in {group.file.shown: group.file for group in whole}.values():
        split.check(file.schema, file.shown)
    divided: Groups = {name: [*of_split] for name, of_split in divide(split, whole).items()}
    return divided | others


def _by_fractions(path: str, groups: Sequence[Chunk], valid: float, test: float) -> Groups:
    """Cut row groups in order into train, valid and test, at the boundaries nearest to the fractions."""
    if not (0 <= valid < 1 and 0 <= test < 1 and valid + test < 1):
        raise SpecError(f"valid_fraction {valid} and test_fraction {test} must be at least 0 and below 1 together")
    if not groups:
        raise DataError(f"{path} has no rows")
    ends = np.cumsum([0, *(g.samples for g in groups)])
    total = int(ends[-1])
    cuts = [0, *(int(np.abs(ends - total * (1 - f)).argmin()) for f in (valid + test, test)), len(groups)]
    splits: Groups = {}
    for split, fraction, start, stop in zip(("train", "valid", "test"), (1, valid, test), cuts, cuts[1:], strict=False):
        if fraction:
            splits[split] = list(groups[start:stop])
            if start >= stop:
                raise SpecError(
                    f"{path} has {len(groups):,} row groups, too few for a {split} split with valid_fraction {valid} "
                    f"and test_fraction {test}; write it with a smaller row_group_size, or use split folders"
                )
    return splits
