"""Decide what to train, validate and test on: `draft_splits`, and which files there are for it: `DraftFiles`."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs

from hotbed.data import arrow
from hotbed.data.criteo import COLUMNS
from hotbed.data.delimited import is_delimited
from hotbed.data.parquet_files import ParquetFile, find_parquet, refuse_same_files, text_columns, with_rows
from hotbed.data.profile import ColumnProfile
from hotbed.data.roles import time_rank
from hotbed.data.row_groups import RowGroup
from hotbed.data.text_dates import parse_dates
from hotbed.errors import DataError, SpecError

FEWEST_ROWS = 50
"""Of fewer rows none are cut off."""
_SHARE = 0.1
_FEW_ROWS, _SHARE_OF_FEW = 5_000, 0.2  # a tenth of so few says little
_SMALLEST, _LARGEST = 0.03, 0.3  # shares that a split by time may have where many rows have one time
_MISSING = 0.01
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True)
class DraftFiles:
    """Files of a dataset by split, and those of a test split that is elsewhere."""

    path: str
    by_split: dict[str, list[ParquetFile]]  # result of `find_parquet`
    test_path: str | None = None  # a separate test split
    test_files: tuple[ParquetFile, ...] = ()

    @staticmethod
    def find(path: str | Path, test: str | Path | None, filesystem: fs.FileSystem | None) -> DraftFiles:
        """Find the files; `DataError` if there is nothing to train on."""
        files = find_parquet(path, filesystem)
        if "" not in files and "train" not in files:
            raise DataError(
                f"{path} has no train split, only {', '.join(files)}; add one, or give one of these by itself"
            )
        if test is None:
            return DraftFiles(str(path), files)
        if "test" in files:
            raise SpecError(f"--test is {test}, but {path} has a test split; leave --test out, or give the train files")
        found = find_parquet(test, filesystem, text_columns(file for of in files.values() for file in of))
        of_test = found.get("test", next(iter(found.values())))
        refuse_same_files("test", of_test, files)
        return DraftFiles(str(path), files, str(test), tuple(of_test))

    @property
    def train_files(self) -> Sequence[ParquetFile]:
        """Files to train on, and to cut other splits off."""
        return with_rows(self.by_split.get("", self.by_split.get("train", [])))

    @property
    def train(self) -> list[RowGroup]:
        """Row groups of these files."""
        return [group for file in self.train_files for group in file.row_groups()]

    @property
    def others(self) -> dict[str, Sequence[ParquetFile]]:
        """Files of the other splits."""
        there = {split: files for split, files in self.by_split.items() if split not in ("", "train")}
        return {**there, **({"test": self.test_files} if self.test_path else {})}

    def others_with(self, labels: Sequence[str]) -> list[ParquetFile]:
        """Files of the other splits that have labels: those without are not used."""
        return [f for of in self.others.values() for f in with_rows(of) if not {*labels} - {*f.schema.names}]


@dataclass
class DraftedSplits:
    """What a recipe says of splits: arguments of the source, why, and which splits there are."""

    init_args: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    has_valid: bool = False
    has_test: bool = False
    in_time_order: bool = False
    """Whether the rows are known to be stored in the order of time."""
    notes: list[str] = field(default_factory=list)


def draft_splits(
    files: DraftFiles,
    labels: Sequence[str],  # a split without one of these columns is not used
    sample: pa.Table,  # of the train data
    times: Sequence[ColumnProfile],  # columns of times in the sample
    *,
    total: int,  # rows of the train data
    time: str | None = None,  # column of times to cut by, if it is known
    valid: bool = False,  # whether a validation split is wanted
) -> DraftedSplits:
    """Keep the splits that there are, and cut the others off the train data: the last in time, else by a hash."""
    found = DraftedSplits()
    paths: dict[str, str | None] = {}
    there: set[str] = set()
    for split, of_split in files.others.items():
        lacking = next((f for f in with_rows(of_split) if any(name not in f.schema.names for name in labels)), None)
        if lacking is None:
            there.add(split)
            if split == "test" and files.test_path:
                paths["test"] = files.test_path
        elif split == "test" and files.test_path:
            raise DataError(f"--test is {files.test_path}, but {lacking} has no column {labels[0]!r} to test by")
        else:
            paths[split] = None
            found.notes.append(f"The {split} files ({lacking.name}) have no column {labels[0]!r} and are not used.")
    found.has_valid, found.has_test = "valid" in there, "test" in there
    wanted = [split for split in ("valid", "test") if split not in there and (split == "test" or valid)]
    if wanted and total < FEWEST_ROWS:
        found.reason = f"{total:,} rows are too few to cut off some"
    elif wanted:
        shares = {split: _SHARE_OF_FEW if split == "valid" and total < _FEW_ROWS else _SHARE for split in wanted}
        split, found.reason = _cut(files, sample, times, shares, time)
        found.init_args["split"] = split
        ordered = {column.name for column in times if column.is_sorted}
        found.in_time_order = split["by"] == "order" or split.get("column") in ordered
        found.has_valid, found.has_test = found.has_valid or "valid" in wanted, True
    if paths:
        found.init_args["split_paths"] = paths
    return found


def _cut(
    files: DraftFiles, sample: pa.Table, times: Sequence[ColumnProfile], wanted: dict[str, float], time: str | None
) -> tuple[dict[str, object], str]:
    """How to cut splits off the train data, and why so."""
    shares: dict[str, object] = dict(wanted)
    if time is None and all(is_delimited(f.shown) and tuple(f.schema.names) == COLUMNS for f in files.train_files):
        return {"by": "order", **shares}, "the last rows: logs of Criteo are in the order of time"
    ranked = sorted(times, key=lambda c: (-time_rank(c.name), -c.distinct))
    unfit: list[str] = []
    for column in ranked if time is None else [c for c in times if c.name == time]:
        if time is None and (why := _unfit(column)):
            unfit.append(why)
            continue
        starts = _starts(sample[column.name], wanted, column.date_format)
        if starts is not None:
            by_time = {"by": "time", "column": column.name, **{f"{s}_from": t for s, t in starts.items()}}
            by_time |= {} if column.date_format is None else {"format": column.date_format}
            return by_time, f"the latest rows by '{column.name}': a model is to predict what comes after its training"
        if time is not None:
            raise DataError(
                f"--time is {time}, but the latest of its values are in fewer than {_SMALLEST:.0%} or more than "
                f"{_LARGEST:.0%} of the rows, so it makes no test split; leave --time out"
            )
        unfit.append(
            f"'{column.name}' has no value that the latest {_SMALLEST:.0%} to {_LARGEST:.0%} of the rows begin with"
        )
    why = f" ({'; '.join(unfit)})" if unfit else ", for there is no column of time"
    return {"by": "hash", **shares}, f"drawn by a hash of the rows' places{why}"


def _unfit(column: ColumnProfile) -> str:
    """Why rows are not to be split by a column of times that nobody named for it; "" where they may be."""
    if column.missing >= _MISSING:
        return f"{column.missing:.1%} of '{column.name}' are missing"
    if not time_rank(column.name) and not column.is_sorted:
        return f"'{column.name}' may not be the time of the row; if it is: --time"
    return ""


def _starts(
    column: pa.ChunkedArray, wanted: dict[str, float], date_format: str | None = None
) -> dict[str, object] | None:
    """Return first times of the splits, so that each has about its share of the rows; None if there are none."""
    column = pc.drop_null(column)
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = pc.cast(column, kind.value_type)
    if date_format is not None:
        kind = pa.timestamp("us")
        column = pc.cast(parse_dates(column, date_format), kind)
    if arrow.is_time(kind):
        values = arrow.microseconds(column).to_numpy()
    elif arrow.is_text(column.type):
        values = np.array(pc.cast(column, pa.string()).to_pylist(), dtype=np.str_)
    else:
        values = arrow.wide_numbers(column)
        values = values[np.isfinite(values)]
    if not len(values):
        return None
    values = np.sort(values)
    different, firsts = np.unique(values, return_index=True)
    left = 1 - firsts / len(values)  # share of the rows from each value on
    starts: dict[str, object] = {}
    total = 0.0
    for split, share in reversed(wanted.items()):
        at = int(np.abs(left - (total + share)).argmin())
        if not _SMALLEST <= left[at] - total <= _LARGEST:
            return None
        total = float(left[at])
        starts[split] = _plain(different[at], kind)
    return dict(reversed(starts.items()))


def _plain(value: np.generic, kind: pa.DataType) -> object:
    """A time as a recipe has it."""
    if arrow.is_time(kind):
        time = (_EPOCH + datetime.timedelta(microseconds=int(value))).replace(tzinfo=None)  # pyright: ignore[reportArgumentType]
        return str(time.date()) if time.time() == datetime.time() else str(time)
    if isinstance(value, np.str_):
        return str(value)
    number = float(value)  # pyright: ignore[reportArgumentType]
    return int(number) if number.is_integer() else number
