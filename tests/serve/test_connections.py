"""Protects that clients that are slow, broken, strange or too many get an error, and others their scores."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.clients import ROW, Client, fake, request_bytes, rest_of, serving
from tests.serve.fake_model import FakeModel, score_of

WANTED = score_of(ROW, 100)
BODY = json.dumps([ROW]).encode()
TOKEN = "0123456789abcdef-secret"


@pytest.fixture(name="client", scope="module")
def _client() -> Iterator[Client]:
    with serving(max_body_bytes=100_000) as client:
        yield client


@pytest.fixture(name="hasty", scope="module")
def _hasty() -> Iterator[Client]:
    """A server that waits half a second for clients."""
    with serving(read_timeout_s=0.5, idle_timeout_s=1.0, max_connections=3) as client:
        yield client


def answers(content: bytes) -> list[tuple[int, bytes]]:
    """Take apart what a connection got: status and body of each answer; anything else fails."""
    found = []
    while content:
        head, _, rest = content.partition(b"\r\n\r\n")
        lines = head.decode("ascii").split("\r\n")
        assert lines[0].startswith("HTTP/1.1 "), content
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:])}
        status, length = int(lines[0].split()[1]), int(headers.get("content-length", "0"))
        if status != 100:
            found.append((status, rest[:length]))
            json.loads(rest[:length])
        content = rest[length:]
    return found


def test_a_client_that_closes_halfway_through_its_body_is_forgotten(client: Client) -> None:
    assert client.raw(request_bytes(BODY)[:-5], half_close=True) == b""
    assert client.score(ROW) == [WANTED]


def test_pipelined_requests_are_answered_in_order(client: Client) -> None:
    rows = [{**ROW, "user": i} for i in range(20)]
    content = b"".join(request_bytes(json.dumps([row]).encode()) for row in rows)
    found = answers(client.raw(content, half_close=True))
    assert [json.loads(body)["scores"] for _, body in found] == [[score_of(row, 100)] for row in rows]


def test_a_broken_request_comes_after_the_answer_before_it(client: Client) -> None:
    found = answers(client.raw(request_bytes(BODY) + b"\0\0\r\n\r\n"))
    assert found[0][0] == 200
    assert json.loads(found[0][1])["scores"] == [WANTED]


def test_chunked_bodies(client: Client) -> None:
    head = b"POST /score HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(BODY[i : i + 7]), BODY[i : i + 7]) for i in range(0, len(BODY), 7))
    ((status, _),) = answers(client.raw(head + chunks + b"0\r\n\r\n"))
    assert status == 200
    ((status, body),) = answers(client.raw(head + chunks + b"zz\r\n"))
    assert (status, body) == (400, b'{"error": "the request is not HTTP/1.1"}')
    ((status, _),) = answers(client.raw(head + b"186a1\r\n" + b"x" * 100_001 + b"\r\n0\r\n\r\n"))
    assert status == 413


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"GET /nowhere\r\n\r\n", 404),
        (b"hello\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),  # TLS
        (b"POST /score HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", 400),
        (b"POST /score HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nhello", 400),
        (b"POST /score HTTP/1.1\r\nContent-Length: -5\r\n\r\n", 400),
        (b"POST /score HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n", 400),
        (b"POST /score HTTP/1.1\r\nBad Header: x\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"CONNECT example.com:80 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 80_000 + b"\r\nConnection: close\r\n\r\n", 431),
        (b"GET /v2 HTTP/1.1\r\n" + b"X: y\r\n" * 20_000, 431),
        (b"GET /" + b"y" * 80_000, 431),
        (b"GET /v2 HTTP/1.1\r\nHost: x\r\nConnection: upgrade, close\r\nUpgrade: h2c\r\n\r\n", 200),
        (b"BREW /v2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 400),
        (b"DELETE /score HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 405),
        (b"GET /%2e%2e/%00/\xc3 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 400),
        (b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_is_no_request_of_ours(client: Client, content: bytes, status: int) -> None:
    ((found, body),) = answers(client.raw(content, half_close=status == 405))
    assert found == status
    if status != 200:
        assert list(json.loads(body)) == ["error"]
    assert client.score(ROW) == [WANTED]


def test_a_long_body_is_refused_before_it_is_sent(client: Client) -> None:
    with client.connect() as to:
        to.sendall(b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 100001\r\nExpect: 100-continue\r\n\r\n")
        ((status, body),) = answers(rest_of(to))
    assert (status, "expected at most 100,000 (--max_body_bytes)" in json.loads(body)["error"]) == (413, True)


@settings(max_examples=80)
@given(data=st.data())
def test_broken_bytes_get_json_or_nothing(client: Client, data: st.DataObject) -> None:
    whole = request_bytes(BODY, "/score", "Connection: close")
    at = data.draw(st.integers(0, len(whole) - 1))
    content = whole[:at] + data.draw(st.binary(max_size=4)) + whole[at + data.draw(st.integers(0, 4)) :]
    for status, body in answers(client.raw(content, half_close=True)):
        assert status == 200 or 400 <= status < 500
        assert (status == 200) == ("scores" in json.loads(body))
        if content == whole:
            assert json.loads(body)["scores"] == [WANTED]


def test_slow_heads_and_bodies_end_while_others_are_answered(hasty: Client) -> None:
    with hasty.connect() as head, hasty.connect() as body:
        head.sendall(b"POST /score HT")
        body.sendall(request_bytes(BODY)[:-5])
        assert hasty.score(ROW) == [WANTED]
        for to, message in (
            (head, "the request's head took longer than 0.5 s"),
            (body, "in 0.5 s (--read_timeout_s)"),
        ):
            ((status, content),) = answers(rest_of(to))
            assert status == 408
            assert message in json.loads(content)["error"]


def test_silent_and_idle_clients_are_closed(hasty: Client) -> None:
    with hasty.connect() as silent, hasty.connect() as idle:
        idle.sendall(request_bytes(BODY))
        ((status, _),) = answers(rest_of(idle))
        assert status == 200
        assert rest_of(silent) == b""


@pytest.mark.parametrize("read_bytes", [0, 4096], ids=["nothing", "too little"])
def test_an_answer_that_is_not_taken_holds_nobody(read_bytes: int) -> None:
    """A client asks for more than its buffers hold, and reads nothing, or 4 KiB every 20 ms of answers of 2 MB."""
    wide = FakeModel(labels=tuple(f"{'x' * 1000}{i}" for i in range(40)))
    with serving(fake(wide), read_timeout_s=0.5) as client, client.connect() as to, ThreadPoolExecutor(1) as pool:
        to.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        content = request_bytes(json.dumps([ROW] * 50).encode()) * 10
        ended = threading.Event()

        def read_slowly() -> None:
            with suppress(ConnectionResetError):
                while not ended.wait(0.02) and to.recv(read_bytes):
                    pass

        if read_bytes:
            pool.submit(read_slowly)
        try:
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                while True:
                    to.sendall(content)
        finally:
            ended.set()
        assert len(client.score(ROW)) == 1
        counted = b'hotbed_request_errors_total{reason="answer_not_taken"} 1.0'
        assert counted in client.ask("GET", "/metrics").body


def test_a_client_that_resets_its_connection_holds_nobody(client: Client) -> None:
    for _ in range(20):
        to = client.connect()
        to.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        to.sendall(request_bytes(BODY))
        to.close()
    assert client.score(ROW) == [WANTED]


def test_too_many_connections_are_refused_and_health_is_not(hasty: Client) -> None:
    held = [hasty.connect() for _ in range(3)]
    try:
        for to in held:
            to.sendall(b"GET /v2 HTTP/1.1\r\nX: ")
        answer = hasty.ask("POST", "/score", [ROW])
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert "too many connections" in answer.json["error"]
        assert hasty.ask("GET", "/v2/health/live").status == 200
    finally:
        for to in held:
            to.close()


def test_a_token_is_asked_for() -> None:
    with serving(token=TOKEN) as client:
        for given_ in (None, "Bearer", f"Bearer {TOKEN}x", f"bearer {TOKEN}", f"Basic {TOKEN}", "Bearer \xff"):
            headers = {} if given_ is None else {"Authorization": given_}
            for path in ("/score", "/metrics", "/v2", "/v2/models/clicks/ready", "/nowhere"):
                answer = client.ask("POST" if path == "/score" else "GET", path, [ROW], headers)
                assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert "Authorization: Bearer TOKEN" in answer.json["error"]
        assert client.ask("POST", "/score", [ROW], {"Authorization": f"Bearer {TOKEN}"}).json["scores"] == [WANTED]
        assert client.ask("GET", "/v2/health/ready").status == 200
        assert (
            b'hotbed_request_errors_total{reason="token"}'
            in client.ask("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).body
        )
