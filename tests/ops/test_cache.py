"""A set-associative cache: every backend does what a plain dictionary of sets does, access by access."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotbed.ops import CacheTags
from hotbed.ops.layout import FREE
from hotbed.ops.reference import sets_of

KEYS = torch.cat([torch.arange(40), torch.tensor([(1 << 40) + 7, (1 << 62) + 1, (1 << 63) - 1])])
"""Few enough to meet again, and some that need all bits."""


def empty_tags(sets: int, ways: int, by_count: bool) -> CacheTags:
    keys = torch.full((sets * ways,), FREE)
    return CacheTags(keys, torch.zeros_like(keys), torch.zeros_like(keys), ways, by_count)


class Plain:
    """The same cache, one entry ``[key, time, count]`` per place."""

    def __init__(self, sets: int, ways: int, by_count: bool):
        self.entries = [[FREE, 0, 0] for _ in range(sets * ways)]
        self.sets, self.ways, self.by_count = sets, ways, by_count

    def places(self, key):
        mixed = key * 0x9E3779B97F4A7C15 % (1 << 64)
        first = (mixed ^ (mixed >> 32)) % self.sets * self.ways
        return range(first, first + self.ways)

    def find(self, keys):
        return [next((at for at in self.places(key) if self.entries[at][0] == key), -1) for key in keys]

    def use(self, places, now):
        for at in places:
            if at >= 0:
                self.entries[at][1] = now
                self.entries[at][2] += 1

    def take(self, keys, now):
        found = []
        for key in keys:
            free = [at for at in self.places(key) if self.entries[at][0] == FREE]
            old = [at for at in self.places(key) if self.entries[at][1] < now]
            if self.by_count:
                old.sort(key=lambda at: self.entries[at][2:0:-1])
            else:
                old.sort(key=lambda at: self.entries[at][1])
            at = (free or old or [-1])[0]
            found.append((at, FREE if at < 0 else self.entries[at][0]))
            if at >= 0:
                self.entries[at] = [key, now, 1]
        return found


batches = st.lists(st.lists(st.integers(0, len(KEYS) - 1), max_size=12), min_size=1, max_size=6)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 3), st.sampled_from([1, 3, 4, 32]), st.booleans(), batches)
def test_any_accesses_leave_what_a_plain_cache_has(backend, sets, ways, by_count, accesses):
    tags, plain = backend.put(empty_tags(sets, ways, by_count)), Plain(sets, ways, by_count)
    for now, access in enumerate(accesses, 1):
        keys = KEYS[access]
        places = backend.ops.cache_find(tags, keys.to(backend.device))
        assert places.tolist() == plain.find(keys.tolist())
        backend.ops.cache_use(tags, places, now)
        plain.use(places.tolist(), now)
        missing = keys[places.cpu() < 0].unique()
        taken, evicted = backend.ops.cache_take(tags, missing.to(backend.device), now)
        assert list(zip(taken.tolist(), evicted.tolist(), strict=True)) == plain.take(missing.tolist(), now)
        state = torch.stack([tags.keys, tags.times, tags.counts], dim=1)
        assert state.tolist() == plain.entries


@pytest.mark.parametrize("ways", [4, 32])
def test_a_set_takes_many_keys_at_once_in_their_order(backend, ways):
    tags = backend.put(empty_tags(2, ways, False))
    keys = torch.arange(1000)
    own = keys[sets_of(keys, 2) == 1][: ways + 2].flip(0)
    places, evicted = backend.ops.cache_take(tags, own.to(backend.device), 1)
    assert places.tolist() == [*range(ways, 2 * ways), -1, -1] and evicted.tolist() == [FREE] * (ways + 2)
    assert tags.keys.tolist() == [FREE] * ways + own[:ways].tolist()
    places, evicted = backend.ops.cache_take(tags, own[ways:].to(backend.device), 2)
    assert places.tolist() == [ways, ways + 1] and evicted.tolist() == own[:2].tolist()


def test_no_place_is_taken_for_none(backend):
    tags = backend.put(empty_tags(1, 2, False))
    places, evicted = backend.ops.cache_take(tags, torch.tensor([FREE, 7, FREE, 9, 11], device=backend.device), 3)
    assert places.tolist() == [-1, 0, -1, 1, -1] and evicted.tolist() == [FREE] * 5
    assert tags.keys.tolist() == [7, 9]
    places, evicted = backend.ops.cache_take(tags, torch.tensor([FREE, FREE, 5], device=backend.device), 4)
    assert places.tolist() == [-1, -1, 0] and evicted.tolist() == [FREE, FREE, 7]


def test_a_free_place_comes_before_any_key_whatever_its_time_was(backend):
    tags = backend.put(empty_tags(1, 3, True))
    tags.keys.copy_(torch.tensor([5, FREE, 6]))
    tags.times.copy_(torch.tensor([1, 9, 0]))
    tags.counts.copy_(torch.tensor([1, 9, 0]))
    places, evicted = backend.ops.cache_take(tags, torch.tensor([7], device=backend.device), 9)
    assert places.tolist() == [1] and evicted.tolist() == [FREE]


@pytest.mark.parametrize("words", [1, 5, 32, 129])
def test_records_are_copied_where_there_is_a_place(backend, words):
    draw = torch.Generator().manual_seed(1)
    slab, records = (torch.randint(0, 256, (n, 4 * words), dtype=torch.uint8, generator=draw) for n in (9, 6))
    for places in ([4, -1, 8, 0, -1, 5], [4, 3, 8, 0, 1, 5], [-1] * 6, []):
        at, some = torch.tensor(places, dtype=torch.int64), records[: len(places)]
        out, after = some.clone(), slab.clone()
        for i, place in enumerate(places):
            if place >= 0:
                out[i], after[place] = slab[place], some[i]
        mine, read = backend.put(slab), backend.put(some)
        backend.ops.cache_read(mine, backend.put(at), read)
        assert torch.equal(read.cpu(), out)
        backend.ops.cache_write(mine, backend.put(at), backend.put(some))
        assert torch.equal(mine.cpu(), after)


@pytest.mark.parametrize("words", [(1, 3), (33, 32), (5, 130)], ids=["1-3", "33-32", "5-130"])
def test_of_longer_records_the_first_bytes_are_copied(backend, words):
    slab, records = (torch.randint(0, 256, (n, 4 * w), dtype=torch.uint8) for n, w in zip((9, 3), words, strict=True))
    places, size = torch.tensor([4, -1, 8]), 4 * min(words)
    out, after = records.clone(), slab.clone()
    for i, place in ((0, 4), (2, 8)):
        out[i, :size], after[place, :size] = slab[place, :size], records[i, :size]
    mine, read = backend.put(slab), backend.put(records)
    backend.ops.cache_read(mine, backend.put(places), read)
    assert torch.equal(read.cpu(), out)
    backend.ops.cache_write(mine, backend.put(places), backend.put(records))
    assert torch.equal(mine.cpu(), after)


def test_a_batch_of_no_keys_is_nothing(backend):
    tags, none = backend.put(empty_tags(2, 4, False)), torch.empty(0, dtype=torch.int64, device=backend.device)
    assert backend.ops.cache_find(tags, none).tolist() == []
    backend.ops.cache_use(tags, none, 1)
    assert [t.tolist() for t in backend.ops.cache_take(tags, none, 1)] == [[], []]
