"""Hold connections to limits that uvicorn leaves open, so that slow or broken clients hold nobody else.

A connection is in one of three phases, each with a deadline: waiting for a request's head (until uvicorn has parsed
it), receiving its body, and writing an answer that the client does not take. Between requests uvicorn's own timer runs.
What is no HTTP at all is answered as JSON, like all other errors. A client that has sent its request and closed its
sending half still gets the answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
"""Bytes of a request line and its headers; the same for what frames a body in chunks, beyond 8 times the body."""
OVERLOADED = "hotbed.overloaded"
"""Key of a request's scope: whether there are more connections than the server has requests of answered."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of connections, see `ServeOptions`; ``refused`` is called with the reason of each that is closed."""

    max_connections: int
    read_timeout_s: float
    refused: Callable[[str], None]


def limited_protocol(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """Make the class that uvicorn makes connections of."""
    return type("LimitedConnection", (_Connection,), {"limits": limits})


class _Connection(HttpToolsProtocol):
    limits: ConnectionLimits

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadline: asyncio.TimerHandle | None = None
        self._unwritten: asyncio.TimerHandle | None = None
        self._in_head = self._in_message = self._ended = self._broken = False
        self._framing = self._of_body = self._head = 0

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        if len(self.connections) > 2 * self.limits.max_connections:
            self.limits.refused("connections")
            transport.abort()
            return
        self._expect_head()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        if self._unwritten is not None:
            self._unwritten.cancel()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        if self._broken:
            return
        if not self._in_message and self._deadline is None:
            self._expect_head()  # also of line ends between requests, which are no part of any
        before, self._ended = self._of_body, False
        super().data_received(data)
        self._framing = 0 if self._ended else self._framing + len(data) - max(0, self._of_body - before)
        if not self._ended and self._framing > MAX_HEAD_BYTES + 8 * self._of_body and not self._broken:
            self._refuse_head()

    @override
    def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Keep the sending side open while a complete request is being answered."""
        cycle = self._current()
        if cycle is None or cycle.response_complete or self._in_message:
            return False
        cycle.keep_alive = False
        return True

    @override
    def on_message_begin(self) -> None:
        self._in_head = self._in_message = True
        self._of_body = self._head = 0
        if self._deadline is None:
            self._expect_head()
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)[OVERLOADED] = len(self.connections) > self.limits.max_connections

    @override
    def on_url(self, url: bytes) -> None:
        self._head += len(url)
        super().on_url(url)

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        self._head += len(name) + len(value) + 4
        super().on_header(name, value)

    @override
    def on_headers_complete(self) -> None:
        if self._head > MAX_HEAD_BYTES:
            self._refuse_head()
            return
        self._in_head = False
        self._cancel()
        # The application ends a slow body with an answer; this is for those that it does not read.
        self._deadline = self.loop.call_later(2 * self.limits.read_timeout_s, self._late)
        super().on_headers_complete()

    @override
    def on_body(self, body: bytes) -> None:
        self._of_body += len(body)
        if not self._broken:
            super().on_body(body)

    @override
    def on_message_complete(self) -> None:
        self._in_message, self._ended = False, True
        self._cancel()
        if not self._broken:
            super().on_message_complete()

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unwritten is None:
            self._unwritten = self.loop.call_later(self.limits.read_timeout_s, self._not_taken)

    @override
    def resume_writing(self) -> None:
        if self._unwritten is not None:
            self._unwritten.cancel()
            self._unwritten = None
        super().resume_writing()

    @override
    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "http", "this is no HTTP/1.1 request")

    def _current(self) -> Any:
        """The newest request, None before the first."""
        return self.cycle

    def _expect_head(self) -> None:
        self._deadline = self.loop.call_later(self.limits.read_timeout_s, self._late)

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if not self._in_message:  # it never began one
            self.limits.refused("idle")
            self.transport.abort()
        elif self._in_head:
            seconds = self.limits.read_timeout_s
            self._refuse(408, "slow", f"the request's head took longer than {seconds:g} s; send it at once")
        else:
            self.limits.refused("slow")
            self.transport.abort()

    def _not_taken(self) -> None:
        self.limits.refused("answer_not_taken")
        self.transport.abort()

    def _refuse_head(self) -> None:
        self._refuse(431, "head", f"the request's head is longer than {MAX_HEAD_BYTES:,} bytes")

    def _refuse(self, status: int, reason: str, message: str) -> None:
        """Answer what is no request, and close; requests before it are answered first."""
        self._broken = True
        self._cancel()
        self.limits.refused(reason)
        cycle = self._current()
        if cycle is not None and not cycle.response_complete:
            waits = self._in_head or not cycle.more_body  # of the request before this one
            if waits or cycle.response_started:
                cycle.keep_alive = False
                return
        body = json.dumps({"error": message}).encode()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(b"".join([STATUS_LINE[status], head, body]))
        self.transport.close()
