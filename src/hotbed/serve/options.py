"""Options of the HTTP server, with their limits."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from hotbed.checks import Count, Range, Section
from hotbed.errors import RecipeError

TOKEN_VARIABLE = "HOTBED_SERVE_TOKEN"
_SHORTEST_TOKEN, _LONGEST_TOKEN_FILE = 16, 4096
_DAY_S = 86_400.0
_Seconds = Annotated[float, Range(above=0, most=_DAY_S)]
_Delay = Annotated[float, Range(least=0, most=_DAY_S)]


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Section, where="--"):
    """Options of the HTTP server: addresses, batching and limits.

    Parameters
    ----------
    host
        Address to listen on. All addresses except 127.0.0.1, ::1 and localhost need a token.
    port
        Port to listen on (0: a free port, which the log names).
    token_file
        File with the token that requests must carry as ``Authorization: Bearer TOKEN`` (default: the environment
        variable HOTBED_SERVE_TOKEN, if it is set). Health requests need no token.
    allow_anonymous
        Whether to answer requests without a token on any address.
    max_batch_rows
        Largest number of rows in a batch. A larger request is scored as a separate batch.
    max_wait_ms
        Longest time that the first request of a batch waits for further requests, in milliseconds.
    max_queue_rows
        Largest number of rows that wait for a model. Further requests get status 503 with Retry-After.
    max_request_rows
        Largest number of rows in a request.
    max_body_bytes
        Largest request body, in bytes.
    max_json_bytes
        Largest JSON part of a body, in bytes. Parsing JSON takes much more time and memory than parsing binary tensors.
    max_buffered_bytes
        Largest sum of the sizes of all bodies that are being received or wait to be parsed, in bytes.
    max_connections
        Largest number of served connections. Requests of further connections get status 503. Beyond twice this number,
        connections are closed at once.
    timeout_s
        Seconds from the last byte of a request until the request gets status 504.
    read_timeout_s
        Seconds in which a client must send the head of a request. The client has the same time again for the body, and
        for reading answers if more than 64 KiB of answers are unread.
    idle_timeout_s
        Seconds after which an idle connection is closed.
    drain_s
        Seconds after SIGTERM in which readiness reports 503, but new requests are still answered.
    access_log
        Whether to log a line per request.

    Raises
    ------
    RecipeError
        If a value is out of range.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Range(least=0, below=1 << 16)] = 8000
    token_file: str | None = None
    allow_anonymous: bool = False
    max_batch_rows: Count = 1024
    max_wait_ms: _Delay = 1.0
    max_queue_rows: Count = 16_384
    max_request_rows: Count = 16_384
    max_body_bytes: Count = 16 << 20
    max_json_bytes: Count = 1 << 20
    max_buffered_bytes: Count = 256 << 20
    max_connections: Count = 1024
    timeout_s: _Seconds = 10.0
    read_timeout_s: _Seconds = 30.0
    idle_timeout_s: _Seconds = 75.0
    drain_s: _Delay = 3.0
    access_log: bool = True

    def contradictions(self) -> Iterator[str]:
        """Yield a message if two limits contradict each other."""
        if self.max_buffered_bytes < self.max_body_bytes:
            least = f"--max_body_bytes {self.max_body_bytes:,}"
            yield f"--max_buffered_bytes: got {self.max_buffered_bytes:,}, expected at least {least}"

    def token(self, environment: Mapping[str, str] = os.environ) -> str | None:
        """Return the token that requests must carry, or None if they need no token.

        Raise `RecipeError` if the file of the token cannot be read, if the token is too short or has characters that a
        header cannot contain, or if there is no token for an address that other machines can reach.
        """
        if self.token_file is not None:
            source = f"the token in --token_file {self.token_file}"
            try:
                with Path(self.token_file).open("rb") as stream:
                    text = stream.read(_LONGEST_TOKEN_FILE).decode("latin-1").strip()
            except OSError as error:
                raise RecipeError(
                    f"--token_file {self.token_file} cannot be read ({error.strerror}). Create the file with: "
                    "openssl rand -hex 32"
                ) from None
        else:
            source, text = f"the token in {TOKEN_VARIABLE}", environment.get(TOKEN_VARIABLE)
        if text is not None and (len(text) < _SHORTEST_TOKEN or not all("!" <= c <= "~" for c in text)):
            raise RecipeError(
                f"{source}: got {len(text)} characters, expected at least {_SHORTEST_TOKEN} ASCII characters without "
                "spaces. Create a token with: openssl rand -hex 32"
            )
        if text is None and not self.allow_anonymous and not _is_local(self.host):
            raise RecipeError(
                f"--host {self.host} is reachable from other machines, but there is no token. Set --token_file or "
                f"{TOKEN_VARIABLE}, or pass --allow_anonymous true"
            )
        return text


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
