"""Protects that threads which stand in each other's way are said, once, and only where they do."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hotbed import machine
from hotbed.config import TrainRecipe
from hotbed.train import throughput
from hotbed.train.throughput import Clock
from tests.train import planted


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(machine, "usable_cores", lambda: 4)
    monkeypatch.setattr(machine, "TORCH_CAME_FIRST", False)
    monkeypatch.setattr(machine, "USER_DECIDED", False)
    monkeypatch.setattr(throughput, "WINDOW_S", 0.0)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, waited: list[float | None]) -> str:
    """By a watch that finds so many seconds of waiting, one after the other."""
    monkeypatch.setattr(machine, "waited_for_cores_s", iter(waited).__next__)
    clock = Clock()
    clock.start()
    for _ in waited[1:]:
        clock.tick(1)
    return caplog.text


def test_busy_cores_are_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    text = said(monkeypatch, caplog, [1.0, 1.0, 9.5, 20.0])
    assert text.count("waited 8.5 s") == text.count("other processes keep the cores busy") == 1
    assert "set OMP_NUM_THREADS to the number of free cores" in text


def test_long_spins_on_busy_cores_are_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(machine, "TORCH_CAME_FIRST", True)
    text = said(monkeypatch, caplog, [1.0, 9.5, 20.0])
    assert text.count("other processes keep the cores busy") == 1
    assert "Import hotbed before torch, or set GOMP_SPINCOUNT=3000 KMP_BLOCKTIME=1" in text


def test_idle_cores_and_single_threads_are_no_reason_to_warn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not said(monkeypatch, caplog, [5.0, 5.0, 5.0])
    assert not said(monkeypatch, caplog, [None, None])  # the system does not count it
    torch.set_num_threads(1)
    assert not said(monkeypatch, caplog, [0.0, 9.0])


def test_how_threads_wait_is_the_user_s_where_it_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "USER_DECIDED", True)
    monkeypatch.setattr(machine, "waited_for_cores_s", lambda: pytest.fail("nothing is to be watched"))
    clock = Clock()
    clock.start()
    clock.tick(1)


def test_more_threads_than_cores_are_said_when_training_starts(caplog: pytest.LogCaptureFixture) -> None:
    torch.set_num_threads(8)
    with caplog.at_level(logging.WARNING):
        planted.trainer(TrainRecipe(batch_size=64, device="cpu", steps=1)).fit(planted.batches(1))
    assert "torch uses 8 threads, but this process may use 4 cores" in caplog.text
    assert "set OMP_NUM_THREADS=4" in caplog.text


def test_the_system_s_count_of_waiting_is_summed_over_threads(tmp_path: Path) -> None:
    for thread, text in {"1": "5 2000000000 3\n", "2": "7 500000000 1\n", "3": ""}.items():
        (tmp_path / "proc/self/task" / thread).mkdir(parents=True)
        (tmp_path / "proc/self/task" / thread / "schedstat").write_text(text)
    assert machine.waited_for_cores_s(tmp_path) == 2.5
    assert machine.waited_for_cores_s(tmp_path / "absent") is None
