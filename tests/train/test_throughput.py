"""Tests of throughput: waits for batches, and threads that wait for cores."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from hotbed import machine
from hotbed.batch import Batch
from hotbed.config import TrainRecipe
from hotbed.data import Loader
from hotbed.jagged import Jagged
from hotbed.train import throughput
from hotbed.train.runs.report import ShowProgress, _stalled
from hotbed.train.throughput import SETTLING_STEPS, Clock
from tests.ranks import Ranks
from tests.train import planted
from tests.train.parallel_cases import TRAIN, InMemory, make_trainer

# -- waits for batches -------------------------------------------------------------------------------------------------


class Time:
    """Passes as it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(throughput, "time", made)
    return made


class Slow:
    """Batches that take 1 s each; three were ready."""

    queue_depth = 3

    def __init__(self, time: Time, batches: int) -> None:
        self.time, self.batches = time, batches

    def __iter__(self) -> Iterator[int]:
        for i in range(self.batches):
            self.time.now += 1
            yield i


def own(*values: float) -> list[float]:
    return list(values)


def test_the_share_of_time_that_was_waited(time: Time) -> None:
    clock = Clock()
    for i in clock.waited_for(Slow(time, SETTLING_STEPS + 4)):
        time.now += 3 if i >= SETTLING_STEPS else 99  # the step
        clock.tick(10)
        if i == SETTLING_STEPS - 1:
            assert clock.record(own) == {"stall_share": 1 / 100, "queue_depth": 3}
        with clock.paused():
            time.now += 1000  # an evaluation
    assert clock.stall_share == 1 / 4  # without the settling steps
    assert clock.record(own) == {"stall_share": 1 / 4, "queue_depth": 3}
    assert clock.record(own) == {"stall_share": 0}


def test_a_record_is_of_the_rank_that_waited_most(time: Time) -> None:
    clock = Clock()
    for _ in clock.waited_for(Slow(time, 2)):
        clock.tick(1)
    others = [(0.5, -1.0), (0.25, -2.0)]
    found = clock.record(lambda *values: [max(column) for column in zip(values, *others, strict=True)])
    assert found == {"stall_share": 1, "queue_depth": 1}


def records_of(group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """What rank logs of two epochs, of batches that a loader makes."""
    seen: list[dict[str, Any]] = []

    class Keep(planted.Callback):
        def on_log(self, trainer: Any, record: dict[str, Any]) -> None:
            seen.append(record)

    trainer = make_trainer(group, "table", recipe=replace(TRAIN, epochs=2, log_every=2), callbacks=[Keep()])
    rank, size = trainer.ranks.rank, trainer.ranks.size
    trainer.fit(Loader(InMemory(), "train", 40, prefetch=3, rank=rank, world_size=size))
    assert trainer.ranks.largest(rank, -rank) == [size - 1, 0]
    return seen


def test_all_ranks_log_the_same(ranks: Ranks) -> None:
    first, *others = ranks.run(3, records_of)
    assert first
    for one, *same in zip(first, *others, strict=True):
        for what in ("stall_share", "queue_depth"):
            assert all(other[what] == one[what] for other in same)
        assert 0 <= one["stall_share"] <= 1 and 0 <= one["queue_depth"] <= 3


def test_the_progress_line_tells_waits_that_matter() -> None:
    assert _stalled({"stall_share": 0.126}) == "  13% stalled"
    assert _stalled({"stall_share": 0.009}) == ""
    stream = io.StringIO()
    trainer = planted.trainer(TRAIN, callbacks=[])
    record = {"loss": 0.5, "samples_per_s": 1000.0, "stall_share": 0.5}
    ShowProgress(Console(file=stream, width=100)).on_log(trainer, record)
    assert stream.getvalue() == "step 0  loss 0.5000  1,000 samples/s  50% stalled\n"


def test_the_time_left_leaves_compilation_out_and_has_pauses_in_it(time: Time) -> None:
    clock = Clock()
    clock.start()
    for step in range(SETTLING_STEPS):
        time.now += 100 if step == 0 else 1
        clock.tick(10)
    assert clock.seconds_for(7) is None
    for _ in range(5):
        time.now += 2
        clock.tick(10)
    with clock.paused():
        time.now += 20
    assert clock.seconds_for(7) == pytest.approx(7 * (2 + 20 / (SETTLING_STEPS + 5)))
    assert clock.seconds == {"first_steps_s": 104, "steps_s": 10, "waited_s": 0, "paused_s": 20}
    assert clock.samples_per_s == 5


def test_ids_are_counted_by_feature() -> None:
    clock, ids = Clock(), Jagged.from_dict({"a": torch.tensor([1, 2]), "b": [[1, 2, 3], []]})
    list(clock.waited_for([Batch(sparse=ids), Batch(sparse=ids)]))
    assert (clock.drawn, clock.ids) == (4, {"a": 4, "b": 6})


# -- threads and cores -------------------------------------------------------------------------------------------------


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
