"""Count what the server does, for ``GET /metrics`` in the format of Prometheus.

All metrics are in a registry of their own. What models count themselves (unknown ids, caches, changes) is read when
somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_OF = {"unknown_ids": "feature", "bad_ids": "feature", "versions_applied": "kind", "versions_refused": "reason"}
"""What counters of models are divided by; others, if they are, by table."""


@dataclass(frozen=True)
class ModelState:
    """State of a model for metrics and health requests."""

    step: int  # of the version that scores now
    queued_rows: int  # rows in the queue
    counters: Mapping[str, Mapping[str, float]]  # by name, then by feature, table or reason ("" if not divided)
    is_broken: bool  # whether no version is intact, so that no request is scored
    staleness_s: float | None  # seconds since the scoring version was published; None: nothing is followed
    behind_s: float | None  # seconds since the scoring version was last the newest; None: nothing is followed


class ServerMetrics:
    """The metrics of one server. ``models`` returns the state of every model, ``connections`` has the open ones."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, models: Callable[[], Mapping[str, ModelState]], connections: Sized) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "hotbed_requests", "Requests that were answered.", ("route", "model", "status"), registry=registry
        )
        self._errors = Counter("hotbed_request_errors", "Requests without scores.", ("reason",), registry=registry)
        self._rows = Counter("hotbed_rows", "Rows that were scored.", ("model",), registry=registry)
        self._seconds = Histogram(
            "hotbed_request_seconds", "From head to answer.", ("route",), buckets=_SECONDS, registry=registry
        )
        self._batches = Histogram("hotbed_batch_rows", "Rows of a batch.", ("model",), buckets=_ROWS, registry=registry)
        self._scoring = Histogram(
            "hotbed_batch_seconds", "Scoring a batch.", ("model",), buckets=_SECONDS, registry=registry
        )
        registry.register(_States(models, connections))
        ProcessCollector(registry=registry)  # memory, CPU seconds, open files

    def answered(self, route: str, model: str, status: int, seconds: float, rows: int, reason: str | None) -> None:
        """Count an answer."""
        self._requests.labels(route, model, status).inc()
        self._seconds.labels(route).observe(seconds)
        if reason is not None:
            self._errors.labels(reason).inc()
        elif rows:
            self._rows.labels(model).inc(rows)

    def refused(self, reason: str) -> None:
        """Count what was refused before it was a request."""
        self._errors.labels(reason).inc()

    def scored(self, model: str) -> Callable[[int, float], None]:
        """What counts a model's batches: their rows, and seconds."""
        batches, scoring = self._batches.labels(model), self._scoring.labels(model)

        def observe(rows: int, seconds: float) -> None:
            batches.observe(rows)
            scoring.observe(seconds)

        return observe

    def text(self) -> bytes:
        """All metrics, as Prometheus reads them."""
        return generate_latest(self._registry)


class _States(Collector):
    def __init__(self, models: Callable[[], Mapping[str, ModelState]], connections: Sized) -> None:
        self._models, self._connections = models, connections

    def describe(self) -> Iterable[Metric]:
        return ()  # so that registering asks no model

    @override
    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("hotbed_connections", "Open connections.", len(self._connections))
        step = GaugeMetricFamily("hotbed_model_step", "Training step of the version that scores.", labels=["model"])
        queue = GaugeMetricFamily("hotbed_queued_rows", "Rows that wait.", labels=["model"])
        stale = GaugeMetricFamily("hotbed_staleness_seconds", "Age of the version that scores.", labels=["model"])
        behind = GaugeMetricFamily(
            "hotbed_behind_seconds", "Since the version that scores was the newest.", labels=["model"]
        )
        broken = GaugeMetricFamily("hotbed_model_broken", "1 where no version is whole.", labels=["model"])
        counters = dict[str, CounterMetricFamily]()
        for name, state in self._models().items():
            step.add_metric([name], state.step)
            queue.add_metric([name], state.queued_rows)
            broken.add_metric([name], state.is_broken)
            for family, seconds in ((stale, state.staleness_s), (behind, state.behind_s)):
                if seconds is not None:
                    family.add_metric([name], seconds)
            for counter, values in state.counters.items():
                labels = ["model", _OF.get(counter, "table")] if set(values) != {""} else ["model"]
                family = counters.setdefault(
                    counter, CounterMetricFamily(f"hotbed_{counter}", counter.replace("_", " "), labels=labels)
                )
                for of, value in values.items():
                    family.add_metric([name, of][: len(labels)], value)
        yield from (step, queue, broken, stale, behind, *counters.values())
