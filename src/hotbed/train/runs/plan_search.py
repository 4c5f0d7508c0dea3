"""Search for a recipe's plan or read the plan from a file, and distribute the recipe's model by the plan.

`read_hot_rows` and `read_skew` read JSON files about the tables of a dataset, ``{"tables": [{"table": …}, …]}``.
``hotbed pack`` writes ``hot_rows.json`` with the number of hot rows by table. ``hotbed inspect --skew`` writes
``skew.json`` with the popularity of rows by table.
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
from hotbed.embed.plan_names import broadcast_plan, is_searched, names_in_plans, schemes_for
from hotbed.embed.replicas import check_replicas
from hotbed.errors import DataError, PlanError, RecipeError
from hotbed.nn.layers import DotInteraction
from hotbed.optim import Moment
from hotbed.parsing import TextError, parse_json, parse_yaml
from hotbed.plan import Plan
from hotbed.plan.cost import table_bytes, tile_bytes
from hotbed.plan.hardware import Hardware, hardware_here
from hotbed.plan.hit_rates import Curve
from hotbed.plan.ranks import Chosen, search_ranks
from hotbed.plan.schemes import AUTO, SCHEMES, Cut, Schemes, cuts_of, schemes_from
from hotbed.plan.search import Found, search
from hotbed.plan.tier_choice import place_in_tiers, with_cache
from hotbed.plan.tiling import Tier
from hotbed.plan.workload import DenseWork, Workload
from hotbed.specs import Table
from hotbed.store.memory import refuse_too_many
from hotbed.train.numerics import resolve_device
from hotbed.train.parameter_groups import moments_by_table, moments_of
from hotbed.train.ranks.process_group import read_world
from hotbed.train.runs.dense_kernels import arena_launches, dense_kernels

BACKWARD_KEEPS = 2
"""Number of vectors that a step keeps per layer output: the output for the backward pass, and its gradient."""


def find_plan(
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


def find_ranks(
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
    """Search for the total number of ranks and the number of replicas; only numbers that are ``"auto"`` are searched.

    With a price per node and hour (``price``, or in the hardware's profile), the result has the least cost per sample.
    """
    hardware = hardware_of(recipe)
    one_group = replace(recipe, parallel=replace(recipe.parallel, replicas=1))
    workloads = {several: workload_of(model, one_group, 1 + several, source) for several in (False, True)}
    return search_ranks(
        lambda count: workloads[count > 1],
        hardware if price is None else hardware.with_(price_per_hour=price),
        ranks="auto" if isinstance(ranks, str) else [ranks],
        replicas=replicas,
        **_options(model, recipe, schemes, others),
    )


def _options(model: nn.Module, recipe: Recipe, schemes: Schemes | None, others: str) -> dict[str, Any]:
    """Return the options of `search`."""
    given = plan_or_schemes(recipe.parallel) if schemes is None else schemes
    if isinstance(given, Plan):
        raise PlanError("parallel.plan is a complete plan, so there is nothing to search. Set it to auto or to schemes")
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
    """Return the hardware profile that a recipe names, or else the profile of this machine."""
    named = recipe.parallel.hardware
    return hardware_here(resolve_device(recipe.train.device)) if named is None else Hardware.load(named)


def tiers_of(recipe: Recipe) -> tuple[Tier, ...]:
    """Return the tiers that rows may be in."""
    order: tuple[Tier, ...] = ("device", "host", "disk")
    return order[: order.index(recipe.memory.tier) + 1]


def workload_of(model: nn.Module, recipe: Recipe, size: int, source: Source | None = None) -> Workload:
    """Return the work of a recipe's step in a group of ``size`` ranks."""
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
    """Return ids per sample by table, counted in the first chunk of a source if they vary."""
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
    """Count the work of a recipe's model without tables; on GPUs kernel by kernel."""
    precision = recipe.train.precision
    if precision == "auto":  # the choice of `hotbed.train.numerics`
        precision = "fp32" if hardware_of(recipe).cores_shared else "bf16"
    narrow = precision in ("bf16", "fp16")
    dense, labels = (0, 1) if source is None else (source.schema.dense_features, len(source.schema.labels))
    ids = sum(len(c.features) for c in collections_of(model).values())
    found = count_dense_part(model, narrow=narrow, input_bytes=4.0 * (dense + labels) + 8.0 * ids)
    found = replace(found, dtype=precision)
    if hardware_of(recipe).cores_shared:  # profiles of CPUs contain the time outside of products
        return found
    casts_once = ranks == 1 and not (recipe.train.compile or recipe.train.recompute)
    kernels = dense_kernels(model, narrow=narrow, dense_inputs=dense, labels=labels, casts_once=casts_once)
    return replace(found, kernels=kernels, launches=len(kernels))


def count_dense_part(model: nn.Module, *, narrow: bool = False, input_bytes: float = 0.0) -> DenseWork:
    """Count the work of a model without tables in closed form; ``narrow`` means bf16 or fp16.

    Each element of a weight with at least two dimensions needs two operations per sample. A dot interaction of ``n``
    vectors of ``D`` columns needs ``2 n² D`` operations. The backward pass keeps outputs of layers, looked-up vectors
    and outputs of the interaction.
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


# -- the model over ranks and tiers ------------------------------------------------------------------------------------


def distribute_model(model: nn.Module, recipe: Recipe, device: torch.device, source: Source | None = None) -> nn.Module:
    """Distribute a model over processes and tiers by a recipe; with one process and one tier it is unchanged."""
    parallel = recipe.parallel
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    timeout = timedelta(seconds=parallel.timeout_s)

    def make() -> Plan:
        return plan_recipe(model, recipe, size, source)

    # A search depends on the machine, so ranks on different hosts must use the first rank's result.
    is_local = recipe.hot.rows is None and is_searched(plan_or_schemes(parallel))
    plan = broadcast_plan(Link(None, timeout), make) if size > 1 and is_local else make()
    if parallel.replicas == 1:
        _refuse_too_many(plan, plan_tables(model), moments_by_table(model, recipe), device)
    return distribute(model, plan, parallel, recipe.memory, device=device, timeout=timeout)


def _refuse_too_many(
    plan: Plan, tables: Sequence[Table], moments: Mapping[str, Sequence[Moment]], device: torch.device
) -> None:
    """Raise `StoreError` if the rows and moments of this host's processes exceed its free memory."""
    world = read_world()
    first = world.rank - world.local_rank
    local = range(first, first + world.local_size)
    by_tier: dict[Tier, int] = {"device": 0, "host": 0, "disk": 0}
    for table in tables:
        for tile in plan.by_table[table.name]:
            by_tier[tile.tier] += tile_bytes(table, tile, moments[table.name]) * (tile.owner in local)
            by_tier[tile.tier] += tile_bytes(table, tile) * sum(rank in local for rank in tile.readers)
    refuse_too_many(by_tier["device"], device, by_tier)


def refuse_impossible(recipe: Recipe, tables: Sequence[Table], device: torch.device) -> None:
    """Raise `StoreError` if tables and moments exceed the memory of one process."""
    moments = moments_of(recipe.sparse_optimizer)
    nbytes = sum(table_bytes(table, moments) for table in tables if table.dynamic is None)
    refuse_too_many(nbytes, device, {"device": nbytes, "host": 0, "disk": 0})


def needs_a_plan(recipe: Recipe) -> bool:
    """Return whether a model is distributed over several processes or tiers."""
    several = dist.is_available() and dist.is_initialized()
    plan = plan_or_schemes(recipe.parallel)
    outside = recipe.memory.tier != "device" or recipe.hot.rows is not None
    return several or outside or (isinstance(plan, Plan) and not plan.is_in_device_memory)


def plan_recipe(model: nn.Module, recipe: Recipe, world_size: int, source: Source | None = None) -> Plan:
    """Return the plan of a recipe for ``world_size`` processes; a plan file may be for a different number.

    A search counts ids per sample in ``source``; without a source, it assumes one id per feature.
    """
    parallel, memory = recipe.parallel, recipe.memory
    plan = plan_or_schemes(parallel)
    if world_size > 1:
        check_replicas(world_size, parallel)
    size = max(world_size // parallel.replicas, 1)
    if recipe.hot.rows is not None:
        return _plan_of_hot_rows(model, recipe, size, recipe.hot.rows)
    if is_searched(plan):
        return find_plan(model, recipe, size, source).plan
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
    """Return a plan with hot rows on all ranks, and with other rows sharded by the recipe's scheme."""
    scheme, memory = recipe.parallel.plan, recipe.memory
    if not isinstance(scheme, str) or scheme not in SCHEMES:
        raise RecipeError(
            f"parallel.plan is {scheme}, but hot.rows needs a scheme for rows that are not hot ({', '.join(SCHEMES)}). "
            "Set parallel.plan to a scheme, or remove hot.rows"
        )
    hot = read_hot_rows(file, {table.name: table.rows for table in plan_tables(model)})
    cuts = {name: replace(SCHEMES[scheme], hot_rows=rows, tier=memory.tier) for name, rows in hot.items()}
    return with_cache(plan_for(model, world_size, cuts), memory.cache_rows, memory.cached_tiers)


def plan_or_schemes(parallel: ParallelRecipe) -> Plan | Schemes:
    """Return ``parallel.plan``: a scheme for all tables, schemes by table, or the content of a file."""
    if isinstance(parallel.plan, dict):
        return schemes_from(parallel.plan, "parallel.plan")
    return parallel.plan if parallel.plan in (*SCHEMES, AUTO) else read_plan(parallel.plan)


def read_plan(file: str) -> Plan | Schemes:
    """Read a plan or schemes by table from a JSON or YAML file."""
    try:
        text = read_limited_uri(file)
        values = parse_yaml(text.decode()) if file.endswith((".yaml", ".yml")) else parse_json(text)
    except FileNotFoundError:
        raise PlanError(
            f"plan {file} does not exist. Use an existing JSON or YAML file, or a scheme: {', '.join(SCHEMES)}, {AUTO}"
        ) from None
    except (TextError, ValueError) as error:
        raise PlanError(f"plan {file} {error}. Use a valid JSON or YAML file") from None
    if not isinstance(values, dict):
        raise PlanError(f"plan {file} holds {type(values).__name__}, expected a plan or schemes by table")
    found = cast("dict[str, Any]", values)
    return Plan.from_dict(found) if {"tiles", "world_size"} & found.keys() else schemes_from(found, file)


# -- files about the tables of a dataset -------------------------------------------------------------------------------

T = TypeVar("T")


def _read_tables(
    file: str | Path, rows: Mapping[str, int], take: Callable[[Any, Any], T], command: str, again: str, for_model: str
) -> dict[str, T]:
    """Read the entries of the model's tables with ``take(content, entry)``.

    ``command`` writes such files. ``again`` is the fix for a damaged file, and ``for_model`` is the fix for a file that
    belongs to a different model.
    """
    try:
        content: Any = parse_json(read_limited_uri(file))
        found = {entry["table"]: (int(entry["rows"]), take(content, entry)) for entry in content["tables"]}
    except FileNotFoundError:
        raise DataError(f"{file} does not exist. Create it with {command}") from None
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        problem = f"was not written by {command} ({type(error).__name__}: {error})"
        raise DataError(f"{file} {error if isinstance(error, TextError) else problem}. {again}") from None
    entries: dict[str, T] = {}
    for name, expected in rows.items():
        own = name if name in found else name.rpartition(".")[2]
        if own not in found:
            raise DataError(f"{file} has no table '{name}' of the model. {for_model}")
        counted, entries[name] = found[own]
        if counted != expected:
            raise DataError(f"{file}: table '{name}': got {counted:,} rows, expected {expected:,}. {for_model}")
    return entries


def read_hot_rows(file: str | Path, rows: Mapping[str, int]) -> dict[str, int]:
    """Read the number of hot rows by table; hot rows are the first rows of a table."""

    def hot_rows(_: Any, entry: Any) -> int:
        hot, counted = entry["hot_rows"], entry["rows"]
        if not (is_int(hot) and is_int(counted) and 0 <= hot <= counted):
            raise ValueError(f"table '{entry['table']}' has {hot!r} hot rows of {counted!r}")
        return hot

    return _read_tables(file, rows, hot_rows, "hotbed pack", "Run it again", "Run hotbed pack on this model's data")


def read_skew(file: str | Path, rows: Mapping[str, int]) -> dict[str, Curve]:
    """Read the accesses of the first rows by table; rows are sorted by descending popularity."""

    def curve(content: Any, entry: Any) -> Curve:
        samples, counts, counted = max(int(content["samples"]), 1), entry["cache_rows"], int(entry["rows"])
        shares = [share or 0.0 for share in entry["accesses_of_top_rows"]]  # null without accesses
        if len(counts) != len(shares) or counts != sorted(counts) or counts[-1:] != [counted]:
            table = entry["table"]
            raise ValueError(
                f"cache_rows of table '{table}' must increase to {counted:,}, with one accesses_of_top_rows for each"
            )
        return Curve(counts, [share * entry["accesses"] / samples for share in shares])

    fix = "Run hotbed inspect --skew on this model's data"
    return _read_tables(file, rows, curve, "hotbed inspect --skew", "Run it again", fix)
