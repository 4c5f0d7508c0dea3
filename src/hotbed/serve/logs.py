"""Write the server's log: one JSON object per line on stderr, by a thread, so that a slow reader holds no request."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener

from typing_extensions import override

_LOGGERS = ("hotbed", "uvicorn")
_WAITING_LINES = 10_000
_WAIT_S = 5.0


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
    """Queues lines; drops and counts them while too many wait."""

    def __init__(self) -> None:
        self._waiting = queue.SimpleQueue[logging.LogRecord]()
        super().__init__(self._waiting)
        self.setFormatter(JsonFormatter())
        self.dropped = 0

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if self._waiting.qsize() < _WAITING_LINES:  # before the line is formatted, which takes most of the time
            super().emit(record)
        else:
            self.dropped += 1

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        self.dropped += 1


class _Writer(QueueListener):
    """Writes lines to a file descriptor, without a lock of Python's that the end of the process would wait for."""

    def __init__(self, lines: _Lines, file: int) -> None:
        super().__init__(lines.queue)
        self._lines, self._file = lines, file

    @override
    def handle(self, record: logging.LogRecord) -> None:
        try:
            rest = f"{record.getMessage()}\n".encode()
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except Exception:  # e.g. the reader is gone; the thread must go on with the next line
            self._lines.dropped += 1


@contextmanager
def json_logs(file: int = 2) -> Generator[None]:
    """Write what the server logs to a file descriptor, line by line; its loggers are as before afterwards.

    The end waits for a reader, but not for long.
    """
    lines = _Lines()
    writer = _Writer(lines, file)
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
        stopping = threading.Thread(target=writer.stop, daemon=True)  # `stop` waits as long as it takes
        stopping.start()
        stopping.join(_WAIT_S)
        if not stopping.is_alive() and lines.dropped:
            last = {"level": "warning", "event": "lines_dropped", "lines": lines.dropped}
            with contextlib.suppress(OSError):
                os.write(file, f"{json.dumps(last)}\n".encode())
