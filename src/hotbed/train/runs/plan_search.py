"""Search for a recipe's plan, or read it from a file, and distribute the recipe's model by it.

`read_hot_rows` and `read_skew` read the files that commands write about the tables of a dataset:
``{"tables": [{"table": …}, …]}``. ``hot_rows.json`` of ``hotbed pack`` has the number of hot rows of each table,
``skew.json`` of ``hotbed inspect --skew`` their popularity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from hotbed.checkpoint.single_files import read_limited_uri
from hotbed.checks import is_int
from hotbed.comm import Link
from hotbed.config import ParallelRecipe, Recipe
from hotbed.data import Source
from hotbed.embed import collections_of, distribute, plan_for, plan_tables
from hotbed.embed.agreed_plan import is_searched, plan_of_first
from hotbed.embed.plan_names import names_in_plans, schemes_for
from hotbed.embed.replicas import check_replicas
from hotbed.errors import DataError, PlanError, RecipeError
from hotbed.nn.layers import DotInteraction
from hotbed.optim import Moment
from hotbed.parsing import TextError, parse_json, parse_yaml
from hotbed.plan import Plan
from hotbed.plan.cost import table_bytes, tile_bytes
from hotbed.plan.hardware import Hardware
from hotbed.plan.here import hardware_here
from hotbed.plan.hit_rates import Curve
from hotbed.plan.ranks import Chosen, search_ranks
from hotbed.plan.schemes import AUTO, SCHEMES, Cut, Schemes, cuts_of, schemes_from
from hotbed.plan.search import Found, search
from hotbed.plan.tier_choice import place_in_tiers, with_cache
from hotbed.plan.tiling import Tier
from hotbed.plan.workload import DenseWork, Workload
from hotbed.specs import Table
from hotbed.store.memory import refuse_too_many
from hotbed.train.runs.dense_kernels import arena_launches, dense_kernels
from hotbed.train.numerics import resolve_device
from hotbed.train.parameter_groups import moments_by_table, moments_of
from hotbed.train.ranks.process_group import started

BACKWARD_KEEPS = 2
"""Vectors per output of a layer that a step keeps: what backward needs, and the gradient."""


def searched(
    model: nn.Module,
    recipe: Recipe,
    size: int,
    source: Source | None = None,
    *,
    schemes: Schemes | None = None,
    others: str = "table",
    hardware: Hardware | None = None,
) -> Found:
    """Search for the plan of a group of ``size`` ranks."""
    options = _options(model, recipe, schemes, others)
    return search(workload_of(model, recipe, size, source), size, hardware or hardware_of(recipe), **options)


def searched_ranks(
    model: nn.Module,
    recipe: Recipe,
    ranks: int | Literal["auto"],
    replicas: int | Literal["auto"],
    source: Source | None = None,
    *,
    schemes: Schemes | None = None,
    others: str = "table",
    price: float | None = None,
) -> Chosen:
    """Search for the number of ranks, of all replicas together, and of replicas, as `searched` does for a plan.

    With a price of a node per hour, or one in the hardware's profile, the least cost per sample is the best.
    """
    here = hardware_of(recipe)
    one_group = replace(recipe, parallel=replace(recipe.parallel, replicas=1))
    workloads = {several: workload_of(model, one_group, 1 + several, source) for several in (False, True)}
    return search_ranks(
        lambda count: workloads[count > 1],
        here if price is None else here.with_(price_per_hour=price),
        ranks="auto" if isinstance(ranks, str) else [ranks],
        replicas=replicas,
        **_options(model, recipe, schemes, others),
    )


def _options(model: nn.Module, recipe: Recipe, schemes: Schemes | None, others: str) -> dict[str, Any]:
    """What `search` takes besides workload, ranks and hardware."""
    given = plan_or_schemes(recipe.parallel) if schemes is None else schemes
    if isinstance(given, Plan):
        raise PlanError("there is nothing to search for: parallel.plan is a whole plan")
    cuts = cuts_of(plan_tables(model), schemes_for(model, given, others))
    return {
        "fixed": {name: cut for name, cut in cuts.items() if isinstance(cut, Cut)},
        "capacity_bytes": recipe.memory.device_bytes or None,
        "host_bytes": recipe.memory.host_bytes or None,
        "tiers": tiers_of(recipe),
        "cache_rows": recipe.memory.cache_rows,
        "cached": recipe.memory.cached_tiers,
    }


def hardware_of(recipe: Recipe) -> Hardware:
    """The machine that a recipe names, or this one."""
    named = recipe.parallel.hardware
    return hardware_here(resolve_device(recipe.train.device)) if named is None else Hardware.load(named)


def tiers_of(recipe: Recipe) -> tuple[Tier, ...]:
    """Memories that rows may be in."""
    order: tuple[Tier, ...] = ("device", "host", "disk")
    return order[: order.index(recipe.memory.tier) + 1]


def workload_of(model: nn.Module, recipe: Recipe, size: int, source: Source | None = None) -> Workload:
    """What a step of a recipe does, in a group of ``size`` ranks."""
    tables, parallel, memory = plan_tables(model), recipe.parallel, recipe.memory
    rows = {table.name: table.rows for table in tables}
    ranks = size * parallel.replicas
    launches = {} if hardware_of(recipe).cores_shared else arena_launches(ranks, cached=bool(memory.cache_rows))
    return Workload.of(
        tables,
        ids=_ids(model, recipe, source),
        moments=moments_by_table(model, recipe),
        popularity=None if memory.skew is None else read_skew(memory.skew, rows),
        batch_size=recipe.train.batch_size,
        replicas=parallel.replicas,
        sync_every=parallel.sync_every,
        layout=parallel.layout,
        ranks_per_node=parallel.ranks_per_node,
        forward_codec=parallel.forward_codec,
        backward_codec=parallel.backward_codec,
        dense=dense_part(model, recipe, source, ranks=ranks),
        arena_launches=launches,
    )


def _ids(model: nn.Module, recipe: Recipe, source: Source | None) -> dict[str, float]:
    """Ids per sample of each table: of its features, counted in the first chunk of a source where they vary."""
    per_feature: dict[str, float] = {}
    columns = () if source is None else source.schema.sparse
    per_feature |= {column.name: float(column.ids) for column in columns if column.ids is not None}
    if source is not None and len(per_feature) < len(columns):
        chunk = source.read(recipe.data.train_split, 0)
        sparse = chunk.sparse
        per_feature |= {name: len(sparse[name].values) / max(len(chunk), 1) for name in sparse.names}
    names, found = names_in_plans(model), dict.fromkeys((t.name for t in plan_tables(model)), 0.0)
    for path, collection in collections_of(model).items():
        for feature in collection.features:
            found[names[path, feature.table]] += per_feature.get(feature.name, 1.0)
    return found


def dense_part(model: nn.Module, recipe: Recipe, source: Source | None = None, *, ranks: int = 1) -> DenseWork:
    """Count the part of a recipe's model without tables; on GPUs kernel by kernel, as so many ranks launch them."""
    precision = recipe.train.precision
    if precision == "auto":  # what `hotbed.train.numerics` chooses on GPUs
        precision = "fp32" if hardware_of(recipe).cores_shared else "bf16"
    narrow = precision in ("bf16", "fp16")
    dense, labels = (0, 1) if source is None else (source.schema.dense_features, len(source.schema.labels))
    ids = sum(len(c.features) for c in collections_of(model).values())
    found = count_dense_part(model, narrow=narrow, input_bytes=4.0 * (dense + labels) + 8.0 * ids)
    found = replace(found, dtype=precision)
    if hardware_of(recipe).cores_shared:  # what CPUs take beside products is measured
        return found
    at_once = ranks == 1 and not (recipe.train.compile or recipe.train.recompute)
    kernels = dense_kernels(model, narrow=narrow, dense_inputs=dense, labels=labels, at_once=at_once)
    return replace(found, kernels=kernels, launches=len(kernels))


def count_dense_part(model: nn.Module, *, narrow: bool = False, input_bytes: float = 0.0) -> DenseWork:
    """Count the part of a model without tables, in closed form; ``narrow`` where it computes in bf16.

    A weight of two dims or more is used once per sample: two operations. A dot interaction of ``n`` vectors of ``D``
    columns takes ``2 n² D``. Kept for backward are the outputs of layers, the looked-up vectors and the interaction's.
    """
    parameters = list(model.parameters())
    flops = 2.0 * sum(p.numel() for p in parameters if p.dim() >= 2)
    values, layers = 0.0, 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            values += module.out_features
            layers += 1
        elif isinstance(module, DotInteraction):
            flops += 2.0 * module.vectors**2 * module.dim
            values += module.width
    for collection in collections_of(model).values():
        values += sum(collection.tables[f.table].dim for f in collection.features)
    return DenseWork(
        parameters=sum(p.numel() for p in parameters),
        flops=flops,
        layers=layers,
        dtype="bf16" if narrow else "fp32",
        activation_bytes=BACKWARD_KEEPS * values * (2 if narrow else 4),
        input_bytes=input_bytes,
    )


# -- the model over ranks and memories ---------------------------------------------------------------------------------


def distributed(model: nn.Module, recipe: Recipe, device: torch.device, source: Source | None = None) -> nn.Module:
    """Distribute a model over all processes and memories, as a recipe says; unchanged where there is one of each."""
    parallel = recipe.parallel
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    timeout = timedelta(seconds=parallel.timeout_s)

    def make() -> Plan:
        return planned(model, recipe, size, source)

    plan = plan_of_first(Link(None, timeout), make) if size > 1 and _is_of_this_machine(recipe) else make()
    if parallel.replicas == 1:
        _refuse_too_many(plan, plan_tables(model), moments_by_table(model, recipe), device)
    return distribute(model, plan, parallel, recipe.memory, device=device, timeout=timeout)


def _is_of_this_machine(recipe: Recipe) -> bool:
    """Whether ranks on unlike hosts could plan differently: a search depends on the machine."""
    return recipe.hot.rows is None and is_searched(plan_or_schemes(recipe.parallel))


def _refuse_too_many(
    plan: Plan, tables: Sequence[Table], moments: Mapping[str, Sequence[Moment]], device: torch.device
) -> None:
    """Raise `StoreError` if rows and moments in memory of all processes of this host are more than is free there."""
    here = started()
    local = range(here.rank - here.local_rank, here.rank - here.local_rank + here.local_size)
    by_tier: dict[Tier, int] = {"device": 0, "host": 0, "disk": 0}
    for table in tables:
        for tile in plan.by_table[table.name]:
            by_tier[tile.tier] += tile_bytes(table, tile, moments[table.name]) * (tile.owner in local)
            by_tier[tile.tier] += tile_bytes(table, tile) * sum(rank in local for rank in tile.readers)
    refuse_too_many(by_tier["device"], device, by_tier)


def refuse_impossible(recipe: Recipe, tables: Sequence[Table], device: torch.device) -> None:
    """Raise `StoreError` if one process cannot hold these tables and their moments at once."""
    moments = moments_of(recipe.sparse_optimizer)
    nbytes = sum(table_bytes(table, moments) for table in tables if table.dynamic is None)
    refuse_too_many(nbytes, device, {"device": nbytes, "host": 0, "disk": 0})


def needs_a_plan(recipe: Recipe) -> bool:
    """Whether a model has to be distributed: over several processes, or over memories."""
    several = dist.is_available() and dist.is_initialized()
    plan = plan_or_schemes(recipe.parallel)
    outside = recipe.memory.tier != "device" or recipe.hot.rows is not None
    return several or outside or (isinstance(plan, Plan) and not plan.is_in_device_memory)


def planned(model: nn.Module, recipe: Recipe, world_size: int, source: Source | None = None) -> Plan:
    """The plan that `distributed` would use for so many processes; a file's own may be for another number.

    A search counts the ids per sample of a ``source``, as `hotbed plan` does; without one there is one per feature.
    """
    parallel, memory = recipe.parallel, recipe.memory
    plan = plan_or_schemes(parallel)
    if world_size > 1:
        check_replicas(world_size, parallel)
    size = max(world_size // parallel.replicas, 1)
    if recipe.hot.rows is not None:
        return _plan_of_hot_rows(model, recipe, size, recipe.hot.rows)
    if is_searched(plan):
        return searched(model, recipe, size, source).plan
    if not isinstance(plan, Plan):
        plan = plan_for(model, size, plan)
    if memory.tier == "device":
        return plan
    budgets: dict[Tier, int] = {"device": memory.device_bytes, "host": memory.host_bytes}
    if memory.tier == "host":
        del budgets["host"]
    tables = plan_tables(model)
    return place_in_tiers(
        plan,
        tables,
        budgets,
        memory.tier,
        popularity=None if memory.skew is None else read_skew(memory.skew, {t.name: t.rows for t in tables}),
        moments=moments_by_table(model, recipe),
        cache_rows=memory.cache_rows,
        cached=memory.cached_tiers,
    )


def _plan_of_hot_rows(model: nn.Module, recipe: Recipe, world_size: int, file: str) -> Plan:
    """The first rows of each table are on all ranks, the others cut by the recipe's scheme, in the recipe's memory."""
    scheme, memory = recipe.parallel.plan, recipe.memory
    if not isinstance(scheme, str) or scheme not in SCHEMES:
        raise RecipeError(
            f"hot.rows is set, so parallel.plan must be a scheme ({', '.join(SCHEMES)}) for the other rows, not the "
            f"plan {scheme}; leave one of them out"
        )
    hot = read_hot_rows(file, {table.name: table.rows for table in plan_tables(model)})
    cuts = {name: replace(SCHEMES[scheme], hot_rows=rows, tier=memory.tier) for name, rows in hot.items()}
    return with_cache(plan_for(model, world_size, cuts), memory.cache_rows, memory.cached_tiers)


def plan_or_schemes(parallel: ParallelRecipe) -> Plan | Schemes:
    """What ``parallel.plan`` says: a scheme for all tables, schemes by table, or a file with these or a plan."""
    if isinstance(parallel.plan, dict):
        return schemes_from(parallel.plan, "parallel.plan")
    return parallel.plan if parallel.plan in (*SCHEMES, AUTO) else read_plan(parallel.plan)


def read_plan(file: str) -> Plan | Schemes:
    """A plan's file, or one with schemes by table, in JSON or YAML; a `PlanError` says what else a plan can be."""
    try:
        text = read_limited_uri(file)
        values = parse_yaml(text.decode()) if file.endswith((".yaml", ".yml")) else parse_json(text)
    except FileNotFoundError:
        raise PlanError(
            f"there is no plan {file}; give a JSON or YAML file, or a scheme: {', '.join(SCHEMES)}, {AUTO}"
        ) from None
    except (TextError, ValueError) as error:
        raise PlanError(f"plan {file} {error}; give another file") from None
    if not isinstance(values, dict):
        raise PlanError(f"plan {file} holds {type(values).__name__}, must be a plan, or schemes by table")
    found = cast("dict[str, Any]", values)
    return Plan.from_dict(found) if {"tiles", "world_size"} & found.keys() else schemes_from(found, file)


# -- files about the tables of a dataset -------------------------------------------------------------------------------

T = TypeVar("T")


def _read_tables(
    file: str | Path, rows: Mapping[str, int], take: Callable[[Any, Any], T], command: str, again: str, for_model: str
) -> dict[str, T]:
    """Read the entries of the model's tables, by ``take`` of the file's content and an entry.

    ``again`` mends a damaged file that ``command`` wrote, ``for_model`` a file about another model.
    """
    try:
        content: Any = parse_json(read_limited_uri(file))
        found = {entry["table"]: (int(entry["rows"]), take(content, entry)) for entry in content["tables"]}
    except FileNotFoundError:
        raise DataError(f"{file} does not exist; make it with {command}") from None
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        what = f"is not what {command} writes ({type(error).__name__}: {error})"
        raise DataError(f"{file} {error if isinstance(error, TextError) else what}; {again}") from None
    entries: dict[str, T] = {}
    for name, expected in rows.items():
        own = name if name in found else name.rpartition(".")[2]
        if own not in found:
            raise DataError(f"{file} has no table '{name}', which the model has; {for_model}")
        counted, entries[name] = found[own]
        if counted != expected:
            has = f"{counted:,} rows, the model's has {expected:,}"
            raise DataError(f"{file}: table '{name}' has {has}; {for_model}")
    return entries


def read_hot_rows(file: str | Path, rows: Mapping[str, int]) -> dict[str, int]:
    """Read how many of the first rows of each table are hot."""

    def hot_rows(_: Any, entry: Any) -> int:
        hot, counted = entry["hot_rows"], entry["rows"]
        if not (is_int(hot) and is_int(counted) and 0 <= hot <= counted):
            raise ValueError(f"table '{entry['table']}' has {hot!r} hot rows of {counted!r}")
        return hot

    return _read_tables(file, rows, hot_rows, "hotbed pack", "pack again", "pack this model's data")


def read_skew(file: str | Path, rows: Mapping[str, int]) -> dict[str, Curve]:
    """Read how often the first rows of each table are accessed, where rows are numbered by falling popularity."""

    def curve(content: Any, entry: Any) -> Curve:
        samples, counts, counted = max(int(content["samples"]), 1), entry["cache_rows"], int(entry["rows"])
        shares = [share or 0.0 for share in entry["accesses_of_top_rows"]]  # null where there was no access
        if len(counts) != len(shares) or counts != sorted(counts) or counts[-1:] != [counted]:
            table = entry["table"]
            raise ValueError(
                f"cache_rows of table '{table}' must rise to its {counted:,} rows, with as many accesses_of_top_rows"
            )
        return Curve(counts, [share * entry["accesses"] / samples for share in shares])

    return _read_tables(file, rows, curve, "hotbed inspect --skew", "make it again", "inspect this model's data")
