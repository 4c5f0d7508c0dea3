"""Reading ``hot_rows.json``, which says how many of the first rows of each table are hot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from hotbed.errors import DataError
from hotbed.specs import is_int


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
    if not file.is_file():
        raise DataError(f"{file} does not exist; make it with hotbed pack")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        entries = {e["table"]: (e["rows"], e["hot_rows"]) for e in cast("list[dict[str, Any]]", content["tables"])}
    except (ValueError, KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise DataError(f"{file} is not what hotbed pack writes ({what}); pack again") from None
    found: dict[str, int] = {}
    for name, count in rows.items():
        entry = entries.get(name) or entries.get(name.rpartition(".")[2])
        if entry is None:
            raise DataError(f"{file} has no table '{name}', which the model has; pack this model's data")
        counted, hot = entry
        if not is_int(hot) or not is_int(counted) or not 0 <= hot <= counted:
            raise DataError(f"{file}: table '{name}' has {hot!r} hot rows of {counted!r}; pack again")
        if counted != count:
            raise DataError(f"{file}: table '{name}' has {counted:,} rows, the model's has {count:,}; pack again")
        found[name] = hot
    return found
