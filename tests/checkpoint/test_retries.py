"""Protects that a store which fails for a moment is asked again, and that one which is gone ends in a clear error."""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch import nn

from hotbed.checkpoint import MANIFEST, directory, load_checkpoint, save_checkpoint, storage
from hotbed.checkpoint.storage import PART_BYTES, new_output
from hotbed.cli.main import main
from hotbed.data.formats.parquet import find_parquet
from hotbed.errors import CheckpointError, DataError
from tests.unreliable import Unreliable, unreliable


@pytest.fixture
def server(s3: str) -> Iterator[Unreliable]:
    with unreliable(s3.replace("PATH", uuid.uuid4().hex)) as found:
        yield found


def test_what_is_written_and_read_is_tried_again(server: Unreliable) -> None:
    place = directory(server.uri)
    content = os.urandom(2 * PART_BYTES + 5)
    server.faults = ["dropped", "busy", "busy"]
    place.write("a.json", "{}")
    assert server.faults == []
    writer = place.writer("a.bin")
    server.faults = ["busy", "dropped", "busy", "answer lost"]
    writer.write(memoryview(content))
    writer.finish()
    assert server.faults == []
    server.faults = ["busy", "dropped"]
    reader = place.reader("a.bin")
    server.faults = ["dropped", "busy"]
    found = bytearray(reader.size)
    reader.read_into(memoryview(found), 0)
    assert found == content
    server.faults = ["busy", "dropped"]
    assert place.names() == ["a.bin", "a.json"]
    server.faults = ["busy", "dropped"]
    place.remove("a.json")
    assert place.names() == ["a.bin"]


def test_checkpoints_survive_a_store_that_is_busy(server: Unreliable) -> None:
    server.faults = ["busy", "dropped", "answer lost"]
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    save_checkpoint(server.uri, {"model": model})
    server.faults = ["busy", "dropped", "answer lost"]
    load_checkpoint(server.uri, {"model": other})
    assert other.weight.equal(model.weight)


def test_parquet_is_read_from_a_store_that_is_busy(server: Unreliable) -> None:
    with new_output(server.uri.replace("?", "/train.parquet?")) as stream:
        pq.write_table(pa.table({"a": range(10)}), stream)
    server.faults = ["busy"]
    (file,) = find_parquet(server.uri)[""]
    server.faults = ["busy"]
    assert file.read(0, ["a"])["a"].to_pylist() == list(range(10))
    assert server.faults == []


def test_a_write_whose_answer_was_lost_is_found_to_be_ones_own(server: Unreliable) -> None:
    place = directory(server.uri)
    server.faults = ["answer lost"]
    tag = place.create("owner.json", b"process 7, version 1")
    there = place.read_tagged("owner.json")
    assert there is not None
    assert there.content == b"process 7, version 1"
    assert tag in (None, there.tag)  # None: the second try found the file of the first
    server.faults = ["answer lost"]
    tag = place.replace("owner.json", b"process 7, version 2", there.tag)
    after = place.read_tagged("owner.json")
    assert after is not None
    assert after.content == b"process 7, version 2"
    assert tag in (None, after.tag)


def test_conditional_writes_are_tried_for_a_shorter_time(server: Unreliable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a lease allows: who gets its turn later must not find it written later still."""
    monkeypatch.setattr(storage, "CONDITIONAL_S", 0.5)
    place = directory(server.uri)
    for write in (lambda: place.create("manifest.json", b"1"), lambda: place.replace("owner.json", b"1", "x")):
        server.faults = ["busy"] * 1000
        with pytest.raises(OSError, match="could not be read or written"):
            write()
        assert len(server.faults) > 900
    server.faults = []
    assert place.names() == []


def test_a_store_that_is_gone(
    server: Unreliable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOTBED_RETRY_S", "0.5")
    place = directory(server.uri)
    save_checkpoint(place / "last-00000001", {"model": nn.Linear(4, 2)}, step=1)
    reader = (place / "last-00000001").reader(MANIFEST)
    writer = place.writer("a.bin")
    server.close()
    name = server.uri.partition("?")[0]
    for what, do in (
        ("", place.names),
        ("/a.json", lambda: place.write("a.json", "{}")),
        ("/a.json", lambda: place.read("a.json")),
        ("/a.json", lambda: place.create("a.json", b"1")),
        ("/a.json", lambda: place.read_tagged("a.json")),
        ("/a.json", lambda: place.remove("a.json")),
        ("/a.bin", writer.finish),
        (f"/last-00000001/{MANIFEST}", lambda: reader.read_into(memoryview(bytearray(3)), 0)),
    ):
        with pytest.raises(OSError, match=f"{name}{what}.* could not be read or written: .*HTTP error"):
            do()
    writer.abandon()  # says nothing more
    with pytest.raises(OSError, match="could not be read or written"):
        save_checkpoint(place / "last-00000002", {"model": nn.Linear(4, 2)}, step=2)
    with pytest.raises(OSError, match="could not be read or written"):
        load_checkpoint(place / "last-00000001", {"model": nn.Linear(4, 2)})
    for argv in (["eval", "--checkpoint", server.uri], ["checkpoint", "verify", server.uri]):
        assert main(argv) == 2
        message = capsys.readouterr().err
        assert name in message
        assert "Traceback" not in message
    with pytest.raises((OSError, DataError), match=r"AWS Error"):
        find_parquet(server.uri)


def test_how_long_to_try_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTBED_RETRY_S", "soon")
    with pytest.raises(CheckpointError, match="HOTBED_RETRY_S: got 'soon', expected a number of seconds below 10000"):
        directory("s3://bucket/models?region=eu-west-1")


def test_a_part_of_a_file_is_never_seen(server: Unreliable) -> None:
    place = directory(server.uri)
    writer = place.writer("a.bin")
    writer.write(memoryview(bytes(PART_BYTES + 1)))
    assert place.names() == []
    writer.abandon()
    assert place.names() == []
    assert server.methods[-2:] != ["GET", "GET"]
    assert "DELETE" in server.methods  # the parts that were sent


def test_a_large_manifest_has_time_to_be_sent(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, opened = list[float](), storage.object_store

    def noted(uri: str, most_s: float = math.inf) -> Any:
        seconds.append(most_s)
        return opened(uri, most_s)

    monkeypatch.setattr(storage, "object_store", noted)
    place = directory(s3.replace("PATH", uuid.uuid4().hex))
    tag = place.create("lease", b"1")
    assert tag is not None and place.replace("lease", b"2", tag) is not None
    assert place.create("manifest", bytes(10 << 20)) is not None
    assert place.folder("f").create("manifest", bytes(10 << 20)) is not None
    assert seconds == [math.inf, 20, 40]
