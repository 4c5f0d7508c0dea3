"""Define `ServeOptions`: every option of the HTTP server, once, with its limits."""

from __future__ import annotations

import ipaddress
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from hotbed.errors import RecipeError

TOKEN_VARIABLE = "HOTBED_SERVE_TOKEN"
_SHORTEST_TOKEN, _LONGEST_TOKEN_FILE = 16, 4096
_POSITIVE = (
    "max_batch_rows",
    "max_queue_rows",
    "max_request_rows",
    "max_body_bytes",
    "max_json_bytes",
    "max_buffered_bytes",
    "max_connections",
    "timeout_s",
    "read_timeout_s",
    "idle_timeout_s",
)
_LONGEST_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How the HTTP server listens, how it puts requests together, and what it refuses.

    Parameters
    ----------
    host
        Address to listen on. Others than this machine's own (127.0.0.1, ::1, localhost) need a token.
    port
        Port to listen on; 0 takes a free one, which the log says.
    token_file
        File with the token that requests must carry (``Authorization: Bearer TOKEN``); default: the environment
        variable HOTBED_SERVE_TOKEN, if it is set. Health needs none.
    allow_anonymous
        Answer anybody who reaches the port, on any address, without a token.
    max_batch_rows
        Rows that are computed at once. A request with more is computed by itself, never in parts.
    max_wait_ms
        How long the first request of a batch waits for others, in milliseconds.
    max_queue_rows
        Rows that may wait for a model; what comes beyond that is answered 503 with Retry-After.
    max_request_rows
        Rows of one request.
    max_body_bytes
        Bytes of a request's body.
    max_json_bytes
        Bytes of it that are JSON: parsing takes many times the time and memory that binary tensors take.
    max_buffered_bytes
        Bytes of all bodies together that are being received or wait to be read.
    max_connections
        Connections whose requests are answered; those beyond get 503, beyond twice as many they are closed at once.
    timeout_s
        Seconds from a request's last byte until it is answered 504; reading its body counts.
    read_timeout_s
        Seconds in which a client must have sent the head of a request, then its body. Once more than 64 KiB of answers
        wait to be sent, the client must also read them within this time.
    idle_timeout_s
        Seconds that an idle connection is kept open.
    drain_s
        Seconds after SIGTERM during which new requests are still answered while readiness says 503.
    access_log
        Log a line per request.

    Raises
    ------
    RecipeError
        If a value is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    token_file: str | None = None
    allow_anonymous: bool = False
    max_batch_rows: int = 1024
    max_wait_ms: float = 1.0
    max_queue_rows: int = 16_384
    max_request_rows: int = 16_384
    max_body_bytes: int = 16 << 20
    max_json_bytes: int = 1 << 20
    max_buffered_bytes: int = 256 << 20
    max_connections: int = 1024
    timeout_s: float = 10.0
    read_timeout_s: float = 30.0
    idle_timeout_s: float = 75.0
    drain_s: float = 3.0
    access_log: bool = True

    def __post_init__(self) -> None:
        if fault := next(self._faults(), None):
            raise RecipeError(fault)

    def _faults(self) -> Iterator[str]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if isinstance(value, float) and not (math.isfinite(value) and value <= _LONGEST_S):
                yield f"--{name} is {value}, must be at most {_LONGEST_S:,.0f}"
        for name in _POSITIVE:
            if values[name] <= 0:
                yield f"--{name} is {values[name]}, must be above 0"
        for name in ("max_wait_ms", "drain_s"):
            if values[name] < 0:
                yield f"--{name} is {values[name]}, must be at least 0"
        if not 0 <= self.port < 1 << 16:
            yield f"--port is {self.port}, must be from 0 (any free one) to 65,535"
        if self.max_buffered_bytes < self.max_body_bytes:
            least = f"--max_body_bytes ({self.max_body_bytes:,})"
            yield f"--max_buffered_bytes is {self.max_buffered_bytes:,}, must be at least {least}"

    def token(self, environment: Mapping[str, str] = os.environ) -> str | None:
        """Read the token that requests must carry, None if there is none.

        Raise `RecipeError` if it cannot be read, is too short, or contains characters that a header may not have. Raise
        it also if there is no token and the address is not local.
        """
        if self.token_file is not None:
            where = f"the token in --token_file {self.token_file}"
            try:
                with Path(self.token_file).open("rb") as stream:
                    text = stream.read(_LONGEST_TOKEN_FILE).decode("latin-1").strip()
            except OSError as error:
                raise RecipeError(
                    f"--token_file {self.token_file} cannot be read ({error.strerror}); give a file, made with: "
                    "openssl rand -hex 32"
                ) from None
        else:
            where, text = f"the token in {TOKEN_VARIABLE}", environment.get(TOKEN_VARIABLE)
        if text is not None and (len(text) < _SHORTEST_TOKEN or not all("!" <= c <= "~" for c in text)):
            raise RecipeError(
                f"{where} has {len(text)} characters, must have at least {_SHORTEST_TOKEN}, of ASCII and without "
                "spaces; make one with: openssl rand -hex 32"
            )
        if text is None and not self.allow_anonymous and not _is_own(self.host):
            raise RecipeError(
                f"--host is {self.host}, where others can ask, but there is no token; give --token_file or "
                f"{TOKEN_VARIABLE}, or say --allow_anonymous true"
            )
        return text


def _is_own(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
