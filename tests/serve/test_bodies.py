"""Protects limits on reading bodies: how long JSON may be, how long reading takes, and how many wait for it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from hotbed.serve import app
from hotbed.serve.request_tensors import HEADER_LENGTH
from tests.serve.clients import LONG_S, ROW, fake, serving
from tests.serve.fake_model import FakeEncoder, FakeModel, score_of
from tests.serve.test_tensors import BLOBS, INFER, WANTED, binary, inputs, texts

LONG_ROW = {**ROW, "item": "x" * 40_000}
"""So long that it is read in a thread."""


class SlowEncoder(FakeEncoder):
    """Long texts wait until they may be read."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go = threading.Semaphore(0), threading.Event()

    def table(self, rows: Mapping[str, Sequence[object]], /) -> pa.Table:
        if len(str(rows["item"][0])) > 1000:
            self.entered.release()
            assert self.go.wait(LONG_S)
        return super().table(rows)


def slow_model() -> tuple[FakeModel, SlowEncoder]:
    model, encoder = FakeModel(), SlowEncoder()
    model.encoder = encoder
    return model, encoder


def test_json_has_a_limit_of_its_own_and_binary_tensors_do_not_share_it() -> None:
    long = "x" * 5000
    body, headers = binary(inputs(), {**BLOBS, "item": texts(long.encode(), b"inkwell")})
    with serving(max_json_bytes=2000) as client:
        answer = client.ask("POST", INFER, body, headers)
        assert answer.json["outputs"][0]["data"] == [score_of({**ROW, "item": long}, 100), WANTED[1]]
        for path in ("/score", INFER):
            refused = client.ask("POST", path, b"[" + b"{}," * 1000 + b"{}]")
            assert refused.status == 413
            assert "got 3,004 bytes, expected at most 2,000 of JSON (--max_json_bytes)" in refused.json["error"]
        length = int(headers[HEADER_LENGTH])
        padded = body[:length] + b" " * 2000 + body[length:]
        refused = client.ask("POST", INFER, padded, {**headers, HEADER_LENGTH: str(length + 2000)})
        assert refused.status == 413
        assert "expected at most 2,000 bytes of JSON (--max_json_bytes)" in refused.json["error"]


def test_lines_are_counted_before_they_are_parsed() -> None:
    with serving(max_request_rows=50) as client:
        refused = client.ask("POST", "/score", b"{\n" * 51, {"Content-Type": "application/x-ndjson"})
    assert refused.status == 413 and "got 51, expected at most 50" in refused.json["error"]


def test_reading_a_body_counts_towards_the_time_until_the_answer() -> None:
    model, encoder = slow_model()
    with serving(fake(model), timeout_s=1.0) as client:
        late = client.ask("POST", "/score", [LONG_ROW])
        assert (late.status, "took longer than 1 s (--timeout_s)" in late.json["error"]) == (504, True)
        encoder.go.set()


def test_bodies_that_wait_to_be_read_are_bounded_and_small_ones_pass_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_MOST_WAITING", 1)
    model, encoder = slow_model()
    with ThreadPoolExecutor(1) as pool, serving(fake(model), timeout_s=LONG_S) as client:
        first = pool.submit(client.ask, "POST", "/score", [LONG_ROW])
        assert encoder.entered.acquire(timeout=LONG_S)
        refused = client.ask("POST", "/score", [LONG_ROW])
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert "got 1 at once, expected at most 1" in refused.json["error"]
        assert client.score(ROW) == [score_of(ROW, 100)]
        encoder.go.set()
        assert first.result().status == 200
        assert client.score(LONG_ROW) == [score_of(LONG_ROW, 100)]
