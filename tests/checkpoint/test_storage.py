"""One contract for local directories and object stores."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hotbed.checkpoint import (
    Directory,
    checkpoints_in,
    directory,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from hotbed.checkpoint.storage import LocalDirectory, RemoteDirectory
from hotbed.errors import CheckpointError
from hotbed.train.checkpointing import OWNER, DirectoryLock
from hotbed.train.retention import KeepLast
from tests.checkpoint.test_checkpoint import bits, narrow_model, train
from tests.train import planted
from tests.train.parallel_cases import RECIPE
from tests.train.test_callbacks import TRAIN


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """URI of a bucket of a server on this machine."""
    server_module = pytest.importorskip("moto.server")
    import boto3

    server = server_module.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    before = {name: os.environ.get(name) for name in keys}
    os.environ.update(keys)
    boto3.client("s3", endpoint_url=f"http://{host}:{port}").create_bucket(Bucket="models")
    yield f"s3://models/PATH?endpoint_override={host}:{port}&scheme=http&region=us-east-1"
    server.stop()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(params=["local", "file", "s3", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Directory:
    """An empty directory of each kind."""
    name = uuid.uuid4().hex
    paths = {"local": str(tmp_path / name), "file": f"file://{tmp_path / name}", "memory": f"memory://{name}"}
    if request.param == "s3":
        return directory(request.getfixturevalue("s3").replace("PATH", name))
    return directory(paths[request.param])


def written(place: Directory, name: str, *parts: bytes) -> None:
    writer = place.writer(name)
    for part in parts:
        writer.write(memoryview(part))
    writer.finish()


def test_files_are_written_listed_read_in_parts_and_removed(place: Directory) -> None:
    assert place.names() == []
    assert not place.has("a.bin")
    with pytest.raises(FileNotFoundError):
        place.reader("a.bin")
    place.make()
    written(place, "a.bin", b"hello ", b"", b"world" * 1000)
    place.write("b.json", "{}")
    assert place.names() == ["a.bin", "b.json"]
    assert place.has("a.bin")
    assert place.read("b.json") == b"{}"
    reader = place.reader("a.bin")
    assert reader.size == 5006
    part = bytearray(5)
    reader.read_into(memoryview(part), 6)
    assert part == b"world"
    with pytest.raises(CheckpointError, match="ends at byte 5,006, before what was to be read"):
        reader.read_into(memoryview(part), 5003)
    reader.close()
    place.write("b.json", "[]")
    assert place.read("b.json") == b"[]"
    place.remove("b.json")
    place.remove("b.json")
    assert place.names() == ["a.bin"]


def test_folders(place: Directory) -> None:
    inner = place / "last-00000001"
    inner.make()
    written(inner, "a.bin", b"1")
    assert inner.name == "last-00000001"
    assert place.names() == ["last-00000001"]
    assert not place.has("last-00000001")  # it is no file
    assert directory(inner.path).read("a.bin") == b"1"  # a path that opens the same
    inner.remove_all()
    assert inner.names() == []


def test_a_file_that_is_given_up_can_be_written_again(place: Directory) -> None:
    place.make()
    writer = place.writer("a.bin")
    writer.write(memoryview(b"half"))
    writer.abandon()
    written(place, "a.bin", b"whole")
    assert place.read("a.bin") == b"whole"


def test_checkpoints_are_saved_found_verified_loaded_and_rotated(place: Directory) -> None:
    model, optimizer = narrow_model()
    train(model, optimizer, range(3))
    parts: dict[str, Any] = {"model": model, "sparse": optimizer}
    save_checkpoint(place / "last-00000003", parts, step=3)
    saving = save_checkpoint(place / "last-00000004", parts, step=4, background=True)
    saving.wait()
    assert find_checkpoint(place).path == (place / "last-00000004").path
    assert verify_checkpoint(find_checkpoint(place.path)).step == 4
    with pytest.raises(CheckpointError, match="exists already"):
        save_checkpoint(place / "last-00000004", parts)
    other, other_optimizer = narrow_model(seed=1)
    load_checkpoint((place / "last-00000004").path, {"model": other, "sparse": other_optimizer})
    assert bits(other.state_dict()) == bits(model.state_dict())
    trainer = planted.trainer(TRAIN, callbacks=[KeepLast(place / "run", RECIPE, every=2, keep_last=2)])
    trainer.fit(planted.batches(7))
    assert [c.name for c in checkpoints_in(place / "run")] == ["last-00000006", "last-00000007"]


def test_damage_is_found_anywhere(place: Directory) -> None:
    save_checkpoint(place, {"model": nn.Linear(4, 2)})
    content = bytearray(place.read("model.safetensors"))
    content[-1] ^= 1
    written(place, "model.safetensors", bytes(content))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: block 0 of 1 .* has changed"):
        load_checkpoint(place, {"model": nn.Linear(4, 2)})


def test_a_directory_belongs_to_one_run_anywhere(place: Directory) -> None:
    with DirectoryLock(place):
        assert place.has(OWNER)
        if isinstance(place, LocalDirectory):
            with pytest.raises(CheckpointError, match="which is running"):
                DirectoryLock(place).__enter__()
    with DirectoryLock(place):
        pass
    if isinstance(place, RemoteDirectory):
        place.write(OWNER, '{"host": "elsewhere", "pid": 7, "since": "2026-01-01T00:00:00+00:00"}')
        with pytest.raises(CheckpointError, match=r"belongs to process 7 on elsewhere since .* if that run is dead"):
            DirectoryLock(place).__enter__()


def test_the_claim_of_a_dead_run_ends_where_it_can_be_known(place: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(place, LocalDirectory):
        pytest.skip("locks of files end with their process")
    ended = subprocess.Popen(["true"])
    ended.wait()
    me = {"host": socket.gethostname(), "pid": os.getppid(), "since": "2026-01-01T00:00:00+00:00"}
    elsewhere = {**me, "host": "elsewhere"}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    dead = [{**me, "pid": ended.pid}, {**elsewhere, "job": "job-7"}]
    if Path("/proc/self/stat").exists():
        dead.append({**me, "started": "1"})  # the number is another process's now
    for owner in dead:
        place.write(OWNER, json.dumps(owner))
        with DirectoryLock(place):
            assert json.loads(place.read(OWNER))["pid"] == os.getpid()
            assert json.loads(place.read(OWNER))["job"] == "job-7"
    for owner in (me, {**me, "started": None}, {**elsewhere, "job": "job-8"}, {**elsewhere, "job": None}):
        place.write(OWNER, json.dumps(owner))
        with pytest.raises(CheckpointError, match="belongs to process"):
            DirectoryLock(place).__enter__()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # what torchrun says where it was given no name
    place.write(OWNER, json.dumps({**elsewhere, "job": "none"}))
    with pytest.raises(CheckpointError, match="belongs to process"):
        DirectoryLock(place).__enter__()


def test_a_scheme_that_nothing_opens() -> None:
    with pytest.raises(CheckpointError, match="nonsense://x cannot be opened"):
        directory("nonsense://x")
