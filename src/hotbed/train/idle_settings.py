"""Find settings of a recipe that cannot do what they say, by the plan and the machine that the run has.

A plan that cuts nothing, a tier in which no row is, a cache that is never used: the run is right, and not what whoever
wrote the recipe thinks it is. Each is one sentence: what is set, why it does nothing, what would.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch

from hotbed.config import Recipe
from hotbed.config.validation import checkpoint_policy
from hotbed.large_tensors import HUGE_PAGES, huge_pages_are_off
from hotbed.plan import Plan
from hotbed.plan.cost import table_bytes
from hotbed.plan.placement import SCHEMES, Cut
from hotbed.specs import Table

LARGE_BYTES = 256 << 20
"""Tables that are larger lose by small pages."""

_log = logging.getLogger("hotbed")


def warn_of_idle_settings(recipe: Recipe, plan: Plan | None, tables: Sequence[Table], device: torch.device) -> None:
    """Log each of `idle_settings`."""
    for message in idle_settings(recipe, plan, tables, device):
        _log.warning("%s", message)


def idle_settings(recipe: Recipe, plan: Plan | None, tables: Sequence[Table], device: torch.device) -> list[str]:
    """Say what is set and does nothing.

    Parameters
    ----------
    recipe
        What is set.
    plan
        Where rows are; None where all are in the memory of one process's device.
    tables
        Of the model.
    device
        Where it is trained.
    """
    ranks = 1 if plan is None else plan.world_size * recipe.parallel.replicas
    return [
        *_of_the_plan(recipe, plan),
        *_of_ranks(recipe, ranks),
        *_of_memory(recipe, plan, device),
        *_of_training(recipe),
        *_of_the_machine(tables, device),
    ]


def _of_the_plan(recipe: Recipe, plan: Plan | None) -> Iterator[str]:
    given = recipe.parallel.plan
    scheme = given if isinstance(given, str) else "by table"
    if plan is None or plan.world_size == 1:
        if scheme in SCHEMES and SCHEMES[scheme] != Cut():
            yield (
                f"parallel.plan is {scheme}, but each plan is for one process, in which nothing is cut; start several "
                "with torchrun, or leave it out"
            )
        return
    cut_by_columns = SCHEMES[scheme].cols != 1 if scheme in SCHEMES else False
    whole = [name for name, tiles in plan.by_table.items() if len({t.cols for t in tiles if not t.readers}) <= 1]
    if cut_by_columns and whole:
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


def _of_ranks(recipe: Recipe, ranks: int) -> Iterator[str]:
    parallel = recipe.parallel
    if ranks == 1:
        for key, idle in (("reader", "each"), ("forward_codec", "fp32"), ("backward_codec", "fp32"), ("dense", "ddp")):
            if getattr(parallel, key) != idle:
                yield f"parallel.{key} is {getattr(parallel, key)}, but there is one process, which exchanges nothing"
    if parallel.ranks_per_node is not None and parallel.ranks_per_node >= ranks:
        yield (
            f"parallel.ranks_per_node is {parallel.ranks_per_node}, but there are {ranks} processes: all are on one "
            "node, and nothing goes in two hops"
        )
    if parallel.replicas == 1:
        for key, idle in (("sync_every", 1), ("layout", "groups"), ("exact", False)):
            if getattr(parallel, key) != idle:
                yield f"parallel.{key} is {getattr(parallel, key)}, but parallel.replicas is 1: there are no copies"


def _of_memory(recipe: Recipe, plan: Plan | None, device: torch.device) -> Iterator[str]:
    memory = recipe.memory
    tiles = () if plan is None else plan.tiles
    used = {tile.tier for tile in tiles}
    if memory.tier != "device" and memory.tier not in used:
        budgets = "the first rows of hot.rows" if recipe.hot.rows else "the budgets memory.device_bytes and host_bytes"
        yield (
            f"memory.tier is {memory.tier}, but no row is there: all fit into {budgets}; leave memory out, or lower "
            "them"
        )
    for tier in ("device", "host"):
        if getattr(memory, f"{tier}_bytes") and tier not in used:
            yield (
                f"memory.{tier}_bytes is {getattr(memory, f'{tier}_bytes'):,}, but no row is in the {tier}'s memory: "
                "it is too little for one, or faster memories hold all"
            )
    cached = sum(len(tile.rows) for tile in tiles if tile.tier in memory.cached_tiers)
    if memory.cache_rows and memory.tier in used and memory.cache_rows * (plan.world_size if plan else 1) > cached:
        yield (
            f"memory.cache_rows is {memory.cache_rows:,} per process, but only {cached:,} rows are in the memories "
            "that it is for: it holds all of them; a larger memory.device_bytes would hold them without a copy"
        )
    if not memory.cache_rows:
        for key, idle in (("cache_policy", "lru"), ("cache_tier", "device")):
            if getattr(memory, key) != idle:
                yield f"memory.{key} is {getattr(memory, key)}, but there is no cache; set memory.cache_rows"
    if memory.directory is not None and "disk" not in used:
        yield "memory.directory is set, but no row is on disk; set memory.tier to disk"
    if memory.host == "uva" and device.type != "cuda":
        yield "memory.host is uva, but there is no GPU that could read the host's memory: rows are simply in memory"


def _of_training(recipe: Recipe) -> Iterator[str]:
    data, train, schedule = recipe.data, recipe.train, recipe.schedule
    if data.dtype == "fp32" and data.fp32_rows:
        yield "data.fp32_rows is set, but data.dtype is fp32: all rows are; set data.dtype to what the others are"
    often = train.checkpoint_every or train.checkpoint_minutes or checkpoint_policy(recipe) == "best"
    if train.checkpoint_full_every > 1 and not often:
        yield (
            f"train.checkpoint_full_every is {train.checkpoint_full_every}, but at most one checkpoint is saved, which "
            "holds all rows; set train.checkpoint_every"
        )
    if train.steps is None:
        return
    for key, value in (("train.checkpoint_every", train.checkpoint_every), ("train.eval_every", train.eval_every)):
        if value is not None and value > train.steps:
            yield f"{key} is {value:,}, but the run ends after train.steps {train.steps:,}"
    if schedule.warmup_steps > train.steps:
        yield (
            f"schedule.warmup_steps is {schedule.warmup_steps:,}, but the run ends after train.steps {train.steps:,}: "
            "no learning rate reaches what is set"
        )


def _of_the_machine(tables: Sequence[Table], device: torch.device) -> Iterator[str]:
    nbytes = sum(table_bytes(table) for table in tables if table.dynamic is None)
    if device.type == "cpu" and nbytes >= LARGE_BYTES and huge_pages_are_off():
        yield (
            f"transparent huge pages are off on this machine ({HUGE_PAGES} says never): lookups in tables of "
            f"{nbytes:,} bytes miss the TLB, which can double their time; write madvise there"
        )
