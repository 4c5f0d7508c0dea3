"""Reading ``skew.json`` of ``hotbed inspect --skew``, which says how often the rows of each table are accessed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from hotbed.errors import DataError
from hotbed.plan.tiers import Curve


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
    if not file.is_file():
        raise DataError(f"{file} does not exist; make it with hotbed inspect --skew")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        samples = max(int(content["samples"]), 1)
        entries = {e["table"]: _curve(e, samples) for e in cast("list[dict[str, Any]]", content["tables"])}
        counts = {e["table"]: int(e["rows"]) for e in content["tables"]}
    except (ValueError, KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise DataError(f"{file} is not what hotbed inspect --skew writes ({what}); make it again") from None
    found: dict[str, Curve] = {}
    for name, count in rows.items():
        own = name if name in entries else name.rpartition(".")[2]
        if own not in entries:
            raise DataError(f"{file} has no table '{name}', which the model has; inspect this model's data")
        if counts[own] != count:
            has = f"{counts[own]:,} rows, the model's has {count:,}"
            raise DataError(f"{file}: table '{name}' has {has}; inspect this model's data")
        found[name] = entries[own]
    return found


def _curve(entry: Mapping[str, Any], samples: int) -> Curve:
    shares = [share or 0.0 for share in entry["accesses_of_top_rows"]]  # null where there was no access
    return Curve(entry["cache_rows"], [share * entry["accesses"] / samples for share in shares])
