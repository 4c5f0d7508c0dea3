"""Define how a table is cut: the class `Cut`, named schemes such as ``"row"``, and schemes by table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

from hotbed.checks import Section, Size, check_known
from hotbed.errors import PlanError
from hotbed.plan.tiling import Tier, column_unit
from hotbed.specs import Table


@dataclass(frozen=True)
class Cut(Section, where="a cut: ", error=PlanError):
    """Row and column parts of a table, copies, and memory.

    Parameters
    ----------
    rows
        Number of row parts. Part ``i`` has every ``rows``-th row from row ``i``. Consecutive ranks own the parts, so
        one part per rank of a node keeps a column part inside a node. 0 means one part per rank, which is also the
        maximum.
    cols
        Number of column parts, of equal width up to a multiple of 16 columns (128 for int8 rows). 0 means one per rank.
    replicated
        Whether all ranks read a copy of all rows.
    hot_rows
        Number of first (most popular) rows that all ranks read a copy of. The remaining rows are cut. A smaller table
        is replicated.
    tier
        Memory of the rows except hot rows: ``"device"``, ``"host"`` or ``"disk"``. On host and disk, rows take space
        once they are trained.
    cache_rows
        Rows of a device-memory cache for each tile on host or disk.
    """

    rows: Size = 1
    cols: Size = 1
    replicated: bool = False
    hot_rows: Size = 0
    tier: Tier = "device"
    cache_rows: Size = 0


SCHEMES: Mapping[str, Cut] = {
    "table": Cut(),
    "row": Cut(rows=0),
    "column": Cut(cols=0),
    "grid": Cut(rows=2, cols=2),
    "dp": Cut(replicated=True),
}
"""Schemes by name; "dp" is data-parallel. To add a scheme, list it here."""

AUTO = "auto"
"""Name of the scheme that `hotbed.plan.search` chooses."""

Scheme = str | Cut
Schemes = Scheme | Mapping[str, Scheme]
"""One scheme for all tables, or schemes by table name or pattern."""


def cuts_of(tables: Iterable[Table], schemes: Schemes) -> dict[str, Cut | Literal["auto"]]:
    """Return the cut of each table, or ``"auto"``. The first matching key applies."""
    names = [t.name for t in tables]
    if not isinstance(schemes, Mapping):
        cut = _cut_of(schemes)
        return dict.fromkeys(names, cut)
    cuts: dict[str, Cut | Literal["auto"]] = {key: _cut_of(scheme) for key, scheme in schemes.items()}
    for key in cuts:
        if not any(fnmatchcase(name, key) for name in names):
            check_known("table in schemes", key, names, PlanError)
    found: dict[str, Cut | Literal["auto"]] = {}
    for name in names:
        matching = [key for key in (name, *cuts) if key in cuts and fnmatchcase(name, key)]
        found[name] = cuts[matching[0]] if matching else Cut()
    return found


def _cut_of(scheme: Scheme) -> Cut | Literal["auto"]:
    if isinstance(scheme, Cut):
        return scheme
    if scheme == AUTO:
        return "auto"
    check_known("scheme", scheme, [*SCHEMES, AUTO], PlanError, "Or pass a Cut.")
    return SCHEMES[scheme]


def schemes_from(values: Mapping[str, Any], where: str) -> dict[str, Scheme]:
    """Read schemes by table from a parsed file: names of schemes, or the fields of a `Cut`.

    >>> schemes_from({"users": "row", "items": {"rows": 2, "cols": 2}, "*": "auto"}, "plan.yaml")
    {'users': 'row', 'items': Cut(rows=2, cols=2, ...), '*': 'auto'}
    """
    known = [f.name for f in fields(Cut)]
    found: dict[str, Scheme] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            for key in cast("Mapping[str, Any]", value):
                check_known(f"{where}: a cut of table '{name}'", key, known, PlanError)
            found[str(name)] = Cut(**cast("Mapping[str, Any]", value))
        elif isinstance(value, str):
            found[str(name)] = value
        else:
            raise PlanError(
                f"{where}: table '{name}': got {value!r}, expected one of {', '.join(SCHEMES)}, {AUTO}, or the "
                f"fields of a cut ({', '.join(known)})"
            )
    return found


def refuse_uncut(tables: Iterable[Table], cuts: Mapping[str, Cut], world_size: int) -> None:
    """Raise `PlanError` if all tables of a cut are too narrow for column parts."""
    by_cut: dict[Cut, list[Table]] = {}
    for table in tables:
        if table.name in cuts and cuts[table.name].cols != 1 and not cuts[table.name].replicated:
            by_cut.setdefault(cuts[table.name], []).append(table)
    narrow = next((ts for ts in by_cut.values() if all(t.dim <= column_unit(t) for t in ts)), None)
    if world_size == 1 or narrow is None:
        return
    table = max(narrow, key=lambda t: t.dim / column_unit(t))
    unit = column_unit(table)
    raise PlanError(
        f"column parts of table '{table.name}': got {table.dim} {table.dtype} columns, expected at least {unit + 1}, "
        f"because parts are multiples of {unit} columns, so that sums keep their order. Cut it by rows, or raise its "
        "dim"
    )
