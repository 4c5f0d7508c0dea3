"""Count the values of each table, and assign ids to frequent values (stages 2 and 3 of a preparation).

A count task writes its counts as *runs*: Parquet files that are sorted by value. A merge task reads all runs of a table
side by side. In memory, it keeps only the values that get ids. The result depends neither on the memory limit nor on
how samples are divided among tasks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hotbed.data import arrow_columns as arrow
from hotbed.data.encoding.lookup_table import content_sha256
from hotbed.data.encoding.vocabulary import Vocabulary, read_vocabulary, vocabulary_file, write_vocabulary
from hotbed.data.executors import task_directory
from hotbed.data.files.row_split import SPLITS
from hotbed.data.preparation.raw_inputs import Piece, Splits, read_blocks_of
from hotbed.errors import DataError
from hotbed.files import new_file

_MOST_RUNS = 64
_FEWEST_BATCH_ROWS = 1 << 10
_MOST_BATCH_ROWS = 1 << 18
_ROW_BYTES = 64  # estimated bytes in memory of a value and its count, in addition to the bytes in the file
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class CountJob:
    """Arguments of `count_values` for one group of samples."""

    group: tuple[Piece, ...]
    columns: Mapping[str, tuple[str, ...]]  # columns by table that counts their values
    kinds: Mapping[str, pa.DataType]  # type of counted values by table
    splits: Splits
    train_only: bool  # whether only rows of the train split are counted
    out: Path  # directory of the runs
    memory_bytes: int  # limit of the counts in memory


@dataclass(frozen=True)
class MergeJob:
    """Arguments of `merge_runs` for one table. `PrepareOptions` describes ``threshold`` and ``top_k``."""

    table: str
    counts: Path
    kind: pa.DataType
    threshold: int
    top_k: int | None
    earlier: Path | None
    out: Path
    memory_bytes: int


def count_values(job: CountJob) -> dict[str, int]:
    """Write the runs of a group unless they exist, and return the number of samples by split."""
    done = job.out / "samples.json"
    if done.is_file():
        return json.loads(done.read_text(encoding="utf-8"))
    samples = np.zeros(len(SPLITS), dtype=np.int64)
    names = list(dict.fromkeys(name for of_table in job.columns.values() for name in of_table))
    with task_directory(job.out) as directory:
        counts = _ValueCounts(directory, job.memory_bytes)
        for block in read_blocks_of(job.group, names, job.splits):
            samples += np.bincount(block.codes, minlength=len(SPLITS))
            counted = block.filter(block.codes == 0) if job.train_only and names else block
            for name, of_table in job.columns.items():
                for column in of_table:
                    counts.add(name, counted.values(column, job.kinds[name]))
        counts.write()
        by_split = {str(split): int(n) for split, n in zip(SPLITS, samples.tolist(), strict=True)}
        (directory / done.name).write_text(json.dumps(by_split), encoding="utf-8")
    return by_split


class _ValueCounts:
    """Counts of values by table. They are written as runs when they exceed the memory limit."""

    def __init__(self, directory: Path, memory_bytes: int) -> None:
        self._directory, self._memory_bytes = directory, memory_bytes
        self._tables: dict[str, list[pa.Table]] = {}
        self._bytes = self._runs = 0

    def add(self, name: str, values: pa.Array) -> None:
        counted = values.drop_null().value_counts()
        table = pa.table({"value": counted.field("values"), "count": counted.field("counts")})
        self._tables.setdefault(name, []).append(table)
        self._bytes += table.nbytes
        if self._bytes > self._memory_bytes:
            self._tables = {name: [_sum_counts(tables)] for name, tables in self._tables.items()}
            self._bytes = sum(table.nbytes for (table,) in self._tables.values())
            if self._bytes > self._memory_bytes // 2:
                self.write()

    def write(self) -> None:
        for name, tables in self._tables.items():
            run = self._directory / f"{_run_name(name)}.{self._runs:06d}.parquet"
            pq.write_table(_sum_counts(tables), run, compression="lz4", row_group_size=_MOST_BATCH_ROWS)
        self._tables, self._bytes, self._runs = {}, 0, self._runs + 1


def merge_runs(job: MergeJob) -> tuple[int, str]:
    """Write the vocabulary of a table unless it exists, and return its size and SHA-256."""
    out = vocabulary_file(job.out, job.table)
    if out.is_file():
        values = read_vocabulary(out).values
    else:
        values = _frequent_values(job)
        write_vocabulary(out, Vocabulary(values))
    return len(values), content_sha256(values)


def _frequent_values(job: MergeJob) -> pa.Array:
    """Return the values that get ids, in the order of their ids."""
    known = _earlier_values(job)
    most = None if job.top_k is None else max(0, job.top_k - len(known))
    found: list[pa.Table] = []
    for counted in _merge_all(sorted(job.counts.glob(f"[0-9]*/{_run_name(job.table)}.*.parquet")), job):
        found.append(counted.filter(pc.greater_equal(counted["count"], job.threshold)))
        if sum(table.nbytes for table in found) + known.nbytes > job.memory_bytes:
            found = [_most_frequent_new(found, known, most)]  # this may drop values, because of `top_k`
            if (nbytes := 2 * found[0].nbytes + known.nbytes) > job.memory_bytes:
                raise DataError(
                    f"table '{job.table}', values that occur at least {job.threshold:,} times: got {nbytes:,} bytes of "
                    f"memory, expected at most {job.memory_bytes:,}. Increase threshold or memory, or set top_k"
                )
    new = _most_frequent_new(found, known, most)["value"].chunks if found else []
    return pa.concat_arrays([known, *new])


def _earlier_values(job: MergeJob) -> pa.Array:
    """Return the values of the earlier vocabulary, which keep their ids."""
    if job.earlier is None:
        return Vocabulary.empty(job.kind).values
    values = read_vocabulary(job.earlier).values
    try:
        if arrow.is_text(values.type) == arrow.is_text(job.kind):
            return values.cast(job.kind)
    except pa.ArrowInvalid:
        pass
    raise DataError(
        f"{job.earlier}: got values of type {values.type}, expected {job.kind} as in the data of table "
        f"'{job.table}'. Remove the option `vocabulary`, or write the column as {values.type} again"
    )


def _most_frequent_new(tables: Sequence[pa.Table], known: pa.Array, most: int | None) -> pa.Table:
    """Return the ``most`` most frequent values (None: all) that are not in ``known``, by descending count and value."""
    counted = pa.concat_tables(tables)
    new = counted.filter(pc.invert(pc.is_in(counted["value"], value_set=known)))
    return new.sort_by([("count", "descending"), ("value", "ascending")])[:most].combine_chunks()


def _merge_all(runs: Sequence[Path], job: MergeJob) -> Iterator[pa.Table]:
    """Merge any number of runs: more than `_MOST_RUNS` are first merged to fewer, longer runs."""
    level = 0
    schema = pa.schema([("value", job.kind), ("count", pa.int64())])
    while len(runs) > _MOST_RUNS:
        merged: list[Path] = []
        for i, start in enumerate(range(0, len(runs), _MOST_RUNS)):
            out = job.counts / f".merged-{level}-{_run_name(job.table)}.{i:06d}.parquet"
            with new_file(out) as file, pq.ParquetWriter(file, schema, compression="lz4") as writer:
                for part in _merge_open(runs[start : start + _MOST_RUNS], job.memory_bytes):
                    writer.write_table(part)
            merged.append(out)
        runs, level = merged, level + 1
    yield from _merge_open(runs, job.memory_bytes)


def _merge_open(runs: Sequence[Path], memory_bytes: int) -> Iterator[pa.Table]:
    """Yield sums of counts, sorted by value, while one batch of each run is in memory.

    Each step consumes the values that all runs have read completely: those up to the smallest of the batches' last
    values. So no value occurs in two steps.
    """
    each = memory_bytes // max(1, len(runs))
    with ExitStack() as stack:
        # Pre-buffering would read whole row groups.
        files = [stack.enter_context(pq.ParquetFile(run, pre_buffer=False, buffer_size=_READ_BYTES)) for run in runs]
        streams = [file.iter_batches(_batch_rows(file, each), use_threads=False) for file in files]
        heads = [_next(stream) for stream in streams]
        while left := [(i, head) for i, head in enumerate(heads) if head is not None]:
            front = min(head["value"][-1].as_py() for _, head in left)
            consumed: list[pa.Table] = []
            for i, head in left:
                below = pc.sum(pc.less_equal(head["value"], pa.scalar(front, head["value"].type))).as_py()
                consumed.append(head[:below])
                heads[i] = head[below:] if below < len(head) else _next(streams[i])
            yield _sum_counts(consumed)


def _batch_rows(run: pq.ParquetFile, memory_bytes: int) -> int:
    stored = sum(run.metadata.row_group(i).total_byte_size for i in range(run.metadata.num_row_groups))
    row_bytes = _ROW_BYTES + stored // max(1, run.metadata.num_rows)
    return min(_MOST_BATCH_ROWS, max(_FEWEST_BATCH_ROWS, memory_bytes // row_bytes))


def _next(stream: Iterator[pa.RecordBatch]) -> pa.Table | None:
    batch = next((batch for batch in stream if len(batch)), None)
    return None if batch is None else pa.Table.from_batches([batch])


def _sum_counts(tables: Sequence[pa.Table]) -> pa.Table:
    """Return one row per value, sorted by value."""
    grouped = pa.concat_tables(tables).group_by("value", use_threads=False).aggregate([("count", "sum")])
    return grouped.select(["value", "count_sum"]).rename_columns(["value", "count"]).sort_by("value").combine_chunks()


def _run_name(table: str) -> str:
    return quote(table, safe="").replace(".", "%2E")
