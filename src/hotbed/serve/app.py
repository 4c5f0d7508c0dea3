"""Answer HTTP requests: the Open Inference Protocol v2, ``POST /score``, health and metrics.

Every answer but metrics is JSON (or binary tensors that were asked for), also every error: ``{"error": …}`` says the
value, the limit and the fix, never a traceback or a path. `Application` is the ASGI application; a request goes through
`_Gate` (token, overload, log and metrics), its endpoint, `Batcher`, and back.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pyarrow as pa
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotbed.errors import BatchError, DataError, RequestError, SpecError, did_you_mean
from hotbed.machine import release
from hotbed.serve.batching import Batcher, Scored, explained
from hotbed.serve.bodies import Bodies
from hotbed.serve.connections import MAX_HEAD_BYTES
from hotbed.serve.inputs import parse_rows, record_batch
from hotbed.serve.metrics import ServerMetrics
from hotbed.serve.options import ServeOptions
from hotbed.serve.tensors import HEADER_LENGTH, input_metadata, output_names, read_tensors, write_scores

LOG = logging.getLogger("hotbed.serve")
_INLINE_BYTES, _READERS = 32 << 10, 2
_MOST_WAITING = 64
"""Large bodies that are being read, or wait for it; what comes beyond that is answered 503."""
_Result = TypeVar("_Result")


class Application:
    """The ASGI application of a server."""

    def __init__(
        self,
        batchers: Mapping[str, Batcher],  # models by name; the first one answers /score
        options: ServeOptions,
        token: str | None,  # required from requests, unless None
        metrics: ServerMetrics,
        connections: Callable[[], int],  # returns the number of open connections
    ) -> None:
        self._batchers, self._options, self._metrics = batchers, options, metrics
        self._bodies = Bodies(options)
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="hotbed-read")
        self._reading = 0
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
            exception_handlers={HTTPException: _no_route, RequestError: _told, ClientDisconnect: _gone},
        )
        self.asgi.router.redirect_slashes = False

    def close(self) -> None:
        """End the threads that read bodies."""
        self._readers.shutdown(wait=False, cancel_futures=True)

    async def _server(self, request: Request) -> Response:
        return _json({"name": "hotbed", "version": release(), "extensions": ["binary_tensor_data"]})

    async def _live(self, request: Request) -> Response:
        return _json({"live": True})

    async def _ready(self, request: Request) -> Response:
        ready = not self.draining and not any(of.model.is_broken for of in self._batchers.values())
        return _json({"ready": ready}, 200 if ready else 503)

    async def _model(self, request: Request) -> Response:
        name, batcher = self._chosen(request)
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
        name, batcher = self._chosen(request)
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
                encoder = batcher.model.encoder
                columns = encoder.columns()
                values, rows = parsed.columns([c.name for c in columns], self._options.max_request_rows)
                return record_batch(encoder.table(values)) if rows else None, parsed.id

            deadline = self._deadline()
            rows, id_ = await self._read(len(body), read, deadline)
        request.state.model = name
        answer: dict[str, Any] = {} if id_ is None else {"id": id_}
        if rows is None:
            return _json({**answer, "scores": [], "model": name, "version": str(batcher.model.step)})
        scored = await self._scored(request, batcher, rows, deadline)
        labels = batcher.model.labels
        scores = scored.scores.tolist()
        values = (
            [row[0] for row in scores] if len(labels) == 1 else [dict(zip(labels, row, strict=True)) for row in scores]
        )
        return _json({**answer, "scores": values, "model": name, "version": str(scored.step)})

    async def _infer(self, request: Request) -> Response:
        name, batcher = self._chosen(request)
        outputs = output_names(batcher.model.labels)
        header, most = request.headers.get(HEADER_LENGTH), self._options.max_request_rows
        async with self._bodies.read(request, binary=header is not None) as body:

            def read() -> tuple[pa.RecordBatch, str | None, Mapping[str, bool]]:
                columns = batcher.model.encoder.columns()
                found = read_tensors(body, header, columns, outputs, most, self._bodies.most_json)
                return record_batch(found.columns), found.id, found.outputs

            deadline = self._deadline()
            rows, id_, wanted = await self._read(len(body), read, deadline)
        if not rows.num_rows:
            raise RequestError("the request has no rows; its tensors must have at least one")
        scored = await self._scored(request, batcher, rows, deadline)
        version = request.path_params.get("version", str(scored.step))
        if version != str(scored.step):
            raise _other_version(name, version, scored.step)
        answer = {"model_name": name, "model_version": version, **({} if id_ is None else {"id": id_})}
        text, length = write_scores(dict(zip(outputs, scored.scores.T, strict=True)), wanted, answer)
        if length is None:
            return Response(text, media_type="application/json")
        return Response(text, media_type="application/octet-stream", headers={HEADER_LENGTH: str(length)})

    def _chosen(self, request: Request) -> tuple[str, Batcher]:
        """The model that a path names; a version must be the one that it has."""
        name = str(request.path_params["model"])
        batcher = self._batchers.get(name)
        if batcher is None:
            known = list(self._batchers)
            raise RequestError(
                f"there is no model {name[:100]!r}; there are {', '.join(known)}{did_you_mean(name, known)}",
                404,
                "not_found",
            )
        request.state.model = name
        version = request.path_params.get("version")
        if version is not None and version != str(batcher.model.step):
            raise _other_version(name, version, batcher.model.step)
        return name, batcher

    def _deadline(self) -> float:
        """When a request whose last byte came now must be answered."""
        return asyncio.get_running_loop().time() + self._options.timeout_s

    async def _read(self, size: int, read: Callable[[], _Result], deadline: float) -> _Result:
        """Read a body: a small one here, a large one in a thread, so that others are answered meanwhile."""
        try:
            if size <= _INLINE_BYTES:
                return read()
            if self._reading >= _MOST_WAITING:
                raise RequestError(
                    f"{self._reading} large bodies are being read, at most {_MOST_WAITING} may; try again later",
                    503,
                    "busy",
                    {"Retry-After": "1"},
                )
            self._reading += 1
            try:
                async with asyncio.timeout_at(deadline):
                    return await asyncio.get_running_loop().run_in_executor(self._readers, read)
            finally:
                self._reading -= 1
        except TimeoutError:
            raise self._late() from None
        except (DataError, SpecError, BatchError) as error:
            raise RequestError(str(error), 400, "rows") from None
        except Exception as error:
            raise explained(error) from None

    async def _scored(self, request: Request, batcher: Batcher, rows: pa.RecordBatch, deadline: float) -> Scored:
        request.state.rows = rows.num_rows
        try:
            async with asyncio.timeout_at(deadline):
                return await batcher.submit(rows)
        except TimeoutError:
            raise self._late() from None
        except Exception as error:
            raise explained(error) from None

    def _late(self) -> RequestError:
        return RequestError(
            f"the scores took longer than {self._options.timeout_s:g} s (--timeout_s); try again later",
            504,
            "timeout",
            {"Retry-After": "1"},
        )


class _Gate:
    """Ask for the token, refuse what is too much, and log and count every answer."""

    def __init__(
        self,
        app: ASGIApp,
        token: str | None,
        metrics: ServerMetrics,
        options: ServeOptions,
        connections: Callable[[], int],
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
                await _told(Request(scope), refusal)(scope, receive, watched)
        except Exception as error:
            LOG.error("request_failed", extra={"details": {"path": scope["path"]}}, exc_info=error)
            if not status:
                failed = RequestError("the server failed; its log says why", 500, "internal")
                await _told(Request(scope), failed)(scope, receive, watched)
        self._note(scope, state, status, time.perf_counter() - start)

    def _refusal(self, scope: Scope) -> RequestError | None:
        path = str(scope["path"])
        head = len(scope["raw_path"]) + len(scope["query_string"])
        if head + sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > MAX_HEAD_BYTES:
            message = f"the request's head is longer than {MAX_HEAD_BYTES:,} bytes"
            return RequestError(message, 431, "head", {"Connection": "close"})
        if path.startswith("/v2/health/"):
            return None
        if self._connections() > self._options.max_connections:
            headers = {"Retry-After": "1", "Connection": "close"}
            return RequestError("the server has too many connections; try again later", 503, "connections", headers)
        if self._digest is None:
            return None
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if hmac.compare_digest(_digest(given), self._digest):
            return None
        return RequestError(
            "a token is needed: send Authorization: Bearer TOKEN", 401, "token", {"WWW-Authenticate": "Bearer"}
        )

    def _note(self, scope: Scope, state: Mapping[str, Any], status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "name", None) or "unknown"
        model, rows, reason = state.get("model", ""), state.get("rows", 0), state.get("reason")
        self._metrics.answered(route, model, status, seconds, rows, reason)
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
        f"version {version[:30]!r} of {name} is not served; it is at {step}. Leave the version out to ask the newest",
        404,
        "not_found",
    )


def _json(values: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    text = json.dumps(values, separators=(",", ":"))
    return Response(text, status, headers, media_type="application/json")


def _told(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    request.state.reason, request.state.error = error.reason, str(error)[:500]
    return _json({"error": str(error)}, error.status, error.headers)


def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known: Sequence[str] = ("/score", "/v2", "/v2/models/NAME/infer", "/v2/health/ready", "/metrics")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{request.method[:20]} is not for this path; use {allowed}"
    else:
        message = f"there is nothing at {request.url.path[:100]!r}; there are {', '.join(known)}"
    refusal = RequestError(message, error.status_code, "not_found", dict(error.headers or {}))
    return _told(request, refusal)


def _gone(request: Request, error: Exception) -> Response:
    """The client has closed the connection; nobody reads this."""
    request.state.reason = "gone"
    return Response(status_code=499)
