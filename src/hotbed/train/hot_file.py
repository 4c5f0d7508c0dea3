"""Reading ``hot_rows.json``, which says how many of the first rows of each table are hot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hotbed.errors import DataError
from hotbed.specs import is_int
from hotbed.train.table_file import Writer, read_tables

_PACK = Writer("hotbed pack", "pack again", "pack this model's data")


def read_hot_rows(file: Path, rows: Mapping[str, int]) -> dict[str, int]:
    """Read how many of the first rows of each table are hot.

    Parameters
    ----------
    file
        ``hot_rows.json``.
    rows
        Rows of each table of the model, by its name in plans: ``TABLE``, or ``COLLECTION.TABLE``.

    Raises
    ------
    DataError
        If it is not such a file, or is about other tables.
    """
    found: dict[str, int] = {}
    entries = read_tables(file, rows, lambda _, entry: (entry["rows"], entry["hot_rows"]), _PACK)
    for name, (counted, hot) in entries.items():
        if not is_int(hot) or not is_int(counted) or not 0 <= hot <= counted:
            raise DataError(f"{file}: table '{name}' has {hot!r} hot rows of {counted!r}; pack again")
        if counted != rows[name]:
            raise DataError(f"{file}: table '{name}' has {counted:,} rows, the model's has {rows[name]:,}; pack again")
        found[name] = hot
    return found
