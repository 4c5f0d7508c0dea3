"""Search for a recipe's plan: what its steps ask for, on which machine, within which memories."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from hotbed.config import Recipe
from hotbed.embed import collections_of, plan_tables
from hotbed.embed.plan_names import names_in_plans, schemes_for
from hotbed.errors import PlanError
from hotbed.nn.layers import DotInteraction
from hotbed.plan import Plan
from hotbed.plan.hardware import Hardware
from hotbed.plan.here import hardware_here
from hotbed.plan.ranks import Chosen, search_ranks
from hotbed.plan.schemes import Cut, Schemes, cuts_of
from hotbed.plan.search import Found, search
from hotbed.plan.tiling import Tier
from hotbed.plan.workload import DensePart, Workload
from hotbed.train.dense_kernels import arena_launches, dense_kernels
from hotbed.train.numerics import resolve_device
from hotbed.train.parallel import plan_or_schemes
from hotbed.train.parameter_groups import moments_by_table
from hotbed.train.table_file import read_skew

if TYPE_CHECKING:
    from hotbed.data import Source

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


def dense_part(model: nn.Module, recipe: Recipe, source: Source | None = None, *, ranks: int = 1) -> DensePart:
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


def count_dense_part(model: nn.Module, *, narrow: bool = False, input_bytes: float = 0.0) -> DensePart:
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
    return DensePart(
        parameters=sum(p.numel() for p in parameters),
        flops=flops,
        layers=layers,
        dtype="bf16" if narrow else "fp32",
        activation_bytes=BACKWARD_KEEPS * values * (2 if narrow else 4),
        input_bytes=input_bytes,
    )
