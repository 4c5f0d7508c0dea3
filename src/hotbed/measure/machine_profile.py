"""Measure this machine for the planner: ``hotbed doctor --measure FILE`` writes a hardware profile.

Every figure is a median over repeats, with its spread: (largest − smallest) ÷ median. `hotbed.plan.hardware.Hardware`
documents the figures. The measurements use hotbed's own kernels and exchanges.

Kernels are timed on allocated pages and with cold caches. Before every call, a buffer larger than the caches is read,
so that the call reads all its data from memory, and no cache line is waiting to be written back.
"""

from __future__ import annotations

import mmap
import os
import platform
import random
import shutil
import statistics
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hotbed import large_tensors
from hotbed.config import Device
from hotbed.data.formats.zipf_source import ZipfLaw
from hotbed.embed import EmbeddingCollection
from hotbed.embed.lookup_gradients import TableUpdater
from hotbed.errors import RecipeError
from hotbed.machine import memory_bytes, usable_cores
from hotbed.measure.rank_exchanges import KINDS, exchange_seconds, rates, seconds_per_message
from hotbed.measure.step_overheads import StepSizes, measure_overheads
from hotbed.ops import BackendName, BagLayout, RuleStep
from hotbed.optim import Moment, RowWiseAdagrad, SparseOptimizer
from hotbed.plan.cost import table_bytes
from hotbed.plan.hardware import DIMENSIONS, Hardware, format_quantity
from hotbed.specs import Feature, Table
from hotbed.store import DenseStore, Span
from hotbed.store.memory import available_bytes, staging
from hotbed.torch_private import has_onednn_linear, onednn_product
from hotbed.train.numerics import resolve_device
from hotbed.train.runs.report import environment, size

DIMS = (16, 32, 64, 128)
"""Columns of the float32 rows of lookups and updates: 64 to 512 bytes."""
TABLE_BYTES = {"cpu": 1 << 30, "cuda": 4 << 30}
"""Bytes of the tables of lookups and updates. They exceed the caches, also with --quick."""
DISK_BYTES = 1 << 30
"""Bytes of the file for the measurement of the disk."""
QUICK = 4
"""Divisor of sizes with --quick."""
STEPS, QUICK_STEPS = StepSizes(), StepSizes(table_bytes=StepSizes.table_bytes // QUICK, steps=6, repeats=3)
MEASURED, COUNTED = "measured", "counted"
_TABLES = 8
_LAUNCHES = 200

Progress = Callable[[str], None]
"""Function that receives the name of the next stage."""


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """Options of ``hotbed doctor --measure``."""

    device: Device = "auto"
    """Device. ``auto`` is ``cuda`` if a GPU is available, otherwise ``cpu``."""
    ranks: list[int] | None = None
    """Numbers of processes for exchanges (default: 2 and 4, or 2, 4, … up to all GPUs)."""
    quick: bool = False
    """Measure in a fraction of the time: smaller tables and transfers, fewer repeats."""

    def __post_init__(self) -> None:
        if self.ranks is not None and (not self.ranks or min(self.ranks) < 2):
            raise RecipeError(f"--ranks: got {self.ranks}, expected numbers of at least 2, e.g. [2,4]")

    @property
    def repeats(self) -> int:
        """Number of repeats of each measurement."""
        return 3 if self.quick else 7

    @property
    def sizes(self) -> list[int]:
        """Bytes of transfers."""
        return [1 << power for power in ((10, 16, 20) if self.quick else range(10, 25, 2))]

    @property
    def step_sizes(self) -> StepSizes:
        """Sizes of the training steps."""
        return QUICK_STEPS if self.quick else STEPS

    def worlds(self, device: torch.device) -> list[int]:
        """Return the numbers of ranks for exchanges."""
        if device.type == "cpu":
            return sorted(self.ranks or ([2] if self.quick else [2, 4]))
        gpus = torch.cuda.device_count()
        if self.ranks is not None and max(self.ranks) > gpus:
            raise RecipeError(
                f"--ranks: got {self.ranks}, expected at most {gpus}, the number of GPUs. Use fewer, or --device cpu"
            )
        return sorted(self.ranks or [1 << power for power in range(1, gpus.bit_length())])


def measure(options: MeasureOptions, folder: Path, progress: Progress) -> dict[str, Any]:
    """Measure this machine and the disk of ``folder``. Return a hardware profile as plain values."""
    device = resolve_device(options.device, "device")
    worlds = options.worlds(device)
    sources = {MEASURED: _when(device, options), COUNTED: "limits of this process, as the system reports them"}
    figures = _counted(device, worlds, folder)
    meter = Meter(device, options.repeats)
    figures |= _streams(meter, options, progress)
    figures |= _rows(meter, options, progress)
    figures["flops"] = _flops(meter, options, progress)
    del meter  # frees its buffer for the disk's file and the ranks
    progress("kernel launches")
    figures["launch_s"] = _figure("launch_s", _launches(device, options.repeats))
    figures |= _disk(folder, options, sources, progress)
    figures |= _exchanges(worlds, device, options, figures, sources, progress)
    document = _document(figures, sources, device)
    hardware = Hardware.from_dict(document, "the measured profile")  # checks that the profile is valid
    if device.type == "cpu":
        found = measure_overheads(worlds, hardware, options.step_sizes, progress)
        figures |= {name: _figure(name, samples) for name, samples in found.items()}
        document = _document(figures, sources, device)
        Hardware.from_dict(document, "the measured profile")
    return document


# -- stages ---------------------------------------------------------------------------------------------------------


def _document(figures: Mapping[str, Any], sources: Mapping[str, str], device: torch.device) -> dict[str, Any]:
    return {
        "description": f"{environment(device)['hardware']}, measured {datetime.now(UTC):%Y-%m-%d}",
        "measured": True,
        "sources": sources,
        "figures": {name: figures[name] for name in (*DIMENSIONS, "cores_shared") if name in figures},
    }


def _when(device: torch.device, options: MeasureOptions) -> str:
    how = "hotbed doctor --measure --quick" if options.quick else "hotbed doctor --measure"
    about = environment(device)
    return (
        f"{how}, {datetime.now(UTC).isoformat(timespec='minutes')}, hotbed {about['hotbed']}, torch {about['torch']}, "
        f"{torch.get_num_threads()} threads, {platform.system()} {platform.release()}; medians of {options.repeats}"
    )


def _counted(device: torch.device, worlds: Sequence[int], folder: Path) -> dict[str, Any]:
    host = available_bytes(torch.device("cpu")) or memory_bytes()
    shared = device.type == "cpu"
    own = host if shared else torch.cuda.get_device_properties(device).total_memory
    counts = {
        "ranks_per_node": max(worlds, default=1) if shared else torch.cuda.device_count(),
        "cores_per_node": usable_cores(),
        "device_bytes": own,
        "host_bytes": host,
        "disk_bytes": shutil.disk_usage(folder).free,
    }
    return {name: {"value": value, "source": COUNTED} for name, value in counts.items()} | {"cores_shared": shared}


def _streams(meter: Meter, options: MeasureOptions, progress: Progress) -> dict[str, Any]:
    """Measure copies in the device's memory, in the host's memory, and between them."""
    cpu = torch.device("cpu")
    progress("copies in memory")
    own = _rates(meter, streaming_copy(meter.device), 2 * COPY_BYTES)
    if meter.device == cpu:
        return {name: _figure(name, own) for name in ("stream", "host_stream", "host_link")}
    host = _rates(Meter(cpu, options.repeats), streaming_copy(cpu), 2 * COPY_BYTES)
    page_locked = staging((COPY_BYTES,), torch.uint8, meter.device).fill_(1)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=meter.device)
    link = _rates(meter, lambda: target.copy_(page_locked, non_blocking=True), COPY_BYTES)
    found = {"stream": own, "host_stream": host, "host_link": link}
    return {name: _figure(name, values) for name, values in found.items()}


def _rates(meter: Meter, move: Callable[[], object], nbytes: int) -> list[float]:
    """Return the bytes/s of each repeat of a call that moves ``nbytes``."""
    return [nbytes / meter.seconds(move) for _ in range(1 + meter.repeats)][1:]


def _rows(meter: Meter, options: MeasureOptions, progress: Progress) -> dict[str, Any]:
    """Measure lookups and updates of random rows, by bytes per row."""
    gather: dict[int, list[float]] = {}
    scatter: dict[int, list[float]] = {}
    for dim in DIMS[:: len(DIMS) - 1] if options.quick else DIMS:
        progress(f"rows of {4 * dim} bytes")
        gather[4 * dim], scatter[4 * dim] = _row_rates(meter, options, dim)
    return {"gather": _figure("gather", gather), "scatter": _figure("scatter", scatter)}


def _tables(tables: Sequence[Table], batch: int, device: torch.device) -> tuple[DenseStore, RuleStep, Tensor]:
    """Return a store with tables, a step of row-wise AdaGrad, and uniform ids of a batch, one per sample and table."""
    moments = RowWiseAdagrad.rule.moments
    needed = sum(table_bytes(t, moments) for t in tables) + EVICT_BYTES + 2 * COPY_BYTES
    free = available_bytes(device)
    if free is not None and needed > free:
        raise RecipeError(
            f"{device.type} memory: got {size(free)} free, expected {size(needed)} for the measurement. Free some "
            "memory, or use --quick"
        )
    step = rule_step(tables, lambda module: RowWiseAdagrad(module, lr=0.01), device)
    counters = np.arange(batch, dtype=np.uint64)
    ids = [torch.from_numpy(ZipfLaw(t.rows, 0.0).draw((0, i), counters)) for i, t in enumerate(tables)]
    return filled_store(tables, step.rule.moments, device), step, torch.cat(ids).to(device)


def _row_rates(meter: Meter, options: MeasureOptions, dim: int) -> tuple[list[float], list[float]]:
    device, batch = meter.device, 65536 if meter.device.type == "cuda" else 8192
    nbytes = TABLE_BYTES[device.type] // (QUICK if options.quick else 1)
    tables = [Table(f"t{i}", nbytes // (4 * dim * _TABLES), dim) for i in range(_TABLES)]
    store, step, ids = _tables(tables, batch, device)
    bags = bag_layout(ids, [table.rows for table in tables], batch)
    found = store.occurrences(bags)
    groups = store.ops.group(found)
    out = store.empty((batch, _TABLES, dim), torch.float32)
    grad = torch.randn(batch * _TABLES, dim, device=device).mul_(1e-3)
    lookup: Callable[[], object] = lambda: store.lookup(bags, out)  # noqa: E731
    of_update: list[Callable[[], object]] = [
        lambda: store.occurrences(bags),
        lambda: store.ops.group(found),
        lambda: store.ops.update(step, store.rows, store.moments, found, groups, grad),
    ]
    distinct = int(groups.counts[0])
    rows, vectors = 4 * dim * distinct, 4 * dim * _TABLES * batch
    moments = sum(distinct * moment[0].numel() * moment.element_size() for moment in store.moments.values())
    seconds = [(meter.seconds(lookup), sum(map(meter.seconds, of_update))) for _ in range(1 + meter.repeats)][1:]
    lookups = [(rows + vectors) / of_lookup for of_lookup, _ in seconds]
    updates = [(vectors + 2 * (rows + moments)) / of_updates for _, of_updates in seconds]
    return lookups, updates


def _flops(meter: Meter, options: MeasureOptions, progress: Progress) -> dict[str, Any]:
    """Measure products of square matrices, by dtype."""
    on_gpu = meter.device.type == "cuda"
    size = (8192 if on_gpu else 1536) // (2 if options.quick else 1)
    found: dict[str, list[float]] = {}
    for name in ("fp32", "tf32", "bf16", "fp16") if on_gpu else ("fp32", "bf16"):
        progress(f"matrix products in {name}")
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)
        a, b = (torch.randn(size, size, device=meter.device).to(dtype) for _ in range(2))
        with _tf32(name == "tf32"):
            ways = ways_to_multiply(a, b)
            seconds = [min(map(meter.seconds, ways)) for _ in range(1 + meter.repeats)][1:]
        found[name] = [2 * size**3 / s for s in seconds]
    return _figure("flops", found)


@contextmanager
def _tf32(on: bool) -> Generator[None]:
    former = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if on else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(former)


def _launches(device: torch.device, repeats: int) -> list[float]:
    """Measure the seconds of an almost empty lookup, launched in a sequence without waiting."""
    store, _, ids = _tables([Table("t0", 16, 16)], 1, device)
    bags = bag_layout(ids, [16], 1)
    out = store.empty((1, 1, 16), torch.float32)
    taken: list[float] = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        for _ in range(_LAUNCHES):
            store.lookup(bags, out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append((time.perf_counter() - start) / _LAUNCHES)
    return taken[1:]


def _disk(folder: Path, options: MeasureOptions, sources: dict[str, str], progress: Progress) -> dict[str, Any]:
    progress("random reads from the disk")
    nbytes = DISK_BYTES // (QUICK if options.quick else 1)
    found = disk_rates(folder, nbytes, options.repeats)
    sources["disk"] = (
        f"measured like the other figures: {DISK_THREADS} threads, a file of {nbytes >> 20} MiB; {found.how}"
    )
    figures = {"disk_read": found.read, "disk_latency": found.latency}
    return {name: _figure(name, values, "disk") for name, values in figures.items()}


def _exchanges(
    worlds: Sequence[int],
    device: torch.device,
    options: MeasureOptions,
    figures: Mapping[str, Any],
    sources: dict[str, str],
    progress: Progress,
) -> dict[str, Any]:
    """Measure exchanges by collective, ranks and bytes, and derive the figures of the links."""
    if not worlds:
        sources["alone"] = "not measured, because there is one GPU: the figure of its link to the host"
        link = {"value": figures["host_link"]["value"], "source": "alone"}
        message = {"value": figures["launch_s"]["value"], "source": "alone"}
        return {"node_link": link, "network": link, "message_s": message}
    found: dict[str, dict[int, dict[int, list[float]]]] = {kind: {} for kind in KINDS}
    messages: list[float] = []
    for ranks in worlds:
        progress(f"exchanges between {ranks} ranks")
        seconds = exchange_seconds(ranks, options.sizes, options.repeats, device)
        for kind in KINDS:
            found[kind][ranks] = rates(kind, ranks, seconds[kind])
        if ranks == worlds[0]:
            messages = seconds_per_message(ranks, seconds["all_to_all"])
    pair = found["all_to_all"][worlds[0]]
    fastest = max(pair.values(), key=statistics.median)
    sources["one_node"] = (
        "not measured, because there is one machine: the figure between its ranks. Replace it by your network's figure"
    )
    return {
        "node_link": _figure("node_link", fastest),
        "network": _figure("network", fastest, "one_node"),
        "message_s": _figure("message_s", messages),
        **{kind: _figure(kind, found[kind]) for kind in KINDS},
    }


# -- figures --------------------------------------------------------------------------------------------------------


def _figure(name: str, samples: Any, source: str = MEASURED) -> dict[str, Any]:
    """Return the profile's entry of samples or of a mapping of samples: median, source and spread."""
    dimension = DIMENSIONS[name]

    def each(of: Any, what: Callable[[Sequence[float]], Any]) -> Any:
        return {key: each(v, what) for key, v in of.items()} if isinstance(of, dict) else what(of)

    return {
        "value": each(samples, lambda values: format_quantity(statistics.median(values), dimension)),
        "source": source,
        "spread": each(samples, _spread),
    }


def _spread(values: Sequence[float]) -> float:
    """Return (largest − smallest) ÷ median, or ÷ the largest if the median is 0, e.g. of differences of steps."""
    return round((max(values) - min(values)) / (statistics.median(values) or max(values) or 1.0), 3)


# -- kernels ----------------------------------------------------------------------------------------------------------


EVICT_BYTES = 512 << 20
"""Size of the buffer that evicts caches. It is larger than any last-level cache."""
COPY_BYTES = 256 << 20
"""Bytes that a streaming copy copies."""
FILLER = 0x3C
"""Byte that fills rows, so that pages are allocated. In all dtypes it makes a number of medium size."""


class Meter:
    """Time calls on a device, with cold caches. On ``cuda`` the time of the launch is not included.

    Callers measure each call ``repeats`` times after a first call, which compiles and allocates.
    """

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device = device
        self.repeats = repeats
        self._evicting = buffer(EVICT_BYTES, device)

    def seconds(self, call: Callable[[], object]) -> float:
        """Time one call."""
        self._evicting.sum()
        if self.device.type == "cpu":
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        # The call is launched while the device still reads the buffer, so its launch is hidden.
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        call()
        events[1].record()
        events[1].synchronize()
        return events[0].elapsed_time(events[1]) / 1e3


def buffer(nbytes: int, device: torch.device) -> Any:
    """Return float32 ones. On the CPU they are in huge pages, like arenas."""
    shape = (nbytes // 4,)
    made = large_tensors.zeros(shape) if device.type == "cpu" else torch.empty(*shape, device=device)
    return made.fill_(1.0)


def streaming_copy(device: torch.device) -> Callable[[], object]:
    """Return a function that copies `COPY_BYTES` in the memory of a device."""
    source, target = buffer(COPY_BYTES, device), buffer(COPY_BYTES, device)
    return lambda: target.copy_(source)


def rule_step(
    tables: Sequence[Table],
    make: Callable[[nn.Module], SparseOptimizer],
    device: torch.device,
    backend: BackendName = "auto",
) -> RuleStep:
    """Return a step of an optimizer. It is built for tables of one row, because it does not depend on their rows."""
    small = [replace(table, rows=1, fp32_rows=min(table.fp32_rows, 1)) for table in tables]
    module = EmbeddingCollection(small, [Feature(t.name, table=t.name) for t in small], device=device)
    optimizer = make(module)
    (updater,), (arena,) = optimizer._updaters.values(), module._groups[0].arenas
    assert isinstance(updater, TableUpdater)
    one = torch.ones((), dtype=torch.float32, device=device)
    hyper = {table.name: optimizer._hyper(optimizer.param_groups[0]) for table in small}
    updater.state_of_steps.count(hyper, None, device, backend)
    return updater.state_of_steps.step(arena, hyper, one, one)


def filled_store(
    tables: Sequence[Table], moments: Sequence[Moment], device: torch.device, backend: BackendName = "auto"
) -> DenseStore:
    """Return a store with tables of one dim and dtype and with moments. All its pages are allocated."""
    spans = [Span(table.rows, table.fp32_rows) for table in tables]
    store = DenseStore(spans, tables[0].dim, dtype=tables[0].dtype, device=device, backend=backend)
    for rows in (store.rows.wide, store.rows.narrow):
        rows.view(torch.uint8).fill_(FILLER)
    store.rows.exponents.fill_(-12)
    for moment in moments:
        store.add_moment(moment)
        store.moments[moment.name].zero_()
    return store


def bag_layout(
    ids: Tensor, rows: Sequence[int], batch_size: int, ids_per_bag: int = 1, weights: Tensor | None = None
) -> BagLayout:
    """Return the bag layout of ids ``[T · B · ids_per_bag]`` for one feature per table, with ``T`` tables."""
    first_slots = [0, *accumulate(rows)][:-1]
    features: Sequence[list[int]] = [
        # As in BagLayout.features: start, ids per sample, row of offsets, slot of row 0, mean, position, table.
        [f * batch_size * ids_per_bag, ids_per_bag, 0, slot, 0, f, f]
        for f, slot in enumerate(first_slots)
    ]
    return BagLayout(
        ids=ids,
        features=torch.tensor(features, device=ids.device),
        offsets=torch.empty(0, batch_size + 1, dtype=torch.int64, device=ids.device),
        weights=weights,
        batch_size=batch_size,
        total=len(ids),
        has_divisors=False,
        width=len(rows),
        ids_per_bag=ids_per_bag,
    )


def ways_to_multiply(a: Tensor, b: Tensor) -> list[Callable[[], object]]:
    """Return functions that multiply two matrices or two batches of matrices, with torch and if possible oneDNN."""
    ways: list[Callable[[], object]] = [partial(torch.matmul, a, b, out=a @ b)]
    if a.dim() == 2 and a.is_cpu and a.dtype == torch.float32 and has_onednn_linear():
        ways += [partial(onednn_product, a, b.t()), partial(onednn_product, b.t(), a)]
    return ways


# -- disk -------------------------------------------------------------------------------------------------------------


READ_BYTES = 4096
"""Bytes of one read, a page, which is also the unit of reads of rows."""
DISK_THREADS = 16
"""Threads that read concurrently when the rate is measured."""
_READS_PER_THREAD = 512
_SINGLE_READS = 32
_DISK_PART = 8 << 20


class DiskRates(NamedTuple):
    """Measurements of a disk. ``read`` and ``latency`` have one value per repeat."""

    read: list[float]  # bytes/s of random reads by `DISK_THREADS` threads
    latency: list[float]  # median seconds of a single read by one thread
    how: str  # description of how the page cache was avoided


def disk_rates(folder: Path, nbytes: int, repeats: int) -> DiskRates:
    """Measure random reads from the disk of a directory, past the page cache if the system allows it.

    The reads are from a file of ``nbytes``, which is removed afterwards.
    """
    with _temporary_file(folder, nbytes) as path:
        opened, how = _open_direct(path)
        try:
            random_pages = random.Random(0)

            def offsets(count: int) -> list[int]:
                return [random_pages.randrange(nbytes // READ_BYTES) * READ_BYTES for _ in range(count)]

            latency: list[float] = []
            rates: list[float] = []
            with ThreadPoolExecutor(DISK_THREADS) as pool:
                for _ in range(repeats):
                    _drop_page_cache(opened)
                    latency.append(statistics.median(_read_pages(opened, [at]) for at in offsets(_SINGLE_READS)))
                    jobs = [offsets(_READS_PER_THREAD) for _ in range(DISK_THREADS)]
                    start = time.perf_counter()
                    list(pool.map(partial(_read_pages, opened), jobs))
                    rates.append(DISK_THREADS * _READS_PER_THREAD * READ_BYTES / (time.perf_counter() - start))
        finally:
            os.close(opened)
    return DiskRates(rates, latency, how)


def _read_pages(opened: int, offsets: list[int]) -> float:
    """Read pages one after another, and return the seconds of all reads."""
    page = mmap.mmap(-1, READ_BYTES)  # aligned, which direct reads require
    start = time.perf_counter()
    for at in offsets:
        if hasattr(os, "preadv"):
            os.preadv(opened, [page], at)
        else:
            os.lseek(opened, at, os.SEEK_SET)
            os.read(opened, READ_BYTES)
    return time.perf_counter() - start


@contextmanager
def _temporary_file(folder: Path, nbytes: int) -> Generator[Path]:
    """Yield a file of random bytes, which file systems cannot compress, and remove it afterwards."""
    part = random.Random(1).randbytes(min(_DISK_PART, nbytes))
    path = folder / f".hotbed-{uuid.uuid4().hex[:8]}.disk"
    try:
        with path.open("xb") as file:
            for start in range(0, nbytes, len(part)):
                file.write(part[: nbytes - start])
            file.flush()
            os.fsync(file.fileno())
        yield path
    except OSError as error:
        raise RecipeError(
            f"the disk of {folder} cannot be measured with a file of {nbytes:,} bytes ({error.strerror or error}). "
            "Use another DIR, or free some space"
        ) from error
    finally:
        path.unlink(missing_ok=True)


def _open_direct(path: Path) -> tuple[int, str]:
    """Open a file for reads past the page cache. Return its descriptor, and how the cache is avoided."""
    direct: int = getattr(os, "O_DIRECT", 0)
    if direct and hasattr(os, "preadv"):
        with suppress(OSError):  # some file systems have no direct reads, e.g. older tmpfs
            opened = os.open(path, os.O_RDONLY | direct)
            try:
                os.preadv(opened, [mmap.mmap(-1, READ_BYTES)], 0)
                return opened, "O_DIRECT"
            except OSError:
                os.close(opened)
                raise
    opened = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    if _drop_page_cache(opened):
        return opened, "page cache dropped before each measurement"
    return opened, "through the page cache, which this system cannot drop, so memory was measured"


def _drop_page_cache(opened: int) -> bool:
    """Drop a file's pages from the page cache. Return False if the system cannot do this."""
    if not hasattr(os, "posix_fadvise"):
        return False
    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
    return True
