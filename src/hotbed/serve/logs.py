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
from typing import TextIO

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


class _Lines(logging.Handler):
    """Writes records by a thread; where they wait because nobody reads the stream, they are dropped and counted.

    A file is written without a lock of Python's, for which the end of the process would wait.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._records = queue.Queue[logging.LogRecord | None](_WAITING_LINES)
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="hotbed-log", daemon=True)
        self._thread.start()

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if not self._put(record):
            self.dropped += 1

    def stop(self, wait_s: float) -> bool:
        """Write what waits, for at most so long; whether all is written."""
        while not self._put(None):
            with contextlib.suppress(queue.Empty):
                self._records.get_nowait()
                self.dropped += 1
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def write(self, line: str) -> None:
        """Write a line."""
        try:
            file = self._stream.fileno()
        except OSError:  # of text in memory
            self._stream.write(line + "\n")
            return
        rest = f"{line}\n".encode()
        while rest:
            rest = rest[os.write(file, rest) :]

    def _put(self, record: logging.LogRecord | None) -> bool:
        try:
            self._records.put_nowait(record)
        except queue.Full:
            return False
        return True

    def _run(self) -> None:
        formatter = JsonFormatter()
        while (record := self._records.get()) is not None:
            try:
                self.write(formatter.format(record))
            except Exception:  # the reader is gone; whoever logs must not fail for it
                self.dropped += 1


@contextmanager
def json_logs(stream: TextIO) -> Generator[None]:
    """Write what the server logs to a stream, line by line; its loggers are as before afterwards.

    The end waits for a reader, but not for long.
    """
    lines = _Lines(stream)
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
        if lines.stop(_WAIT_S) and lines.dropped:
            with contextlib.suppress(OSError, ValueError):
                lines.write(json.dumps({"level": "warning", "event": "lines_dropped", "lines": lines.dropped}))
