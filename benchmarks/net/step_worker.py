"""A rank that trains a DLRM of many small tables on random ids; prints seconds and bytes of a step as JSON.

python -m benchmarks.net.step_worker '{"scheme": "row", "forward": "fp32", "backward": "fp32", "steps": 8}'

With ``"replicas": 2`` ranks form groups that are averaged after every step, and with ``"dense_sync": true`` all rows
are, not those that were touched.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

import hotbed as hb
from hotbed.embed import sync
from hotbed.plan.traffic import step_traffic

TABLES, ROWS, DIM, BATCH = 8, 50_000, 64, 512
"""Tables, their rows and columns, samples of a rank."""
WARMUP = 3
SYNC = ("touched rows", "bitmap of touched rows", "rows of replicas")
"""Exchanges of replicas."""


def model_and_plan(scheme: str, world_size: int) -> tuple[hb.nn.DLRM, hb.Plan]:
    """The model, and where its tables are."""
    tables = [hb.Table(f"t{i}", rows=ROWS, dim=DIM) for i in range(TABLES)]
    features = [hb.Feature(t.name, table=t.name) for t in tables]
    torch.manual_seed(0)
    model = hb.nn.DLRM(tables, features, 13, bottom=(64, DIM), top=(64, 1))
    return model, hb.make_plan(tables, world_size, scheme)


def batches(rank: int, count: int) -> list[hb.Batch]:
    """Random batches of a rank."""
    draw = torch.Generator().manual_seed(rank)
    return [
        hb.Batch(
            sparse=hb.Jagged.from_dict(
                {f"t{i}": torch.randint(0, ROWS, (BATCH,), generator=draw) for i in range(TABLES)}
            ),
            dense=torch.randn(BATCH, 13, generator=draw),
            labels=torch.rand(BATCH, 1, generator=draw).round(),
        )
        for _ in range(count)
    ]


def distinct_rows(ids: int) -> float:
    """Expected distinct rows of a table among so many ids."""
    return ROWS * (1 - (1 - 1 / ROWS) ** ids)


def sync_bytes(size: int, replicas: int, *, dense: bool) -> float:
    """What a rank sends to average rows, of which row-wise AdaGrad has a moment each, after a step."""
    shards = size // replicas
    slots = TABLES * ROWS / shards
    own, all_touched = (TABLES * distinct_rows(BATCH * n) / shards for n in (shards, size))
    others, row = replicas - 1, 4 * (DIM + 1)
    told = 0.0 if dense else others * min(4 * own, slots / 8)
    return told + 2 * others / replicas * row * (slots if dense else all_touched)


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a step (median), bytes that this rank sent in it, and what the plan says that it sends."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    logging.getLogger("hotbed").setLevel(logging.ERROR)  # codecs announce that they round
    replicas = job.get("replicas", 1)
    if job.get("dense_sync"):
        sync.choose = lambda *_: "nothing"
    model, plan = model_and_plan(job["scheme"], size // replicas)
    codecs = {"forward": job["forward"], "backward": job["backward"]}
    dense_values = sum(p.numel() for p in model.parameters())
    model = hb.distribute(
        model, plan, forward_codec=codecs["forward"], backward_codec=codecs["backward"], replicas=replicas
    )
    dense = torch.optim.SGD(model.parameters(), lr=0.01)
    sparse = hb.optim.RowWiseAdagrad(model, lr=0.01)
    seconds: list[float] = []
    links = [model.wire.link, model.link, model.dense_link]
    links += [] if replicas == 1 else model.wire.replicas.of_thread
    before: Counter[str] = Counter()
    for i, batch in enumerate(batches(rank, WARMUP + job["steps"])):
        if i == WARMUP:
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
    distinct = distinct_rows(BATCH)
    touched = distinct_rows(BATCH * size // replicas)
    tables = plan.by_table
    expected = step_traffic(
        plan,
        dict.fromkeys(tables, distinct),
        touched=dict.fromkeys(tables, touched),
        row_sums=1,
        **codecs,
    )
    dist.barrier()
    return {
        "step_s": statistics.median(seconds[WARMUP:]),
        "sent_bytes": sum(sent.values()) / job["steps"],
        "predicted_bytes": expected[rank % plan.world_size].total
        + 2 * (size - 1) / size * 4 * dense_values
        + sync_bytes(size, replicas, dense=bool(job.get("dense_sync"))),
        "sync_bytes": sum(n for what, n in sent.items() if what in SYNC) / job["steps"],
        "steps": WARMUP + job["steps"],
    }


if __name__ == "__main__":
    print(json.dumps(train(json.loads(sys.argv[1]))))
