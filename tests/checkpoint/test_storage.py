"""One contract for local directories and object stores."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
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
from hotbed.checkpoint.storage import PART_BYTES, LocalDirectory, write_text_uri
from hotbed.errors import CheckpointError
from hotbed.train.runs.callbacks import KeepLast
from tests.checkpoint.test_checkpoint import bits, narrow_model, train
from tests.train import planted
from tests.train.parallel_cases import RECIPE
from tests.train.test_callbacks import TRAIN


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
    with pytest.raises(CheckpointError, match="ends at byte 5,006, before the end of the requested bytes"):
        reader.read_into(memoryview(part), 5003)
    reader.close()
    place.write("b.json", "[]")
    assert place.read("b.json") == b"[]"
    place.remove("b.json")
    place.remove("b.json")
    assert place.names() == ["a.bin"]


def test_text_at_a_local_path_needs_no_directory_that_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if Path(path).is_dir():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    write_text_uri(tmp_path / "a" / "b.txt", "x")
    assert (tmp_path / "a" / "b.txt").read_text() == "x"


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


def test_a_buffer_can_be_used_again(place: Directory) -> None:
    place.make()
    buffer = bytearray(b"first ")
    writer = place.writer("a.bin")
    writer.write(memoryview(buffer))
    buffer[:] = b"second"
    writer.write(memoryview(buffer))
    writer.finish()
    assert place.read("a.bin") == b"first second"


def test_a_listing_has_all_that_was_written(place: Directory) -> None:
    place.make()
    count = 20 if isinstance(place, LocalDirectory) else 1100  # more than object stores list at once
    names = [f"{i:04d}.json" for i in range(count)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: place.write(name, "{}"), names))
    assert place.names() == names
    place.remove_all()
    assert place.names() == []


def test_a_large_file_in_parts(place: Directory) -> None:
    place.make()
    content = os.urandom(PART_BYTES) * 2 + b"end"
    place.write("before.json", "{}")
    writer = place.writer("a.bin")
    for start in range(0, len(content), 5 << 20):
        writer.write(memoryview(content)[start : start + (5 << 20)])
    writer.finish()
    assert place.read("a.bin") == content
    assert place.names() == ["a.bin", "before.json"]


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


def test_a_scheme_that_nothing_opens() -> None:
    with pytest.raises(CheckpointError, match="nonsense://x cannot be opened"):
        directory("nonsense://x")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_names_the_file() -> None:
    writer = LocalDirectory(Path("/dev")).writer("full")
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        writer.write(memoryview(b"content"))
    writer.abandon()


@pytest.mark.parametrize("how", ["write", "create", "finish"])
def test_a_disk_that_is_full_when_files_are_made_safe_names_the_file(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    place = LocalDirectory(tmp_path)
    writer = place.writer("finish.json")
    act = {
        "write": lambda: place.write("write.json", "{}"),
        "create": lambda: place.create("create.json", b"{}"),
        "finish": writer.finish,
    }
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/{how}.json'"):
        act[how]()
    writer.abandon()
    assert place.names() == ["finish.json"]  # other files appear whole or not at all
