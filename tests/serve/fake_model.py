"""A model of few lines behind the server: its scores are sums that a test can compute, and it can be made to wait."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.data.encoding.json_rows import InputColumn
from hotbed.errors import DataError, StoreError

COLUMNS = (
    InputColumn("user", "integers"),
    InputColumn("item", "text"),
    InputColumn("tags", "integers", None),
    InputColumn("price", "numbers"),
)
KINDS = {"integers": (int, pa.int64()), "text": (str, pa.large_string()), "numbers": (int | float, pa.float64())}


class FakeEncoder:
    def __init__(self, columns: Sequence[InputColumn] = COLUMNS) -> None:
        self._columns = columns

    def columns(self) -> Sequence[InputColumn]:
        return self._columns

    def table(self, rows: Mapping[str, Sequence[object]], /) -> pa.Table:
        made = {}
        for column in self._columns:
            kind, arrow = KINDS[column.kind]
            if column.name not in rows:
                raise DataError(f"there is no column '{column.name}'")
            for row, value in enumerate(rows[column.name]):
                values = value if column.is_list and isinstance(value, list) else [value]
                if not all(v is None or (isinstance(v, kind) and not isinstance(v, bool)) for v in values):
                    raise DataError(f"column '{column.name}', row {row}: {value!r:.60} is not {column.kind}")
            try:
                made[column.name] = pa.array(rows[column.name], pa.large_list(arrow) if column.is_list else arrow)
            except (pa.ArrowInvalid, OverflowError, UnicodeError):
                raise DataError(f"column '{column.name}' has a value that is beyond its kind") from None
        if len({len(column) for column in made.values()}) > 1:
            raise DataError("columns have different lengths")
        return pa.table(made)


def score_of(row: Mapping[str, Any], step: int) -> float:
    """The score that the fake gives a row."""
    parts = (row["user"] or 0, len(row["item"] or ""), sum(v or 0 for v in row["tags"] or ()), row["price"] or 0.0)
    return step + sum((i + 1) * float(part) for i, part in enumerate(parts)) / 1024


class FakeModel:
    """Rows whose item is "fail" cannot be scored, "store" cannot be read, "crash" is a fault of ours, "nan" is NaN."""

    def __init__(
        self, step: int = 100, labels: tuple[str, ...] = ("label",), columns: Sequence[InputColumn] = COLUMNS
    ) -> None:
        self.step, self.state, self.labels, self.encoder = step, "0" * 64, labels, FakeEncoder(columns)
        self.is_broken = False
        self.go = threading.Event()
        self.go.set()
        self.entered = threading.Semaphore(0)
        self.batches: list[int] = []

    def score(self, columns: pa.RecordBatch, /) -> tuple[NDArray[np.float64], int]:
        self.entered.release()
        assert self.go.wait(60)
        self.batches.append(columns.num_rows)
        rows, step = columns.to_pylist(), self.step
        items = [row["item"] for row in rows]
        if "fail" in items:
            raise DataError(f"row {items.index('fail')}: the item cannot be scored")
        if "store" in items:
            raise StoreError("/secret/path/rows cannot be read")
        if "crash" in items:
            raise KeyError("/secret/path")
        scores = np.array([[score_of(row, step) + i for i in range(len(self.labels))] for row in rows])
        scores[[item == "nan" for item in items]] = np.nan
        return scores.reshape(len(rows), len(self.labels)), step

    def counters(self) -> dict[str, dict[str, float]]:
        return {"unknown_ids": {"user": 3.0}, "cache_hits": {"": 10.0}}


class FakeFollower:
    staleness_s, behind_s = 1.5, 0.25

    def counters(self) -> dict[str, dict[str, float]]:
        return {"applied": {"change": 2.0}, "refused": {"gap": 1.0}}
