"""Define `Plan`: the tiles of all tables, with the rank and memory of each. Every sharding scheme has this form.

A `Tile` is a rectangle of a table: a strided range of rows × a range of columns. Its owner is the rank that updates it
and holds its moments. Its readers are the ranks that hold a copy of its rows. Plans are read and written as JSON.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import combinations, pairwise, product
from typing import Any, Literal, cast, get_args

from hotbed.checks import Count, check, check_known, is_int
from hotbed.errors import PlanError
from hotbed.ops.layout import BLOCK, SCALE_BLOCK
from hotbed.parsing import TextError, parse_json
from hotbed.specs import Table, Tier


def first_common(a: range, b: range) -> int | None:
    """Return the smallest common number of two rising ranges, or None."""
    g = math.gcd(a.step, b.step)
    if (b.start - a.start) % g:
        return None
    # a.start + i · a.step ≡ b.start modulo b.step
    modulus = b.step // g
    i = (b.start - a.start) // g * pow(a.step // g, -1, modulus) % modulus
    period = a.step * modulus
    found = a.start + i * a.step
    low = max(a.start, b.start)
    if found < low:
        found += -(-(low - found) // period) * period
    return found if found in a and found in b else None


def count_common(a: range, b: range) -> int:
    """Return the number of common numbers of two rising ranges."""
    first = first_common(a, b)
    if first is None:
        return 0
    return (min(a[-1], b[-1]) - first) // math.lcm(a.step, b.step) + 1


def common_positions(a: range, b: range) -> range:
    """Return the positions in ``a`` of the common numbers of two rising ranges."""
    first = first_common(a, b)
    if first is None:
        return range(0)
    start, step = (first - a.start) // a.step, math.lcm(a.step, b.step) // a.step
    return range(start, start + step * count_common(a, b), step)


WireFormat = Literal["rows", "pooled"]
"""Data that ranks exchange: distinct rows, or pooled vectors."""


_MOST_ROWS = 2**63 - 1
_TIERS = get_args(Tier)


@dataclass(frozen=True)
class Tile:
    """A rectangle of a table, with its owner, readers and memory.

    The *owner* is the rank that updates the rows and has their moments. *Readers* are ranks with copies of the rows.

    Parameters
    ----------
    table
        Name of the table.
    rows
        Range of rows. A stride spreads popular rows evenly, because they have low numbers.
    cols
        Range of columns. Bounds are multiples of 16 (128 for int8 rows), or the end of the table.
    owner
        The rank that updates these rows and holds their moments.
    readers
        Ranks that hold a copy of the rows, in ascending order, without the owner.
    tier
        Memory of the owner that holds the rows.
    cache_rows
        Rows of a cache in device memory, for the tiers ``"host"`` and ``"disk"``. 0 means no cache.
    """

    table: str
    rows: range
    cols: range
    owner: int
    readers: tuple[int, ...] = ()
    tier: Tier = "device"
    cache_rows: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "readers", tuple(self.readers))
        if problem := self._problem():
            raise PlanError(f"a tile of table '{self.table}': got {problem}")

    def _problem(self) -> str | None:
        """Return the first problem, or None. Plans may have 100,000 tiles, so the check is fast."""
        if not all(map(is_int, (self.owner, *self.readers))):
            return f"owner {self.owner!r} and readers {self.readers!r}, expected integers"
        if len(self.rows) == 0 or self.rows.start < 0 or self.rows.step < 1:
            return f"rows {self.rows}, expected a rising range of at least one row"
        if len(self.cols) == 0 or self.cols.start < 0 or self.cols.step != 1:
            return f"columns {self.cols}, expected a range of at least one column without a step"
        if self.owner < 0 or (self.readers and min(self.readers) < 0):
            return f"owner {self.owner} and readers {self.readers}, expected ranks of at least 0"
        if self.readers and list(self.readers) != sorted(set(self.readers) - {self.owner}):
            return f"readers {self.readers}, expected ascending ranks without the owner {self.owner}"
        if self.tier not in _TIERS:
            return f"tier {self.tier!r}, expected one of {', '.join(_TIERS)}"
        if not is_int(self.cache_rows) or self.cache_rows < 0:
            return f"cache_rows {self.cache_rows!r}, expected an integer of at least 0"
        return None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that hold these rows: owner and readers, ascending."""
        return tuple(sorted((self.owner, *self.readers)))


@dataclass(frozen=True)
class Plan:
    """Owner, readers and memory of every part of every table, as a set of tiles.

    A plan changes where bytes are and how long a step takes, but not the bits of the model.

    Parameters
    ----------
    world_size
        Number of ranks.
    tiles
        Tiles that partition each table exactly.
    wire
        Data that ranks exchange, by table. ``"rows"`` (default) sends each distinct row of a rank's batch once.
        ``"pooled"`` sends one vector per bag and owner. If owners share a bag of several ids, ``"pooled"`` adds partial
        sums, so results may differ by float rounding. No other part of a plan changes results.

    Raises
    ------
    PlanError
        If tiles of a table overlap or leave a gap, if a rank is not below ``world_size``, or if a ``"pooled"`` table
        has readers.
    """

    world_size: int
    tiles: tuple[Tile, ...]
    wire: Mapping[str, WireFormat] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiles", tuple(self.tiles))
        if not isinstance(self.wire, Mapping):
            raise PlanError(f"wire of a plan: got {self.wire!r}, expected an object of tables and wire formats")
        object.__setattr__(self, "wire", dict(self.wire))
        check("world_size", self.world_size, Count, PlanError)
        for tile in self.tiles:
            last = max(tile.owner, tile.readers[-1]) if tile.readers else tile.owner
            if last >= self.world_size:
                raise PlanError(
                    f"a tile of table '{tile.table}': got rank {last}, expected at most {self.world_size - 1}, because "
                    f"world_size is {self.world_size}"
                )
        for table, tiles in self.by_table.items():
            _check_cover(table, tiles)
        for table, form in self.wire.items():
            _check_wire(table, form, self.by_table)

    @cached_property
    def by_table(self) -> Mapping[str, tuple[Tile, ...]]:
        """Tiles of each table, in the order of the plan."""
        found: dict[str, list[Tile]] = defaultdict(list)
        for tile in self.tiles:
            found[tile.table].append(tile)
        return {table: tuple(tiles) for table, tiles in found.items()}

    @property
    def is_in_device_memory(self) -> bool:
        """Whether all rows are in device memory."""
        return all(tile.tier == "device" for tile in self.tiles)

    def check(self, tables: Sequence[Table]) -> None:
        """Raise `PlanError` unless the plan fits these tables.

        Columns are cut at multiples of 16, so that sums over columns keep their order. For int8 rows these are
        multiples of 128, because each scale covers 128 columns.
        """
        known = {t.name: t for t in tables}
        for name in self.by_table:
            check_known("table in the plan", name, known, PlanError, "Make a plan for this model.")
        for table in tables:
            if table.name not in self.by_table:
                raise PlanError(f"the plan has no tile of table '{table.name}'. Make a plan for this model")
            rows, cols = extent(self.by_table[table.name])
            if (rows, cols) != (table.rows, table.dim):
                raise PlanError(
                    f"table '{table.name}': got a plan for {rows:,} × {cols:,}, expected {table.rows:,} × "
                    f"{table.dim:,}. Make a plan for this model"
                )
            unit = column_unit(table)
            for tile in self.by_table[table.name]:
                if tile.cols.start % unit or (tile.cols.stop % unit and tile.cols.stop != table.dim):
                    raise PlanError(
                        f"table '{table.name}' ({table.dtype}): got a cut at columns {tile.cols.start} … "
                        f"{tile.cols.stop}, expected multiples of {unit}, because other cuts would change the model"
                    )

    # -- values in, values out -------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a JSON object."""
        tiles = [_tile_to_dict(t) for t in self.tiles]
        return {"world_size": self.world_size, "tiles": tiles, "wire": dict(self.wire)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """Build a plan from the result of `to_dict`. Missing keys have their defaults."""
        for key in values:
            check_known("key of a plan", key, ("world_size", "tiles", "wire"), PlanError)
        if not {"world_size", "tiles"} <= values.keys():
            raise PlanError(f"keys of a plan: got {', '.join(values) or 'none'}, expected tiles and world_size")
        tiles = values["tiles"]
        if not isinstance(tiles, list) or not all(isinstance(t, dict) for t in tiles):
            raise PlanError(f"tiles of a plan: got {str(tiles)[:80]}, expected a list of objects")
        return cls(values["world_size"], tuple(_tile_from_dict(t) for t in tiles), values.get("wire", {}))

    def to_json(self) -> str:
        """Return JSON with one tile per line."""
        tiles = ",\n".join(f"    {json.dumps(_tile_to_dict(t))}" for t in self.tiles)
        wire = f',\n  "wire": {json.dumps(dict(self.wire))}' if self.wire else ""
        return f'{{\n  "world_size": {self.world_size},\n  "tiles": [\n{tiles}\n  ]{wire}\n}}\n'

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Build a plan from the result of `to_json`.

        Raises
        ------
        PlanError
            If the text is not JSON, or not a plan.
        """
        try:
            values = parse_json(text)
        except TextError as error:
            raise PlanError(f"a plan is not valid JSON: the text {error}") from None
        if not isinstance(values, dict):
            raise PlanError(f"a plan: got a JSON {type(values).__name__}, expected an object")
        return cls.from_dict(values)


def extent(tiles: Sequence[Tile]) -> tuple[int, int]:
    """Return the numbers of rows and columns that the tiles of a table cover."""
    return max(t.rows[-1] for t in tiles) + 1, max(t.cols.stop for t in tiles)


def is_uncut(tiles: Sequence[Tile]) -> bool:
    """Return whether no bag of a table is summed in parts by pooled vectors: it is not cut by rows, nor copied."""
    return len({tile.rows for tile in tiles}) == 1 and not any(tile.readers for tile in tiles)


def column_unit(table: Table) -> int:
    """Return the unit of column cuts: the block of a sum, or of an int8 row's scale."""
    return SCALE_BLOCK if table.dtype == "int8" else BLOCK


def _tile_to_dict(tile: Tile) -> dict[str, Any]:
    rows, cols = tile.rows, tile.cols
    return asdict(tile) | {
        "rows": [rows.start, rows.stop, rows.step],
        "cols": [cols.start, cols.stop],
        "readers": list(tile.readers),
    }


def _tile_from_dict(values: Mapping[str, Any]) -> Tile:
    for key in values:
        check_known("key of a tile", key, Tile.__dataclass_fields__, PlanError)
    table, owner, readers = values.get("table"), values.get("owner"), values.get("readers", [])
    if not isinstance(table, str) or not is_int(owner) or not isinstance(readers, list):
        raise PlanError(f"a tile: got {dict(values)}, expected a table, an owner, and a list of readers")
    for key, lengths in (("rows", (2, 3)), ("cols", (2,))):
        bounds = values.get(key)
        found = cast("list[int]", bounds if isinstance(bounds, list) and all(map(is_int, bounds)) else [])
        if len(found) not in lengths or max(map(abs, found)) > _MOST_ROWS or not all(found[2:]):
            form = "[start, stop, step ≠ 0]" if key == "rows" else "[start, stop]"
            raise PlanError(f"a tile of table '{table}': got {key} {bounds!r}, expected integers {form} below 2^63")
    return Tile(
        table=table,
        rows=range(*values["rows"]),
        cols=range(*values["cols"]),
        owner=owner,
        readers=tuple(readers),
        tier=values.get("tier", "device"),
        cache_rows=values.get("cache_rows", 0),
    )


def _check_wire(table: str, form: str, by_table: Mapping[str, Sequence[Tile]]) -> None:
    check_known("table in wire", table, by_table, PlanError)
    check(f"wire of table '{table}'", form, WireFormat, PlanError)
    if form == "pooled" and any(tile.readers for tile in by_table[table]):
        raise PlanError(
            f"wire of table '{table}': got 'pooled', expected 'rows', because ranks hold copies of its rows"
        )


def _check_cover(table: str, tiles: Sequence[Tile]) -> None:
    """Raise `PlanError` unless the tiles partition a rectangle that starts at (0, 0)."""
    rows, _ = extent(tiles)
    cuts = sorted({0, *(t.cols.start for t in tiles), *(t.cols.stop for t in tiles)})
    for left, right in pairwise(cuts):
        here = [t for t in tiles if t.cols.start <= left < t.cols.stop]
        where = f"columns {left} … {right} of table '{table}'"
        shared = _shared_row(here)
        if shared is not None:
            row, a, b = shared
            raise PlanError(f"row {row:,}, {where}: got two tiles, of ranks {a.owner} and {b.owner}, expected one")
        missing = rows - sum(len(t.rows) for t in here)
        if missing:
            raise PlanError(f"{where}: got {missing:,} of {rows:,} rows without a tile, expected one for each")


def _shared_row(tiles: Sequence[Tile]) -> tuple[int, Tile, Tile] | None:
    """Return a row that is in two tiles, and these tiles, or None."""
    by_step: dict[int, list[Tile]] = defaultdict(list)
    for tile in tiles:
        by_step[tile.rows.step].append(tile)
    for tiles_of_step in by_step.values():  # rows of different residues never meet, so neighbours of one residue decide
        ordered = sorted(tiles_of_step, key=lambda t: (t.rows.start % t.rows.step, t.rows.start))
        for a, b in pairwise(ordered):
            if a.rows.start % a.rows.step == b.rows.start % b.rows.step and b.rows.start <= a.rows[-1]:
                return b.rows.start, a, b
    for some, others in combinations(by_step.values(), 2):  # e.g. hot rows and the rows behind them
        for a, b in product(some, others):
            row = first_common(a.rows, b.rows)
            if row is not None:
                return row, a, b
    return None
