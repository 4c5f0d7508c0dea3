"""A real redis-server for a test, on a socket of its own; tests are skipped where the program is absent."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest


class RedisServer:
    """Start and stop one; what it holds is in its memory alone."""

    def __init__(self, *options: str) -> None:
        self._program = shutil.which("redis-server")
        if self._program is None:
            pytest.skip("no redis-server is installed")
        pytest.importorskip("redis")
        self._folder = tempfile.TemporaryDirectory(prefix="redis")  # short: paths of sockets have at most 107 bytes
        self._socket = Path(self._folder.name) / "s"
        self.address = f"unix://{self._socket}"
        self._options = options
        self.start()

    def start(self) -> None:
        given = ["--port", "0", "--unixsocket", str(self._socket), "--save", "", *self._options]
        assert self._program is not None
        self._process = subprocess.Popen(
            [self._program, *given, "--dir", self._folder.name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                self.client().ping()
                return
            except Exception:
                if self._process.poll() is not None:
                    raise ChildProcessError("redis-server ended") from None
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def client(self) -> Any:
        import redis

        return redis.Redis.from_url(self.address)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self._folder.cleanup()
