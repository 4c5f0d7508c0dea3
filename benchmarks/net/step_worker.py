"""Train a DLRM of many small tables on random ids as one rank, and print seconds and bytes of a step as JSON.

python -m benchmarks.net.step_worker '{"scheme": "row", "forward": "fp32", "backward": "fp32", "steps": 8}'

With ``"replicas": 2``, ranks form groups that are averaged after every step or ``"sync_every"`` steps. With
``"dense_sync": true``, all rows are averaged instead of the updated ones. ``"zipf"`` is the exponent of the popularity.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

import hotbed as hb
from benchmarks.net.traffic import step_traffic
from hotbed.data.formats.zipf_source import ZipfLaw
from hotbed.embed import replicas as embed_replicas
from hotbed.plan.cost import table_bytes

TABLES, ROWS, DIM, BATCH = 8, 50_000, 64, 512  # tables, their rows and columns, samples of a rank
WARMUP = 3
SYNC = ("touched rows", "bitmap of touched rows", "rows of replicas")  # exchanges of replicas


class Ids:
    """Ids of a table: uniform, or by Zipf's law in an order that is independent of tiles."""

    def __init__(self, zipf: float) -> None:
        self._law = ZipfLaw(ROWS, zipf)
        self._row_of_rank = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
        weights = torch.arange(1, ROWS + 1, dtype=torch.float64) ** -zipf
        self._shares = weights / weights.sum()

    def draw(self, rank: int, table: int, batch: int) -> torch.Tensor:
        counters = np.arange(batch * BATCH, (batch + 1) * BATCH, dtype=np.uint64)
        return self._row_of_rank[torch.from_numpy(self._law.draw((rank, table), counters))]

    def distinct(self, ids: int) -> float:
        """Return the expected number of distinct rows among this many ids of a table."""
        return float((1 - (1 - self._shares) ** ids).sum())


def batches(rank: int, count: int, ids: Ids) -> list[hb.Batch]:
    draw = torch.Generator().manual_seed(rank)
    return [
        hb.Batch(
            sparse=hb.Jagged.from_dict({f"t{table}": ids.draw(rank, table, i) for table in range(TABLES)}),
            dense=torch.randn(BATCH, 13, generator=draw),
            labels=torch.rand(BATCH, 1, generator=draw).round(),
        )
        for i in range(count)
    ]


def sync_bytes(size: int, replicas: int, every: int, ids: Ids, *, dense: bool) -> float:
    """Return the bytes that a rank sends per step to average rows and their moments of row-wise AdaGrad."""
    shards = size // replicas
    slots = TABLES * ROWS / shards
    own, all_touched = (TABLES * ids.distinct(BATCH * every * n) / shards for n in (shards, size))
    others, row = replicas - 1, table_bytes(hb.Table("t", 1, DIM), hb.optim.RowWiseAdagrad.rule.moments)
    list_bytes = 0.0 if dense else others * min(4 * own, slots / 8)
    return (list_bytes + 2 * others / replicas * row * (slots if dense else all_touched)) / every


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of a step, the bytes that this rank sent, and the predicted bytes."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    logging.getLogger("hotbed").setLevel(logging.ERROR)  # codecs announce that they round
    replicas, every = job.get("replicas", 1), job.get("sync_every", 1)
    ids = Ids(job.get("zipf", 0.0))
    warmup = -(-WARMUP // every) * every
    steps = -(-job["steps"] // every) * every
    if job.get("dense_sync"):
        embed_replicas.choose_list_format = lambda *_: "nothing"
    specs = [hb.Table(f"t{i}", rows=ROWS, dim=DIM) for i in range(TABLES)]
    torch.manual_seed(0)
    model = hb.nn.DLRM(specs, [hb.Feature(t.name, table=t.name) for t in specs], 13, bottom=(64, DIM), top=(64, 1))
    plan = hb.make_plan(specs, size // replicas, job["scheme"])
    dense_values = sum(p.numel() for p in model.parameters())
    options = hb.ParallelOptions(
        forward_codec=job["forward"], backward_codec=job["backward"], replicas=replicas, sync_every=every
    )
    model = hb.distribute(model, plan, options)
    dense = torch.optim.SGD(model.parameters(), lr=0.01)
    sparse = hb.optim.RowWiseAdagrad(model, lr=0.01)
    seconds: list[float] = []
    links = [model.wire.link, model.link, model.dense_link]
    links += [] if replicas == 1 else model.wire.replicas.of_thread
    before: Counter[str] = Counter()
    for i, batch in enumerate(batches(rank, warmup + steps, ids)):
        if i == warmup:
            before = sum((link.sent_bytes for link in links), Counter())
        dist.barrier()
        start = time.perf_counter()
        loss = F.binary_cross_entropy_with_logits(model(batch), batch.labels)
        dense.zero_grad()
        sparse.zero_grad()
        loss.backward()
        dense.step()
        sparse.step()
        model.embeddings.settle()  # nothing but the next step would hide it here
        seconds.append(time.perf_counter() - start)
    sent = sum((link.sent_bytes for link in links), Counter()) - before
    distinct, touched = (dict.fromkeys(plan.by_table, ids.distinct(n)) for n in (BATCH, BATCH * size // replicas))
    codecs = {"forward": job["forward"], "backward": job["backward"]}
    expected = step_traffic(plan, distinct, touched=touched, row_sums=1, **codecs)
    dist.barrier()
    return {
        "step_s": statistics.median(torch.tensor(seconds[warmup:]).view(-1, every).mean(1).tolist()),
        "sent_bytes": sum(sent.values()) / steps,
        "predicted_bytes": expected[rank % plan.world_size].total
        + 2 * (size - 1) / size * 4 * dense_values
        + sync_bytes(size, replicas, every, ids, dense=bool(job.get("dense_sync"))),
        "sync_bytes": sum(n for what, n in sent.items() if what in SYNC) / steps,
        "steps": warmup + steps,
    }


if __name__ == "__main__":
    print(json.dumps(train(json.loads(sys.argv[1]))))
