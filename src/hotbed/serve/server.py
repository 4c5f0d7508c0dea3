"""Run the HTTP server until a signal, and then drain the server.

After SIGTERM, readiness reports 503, and new requests are still answered for ``drain_s`` seconds, so that load
balancers can react. Then the port is closed, pending requests are finished, and the process ends with status 0. SIGINT
closes the port without a drain. A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import uvicorn
from typing_extensions import override

from hotbed.errors import RecipeError, StoppedError
from hotbed.serve.app import Application, Connection
from hotbed.serve.batching import Batcher
from hotbed.serve.follower import Follower
from hotbed.serve.monitoring import ModelState, ServerMetrics
from hotbed.serve.options import ServeOptions
from hotbed.serve.served_model import ServedModel

LOG = logging.getLogger("hotbed.serve")
_WAIT_FOR_THREADS_S = 5.0
_SWITCH_S = 1e-4
"""Interval in which Python switches threads. The default, 5 ms, is longer than most requests."""


@dataclass(frozen=True)
class Served:
    """A served model, its name, and its `Follower` if the model follows training (otherwise None)."""

    name: str
    model: ServedModel
    follower: Follower | None = None


def listen(options: ServeOptions) -> socket.socket:
    """Return a socket that is bound to the port. Raise `RecipeError` if the port cannot be bound.

    Call this function before models are loaded, so that a wrong address fails at once.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise RecipeError(
            f"--host: got {options.host!r}, expected an address of this machine ({error.strerror})"
        ) from None
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
    except OSError as error:
        taken.close()
        raise RecipeError(
            f"--host {options.host} --port {options.port} cannot be bound by this process ({error.strerror}). Choose a "
            "different --port, or 0 for a free port"
        ) from None
    return taken


class Server:
    """An HTTP server that scores requests with models.

    Parameters
    ----------
    models
        Served models; the first one answers ``/score``. The caller closes them.
    options
        See `ServeOptions`.
    taken
        A bound socket, from `listen`.
    token
        Token that requests must carry, or None.
    """

    def __init__(
        self,
        models: Sequence[Served],
        options: ServeOptions,
        taken: socket.socket,
        token: str | None = None,
    ) -> None:
        self._models, self._options, self._socket = {served.name: served for served in models}, options, taken
        self.host, self.port = taken.getsockname()[:2]
        self._batchers = dict[str, Batcher]()
        connections = set[Any]()
        self._metrics = ServerMetrics(self._states, connections)
        for name, served in self._models.items():
            self._batchers[name] = Batcher(
                served.model,
                max_batch_rows=options.max_batch_rows,
                max_wait_ms=options.max_wait_ms,
                max_queue_rows=options.max_queue_rows,
                observe=self._metrics.batch_counter(name),
            )
        self._app = Application(self._batchers, options, token, self._metrics, connections)
        config = uvicorn.Config(
            self._app.asgi,
            http=cast(Any, partial(Connection, options, self._metrics.count_refusal)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=max(1, round(options.idle_timeout_s)),
            timeout_graceful_shutdown=max(1, round(options.timeout_s + options.read_timeout_s)),
        )
        self._uvicorn = _Uvicorn(config, self._listening, self.drain)
        self._uvicorn.server_state.connections = connections
        self.started = threading.Event()

    def run(self) -> None:
        """Answer requests until a signal or a call of `stop`.

        Raise `StoppedError` if a second signal ended the server before all requests were answered.
        """
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        try:
            self._uvicorn.run(sockets=[self._socket])
        finally:
            sys.setswitchinterval(before)
            for batcher in self._batchers.values():
                batcher.close(0.0 if self._uvicorn.force_exit else _WAIT_FOR_THREADS_S)
            self._app.close()
            LOG.info("stopped")
        if self._uvicorn.force_exit:
            number = self._uvicorn.signal or signal.SIGTERM
            raise StoppedError("a second signal ended the server before all requests were answered", number)

    def stop(self) -> None:
        """Begin to shut down, as after SIGINT. Any thread may call this method."""
        if not self._app.draining:
            self._uvicorn.shut_down(signal.SIGINT)

    def _listening(self) -> None:
        for name, served in self._models.items():
            details = {"model": name, "step": served.model.step, "state": served.model.state}
            LOG.info("model", extra={"details": details})
        LOG.info("ready", extra={"details": {"host": self.host, "port": self.port}})
        self.started.set()

    def drain(self, number: int) -> float:
        """Begin to drain after signal ``number``. Return the number of seconds until the port must be closed."""
        self._app.draining = True
        LOG.info("draining", extra={"details": {"signal": signal.Signals(number).name}})
        return self._options.drain_s if number == signal.SIGTERM else 0.0

    def _states(self) -> dict[str, ModelState]:
        found = dict[str, ModelState]()
        for name, served in self._models.items():
            model, counters = served.model, served.model.counters()
            queued = self._batchers[name].queued_rows
            gauges = {"model_step": model.step, "queued_rows": queued, "model_broken": model.is_broken}
            if (follower := served.follower) is not None:
                counters |= {f"versions_{key}": of for key, of in follower.counters().items()}
                gauges |= {"staleness_seconds": follower.staleness_s, "behind_seconds": follower.behind_s}
            found[name] = ModelState(gauges, counters)
        return found


class _Uvicorn(uvicorn.Server):
    """A server of uvicorn that drains before it closes the port. Unlike uvicorn, it does not raise signals again."""

    def __init__(self, config: uvicorn.Config, listening: Callable[[], None], draining: Callable[[int], float]) -> None:
        super().__init__(config)
        self.signal: int | None = None
        self._listening, self._draining = listening, draining
        self._loop: asyncio.AbstractEventLoop | None = None

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._listening()

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @override
    def handle_exit(self, sig: int, frame: object) -> None:
        self.shut_down(sig)

    def shut_down(self, number: int) -> None:
        """Begin to drain after signal ``number``. A second call ends the server at once. Any thread may call this."""
        loop = self._loop
        if loop is None:
            self.should_exit = True
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(self._begin, number)

    def _begin(self, number: int) -> None:
        if self.signal is not None:
            self.should_exit = self.force_exit = True
            return
        self.signal = number
        asyncio.get_running_loop().call_later(self._draining(number), self._end)

    def _end(self) -> None:
        self.should_exit = True
