"""Time kernels on tables in real pages, with cold caches.

Before every call a buffer larger than the caches is read. Whatever a call needs then comes from memory, and no cache
line waits to be written back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from hotbed import large_tensors
from hotbed.embed import EmbeddingCollection
from hotbed.embed.lookup_gradients import TableUpdater
from hotbed.ops import BackendName, BagLayout, RuleStep
from hotbed.optim import Moment, SparseOptimizer
from hotbed.specs import Feature, Table
from hotbed.store import DenseStore, Span
from hotbed.torch_private import has_onednn_linear, onednn_product

EVICT_BYTES = 512 << 20
"""Size of the buffer: no last-level cache is larger."""
COPY_BYTES = 256 << 20
"""Size of what a streaming copy copies."""
FILLER = 0x3C
"""Byte that rows are filled with: pages must be real, and four, two or one of it are a number of medium size."""


class Meter:
    """Times calls on a device: on ``cuda`` without the launch.

    Callers measure each call ``repeats`` times, and once more before that, which compiles and allocates.
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
        # The device still reads the buffer while the call is being launched.
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        call()
        events[1].record()
        events[1].synchronize()
        return events[0].elapsed_time(events[1]) / 1e3


def buffer(nbytes: int, device: torch.device) -> Any:
    """Return float32 ones, in huge pages on the CPU, as arenas are."""
    shape = (nbytes // 4,)
    made = large_tensors.zeros(shape) if device.type == "cpu" else torch.empty(*shape, device=device)
    return made.fill_(1.0)


def streaming_copy(device: torch.device) -> Callable[[], object]:
    """Return a call that copies `COPY_BYTES` in the memory of a device."""
    source, target = buffer(COPY_BYTES, device), buffer(COPY_BYTES, device)
    return lambda: target.copy_(source)


def rule_step(
    tables: Sequence[Table],
    make: Callable[[nn.Module], SparseOptimizer],
    device: torch.device,
    backend: BackendName = "auto",
) -> RuleStep:
    """Return a step of an optimizer; it does not depend on the number of rows, so it is taken from tables of one."""
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
    """Return the tables, of one dim and dtype, in one arena, in real pages, with moments."""
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
    """Return the bags of ids ``[T · B · ids_per_bag]``, of a feature for each of ``T`` tables, as kernels take them."""
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
    """Return calls that multiply two matrices, or two batches of them: by torch, and where possible by oneDNN."""
    ways: list[Callable[[], object]] = [partial(torch.matmul, a, b, out=a @ b)]
    if a.dim() == 2 and a.is_cpu and a.dtype == torch.float32 and has_onednn_linear():
        ways += [partial(onednn_product, a, b.t()), partial(onednn_product, b.t(), a)]
    return ways
