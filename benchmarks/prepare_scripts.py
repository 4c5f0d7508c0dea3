"""What people write who prepare a Criteo log themselves: with polars at one go, and with pandas in pieces.

    python -m benchmarks.prepare_scripts {polars,polars_hashed,pandas} LOG OUT

All but `polars_hashed` do what ``hotbed prepare`` does: per column, values seen at least 15 times among the first nine
tenths of the lines get ids by falling count, all others id 0; a numerical x becomes ln(x + 3), a missing one 0. Ids of
values of the same count may be others than hotbed's.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from hotbed.data.files.criteo import COLUMNS, DENSE, LABEL, SPARSE

THRESHOLD, TEST_FRACTION = 15, 0.1
HASHED_ROWS = 1 << 20
_PIECE = 1_000_000


def polars(log: Path, out: Path) -> None:
    """Count, number and write all columns of a log that is in memory as a whole."""
    frame = _read(log)
    train = round(len(frame) * (1 - TEST_FRACTION))
    columns = [_number(name) for name in DENSE]
    for name in SPARSE:
        counts = frame[name][:train].drop_nulls().value_counts(name="count").filter(pl.col("count") >= THRESHOLD)
        ids = counts.sort("count", descending=True).with_row_index("id", offset=1)
        columns.append(pl.col(name).replace_strict(ids[name], ids["id"], default=0, return_dtype=pl.Int32))
    _write(frame.select(LABEL, *columns), train, out)


def polars_hashed(log: Path, out: Path) -> None:
    """Hash values to 2²⁰ rows, so that nothing has to be counted: less than what hotbed does."""
    frame = _read(log)
    ids = [(pl.col(name).hash() % HASHED_ROWS).cast(pl.Int32) for name in SPARSE]
    _write(frame.select(LABEL, *map(_number, DENSE), *ids), round(len(frame) * (1 - TEST_FRACTION)), out)


def pandas(log: Path, out: Path) -> None:
    """Count and number piece by piece, as the whole log of a day seldom fits into memory as objects."""
    import pandas as pd

    options: dict[str, Any] = {
        "sep": "\t",
        "header": None,
        "names": COLUMNS,
        "chunksize": _PIECE,
        "dtype": dict.fromkeys(SPARSE, "str"),
    }
    counts: dict[str, Counter[str]] = {name: Counter() for name in SPARSE}
    with log.open("rb") as file:
        lines = sum(1 for _ in file)
    train = round(lines * (1 - TEST_FRACTION))
    for i, piece in enumerate(pd.read_csv(log, **options)):
        counted = piece.iloc[: max(0, train - i * _PIECE)]
        for name in SPARSE:
            counts[name].update(counted[name].value_counts().to_dict())
    ids = {
        name: {value: i for i, (value, n) in enumerate(counts.pop(name).most_common(), 1) if n >= THRESHOLD}
        for name in SPARSE
    }
    for i, piece in enumerate(pd.read_csv(log, **options)):
        made: dict[str, Any] = {LABEL: piece[LABEL].astype("int8")}
        made |= {name: np.log(piece[name] + 3).fillna(0).astype("float32") for name in DENSE}
        made |= {name: piece[name].map(ids[name]).fillna(0).astype("int32") for name in SPARSE}
        pd.DataFrame(made).to_parquet(out / f"part-{i:05d}.parquet")


def _read(log: Path) -> pl.DataFrame:
    types = {LABEL: pl.Int8, **dict.fromkeys(DENSE, pl.Int64), **dict.fromkeys(SPARSE, pl.String)}
    return pl.read_csv(log, separator="\t", has_header=False, new_columns=list(COLUMNS), schema=types)


def _number(name: str) -> pl.Expr:
    return (pl.col(name) + 3).log().fill_null(0).cast(pl.Float32)


def _write(frame: pl.DataFrame, train: int, out: Path) -> None:
    frame[:train].write_parquet(out / "train.parquet")
    frame[train:].write_parquet(out / "test.parquet")


SCRIPTS = {"polars": polars, "polars_hashed": polars_hashed, "pandas": pandas}

if __name__ == "__main__":
    SCRIPTS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
