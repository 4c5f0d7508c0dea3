"""Whoever reads, the batches are the same, and each sample comes exactly once."""

import itertools
import random
import shutil
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_cases import MIXED, ListSource, mixed, numbered, numbered_batch
from format_cases import ROWS, days, write_npy
from hypothesis import given, settings
from hypothesis import strategies as st
from reader_cases import Recorded, loader_options

from hotbed.batch import Batch
from hotbed.cli.main import main
from hotbed.data import Loader, NpySource, ParquetSource, Source, SplitBinarySource, open_readers
from hotbed.data.executors import Tasks
from hotbed.errors import DataError, SpecError, WorkerError
from hotbed.testing.source_contract import assert_same


def assert_equal(found: Sequence[Batch], expected: Sequence[Batch]) -> None:
    assert len(found) == len(expected)
    for a, e in zip(found, expected, strict=True):
        assert_same(a, e)


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(3) as made:
        yield made


@settings(deadline=None, max_examples=40)
@given(options=loader_options, parts=st.integers(1, 9), size=st.integers(1, 3), data=st.data())
def test_the_same_batches_from_any_position(
    pool: Executor, options: dict[str, Any], parts: int, size: int, data: st.DataObject
) -> None:
    """Of every rank, and where an epoch is entered in the middle, with batches of another size."""
    consumed = data.draw(st.integers(0, len(MIXED)))
    for rank in range(size):
        make = partial(Loader, mixed(parts), "train", **options, rank=rank, world_size=size)
        here, there = make(), make(executor=pool)
        for loader in (here, there):
            loader.load_state_dict(loader.state_dict() | {"consumed": consumed})
        for _ in range(2):
            assert_equal(list(there), list(here))
            assert there.state_dict() == here.state_dict()


def test_two_trainers_share_a_pool(pool: Executor) -> None:
    """Each has a position of its own; whose turn it is changes nothing."""
    make = partial(Loader, numbered(200, 20), "train", 7, shuffle=True, window=3)
    first, second = make(seed=1, executor=pool), make(seed=2, executor=pool)
    found: list[list[Batch]] = [[], []]
    for pair in zip(first, second, strict=True):
        for batches, batch in zip(found, pair, strict=True):
            batches.append(batch)
    assert_equal(found[0], list(make(seed=1)))
    assert_equal(found[1], list(make(seed=2)))


@pytest.mark.parametrize("shuffle", [False, True])
def test_windows_in_flight_are_bounded(shuffle: bool) -> None:
    """No more than those of the next batches and ``workers`` more, however slow the consumer is."""
    executor = Recorded()
    loader = Loader(numbered(200, 20), "train", 10, shuffle=shuffle, window=1, prefetch=2, workers=3, executor=executor)
    for given_batches, _ in enumerate(loader, 1):
        assert len(executor.asked) <= given_batches + 2 + 3
    assert len(executor.asked) == 20  # each once


def test_what_is_sent_is_arrow_and_a_ranks_own_samples() -> None:
    executor = Recorded()
    loader = Loader(mixed(4), "train", 20, shuffle=True, window=4, executor=executor, rank=1, world_size=4)
    assert [len(batch) for batch in loader] == [5, 5]
    (message,) = executor.results
    assert isinstance(message, pa.Buffer)
    stored = pa.ipc.open_stream(message).read_next_batch()
    assert len(stored["labels"][0].values) == 10 * 2


def test_readers_that_die_cost_a_repetition() -> None:
    draw = random.Random(0)
    executor = Recorded(draw.random() < 0.4 for _ in itertools.count())
    make = partial(Loader, numbered(200, 20), "train", 7, shuffle=True, window=1)
    assert_equal(list(make(executor=executor)), list(make()))
    assert len(executor.asked) > 20


def test_readers_that_always_die_are_an_error() -> None:
    message = r"workers were killed or are unreachable 5 times .*\(a reader died\)"
    loader = Loader(numbered(200, 20), "train", 7, executor=Recorded(itertools.repeat(True)))
    with pytest.raises(WorkerError, match=message):
        list(loader)


class Unpicklable(ListSource):
    def __getstate__(self) -> NoReturn:
        raise TypeError("cannot pickle an open file")


def test_a_source_that_cannot_be_sent() -> None:
    source = Unpicklable(numbered_batch(10), [10])
    message = r"Unpicklable cannot be pickled for readers \(cannot pickle an open file\)"
    with pytest.raises(SpecError, match=message):
        list(Loader(source, "train", 10, executor=Recorded()))


class Elsewhere(ListSource):
    def _read(self, split: str, i: int) -> Batch:
        raise ModuleNotFoundError("No module named 'mine'", name="mine")


def test_readers_without_a_package() -> None:
    message = "a worker cannot import mine"
    with pytest.raises(WorkerError, match=message):
        list(Loader(Elsewhere(numbered_batch(10), [10]), "train", 10, executor=Recorded()))


@pytest.fixture
def table(tmp_path: Path) -> ParquetSource:
    pq.write_table(pa.table({"label": [0, 1] * 50, "a": list(range(100))}), tmp_path / "log.parquet", row_group_size=10)
    return ParquetSource(tmp_path, {"sparse": [{"name": "a", "rows": 50}]})


def binary(prepared: Path, out: Path) -> SplitBinarySource:
    shutil.copytree(prepared, out)
    return SplitBinarySource(out, chunk_samples=500)


def test_files_that_readers_do_not_find(table: ParquetSource, prepared: Path, tmp_path: Path) -> None:
    """They may run on other machines: the message names the reader and the path."""
    (tmp_path / "log.parquet").unlink()
    readers_need = "Readers need the data at the same path as the trainer"
    place = rf"reader \S+ \(process \d+\): {tmp_path}/log.parquet, row group 0: {tmp_path}/log.parquet does not exist"
    with pytest.raises(DataError, match=rf"{place} \(.*\)\. {readers_need}"):
        list(Loader(table, "train", 10, executor=Recorded()))
    source = binary(prepared, tmp_path / "data")
    (tmp_path / "data" / "train" / "cat_3.bin").unlink()
    place = rf"reader \S+ \(process \d+\) cannot read the data \(.*No such file.*{tmp_path}/data/train/cat_3.bin'\)"
    with pytest.raises(DataError, match=rf"{place}\. {readers_need}"):
        list(Loader(source, "train", 10, executor=Recorded()))


def test_other_files_at_the_same_path(prepared: Path, tmp_path: Path) -> None:
    class Longer(ListSource):
        def _read(self, split: str, i: int) -> Batch:
            return numbered_batch(13)

    message = r"reader \S+ \(process \d+\): chunk 0 of split 'train': got 13 samples"
    with pytest.raises(DataError, match=message):
        list(Loader(numbered(200, 20), "train", 10, executor=Replaced(Longer(numbered_batch(10), [10]))))


class Replaced(Recorded):
    """Its workers have another source at the same path."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hotbed.data.readers._open_source", lambda _: self.source)
            return super().submit(fn, *args, **kwargs)


def test_readers_in_other_directories(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path means the trainer's."""
    shutil.copytree(prepared, tmp_path / "data")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"label": [0, 1] * 50, "a": list(range(100))}), "log.parquet", row_group_size=10)
    write_npy(tmp_path / "days", days())
    sources = (
        SplitBinarySource("data"),
        ParquetSource("log.parquet", {"sparse": [{"name": "a", "rows": 50}]}),
        NpySource("days", rows=ROWS),
    )

    class InOtherDirectory(Recorded):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            with monkeypatch.context() as patch:
                patch.chdir(tmp_path / "elsewhere")
                return super().submit(fn, *args, **kwargs)

    for source in sources:
        make = partial(Loader, source, "train", 64, shuffle=True)
        assert_equal(list(make(executor=InOtherDirectory())), list(make()))


def test_threads_are_the_loaders_own() -> None:
    with open_readers("threads") as readers:
        assert readers is None
    with ThreadPoolExecutor(1) as pool, open_readers(pool) as tasks:
        assert isinstance(tasks, Tasks)


def test_the_command_says_what_it_cannot_read_with(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is made."""
    runs = ["--out", str(recipe.parent / "runs")]
    assert main(["train", str(recipe), "--data.executor", "spark", *runs]) == 2
    assert "executor: got 'spark'" in (said := capsys.readouterr().err)
    assert "Traceback" not in said
    pytest.importorskip("distributed", reason="needs hotbed[dask]")
    monkeypatch.setattr("hotbed.data.executors._CONNECT_S", 1)
    with warnings.catch_warnings(action="ignore"):  # of Dask
        assert main(["train", str(recipe), "--data.executor", "dask:tcp://127.0.0.1:1", *runs]) != 0
    assert "the scheduler dask:tcp://127.0.0.1:1 is unreachable" in capsys.readouterr().err
    assert not (recipe.parent / "runs").exists()
