"""Assign rows to memory tiers by popularity: the most popular rows to the fastest tier that has room."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from hotbed.checks import Size, check
from hotbed.errors import PlanError
from hotbed.optim import Moment
from hotbed.plan.cost import tile_bytes
from hotbed.plan.hit_rates import Popularity, Zipf
from hotbed.plan.tiling import Plan, Tier, Tile, is_uncut
from hotbed.specs import Table

_STEPS = 200
"""Bisection steps over densities, more than the precision of a float."""


def place_in_tiers(
    plan: Plan,
    tables: Sequence[Table],
    budgets: Mapping[Tier, int],  # bytes per rank for rows and moments on "device" and "host"
    rest: Tier,  # memory of all other rows
    *,
    popularity: Mapping[str, Popularity] | None = None,
    moments: Mapping[str, Sequence[Moment]] | None = None,
    cache_rows: int = 0,
    cached: Sequence[Tier] = ("host", "disk"),
    keep: Collection[str] = (),  # tables that keep their tiers and caches, and use up budgets
) -> Plan:
    """Cut a plan's tiles by popularity, and assign the parts to memories of falling speed.

    The time per batch is the sum over memories of accesses × time per access. It is minimal if no row is in a slower
    memory than a row with fewer accesses per byte, so one threshold per memory suffices (after RecShard, Sethi et al.
    2022, arXiv 2201.10095). Rows must be numbered by falling popularity, as `hotbed.prepare` numbers them.

    Tables with the wire format ``"pooled"`` that only these memories cut by rows get the format ``"rows"``, so that
    results do not change.
    """
    for tier, budget in budgets.items():
        check(f"bytes of tier '{tier}'", budget, Size, PlanError)
    by_name = {t.name: t for t in tables}
    known = {t.name: (popularity or {}).get(t.name) or Zipf(t.rows) for t in tables}

    def nbytes(tile: Tile) -> int:
        return tile_bytes(by_name[tile.table], tile, (moments or {}).get(tile.table, ()))

    def stays(tile: Tile) -> bool:
        return bool(tile.readers) or tile.table in keep

    tiles: list[Tile] = []
    for rank in range(plan.world_size):
        own = [t for t in plan.tiles if t.owner == rank]
        left = [t for t in own if not stays(t)]
        for tier, budget in budgets.items():
            held = [t for t in plan.tiles if stays(t) and t.tier == tier and (t.owner == rank or rank in t.readers)]
            prefixes = _prefixes(left, by_name, known, nbytes, budget - sum(map(nbytes, held)))
            parts = [_split(tile, prefixes[tile.table]) for tile in left]
            tiles += [replace(head, tier=tier, cache_rows=0) for head, _ in parts if head is not None]
            left = [tail for _, tail in parts if tail is not None]
        tiles += [replace(tile, tier=rest, cache_rows=0) for tile in left]
        tiles += [t for t in own if stays(t)]
    order = {t.name: i for i, t in enumerate(tables)}
    tiles.sort(key=lambda t: (order[t.table], t.cols.start, t.rows.start, t.owner))
    placed = replace(plan, tiles=tuple(tiles))
    before, now = plan.by_table, placed.by_table
    wire = {name: form for name, form in plan.wire.items() if is_uncut(now[name]) or not is_uncut(before[name])}
    return with_cache(replace(placed, wire=wire), cache_rows, cached, keep)


def with_cache(
    plan: Plan, cache_rows: int, cached: Sequence[Tier] = ("host", "disk"), keep: Collection[str] = ()
) -> Plan:
    """Return the plan with ``cache_rows`` rows of cache per rank for rows in the ``cached`` tiers.

    Tables to ``keep`` do not change. The cache of a rank is divided among its tiles in proportion to their rows.
    """
    total = dict.fromkeys(range(plan.world_size), 0)
    for tile in plan.tiles:
        total[tile.owner] += len(tile.rows) * (tile.tier in cached and tile.table not in keep)
    tiles = [
        tile
        if tile.tier not in cached or tile.table in keep
        else replace(tile, cache_rows=min(-(-cache_rows * len(tile.rows) // total[tile.owner]), len(tile.rows)))
        for tile in plan.tiles
    ]
    return replace(plan, tiles=tuple(tiles))


def hot_rows(
    tables: Sequence[Table],
    budget: int,
    *,
    popularity: Mapping[str, Popularity] | None = None,
    moments: Sequence[Moment] = (),
    extra_bytes: Mapping[str, int] | None = None,
    whole_bytes: int = 0,
) -> dict[str, int]:
    """Return the number of first rows of each table to keep within a byte budget: the most accesses per byte.

    Tables of at most ``whole_bytes`` come first, as in Adnan et al. (2021, arXiv 2103.00686), who keep tables below 1
    MB whole. Other tables share the remaining budget. A larger budget gives no table fewer rows. See `place_in_tiers`.
    ``extra_bytes`` are additional bytes per row, of other tables with the same ids.
    """
    whole = [Tile(t.name, range(t.rows), range(t.dim), 0) for t in tables]
    known = {t.name: (popularity or {}).get(t.name) or Zipf(t.rows) for t in tables}
    by_name = {t.name: t for t in tables}

    def nbytes(tile: Tile) -> int:
        own = tile_bytes(by_name[tile.table], tile, moments)
        return own + len(tile.rows) * (extra_bytes or {}).get(tile.table, 0)

    small = [t for t in whole if nbytes(t) <= whole_bytes]
    others = [t for t in whole if nbytes(t) > whole_bytes]
    left = max(budget - sum(map(nbytes, small)), 0)
    found = _prefixes(small, by_name, known, nbytes, budget) | _prefixes(others, by_name, known, nbytes, left)
    found = {t.name: found[t.name] for t in tables}
    if budget > 0 and not any(found.values()):
        raise PlanError(f"a budget of {budget:,} bytes does not hold one row of any table. Raise the budget")
    return found


def _prefixes(
    tiles: Sequence[Tile],
    tables: Mapping[str, Table],
    known: Mapping[str, Popularity],
    nbytes: Callable[[Tile], int],
    budget: int,
) -> dict[str, int]:
    """Return the number of first rows of each table that fit, by most accesses per byte."""
    sizes = {t.table: max(nbytes(replace(t, rows=t.rows[-1:])), 1) for t in tiles}

    def select(density: float) -> dict[str, int]:
        return {name: known[name].rows_above(density * size) for name, size in sizes.items()}

    def fits(prefixes: Mapping[str, int]) -> bool:
        heads = [head for t in tiles if (head := _split(t, prefixes[t.table])[0]) is not None]
        return sum(map(nbytes, heads)) <= budget

    everything = {t.table: tables[t.table].rows for t in tiles}
    if fits(everything):
        return everything
    low, high = -300.0, 300.0  # exponents of ten; the higher one selects nothing
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(select(10**middle)) else (middle, high)
    found = select(10**high)
    # Then rows that tie, and rows without an access, in the order of tables and rows.
    for name, most in [*select(10**low).items(), *everything.items()]:
        least = found[name]
        found[name] = bisect_left(range(least + 1, most + 1), True, key=lambda n: not fits({**found, name: n})) + least
        if found[name] < most:
            break
    return found


def _split(tile: Tile, row: int) -> tuple[Tile | None, Tile | None]:
    """Split a tile at a row."""
    count = len(range(tile.rows.start, min(row, tile.rows.stop), tile.rows.step))
    head, tail = tile.rows[:count], tile.rows[count:]
    return replace(tile, rows=head) if head else None, replace(tile, rows=tail) if tail else None
