"""Train over several ranks: exchange losses, predictions and names (`Ranks`), and distribute a model by its recipe.

What the model itself exchanges, ids, rows and gradients, is in `hotbed.embed`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.checkpoint.single_files import read_limited
from hotbed.comm import Link, reason
from hotbed.config import ParallelRecipe, Recipe
from hotbed.data import Source
from hotbed.data.loader import share_of
from hotbed.embed import Distributed, distribute, plan_for, plan_tables
from hotbed.embed.agreed_plan import is_searched, plan_of_first
from hotbed.embed.replicas import check_replicas
from hotbed.errors import CommError, HotbedError, PlanError, RecipeError
from hotbed.model_parallel_input import ModelParallelInput
from hotbed.optim import Moment
from hotbed.parsing import TextError, parse_json, parse_yaml
from hotbed.plan import Plan
from hotbed.plan.cost import table_bytes, tile_bytes
from hotbed.plan.schemes import AUTO, SCHEMES, Schemes, schemes_from
from hotbed.plan.tiers import place_in_tiers, with_cache
from hotbed.plan.tiling import Tier
from hotbed.specs import Table
from hotbed.store.memory import refuse_too_many, to_device
from hotbed.train.parameter_groups import moments_by_table, moments_of
from hotbed.train.process_group import started
from hotbed.train.table_file import read_hot_rows, read_skew


class Ranks:
    """Exchange small values between the ranks that train a model; there is one, where it is not distributed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model if isinstance(model, Distributed) else None
        self.rank = 0 if self._model is None else self._model.link.rank
        self.size = 1 if self._model is None else self._model.link.size

    @property
    def is_first(self) -> bool:
        """Whether this one writes and shows what is to be written and shown once."""
        return self.rank == 0

    @property
    def link(self) -> Link | None:
        """For small exchanges; None for one rank."""
        return None if self._model is None else self._model.link

    def sync(self) -> None:
        """Average the replicas of the model's tables, if there are any; all ranks must call this."""
        if self._model is not None:
            self._model.sync()

    def at_step(self, step: int) -> None:
        """Say which step it is in the errors of exchanges."""
        if self._model is not None:
            self._model.link.step = step

    @contextmanager
    def explained(self) -> Generator[None]:
        """Raise a `CommError` that names the rank which is gone, for what fails inside because it is."""
        try:
            yield
        except HotbedError:
            raise
        except RuntimeError as error:
            if self._model is not None and self._model.dense_link.failure is not None:
                raise self._model.dense_link.failure from error
            # Other errors have nothing to do with other ranks: asking who is gone would blame those that wait.
            gone = [] if self.link is None or not _of_a_collective(error) else self.link.unreachable()
            if not gone or self.link is None:
                raise
            raise CommError(
                f"{self.link.here}: {_ranks(gone)} ended or does not answer; its own output says why "
                f"({reason(error).splitlines()[0]})"
            ) from error

    @contextmanager
    def together(self, what: str) -> Generator[None]:
        """Raise on all ranks if the body raises on any; all must call this, and nothing may be exchanged inside."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        failed = self.gather(torch.tensor([error is not None])).nonzero().flatten().tolist()
        if error is not None:
            raise error
        if failed:
            raise CommError(f"{_ranks(failed)} cannot {what}; its own output says why")

    def add(self, *values: float | Tensor) -> list[float]:
        """Sums over ranks, in rank order."""
        return [sum(column) for column in self._columns(values)]

    def largest(self, *values: float) -> list[float]:
        """The largest over ranks."""
        return [max(column) for column in self._columns(values)]

    @property
    def adds_on_devices(self) -> bool:
        """Whether ranks, if there are several, add up in the order of the step what the host does not wait for."""
        return self.size == 1 or (self.link is not None and not self.link.overlaps)

    def sums(self, *values: float | Tensor) -> Tensor:
        """Sums over ranks ``[values]`` float64, on the device of the tensors among them; the host waits for nothing."""
        return self._by_rank(values).sum(0)

    def _columns(self, values: Sequence[float | Tensor]) -> list[list[float]]:
        """By value, that of each rank."""
        if self.link is None:
            return [[float(v.detach()) if isinstance(v, Tensor) else float(v)] for v in values]
        return [list(column) for column in zip(*self._by_rank(values).tolist(), strict=True)]

    def _by_rank(self, values: Sequence[float | Tensor]) -> Tensor:
        """Values of each rank ``[W, values]``."""
        assert self.link is not None
        device = next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))
        known = [0.0 if isinstance(v, Tensor) else float(v) for v in values]
        own = to_device(torch.tensor(known, dtype=torch.float64, device="cpu"), device)
        for i, value in enumerate(values):
            if isinstance(value, Tensor):
                own[i] = value.detach()
        return self.link.all_gather("losses and sizes", own).wait()

    def gather(self, values: Tensor) -> Tensor:
        """Rows of all ranks ``[Σ n, …]``, in rank order."""
        if self.link is None:
            return values
        counts = self.link.all_gather("numbers of samples", torch.tensor([len(values)], device=values.device)).wait()
        padded = values.new_zeros(int(counts.max()), *values.shape[1:])
        padded[: len(values)] = values
        rows = self.link.all_gather("predictions", padded.view(torch.uint8)).wait()  # of any dtype
        return torch.cat([row.view(values.dtype)[:n] for row, n in zip(rows, counts.flatten().tolist(), strict=True)])

    def add_counts(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Sums of counts over ranks; all must have the same keys, but those with 0 may be left out."""
        if self.link is None:
            return dict(counts)
        names = self.names(sorted(counts))
        sums = self.add(*(float(counts.get(name, 0)) for name in names)) if names else []
        return {name: int(total) for name, total in zip(names, sums, strict=True)}

    def names(self, own: Sequence[str]) -> list[str]:
        """Names that any rank has, sorted."""
        if self.link is None:
            return sorted(own)
        text = torch.frombuffer(bytearray("".join(f"{name}\n" for name in ["", *own]).encode()), dtype=torch.uint8)
        found = bytes(self.gather(text).tolist()).decode()
        return sorted({name for name in found.split("\n") if name})

    def path(self, path: Path | None) -> Path:
        """The first rank's path, on all ranks."""
        if self.link is None:
            assert path is not None
            return path
        return Path(self.names([] if path is None or not self.is_first else [str(path)])[0])


def model_parallel_batch(batch: Batch, rank: int, size: int) -> Batch:
    """A rank's samples of a global batch, but the ids of all samples; see `ModelParallelInput`."""
    shares = [share_of(len(batch), r, size) for r in range(size)]
    mine = shares[rank]
    return Batch(
        sparse=ModelParallelInput(batch.sparse, [s.stop - s.start for s in shares], rank),
        dense=None if batch.dense is None else batch.dense[mine],
        labels=None if batch.labels is None else batch.labels[mine],
        weights=None if batch.weights is None else batch.weights[mine],
        extra={name: column[mine] for name, column in batch.extra.items()},
    )


def _of_a_collective(error: RuntimeError) -> bool:
    """Whether torch.distributed raised it; Gloo's errors are plain ones that begin with a place in its source."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "one of ranks ") + ", ".join(map(str, ranks))


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
        from hotbed.train.plan_search import searched  # which needs metrics, and these this file

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
        text = read_limited(file)
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
