"""Search for a recipe's plan or read the plan from a file, and distribute the recipe's model by the plan.

`read_hot_rows` and `read_skew` read JSON files about the tables of a dataset, ``{"tables": [{"table": …}, …]}``.
``hotbed pack`` writes ``hot_rows.json``, which has the number of hot rows of each table. ``hotbed inspect --skew``
writes ``skew.json``, which has the popularity of the rows of each table.
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

from hotbed.checkpoint.storage import read_limited_uri
from hotbed.checks import is_int
from hotbed.comm import Link
from hotbed.config import ParallelRecipe, Recipe
from hotbed.data import Source
from hotbed.embed import collections_of, distribute, plan_for, plan_tables
from hotbed.embed.plan_names import broadcast_plan, is_searched, names_in_plans, pooled_features, schemes_for
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
from hotbed.virtual_ranks import tree_size

BACKWARD_KEEPS = 2
"""A step keeps two vectors per layer: the layer's output for the backward pass, and the gradient of the output."""


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
    """Search for the fastest plan of a group of ``size`` ranks.

    ``schemes`` replaces the schemes of the recipe. ``others`` is the scheme of the tables that the schemes do not name.
    """
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
    """Search for the number of all ranks and the number of replicas; a number that is not ``"auto"`` is fixed.

    If the price per node and hour is known (``price``, or in the hardware profile), the result costs least per sample.
    For ``schemes`` and ``others`` see `find_plan`.
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
    """Return keyword arguments of `search`: the schemes of tables, and memory limits of the recipe."""
    given = plan_or_schemes(recipe.parallel) if schemes is None else schemes
    if isinstance(given, Plan):
        raise PlanError(
            "parallel.plan is a complete plan, so there is nothing to search. Set parallel.plan to auto or to schemes"
        )
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
    """Return the hardware profile that a recipe names; by default, return the profile of this machine."""
    named = recipe.parallel.hardware
    return hardware_here(resolve_device(recipe.train.device)) if named is None else Hardware.load(named)


def tiers_of(recipe: Recipe) -> tuple[Tier, ...]:
    """Return the tiers in which a recipe allows rows, fastest first."""
    order: tuple[Tier, ...] = ("device", "host", "disk")
    return order[: order.index(recipe.memory.tier) + 1]


def workload_of(model: nn.Module, recipe: Recipe, size: int, source: Source | None = None) -> Workload:
    """Return the work of a training step in a group of ``size`` ranks, for the search and the cost model."""
    tables, parallel, memory = plan_tables(model), recipe.parallel, recipe.memory
    rows = {table.name: table.rows for table in tables}
    ranks = size * parallel.replicas
    launches = {} if hardware_of(recipe).cores_shared else arena_launches(ranks, cached=bool(memory.cache_rows))
    bags, wire = pooled_features(model)
    return Workload.of(
        tables,
        ids=_ids(model, recipe, source),
        bags=bags,
        wire=wire,
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
    """Return the ids per sample of each table; numbers that vary are averaged over the first chunk of the source."""
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
    """Count the work of a recipe's model without its tables; on GPUs, count it kernel by kernel."""
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
    """Count the work of a model without its tables by formulas; ``narrow`` means bf16 or fp16.

    Each element of a weight with at least two dimensions needs two operations per sample. A dot interaction of ``n``
    vectors with ``D`` columns needs ``2 n² D`` operations. The forward pass keeps outputs of layers, looked-up vectors
    and outputs of the interaction for the backward pass.
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


def distribute_model(
    model: nn.Module,
    recipe: Recipe,
    device: torch.device,
    source: Source | None = None,
    *,
    virtual_ranks: int | None = None,
) -> nn.Module:
    """Distribute a model over processes and tiers as a recipe requests. For ``virtual_ranks`` see `build`.

    Return the same model if there is one process and all rows fit into one tier.
    """
    parallel = recipe.parallel
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    timeout = timedelta(seconds=parallel.timeout_s)

    def make() -> Plan:
        return plan_recipe(model, recipe, size, source)

    # The result of a search depends on the machine, so all ranks must use the first rank's result.
    is_local = recipe.hot.rows is None and is_searched(plan_or_schemes(parallel))
    plan = broadcast_plan(Link(None, timeout), make) if size > 1 and is_local else make()
    if parallel.replicas == 1:
        _refuse_too_many(plan, plan_tables(model), moments_by_table(model, recipe), device)
    parallel = replace(parallel, virtual_ranks=virtual_ranks_of(model, recipe, size, virtual_ranks))
    return distribute(model, plan, parallel, recipe.memory, device=device, timeout=timeout)


def virtual_ranks_of(model: nn.Module, recipe: Recipe, size: int, before: int | None) -> int:
    """Return the number of virtual ranks of a run on ``size`` processes.

    The default is the number ``before`` of the resumed run if no process would be without samples, else ``size`` or the
    next power of two. Models that cannot divide the batch of a process have one virtual rank per process.
    """
    given, parallel = recipe.parallel.virtual_ranks, recipe.parallel
    reasons = {
        "parallel.replicas": parallel.replicas > 1,
        "parallel.dense fsdp": parallel.dense == "fsdp",
        "train.compile": recipe.train.compile,
        "swap_embeddings": any(collection.is_swapped for collection in collections_of(model).values()),
    }
    if why := [reason for reason, holds in reasons.items() if holds]:
        if given not in (None, size):
            raise RecipeError(
                f"parallel.virtual_ranks: got {given:,}, expected {size}, the number of processes, with {why[0]}. "
                "Remove parallel.virtual_ranks"
            )
        return size
    if given is None and before is not None and before >= size and before in (size, tree_size(before)):
        return before
    return tree_size(size) if given is None else given


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


def needs_a_plan(recipe: Recipe, virtual_ranks: int | None = None) -> bool:
    """Return whether the recipe's model must be distributed over several processes, virtual ranks or tiers."""
    several = dist.is_available() and dist.is_initialized()
    plan = plan_or_schemes(recipe.parallel)
    outside = recipe.memory.tier != "device" or recipe.hot.rows is not None
    divided = (recipe.parallel.virtual_ranks or virtual_ranks) not in (None, 1)
    return several or outside or divided or (isinstance(plan, Plan) and not plan.is_in_device_memory)


def plan_recipe(model: nn.Module, recipe: Recipe, world_size: int, source: Source | None = None) -> Plan:
    """Return the plan of a recipe for ``world_size`` processes.

    A plan that is read from a file may be for a different number of processes. A search counts the ids per sample in
    ``source``; without a source, it assumes one id per feature.
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
    """Return a plan that copies hot rows to all ranks, and shards the other rows by the recipe's scheme."""
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
    """Return what ``parallel.plan`` names: a scheme for all tables, schemes by table, or a plan from a file."""
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
    """Read a file about tables; return the result of ``take(content, entry)`` for each table of the model.

    ``rows`` has the number of rows of these tables. ``command`` is the command that writes such files. Error messages
    end with ``again`` for a damaged file, and with ``for_model`` for a file that belongs to a different model.
    """
    try:
        content: Any = parse_json(read_limited_uri(file))
        found = {entry["table"]: (int(entry["rows"]), take(content, entry)) for entry in content["tables"]}
    except FileNotFoundError:
        raise DataError(f"{file} does not exist. Create the file with {command}") from None
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
    """For each table, read how many rows are hot. The hot rows are the first rows of the table."""

    def hot_rows(_: Any, entry: Any) -> int:
        hot, counted = entry["hot_rows"], entry["rows"]
        if not (is_int(hot) and is_int(counted) and 0 <= hot <= counted):
            raise ValueError(
                f"table '{entry['table']}': got hot_rows {hot!r} and rows {counted!r}, expected integers with "
                "0 <= hot_rows <= rows"
            )
        return hot

    return _read_tables(
        file, rows, hot_rows, "hotbed pack", "Run hotbed pack again", "Run hotbed pack on this model's data"
    )


def read_skew(file: str | Path, rows: Mapping[str, int]) -> dict[str, Curve]:
    """For each table, read the number of lookups per sample in its ``n`` most popular rows, as a curve over ``n``."""

    def curve(content: Any, entry: Any) -> Curve:
        samples, counts, counted = max(int(content["samples"]), 1), entry["cache_rows"], int(entry["rows"])
        shares = [share or 0.0 for share in entry["accesses_of_top_rows"]]  # null without accesses
        if len(counts) != len(shares) or counts != sorted(counts) or counts[-1:] != [counted]:
            table = entry["table"]
            raise ValueError(
                f"cache_rows of table '{table}' must ascend to {counted:,}, with one accesses_of_top_rows for each"
            )
        return Curve(counts, [share * entry["accesses"] / samples for share in shares])

    command = "hotbed inspect --skew"
    return _read_tables(file, rows, curve, command, f"Run {command} again", f"Run {command} on this model's data")
