"""Define how a table may be cut: a `Cut`, the schemes of the literature by name, and schemes by table."""

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
    """How a table is cut.

    Parameters
    ----------
    rows
        Number of row parts, every ``rows``-th row each; they go to ranks that follow each other, so with as many parts
        as a node has ranks the rows of a column part stay inside a node. 0, and at most: as many as there are ranks.
    cols
        Number of column parts, as equal as multiples of 16 columns (128 of int8 rows) allow, and at most as many as
        there are such multiples. 0: as many as there are ranks.
    replicated
        Whether all ranks read a copy of all rows.
    hot_rows
        The first rows, the most popular ones, of which all ranks read a copy while the others are cut; a table of
        no more rows is copied whole.
    tier
        Memory of the rows, but for hot ones: the compute device's, or ``"host"`` or ``"disk"``, where rows come to be
        when they are trained.
    cache_rows
        Rows of a cache in memory before each tile that is not in the device's memory.
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
"""The schemes by name; "dp" is data-parallel. To add one, list it here: nothing else knows their names."""

AUTO = "auto"
"""In the place of a scheme: whatever the search finds (`hotbed.plan.search`)."""

Scheme = str | Cut
Schemes = Scheme | Mapping[str, Scheme]
"""For all tables; or by table, by name or pattern."""


def cuts_of(tables: Iterable[Table], schemes: Schemes) -> dict[str, Cut | Literal["auto"]]:
    """Return the cut of each table, or ``"auto"``; the first key that matches a table counts."""
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
    check_known("scheme", scheme, [*SCHEMES, AUTO], PlanError, "Or give a Cut.")
    return SCHEMES[scheme]


def schemes_from(values: Mapping[str, Any], where: str) -> dict[str, Scheme]:
    """Read schemes by table as files have them: a scheme's name, or the fields of a `Cut`.

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
                f"{where}: table '{name}' has {value!r}, must be one of {', '.join(SCHEMES)}, {AUTO}, or the fields "
                f"of a cut ({', '.join(known)})"
            )
    return found


def refuse_uncut(tables: Iterable[Table], cuts: Mapping[str, Cut], world_size: int) -> None:
    """Raise `PlanError` if a cut is to cut columns, and all tables that have it are too narrow."""
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
        f"table '{table.name}' of {table.dim} {table.dtype} columns cannot be cut by columns: parts are multiples of "
        f"{unit} columns, so that sums keep their order, and tables of at least {unit + 1} columns can be cut; cut it "
        "by rows, or raise its dim"
    )
