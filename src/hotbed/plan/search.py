"""Search for the plan with the least load on the busiest rank: the cut of each table, and the owner of each tile.

1. Tables are cut finer and finer, if a tile exceeds a share of a rank's mean load, or a sixteenth of its mean memory
   (`candidates.combinations`). For each share the tiles are assigned to ranks (`balance`).
2. If the result is far from the lower bound (`bound`), numbers of parts other than the number of ranks are tried. For
   few tables and ranks, a mixed integer program (`milp`) chooses forms and owners together.
3. Among plans within half a percent of the best load, and then of the best predicted step, the criteria are in this
   order: even memory, few kernel launches, few tiles. Step time is second, because it mostly adds launches to the load,
   and these are equal for most plans.

The search is deterministic and uses no clock. Equal tables, ranks and hardware give equal plans on every machine with
an equal release of scipy. In a run, rank 0 searches and broadcasts the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from hotbed.checks import Count, check
from hotbed.errors import PlanError
from hotbed.optim import Moment
from hotbed.plan import milp
from hotbed.plan.bound import Bound, lower_bound
from hotbed.plan.candidates import GRAINS, Form, column_parts, combinations, form_of
from hotbed.plan.cost import TIERS, CostModel, RankCosts, gib, tile_bytes
from hotbed.plan.hardware import Hardware
from hotbed.plan.hit_rates import Popularity
from hotbed.plan.limits import Limits, limits_of, refuse_too_large
from hotbed.plan.parts import Array, Placement, in_order, parts_of, place_parts
from hotbed.plan.schemes import AUTO, Cut, Schemes, cuts_of, refuse_uncut
from hotbed.plan.step_time import arenas_of, optional_s
from hotbed.plan.tier_choice import place_in_tiers
from hotbed.plan.tiling import Plan, Tier, Tile, WireFormat, is_uncut
from hotbed.plan.workload import Workload
from hotbed.specs import Table

WORTHWHILE = 1.01
"""The mixed integer program runs if the best heuristic plan exceeds the bound by this factor."""
MOST_FINE = 4_000_000
"""Upper limit of tiles × ranks for finer cuts, because their parts are assigned one by one."""
CLOSE = 1.002
"""A plan within this factor of the bound, and with even memory, ends the search."""
EQUAL_LOAD, EQUAL_BYTES = 1.005, 1.05
"""Plans count as equal if their largest loads or bytes are within these factors."""
BATCH_PER_RANK = 1024
"""Default samples of a step per rank."""


@dataclass(frozen=True)
class Found:
    """A plan with its costs, lower bound and limits."""

    plan: Plan
    model: CostModel
    costs: RankCosts
    bound: Bound
    limits: Limits
    method: str
    """Method that assigned the tiles."""

    @property
    def load(self) -> float:
        """Load of the busiest rank with optional exchanges: seconds, or without hardware ids × columns."""
        pooled = sum(self.model.pooled_s(self.model.pooled_in(self.plan)))
        return float(self.costs.load.max()) + optional_s(self.plan.tiles, self.model) + pooled

    @property
    def gap(self) -> float:
        """Excess of the busiest rank's load over the bound, as a share of the bound."""
        return self.load / self.bound.load - 1 if self.bound.load else 0.0


def search(
    workload: Workload,
    world_size: int,
    hardware: Hardware | None = None,
    *,
    fixed: Mapping[str, Cut] | None = None,
    capacity_bytes: int | None = None,  # device memory per rank (default: from the hardware)
    host_bytes: int | None = None,
    tiers: Sequence[Tier] = ("device",),
    cache_rows: int = 0,  # per rank, for slower memories
    cached: Sequence[Tier] = ("host", "disk"),
    integer_program: bool = True,
) -> Found:
    """Search for the best plan of a workload."""
    fixed = dict(fixed or {})
    tables = [use.table for use in workload.uses]
    refuse_uncut(tables, fixed, world_size)
    model = CostModel(workload, world_size, hardware)
    limits = limits_of(model, capacity_bytes, host_bytes)
    staying = _staying(model, fixed)
    overflow = refuse_too_large(model, limits, tiers, staying)
    slower: list[Tier] = [tier for tier in tiers if tier != "device"]
    pinned = frozenset(name for name in staying if fixed[name].tier != "device")
    uncached = max(overflow - _most_cached_bytes(model, cache_rows), 0)
    bound = lower_bound(model, fixed, uncached, [t for t in slower if limits.room[t]] or ["host"], staying)
    found: list[_Candidate] = []
    errors: list[PlanError] = []
    forms: list[dict[str, Form]] = []

    def add(placement: Placement, method: str) -> None:
        """Keep a placement as a candidate if it fits, with rows in several memories if needed."""
        try:
            candidate = _Candidate.of(placement, model)
            if overflow or pinned:
                tiers = slower if overflow else []
                candidate = _in_memories(placement, model, limits, tiers, staying, cache_rows, cached)
            found.append(replace(candidate, method=method))
        except PlanError as error:
            errors.append(error)

    def is_good() -> bool:
        return bool(found) and min(f.load for f in found) <= WORTHWHILE * bound.load

    mean, most_bytes = bound.load - bound.exchanges, np.inf if overflow else limits.device
    for grain in GRAINS:
        for chosen in combinations(model, fixed, grain, mean, limits.device, most_bytes):
            if grain != GRAINS[0] and sum(form.tiles for form in chosen.values()) * world_size > MOST_FINE:
                continue
            forms.append(chosen)
            try:
                add(_assign(chosen, model, None if overflow else limits.device), "heuristics")
            except PlanError as error:
                errors.append(error)
            if found and found[-1].is_even(bound):
                break
        if is_good():
            break
    if integer_program and not is_good():
        solved = _by_milp(forms, fixed, model, None if overflow else limits.device)
        if solved is not None:
            add(solved, "mixed integer program")
    if not found:
        raise errors[0]
    best = _best(found, model)
    plan = Plan(world_size, in_order(best.tiles(), tables), _changed(best.wire))
    return Found(plan, model, model.ranks(plan), bound, limits, best.method)


@dataclass(frozen=True)
class _Candidate:
    """A plan before its tiles are built: load and bytes of each rank, and the number of tiles."""

    loads: Array
    nbytes: Array
    count: int
    tiles: Callable[[], list[Tile]]
    method: str = "heuristics"
    fixed: float = 0.0
    """Load of exchanges of copies, sums over columns, and pooled vectors."""
    arenas: int = 0
    """Number of arenas. The load does not include their kernel launches."""
    wire: Mapping[str, WireFormat] = field(default_factory=dict[str, WireFormat])

    @classmethod
    def of(cls, placement: Placement, model: CostModel) -> _Candidate:
        count = sum(len(part.rows) for part, _ in placement.parts)
        first = [tile for part, at in placement.parts for tile in replace(part, rows=part.rows[:1]).tiles(at, 2)]
        fixed = optional_s(first, model) + sum(model.pooled_s(_changed(placement.wire)))
        return cls(
            placement.loads,
            placement.nbytes,
            count,
            placement.tiles,
            fixed=fixed,
            arenas=arenas_of(first, model.workload),
            wire=placement.wire,
        )

    @property
    def load(self) -> float:
        return float(self.loads.max()) + self.fixed

    def is_even(self, bound: Bound) -> bool:
        """Return whether the candidate is good enough to end the search."""
        return self.load <= CLOSE * bound.load and self.nbytes.max() <= EQUAL_BYTES * self.nbytes.mean()


def _assign(chosen: Mapping[str, Form], model: CostModel, capacity: int | None) -> Placement:
    """Assign forms to ranks. Forms with fewer row parts than ranks are assigned tile by tile."""
    parts = [
        part
        for form in chosen.values()
        for own in form.parts
        for part in (own.split() if 1 < len(own.rows) < model.world_size and not own.replicated else [own])
    ]
    return place_parts(parts, model, capacity)


def _most_cached_bytes(model: CostModel, cache_rows: int) -> int:
    """Return an upper limit of the cached bytes on all ranks. Each tile's share of a cache is rounded up."""
    if not cache_rows:
        return 0
    uses, size = model.workload.uses, model.world_size
    tiles = sum(len(TIERS) * size * column_parts(use)[-1] for use in uses)
    widest = max(tile_bytes(u.table, Tile(u.table.name, range(1), range(u.table.dim), 0), u.moments) for u in uses)
    return size * (cache_rows + tiles) * widest


def _staying(model: CostModel, fixed: Mapping[str, Cut]) -> dict[str, dict[Tier, int]]:
    """Return the bytes by memory, summed over ranks, of tables with a fixed memory: given tiers, and copied tables."""
    found: dict[str, dict[Tier, int]] = {}
    for name, cut in fixed.items():
        if cut.tier == "device" and not cut.replicated:
            continue
        use = model.workload.by_table[name]
        of_table: dict[Tier, int] = {}
        for part in form_of(use, cut, model).parts:
            tile = part.tiles(0, model.world_size)[0]
            nbytes = tile_bytes(use.table, tile, use.moments) + len(tile.readers) * tile_bytes(use.table, tile)
            of_table[part.tier] = of_table.get(part.tier, 0) + nbytes * len(part.rows)
        found[name] = of_table
    return found


def _in_memories(
    placement: Placement,
    model: CostModel,
    limits: Limits,
    slower: Sequence[Tier],
    staying: Collection[str],
    cache_rows: int,
    cached: Sequence[Tier],
) -> _Candidate:
    """Move rows beyond device memory to slower memories by popularity. ``staying`` tables keep their memory."""
    tables = [use.table for use in model.workload.uses]
    plan = Plan(model.world_size, in_order(placement.tiles(), tables))
    placed, given = plan, model.workload.wire
    if slower:
        budgets: dict[Tier, int] = {"device": limits.device}
        budgets |= {tier: limits.per_rank(tier) for tier in slower[:-1]}
        known = {use.table.name: use.per_sample for use in model.workload.uses}
        moments = {use.table.name: use.moments for use in model.workload.uses}
        placed = place_in_tiers(
            plan,
            tables,
            budgets,
            slower[-1],
            popularity=known,
            moments=moments,
            cache_rows=cache_rows,
            cached=cached,
            keep=staying,
        )
    pooled = _changed(placement.wire)
    wire: dict[str, WireFormat] = {
        name: form for name, form in pooled.items() if name in given or is_uncut(placed.by_table[name])
    }
    placed = replace(placed, wire=wire)
    costs = model.ranks(placed)
    if over := limits.over(costs):
        tier, nbytes = next(iter(over.items()))
        raise PlanError(
            f"rows on the fullest {'rank' if tier == 'device' else 'node'} take {gib(nbytes)} more than its "
            f"{gib(limits.room[tier])} of {tier} memory. Use a smaller dtype, or more ranks"
        )
    fixed, arenas = optional_s(placed.tiles, model), arenas_of(placed.tiles, model.workload)
    fixed += sum(model.pooled_s(wire))
    return _Candidate(
        costs.load, costs.nbytes, len(placed.tiles), lambda: list(placed.tiles), fixed=fixed, arenas=arenas, wire=wire
    )


def _changed(wire: Mapping[str, WireFormat]) -> dict[str, WireFormat]:
    """Return the wire formats that are not the default."""
    return {name: form for name, form in wire.items() if form != "rows"}


def _by_milp(
    forms: Sequence[Mapping[str, Form]], fixed: Mapping[str, Cut], model: CostModel, room: int | None
) -> Placement | None:
    """Solve for forms and owners, if every table has a tried form of one part and without copies.

    Tables with other given cuts, or with one part per rank, are assigned first.
    """
    if not milp.is_available() or model.world_size == 1:
        return None
    options: dict[str, list[Form]] = {use.table.name: [] for use in model.workload.uses}
    before: dict[str, Form] = {}
    for chosen in forms:
        for name, form in chosen.items():
            is_single = len(form.parts) == 1 and not form.parts[0].replicated
            one_each = name in fixed and form.tiles == model.world_size  # as the cut requires
            if is_single and not one_each and form not in options[name]:
                options[name].append(form)
            elif name in fixed and (one_each or not is_single):
                before[name] = form
    options = {name: tried for name, tried in options.items() if name not in before}
    variables = sum(map(len, options.values())) * (model.world_size + 1)
    if not all(options.values()) or not options or variables > milp.MOST_VARIABLES:
        return None
    try:
        start = _assign(before, model, room)
    except PlanError:
        return None
    most = np.iinfo(np.int64).max // 4 if room is None else room
    solved = milp.solve(options, model.world_size, most, start.loads.tolist(), start.nbytes.tolist())
    if solved is None:
        return None
    loads, nbytes, parts = start.loads.copy(), start.nbytes.copy(), list(start.parts)
    for form, owners in solved:
        loads += form.everyone
        np.add.at(loads, owners, form.costs[0].owner)
        np.add.at(nbytes, owners, form.costs[0].nbytes)
        parts += zip(form.parts[0].split(), owners, strict=True)
    return Placement(tuple(parts), loads, nbytes)


def _best(found: Sequence[_Candidate], model: CostModel) -> _Candidate:
    """Choose among plans of nearly the least load by predicted step, memory, arenas and number of tiles."""

    def step(candidate: _Candidate) -> float:  # without the terms that all plans share
        return candidate.load + model.arena_s * candidate.arenas

    equal = [f for f in found if f.load <= EQUAL_LOAD * min(other.load for other in found)]
    equal = [f for f in equal if step(f) <= EQUAL_LOAD * min(map(step, equal))]
    equal = [f for f in equal if f.nbytes.max() <= EQUAL_BYTES * min(int(other.nbytes.max()) for other in equal)]
    return min(equal, key=lambda f: (f.arenas, f.count, f.load))


def make_plan(
    tables: Sequence[Table],
    world_size: int,
    schemes: Schemes = "table",
    *,
    ids: Mapping[str, float] | None = None,
    moments: Sequence[Moment] | Mapping[str, Sequence[Moment]] = (),
    capacity_bytes: int | None = None,
    wire: WireFormat | Mapping[str, WireFormat] | None = None,
    bags: Mapping[str, float] | None = None,
    popularity: Mapping[str, Popularity] | None = None,
    batch_size: int | None = None,
    hardware: Hardware | None = None,
    tiers: Sequence[Tier] | None = None,
) -> Plan:
    """Cut tables, and assign the tiles to ranks with the least load on the busiest rank.

    Parameters
    ----------
    tables
        All tables of a model.
    world_size
        Number of ranks.
    schemes
        ``"table"``, ``"row"``, ``"column"``, ``"grid"``, ``"dp"``, ``"auto"`` or a `Cut` for all tables, or a mapping
        from table names or patterns, e.g. ``{"users": "row", "*": "auto"}``. Tables without a match are not cut.
        ``"auto"`` searches for the fastest cut, see `hotbed.plan.search`.
    ids
        Mean ids per sample by table (default: 1). They determine the load of a tile, see `hotbed.plan.cost`.
    moments
        Moments of the optimizer for all tables or by table: ``optimizer.rule.moments``.
    capacity_bytes
        Device memory of a rank for rows (default with ``"auto"``: from the hardware).
    wire
        Wire format for all tables or by table, see `Plan`. By default, tables with the scheme ``"auto"`` have the
        faster one that does not change results, and other tables ``"rows"``. Set ``"rows"`` for tables with
        per-id weights that are trained, because ``"pooled"`` cannot return the gradient of these weights.
    bags
        Number of pooled features by table (default: 1). It determines the number of pooled vectors.
    popularity
        Popularity of rows by table. This option and the following ones require ``"auto"``.
    batch_size
        Samples of a step over all ranks (default: 1,024 per rank).
    hardware
        Target hardware (default: none, the load is counted in ids × columns).
    tiers
        Memories that may hold rows: ``"device"``, ``"host"``, ``"disk"`` (default: ``"device"``).

    Raises
    ------
    PlanError
        If a scheme or table is unknown, no table can be cut by a scheme, or no placement fits.
    TypeError
        If an option of the search is given without the scheme ``"auto"``.

    Examples
    --------
    >>> tables = [Table("user", rows=1000, dim=64), Table("item", rows=500, dim=64)]
    >>> [(tile.table, tile.rows, tile.owner) for tile in make_plan(tables, 2).tiles]
    [('user', range(0, 1000), 0), ('item', range(0, 500), 1)]
    """
    check("world_size", world_size, Count, PlanError)
    cuts = cuts_of(tables, schemes)
    is_searched = any(cut == AUTO for cut in cuts.values())
    by_table: Mapping[str, WireFormat] = wire if isinstance(wire, Mapping) else {}
    if isinstance(wire, str) and (wire != "rows" or is_searched):
        by_table = dict.fromkeys((t.name for t in tables), wire)
    options = {"popularity": popularity, "batch_size": batch_size, "hardware": hardware, "tiers": tiers}
    if is_searched:
        samples = batch_size or BATCH_PER_RANK * world_size
        fixed = {name: cut for name, cut in cuts.items() if isinstance(cut, Cut)}
        work = Workload.of(
            tables,
            ids=ids,
            bags=bags,
            moments=moments,
            popularity=popularity,
            wire=by_table,
            batch_size=samples,
        )
        allowed: Sequence[Tier] = ("device",) if tiers is None else tiers
        return search(work, world_size, hardware, fixed=fixed, capacity_bytes=capacity_bytes, tiers=allowed).plan
    if given := [name for name, value in options.items() if value is not None]:
        raise TypeError(f"make_plan: got '{given[0]}', which requires the scheme 'auto'")
    chosen = cast("dict[str, Cut]", cuts)
    refuse_uncut(tables, chosen, world_size)
    model = CostModel(Workload.of(tables, ids=ids, moments=moments), world_size)
    parts = [part for table in tables for part in parts_of(table, chosen[table.name], world_size)]
    return Plan(world_size, in_order(place_parts(parts, model, capacity_bytes).tiles(), tables), by_table)
