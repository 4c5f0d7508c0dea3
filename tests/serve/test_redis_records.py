"""Protects: rows that several servers share in Redis are those of their model, and it may be gone, full or wrong."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hotbed.errors import StoreError
from hotbed.serve import redis_records
from hotbed.serve.redis_records import RedisRecords
from hotbed.serve.served_model import ServedModel
from tests.serve.published import SMALL, Planted, Publisher, batch_of, scores_of
from tests.serve.redis_server import RedisServer
from tests.serve.test_row_files import ROWS, SIZE, files, records_of

STATE = "ab" * 32
TABLES = [(f"embeddings.{i}", rows) for i, rows in enumerate(ROWS)]


@pytest.fixture
def server() -> Iterator[RedisServer]:
    started = RedisServer()
    yield started
    started.close()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_records, "BLOCK_BYTES", 7 * SIZE)
    monkeypatch.setattr(redis_records, "KEYS_AT_ONCE", 3)
    monkeypatch.setattr(redis_records, "RETRY_S", 0.0)
    monkeypatch.setattr(redis_records, "TIMEOUT_S", 30.0)  # busy cores


def opened(folder: Path, records: Tensor, address: str, state: str = STATE) -> RedisRecords:
    folder.mkdir(exist_ok=True)
    return RedisRecords(files(folder, records), TABLES, state, address)


def read(records: RedisRecords, slots: Tensor) -> Tensor:
    out = torch.zeros(len(slots), SIZE, dtype=torch.uint8)
    assert bool(records.read(slots, out).all())
    return out


def cut(folder: Path) -> None:
    """Leave nothing in the files, so that what is read comes from Redis."""
    for path in folder.glob("*.rows"):
        path.write_bytes(b"")


WANT = records_of(1, sum(ROWS))
SLOTS = torch.tensor([70, 3, 3, 40, 0, 39, 41, 69, 12])


def test_rows_that_one_server_read_are_there_for_the_next(server: RedisServer, tmp_path: Path) -> None:
    first = opened(tmp_path / "a", WANT, server.address)
    assert torch.equal(read(first, SLOTS), WANT[SLOTS])
    assert (first.hits, first.misses) == (0, 6)
    second = opened(tmp_path / "b", WANT, server.address)
    cut(tmp_path / "b")
    assert torch.equal(read(second, SLOTS), WANT[SLOTS])
    assert (second.hits, second.misses) == (6, 0)
    assert all(0 < server.client().ttl(key) <= redis_records.KEPT_S for key in server.client().scan_iter())


def test_two_models_never_mix(server: RedisServer, tmp_path: Path) -> None:
    for seed, state in ((1, "ab" * 32), (2, "cd" * 32)):
        want = records_of(seed, sum(ROWS))
        for _ in range(2):
            assert torch.equal(read(opened(tmp_path / state, want, server.address, state), SLOTS), want[SLOTS])


def test_files_are_read_while_redis_is_gone_and_it_is_used_again(server: RedisServer, tmp_path: Path) -> None:
    records = opened(tmp_path / "a", WANT, server.address)
    read(records, SLOTS)
    server.kill()
    assert torch.equal(read(records, SLOTS), WANT[SLOTS])
    assert records.failures == 1
    server.start()
    assert torch.equal(read(records, SLOTS), WANT[SLOTS])  # it is empty now, and filled
    hits = records.hits
    assert torch.equal(read(records, SLOTS), WANT[SLOTS])
    assert (records.failures, records.hits) == (1, hits + 6)


def test_without_files_a_redis_that_is_gone_is_an_error_of_its_requests(server: RedisServer, tmp_path: Path) -> None:
    records = opened(tmp_path / "a", WANT, server.address)
    cut(tmp_path / "a")
    server.kill()
    with pytest.raises(StoreError, match=r"cannot be read \(it ends before"):
        read(records, SLOTS)


def test_a_full_redis_is_read_and_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = RedisServer("--maxmemory", "1", "--maxmemory-policy", "noeviction")
    try:
        monkeypatch.setattr(redis_records, "RETRY_S", 1000.0)
        records = opened(tmp_path / "a", WANT, server.address)
        for _ in range(2):
            assert torch.equal(read(records, SLOTS), WANT[SLOTS])
        assert (records.failures, records.misses) == (1, 12)  # it is asked, but given nothing more for a while
    finally:
        server.close()


def test_values_of_another_length_are_not_taken_for_rows(server: RedisServer, tmp_path: Path) -> None:
    records = opened(tmp_path / "a", WANT, server.address)
    read(records, SLOTS)
    for key in server.client().scan_iter():
        server.client().set(key, b"something else")
    assert torch.equal(read(records, SLOTS), WANT[SLOTS])


def cluster() -> tuple[RedisServer, int]:
    """One node that is a whole cluster; its clients come by a port, which another process may take before it does."""
    for _ in range(20):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            second.bind(("127.0.0.1", 0))
            port, bus = first.getsockname()[1], second.getsockname()[1]
        try:
            server = RedisServer("--port", str(port), "--cluster-enabled", "yes", "--cluster-port", str(bus))
        except ChildProcessError:
            continue
        server.client().execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        deadline = time.monotonic() + 60
        while b"cluster_state:ok" not in server.client().execute_command("CLUSTER", "INFO"):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return server, port
    raise AssertionError("no port could be had")


def test_a_cluster_is_used_as_one_server_is(tmp_path: Path) -> None:
    server, port = cluster()
    try:
        records = opened(tmp_path / "a", WANT, f"redis+cluster://127.0.0.1:{port}")
        for _ in range(2):
            assert torch.equal(read(records, SLOTS), WANT[SLOTS])
        assert (records.hits, records.misses, records.failures) == (6, 6, 0)
    finally:
        server.close()


def test_a_cluster_that_is_gone_is_gone_without(tmp_path: Path) -> None:
    server, port = cluster()
    address = f"redis+cluster://127.0.0.1:{port}"
    before = opened(tmp_path / "a", WANT, address)
    assert torch.equal(read(before, SLOTS), WANT[SLOTS])
    server.close()
    after = opened(tmp_path / "b", WANT, address)  # it is down when a server begins
    for records in (before, after):
        for _ in range(2):
            assert torch.equal(read(records, SLOTS), WANT[SLOTS])
        assert records.failures >= 2
        records.close()


def test_changed_rows_are_never_those_of_redis(server: RedisServer, tmp_path: Path) -> None:
    model = Planted(*SMALL)
    publisher = Publisher(model, tmp_path)
    publisher.save()
    exported = publisher.export()
    servers = [ServedModel.open(exported, memory_bytes=1_000, redis=server.address, threads=1) for _ in range(2)]
    for seed in range(3):
        change = publisher.step_on(seed)
        batch = batch_of(model, 64, seed)
        before = servers[0].score_batch(batch)[0]
        servers[1].apply(change)
        assert servers[1].score_batch(batch)[0].tobytes() == scores_of(model, batch).tobytes()
        assert servers[0].score_batch(batch)[0].tobytes() == before.tobytes()
        servers[0].apply(change)
        assert servers[0].score_batch(batch)[0].tobytes() == scores_of(model, batch).tobytes()
    counters = servers[0].counters()
    assert counters["redis_hits"][""] + counters["redis_misses"][""] > 0
    servers[0].take_over(publisher.export())  # its rows have keys of their own
    assert servers[0].score_batch(batch)[0].tobytes() == scores_of(model, batch).tobytes()


@pytest.mark.parametrize("address", ["http://localhost", "localhost:6379", ""])
def test_addresses_that_are_none_of_redis_are_told(tmp_path: Path, address: str) -> None:
    with pytest.raises(StoreError, match=r"expected redis://HOST:PORT/DATABASE or unix://PATH"):
        opened(tmp_path / "a", WANT, address)


def test_a_client_that_is_not_installed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(StoreError, match=r"pip install 'hotbed\[serve\]'"):
        opened(tmp_path / "a", WANT, "redis://localhost")


def test_passwords_are_not_shown() -> None:
    assert redis_records.hide_password("redis://me:secret@host:1/0") == "redis://…@host:1/0"
