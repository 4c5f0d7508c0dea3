"""Protects: a served model has the bits of the one that was trained, wherever its rows are, through every change."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

import hotbed as hb
from hotbed.errors import DataError, StoreError
from hotbed.ops.backend import launches
from hotbed.serve.served_model import ServedModel
from hotbed.store import DenseStore, LazyStore
from tests.serve.published import FEATURES, SMALL, TABLES, Planted, Publisher, batch_of, scores_of

MEMORY = {"memory": None, "mixed": 8_000, "files": 2_000, "no cache": 1_276}
"""Where the rows of `TABLES`, of 17 KB, are."""


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    model = Planted(TABLES, FEATURES)
    model.train_some(1, most_id=400)
    publisher = Publisher(model, tmp_path)
    publisher.save()
    return publisher


def kinds(served: ServedModel) -> set[type]:
    stores = (a.store for c in served.tables.collections.values() for g in c.groups for a in g.arenas)
    return {DenseStore if isinstance(store, DenseStore) else LazyStore for store in stores}


@pytest.mark.parametrize(
    "where", ["mixed", "files", *(pytest.param(name, marks=pytest.mark.full) for name in ("memory", "no cache"))]
)
def test_scores_are_those_of_the_trained_model_through_all_changes(publisher: Publisher, where: str) -> None:
    served = ServedModel.open(publisher.export(), memory_bytes=MEMORY[where], threads=1)
    assert kinds(served) == {"memory": {DenseStore}, "mixed": {DenseStore, LazyStore}}.get(where, {LazyStore})
    model = publisher.model

    def check(seed: int) -> None:
        for size in (1, 37):
            batch = batch_of(model, size, seed, most_id=400)
            found, step = served.score_batch(batch)
            assert step == publisher.step == served.step
            assert found.tobytes() == scores_of(model, batch).tobytes()

    check(5)
    nbytes = served.tables.nbytes
    for seed in range(3):
        served.apply(publisher.step_on(10 + seed))  # 256 rows for 400 ids: some are evicted, others get their rows
        check(20 + seed)
    if where in ("files", "no cache"):
        assert served.tables.nbytes == nbytes
        assert served.tables.changed_share > 0
    served.take_over(publisher.export())
    assert served.tables.changed_share == 0
    check(30)
    served.apply(publisher.step_on(40))
    check(41)
    for seed in (50, 51):
        publisher.model.train_some(seed, most_id=400)
    publisher.save()
    served.take_over(publisher.export())  # the changes between were never seen
    check(60)
    served.close()


def test_rows_on_a_device_are_served_by_its_kernels(publisher: Publisher) -> None:
    served = ServedModel.open(publisher.export(), memory_bytes=2_000, threads=1, backend="triton")
    before = launches.copy()
    for seed in (5, 6):
        batch = batch_of(publisher.model, 9, 5, most_id=400)
        assert served.score_batch(batch)[0].tobytes() == scores_of(publisher.model, batch).tobytes()
        served.apply(publisher.step_on(seed))
    wanted = {f"triton.{name}" for name in ("cache_find", "cache_read", "cache_take", "lookup")}
    assert wanted <= (launches - before).keys()


def test_ids_without_a_row_get_none_and_are_counted(publisher: Publisher) -> None:
    served = ServedModel.open(publisher.export(), threads=1)
    ids = publisher.model.state_dict()["embeddings.users.dynamic_ids"]
    known = ids[ids >= 0]
    served.score_batch(with_users(publisher.model, known[:1].repeat(8)))
    assert served.counters()["unknown_ids"] == {}
    for _ in range(2):
        served.score_batch(with_users(publisher.model, torch.tensor([10**15] * 8)))
    assert served.counters()["unknown_ids"] == {"user": 16.0}


def with_users(model: Planted, users: torch.Tensor) -> hb.Batch:
    batch = batch_of(model, len(users), 1)
    ids = {name: batch.sparse[name] for name in batch.sparse.names}
    return hb.Batch(sparse=batch.sparse.with_features({"user": ids["user"]._replace(values=users)}))


@pytest.mark.parametrize("where", ["memory", "files"])
def test_no_batch_mixes_versions_while_changes_are_applied(tmp_path: Path, where: str) -> None:
    model = Planted(*SMALL)
    model.plant(0.0)
    publisher = Publisher(model, tmp_path)
    publisher.save()
    served = ServedModel.open(publisher.export(), memory_bytes=None if where == "memory" else 1_000, threads=1)
    changes = []
    for version in range(1, 9):
        base = publisher.step
        model.plant(float(version) / 16)
        changes.append(publisher.change(base, publisher.save()))
    steps: list[int] = []
    failures: list[BaseException] = []
    done = threading.Event()

    def score() -> None:
        batch = batch_of(model, 64, 1)
        try:
            while not done.is_set() or steps[-1] != publisher.step:
                scores, step = served.score_batch(batch)
                want = 1 / (1 + np.exp(-(step // 10 - 1) / 16))
                assert np.allclose(scores, want, atol=1e-6), (step, scores)
                steps.append(step)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=score)
    thread.start()
    for change in changes:
        served.apply(change)
    done.set()
    thread.join(120)
    assert not failures and not thread.is_alive()
    assert steps == sorted(steps)
    assert steps[-1] == publisher.step


def test_raw_rows_are_encoded_as_in_training(tmp_path: Path) -> None:
    model = Planted(*SMALL)
    publisher = Publisher(model, tmp_path)
    publisher.save()
    served = ServedModel.open(publisher.export(), threads=1)
    ids = [7, 299, 0]
    scores, step = served.score(pa.table({"item": ids, "more": ["of no input"] * 3}))
    want = scores_of(model, hb.Batch(sparse=hb.Jagged.from_dict({"item": torch.tensor(ids)})))
    assert (scores.tobytes(), step) == (want.tobytes(), 10)
    with pytest.raises(DataError, match="column 'item' "):
        served.score(pa.table({"other": ids}))


def test_memory_that_is_too_small_for_the_marks_of_rows_is_told(publisher: Publisher) -> None:
    model = publisher.export()
    with pytest.raises(StoreError, match=r"got 100 bytes, expected at least 1,276"):
        ServedModel.open(model, memory_bytes=100)


def test_rows_that_cannot_be_read_are_an_error_of_their_requests_alone(publisher: Publisher) -> None:
    model = publisher.export()
    served = ServedModel.open(model, memory_bytes=1_500, threads=1)
    batch = batch_of(publisher.model, 50, 3)
    file = model.path("tables/embeddings.items.rows")
    whole = file.read_bytes()
    with file.open("r+b") as stream:
        stream.truncate(16)
    with pytest.raises(StoreError, match=r"row \d+ of .*items.rows cannot be read \(it ends before byte"):
        served.score_batch(batch)
    with file.open("r+b") as stream:
        stream.write(whole)
    assert served.score_batch(batch)[0].tobytes() == scores_of(publisher.model, batch).tobytes()


def test_counters_can_be_read_while_features_are_counted_for_the_first_time(publisher: Publisher) -> None:
    served = ServedModel.open(publisher.export(), threads=1)
    counts = served.tables.bad_ids
    stop, interval = threading.Event(), sys.getswitchinterval()

    def count() -> None:
        while not stop.is_set():
            for i in range(500):
                counts[f"feature {i}"] += 1
            counts.clear()

    counting = threading.Thread(target=count)
    sys.setswitchinterval(1e-5)
    counting.start()
    try:
        for _ in range(300):
            assert len(served.counters()["bad_ids"]) <= 500
    finally:
        stop.set()
        counting.join()
        sys.setswitchinterval(interval)
        served.close()
