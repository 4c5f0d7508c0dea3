"""One rank reads and sends the others their samples: what arrives is what they would have read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hotbed.batch import Batch
from hotbed.comm import Link
from hotbed.data import Loader, Schema, SparseColumn
from hotbed.data.source import Source
from hotbed.errors import CommError, DataError
from hotbed.jagged import Jagged
from hotbed.train.cuda_graph import columns
from hotbed.train.ranks.broadcast import BroadcastLoader, SentBatch
from tests.batches import content
from tests.matrix import full
from tests.ranks import ANSWER_S, TIMEOUT_S, Ranks


def mixed_batch(n: int, seed: int = 0) -> Batch:
    """Samples with one-hot, two-hot and ragged weighted ids, and every other kind of column; `session` numbers them."""
    draw = torch.Generator().manual_seed(100 * seed + n)
    lengths = torch.randint(0, 4, (n,), generator=draw)
    count = int(lengths.sum())
    history = torch.randint(0, 50, (count,), generator=draw)
    return Batch(
        sparse=Jagged.from_dict(
            {
                "user": torch.randint(0, 1000, (n,), generator=draw),
                "pair": torch.randint(0, 50, (n, 2), generator=draw),
                "history": (history, torch.nn.functional.pad(lengths.cumsum(0), (1, 0))),
            },
            weights={"history": torch.rand(count, generator=draw)},
        ),
        dense=torch.randn(n, 2, generator=draw),
        labels=torch.rand(n, 1, generator=draw).round(),
        weights=torch.rand(n, generator=draw),
        extra={"session": torch.arange(n), "odd": torch.arange(n, dtype=torch.uint8)},
    )


# -- exchanges --------------------------------------------------------------------------------------------------------


class InMemory(Source):
    """55 samples in chunks of 11; one chunk may be damaged."""

    def __init__(self, damaged: int | None = None) -> None:
        ragged = SparseColumn(name="history", rows=50, table="items", ids=None, pooling="mean")
        self.schema = Schema(
            sparse=(
                SparseColumn(name="user", rows=1000),
                SparseColumn(name="pair", rows=50, table="items", ids=2),
                ragged,
            ),
            dense=("age", "price"),
            labels=("click",),
            weight="weight",
            group="session",
        )
        self.splits = ("train",)
        self.damaged = damaged
        self._data = mixed_batch(55)

    def _chunks(self, split: str) -> list[int]:
        return [11] * 5

    def _read(self, split: str, i: int) -> Batch:
        if i == self.damaged:
            raise DataError(f"chunk {i} is damaged")
        return self._data.take(torch.arange(11 * i, 11 * i + 11))


def loader_of(rank: int, size: int, damaged: int | None = None, **options: Any) -> Loader:
    return Loader(InMemory(damaged), "train", rank=rank, world_size=size, **{"batch_size": 9, "workers": 1} | options)


def both(group: dist.ProcessGroup, reader: int, ahead: int, options: dict[str, Any]) -> tuple[Loader, BroadcastLoader]:
    """A loader of this rank's shares, and one that is sent them."""
    link = Link(group, timedelta(seconds=TIMEOUT_S))
    whole = loader_of(0, 1, **options) if link.rank == reader else None
    return loader_of(link.rank, link.size, **options), BroadcastLoader(whole, link, reader=reader, ahead=ahead)


def epochs_of_both(
    group: dist.ProcessGroup, reader: int, ahead: int, options: dict[str, Any]
) -> list[tuple[int, list[Any], list[Any]]]:
    """Lengths, batches and positions, epoch by epoch."""
    found: list[tuple[int, list[Any], list[Any]]] = []
    for loader in both(group, reader, ahead, options):
        for _ in range(2):
            seen = [(content(batch), loader.state_dict()) for batch in loader]
            found.append((len(loader), [batch for batch, _ in seen], [state for _, state in seen]))
    return found


@pytest.mark.parametrize(
    ("size", "reader", "ahead", "options"),
    [full(3, 0, 2, {"shuffle": True}), (4, 2, 1, {"batch_size": 3}), full(4, 0, 9, {"batch_size": 27})],
)
def test_every_rank_gets_the_batches_that_it_would_have_read(
    ranks: Ranks, size: int, reader: int, ahead: int, options: dict[str, Any]
) -> None:
    for first, second, sent_first, sent_second in ranks.run(size, epochs_of_both, reader, ahead, options):
        assert sent_first == first
        assert sent_second == second
        assert first[0] == len(first[1])


class OwnLinks(Link):
    """Ranks whose devices exchange over links of their own, which Gloo stands in for."""

    @property
    def overlaps(self) -> bool:
        return False


def received(group: dist.ProcessGroup, reader: int, options: dict[str, Any]) -> list[tuple[list[Any], list[Any], int]]:
    """Batches and positions of two epochs, read by this rank or sent over devices' links; and how many were checked."""
    link, place = OwnLinks(group, timedelta(seconds=TIMEOUT_S)), torch.device("cpu")
    checked: list[Batch] = []

    def check(batch: Batch) -> None:
        checked.append(batch)
        batch.sparse.mark_verified([("user", 1000)])

    whole = loader_of(0, 1, **options) if link.rank == reader else None
    sent = BroadcastLoader(whole, link, reader=reader, device=place, check=check)
    found: list[tuple[list[Any], list[Any], int]] = []
    for loader in (loader_of(link.rank, link.size, **options), sent):
        seen: list[Batch] = []
        positions: list[Any] = []
        for _ in range(2):
            for batch in loader:
                seen.append(batch.received(place) if isinstance(batch, SentBatch) else batch)
                assert len(batch) == len(seen[-1])
                positions.append(loader.state_dict())
        if loader is sent:
            assert all(batch.sparse.verified == {("user", 1000)} for batch in seen)
            assert all(t.data_ptr() % 16 == 0 for batch in seen for t in columns(batch) if len(t))
        found.append(([content(batch) for batch in seen], positions, len(checked)))
    return found


@pytest.mark.parametrize(("size", "reader", "options"), [(3, 1, {"batch_size": 5, "shuffle": True}), full(4, 0, {})])
def test_samples_over_links_of_devices_are_those_that_a_rank_would_have_read(
    ranks: Ranks, size: int, reader: int, options: dict[str, Any]
) -> None:
    for rank, ((own, positions, _), (sent, sent_positions, checked)) in enumerate(
        ranks.run(size, received, reader, options)
    ):
        assert sent == own
        assert sent_positions == positions
        assert checked == (len(own) * size if rank == reader else 0)


def left_early(group: dist.ProcessGroup) -> list[tuple[Any, Any, list[str]]]:
    """Batches of iterations that are left after 2, at once and never, positions, and threads that are left."""
    found: list[tuple[Any, Any, list[str]]] = []
    for loader in both(group, 0, 2, {"shuffle": True}):
        seen: list[Any] = []
        for stop in (2, 1, 100):
            for i, batch in enumerate(loader, start=1):
                seen.append(content(batch))
                if i == stop:
                    break
        threads = [t.name for t in threading.enumerate() if t.name == "hotbed-broadcast"]
        found.append((seen, loader.state_dict(), threads))
    return found


def test_an_iteration_may_be_left_early(ranks: Ranks) -> None:
    for read, sent in ranks.run(3, left_early):
        assert sent == read
        assert len(read[0]) == 2 + 1 + 7
        assert read[2] == []


def gone_on(group: dist.ProcessGroup, stop: int) -> tuple[list[Any], list[Any], list[tuple[Any, Any]]]:
    """What is left from a position in the second epoch, read and sent; and positions before a batch was given."""
    read, sent = both(group, 1, 2, {"shuffle": True})
    positions = [(read.state_dict(), sent.state_dict())]
    list(read)
    for i, _ in enumerate(read, start=1):
        if i == stop:
            break
    state = read.state_dict()
    read.load_state_dict(state)
    sent.load_state_dict(state)
    positions.append((state, sent.state_dict()))
    return [content(batch) for batch in read], [content(batch) for batch in sent], positions


def test_it_goes_on_from_a_position(ranks: Ranks) -> None:
    for read, sent, positions in ranks.run(3, gone_on, 3):
        assert sent == read
        assert len(read) == 4
        assert all(of_sent == of_read for of_read, of_sent in positions)


def with_damaged_data(group: dist.ProcessGroup) -> tuple[str, int, list[str]]:
    """The error, batches before it, and threads that are left."""
    link = Link(group, timedelta(seconds=ANSWER_S))
    broadcast = BroadcastLoader(loader_of(0, 1, damaged=3) if link.rank == 1 else None, link, reader=1)
    count = 0
    with pytest.raises((DataError, CommError)) as caught:
        for _ in broadcast:
            count += 1
    message = f"{type(caught.value).__name__}: {caught.value}"
    del caught
    threads = [t.name for t in threading.enumerate() if t.name == "hotbed-broadcast"]
    return message, count, threads


def whole_batches(group: dist.ProcessGroup) -> int:
    return len(list(both(group, 0, 2, {})[1]))


def test_data_that_cannot_be_read_stops_all_ranks(ranks: Ranks) -> None:
    by_rank = ranks.run(3, with_damaged_data)
    assert by_rank[1][0] == "DataError: chunk 3 is damaged"
    for rank, (message, count, threads) in enumerate(by_rank):
        assert count == 3  # of 9 samples each, from the 33 before the damage
        assert threads == []
        assert rank == 1 or message.startswith(f"CommError: rank {rank} of 3: the exchange of sizes of batches")
        assert rank == 1 or "rank 1 has ended, or did not answer in time" in message
    assert ranks.run(3, whole_batches) == [7] * 3  # with other groups of processes all goes on


def slowly_consumed(group: dist.ProcessGroup) -> list[int]:
    """How many batches the reader has taken when a consumer has been given some."""
    taken = 0

    class Counting(Loader):
        def __iter__(self) -> Iterator[Batch]:
            nonlocal taken
            for batch in super().__iter__():
                taken += 1
                yield batch

    link = Link(group, timedelta(seconds=TIMEOUT_S))
    loader = Counting(InMemory(), "train", 5) if link.rank == 0 else None
    found: list[int] = []
    for given, _ in enumerate(BroadcastLoader(loader, link, ahead=3), start=1):
        end = time.monotonic() + TIMEOUT_S
        while loader is not None and taken < min(given + 3, len(loader)) and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.05)  # for what it must not take
        found.append(taken)
    return found


def test_the_reader_is_never_further_ahead_than_it_may_be(ranks: Ranks) -> None:
    found = ranks.run(3, slowly_consumed)[0]
    assert len(found) == 11
    assert found == [min(given + 3, 11) for given in range(1, 12)]
