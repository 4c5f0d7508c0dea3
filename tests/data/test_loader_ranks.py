"""Loaders of several ranks, without processes: their shares of every batch are the whole batch."""

from typing import Any

import pytest
import torch
from data_cases import MIXED, ListSource, mixed, numbered, numbered_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from reader_cases import loader_options

from hotbed.batch import Batch
from hotbed.data import Loader
from hotbed.errors import SpecError
from hotbed.testing.source_contract import assert_same


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
    read: list[int] = []

    class Watched(ListSource):
        def _read(self, split: str, i: int) -> Batch:
            read.append(i)
            return super()._read(split, i)

    source = Watched(numbered_batch(80), [5] * 16)
    list(Loader(source, "train", 40, rank=0, world_size=4, prefetch=1))
    # Of each batch of 8 chunks its first 10 samples, and one chunk more that is read ahead.
    assert sorted(read) == [0, 1, 2, 8, 9, 10]


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
