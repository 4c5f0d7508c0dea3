"""Read the rows of a set of changes, batch by batch, and compare them with what its manifest counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import torch

from hotbed.errors import DamagedError
from hotbed.serve.format import TableChange
from hotbed.serve.schema import ChangeManifest

ROWS_AT_ONCE = 1 << 16


def read_rows(file: BinaryIO, manifest: ChangeManifest, where: str) -> Iterator[TableChange]:
    """Yield the rows of a file that `hotbed.checkpoint.changes.export_changes` wrote, by table, some at a time.

    Raises
    ------
    DamagedError
        If it is no such file, of other states, or has other numbers of rows than the manifest says.
    """
    import pyarrow as pa
    from pyarrow import parquet

    found: Counter[tuple[str, str]] = Counter()
    try:
        with parquet.ParquetFile(file) as parquet_file:
            metadata: dict[bytes, bytes] = parquet_file.schema_arrow.metadata or {}
            for key, state in (("base", manifest.base.state), ("sequence", manifest.sequence.state)):
                has = metadata.get(f"hotbed.{key}".encode(), b"").decode()
                if has != state:
                    raise DamagedError(f"{where} has '{key}' {has[:12]}…, its manifest {state[:12]}…; copy it again")
            for batch in parquet_file.iter_batches(ROWS_AT_ONCE, columns=["table", "id", "op", "vector"]):
                yield from _by_table(batch, found, where)
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise DamagedError(f"{where} is not what hotbed writes: {error}") from None
    for table, count in manifest.tables.items():
        counted = found[table, "upsert"], found[table, "delete"]
        if counted != (count.upserts, count.deletes):
            raise DamagedError(
                f"{where} has {counted[0]:,} rows and {counted[1]:,} deleted ids of table '{table}', its manifest says "
                f"{count.upserts:,} and {count.deletes:,}; copy it again"
            )


def _by_table(batch: Any, found: Counter[tuple[str, str]], where: str) -> Iterator[TableChange]:
    """Split a record batch at the changes of table or operation, which rows are sorted by."""
    tables, ops = (batch.column(name).cast("string").to_numpy(zero_copy_only=False) for name in ("table", "op"))
    ids = torch.from_numpy(batch.column("id").to_numpy(zero_copy_only=False).astype(np.int64))
    vectors = batch.column("vector")
    starts = np.flatnonzero((tables[1:] != tables[:-1]) | (ops[1:] != ops[:-1])) + 1
    for first, last in zip([0, *starts.tolist()], [*starts.tolist(), len(ids)], strict=True):
        if first == last:
            continue
        table, op, some = str(tables[first]), str(ops[first]), ids[first:last]
        found[table, op] += last - first
        if op == "delete":
            yield TableChange(table, some, some[:0], torch.empty(0, 0))
            continue
        lists = vectors.slice(first, last - first)
        flat = lists.flatten().to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
        lengths = np.diff(lists.offsets.to_numpy())
        if lists.null_count or op != "upsert" or (lengths != lengths[0]).any():
            raise DamagedError(f"{where}: rows of table '{table}' have no vectors of one length, or an op '{op}'")
        yield TableChange(table, some[:0], some, torch.from_numpy(flat.copy()).view(last - first, -1))
