"""Protects that each sample comes once per epoch, in an order that only the seed decides, to any number of ranks."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from data_cases import MIXED, ListSource, divide, mixed, mixed_batch, numbered, numbered_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from reader_cases import loader_options

from hotbed.batch import Batch
from hotbed.data import Loader
from hotbed.data.readers import merge_batches
from hotbed.errors import DataError, SpecError
from hotbed.jagged import Jagged
from hotbed.testing.source_contract import assert_same


def ids(batches: Sequence[Batch]) -> list[int]:
    return [i for b in batches for i in b.sparse["a"].values.tolist()]


@settings(deadline=None)
@given(options=loader_options, parts=st.integers(1, 9))
def test_each_sample_exactly_once_per_epoch(options: dict[str, int], parts: int) -> None:
    loader = Loader(mixed(parts), "train", **{**options, "drop_last": False})  # pyright: ignore[reportArgumentType]
    batches = list(loader)
    assert len(batches) == len(loader)
    assert all(len(b) == loader.batch_size for b in batches[:-1])
    whole = Batch.concatenate(batches)
    order = whole.extra["session"]
    assert sorted(order.tolist()) == list(range(len(MIXED)))
    assert_same(whole, MIXED.take(order))  # all columns moved together


def make_epochs(loader: Loader, epochs: int) -> list[Batch]:
    return [batch for _ in range(epochs) for batch in loader]


def test_order_depends_on_seed_and_epoch_only() -> None:
    def order(seed: int, workers: int, prefetch: int) -> list[int]:
        loader = Loader(numbered(), "train", 8, shuffle=True, seed=seed, workers=workers, prefetch=prefetch, window=3)
        return ids(make_epochs(loader, 2))

    one = order(0, 1, 1)
    assert order(0, 4, 9) == one
    assert order(1, 1, 1) != one
    assert one[:100] != one[100:]


def test_samples_of_a_window_are_in_another_order_every_epoch() -> None:
    """There is one chunk, so only the order within its window can differ."""
    loader = Loader(numbered(100, 1), "train", 8, shuffle=True)
    first, second = ids(list(loader)), ids(list(loader))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(100))


def test_chunks_and_windows_are_shuffled_with_different_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[str] = []
    default_rng = np.random.default_rng

    def noted(seed: tuple[int, ...]) -> np.random.Generator:
        rng = default_rng(seed)
        states.append(str(rng.bit_generator.state))
        return rng

    monkeypatch.setattr(np.random, "default_rng", noted)
    list(Loader(numbered(parts=4), "train", 10, shuffle=True, window=2))
    assert len(states) == len(set(states)) == 3  # the epoch's chunks and two windows


def test_shuffling_mixes_chunks() -> None:
    first = next(iter(Loader(numbered(), "train", 30, shuffle=True, window=7)))
    chunk_of = [i // 15 for i in first.sparse["a"].values.tolist()]
    assert len(set(chunk_of)) > 3


def test_short_last_batch() -> None:
    loader = Loader(numbered(), "train", 30)
    assert [len(b) for b in loader] == [30, 30, 30, 10]
    assert len(loader) == 4
    loader = Loader(numbered(), "train", 30, drop_last=True)
    assert [len(b) for b in loader] == [30, 30, 30]
    assert len(loader) == 3
    assert len(list(loader)) == 3  # the next epoch


def test_batches_own_their_memory() -> None:
    """A batch that is changed by its consumer changes no other."""
    source = numbered()
    for batch in Loader(source, "train", 10):
        batch.sparse.values.zero_()
    assert ids(list(Loader(source, "train", 10))) == list(range(100))


def test_position_is_the_consumers_not_the_prefetchers() -> None:
    loader = Loader(numbered(), "train", 10, prefetch=5)
    seen: list[tuple[object, object]] = []
    for _ in loader:
        state = loader.state_dict()
        seen.append((state["epoch"], state["consumed"]))
    assert seen == [(0, n) for n in range(10, 100, 10)] + [(1, 0)]


def test_leaving_early_starts_the_next_epoch_unless_the_position_is_loaded() -> None:
    loader = Loader(numbered(), "train", 10)
    next(iter(loader))
    state = loader.state_dict()
    assert (state["epoch"], state["consumed"]) == (0, 10)
    assert ids([next(iter(loader))]) == list(range(10))
    assert loader.state_dict()["epoch"] == 1
    loader.load_state_dict(state)
    assert ids([next(iter(loader))]) == list(range(10, 20))


def loader_threads() -> int:
    return sum(t.name.startswith("hotbed-loader") for t in threading.enumerate())


def test_leaving_early_leaves_no_threads() -> None:
    for _ in Loader(numbered(1000, 50), "train", 10, workers=4, shuffle=True):
        assert loader_threads() > 0
        break
    assert loader_threads() == 0
    list(Loader(numbered(), "train", 10))
    assert loader_threads() == 0


class Watched(ListSource):
    """Notes the chunks that are read."""

    def __init__(self, batch: Batch, sizes: Sequence[int]) -> None:
        super().__init__(batch, sizes)
        self.chunks_read: list[int] = []

    def _read(self, split: str, i: int) -> Batch:
        self.chunks_read.append(i)
        return super()._read(split, i)


class Broken(ListSource):
    def _read(self, split: str, i: int) -> Batch:
        if i == 3:
            raise DataError("chunk 3 is damaged")
        return super()._read(split, i)


@pytest.mark.parametrize("shuffle", [False, True])
def test_errors_in_threads_reach_the_consumer(shuffle: bool) -> None:
    source = Broken(numbered_batch(100), divide(100, 5))
    with pytest.raises(DataError, match="chunk 3 is damaged"):
        list(Loader(source, "train", 10, shuffle=shuffle, window=2))
    assert loader_threads() == 0
    if not shuffle:  # what precedes the damage is delivered
        it = iter(Loader(source, "train", 10, prefetch=9))
        assert ids([next(it) for _ in range(6)]) == list(range(60))
        it.close()


def test_memory_is_bounded() -> None:
    """No chunk is read further ahead than one window past the batches that are prefetched."""
    source = Watched(numbered_batch(1000), [10] * 100)
    it = iter(Loader(source, "train", 10, prefetch=3))
    for n in range(1, 20):
        next(it)
        assert max(source.chunks_read) < n + 3 + 1


def test_transform_runs_in_the_threads() -> None:
    threads: set[str] = set()

    def double(batch: Batch) -> Batch:
        threads.add(threading.current_thread().name)
        assert batch.dense is not None
        return Batch(sparse=batch.sparse, dense=batch.dense * 2, labels=batch.labels)

    batches = list(Loader(numbered(), "train", 10, transform=double))
    assert torch.cat([b.dense for b in batches if b.dense is not None]).flatten().tolist() == [
        2 * i for i in range(100)
    ]
    assert all(name.startswith("hotbed-loader") for name in threads)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_where_there_is_a_gpu() -> None:
    assert next(iter(Loader(mixed(), "train", 10))).sparse.values.is_pinned()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"batch_size": 4, "workers": -1}, "workers: got -1"),
        ({"batch_size": 4, "prefetch": 0}, "prefetch: got 0"),
        ({"batch_size": 4, "window": 0}, "window: got 0"),
        ({"batch_size": 4, "seed": -1}, "seed: got -1"),
    ],
)
def test_bad_arguments(options: dict[str, int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Loader(numbered(), "train", **options)  # pyright: ignore[reportArgumentType]


def test_empty_split() -> None:
    with pytest.raises(SpecError, match="split 'train': got no samples"):
        Loader(ListSource(numbered_batch(3).take(torch.arange(0)), []), "train", 4)
    with pytest.raises(SpecError, match="split: got 'test'"):
        Loader(numbered(), "test", 4)


def test_positions_of_another_order_are_refused() -> None:
    state = Loader(numbered(), "train", 8, shuffle=True, seed=1).state_dict()
    with pytest.raises(SpecError, match="the loader's position: seed: got 1"):
        Loader(numbered(), "train", 8, shuffle=True, seed=2).load_state_dict(state)
    with pytest.raises(SpecError, match="the loader's position: samples: got 100"):
        Loader(numbered(50), "train", 8, shuffle=True, seed=1).load_state_dict(state)
    loader = Loader(numbered(), "train", 8, shuffle=True, seed=1)
    with pytest.raises(SpecError, match="key of the loader's position: got 'epochs'"):
        loader.load_state_dict({"epochs": 1})
    with pytest.raises(SpecError, match="the loader's position: key 'consumed' is missing"):
        loader.load_state_dict({k: v for k, v in state.items() if k != "consumed"})
    with pytest.raises(SpecError, match="the loader's position: consumed: got 101"):
        loader.load_state_dict(state | {"consumed": 101})
    # Another batch size is fine: the position counts samples.
    other = Loader(numbered(), "train", 20, shuffle=True, seed=1)
    other.load_state_dict(state | {"consumed": 8})
    assert sum(len(b) for b in other) == 92


def test_a_position_among_other_chunks_is_refused_where_the_order_depends_on_them() -> None:
    coarse, fine = numbered(parts=2), numbered(parts=4)
    state = Loader(coarse, "train", 8, shuffle=True).state_dict()
    with pytest.raises(SpecError, match="the loader's position: chunks: got '1c390265650f7e29'"):
        Loader(fine, "train", 8, shuffle=True).load_state_dict(state)
    Loader(numbered(parts=2), "train", 8, shuffle=True).load_state_dict(state)
    in_order = Loader(coarse, "train", 8)
    next(iter(in_order))
    loader = Loader(fine, "train", 8)
    loader.load_state_dict(in_order.state_dict())
    assert ids(list(loader)) == list(range(8, 100))


@settings(deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted), min_size=1, max_size=4),
    ids=st.integers(0, 3),
    features=st.integers(1, 3),
    weighted=st.booleans(),
)
def test_features_of_one_length_are_joined_as_they_would_be_one_by_one(
    spans: list[list[int]], ids: int, features: int, weighted: bool
) -> None:
    draw = torch.Generator().manual_seed(ids)
    part = Batch(
        sparse=Jagged(
            [f"f{i}" for i in range(features)],
            torch.randint(100, (features * 6 * ids,), generator=draw),
            batch_size=6,
            fixed=[ids] * features,
            weights=torch.rand(features * 6 * ids, generator=draw) if weighted else None,
        ),
        labels=torch.rand(6, 2, generator=draw),
    )
    found = merge_batches([(part, start, stop) for start, stop in spans])
    taken = torch.cat([torch.arange(start, stop) for start, stop in spans])
    assert_same(found, part.take(taken))
    assert found.sparse.starts == part.take(taken).sparse.starts
    assert (found.sparse.weights is None) == (not weighted)
    if weighted:
        assert torch.equal(found.sparse.weights, part.take(taken).sparse.weights)  # pyright: ignore[reportArgumentType]


# -- ranks: their shares of every batch are the whole batch ----------------------------------------------------------


def of_ranks(world_size: int, *args: Any, **options: Any) -> list[Loader]:
    return [Loader(*args, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def assert_shares(shares: tuple[Batch, ...], whole: Batch) -> None:
    """Neighbouring samples, in rank order, as equally many as can be."""
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert_same(Batch.concatenate(shares), whole)


@settings(max_examples=12)
@given(options=loader_options, parts=st.integers(1, 9), world_size=st.integers(1, 6))
def test_the_shares_of_all_ranks_are_the_whole_batches(options: dict[str, Any], parts: int, world_size: int) -> None:
    alone = Loader(mixed(parts), "train", **options)
    loaders = of_ranks(world_size, mixed(parts), "train", **options)
    assert {len(loader) for loader in loaders} == {len(alone)}
    for _ in range(2):  # epochs, each with an order of its own
        batches = list(alone)
        by_rank = [list(loader) for loader in loaders]
        for whole, *shares in zip(batches, *by_rank, strict=True):
            assert_shares(tuple(shares), whole)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_rank_that_gets_no_sample_of_a_batch_gets_an_empty_one(shuffle: bool) -> None:
    alone = list(Loader(mixed(), "train", 3, shuffle=shuffle))
    by_rank = [list(loader) for loader in of_ranks(5, mixed(), "train", 3, shuffle=shuffle)]
    assert [len(batches) for batches in by_rank] == [len(alone)] * 5
    assert sorted(len(batches[0]) for batches in by_rank) == [0, 0, 1, 1, 1]
    for whole, *shares in zip(alone, *by_rank, strict=True):
        assert_shares(tuple(shares), whole)
    empty = next(batches[0] for batches in by_rank if not len(batches[0]))
    assert empty.sparse.names == MIXED.sparse.names
    assert empty.sparse.fixed == MIXED.sparse.fixed
    assert empty.sparse["history"].lengths().tolist() == []
    assert empty.extra["session"].dtype == torch.int64
    assert (empty.dense is not None, empty.labels is not None, empty.weights is not None) == (True, True, True)


def test_the_last_batch_may_be_shorter_than_there_are_ranks() -> None:
    by_rank = [list(loader) for loader in of_ranks(4, numbered(17), "train", 5)]
    assert [[len(batch) for batch in batches] for batches in by_rank] == [
        [1, 1, 1, 0],
        [1, 1, 1, 1],
        [1, 1, 1, 0],
        [2, 2, 2, 1],
    ]


@settings(max_examples=12)
@given(
    options=loader_options,
    stop=st.integers(0, 30),
    before=st.integers(1, 3),
    after=st.integers(1, 4),
    data=st.data(),
)
def test_the_position_is_of_whole_batches_and_any_number_of_ranks_goes_on_from_it(
    options: dict[str, Any], stop: int, before: int, after: int, data: st.DataObject
) -> None:
    alone = Loader(mixed(), "train", **options)
    whole = [batch for _ in range(2) for batch in alone]
    if not whole:  # all samples are left out
        return
    stop = min(stop, len(whole) - 2)
    states: list[dict[str, Any]] = []
    for loader in of_ranks(before, mixed(), "train", **options):
        epochs = (batch for _ in range(2) for batch in loader)
        for _ in range(stop + 1):
            next(epochs)
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    left = whole[stop + 1 :]
    resumed: list[list[Batch]] = []
    for loader in of_ranks(after, mixed(), "train", **options | {"prefetch": data.draw(st.integers(1, 5))}):
        loader.load_state_dict(states[0])
        resumed.append([batch for _ in range(2) for batch in loader][: len(left)])
    for expected, *shares in zip(left, *resumed, strict=True):
        assert_shares(tuple(shares), expected)


def test_leaving_early_ends_the_epoch_of_every_rank() -> None:
    loaders = of_ranks(3, numbered(), "train", 10, shuffle=True)
    alone = Loader(numbered(), "train", 10, shuffle=True)
    for loader in (alone, *loaders):
        next(iter(loader))
    for whole, *shares in zip(alone, *loaders, strict=True):
        assert_shares(tuple(shares), whole)
    assert {loader.state_dict()["epoch"] for loader in loaders} == {2}


def test_a_transform_gets_the_share() -> None:
    sizes: list[int] = []

    def noted(batch: Batch) -> Batch:
        sizes.append(len(batch))
        return batch

    list(Loader(numbered(9, 2), "train", 4, transform=noted, workers=1, rank=1, world_size=3))
    assert sizes == [1, 1, 0]


def test_a_rank_reads_only_the_chunks_that_it_needs() -> None:
    source = Watched(numbered_batch(80), [5] * 16)
    list(Loader(source, "train", 40, rank=0, world_size=4, prefetch=1))
    # Of each batch of 8 chunks its first 10 samples, and one chunk more that is read ahead.
    assert sorted(source.chunks_read) == [0, 1, 2, 8, 9, 10]


@pytest.mark.parametrize(
    ("rank", "world_size", "message"),
    [
        (0, 0, "world_size: got 0"),
        (-1, 2, "rank: got -1"),
        (2, 2, "rank: got 2"),
        (1, 1, "rank: got 1"),
        (0, -3, "world_size: got -3"),
    ],
)
def test_a_rank_that_there_is_not(rank: int, world_size: int, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Loader(numbered(), "train", 4, rank=rank, world_size=world_size)


# -- joining slices --------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 12), min_size=1, max_size=4), data=st.data())
def test_join_is_take_then_concatenate(sizes: list[int], data: st.DataObject) -> None:
    """Against the plain operations of `Batch`, over one-hot, two-hot and ragged weighted ids."""
    batches = [mixed_batch(n + 1, seed) for seed, n in enumerate(sizes)]
    parts = []
    for batch in batches:
        start = data.draw(st.integers(0, len(batch)))
        parts.append((batch, start, data.draw(st.integers(start, len(batch)))))
    expected = Batch.concatenate([b.take(torch.arange(start, stop)) for b, start, stop in parts])
    assert_same(merge_batches(parts), expected)
    order = np.random.default_rng(0).permutation(len(expected))
    assert_same(merge_batches(parts, order), expected.take(torch.from_numpy(order)))
    some = order[: data.draw(st.integers(0, len(order)))]
    assert_same(merge_batches(parts, some), expected.take(torch.from_numpy(some)))
