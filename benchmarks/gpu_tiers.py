"""Measure rows outside the device's memory, which are read in place over the bus or copied to a cache on the device.

Each measurement takes turns with its limit: a streaming copy from page-locked memory of the host (for the bus), or one
inside the device's memory (for the cache). Rows in place cross the bus once per distinct row. The operations of a cache
read and write keys, times and counts of sets, and records.

Then whole steps of DLRM: with all cold rows in the host's memory, read in place. The part T0 has the tables of Criteo
1TB without a threshold (421 GiB as float32). Its cold rows are int8 records in the host's memory or in a file, with a
cache on the device. Nothing is read ahead, so the time of misses shows.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import hotbed as hb
from benchmarks.gpu import KernelRecord, Sizes, draw_ids
from benchmarks.kernels.meter import Limit, Way
from benchmarks.kernels.ops import Job
from benchmarks.process_memory import kib_of
from hotbed.data.formats.zipf_source import CRITEO_1TB
from hotbed.embed import tables_on_meta
from hotbed.ops import BagLayout, CacheTags, select
from hotbed.ops.layout import FREE
from hotbed.plan.tier_choice import place_in_tiers
from hotbed.specs import RowDtype, row_bytes
from hotbed.store import Span, Storage, memory

KEYS = 1 << 20  # keys of a batch, and a quarter of the slots of the cache
LARGEST = 100 << 30  # bytes of the largest arena, if half of the host's free memory is as much
LARGEST_S = 25  # seconds that are reserved for it, because its pages are locked one by one


class Placement(NamedTuple):
    """The tables of a model and their memories."""

    tables: str
    tier: Any
    device_bytes: int
    cache_rows: int = 0
    host: Any = "records"


PLACEMENTS = {
    "in_place": Placement("criteo_1tb_t15", "host", 1 << 30, host="uva"),
    "host_cached": Placement("criteo_1tb_t0", "host", 8 << 30, 16 << 20),
    "disk_cached": Placement("criteo_1tb_t0", "disk", 8 << 30, 16 << 20),
}


class Bus:
    """Streaming copies between the host's page-locked memory and the device."""

    def __init__(self, sizes: Sizes) -> None:
        self.nbytes = sizes.copy_bytes // 4
        self._host = memory.staging((self.nbytes,), torch.uint8, sizes.device)
        self._own = torch.ones(self.nbytes, dtype=torch.uint8, device=sizes.device)

    def jobs(self, record: KernelRecord) -> Iterator[Job]:
        for name, call in (("copy_from_device", self._from_device), ("copy_to_device", self._to_device)):
            yield Job(name, None, None, self.nbytes, record.streamed(self.nbytes), call)

    def limit(self, nbytes: int) -> Limit:
        return Limit("copy_to_device", [Way(self._to_device, nbytes / self.nbytes)])

    def _from_device(self) -> None:
        self._host.copy_(self._own, non_blocking=True)

    def _to_device(self) -> None:
        self._own.copy_(self._host, non_blocking=True)


def in_place(record: KernelRecord, bus: Bus, dtype: RowDtype, nbytes: int) -> None:
    """Measure lookups of random rows in the host's memory, which the kernel reads in place."""
    sizes = record.sizes
    dim, count = max(sizes.dims), sizes.batch * (1 if sizes.tiny else 8)
    rows = nbytes // row_bytes(dtype, dim)
    storage = Storage("host", host="uva")
    store = storage.make([Span(rows)], dim, dtype=dtype, device=sizes.device, backend="triton")
    ids = torch.randint(0, rows, (count,), device=sizes.device)
    features = torch.tensor([[0, 1, 0, 0, 0, 0, 0]], device=sizes.device)
    offsets = torch.empty(0, count + 1, dtype=torch.int64, device=sizes.device)
    bags = BagLayout(ids, features, offsets, None, count, count, False, 1)
    out = torch.empty(count, 1, dim, device=sizes.device)
    distinct = len(ids.unique())
    moved = distinct * row_bytes(dtype, dim)
    job = Job("in_place", "uniform", distinct, moved, bus.limit(moved), lambda: store.lookup(bags, out))
    record.run([job], dtype=dtype, dim=dim, arena_bytes=store.nbytes)


def cache(record: KernelRecord) -> None:
    sizes = record.sizes
    ops, device = select(sizes.device, "triton"), sizes.device
    ways, keys = 32, 8 if sizes.tiny else KEYS
    record_bytes = 4 * max(sizes.dims) + 4
    places = -(-4 * keys // ways) * ways

    def run(kernel: str, nbytes: int, call: Callable[[], object], **about: object) -> None:
        record.run([Job(kernel, None, None, nbytes, record.streamed(nbytes), call)], keys=keys, **about)

    for policy in ("lru", "lfu"):
        tags = _tags(places, ways, policy == "lfu", device)
        wanted, now = torch.arange(keys, device=device), iter(range(1, 1 << 30))
        for _ in range(4):  # full
            ops.cache_take(tags, wanted.add_(keys), next(now))

        def take(tags: CacheTags = tags, wanted: Tensor = wanted, now: Iterator[int] = now) -> None:
            ops.cache_take(tags, wanted.add_(keys), next(now))  # keys that were never there

        run("cache_take", keys * (24 + 48 * ways), take, ways=ways, policy=policy)
    run("cache_find", keys * (16 + 8 * ways), lambda: ops.cache_find(tags, wanted), ways=ways)
    at = torch.randperm(places, device=device)[:keys]
    run("cache_use", keys * 32, lambda: ops.cache_use(tags, at, 1 << 20))
    slab = torch.zeros(places, record_bytes, dtype=torch.uint8, device=device)
    records = torch.zeros(keys, record_bytes, dtype=torch.uint8, device=device)
    size = keys * (2 * record_bytes + 8)
    run("cache_read", size, lambda: ops.cache_read(slab, at, records), record_bytes=record_bytes)
    run("cache_write", size, lambda: ops.cache_write(slab, at, records), record_bytes=record_bytes)


def _tags(places: int, ways: int, by_count: bool, device: torch.device) -> CacheTags:
    free = torch.full((places,), FREE, dtype=torch.int64, device=device)
    return CacheTags(free, torch.zeros_like(free), torch.zeros_like(free), ways, by_count)


def _free() -> int:
    limit = Path("/sys/fs/cgroup/memory.max")
    granted = limit.read_text().strip() if limit.is_file() else "max"
    available = kib_of(Path("/proc/meminfo"))["MemAvailable"] << 10
    return min(available, int(granted) if granted.isdigit() else 1 << 60)


def make_model(sizes: Sizes, where: Placement) -> Any:
    """Return a DLRM with 1 % float32 rows and 99 % int8 rows in two memories."""
    dim = max(sizes.dims)
    rows = sizes.rows if sizes.tiny else CRITEO_1TB[where.tables]
    tables = [hb.Table(f"C{i}", rows=n, dim=dim, dtype="int8", fp32_rows=-(-n // 100)) for i, n in enumerate(rows)]
    features = [hb.Feature(f"f{i}", table=table.name) for i, table in enumerate(tables)]
    bottom, top = ((32, dim), (32, 1)) if sizes.tiny else ((512, 256, dim), (1024, 1024, 512, 256, 1))
    with torch.device(sizes.device), tables_on_meta():
        model = hb.nn.DLRM(tables, features, dense_features=13, bottom=bottom, top=top, backend="triton")
    budget = {"device": 500 if sizes.tiny else where.device_bytes}
    cache_rows = min(where.cache_rows, 8) if sizes.tiny else where.cache_rows
    plan = place_in_tiers(hb.make_plan(tables, 1), tables, budget, where.tier, cache_rows=cache_rows)
    return hb.distribute(model, plan, memory=hb.MemoryOptions(host=where.host), device=sizes.device)


def step(sizes: Sizes, name: str, deadline: float) -> dict[str, Any]:
    """Measure steps on new batches until time is up."""
    where, device = PLACEMENTS[name], sizes.device
    model = make_model(sizes, where)
    names = [f.name for f in model.embeddings.features]
    rows = tuple(table.rows for table in model.embeddings.tables.values())
    dense, sparse = torch.optim.SGD(model.parameters(), lr=0.01), hb.optim.RowWiseAdagrad(model, lr=0.01)
    seconds: list[float] = []
    least, before = 2 if sizes.tiny else 6, model.embeddings.traffic
    while len(seconds) < least or (not sizes.tiny and time.monotonic() < deadline):
        ids = hb.Jagged(names, draw_ids(rows, sizes.batch, len(seconds), device), batch_size=sizes.batch)
        model.embeddings.verify(ids)
        numbers, labels = torch.randn(sizes.batch, 13, device=device), torch.ones(sizes.batch, 1, device=device)
        _wait(device)
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(hb.Batch(sparse=ids, dense=numbers, labels=labels))
        loss = F.binary_cross_entropy_with_logits(logits.float(), labels)
        dense.zero_grad()
        sparse.zero_grad()
        loss.backward()
        dense.step()
        sparse.step()
        _wait(device)
        seconds.append(time.perf_counter() - start)
    kept = seconds[len(seconds) // 2 :]
    moved = model.embeddings.traffic - before
    step_s = statistics.median(kept)
    return {
        "tables": "tiny" if sizes.tiny else where.tables,
        "rows": sum(rows),
        "batch": sizes.batch,
        "steps": len(seconds),
        "steps_per_s": 1 / step_s,
        "samples_per_s": sizes.batch / step_s,
        "first_step_s": seconds[0],
        "hit_rate": moved.hit_rate,
        **{key: getattr(moved, key) / len(seconds) for key in ("to_device_bytes", "from_device_bytes", "misses")},
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def steps(record: KernelRecord, *names: str, reserved_s: float = 0) -> None:
    """Measure steps of some placements, which share the time that is left."""
    end = record.deadline - reserved_s
    for i, name in enumerate(names):
        if not record.has_time(f"step {name}"):
            return
        until = time.monotonic() + (end - time.monotonic()) / (len(names) - i) / 2
        about = {"kernel": "step", "placement": name}
        record.attempt(about, lambda name=name, until=until: step(record.sizes, name, until))
        gc.collect()


def t0(out: Path, budget_s: float) -> int:
    """Measure the bus, and steps of T0 with rows in the host's memory and in a file."""
    sizes = Sizes.choose().begin()
    record = KernelRecord(sizes, out, budget_s)
    record.run(Bus(sizes).jobs(record))
    steps(record, "host_cached", "disk_cached")
    return record.status


def main(out: Path, budget_s: float) -> int:
    """Measure rows in place, the operations of a cache, and steps with rows in place."""
    sizes = Sizes.choose().begin()
    record, bus = KernelRecord(sizes, out, budget_s), Bus(sizes)
    record.run(bus.jobs(record))
    small, large = (1 << 16, 1 << 17) if sizes.tiny else (1 << 32, min(LARGEST, _free() // 2))
    measures: dict[str, Callable[[], None]] = {
        "in_place fp32": lambda: in_place(record, bus, "fp32", small),
        "in_place int8": lambda: in_place(record, bus, "int8", small),
        "cache": lambda: cache(record),
        "steps": lambda: steps(record, "in_place", reserved_s=LARGEST_S),
        "in_place, the largest": lambda: in_place(record, bus, "fp32", large),
    }
    for name, measure in measures.items():
        record.attempt({"kernel": name}, measure)
        gc.collect()
    return record.status
