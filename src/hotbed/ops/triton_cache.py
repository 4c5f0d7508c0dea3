# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""Find, read and replace the records of a cache in Triton; see `hotbed.ops.reference`.

`cache_take` must assign positions to the new keys of a set one after the other, but sets are independent. Therefore
keys are sorted by set with a stable sort, and one program processes all keys of a set. It keeps the ways in registers.
The result does not depend on the order of programs, and the host does not synchronize.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops import layout
from hotbed.ops.backend import launches
from hotbed.ops.layout import CacheTags
from hotbed.ops.triton_runtime import STRICT, TILE, ceil_div, power_of_two, rows_per_program

_BLOCK = 1024
"""Keys per program in kernels with one element per key."""
_FREE = tl.constexpr(layout.FREE)
_LATEST = tl.constexpr((1 << 63) - 1)


@triton.jit
def _set_of(key, sets):
    mixed = key.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    mixed ^= mixed >> 32
    return (mixed % sets.to(tl.uint64)).to(tl.int64)


@triton.jit(do_not_specialize=["sets", "total"])
def _find_kernel(out, keys, wanted, sets, total, WAYS: tl.constexpr, BLOCK_WAYS: tl.constexpr, BLOCK: tl.constexpr):
    """Write to ``out[i]`` the position of ``wanted[i]`` in the WAYS of its set, or −1."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < total
    key = tl.load(wanted + i, mask=live, other=0)
    first = _set_of(key, sets) * WAYS
    way = tl.arange(0, BLOCK_WAYS)
    there = tl.load(keys + first[:, None] + way[None, :], mask=live[:, None] & (way < WAYS)[None, :], other=_FREE)
    found = tl.min(tl.where(there == key[:, None], way[None, :], BLOCK_WAYS), axis=1)
    tl.store(out + i, tl.where(found < BLOCK_WAYS, first + found, -1), mask=live)


def cache_find(tags: CacheTags, wanted: Tensor) -> Tensor:
    """Find the position of each wanted key, see `hotbed.ops.reference.cache_find`."""
    launches["triton.cache_find"] += 1
    out = torch.empty_like(wanted)
    if len(wanted):
        block_ways = power_of_two(tags.ways)
        block = rows_per_program(block_ways, TILE // 2)
        with torch.cuda.device_of(wanted):
            _find_kernel[(ceil_div(len(wanted), block),)](
                out,
                tags.keys,
                wanted,
                tags.sets,
                len(wanted),
                WAYS=tags.ways,
                BLOCK_WAYS=block_ways,
                BLOCK=block,
                **STRICT,
            )
    return out


@triton.jit(do_not_specialize=["now", "total"])
def _use_kernel(times, counts, places, now, total, BLOCK: tl.constexpr):
    """Compute ``times[places[i]] = now`` and ``counts[places[i]] += 1``. The order of integer sums does not matter."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # Triton 3.6 fails if one mask serves the load of an index and an access at it, so the loaded index is the mask.
    place = tl.load(places + i, mask=i < total, other=-1)
    tl.store(times + place, place * 0 + now, mask=place >= 0)
    tl.atomic_add(counts + place, place * 0 + 1, mask=place >= 0, sem="relaxed")


def cache_use(tags: CacheTags, places: Tensor, now: int) -> None:
    """Record the use of positions, see `hotbed.ops.reference.cache_use`."""
    launches["triton.cache_use"] += 1
    if len(places):
        with torch.cuda.device_of(places):
            _use_kernel[(ceil_div(len(places), _BLOCK),)](
                tags.times, tags.counts, places, now, len(places), BLOCK=_BLOCK, **STRICT
            )


@triton.jit(do_not_specialize=["sets", "total"])
def _sets_kernel(out, wanted, sets, total, BLOCK: tl.constexpr):
    """Write the set of ``wanted[i]`` to ``out[i]``. `FREE` gets an extra last set."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(wanted + i, mask=i < total, other=0)
    tl.store(out + i, tl.where(key == _FREE, sets, _set_of(key, sets)), mask=i < total)


@triton.jit(do_not_specialize=["sets", "now", "total"])
def _take_kernel(
    out,  # [n]
    evicted,  # [n]
    keys,  # [sets · WAYS], as times and counts
    times,
    counts,
    wanted,  # [n]
    of_set,  # [n] set of each wanted key, ascending
    order,  # [n] index of the wanted key
    sets,
    now,
    total,  # n
    WAYS: tl.constexpr,
    BLOCK_WAYS: tl.constexpr,
    BY_COUNT: tl.constexpr,
):
    """Assign positions to all keys of one set. Only the program at the first key of a set has work.

    For example, set 0 of two ways has key 4, used at time 1, and a free position. Keys 6 and 8 are wanted at time 3::

        keys [−1, 4], times [0, 1]   →   keys [6, 8], times [3, 3], out [0, 1], evicted [−1, 4]
    """
    at = tl.program_id(0).to(tl.int64)
    mine = tl.load(of_set + at)
    if mine == sets:
        tl.store(out + tl.load(order + at), -1)
        tl.store(evicted + tl.load(order + at), _FREE)
    elif tl.load(of_set + at - 1, mask=at > 0, other=-1) != mine:
        way = tl.arange(0, BLOCK_WAYS)
        place = mine * WAYS + way
        live = way < WAYS
        key = tl.load(keys + place, mask=live, other=0)
        time = tl.load(times + place, mask=live, other=0)
        count = tl.load(counts + place, mask=live, other=0)
        following = mine
        while following == mine:
            i = tl.load(order + at)
            free = live & (key == _FREE)
            may = free | (live & (time < now))
            if BY_COUNT:
                # The count decides first. A free position comes before all others.
                often = tl.where(may, tl.where(free, -1, count), _LATEST)
                may &= often == tl.min(often, axis=0)
            age = tl.where(may, tl.where(free, -1, time), _LATEST)
            best = tl.min(tl.where(may & (age == tl.min(age, axis=0)), way, BLOCK_WAYS), axis=0)
            taken = way == best
            tl.store(out + i, tl.where(best < WAYS, mine * WAYS + best, -1))
            tl.store(evicted + i, tl.sum(tl.where(taken, key, 0), axis=0) + tl.where(best < WAYS, 0, _FREE))
            key = tl.where(taken, tl.load(wanted + i), key)
            time = tl.where(taken, now, time)
            count = tl.where(taken, 1, count)
            at += 1
            following = tl.load(of_set + at, mask=at < total, other=-1)
        tl.store(keys + place, key, mask=live)
        tl.store(times + place, time, mask=live)
        tl.store(counts + place, count, mask=live)


def cache_take(tags: CacheTags, wanted: Tensor, now: int) -> tuple[Tensor, Tensor]:
    """Assign positions to new keys, see `hotbed.ops.reference.cache_take`."""
    launches["triton.cache_take"] += 1
    places, evicted, of_set = (torch.empty_like(wanted) for _ in range(3))
    total = len(wanted)
    if total:
        with torch.cuda.device_of(wanted):
            _sets_kernel[(ceil_div(total, _BLOCK),)](of_set, wanted, tags.sets, total, BLOCK=_BLOCK, **STRICT)
            of_set, order = torch.sort(of_set, stable=True)
            _take_kernel[(total,)](
                places,
                evicted,
                tags.keys,
                tags.times,
                tags.counts,
                wanted,
                of_set,
                order,
                tags.sets,
                now,
                total,
                WAYS=tags.ways,
                BLOCK_WAYS=power_of_two(tags.ways),
                BY_COUNT=tags.by_count,
                num_warps=1,
                **STRICT,
            )
    return places, evicted


@triton.jit(do_not_specialize=["total"])
def _copy_kernel(
    to,  # [·, ≥ WORDS] int32
    source,
    places,  # [n]
    total,  # n
    SLAB_WORDS: tl.constexpr,  # words per row of the slab
    ROW_WORDS: tl.constexpr,  # words per row of the other tensor
    WORDS: tl.constexpr,  # the smaller of both
    BLOCK_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    WRITE: tl.constexpr,
):
    """Copy ``to[i] = source[places[i]]``, or with WRITE ``to[places[i]] = source[i]``. Position −1 is skipped."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + i, mask=i < total, other=-1)
    word = tl.program_id(1) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    mask = (place >= 0)[:, None] & (word < WORDS)[None, :]
    at, slab = i[:, None] * ROW_WORDS + word[None, :], place[:, None] * SLAB_WORDS + word[None, :]
    if WRITE:
        tl.store(to + slab, tl.load(source + at, mask=mask), mask=mask)
    else:
        tl.store(to + at, tl.load(source + slab, mask=mask), mask=mask)


def _copy(to: Tensor, source: Tensor, places: Tensor, *, write: bool) -> None:
    slab, rows = (to, source) if write else (source, to)
    slab_words, row_words = slab.shape[1] // 4, rows.shape[1] // 4
    words = min(slab_words, row_words)
    block_words = min(power_of_two(words), TILE)
    block = rows_per_program(block_words, TILE)
    if len(places):
        with torch.cuda.device_of(to):
            _copy_kernel[(ceil_div(len(places), block), ceil_div(words, block_words))](
                to.view(torch.int32),
                source.view(torch.int32),
                places,
                len(places),
                SLAB_WORDS=slab_words,
                ROW_WORDS=row_words,
                WORDS=words,
                BLOCK_WORDS=block_words,
                BLOCK=block,
                WRITE=write,
                **STRICT,
            )


def cache_read(slab: Tensor, places: Tensor, out: Tensor) -> None:
    """Copy records out of a cache, see `hotbed.ops.reference.cache_read`."""
    launches["triton.cache_read"] += 1
    _copy(out, slab, places, write=False)


def cache_write(slab: Tensor, places: Tensor, records: Tensor) -> None:
    """Copy records into a cache, see `hotbed.ops.reference.cache_write`."""
    launches["triton.cache_write"] += 1
    _copy(slab, records, places, write=True)
