"""Write the server's log as JSON lines, and collect metrics for ``GET /metrics`` in the Prometheus format."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

# -- log -----------------------------------------------------------------------------------------------------------

_LOGGERS = ("hotbed", "uvicorn")
_WAITING_LINES = 10_000
_WAIT_S = 5.0


class JsonFormatter(logging.Formatter):
    """Format a record as JSON with time, level, event, and the ``details`` of the record."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "details", {}),
        }
        if record.exc_info:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line, default=str)


class _LineQueue(QueueHandler):
    """A queue of lines for the log. If too many lines wait, further lines are dropped and counted."""

    def __init__(self) -> None:
        self._waiting = queue.SimpleQueue[logging.LogRecord]()
        super().__init__(self._waiting)
        self.setFormatter(JsonFormatter())
        self.dropped = 0

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if self._waiting.qsize() < _WAITING_LINES:  # checked before formatting, which takes most of the time
            super().emit(record)
        else:
            self.dropped += 1

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        self.dropped += 1


class _LineWriter(QueueListener):
    """Write lines to a file descriptor, because a Python stream has a lock that could block the end of the process."""

    def __init__(self, lines: _LineQueue, file: int) -> None:
        super().__init__(lines.queue)
        self._lines, self._file = lines, file

    @override
    def handle(self, record: logging.LogRecord) -> None:
        try:
            rest = f"{record.getMessage()}\n".encode()
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except Exception:  # e.g. a closed pipe; writing is tried again with the next line
            self._lines.dropped += 1


@contextmanager
def json_logs(file: int = 2) -> Generator[None]:
    """Write the server's log to a file descriptor in a thread, so that a slow reader of the log delays no request.

    When the context ends, wait a limited time until all lines are written, and restore the loggers.
    """
    lines = _LineQueue()
    writer = _LineWriter(lines, file)
    writer.start()
    before = {name: (logging.getLogger(name).level, logging.getLogger(name).propagate) for name in _LOGGERS}
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.addHandler(lines)
        logger.setLevel(logging.INFO if name == "hotbed" else logging.WARNING)
        logger.propagate = False
    try:
        yield
    finally:
        for name, (level, propagate) in before.items():
            logger = logging.getLogger(name)
            logger.removeHandler(lines)
            logger.setLevel(level)
            logger.propagate = propagate
        stopping = threading.Thread(target=writer.stop, daemon=True)  # `stop` has no timeout
        stopping.start()
        stopping.join(_WAIT_S)
        if not stopping.is_alive() and lines.dropped:
            last = {"level": "warning", "event": "lines_dropped", "lines": lines.dropped}
            with contextlib.suppress(OSError):
                os.write(file, f"{json.dumps(last)}\n".encode())


# -- metrics -------------------------------------------------------------------------------------------------------

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LABELS = {"unknown_ids": "feature", "bad_ids": "feature", "versions_applied": "kind", "versions_refused": "reason"}
"""Second label of counters of a model, after ``model``. The label of counters that are not listed is ``table``."""
_GAUGES = {
    "model_step": "Training step of the served version.",
    "queued_rows": "Rows that wait.",
    "model_broken": "1 if no version is intact.",
    "staleness_seconds": "Age of the served version.",
    "behind_seconds": "Time since the served version was the newest.",
}


class ModelState(NamedTuple):
    """Values of a model that ``GET /metrics`` reports."""

    gauges: Mapping[str, float]  # by keys of `_GAUGES`; only models that follow training have the last two
    counters: Mapping[str, Mapping[str, float]]  # by name, then by feature, table or reason ("" if not divided)


class ServerMetrics:
    """Metrics of one server. ``models`` returns the state of each model, and ``connections`` has the open connections.

    This class counts requests, and the rows of requests. The counters of `ModelState` count all further events.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, models: Callable[[], Mapping[str, ModelState]], connections: Sized) -> None:
        self._registry = registry = CollectorRegistry()

        def histogram(name: str, text: str, label: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"hotbed_{name}", text, (label,), buckets=buckets, registry=registry)

        self._requests = Counter("hotbed_requests", "Answers.", ("route", "model", "status"), registry=registry)
        self._errors = Counter("hotbed_request_errors", "Requests without scores.", ("reason",), registry=registry)
        self._rows = Counter("hotbed_rows", "Scored rows.", ("model",), registry=registry)
        self._seconds = histogram("request_seconds", "Time from head to answer.", "route")
        self._batches = histogram("batch_rows", "Rows of a batch.", "model", _ROWS)
        self._scoring = histogram("batch_seconds", "Time of scoring a batch.", "model")
        registry.register(_StateCollector(models, connections))
        ProcessCollector(registry=registry)  # memory, CPU seconds, open files

    def count_answer(self, route: str, model: str, status: int, seconds: float, rows: int, reason: str | None) -> None:
        """Count an answer with its scored rows. ``reason`` is None unless the answer is an error."""
        self._requests.labels(route, model, status).inc()
        self._seconds.labels(route).observe(seconds)
        if reason is not None:
            self._errors.labels(reason).inc()
        elif rows:
            self._rows.labels(model).inc(rows)

    def count_refusal(self, reason: str) -> None:
        """Count an error without a call of `count_answer`, e.g. a request that is not HTTP."""
        self._errors.labels(reason).inc()

    def batch_counter(self, model: str) -> Callable[[int, float], None]:
        """Return a function that records the rows and seconds of each batch of a model."""
        batches, scoring = self._batches.labels(model), self._scoring.labels(model)

        def observe(rows: int, seconds: float) -> None:
            batches.observe(rows)
            scoring.observe(seconds)

        return observe

    def text(self) -> bytes:
        """Return all metrics in the Prometheus format."""
        return generate_latest(self._registry)


class _StateCollector(Collector):
    """Read the number of connections and the state of each model whenever metrics are requested."""

    def __init__(self, models: Callable[[], Mapping[str, ModelState]], connections: Sized) -> None:
        self._models, self._connections = models, connections

    def describe(self) -> Iterable[Metric]:
        return ()  # so that registering reads no state

    @override
    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("hotbed_connections", "Open connections.", len(self._connections))
        gauges = {key: GaugeMetricFamily(f"hotbed_{key}", text, labels=["model"]) for key, text in _GAUGES.items()}
        counters = dict[str, CounterMetricFamily]()
        for name, state in self._models().items():
            for key, value in state.gauges.items():
                gauges[key].add_metric([name], value)
            for counter, values in state.counters.items():
                labels = ["model", _LABELS.get(counter, "table")] if set(values) != {""} else ["model"]
                family = counters.setdefault(
                    counter, CounterMetricFamily(f"hotbed_{counter}", counter.replace("_", " "), labels=labels)
                )
                for of, value in values.items():
                    family.add_metric([name, of][: len(labels)], value)
        yield from (*gauges.values(), *counters.values())
