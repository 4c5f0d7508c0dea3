"""Make workloads of published configurations, search their plans, and simulate their steps with hotbed's cost model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hotbed.config import Recipe
from hotbed.files import read_yaml
from hotbed.plan import Cut, Plan
from hotbed.plan.cost import LAUNCHES, CostModel, RankCosts, table_bytes
from hotbed.plan.hardware import Hardware
from hotbed.plan.hit_rates import Curve
from hotbed.plan.limits import limits_of
from hotbed.plan.search import search
from hotbed.plan.simulation.simulate import Overlap, Simulation, simulate
from hotbed.plan.step_time import arenas_of
from hotbed.plan.workload import Workload
from hotbed.train.runs.build import new_model, open_source
from hotbed.train.runs.plan_search import tiers_of, workload_of

ACTIVATION_PASSES, LAUNCHES_PER_LAYER = 6.2, 60
"""Constants of other frameworks: how often a step on a GPU moves the bytes of kept activations, and kernels per layer
of an MLP that take less time than their launch. Each is fitted on a published rate, see rows.yaml."""

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The setup of a source. Files are in ``recipes/``, or in this folder if they begin with ``published/``."""

    recipe: str
    hardware: str
    ranks: int
    replicas: int = 1
    dense_dtype: str = "fp32"  # of matrix products
    dtype: str | None = None  # of rows (default: the recipe's)
    optimizer: str | None = None
    batch_per_rank: int | None = None
    mflop: str | float | None = None  # of a forward pass per sample, or its constant (default: the model's)
    wire: str = "rows"
    codec: str = "fp32"
    tier: str = "device"
    host_tables: str | None = None  # tables in the host's memory: `all`, or the largest that do not fit on devices
    hot_bytes: int = 0  # of hot rows on the device, with all others in the host's memory (arXiv 2103.00686)
    fused: bool = True  # whether similar tables share kernels
    ids_ahead: bool = False  # whether ids of the next batch reach their owners during a step
    framework_cpu: bool = False  # whether a framework's CPU operators read a row per id, partly on one core
    assumed: str = ""


@dataclass(frozen=True)
class Planned:
    """A setup's workload, and the plan that the search found for it."""

    setup: Setup
    work: Workload
    hardware: Hardware
    layers: int
    plan: Plan
    costs: dict[float, RankCosts] = field(default_factory=dict[float, RankCosts])
    """Costs of ranks by the one constant that they depend on."""

    def simulated(self, constants: Mapping[str, float]) -> Simulation:
        dense, given = self.work.dense, self.setup.mflop
        mflop = dense.flops / 1e6 if given is None else constants[given] if isinstance(given, str) else given
        launches = constants["launches_per_layer"] * self.layers
        if not self.setup.fused:  # an arena per table, instead of one for all that are alike
            tables = [{t.table for t in self.plan.tiles if t.owner == rank} for rank in range(self.plan.world_size)]
            launches += LAUNCHES * (max(map(len, tables)) - arenas_of(self.plan.tiles, self.work))
        moved = constants["activation_passes"] * dense.activation_bytes
        dense = replace(dense, flops=mflop * 1e6, moved_bytes=moved, launches=round(launches), kernels=())
        share = constants["cpu_serial_share"] if self.setup.framework_cpu else 0.0
        here = on_framework(self.hardware, share)
        model = CostModel(replace(self.work, dense=dense), self.plan.world_size, here)
        if share not in self.costs:
            self.costs[share] = model.ranks(self.plan)
        overlap = replace(Overlap.of(here), ids=self.setup.ids_ahead or here.cores_shared)
        return simulate(self.plan, self.costs[share], model, overlap=overlap)


def on_framework(here: Hardware, share: float) -> Hardware:
    """Return the hardware with slower cores, because one core does a ``share`` of the work alone.

    The work of ``p`` cores takes ``1 + share (p − 1)`` times as long (Amdahl 1967). If each rank has its own device,
    cores only read and write rows in the host's memory, so only this is slower.
    """
    factor = 1 / (1 + share * (here.cores_per_node - 1))
    of_cores = ("stream", "gather", "scatter", "flops", "host_stream", "host_link")
    for figure in of_cores if here.cores_shared else ("host_stream",):
        here = here.scaled(figure, factor)
    return here


def read(setup: Setup) -> tuple[Recipe, Workload, Hardware, int]:
    """Make a setup's recipe, workload, machine and number of layers."""
    found = read_yaml(_file(setup.recipe, ROOT / "recipes"))
    if setup.dtype is not None:
        found["data"]["dtype"] = setup.dtype
    if setup.optimizer is not None:
        found["sparse_optimizer"] = {"class_path": f"hotbed.optim.{setup.optimizer}", "init_args": {"lr": 0.01}}
    if (ROOT / found["data"]["path"]).is_file():
        found["data"]["path"] = str(ROOT / found["data"]["path"])
    own = setup.hardware.startswith("published/")
    hardware = str(_file(setup.hardware, FOLDER)) if own else setup.hardware
    batch = found["train"]["batch_size"] if setup.batch_per_rank is None else setup.batch_per_rank * setup.ranks
    narrow = setup.dense_dtype in ("fp16", "bf16")
    found["train"] |= {"batch_size": batch, "precision": "bf16" if narrow else "fp32"}
    codecs = {"forward_codec": setup.codec, "backward_codec": setup.codec}
    found["parallel"] = {**codecs, "replicas": setup.replicas, "hardware": hardware}
    found["memory"] = {"tier": setup.tier}
    recipe = Recipe.from_dict(found)
    source = open_source(recipe.data)
    with torch.device("meta"):
        model = new_model(recipe, source)
    work = workload_of(model, recipe, setup.ranks // setup.replicas, source)
    wire: dict[str, Any] = {use.table.name: setup.wire for use in work.uses}
    dense = replace(work.dense, dtype=setup.dense_dtype, kernels=())  # hotbed's kernels are not theirs
    work = replace(work, wire=wire, fused_pooling=True, dense=dense, arena_launches={})
    if setup.framework_cpu:  # ids are not grouped: rows of all of them are moved, as if none was asked for twice
        uses = (replace(use, popularity=Curve([use.table.rows], [1.0])) for use in work.uses)
        work = replace(work, uses=tuple(uses))
    return recipe, work, Hardware.load(hardware), sum(isinstance(m, nn.Linear) for m in model.modules())


@cache
def plan_of_group(group: Setup) -> Plan:
    recipe, work, hardware, _ = read(group)
    fixed = {name: Cut(tier="host") for name in _in_host(group, work, group.ranks, hardware)}
    return search(work, group.ranks, hardware, fixed=fixed, tiers=tiers_of(recipe)).plan


def planned(setup: Setup) -> Planned:
    """Plan a setup. Each replica has the plan that is best for one group alone."""
    _, work, hardware, layers = read(setup)
    plan = plan_of_group(replace(setup, ranks=setup.ranks // setup.replicas, replicas=1))
    return Planned(setup, work, hardware, layers, plan)


def samples_per_s(each: Planned, cold: Planned | None, constants: Mapping[str, float]) -> float:
    """Return samples/s. With hot rows, ``cold`` is the same setup with all rows in the host's memory."""
    seconds = each.simulated(constants).step_s
    if cold is not None:
        share = hot_share(each.work, each.setup.hot_bytes)
        seconds = share * seconds + (1 - share) * cold.simulated(constants).step_s
    return each.work.batch_size / seconds


def cold_of(setup: Setup) -> Setup | None:
    """Return a setup with hot rows as one with all rows in the host's memory, or None for other setups."""
    if not setup.hot_bytes:
        return None
    return replace(setup, hot_bytes=0, tier="host", host_tables="all", framework_cpu=True)


def hot_share(work: Workload, budget: int) -> float:
    """Return the share of samples with only hot rows of ``budget`` bytes, if columns are independent."""

    def rows(accesses: float) -> dict[str, int]:
        return {use.table.name: use.per_sample.rows_above(accesses) for use in work.uses}

    low, high = 1e-15, 1.0  # accesses per sample: rows at `high` fit
    for _ in range(100):
        middle = (low * high) ** 0.5
        hot = rows(middle)
        fits = sum(table_bytes(use.table) / use.table.rows * hot[use.table.name] for use in work.uses) <= budget
        low, high = (low, middle) if fits else (middle, high)
    hot = rows(high)
    return prod((use.per_sample.accesses(hot[use.table.name]) / use.ids) ** use.ids for use in work.uses)


def sizes(work: Workload) -> dict[str, float]:
    """Return GiB of rows, TB of rows and moments, and billions of parameters."""
    return {
        "table_gib": sum(table_bytes(use.table) for use in work.uses) / 2**30,
        "state_tb": sum(table_bytes(use.table, use.moments) for use in work.uses) / 1e12,
        "billions": (sum(use.table.rows * use.table.dim for use in work.uses) + work.dense.parameters) / 1e9,
    }


def _in_host(setup: Setup, work: Workload, size: int, hardware: Hardware) -> list[str]:
    """Return the tables that are completely in the host's memory."""
    if setup.host_tables is None:
        return []
    uses = sorted(work.uses, key=lambda use: table_bytes(use.table, use.moments), reverse=True)
    if setup.host_tables == "all":
        return [use.table.name for use in uses]
    room = limits_of(CostModel(work, size, hardware)).device * size
    left, found = sum(table_bytes(use.table, use.moments) for use in uses), list[str]()
    for use in uses:
        if left <= room:
            break
        left -= table_bytes(use.table, use.moments)
        found.append(use.table.name)
    return found


def _file(name: str, folder: Path) -> Path:
    if name.startswith("published/"):
        folder, name = FOLDER, name.removeprefix("published/")
    return folder / f"{name}.yaml"
