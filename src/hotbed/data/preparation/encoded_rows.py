"""Replace values by their ids, group of samples by group, and put the groups together as a dataset.

A dataset is in NVIDIA's split-binary format (`hotbed.data.formats.split_binary`), or Parquet files of ids beside
``source.yaml``, which says what they are as a recipe's ``data.source`` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hotbed.data import arrow_columns as arrow
from hotbed.data.columns import SparseColumn
from hotbed.data.encoding.labels import read_labels, read_weights, refuse_null
from hotbed.data.encoding.prepared_dataset import PREPARATION, PreparationEntry
from hotbed.data.encoding.vocabulary import lookup_in_file, vocabulary_file
from hotbed.data.executors import task_directory
from hotbed.data.files.row_split import SPLITS
from hotbed.data.formats.split_binary import SplitBinaryWriter, check_split_binary, id_dtype
from hotbed.data.preparation.pieces import Part, Piece, Splits, read_parts
from hotbed.data.schema import Schema
from hotbed.errors import SpecError
from hotbed.files import write_text
from hotbed.parsing import yaml_text

Format = Literal["split_binary", "parquet"]
MARKERS: Mapping[Format, str] = {"split_binary": "feature_spec.yaml", "parquet": "source.yaml"}
"""The file of a dataset that is written last."""
RAW_SUFFIX = "_value"
"""What the name of a column of groups ends with in a dataset, where ids of the same values are an input."""
_ROW_GROUP = 65_536


@dataclass(frozen=True)
class EncodeJob:
    """Encode some samples."""

    group: tuple[Piece, ...]
    index: int  # number of the group
    schema: Schema  # the schema that is written, with the rows of each table
    group_column: str | None  # stored name of the column of groups
    kinds: Mapping[str, pa.DataType]  # by table, the type of its values
    types: Mapping[str, pa.DataType]  # by unchanged column, a type that holds the values of all files
    lists: frozenset[str]  # sparse columns that are written as lists
    splits: Splits
    vocabularies: Path
    out: Path
    form: Format
    preparation: PreparationEntry


def encode(job: EncodeJob) -> None:
    """Write the samples with ids, unless they are there."""
    if job.out.is_dir():
        return
    with task_directory(job.out) as directory:
        if job.form == "split_binary":
            with SplitBinaryWriter(directory, job.schema, job.splits.names) as writer:
                _write_binary(job, writer)
        else:
            _write_parquet(job, directory)


def stored_columns(schema: Schema) -> list[str]:
    """Columns that are read to encode samples."""
    more = [*schema.weight_columns, *schema.id_weights, *([schema.group] if schema.group is not None else [])]
    return list(dict.fromkeys([*schema.labels, *schema.dense, *more, *(c.name for c in schema.sparse)]))


def dataset_schema(schema: Schema, rows: Mapping[str, int]) -> Schema:
    """The schema of a dataset, given that of what it is made from, and the rows of its tables."""
    sparse = tuple(replace(column, rows=rows[column.table_name]) for column in schema.sparse)
    if schema.group is None or schema.group not in {column.name for column in sparse}:
        return replace(schema, sparse=sparse)
    group = f"{schema.group}{RAW_SUFFIX}"
    if group in stored_columns(schema):
        raise SpecError(
            f"column '{schema.group}' is an input and the group, so its values would be stored as '{group}', which is "
            "another column; rename that one, or leave it out of the schema"
        )
    return replace(schema, sparse=sparse, group=group)


def check_format(schema: Schema, form: Format, hashed: Mapping[str, int]) -> None:
    """Raise a `SpecError` if no dataset of a format can be made of samples of a schema, before they are read.

    ``hashed`` are the rows of tables that are known before.
    """
    dataset_schema(schema, schema.rows)
    if form == "split_binary":
        check_split_binary(schema)
        for table, rows in hashed.items():
            id_dtype(table, rows)


def assemble(
    groups: Sequence[Path],
    directory: Path,
    schema: Schema,
    splits: Splits,
    form: Format,
    preparation: PreparationEntry,
) -> None:
    """Put encoded groups together, in order; ``directory`` is a dataset then."""
    if form == "split_binary":
        with SplitBinaryWriter(directory, schema, splits.names, preparation=preparation.model_dump()) as writer:
            for group in groups:
                writer.append_dataset(group)
        return
    for split in splits.names:
        (directory / split).mkdir(exist_ok=True)
        for group in groups:
            for file in sorted((group / split).glob("*.parquet")):
                file.replace(directory / split / file.name)
    source = {"class_path": "hotbed.data.ParquetSource", "init_args": {"ids": "raw", "schema": schema.to_dict()}}
    write_text(directory / MARKERS[form], yaml_text(source) + "\n")


def _ids(job: EncodeJob, part: Part, column: SparseColumn) -> NDArray[np.int64]:
    values = part.values(column.name, job.kinds[column.table_name], is_list=column.name in job.lists)
    if (hashed := job.preparation.hashed.get(column.table_name)) is not None:
        return hashed.ids(values)
    return lookup_in_file(vocabulary_file(job.vocabularies, column.table_name), values)


def _check(job: EncodeJob, part: Part) -> None:
    """Raise `DataError` for a label, weight or group that training would refuse, while its place is known."""
    mapped = {label.column: label for label in job.schema.positives}
    for table, place in part.placed():
        for name in job.schema.labels:
            read_labels(table[name], name, mapped.get(name), place, check=True)
        for name in job.schema.weight_columns:
            read_weights(table[name], name, place)
        stored = arrow.to_plain_types(table)
        for column in (c for c in job.schema.sparse if c.weights is not None):
            ids = stored[column.name].combine_chunks()
            lengths = arrow.values_per_row(ids)
            if pa.types.is_null(ids.type) and column.ids != 1:
                lengths = np.zeros_like(lengths)
            arrow.read_id_weights(column, stored[column.weights].combine_chunks(), lengths, place)
        if job.group_column is not None:
            refuse_null(table[job.group_column], job.group_column, place, "groups")


def _write_binary(job: EncodeJob, writer: SplitBinaryWriter) -> None:
    for part in read_parts(job.group, stored_columns(job.schema), job.splits):
        _check(job, part)
        chosen = {split: part.codes == SPLITS.index(split) for split in job.splits.names}
        labels = np.stack([arrow.to_float32(part.column(name, job.types[name])) for name in job.schema.labels], axis=1)
        dense = [arrow.to_float32(part.column(name, job.types[name])) for name in job.schema.dense]
        for split, mask in chosen.items():
            writer.append_labels(split, labels[mask])
            if dense:
                numbers = np.stack([column[mask] for column in dense], axis=1)
                writer.append_dense(split, np.where(np.isnan(numbers), 0, numbers))
        for i, column in enumerate(job.schema.sparse):
            ids = _ids(job, part, column)
            for split, mask in chosen.items():
                writer.append_ids(split, i, ids[mask])


def _write_parquet(job: EncodeJob, directory: Path) -> None:
    writers: dict[str, pq.ParquetWriter] = {}
    try:
        for part in read_parts(job.group, stored_columns(replace(job.schema, group=job.group_column)), job.splits):
            table = _encoded(job, part)
            for split in job.splits.names:
                mine = table.filter(pa.array(part.codes == SPLITS.index(split)))
                if not len(mine):
                    continue
                if split not in writers:
                    (directory / split).mkdir()
                    file = directory / split / f"part-{job.index:06d}.parquet"
                    schema = mine.schema.with_metadata({PREPARATION: job.preparation.model_dump_json()})
                    writers[split] = pq.ParquetWriter(file, schema, compression="zstd", compression_level=1)
                writers[split].write_table(mine, row_group_size=_ROW_GROUP)
    finally:
        for writer in writers.values():
            writer.close()


def _encoded(job: EncodeJob, part: Part) -> pa.Table:
    """Ids in the place of values; all other columns as they are."""
    _check(job, part)
    schema = job.schema
    names = (*schema.labels, *schema.dense, *schema.weight_columns, *schema.id_weights)
    columns = {name: part.column(name, job.types[name]) for name in names}
    if schema.group is not None and job.group_column is not None:
        columns[schema.group] = part.column(job.group_column, job.types[job.group_column])
    for column in schema.sparse:
        kind = pa.int32() if column.rows <= np.iinfo(np.int32).max else pa.int64()
        ids = pa.array(_ids(job, part, column)).cast(kind)
        if column.name in job.lists:
            ends, is_missing = part.lists(column.name)
            ids = pa.LargeListArray.from_arrays(ends, ids, mask=is_missing)
        columns[column.name] = pa.chunked_array([ids])
    return pa.table(columns)
