"""Summarize a run: the contents of ``summary.json``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from hotbed.checkpoint import Taken
from hotbed.config import Recipe
from hotbed.embed import Distributed, collections_of
from hotbed.optim import SparseOptimizer
from hotbed.plan.cost import table_bytes
from hotbed.store import Traffic
from hotbed.train.report import RunDirectory, environment
from hotbed.train.retention import KeepBest
from hotbed.train.stored import bad_ids
from hotbed.train.throughput import Balance
from hotbed.train.trainer import Trainer


class IdCounts:
    """Number of ids out of range, of all ranks, in the run and in the runs that it resumes."""

    def __init__(self, trainer: Trainer, recipe: Recipe) -> None:
        self._trainer, self._recipe = trainer, recipe
        self._before: dict[str, int] = {}

    def total(self) -> dict[str, int]:
        """Return the counts by feature; all ranks must call this."""
        own = self._trainer.ranks.add_counts(_own_bad_ids(self._trainer, self._recipe))
        return dict(Counter(self._before) + Counter(own))

    def state_dict(self) -> dict[str, int]:
        """Return the counts so far."""
        return self.total()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Add the counts of the run that is resumed."""
        self._before = dict(state)


def _own_bad_ids(trainer: Trainer, recipe: Recipe) -> dict[str, int]:
    """Count this rank's invalid ids, skipping those that another owner of the table also counts."""
    counts = bad_ids(trainer.model)
    if recipe.parallel.reader != "owners" or not isinstance(trainer.model, Distributed):
        return counts
    first_owner = {table: tiles[0].owner for table, tiles in trainer.model.plan.by_table.items()}
    collections = collections_of(trainer.model).values()
    own = {f.name for c in collections for f in c.features if first_owner[f.table] == trainer.ranks.rank}
    return {feature: count for feature, count in counts.items() if feature in own}


def summary_of(
    recipe: Recipe,
    trainer: Trainer,
    run: RunDirectory,
    ids: IdCounts,
    taken: Sequence[Taken],
    tested: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Summarize a run: ``taken`` from another model, ``tested`` at the end; all ranks must call this."""
    return {
        "name": recipe.name,
        "seed": recipe.train.seed,
        "steps": trainer.step,
        "epochs": trainer.epoch,
        "samples": trainer.samples,
        "samples_per_s": trainer.samples_per_s,
        "stall_share": trainer.clock.stall_share,
        "time": trainer.clock.seconds,
        **trainer.numerics.summary(),
        "best_step": best_step(trainer),
        "test": tested,
        "ids_out_of_range": ids.total(),
        "checkpoints": of_checkpoints(trainer),
        **({"init": [t.to_dict() for t in taken]} if taken else {}),
        **of_ranks(trainer),
        **of_memory(trainer),
        "tables": of_tables(trainer),
        **environment(trainer.device),
        "run": str(run.path),
    }


def best_step(trainer: Trainer) -> int | None:
    """Return the step of the best evaluation; None if its model was not kept."""
    return next((callback.step for callback in trainer.callbacks if isinstance(callback, KeepBest)), None)


def of_checkpoints(trainer: Trainer) -> dict[str, Any]:
    """Count checkpoints, and the seconds that training waited for them."""
    records = trainer.saver.records
    return {"saved": len(records), "stalled_s": sum(record["stalled_s"] for record in records)}


def of_memory(trainer: Trainer) -> dict[str, Any]:
    """Describe rows that are not all in the device's memory."""
    collections, traffic = collections_of(trainer.model).values(), trainer.traffic
    if traffic == Traffic():
        return {}
    held = {"table_bytes": sum(c.nbytes for c in collections), "disk_bytes": sum(c.disk_bytes for c in collections)}
    return {"memory": {**held, "hit_rate": traffic.hit_rate, **asdict(traffic)}}


def of_tables(trainer: Trainer) -> list[dict[str, Any]]:
    """Describe each table: size, ids per sample, hit rate, norm of gradients; all ranks must call this."""
    clock = trainer.clock
    moments = {
        name: optimizer.rule.moments
        for optimizer in trainer.optimizers.values()
        if isinstance(optimizer, SparseOptimizer)
        for group in optimizer.param_groups
        for name in group["tables"]
    }
    collections = collections_of(trainer.model)
    norms = trainer.training_step.logged.norms(trainer.ranks.add, trainer.ranks.size)
    found: list[dict[str, Any]] = []
    for path, collection in collections.items():
        served = collection.served
        counts = iter(trainer.ranks.add(*chain.from_iterable(served.values())))
        rates = {t: h / (h + m) if h + m else None for t, h, m in zip(served, counts, counts, strict=True)}
        for table in collection.tables.values():
            ids = sum(clock.ids[f.name] for f in collection.features if f.table == table.name)
            whole = f"{path}.{table.name}"
            found.append(
                {
                    "table": whole if len(collections) > 1 else table.name,
                    "rows": table.rows,
                    "dim": table.dim,
                    "dtype": table.dtype,
                    "bytes": table_bytes(table, moments.get(whole, moments.get(table.name, ()))),
                    # of the first rank; None where its batches have ids of other ranks
                    "ids_per_sample": ids / clock.drawn if clock.drawn else None,
                    "hit_rate": rates[table.name],
                    "grad_norm": norms[path, table.name],
                }
            )
    return found


def of_ranks(trainer: Trainer) -> dict[str, Any]:
    """Describe the balance of several ranks, and the share of their exchanges that overlapped with steps."""
    if trainer.ranks.size == 1:
        return {}
    replicas = trainer.model.wire.replicas if isinstance(trainer.model, Distributed) else None
    averaged: dict[str, Any] = {}
    if replicas is not None:
        averaged["replicas"] = replicas.link.size
    if replicas is not None and not replicas.exact:
        averaged |= {"syncs": replicas.syncs, "sync_waited_s": replicas.waited_s}
    return {
        **averaged,
        **Balance(trainer.model).record(),
        "ranks": trainer.ranks.size,
        "ids_exchange_s": trainer.prefetcher.exchange_s,
        "ids_exchange_hidden_share": trainer.prefetcher.hidden_share,
    }
