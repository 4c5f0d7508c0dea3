"""Start a server in a thread, and ask it over real sockets."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

from hotbed.serve.follower import Follower
from hotbed.serve.options import ServeOptions
from hotbed.serve.served_model import ServedModel
from hotbed.serve.server import Served, Server, listen
from tests.serve.fake_model import FakeFollower, FakeModel

LONG_S = 60.0
ROW = {"user": 3, "item": "pen", "tags": [1, 2], "price": 0.5}


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """A server's address; every request takes a new connection."""

    def __init__(self, server: Server) -> None:
        self.server, self.host, self.port = server, server.host, server.port

    def ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=LONG_S)
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        try:
            connection.request(method, path, content, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def score(self, *rows: Mapping[str, Any]) -> list[float]:
        answer = self.ask("POST", "/score", list(rows))
        assert answer.status == 200, answer.body
        return answer.json["scores"]

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=LONG_S)

    def raw(self, content: bytes, *, half_close: bool = False) -> bytes:
        """Send bytes, and read until the server closes."""
        with self.connect() as to:
            to.sendall(content)
            if half_close:
                to.shutdown(socket.SHUT_WR)
            return rest_of(to)


def rest_of(of: socket.socket) -> bytes:
    """All that the server sends until it closes the connection."""
    parts = []
    try:
        while part := of.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def request_bytes(body: bytes, path: str = "/score", *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


@contextmanager
def serving(*models: Served, token: str | None = None, **options: Any) -> Generator[Client]:
    """A server of these models, by default a fake one; it drains at the end, and no thread is left."""
    served = models or (fake(FakeModel()),)
    chosen = ServeOptions(**{"port": 0, "access_log": False, "drain_s": 0.0, **options})
    server = Server(served, chosen, listen(chosen), token)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert server.started.wait(LONG_S)
    try:
        yield Client(server)
    finally:
        server.stop()
        thread.join(LONG_S)
        assert not thread.is_alive()


def fake(model: FakeModel, name: str = "clicks", follower: FakeFollower | None = None) -> Served:
    return Served(name, cast(ServedModel, model), cast("Follower | None", follower))
