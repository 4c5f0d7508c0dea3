"""A server between a test and an object store, which fails as often as the test says."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import parse_qs, urlsplit

Fault = Literal["busy", "dropped", "answer lost"]
"""What becomes of a request: a 503; no answer at all; done, but its answer never comes."""


class Unreliable:
    """Forwards requests to a store, but for the next ones in ``faults``.

    Attributes
    ----------
    uri
        That of the store, through this server.
    faults
        What becomes of the next requests, from the last to the first.
    methods
        Of the requests that came.
    """

    def __init__(self, uri: str) -> None:
        parts = urlsplit(uri)
        self._store = parse_qs(parts.query)["endpoint_override"][0]
        self.faults: list[Fault] = []
        self.methods: list[str] = []
        this = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                this.methods.append(self.command)
                fault = this.faults.pop() if this.faults else None
                if fault == "busy":
                    self.send_response(503)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                if fault == "dropped":
                    self.close_connection = True
                    return
                connection = http.client.HTTPConnection(this._store)
                connection.request(self.command, self.path, body, dict(self.headers))
                answer = connection.getresponse()
                content = answer.read()
                connection.close()
                if fault == "answer lost":
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else None
                self.send_header("Content-Length", length or str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.uri = uri.replace(self._store, f"127.0.0.1:{self._server.server_port}")

    def close(self) -> None:
        """Be gone: from now on nothing answers."""
        self.faults = ["dropped"] * 100_000  # also connections that are open
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def unreliable(uri: str) -> Generator[Unreliable]:
    """Serve as long as the body takes."""
    server = Unreliable(uri)
    try:
        yield server
    finally:
        server.close()
