"""Answer HTTP requests: the Open Inference Protocol v2, ``POST /score``, health and metrics.

Answers are JSON, or binary tensors if the request asks for them. Metrics are text. An error is ``{"error": …}``. The
message has the value, the limit and the fix, but no traceback and no path of a file. A request passes through `_Gate`
(token, limits, log, metrics), an endpoint of `Application`, and a `Batcher`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import pyarrow as pa
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from hotbed.data.encoding.encoder import Encoder
from hotbed.data.encoding.json_rows import InputColumn
from hotbed.errors import BatchError, DataError, RequestError, SpecError, did_you_mean
from hotbed.machine import release
from hotbed.serve.batching import Batcher, Scored, explain_error
from hotbed.serve.monitoring import ServerMetrics
from hotbed.serve.options import ServeOptions
from hotbed.serve.request_tensors import HEADER_LENGTH, input_metadata, output_names, read_tensors, write_scores
from hotbed.serve.requests import RETRY, Bodies, parse_rows, record_batch

LOG = logging.getLogger("hotbed.serve")
_INLINE_BYTES = 32 << 10
"""Largest body that is parsed in the event loop. Larger bodies are parsed in one of `_READERS` threads."""
_READERS = 2
_MOST_WAITING = 64
"""Largest number of large bodies that wait to be parsed. Further requests get status 503."""
MAX_HEAD_BYTES = 64 << 10
"""Upper limit of a request line with its headers. A chunked body's framing may have 8 more bytes per byte of body."""
_LONG_HEAD = f"the request's head: got more than {MAX_HEAD_BYTES:,} bytes. Send a shorter path and fewer headers"
_Result = TypeVar("_Result")


class Application:
    """The ASGI application of a server."""

    def __init__(
        self,
        batchers: Mapping[str, Batcher],  # models by name; the first one answers /score
        options: ServeOptions,
        token: str | None,  # token that requests must carry
        metrics: ServerMetrics,
        connections: Sized,  # the open connections
    ) -> None:
        self._batchers, self._options, self._metrics = batchers, options, metrics
        self._bodies = Bodies(options)
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="hotbed-read")
        self._reading = 0
        self._columns = dict[str, tuple[Encoder, Sequence[InputColumn]]]()
        self.draining = False
        version = "/versions/{version}"
        model = "/v2/models/{model}"
        found = [
            Route("/v2", self._server, name="server"),
            Route("/v2/health/live", self._live, name="health"),
            Route("/v2/health/ready", self._ready, name="health"),
            *(Route(f"{model}{v}", self._model, name="model") for v in ("", version)),
            *(Route(f"{model}{v}/ready", self._model_ready, name="health") for v in ("", version)),
            *(Route(f"{model}{v}/infer", self._infer, methods=["POST"], name="infer") for v in ("", version)),
            Route("/score", self._score, methods=["POST"], name="score"),
            Route("/metrics", self._text, name="metrics"),
        ]
        self.asgi: ASGIApp = Starlette(
            routes=found,
            middleware=[Middleware(_Gate, token=token, metrics=metrics, options=options, connections=connections)],
            exception_handlers={
                HTTPException: _answer_no_route,
                RequestError: _answer_error,
                ClientDisconnect: _answer_disconnect,
            },
        )
        self.asgi.router.redirect_slashes = False

    def close(self) -> None:
        """End the threads that parse bodies."""
        self._readers.shutdown(wait=False, cancel_futures=True)

    async def _server(self, request: Request) -> Response:
        return _json({"name": "hotbed", "version": release(), "extensions": ["binary_tensor_data"]})

    async def _live(self, request: Request) -> Response:
        return _json({"live": True})

    async def _ready(self, request: Request) -> Response:
        ready = not self.draining and not any(of.model.is_broken for of in self._batchers.values())
        return _json({"ready": ready}, 200 if ready else 503)

    async def _model(self, request: Request) -> Response:
        name, batcher = self._select_model(request)
        model = batcher.model
        return _json(
            {
                "name": name,
                "versions": [str(model.step)],
                "platform": "hotbed",
                "inputs": input_metadata(model.encoder.columns()),
                "outputs": [{"name": o, "datatype": "FP64", "shape": [-1]} for o in output_names(model.labels)],
            }
        )

    async def _model_ready(self, request: Request) -> Response:
        name, batcher = self._select_model(request)
        ready = not self.draining and not batcher.model.is_broken
        return _json({"name": name, "ready": ready}, 200 if ready else 503)

    async def _text(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=self._metrics.content_type)

    async def _score(self, request: Request) -> Response:
        name, batcher = next(iter(self._batchers.items()))
        async with self._bodies.read(request) as body:
            content_type = request.headers.get("content-type", "")

            def read() -> tuple[pa.RecordBatch | None, str | None]:
                parsed = parse_rows(body, content_type, self._options.max_request_rows)
                encoder, columns = self._inputs(name, batcher)
                values, rows = parsed.columns([c.name for c in columns], self._options.max_request_rows)
                return record_batch(encoder.table(values)) if rows else None, parsed.id

            deadline = self._deadline()
            rows, id_ = await self._read(len(body), read, deadline)
        request.state.model = name
        answer: dict[str, Any] = {} if id_ is None else {"id": id_}
        if rows is None:
            return _json({**answer, "scores": [], "model": name, "version": str(batcher.model.step)})
        scored = await self._score_rows(request, batcher, rows, deadline)
        labels = batcher.model.labels
        scores = scored.scores.tolist()
        values = (
            [row[0] for row in scores] if len(labels) == 1 else [dict(zip(labels, row, strict=True)) for row in scores]
        )
        return _json({**answer, "scores": values, "model": name, "version": str(scored.step)})

    async def _infer(self, request: Request) -> Response:
        name, batcher = self._select_model(request)
        outputs = output_names(batcher.model.labels)
        header, most = request.headers.get(HEADER_LENGTH), self._options.max_request_rows
        async with self._bodies.read(request, binary=header is not None) as body:

            def read() -> tuple[pa.RecordBatch, str | None, Mapping[str, bool]]:
                _, columns = self._inputs(name, batcher)
                found = read_tensors(body, header, columns, outputs, most, self._bodies.most_json)
                return record_batch(found.columns), found.id, found.outputs

            deadline = self._deadline()
            rows, id_, wanted = await self._read(len(body), read, deadline)
        if not rows.num_rows:
            raise RequestError("the request: got no rows, expected at least one. Send at least one row")
        scored = await self._score_rows(request, batcher, rows, deadline)
        version = request.path_params.get("version", str(scored.step))
        if version != str(scored.step):
            raise _other_version(name, version, scored.step)
        answer = {"model_name": name, "model_version": version, **({} if id_ is None else {"id": id_})}
        text, length = write_scores(dict(zip(outputs, scored.scores.T, strict=True)), wanted, answer)
        if length is None:
            return Response(text, media_type="application/json")
        return Response(text, media_type="application/octet-stream", headers={HEADER_LENGTH: str(length)})

    def _select_model(self, request: Request) -> tuple[str, Batcher]:
        """Return the name and the batcher of the model in the path of a request.

        If the path also names a version, the version must be the served step.
        """
        name = str(request.path_params["model"])
        batcher = self._batchers.get(name)
        if batcher is None:
            known = list(self._batchers)
            raise RequestError(
                f"model: got {name[:100]!r}, expected one of {', '.join(known)}{did_you_mean(name, known)}",
                404,
                "not_found",
            )
        request.state.model = name
        version = request.path_params.get("version")
        if version is not None and version != str(batcher.model.step):
            raise _other_version(name, version, batcher.model.step)
        return name, batcher

    def _inputs(self, name: str, batcher: Batcher) -> tuple[Encoder, Sequence[InputColumn]]:
        """Return the encoder of the served version and its input columns. The columns are cached."""
        encoder = batcher.model.encoder
        if name not in self._columns or self._columns[name][0] is not encoder:
            self._columns[name] = encoder, encoder.columns()
        return self._columns[name]

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._options.timeout_s

    async def _read(self, size: int, read: Callable[[], _Result], deadline: float) -> _Result:
        """Parse a body. A large body is parsed in a thread, so that it delays no other request."""
        with self._explain_errors():
            try:
                if size <= _INLINE_BYTES:
                    return read()
                if self._reading >= _MOST_WAITING:
                    raise RequestError(
                        f"large bodies: got {self._reading} at once, expected at most {_MOST_WAITING}. Try again later",
                        503,
                        "busy",
                        RETRY,
                    )
                self._reading += 1
                try:
                    async with asyncio.timeout_at(deadline):
                        return await asyncio.get_running_loop().run_in_executor(self._readers, read)
                finally:
                    self._reading -= 1
            except (DataError, SpecError, BatchError) as error:
                raise RequestError(str(error), 400, "rows") from None

    async def _score_rows(self, request: Request, batcher: Batcher, rows: pa.RecordBatch, deadline: float) -> Scored:
        request.state.rows = rows.num_rows
        with self._explain_errors():
            async with asyncio.timeout_at(deadline):
                return await batcher.submit(rows)

    @contextmanager
    def _explain_errors(self) -> Generator[None]:
        try:
            yield
        except TimeoutError:
            message = f"scoring took longer than {self._options.timeout_s:g} s (--timeout_s). Try again later"
            raise RequestError(message, 504, "timeout", RETRY) from None
        except Exception as error:
            raise explain_error(error) from None


class _Gate:
    """Check the token and the limits of each request, and log and count each answer."""

    def __init__(
        self,
        app: ASGIApp,
        token: str | None,
        metrics: ServerMetrics,
        options: ServeOptions,
        connections: Sized,
    ) -> None:
        self._app, self._metrics, self._options, self._connections = app, metrics, options, connections
        self._digest = None if token is None else _digest(f"Bearer {token}".encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        start, status = time.perf_counter(), 0
        state: dict[str, Any] = scope.setdefault("state", {})

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
            await send(message)

        try:
            refusal = self._refusal(scope)
            if refusal is None:
                await self._app(scope, receive, watched)
            else:
                await _answer_error(Request(scope), refusal)(scope, receive, watched)
        except Exception as error:
            LOG.error("request_failed", extra={"details": {"path": scope["path"]}}, exc_info=error)
            if not status:
                failed = RequestError("the server failed. See the log of the server", 500, "internal")
                await _answer_error(Request(scope), failed)(scope, receive, watched)
        self._note(scope, state, status, time.perf_counter() - start)

    def _refusal(self, scope: Scope) -> RequestError | None:
        path = str(scope["path"])
        head = len(scope["raw_path"]) + len(scope["query_string"])
        if head + sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > MAX_HEAD_BYTES:
            return RequestError(_LONG_HEAD, 431, "head", {"Connection": "close"})
        if path.startswith("/v2/health/"):
            return None
        if len(self._connections) > self._options.max_connections:
            headers = {**RETRY, "Connection": "close"}
            return RequestError("too many connections. Try again later", 503, "connections", headers)
        if self._digest is None:
            return None
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if hmac.compare_digest(_digest(header), self._digest):
            return None
        return RequestError(
            "no valid token. Send Authorization: Bearer TOKEN", 401, "token", {"WWW-Authenticate": "Bearer"}
        )

    def _note(self, scope: Scope, state: Mapping[str, Any], status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "name", None) or "unknown"
        model, rows, reason = state.get("model", ""), state.get("rows", 0), state.get("reason")
        self._metrics.count_answer(route, model, status, seconds, rows, reason)
        if self._options.access_log and route != "health":
            details = {
                "method": str(scope["method"])[:20],
                "path": str(scope["path"])[:200],
                "status": status,
                "ms": round(seconds * 1000, 3),
                **{key: state[key] for key in ("model", "rows", "reason", "error") if key in state},
            }
            LOG.info("request", extra={"details": details})


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def _other_version(name: str, version: str, step: int) -> RequestError:
    return RequestError(
        f"version of {name}: got {version[:30]!r}, expected {step}. Omit the version to use the served version",
        404,
        "not_found",
    )


def _json(values: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    text = json.dumps(values, separators=(",", ":"))
    return Response(text, status, headers, media_type="application/json")


def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    request.state.reason, request.state.error = error.reason, str(error)[:500]
    return _json({"error": str(error)}, error.status, error.headers)


def _answer_no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known: Sequence[str] = ("/score", "/v2", "/v2/models/NAME/infer", "/v2/health/ready", "/metrics")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"method: got {request.method[:20]}, expected {allowed} for this path"
    else:
        message = f"path: got {request.url.path[:100]!r}, expected one of {', '.join(known)}"
    refusal = RequestError(message, error.status_code, "not_found", dict(error.headers or {}))
    return _answer_error(request, refusal)


def _answer_disconnect(request: Request, error: Exception) -> Response:
    """Return status 499 for the log and metrics, because the client has closed the connection."""
    request.state.reason = "gone"
    return Response(status_code=499)


class Connection(HttpToolsProtocol):
    """A connection with limits that uvicorn lacks, so that slow or broken clients do not delay other clients.

    uvicorn has no deadline for heads and bodies, has no limit for the framing of a body, and answers invalid HTTP with
    text instead of JSON. Here, a timer limits each phase of a request, and a second timer limits how long the client
    may leave answers unread. The phases are "idle", "head", "body" and "answer". In a last phase, "broken", the server
    ignores further data.
    """

    def __init__(self, options: ServeOptions, count_refusal: Callable[[str], None], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._options, self._count_refusal, self._read_timeout_s = options, count_refusal, options.read_timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._phase, self._framing, self._of_body = "idle", 0, 0

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._enter("idle", self._read_timeout_s)
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
            self._enter("idle", self._read_timeout_s)  # line ends between requests also stop uvicorn's own timer
        self._framing += len(data)
        if self._phase != "broken":
            super().data_received(data)
        if self._phase != "broken" and self._framing > MAX_HEAD_BYTES + 8 * self._of_body:
            self._refuse(431, "head", _LONG_HEAD)

    @override
    def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return True to keep the sending side open while a complete request is being answered."""
        return self._close_after_answers()

    @override
    def on_message_begin(self) -> None:
        self._enter("head", self._read_timeout_s)
        super().on_message_begin()

    @override
    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._enter("body", 2 * self._read_timeout_s)  # for endpoints without a body; `Bodies` has a shorter limit

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
        self._unread = self.loop.call_later(self._read_timeout_s, self._abort, "answer_not_taken")

    @override
    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        super().resume_writing()

    @override
    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "http", "the request is not HTTP/1.1")

    def _enter(self, phase: str, seconds: float | None) -> None:
        """Begin a phase, which may last ``seconds`` (None: no limit)."""
        self._phase = phase
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        if self._phase == "head":
            message = f"the request's head took longer than {self._read_timeout_s:g} s. Send the head at once"
            self._refuse(408, "slow", message)
        else:
            self._abort("idle" if self._phase == "idle" else "slow")

    def _abort(self, reason: str) -> None:
        self._count_refusal(reason)
        self.transport.abort()

    def _refuse(self, status: int, reason: str, message: str) -> None:
        """Refuse further data: send pending answers, or if there are none, an error. Then close the connection."""
        self._count_refusal(reason)
        pending = self._close_after_answers()
        self._enter("broken", None)
        if not pending:
            body = json.dumps({"error": message}).encode()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(b"".join([STATUS_LINE[status], head, body]))
            self.transport.close()

    def _close_after_answers(self) -> bool:
        """Return whether an answer is pending. If so, uvicorn will close the connection after this answer."""
        cycle: Any = self.cycle
        if cycle is None or cycle.response_complete or (self._phase == "body" and not cycle.response_started):
            return False
        cycle.keep_alive = False
        return True
