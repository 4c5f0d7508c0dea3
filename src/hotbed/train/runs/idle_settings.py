"""Find settings of a recipe that have no effect under the plan and on the machine of the run.

Such a run is correct, but it is not what the author of the recipe expects: e.g. a plan that cuts no table.
"""

from __future__ import annotations

import logging
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
"""Bytes of tables from which on small pages cost much time."""

_log = logging.getLogger("hotbed")


def warn_of_idle_settings(recipe: Recipe, plan: Plan | None, tables: Sequence[Table], device: torch.device) -> None:
    """Log each of `idle_settings`."""
    for message in idle_settings(recipe, plan, tables, device):
        _log.warning("%s", message)


def idle_settings(recipe: Recipe, plan: Plan | None, tables: Sequence[Table], device: torch.device) -> list[str]:
    """List the settings without effect; ``plan`` is None where all rows are in the memory of one process's device."""
    parallel, memory, train = recipe.parallel, recipe.memory, recipe.train
    ranks = 1 if plan is None else plan.world_size * parallel.replicas
    tiles = () if plan is None else plan.tiles
    used = {tile.tier for tile in tiles}
    often = train.checkpoint_every or train.checkpoint_minutes or checkpoint_policy(recipe) == "best"
    steps = train.steps or 1 << 62
    alone = "there is one process, which exchanges nothing"
    one_node = f"there are {ranks} processes: all are on one node, and nothing goes in two hops"
    no_copies = "parallel.replicas is 1: there are no copies"
    budgets = "the first rows of hot.rows" if recipe.hot.rows else "the budgets memory.device_bytes and host_bytes"
    no_row = f"no row is there: all fit into {budgets}; leave memory out, or lower them"
    no_cache = "there is no cache; set memory.cache_rows"
    one_checkpoint = "at most one checkpoint is saved, which holds all rows; set train.checkpoint_every"
    ends = f"the run ends after train.steps {steps:,}"
    # Keys, when values other than their defaults have no effect, and why.
    rules: list[tuple[str, bool, str]] = [
        ("parallel.reader", ranks == 1, alone),
        ("parallel.forward_codec", ranks == 1, alone),
        ("parallel.backward_codec", ranks == 1, alone),
        ("parallel.dense", ranks == 1, alone),
        ("parallel.ranks_per_node", (parallel.ranks_per_node or 0) >= ranks, one_node),
        ("parallel.sync_every", parallel.replicas == 1, no_copies),
        ("parallel.layout", parallel.replicas == 1, no_copies),
        ("parallel.exact", parallel.replicas == 1, no_copies),
        ("memory.tier", memory.tier not in used, no_row),
        ("memory.device_bytes", "device" not in used, "no row is in the device's memory: raise it, or leave it out"),
        ("memory.host_bytes", "host" not in used, "no row is in the host's memory: raise it, or leave it out"),
        ("memory.cache_policy", not memory.cache_rows, no_cache),
        ("memory.cache_tier", not memory.cache_rows, no_cache),
        ("memory.directory", "disk" not in used, "no row is on disk; set memory.tier to disk"),
        ("memory.host", device.type != "cuda", "there is no GPU that could read the host's memory"),
        ("data.fp32_rows", recipe.data.dtype == "fp32", "data.dtype is fp32: all rows are; set data.dtype"),
        ("train.checkpoint_full_every", not often, one_checkpoint),
        ("train.checkpoint_every", (train.checkpoint_every or 0) > steps, ends),
        ("train.eval_every", (train.eval_every or 0) > steps, ends),
        ("schedule.warmup_steps", recipe.schedule.warmup_steps > steps, f"{ends}: no rate reaches what is set"),
    ]
    found, values = list(_of_plan(recipe, plan)), cast("Any", recipe)
    defaults = {setting.key: setting.field.default for setting in settings(Recipe)}
    for key, has_no_effect, why in rules:
        value = reduce(getattr, key.split("."), values)
        if has_no_effect and value not in (defaults[key], {}):
            found.append(f"{key} is {f'{value:,}' if type(value) is int else value}, but {why}")
    cached = sum(len(tile.rows) for tile in tiles if tile.tier in memory.cached_tiers)
    if memory.cache_rows and memory.tier in used and memory.cache_rows * (plan.world_size if plan else 1) > cached:
        found.append(
            f"memory.cache_rows is {memory.cache_rows:,} per process, but only {cached:,} rows are in the memories "
            "that it is for: it holds all of them; a larger memory.device_bytes would hold them without a copy"
        )
    nbytes = sum(table_bytes(table) for table in tables if table.dynamic is None)
    if device.type == "cpu" and nbytes >= LARGE_BYTES and huge_pages_are_off():
        found.append(
            f"transparent huge pages are off on this machine ({HUGE_PAGES} says never): lookups in tables of "
            f"{nbytes:,} bytes miss the TLB, which can double their time; write madvise there"
        )
    return found


def _of_plan(recipe: Recipe, plan: Plan | None) -> Iterator[str]:
    given = recipe.parallel.plan
    scheme = given if isinstance(given, str) else "by table"
    cut = SCHEMES.get(scheme, Cut())
    if plan is None or plan.world_size == 1:
        if cut != Cut():
            yield (
                f"parallel.plan is {scheme}, but each plan is for one process, in which nothing is cut; start several "
                "with torchrun, or leave it out"
            )
        return
    whole = [name for name, tiles in plan.by_table.items() if len({t.cols for t in tiles if not t.readers}) <= 1]
    if cut.cols != 1 and whole:
        yield (
            f"parallel.plan is {scheme}, but {len(whole)} of {len(plan.by_table)} tables are too narrow to be cut into "
            f"columns ({', '.join(whole[:3])}{' …' * (len(whole) > 3)})"
        )
    empty = [rank for rank in range(plan.world_size) if not any(rank in tile.ranks for tile in plan.tiles)]
    if empty:
        yield (
            f"parallel.plan {scheme} gives no row of any table to {len(empty)} of {plan.world_size} ranks "
            f"({', '.join(map(str, empty[:5]))}{' …' * (len(empty) > 5)}); plan row gives all of them some"
        )
