"""Count the values of each table over all samples, and number those that get an id, within a limit of memory.

Counts of some samples are written as *runs*: files sorted by value. Runs are merged front by front, so that only what
gets an id is in memory. What comes out depends neither on how samples were divided nor on the limit.
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
from hotbed.data.preparation.pieces import Piece, Splits, read_parts
from hotbed.errors import DataError
from hotbed.files import new_file

_MOST_RUNS = 64
_FEWEST_BATCH_ROWS = 1 << 10
_MOST_BATCH_ROWS = 1 << 18
_ROW_BYTES = 64
"""Bytes beside those that a run has of a value and its count, which are reckoned with when runs are merged."""
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class CountJob:
    """Count the values of some samples."""

    group: tuple[Piece, ...]
    columns: Mapping[str, tuple[str, ...]]  # by table, the columns whose values are its rows
    kinds: Mapping[str, pa.DataType]  # by table, the type of its values
    splits: Splits
    train_only: bool  # whether only rows of the train split are counted
    out: Path  # directory of runs to make
    memory_bytes: int  # limit of the counts that are kept in memory


@dataclass(frozen=True)
class MergeJob:
    """Number the values of one table, from the runs of all samples; see `hotbed.prepare` for the arguments."""

    table: str
    counts: Path
    kind: pa.DataType
    threshold: int
    top_k: int | None
    earlier: Path | None
    out: Path
    memory_bytes: int


def count(job: CountJob) -> dict[str, int]:
    """Write runs, unless they are there; return the samples by split."""
    done = job.out / "samples.json"
    if done.is_file():
        return json.loads(done.read_text(encoding="utf-8"))
    samples = np.zeros(len(SPLITS), dtype=np.int64)
    names = list(dict.fromkeys(name for of_table in job.columns.values() for name in of_table))
    with task_directory(job.out) as directory:
        counts = _Counts(directory, job.memory_bytes)
        for part in read_parts(job.group, names, job.splits):
            samples += np.bincount(part.codes, minlength=len(SPLITS))
            counted = part.only(part.codes == 0) if job.train_only and names else part
            for name, of_table in job.columns.items():
                for column in of_table:
                    counts.add(name, counted.values(column, job.kinds[name]))
        counts.write()
        by_split = {str(split): int(n) for split, n in zip(SPLITS, samples.tolist(), strict=True)}
        (directory / done.name).write_text(json.dumps(by_split), encoding="utf-8")
    return by_split


class _Counts:
    """Counts of values by table; they are written as runs when they take too much memory."""

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
            self._tables = {name: [_summed(tables)] for name, tables in self._tables.items()}
            self._bytes = sum(table.nbytes for (table,) in self._tables.values())
            if self._bytes > self._memory_bytes // 2:
                self.write()

    def write(self) -> None:
        for name, tables in self._tables.items():
            run = self._directory / f"{_run_name(name)}.{self._runs:06d}.parquet"
            pq.write_table(_summed(tables), run, compression="lz4", row_group_size=_MOST_BATCH_ROWS)
        self._tables, self._bytes, self._runs = {}, 0, self._runs + 1


def merge(job: MergeJob) -> tuple[int, str]:
    """Write the vocabulary of a table, unless it is there; return how many values it has, and their SHA-256."""
    out = vocabulary_file(job.out, job.table)
    if out.is_file():
        return _described(read_vocabulary(out))
    earlier = Vocabulary.empty(job.kind) if job.earlier is None else read_vocabulary(job.earlier)
    try:
        known = earlier.values.cast(job.kind) if arrow.is_text(earlier.values.type) == arrow.is_text(job.kind) else None
    except pa.ArrowInvalid:
        known = None
    if known is None:
        raise DataError(
            f"{job.earlier} has values of type {earlier.values.type}, and those of table '{job.table}' are {job.kind} "
            "now, which are other ids; prepare the data without it, or write the column as it was"
        )
    most = None if job.top_k is None else max(0, job.top_k - len(known))
    found: list[pa.Table] = []
    for counted in _merged(sorted(job.counts.glob(f"[0-9]*/{_run_name(job.table)}.*.parquet")), job):
        found.append(counted.filter(pc.greater_equal(counted["count"], job.threshold)))
        if sum(table.nbytes for table in found) + known.nbytes > job.memory_bytes:
            found = [_most_frequent_new(found, known, most)]
            if 2 * found[0].nbytes + known.nbytes > job.memory_bytes:
                raise DataError(
                    f"table '{job.table}': the values seen at least {job.threshold:,} times take more than the "
                    f"{job.memory_bytes:,} bytes that a task may have; raise threshold, set top_k, or give more memory"
                )
    new = _most_frequent_new(found, known, most) if found else pa.table({"value": pa.array([], job.kind)})
    vocabulary = Vocabulary(pa.concat_arrays([known, *new["value"].chunks]))
    write_vocabulary(out, vocabulary)
    return _described(vocabulary)


def _described(vocabulary: Vocabulary) -> tuple[int, str]:
    return len(vocabulary.values), content_sha256(vocabulary.values)


def _most_frequent_new(tables: Sequence[pa.Table], known: pa.Array, most: int | None) -> pa.Table:
    """By falling count, then by value."""
    counted = pa.concat_tables(tables)
    new = counted.filter(pc.invert(pc.is_in(counted["value"], value_set=known)))
    return new.sort_by([("count", "descending"), ("value", "ascending")])[:most].combine_chunks()


def _merged(runs: Sequence[Path], job: MergeJob) -> Iterator[pa.Table]:
    """Counts of values over all runs, in parts that are sorted by value, each value in one of them."""
    level = 0
    while len(runs) > _MOST_RUNS:
        sets = [runs[start : start + _MOST_RUNS] for start in range(0, len(runs), _MOST_RUNS)]
        runs = [
            _written(
                of_set,
                job.kind,
                job.counts / f".merged-{level}-{_run_name(job.table)}.{i:06d}.parquet",
                job.memory_bytes,
            )
            for i, of_set in enumerate(sets)
        ]
        level += 1
    yield from _fronts(runs, job.memory_bytes)


def _written(runs: Sequence[Path], kind: pa.DataType, out: Path, memory_bytes: int) -> Path:
    with ExitStack() as stack:
        file = stack.enter_context(new_file(out))
        schema = pa.schema([("value", kind), ("count", pa.int64())])
        writer = stack.enter_context(pq.ParquetWriter(file, schema, compression="lz4"))
        for part in _fronts(runs, memory_bytes):
            writer.write_table(part)
    return out


def _fronts(runs: Sequence[Path], memory_bytes: int) -> Iterator[pa.Table]:
    """Merge runs: of each, what is not above the least of the last values that have been read of all."""
    each = memory_bytes // max(1, len(runs))
    with ExitStack() as stack:
        # Without buffers of whole row groups.
        files = [stack.enter_context(pq.ParquetFile(run, pre_buffer=False, buffer_size=_READ_BYTES)) for run in runs]
        streams = [file.iter_batches(_batch_rows(file, each), use_threads=False) for file in files]
        heads = [_next(stream) for stream in streams]
        while left := [(i, head) for i, head in enumerate(heads) if head is not None]:
            front = min(head["value"][-1].as_py() for _, head in left)
            taken: list[pa.Table] = []
            for i, head in left:
                below = pc.sum(pc.less_equal(head["value"], pa.scalar(front, head["value"].type))).as_py()
                taken.append(head[:below])
                heads[i] = head[below:] if below < len(head) else _next(streams[i])
            yield _summed(taken)


def _batch_rows(run: pq.ParquetFile, memory_bytes: int) -> int:
    stored = sum(run.metadata.row_group(i).total_byte_size for i in range(run.metadata.num_row_groups))
    row_bytes = _ROW_BYTES + stored // max(1, run.metadata.num_rows)
    return min(_MOST_BATCH_ROWS, max(_FEWEST_BATCH_ROWS, memory_bytes // row_bytes))


def _next(stream: Iterator[pa.RecordBatch]) -> pa.Table | None:
    batch = next((batch for batch in stream if len(batch)), None)
    return None if batch is None else pa.Table.from_batches([batch])


def _summed(tables: Sequence[pa.Table]) -> pa.Table:
    """One row per value, sorted by it."""
    grouped = pa.concat_tables(tables).group_by("value", use_threads=False).aggregate([("count", "sum")])
    return grouped.select(["value", "count_sum"]).rename_columns(["value", "count"]).sort_by("value").combine_chunks()


def _run_name(table: str) -> str:
    return quote(table, safe="").replace(".", "%2E")
