"""Write the server's log: one JSON object per line on stderr, by a thread, so that a slow reader holds no request."""

from __future__ import annotations

import json
import logging
import queue
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from typing import TextIO

from typing_extensions import override

_LOGGERS = ("hotbed", "uvicorn")
_WAITING_LINES = 10_000


class JsonFormatter(logging.Formatter):
    """Format a record as JSON: time, level, event, and what the record's ``details`` say."""

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


class _Lines(QueueHandler):
    """Puts records into a queue; where it is full, because nobody reads stderr, they are dropped and counted."""

    dropped = 0

    @override
    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record  # it stays in this process, with its traceback

    @override
    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1


@contextmanager
def json_logs(stream: TextIO) -> Generator[None]:
    """Write what the server logs to a stream, line by line; its loggers are as before afterwards."""
    target = logging.StreamHandler(stream)
    target.setFormatter(JsonFormatter())
    lines = _Lines(queue.Queue(_WAITING_LINES))
    listener = QueueListener(lines.queue, target)
    before = {name: (logging.getLogger(name).level, logging.getLogger(name).propagate) for name in _LOGGERS}
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.addHandler(lines)
        logger.setLevel(logging.INFO if name == "hotbed" else logging.WARNING)
        logger.propagate = False
    listener.start()
    try:
        yield
    finally:
        for name, (level, propagate) in before.items():
            logger = logging.getLogger(name)
            logger.removeHandler(lines)
            logger.setLevel(level)
            logger.propagate = propagate
        listener.stop()
        if lines.dropped:
            print(json.dumps({"level": "warning", "event": "lines_dropped", "lines": lines.dropped}), file=stream)
