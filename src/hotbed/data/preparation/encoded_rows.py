"""Replace values by ids, group by group, and combine the groups to a dataset (stage 4 of a preparation).

The dataset is in NVIDIA's split-binary format (`hotbed.data.formats.split_binary`), or consists of Parquet files. The
file ``source.yaml`` describes Parquet files in the same way as ``data.source`` of a recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

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
from hotbed.data.preparation.raw_inputs import Piece, RowBlock, Splits, plain_columns, read_blocks_of
from hotbed.data.preparation.stored_rows import MARKERS, Format
from hotbed.data.schema import Schema
from hotbed.errors import SpecError
from hotbed.files import write_text
from hotbed.parsing import yaml_text

_ROW_GROUP = 65_536


@dataclass(frozen=True)
class EncodeJob:
    """Arguments of `encode_group` for one group of samples."""

    group: tuple[Piece, ...]
    index: int  # number of the group
    schema: Schema  # schema of the dataset, with the rows of each table
    group_column: str | None  # name of the group column in the input
    kinds: Mapping[str, pa.DataType]  # type of counted values by table
    types: Mapping[
        str, pa.DataType
    ]  # for each column that is stored unchanged, a type that fits the values of all files
    lists: frozenset[str]  # sparse columns of lists
    splits: Splits
    vocabularies: Path
    out: Path
    form: Format
    preparation: PreparationEntry


def encode_group(job: EncodeJob) -> None:
    """Write the encoded samples of a group unless they exist."""
    if job.out.is_dir():
        return
    with task_directory(job.out) as directory:
        if job.form == "split_binary":
            with SplitBinaryWriter(directory, job.schema, job.splits.names) as writer:
                _write_binary(job, writer)
        else:
            _write_parquet(job, directory)


def dataset_schema(schema: Schema, rows: Mapping[str, int]) -> Schema:
    """Return the schema of the dataset from the schema of its input and the rows of its tables."""
    sparse = tuple(replace(column, rows=rows[column.table_name]) for column in schema.sparse)
    names = {column.name for column in sparse}
    if schema.group is None or schema.group not in names:
        return replace(schema, sparse=sparse)
    group = f"{schema.group}_value"
    if group in {*plain_columns(schema), *names}:
        raise SpecError(
            f"column '{schema.group}' is both an input and the group, so its values must be stored as '{group}', but "
            f"the schema already has a column '{group}'. Rename column '{group}', or remove it from the schema"
        )
    return replace(schema, sparse=sparse, group=group)


def check_format(schema: Schema, form: Format, hashed: Mapping[str, int]) -> None:
    """Raise `SpecError` if a format does not support a schema, or has no dtype for the rows of a hashed table."""
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
    """Combine the encoded groups, which are directories, to a dataset in ``directory``."""
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


def _ids(job: EncodeJob, block: RowBlock, column: SparseColumn) -> NDArray[np.int64]:
    values = block.values(column.name, job.kinds[column.table_name], is_list=column.name in job.lists)
    if (hashed := job.preparation.hashed.get(column.table_name)) is not None:
        return hashed.ids(values)
    return lookup_in_file(vocabulary_file(job.vocabularies, column.table_name), values)


def _read(job: EncodeJob, schema: Schema) -> Iterator[RowBlock]:
    """Read the rows of a group, and check labels, weights and groups while errors can name the rows of the input."""
    mapped = {label.column: label for label in schema.positives}
    names = dict.fromkeys((*plain_columns(schema), *(column.name for column in schema.sparse)))
    for block in read_blocks_of(job.group, list(names), job.splits):
        for table, place in block.places():
            for name in schema.labels:
                read_labels(table[name], name, mapped.get(name), place, check=True)
            for name in schema.weight_columns:
                read_weights(table[name], name, place)
            stored = arrow.to_plain_types(table)
            for column in (c for c in schema.sparse if c.weights is not None):
                ids = stored[column.name].combine_chunks()
                lengths = arrow.values_per_row(ids)
                if pa.types.is_null(ids.type) and column.ids != 1:
                    lengths = np.zeros_like(lengths)
                arrow.read_id_weights(column, stored[column.weights].combine_chunks(), lengths, place)
            if schema.group is not None:
                refuse_null(table[schema.group], schema.group, place, "groups")
        yield block


def _write_binary(job: EncodeJob, writer: SplitBinaryWriter) -> None:
    schema = job.schema
    for block in _read(job, schema):
        chosen = {split: block.codes == SPLITS.index(split) for split in job.splits.names}
        labels, dense = (
            [arrow.to_float32(block.column(name, job.types[name])) for name in names]
            for names in (schema.labels, schema.dense)
        )
        for split, mask in chosen.items():
            writer.append_labels(split, np.stack(labels, axis=1)[mask])
            if dense:
                numbers = np.stack([column[mask] for column in dense], axis=1)
                writer.append_dense(split, np.where(np.isnan(numbers), 0, numbers))
        for i, column in enumerate(schema.sparse):
            ids = _ids(job, block, column)
            for split, mask in chosen.items():
                writer.append_ids(split, i, ids[mask])


def _write_parquet(job: EncodeJob, directory: Path) -> None:
    writers: dict[str, pq.ParquetWriter] = {}
    with ExitStack() as stack:
        for block in _read(job, replace(job.schema, group=job.group_column)):
            table = _encode_block(job, block)
            for split in job.splits.names:
                mine = table.filter(pa.array(block.codes == SPLITS.index(split)))
                if not len(mine):
                    continue
                if split not in writers:
                    (directory / split).mkdir()
                    file = directory / split / f"part-{job.index:06d}.parquet"
                    schema = mine.schema.with_metadata({PREPARATION: job.preparation.model_dump_json()})
                    writer = pq.ParquetWriter(file, schema, compression="zstd", compression_level=1)
                    writers[split] = stack.enter_context(writer)
                writers[split].write_table(mine, row_group_size=_ROW_GROUP)


def _encode_block(job: EncodeJob, block: RowBlock) -> pa.Table:
    schema = job.schema
    names = plain_columns(replace(schema, group=None))
    columns = {name: block.column(name, job.types[name]) for name in names}
    if schema.group is not None and job.group_column is not None:
        columns[schema.group] = block.column(job.group_column, job.types[job.group_column])
    for column in schema.sparse:
        kind = pa.int32() if column.rows <= np.iinfo(np.int32).max else pa.int64()
        ids = pa.array(_ids(job, block, column)).cast(kind)
        if column.name in job.lists:
            ends, is_missing = block.lists(column.name)
            ids = pa.LargeListArray.from_arrays(ends, ids, mask=is_missing)
        columns[column.name] = pa.chunked_array([ids])
    return pa.table(columns)
