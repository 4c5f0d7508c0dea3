"""Protects: requests are batched and bounded, versions whole; metrics and logs tell what happens; ends are graceful."""

from __future__ import annotations

import json
import logging
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from hotbed.errors import CheckpointError, RecipeError, StoppedError, StoreError
from hotbed.serve.monitoring import json_logs
from hotbed.serve.options import ServeOptions
from hotbed.serve.server import Server, listen
from tests.serve.clients import LONG_S, ROW, Answer, Client, fake, request_bytes, rest_of, serving
from tests.serve.fake_model import FakeEncoder, FakeFollower, FakeModel, score_of

WANTED = score_of(ROW, 100)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def asked(pool: ThreadPoolExecutor, client: Client, rows: list[Any]) -> Future[Answer]:
    return pool.submit(client.ask, "POST", "/score", rows)


def queued(client: Client) -> int:
    return client.server._batchers["clicks"].queued_rows


# -- batches -------------------------------------------------------------------------------------------------------


def test_requests_that_wait_are_scored_together_and_whole() -> None:
    model = FakeModel()
    with ThreadPoolExecutor(8) as pool, serving(fake(model), max_batch_rows=8) as client:
        model.go.clear()
        first = asked(pool, client, [ROW])
        assert model.entered.acquire(timeout=LONG_S)
        rest = []
        for i, count in enumerate((3, 4, 5, 20)):
            rest.append(asked(pool, client, [{**ROW, "user": i}] * count))
            until(lambda: queued(client) == sum((3, 4, 5, 20)[: len(rest)]))
        model.go.set()
        assert first.result().json["scores"] == [WANTED]
        for i, (answer, count) in enumerate(zip(rest, (3, 4, 5, 20), strict=True)):
            assert answer.result().json["scores"] == [score_of({**ROW, "user": i}, 100)] * count
        assert model.batches == [1, 7, 5, 20]


# -- limits --------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_a_late_request_is_given_up() -> None:
    model = FakeModel()
    with (
        ThreadPoolExecutor(4) as pool,
        serving(fake(model), max_queue_rows=4, max_batch_rows=2, timeout_s=2.0) as client,
    ):
        model.go.clear()
        held = asked(pool, client, [ROW])
        assert model.entered.acquire(timeout=LONG_S)
        waits = asked(pool, client, [ROW] * 4)
        until(lambda: queued(client) == 4)
        full = client.ask("POST", "/score", [ROW])
        assert (full.status, full.headers["retry-after"]) == (503, "1")
        assert full.json["error"].startswith("the queue is full: got 4 waiting rows, expected at most 4")
        for answer in (held.result(), waits.result()):
            assert (answer.status, answer.json["error"][:43]) == (
                504,
                "scoring took longer than 2 s (--timeout_s).",
            )
        model.go.set()
        until(lambda: queued(client) == 0)
        assert client.score(ROW) == [WANTED]
        assert model.batches == [1, 1]  # what was given up is not computed


def test_all_bodies_together_have_a_limit() -> None:
    with serving(max_body_bytes=1000, max_buffered_bytes=1500) as client:
        body = request_bytes(b" " * 900 + json.dumps([ROW]).encode())
        with client.connect() as slow:
            slow.sendall(body[:-1])
            until(lambda: client.server._app._bodies._buffered > 900)
            refused = client.ask("POST", "/score", b" " * 900)
            assert (refused.status, "--max_buffered_bytes" in refused.json["error"]) == (503, True)
            slow.sendall(body[-1:])
            assert b"200 OK" in slow.recv(65536)
        assert client.score(ROW) == [WANTED]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 70_000}, "--port: got 70,000, expected"),
        ({"max_batch_rows": 0}, "--max_batch_rows: got 0, expected at least 1"),
        ({"max_wait_ms": -1.0}, "--max_wait_ms: got -1.0, expected"),
        ({"timeout_s": float("nan")}, "--timeout_s: got nan"),
        ({"max_body_bytes": 1 << 40}, "--max_buffered_bytes: got 268,435,456, expected at least --max_body_bytes"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        ServeOptions(**options)
    assert str(raised.value).startswith(message)


def test_strangers_are_answered_only_with_a_token_or_when_it_is_said(tmp_path: Any) -> None:
    file, environment = tmp_path / "token", {"HOTBED_SERVE_TOKEN": "e" * 20}
    file.write_text("f" * 20 + "\n")
    assert ServeOptions().token({}) is None
    assert ServeOptions(host="0.0.0.0").token(environment) == "e" * 20
    assert ServeOptions(host="0.0.0.0", token_file=str(file)).token(environment) == "f" * 20
    assert ServeOptions(host="::", allow_anonymous=True).token({}) is None
    with pytest.raises(RecipeError, match=r"--host 0\.0\.0\.0 is reachable from other machines"):
        ServeOptions(host="0.0.0.0").token({})
    for text in ("short", "with spaces in it x", "\xff" * 20):
        with pytest.raises(RecipeError, match="expected at least 16"):
            ServeOptions().token({"HOTBED_SERVE_TOKEN": text})


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RecipeError, match=f"--port {port} cannot be bound"):
            listen(ServeOptions(port=port))
    with pytest.raises(RecipeError, match=r"--host: got 'no\.such\.host\.invalid'"):
        listen(ServeOptions(host="no.such.host.invalid"))


# -- metrics and logs ----------------------------------------------------------------------------------------------


def test_metrics_tell_what_happened() -> None:
    with serving(fake(FakeModel(), follower=FakeFollower())) as client:
        client.score(ROW, ROW)
        client.ask("POST", "/score", b"{")
        text = client.ask("GET", "/metrics").body.decode()
    for line in (
        'hotbed_requests_total{model="clicks",route="score",status="200"} 1.0',
        'hotbed_requests_total{model="",route="score",status="400"} 1.0',
        'hotbed_request_errors_total{reason="malformed"} 1.0',
        'hotbed_rows_total{model="clicks"} 2.0',
        'hotbed_request_seconds_count{route="score"} 2.0',
        'hotbed_batch_rows_sum{model="clicks"} 2.0',
        'hotbed_model_step{model="clicks"} 100.0',
        'hotbed_queued_rows{model="clicks"} 0.0',
        'hotbed_unknown_ids_total{feature="user",model="clicks"} 3.0',
        'hotbed_cache_hits_total{model="clicks"} 10.0',
        'hotbed_versions_applied_total{kind="change",model="clicks"} 2.0',
        'hotbed_versions_refused_total{model="clicks",reason="gap"} 1.0',
        'hotbed_staleness_seconds{model="clicks"} 1.5',
        'hotbed_behind_seconds{model="clicks"} 0.25',
        'hotbed_model_broken{model="clicks"} 0.0',
    ):
        assert line in text.splitlines()
    assert "process_resident_memory_bytes" in text


def test_a_model_without_a_whole_version_is_not_ready() -> None:
    model, other = FakeModel(), FakeModel()
    with serving(fake(model), fake(other, "other")) as client:
        for broken, status in ((True, 503), (False, 200)):
            model.is_broken = broken
            assert client.ask("GET", "/v2/health/ready").json == {"ready": not broken}
            answer = client.ask("GET", "/v2/models/clicks/ready")
            assert (answer.status, answer.json) == (status, {"name": "clicks", "ready": not broken})
            assert client.ask("GET", "/v2/models/other/ready").status == 200
            assert f'hotbed_model_broken{{model="clicks"}} {broken:.1f}' in client.ask("GET", "/metrics").body.decode()


@pytest.mark.parametrize(
    ("error", "status"), [(CheckpointError("/secret/path is damaged"), 500), (StoreError("/secret/path"), 503)]
)
def test_failures_of_ours_while_a_body_is_read_are_not_told(error: Exception, status: int) -> None:
    class Encoder(FakeEncoder):
        @override
        def table(self, rows: Any, /) -> Any:
            raise error

    model = FakeModel()
    model.encoder = Encoder()
    with serving(fake(model)) as client:
        answer = client.ask("POST", "/score", [ROW])
    assert (answer.status, "secret" in answer.json["error"]) == (status, False)


def test_logs_are_lines_of_json(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as stream, json_logs(stream.fileno()), serving(access_log=True) as client:
        client.score(ROW)
        client.ask("POST", "/score", [{**ROW, "item": "crash"}])
        client.ask("GET", "/nowhere\\n%0a{")
        client.raw(b"nonsense\r\n\r\n")
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    events = [line["event"] for line in lines]
    assert events[:2] == ["model", "ready"]
    assert events[-2:] == ["draining", "stopped"]
    requests = [line for line in lines if line["event"] == "request"]
    assert [line["status"] for line in requests] == [200, 500, 404]
    assert {"model": "clicks", "rows": 1, "path": "/score"}.items() <= requests[0].items()
    failed = next(line for line in lines if line["event"] == "score_failed")
    assert "/secret/path" in failed["traceback"]
    assert "item" not in json.dumps(requests)  # nothing of bodies
    assert not logging.getLogger("hotbed").handlers


# -- the end -------------------------------------------------------------------------------------------------------


def test_a_drain_answers_what_was_begun() -> None:
    model = FakeModel()
    with ThreadPoolExecutor(4) as pool, serving(fake(model), drain_s=LONG_S) as client:
        model.go.clear()
        begun = asked(pool, client, [ROW])
        assert model.entered.acquire(timeout=LONG_S)
        client.server._uvicorn.shut_down(signal.SIGTERM)
        until(lambda: client.ask("GET", "/v2/health/ready").status == 503)
        assert client.ask("GET", "/v2/models/clicks/ready").json == {"name": "clicks", "ready": False}
        assert client.ask("GET", "/v2/health/live").status == 200
        later = asked(pool, client, [ROW])
        until(lambda: queued(client) == 1)
        client.server._uvicorn._end()  # what the timer does
        model.go.set()
        assert [answer.result().json["scores"] for answer in (begun, later)] == [[WANTED], [WANTED]]


def test_a_second_signal_ends_at_once() -> None:
    model = FakeModel()
    options = ServeOptions(port=0, access_log=False)
    server = Server([fake(model)], options, listen(options))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.run)
        assert server.started.wait(LONG_S)
        with Client(server).connect() as to:
            model.go.clear()
            to.sendall(request_bytes(json.dumps([ROW]).encode()))
            assert model.entered.acquire(timeout=LONG_S)
            server._uvicorn.shut_down(signal.SIGINT)
            server._uvicorn.shut_down(signal.SIGINT)
            with pytest.raises(StoppedError, match="a second signal ended the server before all requests") as raised:
                running.result(LONG_S)
            assert raised.value.signal == 2
            rest_of(to)
        model.go.set()
