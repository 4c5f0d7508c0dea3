"""Measure this machine for the planner: ``hotbed doctor --measure FILE`` writes a hardware profile.

Every figure is a median over repeats, with its spread: (largest − smallest) ÷ median. What the figures mean is said in
`hotbed.plan.hardware.Hardware`. Rows are moved by hotbed's own kernels, and exchanges are its own.
"""

from __future__ import annotations

import os
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

import torch

from hotbed.bench.limits import COPY_BYTES, check_memory, copy_limit, copy_way
from hotbed.bench.measure_disk import THREADS, disk_rates
from hotbed.bench.measure_exchanges import KINDS, exchange_seconds, rates, seconds_per_message
from hotbed.bench.measure_steps import StepSizes, measure_overheads
from hotbed.bench.meter import Limit, Meter, Way
from hotbed.bench.ops import batch_bytes, embedding_jobs, filled_store, rule_step
from hotbed.bench.options import OpsOptions
from hotbed.bench.step import ways_to_multiply
from hotbed.bench.workload import Workload
from hotbed.config import Device
from hotbed.errors import RecipeError
from hotbed.machine import usable_cores
from hotbed.plan.hardware import Hardware
from hotbed.plan.profile_files import DIMENSIONS
from hotbed.plan.quantities import show
from hotbed.store.memory import available_bytes, staging
from hotbed.train.numerics import resolve_device
from hotbed.train.report import environment

DIMS = (16, 32, 64, 128)
"""Columns of float32 rows that are moved: 64 to 512 bytes."""
TABLE_BYTES = {"cpu": 1 << 30, "cuda": 4 << 30}
"""Of the tables whose rows are moved: more than caches have, also where all is quick."""
DISK_BYTES = 1 << 30
"""Of the file that is read."""
QUICK = 4
"""How many times less is taken where all is quick."""
STEPS, QUICK_STEPS = StepSizes(), StepSizes(table_bytes=StepSizes.table_bytes // QUICK, steps=6, repeats=3)
MEASURED, COUNTED = "measured", "counted"
_TABLES = 8
_LAUNCHES = 200
_KERNELS_OF_AN_UPDATE = ("occurrences", "group", "update")

Progress = Callable[[str], None]
"""Told what comes next."""


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

    def place(self) -> torch.device:
        """The device.

        Raises
        ------
        RecipeError
            If CUDA is asked for and absent.
        """
        return resolve_device(self.device, "device")

    def worlds(self, device: torch.device) -> list[int]:
        """Numbers of ranks.

        Raises
        ------
        RecipeError
            If there are fewer GPUs.
        """
        if device.type == "cpu":
            return sorted(self.ranks or ([2] if self.quick else [2, 4]))
        gpus = torch.cuda.device_count()
        if self.ranks is not None and max(self.ranks) > gpus:
            raise RecipeError(
                f"--ranks is {self.ranks}, but there are {gpus} GPUs; give at most {gpus}, or --device cpu"
            )
        return sorted(self.ranks or [1 << power for power in range(1, gpus.bit_length())])


def measure(options: MeasureOptions, folder: Path, progress: Progress) -> dict[str, Any]:
    """Measure everything.

    Parameters
    ----------
    options
        What, and how long.
    folder
        A directory on the disk that is measured.
    progress
        Told what comes next.

    Returns
    -------
    dict
        What a profile's file holds; see `hotbed.plan.profile_files`.

    Raises
    ------
    RecipeError
        If an option cannot be right, or memory or disk are too small.
    CommError
        If a rank fails.
    """
    device = options.place()
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
    host = available_bytes(torch.device("cpu")) or _physical_bytes()
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


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _streams(meter: Meter, options: MeasureOptions, progress: Progress) -> dict[str, Any]:
    """Copies in the device's memory, in the host's, and between the two."""
    cpu = torch.device("cpu")
    progress("copies in memory")
    own = _rates(meter, copy_way(meter.device))
    if meter.device == cpu:
        return {name: _figure(name, own) for name in ("stream", "host_stream", "host_link")}
    host = _rates(Meter(cpu, options.repeats), copy_way(cpu))
    page_locked = staging((COPY_BYTES,), torch.uint8, meter.device).fill_(1)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=meter.device)
    link = _rates(meter, Way(lambda: target.copy_(page_locked, non_blocking=True), 1 / COPY_BYTES))
    found = {"stream": own, "host_stream": host, "host_link": link}
    return {name: _figure(name, values) for name, values in found.items()}


def _rates(meter: Meter, way: Way) -> list[float]:
    """Bytes/s of each repeat of a way whose scaled seconds are those of a byte."""
    limit = copy_limit(way, 1)
    return [1 / meter.limit_seconds(limit) for _ in range(1 + meter.repeats)][1:]


def _rows(meter: Meter, options: MeasureOptions, progress: Progress) -> dict[str, Any]:
    """Lookups and updates of rows at random, by bytes of a row."""
    gather: dict[int, list[float]] = {}
    scatter: dict[int, list[float]] = {}
    dims = DIMS[:: len(DIMS) - 1] if options.quick else DIMS
    for dim in dims:
        progress(f"rows of {4 * dim} bytes")
        gather[4 * dim], scatter[4 * dim] = _row_rates(meter, options, dim)
    return {"gather": _figure("gather", gather), "scatter": _figure("scatter", scatter)}


def _row_rates(meter: Meter, options: MeasureOptions, dim: int) -> tuple[list[float], list[float]]:
    on_gpu = meter.device.type == "cuda"
    table_bytes = TABLE_BYTES[meter.device.type] // (QUICK if options.quick else 1)
    settings = OpsOptions(
        tables=_TABLES,
        rows=table_bytes // (4 * dim * _TABLES),
        dim=dim,
        batch_size=65536 if on_gpu else 8192,
        zipf=0.0,
        device=options.device,
        repeats=meter.repeats,
    )
    step = rule_step(settings, meter.device)
    check_memory(settings, step.rule, meter.device, batch_bytes(settings))
    store = filled_store(settings, step, meter.device)
    ids = Workload(settings).draw(settings.zipf)[0]
    jobs = {
        job.kernel: job for job in embedding_jobs("uniform", ids, settings, store, step, lambda _: Limit("copy", []))
    }
    distinct = jobs["lookup"].distinct
    assert distinct is not None
    rows, vectors = 4 * dim * distinct, 4 * dim * settings.tables * settings.batch_size
    moments = sum(distinct * moment[0].numel() * moment.element_size() for moment in store.moments.values())
    seconds = [{kernel: meter.seconds(job.call) for kernel, job in jobs.items()} for _ in range(1 + meter.repeats)][1:]
    lookups = [(rows + vectors) / of["lookup"] for of in seconds]
    updates = [(vectors + 2 * (rows + moments)) / sum(of[k] for k in _KERNELS_OF_AN_UPDATE) for of in seconds]
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
            ways = [Way(way) for way in ways_to_multiply(a, b)]
            seconds = [min(meter.seconds(way.move) for way in ways) for _ in range(1 + meter.repeats)][1:]
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
    settings = OpsOptions(tables=1, rows=16, dim=16, batch_size=1, device="cuda" if device.type == "cuda" else "cpu")
    store = filled_store(settings, rule_step(settings, device), device)
    workload = Workload(settings)
    bags = workload.layout(workload.draw(0.0)[0].to(device))
    out = store.empty((1, 1, settings.dim), torch.float32)
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
        "value": each(samples, lambda values: show(statistics.median(values), dimension)),
        "source": source,
        "spread": each(samples, _spread),
    }


def _spread(values: Sequence[float]) -> float:
    """(Largest − smallest) ÷ median, or ÷ the largest where the median is 0, as a difference of two steps may be."""
    return round((max(values) - min(values)) / (statistics.median(values) or max(values) or 1.0), 3)
