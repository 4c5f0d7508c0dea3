"""Receive bodies of requests within limits: of one, of all together, and of the time that a client takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request

from hotbed.errors import RequestError
from hotbed.serve.options import ServeOptions

_MORE_THAT_IS_TAKEN = 4
"""A body that is too long is read on up to so many times its limit: clients that send first then read the answer."""


class Bodies:
    """All bodies that are in memory, which have a limit together."""

    def __init__(self, options: ServeOptions) -> None:
        self._options, self._buffered = options, 0

    @asynccontextmanager
    async def read(self, request: Request, *, binary: bool = False) -> AsyncGenerator[bytes]:
        """Receive a body, and count it until the block ends; ``binary``: it is not all JSON, so it may be longer.

        Raises
        ------
        RequestError
            413 where it is too long, 408 too slow, 503 too much beside others, 415 where it is compressed.
        """
        parts, size = list[bytes](), 0
        most = self._options.max_body_bytes if binary else self.most_json
        try:
            self._refuse(request, most)
            async with asyncio.timeout(self._options.read_timeout_s):
                more = True
                while more:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    if size <= most:
                        parts.append(part)
                        self._buffered += len(part)
                    elif not more or size > _MORE_THAT_IS_TAKEN * self._options.max_body_bytes:
                        raise self._too_long(f"{'over ' if more else ''}{size:,}", most)
                    if self._buffered > self._options.max_buffered_bytes:
                        raise RequestError(
                            f"bodies of all requests take {self._buffered:,} bytes, at most "
                            f"{self._options.max_buffered_bytes:,} may (--max_buffered_bytes); try again later",
                            503,
                            "busy",
                            {"Retry-After": "1", "Connection": "close"},
                        )
            yield b"".join(parts)
        except TimeoutError:
            seconds = self._options.read_timeout_s
            raise RequestError(
                f"the body took longer than {seconds:g} s (--read_timeout_s), {size:,} bytes came; send it faster, or "
                "in several requests",
                408,
                "slow",
                {"Connection": "close"},
            ) from None
        finally:
            self._buffered -= sum(map(len, parts))

    @property
    def most_json(self) -> int:
        """Bytes of JSON that a body may have."""
        return min(self._options.max_json_bytes, self._options.max_body_bytes)

    def _refuse(self, request: Request, most: int) -> None:
        """Refuse by the head alone."""
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            raise RequestError(
                f"the body is {encoding[:50]!r}; send it without Content-Encoding", 415, headers={"Connection": "close"}
            )
        length = request.headers.get("content-length", "0")
        too_long = length.isdigit() and int(length) > most
        if too_long and request.headers.get("expect", "").lower() == "100-continue":
            raise self._too_long(f"{int(length):,}", most)  # the client has not sent it yet

    def _too_long(self, length: str, most: int) -> RequestError:
        if most == self._options.max_body_bytes:
            limit = f"{most:,} are taken (--max_body_bytes); send several requests"
        else:
            limit = f"{most:,} of JSON are taken (--max_json_bytes); send several requests, or binary tensors"
        return RequestError(
            f"the body has {length} bytes, at most {limit}",
            413,
            "too_large",
            {"Connection": "close"},
        )
