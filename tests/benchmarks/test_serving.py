"""Protects that a server's load is as scheduled, every request is counted, and both servers are measured."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks import serving as benchmark
from tests.serve.clients import ROW, fake, request_bytes, serving
from tests.serve.fake_model import FakeModel


def test_every_scheduled_request_is_sent_and_counted() -> None:
    model = FakeModel()
    right, wrong = (request_bytes(json.dumps([{**ROW, "item": item}]).encode()) for item in ("pen", "fail"))
    with serving(fake(model)) as client:
        sent = asyncio.run(benchmark.open_loop(client.port, [right, right, wrong], 300.0, 0.2, 2))
        rate = asyncio.run(benchmark.closed_loop(client.port, [right], 0.2, 2))
    assert len(sent.latencies) == 60
    assert sent.failed == 20
    assert sent.latencies.min() > 0
    assert sum(model.batches) > 60
    assert rate > 0


@pytest.mark.full
def test_both_servers_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serving.json"
    args = ["--seconds", "0.5", "--rows", "100", "--cores", "1", "--batches", "1", "16", "--json", str(file)]
    benchmark.main(args)
    found = json.loads(file.read_text())["results"]
    assert [(r["side"], r["batch"], r["share"]) for r in found] == [
        (side, batch, share) for side in ("hotbed", "plain") for batch in (1, 16) for share in (0.5, 0.9)
    ]
    assert not any(r["failed"] for r in found)
    assert "p99.9 ms" in capsys.readouterr().out
