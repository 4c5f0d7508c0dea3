"""Define the operations of a set-associative cache, in plain PyTorch.

Everything is integer arithmetic, so all backends agree to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.layout import FREE, CacheTags

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""2⁶⁴ over the golden ratio, as an int64."""
_LOW = 0xFFFFFFFF


def sets_of(keys: Tensor, sets: int) -> Tensor:
    """Set of each key ``[n]``: the product with `_GOLDEN`, its upper half mixed into the lower, modulo the sets.

    Products wrap at 64 bits and the result counts as unsigned; ``sets`` is below 2³¹.
    """
    mixed = keys * _GOLDEN
    mixed = mixed ^ ((mixed >> 32) & _LOW)
    # torch has no unsigned division: halves below 2³² are divided one after the other.
    high, low = (mixed >> 32) & _LOW, mixed & _LOW
    return (high % sets * ((1 << 32) % sets) + low) % sets


def cache_find(tags: CacheTags, wanted: Tensor) -> Tensor:
    """Place of each wanted key ``[n]`` int64, −1 where it is not in the cache."""
    launches["reference.cache_find"] += 1
    first = sets_of(wanted, tags.sets) * tags.ways
    at = first[:, None] + torch.arange(tags.ways, device=wanted.device)
    here = tags.keys[at] == wanted[:, None]
    return torch.where(here.any(1), first + here.int().argmax(1), -1)


def cache_use(tags: CacheTags, places: Tensor, now: int) -> None:
    """Note that these places ``[n]`` are used at the time ``now``, as often as they are listed; −1 is none."""
    launches["reference.cache_use"] += 1
    places = places[places >= 0]
    tags.times[places] = now
    tags.counts.index_add_(0, places, torch.ones_like(places))


def cache_take(tags: CacheTags, wanted: Tensor, now: int) -> tuple[Tensor, Tensor]:
    """Assign a place to each of these distinct keys ``[n]``, one after the other, and count one use at time ``now``.

    None of the keys is in the cache, and no time in ``tags`` is later than ``now``. ``tags`` is overwritten. The place
    is the first free place of the key's set, else the place of the key to evict by ``tags.by_count`` (ties: the first).
    A key that is used now is never evicted. `FREE` in ``wanted`` is no key. Return the place of each key ``[n]``, −1
    if there is none, and the key that it replaces, or `FREE`.
    """
    launches["reference.cache_take"] += 1
    places, evicted = torch.full_like(wanted, -1), torch.full_like(wanted, FREE)
    for i, (key, of) in enumerate(zip(wanted.tolist(), sets_of(wanted, tags.sets).tolist(), strict=True)):
        ranked: list[tuple[int, int, int]] = []
        if key == FREE:
            continue
        for at in range(of * tags.ways, (of + 1) * tags.ways):
            time, count = int(tags.times[at]), int(tags.counts[at])
            if tags.keys[at] == FREE:
                ranked.append((-1, -1, at))
            elif time < now:
                ranked.append((count if tags.by_count else 0, time, at))
        if ranked:
            place = min(ranked)[2]
            places[i], evicted[i] = place, tags.keys[place]
            tags.keys[place], tags.times[place], tags.counts[place] = key, now, 1
    return places, evicted


def cache_read(slab: Tensor, places: Tensor, out: Tensor) -> None:
    """Copy the records ``slab[places]`` to ``out [n, bytes]`` uint8; rows of which the place is −1 stay.

    Where rows on one side are longer, here and in `cache_write`, it is about as many of their first bytes.
    """
    launches["reference.cache_read"] += 1
    here = places >= 0
    size = min(slab.shape[1], out.shape[1])
    out[here, :size] = slab[places[here], :size]


def cache_write(slab: Tensor, places: Tensor, records: Tensor) -> None:
    """Copy records ``[n, bytes]`` uint8 to ``slab[places]``, distinct places; those of place −1 nowhere."""
    launches["reference.cache_write"] += 1
    here = places >= 0
    size = min(slab.shape[1], records.shape[1])
    slab[places[here], :size] = records[here, :size]
