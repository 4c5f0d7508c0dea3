"""Find settings of a recipe that have no effect with the plan and on the machine of a run.

Such a run is correct, but its author may expect a different run, e.g. if the plan shards no table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any, cast

import torch

from hotbed.checks import settings
from hotbed.config import Recipe
from hotbed.config.validation import checkpoint_policy
from hotbed.large_tensors import HUGE_PAGES, huge_pages_are_off
from hotbed.plan import Plan
from hotbed.plan.cost import table_bytes
from hotbed.plan.schemes import SCHEMES, Cut
from hotbed.specs import Table

LARGE_BYTES = 256 << 20
"""If all tables together are larger than this, small memory pages make lookups slow."""


def idle_settings(recipe: Recipe, plan: Plan | None, tables: Sequence[Table], device: torch.device) -> list[str]:
    """Return a message for each setting without effect; ``plan`` is None if one device has all rows."""
    parallel, memory, train = recipe.parallel, recipe.memory, recipe.train
    ranks = 1 if plan is None else plan.world_size * parallel.replicas
    tiles = () if plan is None else plan.tiles
    used = {tile.tier for tile in tiles}
    often = train.checkpoint_every or train.checkpoint_minutes or checkpoint_policy(recipe) == "best"
    steps = train.steps or 1 << 62
    limit = "hot.rows" if recipe.hot.rows else "memory.device_bytes and memory.host_bytes"
    # Keys, the condition under which any value but the default has no effect, and the reason with a fix
    rules = (
        (
            ("parallel.reader", "parallel.forward_codec", "parallel.backward_codec", "parallel.dense"),
            ranks == 1,
            "one process exchanges nothing. Start several with torchrun",
        ),
        (
            ("parallel.ranks_per_node",),
            (parallel.ranks_per_node or 0) >= ranks,
            f"all {ranks} processes are on one node, so no exchange uses two hops. Remove this key",
        ),
        (
            ("parallel.sync_every", "parallel.layout", "parallel.exact"),
            parallel.replicas == 1,
            "parallel.replicas is 1, so there are no replicas",
        ),
        (
            ("memory.tier",),
            memory.tier not in used,
            f"all rows fit into {limit}. Remove memory.tier, or lower these limits",
        ),
        (("memory.device_bytes",), "device" not in used, "no row is in device memory. Raise or remove this limit"),
        (("memory.host_bytes",), "host" not in used, "no row is in host memory. Raise or remove this limit"),
        (
            ("memory.cache_policy", "memory.cache_tier"),
            not memory.cache_rows,
            "there is no cache. Set memory.cache_rows",
        ),
        (("memory.directory",), "disk" not in used, "no row is on disk. Set memory.tier to disk"),
        (("memory.host",), device.type != "cuda", "no GPU reads host memory. Remove this key"),
        (("data.fp32_rows",), recipe.data.dtype == "fp32", "data.dtype is fp32 for all rows. Set data.dtype"),
        (("train.checkpoint_full_every",), not often, "there is only one checkpoint. Set train.checkpoint_every"),
        (
            ("train.checkpoint_every", "train.eval_every", "schedule.warmup_steps"),
            None,  # values above train.steps have no effect
            f"the run ends after train.steps {steps:,}. Lower this value",
        ),
    )
    found, values = list(_idle_plan(recipe, plan)), cast("Any", recipe)
    defaults = {setting.key: setting.field.default for setting in settings(Recipe)}
    for keys, condition, reason in rules:
        for key in keys:
            value = reduce(getattr, key.split("."), values)
            is_idle = condition if condition is not None else (value or 0) > steps
            if is_idle and value not in (defaults[key], {}):
                found.append(f"{key} is {f'{value:,}' if type(value) is int else value}, but {reason}")
    cached = sum(len(tile.rows) for tile in tiles if tile.tier in memory.cached_tiers)
    if memory.cache_rows and memory.tier in used and memory.cache_rows * (plan.world_size if plan else 1) > cached:
        found.append(
            f"memory.cache_rows is {memory.cache_rows:,} per process, but only {cached:,} rows are in the cached "
            "tiers, so the caches have copies of all these rows. Raise memory.device_bytes to avoid the copies"
        )
    nbytes = sum(table_bytes(table) for table in tables if table.dynamic is None)
    if device.type == "cpu" and nbytes >= LARGE_BYTES and huge_pages_are_off():
        found.append(
            f"transparent huge pages are off ({HUGE_PAGES} is never), so lookups in tables of {nbytes:,} bytes miss "
            "the TLB and can take twice as long. Write madvise to this file"
        )
    return found


def _idle_plan(recipe: Recipe, plan: Plan | None) -> Iterator[str]:
    """Yield messages if a plan leaves tables unsharded, or ranks without rows."""
    scheme = recipe.parallel.plan if isinstance(recipe.parallel.plan, str) else "by table"
    cut = SCHEMES.get(scheme, Cut())
    if plan is None or plan.world_size == 1:
        if cut != Cut():
            yield (
                f"parallel.plan is {scheme}, but the plan has one process, so no table is sharded. Start several "
                "processes with torchrun, or remove parallel.plan"
            )
        return
    whole = [name for name, tiles in plan.by_table.items() if len({t.cols for t in tiles if not t.readers}) <= 1]
    if cut.cols != 1 and whole:
        yield (
            f"parallel.plan is {scheme}, but {len(whole)} of {len(plan.by_table)} tables are too narrow for column "
            f"shards ({', '.join(whole[:3])}{' …' * (len(whole) > 3)})"
        )
    empty = [rank for rank in range(plan.world_size) if not any(rank in tile.ranks for tile in plan.tiles)]
    if empty:
        yield (
            f"parallel.plan {scheme} leaves {len(empty)} of {plan.world_size} ranks without rows "
            f"({', '.join(map(str, empty[:5]))}{' …' * (len(empty) > 5)}). Use `--parallel.plan row` to store "
            "rows on every rank"
        )
