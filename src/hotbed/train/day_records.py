"""Read and write what is kept of days: a record of each in ``days.jsonl``, and ``before.json`` in its directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, cast

from hotbed.errors import DamagedError
from hotbed.files import read_text
from hotbed.parsing import TextError, parse_json, read_limited

DAYS, BEFORE, SEEN, CHANGES = "days.jsonl", "before.json", "seen.npz", "changes.parquet"
MEASURED = ("samples", "metrics", "unseen_share", "new_rows", "label_means")
"""Entries of ``before.json`` that go into a record."""
_KEYS = ("folder", "checkpoint", "step", "epoch", "data")
Record = dict[str, Any]


def read_days(out: Path) -> list[Record]:
    """The records of a directory's days; none, where no day is finished."""
    file = out / DAYS
    if not file.exists():
        return []
    records: list[Record] = []
    for number, text in enumerate(read_text(file).splitlines(), 1):
        try:
            record = json.loads(text)
            date.fromisoformat(record["day"])
            if not record.get("skipped"):
                _ = [record[key] for key in _KEYS]
        except (ValueError, TypeError, KeyError):
            raise DamagedError(f"{file}, line {number:,} is no record of a day; restore the file") from None
        records.append(record)
    return records


def lines_of(records: Sequence[Record]) -> str:
    """Records as text."""
    return "".join(json.dumps(record) + "\n" for record in records)


def measured(folder: Path, day: str) -> dict[str, Any]:
    """What was measured of a day before it was trained on."""
    file = folder / BEFORE
    try:
        found = parse_json(read_limited(file))
    except (FileNotFoundError, TextError, ValueError) as error:
        why = "is gone" if isinstance(error, FileNotFoundError) else f"is damaged ({error})"
    else:
        if isinstance(found, dict) and all(key in found for key in MEASURED):
            return cast("dict[str, Any]", found)
        why = "is damaged"
    raise DamagedError(f"{file} {why}; restore it, or train that day and those after it anew: --restart_from {day}")


def line_of(record: Record, metrics: Mapping[str, float | None]) -> str:
    """The figures of a day in a line."""
    shown = [f"{record['samples']:,} samples"]
    shown += [
        f"{name} {metrics[name]:.5f}" for name in ("auc", "logloss", "calibration") if metrics.get(name) is not None
    ]
    shown.append(f"{record['unseen_share']:.2%} of lookups never seen before")
    if "evicted" in record:
        shown.append(f"{sum(record['evicted'].values()):,} ids evicted")
    return ", ".join(shown)
