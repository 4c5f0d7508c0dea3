"""One contract for writes that only one of several threads or processes can win."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hotbed.checkpoint import Directory, directory
from tests.ranks import Ranks

ROUNDS = 10
"""Additions of each of those that race."""


def test_a_file_is_created_once(place: Directory) -> None:
    place.make()
    assert place.read_tagged("owner.json") is None
    assert place.replace("owner.json", b"0", "any") is None
    tag = place.create("owner.json", b"1")
    assert tag is not None
    assert place.create("owner.json", b"2") is None
    assert place.read_tagged("owner.json") == (b"1", tag)
    assert place.read("owner.json") == b"1"
    assert [name for name in place.names() if not name.startswith(".")] == ["owner.json"]
    place.remove("owner.json")
    assert place.read_tagged("owner.json") is None
    assert place.create("owner.json", b"3") is not None


def test_a_file_is_replaced_only_as_it_was_read(place: Directory) -> None:
    place.make()
    first = place.create("owner.json", b"1")
    assert first is not None
    second = place.replace("owner.json", b"2", first)
    assert second not in (None, first)
    assert place.read_tagged("owner.json") == (b"2", second)
    assert place.replace("owner.json", b"3", first) is None
    assert place.read("owner.json") == b"2"
    place.write("owner.json", "4")  # by who knows nothing of tags
    assert place.replace("owner.json", b"5", str(second)) is None
    tagged = place.read_tagged("owner.json")
    assert tagged is not None and tagged.content == b"4"
    assert place.replace("owner.json", b"6", tagged.tag) is not None
    place.remove("owner.json")
    assert place.replace("owner.json", b"7", tagged.tag) is None
    assert place.names() in ([], [".owner.json.lock"])


def add(path: str | Directory, rounds: int, name: str) -> list[int]:
    """Raise a number that others raise too; the values that this one wrote, of which nobody else wrote any."""
    place = directory(path)
    mine: list[int] = []
    if place.create("number", f"0 {name}".encode()) is not None:
        mine.append(0)
    while len(mine) < rounds:
        there = place.read_tagged("number")
        assert there is not None
        number = int(there.content.split()[0]) + 1
        if place.replace("number", f"{number} {name}".encode(), there.tag) is not None:
            mine.append(number)
    return mine


def test_threads_agree_on_who_writes(place: Directory) -> None:
    place.make()
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda i: add(place, ROUNDS, f"thread-{i}"), range(4)))
    assert sorted(number for numbers in found for number in numbers) == list(range(4 * ROUNDS))


def test_processes_agree_on_who_writes(place: Directory, ranks: Ranks) -> None:
    if place.path.startswith("memory://"):
        pytest.skip("the memory of a process is its own")
    place.make()
    keys = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    found = ranks.run(3, add_as_rank, place.path, keys)
    assert sorted(number for numbers in found for number in numbers) == list(range(3 * ROUNDS))


def add_as_rank(_: object, path: str, keys: dict[str, str]) -> list[int]:
    os.environ.update(keys)  # a rank's environment may be older than the server
    return add(path, ROUNDS, f"process-{os.getpid()}")


def test_a_disk_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    place = directory(tmp_path)
    assert place.create("owner.json", b"1") is not None
    assert place.create("owner.json", b"2") is None
    assert place.read("owner.json") == b"1"
    assert place.names() == [".owner.json.lock", "owner.json"]
