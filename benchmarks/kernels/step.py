"""Time the training steps of a DLRM, part by part, and compare them with a limit of the machine.

The limit is the time of the matrix products alone, each by the fastest library, plus the time of the rows at the
machine's speed for random rows. It leaves out activations, casts, losses, sorting and optimizers, and overlaps nothing.

Hooks of the modules mark where the time goes. The time between two marks of a `Timeline` belongs to the part that the
later mark names. Marks are before and after each module, in backward where autograd reaches a tensor, and after the
optimizers. Autograd runs the last recorded node first, so the order is: loss, top MLP, interaction, bottom MLP, lookup.
"Other" is everything else: the loss, work between modules, ``zero_grad``. Hooks read clocks (on CUDA: record events),
and change nothing.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.kernels.limits import check_memory, gather_limit, rows_by_matrix, scatter_limit
from benchmarks.kernels.meter import Meter, spread
from benchmarks.kernels.options import LEARNING_RATE, StepOptions
from benchmarks.kernels.workload import KernelBytes, Workload
from hotbed import ops
from hotbed.batch import Batch
from hotbed.measure.machine_profile import ways_to_multiply
from hotbed.nn import DLRM
from hotbed.store import DenseStore
from hotbed.train.metrics import move_batch

WARM_UP = 2  # steps that compile and allocate, and are not counted
TRIALS = 3  # runs of each product by each library, to find the faster one
PARTS = (
    *("lookup", "bottom", "interaction", "top"),
    *("top backward", "interaction backward", "bottom backward", "lookup backward"),
    *("dense optimizer", "sparse update", "other"),
)
"""All parts, in the order of a step."""


def bench_step(options: StepOptions, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure steps in turn with their limit. Ids follow Zipf's law, and every step has a new batch."""
    device = options.torch_device()
    ops.select(device, options.backend)
    with device:
        outline = DLRM(*options.specs(rows=1), **_shape(options))
    optimizer = options.make_optimizer(outline)
    check_memory(options, optimizer.rule, device, _other_bytes(options, outline))
    progress("making the model")
    torch.manual_seed(options.seed)
    with device:
        model = DLRM(*options.specs(), **_shape(options))
    workload = Workload(options)
    batches = [move_batch(batch, model, device) for batch in _batches(options, workload)]
    step = _Step(options, model)
    limits = _Roofline(options, model, workload, batches[0])
    times: list[dict[str, float]] = []
    roof: list[dict[str, float]] = []
    for i, batch in enumerate(batches):
        progress("warming up" if i < WARM_UP else f"step {i + 1 - WARM_UP} of {options.repeats}")
        times.append(step(batch))
        roof.append(limits.seconds())
    times, roof = times[WARM_UP:], roof[WARM_UP:]
    totals = [sum(t.values()) for t in times]
    median = statistics.median(totals)
    return {
        "step": {"samples_per_s": options.batch_size / median, **spread("s", totals)},
        "parts": [{"part": part, **spread("s", [t[part] for t in times])} for part in PARTS],
        "roofline": {
            **{f"{name}_s": statistics.median(r[name] for r in roof) for name in roof[0]},
            **spread("share", [sum(r.values()) / total for r, total in zip(roof, totals, strict=True)]),
        },
    }


def _shape(options: StepOptions) -> dict[str, Any]:
    return {
        "dense_features": options.dense_features,
        "bottom": options.bottom_widths,
        "top": options.top,
        "seed": options.seed,
        "backend": options.backend,
    }


def _linears(model: nn.Module) -> list[nn.Linear]:
    return [m for m in model.modules() if isinstance(m, nn.Linear)]


def _other_bytes(options: StepOptions, outline: DLRM) -> int:
    """Return about the bytes of parameters, activations, vectors, buffers of limits, and batches."""
    columns = sum(m.in_features + m.out_features for m in _linears(outline)) + 6 * options.tables * options.dim
    parameters = sum(p.nbytes for p in outline.parameters())
    ids = options.batch_size * options.tables * options.pooling
    return 4 * parameters + 16 * options.batch_size * columns + (8 * (options.repeats + WARM_UP) + 128) * ids


def _batches(options: StepOptions, workload: Workload) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(options.seed)
    for ids in workload.draw(options.zipf, options.repeats + WARM_UP):
        dense = torch.randn(options.batch_size, options.dense_features, generator=generator)
        labels = torch.rand(options.batch_size, options.top[-1], generator=generator).round()
        yield Batch(sparse=ids, dense=dense if options.dense_features else None, labels=labels)


class Timeline:
    """Marks of one step at a time. On CUDA, marks are events."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def start(self) -> None:
        self._marks = []
        self.mark("")

    def mark(self, part: str) -> None:
        """Attribute the time since the last mark to a part."""
        if not self._cuda:
            self._marks.append((part, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((part, event))

    def seconds(self) -> dict[str, float]:
        if self._cuda:
            self._marks[-1][1].synchronize()
        total: dict[str, float] = defaultdict(float)
        for (_, before), (part, after) in zip(self._marks, self._marks[1:], strict=False):
            total[part] += before.elapsed_time(after) / 1e3 if self._cuda else after - before
        return {part: total[part] for part in PARTS}


def watch(model: DLRM, timeline: Timeline) -> None:
    def mark(part: str) -> Callable[..., None]:
        return lambda *_: timeline.mark(part)

    def mark_gradient(part: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...], result: Tensor | None = None) -> None:
            (args[0] if result is None else result).register_hook(mark(part))

        return hook

    modules = {"lookup": model.embeddings, "bottom": model.bottom, "interaction": model.interaction, "top": model.top}
    for name, module in modules.items():
        module.register_forward_pre_hook(mark("other"))
        module.register_forward_hook(mark(name))
    model.top.register_forward_hook(mark_gradient("other"))
    model.interaction.register_forward_hook(mark_gradient("top backward"))
    model.interaction.register_forward_pre_hook(mark_gradient("interaction backward"))
    model.bottom.register_forward_hook(mark_gradient("other"))
    for parameter in next(model.bottom.children()).parameters():
        parameter.register_post_accumulate_grad_hook(mark("bottom backward"))


class _Step:
    """A training step as users write it, with marks."""

    def __init__(self, options: StepOptions, model: DLRM) -> None:
        self._model = model
        self._device = model.embeddings.device
        self._autocast = options.precision == "bf16"
        self._dense = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        self._sparse = options.make_optimizer(model)
        self._timeline = Timeline(self._device)
        watch(model, self._timeline)

    def __call__(self, batch: Batch) -> dict[str, float]:
        assert batch.labels is not None
        mark = self._timeline.mark
        self._timeline.start()
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            logits = self._model(batch)
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels)
        self._dense.zero_grad()
        self._sparse.zero_grad()
        loss.backward()
        mark("lookup backward")
        self._dense.step()
        mark("dense optimizer")
        self._sparse.step()
        mark("sparse update")
        return self._timeline.seconds()


class _Roofline:
    """The matrix products and the rows of a step, without the rest."""

    def __init__(self, options: StepOptions, model: DLRM, workload: Workload, batch: Batch) -> None:
        (arena,) = model.embeddings._groups[0].arenas
        assert isinstance(arena.store, DenseStore)
        rows, moments = arena.store.rows, arena.store.moments
        bags, slots = workload.layout(batch.sparse), workload.slots(batch.sparse)
        vectors = _dtype(options)
        moved = KernelBytes.of(rows, moments, bags, arena.store.ops.group(arena.store.ops.occurrences(bags)), vectors)
        parts = rows_by_matrix(rows, slots, options.pooling, vectors)
        self._gather = gather_limit(parts, options.pooling, moved.lookup)
        self._scatter = scatter_limit(parts, moments, moved.update)
        self._meter = Meter(model.embeddings.device, options.repeats)
        self._matmuls = [self._fastest(ways_to_multiply(a, b)) for a, b in _matmuls(options, model)]

    def seconds(self) -> dict[str, float]:
        """Return the seconds of matrix products, and of gathering and scattering rows."""
        return {
            "matmul": self._meter.seconds(lambda: [product() for product in self._matmuls]),
            "gather": self._meter.limit_seconds(self._gather),
            "scatter": self._meter.limit_seconds(self._scatter),
        }

    def _fastest(self, ways: Sequence[Callable[[], object]]) -> Callable[[], object]:
        """Return the way to compute a product that is fastest in a few trials."""
        return min(ways, key=lambda way: min(self._meter.seconds(way) for _ in range(TRIALS)))


def _dtype(options: StepOptions) -> torch.dtype:
    """Return the dtype of the dense part, of pooled vectors and of their gradients."""
    return torch.bfloat16 if options.precision == "bf16" else torch.float32


def _matmuls(options: StepOptions, model: DLRM) -> list[tuple[Tensor, Tensor]]:
    """Return the factors of all products of a step, forward and backward."""
    samples, first = options.batch_size, next(model.bottom.children())
    kind: dict[str, Any] = {"device": model.embeddings.device, "dtype": _dtype(options)}
    products: list[tuple[Tensor, Tensor]] = []
    for layer in _linears(model):
        x, w = (torch.randn(n, layer.in_features, **kind) for n in (samples, layer.out_features))
        g = torch.randn(samples, layer.out_features, **kind)
        products += [(x, w.t()), (g.t(), x)] + ([] if layer is first else [(g, w)])
    vectors = torch.randn(samples, 1 + options.tables, options.dim, **kind)
    gram = torch.randn(samples, 1 + options.tables, 1 + options.tables, **kind)
    products += [(vectors, vectors.mT), (gram, vectors)]
    return products
