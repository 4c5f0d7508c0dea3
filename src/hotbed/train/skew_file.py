"""Reading ``skew.json`` of ``hotbed inspect --skew``, which says how often the rows of each table are accessed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotbed.errors import DataError
from hotbed.plan.tiers import Curve
from hotbed.train.table_file import Writer, read_tables

_INSPECT = Writer("hotbed inspect --skew", "make it again", "inspect this model's data")


def read_skew(file: Path, rows: Mapping[str, int]) -> dict[str, Curve]:
    """Read how often the first rows of each table are accessed, where rows are numbered by falling popularity.

    Parameters
    ----------
    file
        ``skew.json``.
    rows
        Rows of each table of the model, by its name in plans: ``TABLE``, or ``COLLECTION.TABLE``.

    Raises
    ------
    DataError
        If it is not such a file, or is about other tables.
    """
    found: dict[str, Curve] = {}
    for name, (counted, curve) in read_tables(file, rows, _counted, _INSPECT).items():
        if counted != rows[name]:
            has = f"{counted:,} rows, the model's has {rows[name]:,}"
            raise DataError(f"{file}: table '{name}' has {has}; {_INSPECT.anew}")
        found[name] = curve
    return found


def _counted(content: Mapping[str, Any], entry: Mapping[str, Any]) -> tuple[int, Curve]:
    """Rows of a table, and how often they are accessed."""
    samples, counts, rows = max(int(content["samples"]), 1), entry["cache_rows"], int(entry["rows"])
    shares = [share or 0.0 for share in entry["accesses_of_top_rows"]]  # null where there was no access
    if len(counts) != len(shares) or counts != sorted(counts) or counts[-1:] != [rows]:
        raise ValueError(
            f"cache_rows of table '{entry['table']}' must rise to its {rows:,} rows, with as many accesses_of_top_rows"
        )
    return rows, Curve(counts, [share * entry["accesses"] / samples for share in shares])
