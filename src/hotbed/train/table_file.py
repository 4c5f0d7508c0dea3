"""Reading what a command of hotbed's has written about each table of a dataset: ``{"tables": [{"table": …}, …]}``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from hotbed.errors import DataError

T = TypeVar("T")


class Writer(NamedTuple):
    """The command that writes a file: its name, how it is asked to do so again, and for another model's data."""

    command: str
    again: str
    anew: str


def read_tables(
    file: Path, rows: Mapping[str, int], take: Callable[[dict[str, Any], dict[str, Any]], T], writer: Writer
) -> dict[str, T]:
    """Read the entry of each table.

    Parameters
    ----------
    file
        The file.
    rows
        Rows of each table of the model, by its name in plans: ``TABLE``, or ``COLLECTION.TABLE``.
    take
        Makes what is wanted of the file's content and a table's entry.
    writer
        Who has written it.

    Raises
    ------
    DataError
        If it is not such a file, or lacks a table.
    """
    if not file.is_file():
        raise DataError(f"{file} does not exist; make it with {writer.command}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        found = {entry["table"]: take(content, entry) for entry in cast("list[dict[str, Any]]", content["tables"])}
    except (ValueError, KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise DataError(f"{file} is not what {writer.command} writes ({what}); {writer.again}") from None
    entries: dict[str, T] = {}
    for name in rows:
        own = name if name in found else name.rpartition(".")[2]
        if own not in found:
            raise DataError(f"{file} has no table '{name}', which the model has; {writer.anew}")
        entries[name] = found[own]
    return entries
