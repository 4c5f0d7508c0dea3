"""Files of the hot order: the rows of each table by falling number of accesses.

``DIRECTORY/TABLE.npy``, in NumPy's format: all rows of the table once, ``[R]``, the most accessed first, ties by row
number; little-endian int32, or int64 where the table has more than 2³¹ rows. Characters of a table's name that a file's
cannot have are percent-encoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import DataError


def hot_order_file(directory: str | Path, table: str) -> Path:
    """The file of a table's hot order."""
    return Path(directory) / f"{quote(table, safe=' ')}.npy"


def write_hot_order(directory: str | Path, orders: Mapping[str, NDArray[np.int64]]) -> None:
    """Write the hot orders of tables by name, ``[R]`` each, into an existing directory."""
    for table, order in orders.items():
        np.save(hot_order_file(directory, table), order.astype(_dtype(len(order))))


def read_hot_order(directory: str | Path, table: str, rows: int) -> NDArray[Any]:
    """Read the hot order ``[rows]`` of a table.

    Raises
    ------
    DataError
        If there is no such file, or it does not hold each row of the table once.
    """
    file = hot_order_file(directory, table)
    if not file.is_file():
        raise DataError(f"{file} does not exist; measure the hot order with hotbed inspect --skew DATA --out DIRECTORY")
    try:
        order: NDArray[Any] = np.load(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"{file} is not a file of NumPy's format, or is cut short: {error}") from None
    if order.shape != (rows,) or order.dtype != _dtype(rows):
        raise DataError(
            f"{file} holds {order.dtype} {list(order.shape)}, must hold {_dtype(rows)} [{rows}], the rows of table "
            f"'{table}'; measure the hot order of this data again"
        )
    seen = np.zeros(rows, dtype=np.bool_)
    seen[order[(order >= 0) & (order < rows)]] = True
    if not seen.all():
        raise DataError(f"{file} leaves out row {int(seen.argmin()):,} of table '{table}'; measure the hot order again")
    return order


def _dtype(rows: int) -> np.dtype[Any]:
    return np.dtype("<i4" if rows <= 1 << 31 else "<i8")
