"""Measure this machine for the planner: ``hotbed doctor --measure FILE`` writes a hardware profile.

Every figure is a median over repeats, with its spread: (largest − smallest) ÷ median. What the figures mean is said in
`hotbed.plan.hardware.Hardware`. Rows are moved by hotbed's own kernels, and exchanges are its own.
"""

from __future__ import annotations

import platform
import shutil
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotbed.config import Device
from hotbed.data.formats.zipf_source import ZipfLaw
from hotbed.errors import RecipeError
from hotbed.machine import memory_bytes, usable_cores
from hotbed.measure.disk_reads import THREADS, disk_rates
from hotbed.measure.kernel_times import (
    COPY_BYTES,
    EVICT_BYTES,
    Meter,
    bag_layout,
    filled_store,
    rule_step,
    streaming_copy,
    ways_to_multiply,
)
from hotbed.measure.rank_exchanges import KINDS, exchange_seconds, rates, seconds_per_message
from hotbed.measure.step_overheads import StepSizes, measure_overheads
from hotbed.ops import RuleStep
from hotbed.optim import RowWiseAdagrad
from hotbed.plan.cost import table_bytes
from hotbed.plan.hardware import DIMENSIONS, Hardware, format_quantity
from hotbed.specs import Table
from hotbed.store import DenseStore
from hotbed.store.memory import available_bytes, staging
from hotbed.train.numerics import resolve_device
from hotbed.train.runs.report import environment, size

DIMS = (16, 32, 64, 128)
"""Columns of float32 rows that are moved: 64 to 512 bytes."""
TABLE_BYTES = {"cpu": 1 << 30, "cuda": 4 << 30}
"""Bytes of the tables whose rows are moved: more than caches have, with --quick, too."""
DISK_BYTES = 1 << 30
"""Bytes of the file that is read."""
QUICK = 4
"""How many times less --quick takes."""
STEPS, QUICK_STEPS = StepSizes(), StepSizes(table_bytes=StepSizes.table_bytes // QUICK, steps=6, repeats=3)
MEASURED, COUNTED = "measured", "counted"
_TABLES = 8
_LAUNCHES = 200

Progress = Callable[[str], None]
"""Called with the name of the next stage."""


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """What is measured, and how long."""

    device: Device = "auto"
    """What computes; ``auto`` is ``cuda`` where there is one, else ``cpu``."""
    ranks: list[int] | None = None
    """Numbers of processes between which exchanges are measured; by default 2 and 4, or 2, 4, … up to all GPUs."""
    quick: bool = False
    """Measure less, in a fraction of the time: smaller tables and messages, fewer repeats."""

    def __post_init__(self) -> None:
        if self.ranks is not None and (not self.ranks or min(self.ranks) < 2):
            raise RecipeError(f"--ranks is {self.ranks}, must be numbers of at least 2, like [2,4]")

    @property
    def repeats(self) -> int:
        """Measurements of each."""
        return 3 if self.quick else 7

    @property
    def sizes(self) -> list[int]:
        """Bytes of messages."""
        return [1 << power for power in ((10, 16, 20) if self.quick else range(10, 25, 2))]

    @property
    def step_sizes(self) -> StepSizes:
        """Training steps that are run."""
        return QUICK_STEPS if self.quick else STEPS

    def worlds(self, device: torch.device) -> list[int]:
        """Numbers of ranks."""
        if device.type == "cpu":
            return sorted(self.ranks or ([2] if self.quick else [2, 4]))
        gpus = torch.cuda.device_count()
        if self.ranks is not None and max(self.ranks) > gpus:
            raise RecipeError(
                f"--ranks is {self.ranks}, but there are {gpus} GPUs; give at most {gpus}, or --device cpu"
            )
        return sorted(self.ranks or [1 << power for power in range(1, gpus.bit_length())])


def measure(options: MeasureOptions, folder: Path, progress: Progress) -> dict[str, Any]:
    """Measure everything, and the disk of a folder."""
    device = resolve_device(options.device, "device")
    worlds = options.worlds(device)
    sources = {MEASURED: _when(device, options), COUNTED: "what the system says that this process may use"}
    figures = _counted(device, worlds, folder)
    meter = Meter(device, options.repeats)
    figures |= _streams(meter, options, progress)
    figures |= _rows(meter, options, progress)
    figures["flops"] = _flops(meter, options, progress)
    del meter  # its buffer is memory that the disk's file and the ranks may need
    progress("kernel launches")
    figures["launch_s"] = _figure("launch_s", _launches(device, options.repeats))
    figures |= _disk(folder, options, sources, progress)
    figures |= _exchanges(worlds, device, options, figures, sources, progress)
    document = _document(figures, sources, device)
    hardware = Hardware.from_dict(document, "what was measured")  # a profile that can be read
    if device.type == "cpu":
        found = measure_overheads(worlds, hardware, options.step_sizes, progress)
        figures |= {name: _figure(name, samples) for name, samples in found.items()}
        document = _document(figures, sources, device)
        Hardware.from_dict(document, "what was measured")
    return document


# -- parts ----------------------------------------------------------------------------------------------------------


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
    """Copies in the device's memory, in the host's, and between the two."""
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
    """Bytes/s of each repeat of a call that moves so many bytes."""
    return [nbytes / meter.seconds(move) for _ in range(1 + meter.repeats)][1:]


def _rows(meter: Meter, options: MeasureOptions, progress: Progress) -> dict[str, Any]:
    """Lookups and updates of rows at random, by bytes of a row."""
    gather: dict[int, list[float]] = {}
    scatter: dict[int, list[float]] = {}
    for dim in DIMS[:: len(DIMS) - 1] if options.quick else DIMS:
        progress(f"rows of {4 * dim} bytes")
        gather[4 * dim], scatter[4 * dim] = _row_rates(meter, options, dim)
    return {"gather": _figure("gather", gather), "scatter": _figure("scatter", scatter)}


def _tables(tables: Sequence[Table], batch: int, device: torch.device) -> tuple[DenseStore, RuleStep, Tensor]:
    """Fill tables; return their store, a step of row-wise AdaGrad, and uniform ids of a batch, one per sample."""
    moments = RowWiseAdagrad.rule.moments
    needed = sum(table_bytes(t, moments) for t in tables) + EVICT_BYTES + 2 * COPY_BYTES
    free = available_bytes(device)
    if free is not None and needed > free:
        raise RecipeError(
            f"measuring takes {size(needed)}, but {size(free)} of {device.type} memory is free; free some, or measure "
            "less with --quick"
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
    """Products of square matrices, by dtype."""
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
    """Seconds of a lookup that has nothing to do, one after the other as fast as they can be started."""
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
    sources["disk"] = f"measured as the rest: {THREADS} threads, a file of {nbytes >> 20} MiB; {found.how}"
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
    """Exchanges of each kind, by ranks and bytes, and what follows for the links."""
    if not worlds:
        sources["alone"] = "not measured, for there is one GPU: what its link to the host carries"
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
        "not measured, for there is one machine: what its ranks send each other; put your network's here"
    )
    return {
        "node_link": _figure("node_link", fastest),
        "network": _figure("network", fastest, "one_node"),
        "message_s": _figure("message_s", messages),
        **{kind: _figure(kind, found[kind]) for kind in KINDS},
    }


# -- figures --------------------------------------------------------------------------------------------------------


def _figure(name: str, samples: Any, source: str = MEASURED) -> dict[str, Any]:
    """Median and spread of samples, or of those in a mapping, as a profile has them."""
    dimension = DIMENSIONS[name]

    def each(of: Any, what: Callable[[Sequence[float]], Any]) -> Any:
        return {key: each(v, what) for key, v in of.items()} if isinstance(of, dict) else what(of)

    return {
        "value": each(samples, lambda values: format_quantity(statistics.median(values), dimension)),
        "source": source,
        "spread": each(samples, _spread),
    }


def _spread(values: Sequence[float]) -> float:
    """(Largest − smallest) ÷ median, or ÷ the largest where the median is 0, as a difference of two steps may be."""
    return round((max(values) - min(values)) / (statistics.median(values) or max(values) or 1.0), 3)
