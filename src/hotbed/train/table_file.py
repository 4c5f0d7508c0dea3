"""Read the files that commands write about the tables of a dataset: ``{"tables": [{"table": …}, …]}``.

``hot_rows.json`` of ``hotbed pack`` says how many of the first rows of each table are hot; ``skew.json`` of ``hotbed
inspect --skew`` how often the rows of each table are accessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from hotbed.checkpoint.single_files import read_limited
from hotbed.errors import DataError
from hotbed.parsing import TextError, parse_json
from hotbed.plan.popularity import Curve
from hotbed.specs import is_int

T = TypeVar("T")


class Writer(NamedTuple):
    """The command that writes a file, for errors."""

    command: str  # its name
    again: str  # what to do with a damaged file
    for_model: str  # what to do with a file of another model's data


def read_tables(
    file: str | Path, rows: Mapping[str, int], take: Callable[[dict[str, Any], dict[str, Any]], T], writer: Writer
) -> dict[str, T]:
    """Read the entry of each table."""
    try:
        content = parse_json(read_limited(file))
        found = {entry["table"]: take(content, entry) for entry in cast("list[dict[str, Any]]", content["tables"])}
    except FileNotFoundError:
        raise DataError(f"{file} does not exist; make it with {writer.command}") from None
    except TextError as error:
        raise DataError(f"{file} {error}; {writer.again}") from None
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        what = f"{type(error).__name__}: {error}"
        raise DataError(f"{file} is not what {writer.command} writes ({what}); {writer.again}") from None
    entries: dict[str, T] = {}
    for name in rows:
        own = name if name in found else name.rpartition(".")[2]
        if own not in found:
            raise DataError(f"{file} has no table '{name}', which the model has; {writer.for_model}")
        entries[name] = found[own]
    return entries


_PACK = Writer("hotbed pack", "pack again", "pack this model's data")


def read_hot_rows(file: str | Path, rows: Mapping[str, int]) -> dict[str, int]:
    """Read how many of the first rows of each table are hot."""
    found: dict[str, int] = {}
    entries = read_tables(file, rows, lambda _, entry: (entry["rows"], entry["hot_rows"]), _PACK)
    for name, (counted, hot) in entries.items():
        if not is_int(hot) or not is_int(counted) or not 0 <= hot <= counted:
            raise DataError(f"{file}: table '{name}' has {hot!r} hot rows of {counted!r}; pack again")
        if counted != rows[name]:
            raise DataError(f"{file}: table '{name}' has {counted:,} rows, the model's has {rows[name]:,}; pack again")
        found[name] = hot
    return found


_INSPECT = Writer("hotbed inspect --skew", "make it again", "inspect this model's data")


def read_skew(file: str | Path, rows: Mapping[str, int]) -> dict[str, Curve]:
    """Read how often the first rows of each table are accessed, where rows are numbered by falling popularity."""
    found: dict[str, Curve] = {}
    for name, (counted, curve) in read_tables(file, rows, _counted, _INSPECT).items():
        if counted != rows[name]:
            has = f"{counted:,} rows, the model's has {rows[name]:,}"
            raise DataError(f"{file}: table '{name}' has {has}; {_INSPECT.for_model}")
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
