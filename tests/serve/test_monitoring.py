"""Protects: a log that nobody reads holds neither requests nor the end of the process; what it lacks is counted."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from logging.handlers import QueueHandler
from pathlib import Path

import pytest

from hotbed.serve import monitoring
from tests.serve.clients import LONG_S

LOG = logging.getLogger("hotbed.serve")
UNREAD = """
import logging
from hotbed.serve import monitoring
monitoring._WAIT_S, monitoring._WAITING_LINES = 0.1, 500
with monitoring.json_logs():
    for _ in range(2000):
        logging.getLogger("hotbed.serve").info("x" * 1000)
print("ended")
"""


def test_a_process_ends_though_nobody_reads_its_log() -> None:
    """A pipe takes 64 KB; the thread that writes the rest stands still, and most lines find no room to wait."""
    command = [sys.executable, "-c", UNREAD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.wait(LONG_S) == 0
        finally:
            process.kill()
        assert process.stdout is not None
        assert process.stdout.read() == b"ended\n"


def test_lines_that_find_no_room_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    filled = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            filled += os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    monkeypatch.setattr(monitoring, "_WAITING_LINES", 5)
    formatted = list[int]()

    class Detail(int):
        """Records that it was formatted."""

        def __repr__(self) -> str:
            formatted.append(int(self))
            return super().__repr__()

    with os.fdopen(reader, "rb") as stream, ThreadPoolExecutor(1) as pool:
        with monitoring.json_logs(writer):
            for i in range(20):
                LOG.info("line %r", Detail(i))
            content = pool.submit(stream.read)
        os.close(writer)
        *lines, last = map(json.loads, content.result(LONG_S)[filled:].splitlines())
    assert last["event"] == "lines_dropped"
    assert 14 <= last["lines"] <= 15
    assert len(lines) + last["lines"] == 20
    assert len(formatted) == len(lines)


def test_lines_that_cannot_be_formatted_or_written_are_counted(tmp_path: Path) -> None:
    unformatted = logging.LogRecord("hotbed", logging.INFO, __file__, 1, "line %d", ("x",), None)
    with (tmp_path / "log").open("w+b") as file:
        with monitoring.json_logs(file.fileno()):
            (handler,) = (of for of in logging.getLogger("hotbed").handlers if isinstance(of, QueueHandler))
            LOG.info("line %d", "x")
            handler.queue.put_nowait(unformatted)
            LOG.info("line %d", 3)
        file.seek(0)
        line, last = map(json.loads, file)
    assert line["event"] == "line 3"
    assert (last["event"], last["lines"]) == ("lines_dropped", 2)


def test_a_reader_that_is_gone_disturbs_nobody() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with monitoring.json_logs(writer):
        LOG.info("nobody reads this")
    os.close(writer)
