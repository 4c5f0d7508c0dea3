"""Hold connections to limits that uvicorn leaves open, so that slow or broken clients hold nobody else.

uvicorn has no deadline for a head or a body that trickles and no limit of the bytes around a body, and it answers what
is no HTTP as text. An application can limit the rest: `hotbed.serve.app`, `hotbed.serve.bodies`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from hotbed.serve.options import ServeOptions

MAX_HEAD_BYTES = 64 << 10
"""Upper limit of a request line and its headers, and of what frames a chunked body beyond 8 times the body."""


class Connection(HttpToolsProtocol):
    """A connection with a timer for each phase of a request, and one for answers that the client does not read.

    Its phase is "idle", "head" or "body"; "answer" after a body; "broken" once nothing is read any more.
    """

    def __init__(self, options: ServeOptions, refused: Callable[[str], None], **given: Any) -> None:
        super().__init__(**given)
        self._options, self._refused, self._seconds = options, refused, options.read_timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._phase, self._framing, self._of_body = "idle", 0, 0

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._enter("idle", self._seconds)
        if len(self.connections) > 2 * self._options.max_connections:
            self._abort("connections")

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._enter("broken", None)
        self.resume_writing()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        if self._phase == "answer":
            self._enter("idle", self._seconds)  # line ends between requests stop uvicorn's own timer, too
        self._framing += len(data)
        if self._phase != "broken":
            super().data_received(data)
        if self._phase != "broken" and self._framing > MAX_HEAD_BYTES + 8 * self._of_body:
            self._refuse(431, "head", f"the request's head is longer than {MAX_HEAD_BYTES:,} bytes")

    @override
    def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Keep the sending side open while a complete request is being answered."""
        return self._close_after_answers()

    @override
    def on_message_begin(self) -> None:
        self._enter("head", self._seconds)
        super().on_message_begin()

    @override
    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._enter("body", 2 * self._seconds)  # for applications that read no body; `Bodies` answers earlier

    @override
    def on_body(self, body: bytes) -> None:
        self._of_body, self._framing = self._of_body + len(body), self._framing - len(body)
        super().on_body(body)

    @override
    def on_message_complete(self) -> None:
        self._enter("answer", None)
        self._framing = self._of_body = 0
        super().on_message_complete()

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self._seconds, self._abort, "answer_not_taken")

    @override
    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        super().resume_writing()

    @override
    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "http", "this is no HTTP/1.1 request")

    def _enter(self, phase: str, seconds: float | None) -> None:
        """Begin a phase that may last this long."""
        self._phase = phase
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        if self._phase == "head":
            message = f"the request's head took longer than {self._seconds:g} s; send it at once"
            self._refuse(408, "slow", message)
        else:
            self._abort("idle" if self._phase == "idle" else "slow")

    def _abort(self, reason: str) -> None:
        self._refused(reason)
        self.transport.abort()

    def _refuse(self, status: int, reason: str, message: str) -> None:
        """Answer what is no request, and close; requests before it are answered first."""
        self._refused(reason)
        answers_follow = self._close_after_answers()
        self._enter("broken", None)
        if not answers_follow:
            body = json.dumps({"error": message}).encode()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(b"".join([STATUS_LINE[status], head, body]))
            self.transport.close()

    def _close_after_answers(self) -> bool:
        """Close after the answers that are under way; return whether there are any."""
        cycle: Any = self.cycle
        if cycle is None or cycle.response_complete or (self._phase == "body" and not cycle.response_started):
            return False
        cycle.keep_alive = False
        return True
