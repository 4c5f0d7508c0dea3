"""Say in a run's summary what its checkpoints, its memory, its ranks and its evaluations came to."""

from __future__ import annotations

from dataclasses import asdict
from itertools import chain
from typing import Any

from hotbed.embed import Distributed, collections_of
from hotbed.optim import SparseOptimizer
from hotbed.plan.cost import table_bytes
from hotbed.store import Traffic
from hotbed.train.retention import KeepBest
from hotbed.train.throughput import Balance
from hotbed.train.trainer import Trainer


def best_step(trainer: Trainer) -> int | None:
    """Step of the best evaluation, to whose model training went back; None where none was kept."""
    return next((callback.step for callback in trainer.callbacks if isinstance(callback, KeepBest)), None)


def of_checkpoints(trainer: Trainer) -> dict[str, Any]:
    """What a summary says of checkpoints: how many, and the seconds that training waited for them."""
    records = trainer.saver.records
    return {"saved": len(records), "stalled_s": sum(record["stalled_s"] for record in records)}


def of_memory(trainer: Trainer) -> dict[str, Any]:
    """What a summary says of rows that are not all in the device's memory."""
    collections, traffic = collections_of(trainer.model).values(), trainer.traffic
    if traffic == Traffic():
        return {}
    held = {"table_bytes": sum(c.nbytes for c in collections), "disk_bytes": sum(c.disk_bytes for c in collections)}
    return {"memory": {**held, "hit_rate": traffic.hit_rate, **asdict(traffic)}}


def of_tables(trainer: Trainer) -> list[dict[str, Any]]:
    """What a summary says of each table."""
    clock = trainer.clock
    moments = {
        name: optimizer.rule.moments
        for optimizer in trainer.optimizers.values()
        if isinstance(optimizer, SparseOptimizer)
        for group in optimizer.param_groups
        for name in group["tables"]
    }
    collections = collections_of(trainer.model)
    norms = trainer.backward.logged.norms(trainer.ranks.add, trainer.ranks.size)
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
    """What a summary says of several ranks: how much of their exchanges the steps hid, and the whole run's balance."""
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
